"""Lengths of time as people say them: days, hours, minutes, seconds; and how several reasons read as one."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from datetime import timedelta

from ..errors import ConfigError
from .checks import positive_int, positive_number

__all__ = ["all_reasons", "any_reason", "in_units", "in_words", "period_s", "steps_or_period_s"]

_UNITS_S = {"days": 86_400, "hours": 3_600, "minutes": 60, "seconds": 1}


def period_s(call: str, given: timedelta | None, units: Mapping[str, float | None]) -> float:
    """The one length of time that a call like ``call(days=1, hours=12)`` or ``call(timedelta(…))`` says, in seconds.

    Raises:
        ConfigError: it says none or both, or anything that is not finite and above 0.
    """
    said = {name: value for name, value in units.items() if value is not None}
    if (given is None) == (not said):
        raise ConfigError(f"{call} takes one time: {call}(hours=6), or a timedelta.")
    if given is None:
        total_s = sum(positive_number(value, f"{call}({name}=…)") * _UNITS_S[name] for name, value in said.items())
    elif isinstance(given, timedelta):
        total_s = given.total_seconds()
    else:
        raise ConfigError(f"{call} takes a time such as {call}(hours=6), not {given!r}.", value=given)
    return positive_number(total_s, f"{call}: its time in seconds")


def steps_or_period_s(call: str, steps: int | timedelta | None, units: Mapping[str, float | None]) -> tuple[int, float]:
    """The steps or the seconds of a call that takes one of both; the other is 0.

    Raises:
        ConfigError: nothing, both, or a number that is not above 0.
    """
    timed = any(value is not None for value in units.values())
    if (steps is None) == (not timed):
        raise ConfigError(
            f"{call} takes either steps or a time: {call}(500) or {call}(minutes=20). For both, join them: "
            f"{call}(500) | {call}(minutes=20)."
        )
    if steps is None or isinstance(steps, timedelta):
        return 0, period_s(call, steps, units)
    return positive_int(steps, f"{call}(steps)"), 0.0


def in_units(seconds: float) -> tuple[str, int | float]:
    """The largest unit in which this is a whole number: 1200 -> ("minutes", 20)."""
    for unit, unit_s in _UNITS_S.items():
        if seconds % unit_s == 0:
            return unit, int(seconds // unit_s)
    return "seconds", seconds


def in_words(amount: float, unit: str) -> str:
    """``20 minutes``, ``1 step``."""
    return f"{amount} {unit.removesuffix('s') if amount == 1 else unit}"


def any_reason(reasons: Iterable[str]) -> str:
    """Reasons of which each would do, once each."""
    return "; ".join(dict.fromkeys(reasons))


def all_reasons(reasons: Iterable[str]) -> str:
    """Reasons that had to come together, once each."""
    return " and ".join(f"({reason})" if "; " in reason else reason for reason in dict.fromkeys(reasons))
