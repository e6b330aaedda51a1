"""The explorer itself: it goes through all interleavings, and tells how it came to what it found."""

from __future__ import annotations

from collections.abc import Hashable, Iterable
from functools import partial
from typing import Any

from model.explorer import Explored, Program, System, explore

Shared = tuple[int, bool, int]  # a number, whether it is locked, how many have ended


class Counter:
    """Adds one to the number, by reading and writing it; `locks`: with nobody in between."""

    def __init__(self, name: str, locks: bool) -> None:
        self.name = name
        self.locks = locks

    def run(self) -> Program:
        while self.locks:
            taken = yield ("lock",)
            if taken:
                break
        read = yield ("read",)
        yield ("write", read + 1)
        yield ("end",)

    def state(self) -> Hashable:
        return None

    def view(self) -> Hashable:
        return None


def _apply(store: Shared, operation: tuple[Any, ...]) -> Iterable[tuple[Any, Shared]]:
    number, locked, ended = store
    kind, *given = operation
    if kind == "lock":
        return [(not locked, (number, True, ended))]
    if kind == "read":
        return [(number, store)]
    if kind == "write":
        return [(None, (given[0], locked, ended))]
    return [(None, (number, False, ended + 1))]


def _count(actors: int, locks: bool, limit: int = 100_000) -> Explored:
    return explore(
        System(
            store=(0, False, 0),
            actors=tuple(partial(Counter, name, locks) for name in "ABC"[:actors]),
            apply=_apply,
            happen=lambda store: [],
            check_store=lambda store: "no count is lost" if store[2] == actors != store[0] else None,
            check_view=lambda store, view: None,
            check_together=lambda views: None,
        ),
        limit,
    )


def test_a_lost_update_is_found_with_the_steps_that_lead_there() -> None:
    found = _count(2, locks=False)
    assert found.broken == "no count is lost"
    read = [i for i, step in enumerate(found.trace) if "read" in step]
    written = [i for i, step in enumerate(found.trace) if "write" in step]
    assert len(found.trace) == 6
    assert max(read) < min(written)


def test_with_a_lock_no_interleaving_loses_one() -> None:
    found = _count(3, locks=True)
    assert found.broken is None
    assert found.complete


def test_every_state_is_counted_once() -> None:
    """One process: before each of its three operations, and at its end."""
    assert _count(1, locks=False).states == 4


def test_a_bound_that_is_reached_is_told() -> None:
    found = _count(3, locks=True, limit=10)
    assert not found.complete
    assert found.broken is None
