"""What a policy's numbers must be, checked when it is made and not when it first matters, hours later."""

from __future__ import annotations

import sys
from typing import Any

from ..errors import ConfigError

__all__ = ["positive_int", "positive_number", "whole_number"]


def whole_number(value: Any, what: str, *, least: int) -> int:
    """`value` if it is an int of at least `least`.

    Args:
        value: what the caller gave.
        what: how the call names it, for the error, e.g. ``keep_last(n)``.
        least: the smallest that will do.

    Raises:
        ConfigError: it is a bool, a float (even a whole one) or anything else, or too small.
    """
    if isinstance(value, bool) or not isinstance(value, int):
        raise ConfigError(f"{what} takes a whole number, not {value!r} ({type(value).__name__}).", value=value)
    if value < least:
        raise ConfigError(f"{what} must be at least {least}, not {value!r}.", value=value)
    return value


def positive_int(value: Any, what: str) -> int:
    """`value` if it is an int of at least 1.

    Raises:
        ConfigError: it is a bool, a float (even a whole one) or anything else, or less than 1.
    """
    return whole_number(value, what, least=1)


def positive_number(value: Any, what: str) -> float:
    """`value` as a float if it is a finite number above 0.

    Raises:
        ConfigError: it is a bool or no number, or not finite, or not above 0.
    """
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise ConfigError(f"{what} takes a number, not {value!r} ({type(value).__name__}).", value=value)
    if not 0 < value <= sys.float_info.max:  # no nan, no infinity, no int that overflows
        raise ConfigError(f"{what} must be finite and above 0, not {value!r}.", value=value)
    return float(value)
