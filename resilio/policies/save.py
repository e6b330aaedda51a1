"""When a save is due, and why.

All ranks must come to the same answer, so `reason` may depend only on its `SaveContext`, which the ranks agreed on.
Clocks differ between hosts. A policy that looks at time therefore answers in two steps: each rank asks `time_due` of
its own clock, the manager agrees on one flag (due if any rank says so, in the vote it holds anyway), and `reason` sees
that flag. A policy holds no collective and no state.

The save at the end of training is no policy: the manager does it whatever the policy says.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from datetime import timedelta

from ..errors import ConfigError
from .checks import positive_int, positive_number

__all__ = ["SaveContext", "SavePolicy", "save_every"]

_UNITS_S = (("hours", 3600), ("minutes", 60), ("seconds", 1))


@dataclass(frozen=True)
class SaveContext:
    """All a save policy may know, the same on every rank.

    Attributes:
        step: optimizer steps completed.
        last_saved_step: step of the last save of this manager, or of the checkpoint it resumed from; None if neither.
        time_due: some rank's `SavePolicy.time_due` said yes.
        last: this is the last step of the run.
        signalled: names of the signals that any rank received since the last step, e.g. ``SIGTERM``.
    """

    step: int
    last_saved_step: int | None = None
    time_due: bool = False
    last: bool = False
    signalled: frozenset[str] = frozenset()


class SavePolicy(ABC):
    """Decides whether a save is due. Frozen; prints as its source; `a | b` is due when either is.

    Your own is a frozen dataclass with a `reason`; one that looks at time has `needs_clock` and `time_due` too.
    """

    @property
    def needs_clock(self) -> bool:
        """Whether `time_due` must be asked and agreed on before `reason`."""
        return False

    def time_due(self, now_s: float, last_save_s: float) -> bool:
        """Whether this rank's clock says that a save is due.

        Args:
            now_s: this rank's monotonic clock.
            last_save_s: the same clock when the last save began; when the manager began, if there was none.
        """
        return False

    @abstractmethod
    def reason(self, context: SaveContext) -> str | None:
        """Why a save is due at this step, in a few words for people; None if none is due.

        Ranks: all, with equal contexts; the answer must be a function of the context alone.
        """

    def __or__(self, other: SavePolicy) -> SavePolicy:
        if not isinstance(other, SavePolicy):
            return NotImplemented
        return _AnySave(_parts(self) + _parts(other))


def save_every(
    steps: int | timedelta | None = None,
    *,
    hours: float | None = None,
    minutes: float | None = None,
    seconds: float | None = None,
) -> SavePolicy:
    """Save at every multiple of `steps`, or when so much time has passed since the last save.

    Say either steps or time (`hours`, `minutes` and `seconds` add up; a `timedelta` is time); for both, join two with
    `|`: ``save_every(500) | save_every(minutes=20)``. Time is looked at once a step: a save waits for the step to end.

    Raises:
        ConfigError: nothing, both, or a number that is not above 0.
    """
    times = {
        name: value
        for name, value in zip(("hours", "minutes", "seconds"), (hours, minutes, seconds), strict=True)
        if value is not None
    }
    if (steps is None) == (not times):
        raise ConfigError(
            "save_every takes either steps or a time: save_every(500) or save_every(minutes=20). For both, join them: "
            "save_every(500) | save_every(minutes=20)."
        )
    if isinstance(steps, timedelta):
        return _EveryTime(positive_number(steps.total_seconds(), "save_every(timedelta): its seconds"))
    if steps is not None:
        return _EverySteps(positive_int(steps, "save_every(steps)"))
    units_s = dict(_UNITS_S)
    return _EveryTime(sum(positive_number(times[name], f"save_every({name}=…)") * units_s[name] for name in times))


@dataclass(frozen=True, repr=False)
class _EverySteps(SavePolicy):
    steps: int

    def reason(self, context: SaveContext) -> str | None:
        return f"every {self.steps} steps" if context.step % self.steps == 0 else None

    def __repr__(self) -> str:
        return f"save_every({self.steps})"


@dataclass(frozen=True, repr=False)
class _EveryTime(SavePolicy):
    seconds: float

    @property
    def needs_clock(self) -> bool:
        return True

    def time_due(self, now_s: float, last_save_s: float) -> bool:
        return now_s - last_save_s >= self.seconds

    def reason(self, context: SaveContext) -> str | None:
        unit, amount = _in_units(self.seconds)
        return f"every {amount} {unit}" if context.time_due else None

    def __repr__(self) -> str:
        unit, amount = _in_units(self.seconds)
        return f"save_every({unit}={amount})"


@dataclass(frozen=True, repr=False)
class _AnySave(SavePolicy):
    policies: tuple[SavePolicy, ...]

    @property
    def needs_clock(self) -> bool:
        return any(policy.needs_clock for policy in self.policies)

    def time_due(self, now_s: float, last_save_s: float) -> bool:
        return any(policy.time_due(now_s, last_save_s) for policy in self.policies)

    def reason(self, context: SaveContext) -> str | None:
        # One flag is agreed for all times. All count from the last save, so only the shortest is sure to be due.
        shortest = min((policy.seconds for policy in self.policies if isinstance(policy, _EveryTime)), default=0.0)
        speakers = [p for p in self.policies if not isinstance(p, _EveryTime) or p.seconds == shortest]
        found = [reason for policy in speakers if (reason := policy.reason(context)) is not None]
        return "; ".join(dict.fromkeys(found)) or None

    def __repr__(self) -> str:
        return " | ".join(map(repr, self.policies))


def _parts(policy: SavePolicy) -> tuple[SavePolicy, ...]:
    return policy.policies if isinstance(policy, _AnySave) else (policy,)


def _in_units(seconds: float) -> tuple[str, int | float]:
    """The largest unit in which this is a whole number: 1200 -> ("minutes", 20)."""
    for unit, unit_s in _UNITS_S:
        if seconds % unit_s == 0:
            return unit, int(seconds // unit_s)
    return "seconds", seconds
