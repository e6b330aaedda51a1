"""Contenders by turns: who follows whom changes from round to round, and the first round only warms up."""

from __future__ import annotations

import gc
from collections.abc import Callable, Mapping
from time import process_time
from typing import TypeVar

from resilio.clock import SystemClock

__all__ = ["Times", "Turns", "by_turns"]

_clock = SystemClock()
_T = TypeVar("_T")


class Times:
    """Seconds by name, an entry for each round."""

    def __init__(self) -> None:
        self.wall: dict[str, list[float]] = {}
        self.cpu: dict[str, list[float]] = {}

    def time(self, name: str, act: Callable[[], _T]) -> _T:
        """Time one call, by the clock and in seconds that this process computed, all threads together."""
        gc.collect()
        cpu_s, wall_s = process_time(), _clock.monotonic_s()
        result = act()
        self.add(name, _clock.monotonic_s() - wall_s, process_time() - cpu_s)
        return result

    def add(self, name: str, wall_s: float, cpu_s: float = 0.0) -> None:
        """Note one call."""
        self.wall.setdefault(name, []).append(wall_s)
        self.cpu.setdefault(name, []).append(cpu_s)

    def drop_first(self) -> None:
        """Forget the round that warmed up."""
        for times in (*self.wall.values(), *self.cpu.values()):
            del times[0]

    def of(self, *names: str) -> dict[str, list[float]]:
        """Those of these names that took part."""
        return {name: self.wall[name] for name in names if name in self.wall}


class Turns:
    """Who takes part, and who had to leave.

    Attributes:
        absent: name -> why; only those that may fail.
    """

    def __init__(self, turns: Mapping[str, Callable[[], None]], may_fail: Mapping[str, str] | None = None) -> None:
        self._turns = dict(turns)
        self._may_fail = may_fail or {}
        self.absent: dict[str, str] = {}

    def run(self, rounds: int, before: Callable[[], None] | None = None) -> None:
        """`rounds` measured ones after one that warms up; whoever may fail does so in that one, or fails the run."""
        order = list(self._turns)
        for number in range(rounds + 1):
            if before is not None:
                before()
            for name in order:
                if name in self.absent:
                    continue
                try:
                    self._turns[name]()
                except Exception as error:
                    if number or name not in self._may_fail:
                        raise
                    self.absent[name] = f"failed: {type(error).__name__}: {error}".splitlines()[0][:200]
            order.reverse()


def by_turns(rounds: int, acts: Mapping[str, Callable[[], None]]) -> Times:
    """Time each of `acts` in each round."""
    times = Times()
    Turns({name: lambda name=name, act=act: times.time(name, act) for name, act in acts.items()}).run(rounds)  # type: ignore[misc]
    times.drop_first()
    return times
