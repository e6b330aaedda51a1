"""The only place that asks what time it is, so that tests can say it instead."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Protocol

__all__ = ["Clock", "FakeClock", "SystemClock"]


class Clock(Protocol):
    """What resilio needs of a clock."""

    def wall_s(self) -> float:
        """Seconds since the Unix epoch; may jump. For records people read, never for an order."""

    def monotonic_s(self) -> float:
        """Seconds since some moment; never jumps back. For durations."""

    def sleep(self, seconds: float) -> None:
        """Wait."""


class SystemClock:
    """The machine's clock."""

    def wall_s(self) -> float:
        """Seconds since the Unix epoch."""
        return time.time()

    def monotonic_s(self) -> float:
        """Seconds since some moment."""
        return time.monotonic()

    def sleep(self, seconds: float) -> None:
        """Wait."""
        time.sleep(seconds)


@dataclass
class FakeClock:
    """A clock that moves when told to; `sleep` moves it and returns at once."""

    now_s: float = 1_700_000_000.0

    def wall_s(self) -> float:
        """The time it was told."""
        return self.now_s

    def monotonic_s(self) -> float:
        """The time it was told."""
        return self.now_s

    def sleep(self, seconds: float) -> None:
        """Move on by `seconds`."""
        self.now_s += seconds

    def advance(self, seconds: float) -> None:
        """Move on by `seconds`."""
        self.now_s += seconds
