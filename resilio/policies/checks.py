"""What a policy's numbers must be, checked when it is made and not when it first matters, hours later."""

from __future__ import annotations

import math
from typing import Any

from ..errors import ConfigError

__all__ = ["positive_int", "positive_number"]


def positive_int(value: Any, what: str) -> int:
    """`value` if it is an int of at least 1.

    Args:
        value: what the caller gave.
        what: how the call names it, for the error, e.g. ``keep_last(n)``.

    Raises:
        ConfigError: it is a bool, a float (even a whole one) or anything else, or less than 1.
    """
    if isinstance(value, bool) or not isinstance(value, int):
        raise ConfigError(f"{what} takes a whole number, not {value!r} ({type(value).__name__}).", value=value)
    if value < 1:
        raise ConfigError(f"{what} must be at least 1, not {value!r}.", value=value)
    return value


def positive_number(value: Any, what: str) -> float:
    """`value` as a float if it is a finite number above 0.

    Raises:
        ConfigError: it is a bool or no number, or not finite, or not above 0.
    """
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise ConfigError(f"{what} takes a number, not {value!r} ({type(value).__name__}).", value=value)
    if not math.isfinite(value) or value <= 0:
        raise ConfigError(f"{what} must be finite and above 0, not {value!r}.", value=value)
    return float(value)
