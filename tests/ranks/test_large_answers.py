"""What is too large to leave in a store goes through a group, and a rank missing from that is named as well."""

from __future__ import annotations

import time
from typing import Any

import pytest

from resilio.errors import RanksLostError
from resilio.ranks import Ranks
from resilio.testing.worlds import run_world

LARGE = 3 << 20  # bytes; a store is asked to hold a third of that


def passes_on(rank: int, world: int) -> tuple[list[int], list[bool]]:
    ranks = Ranks(60)
    left: list[bool] = []  # whether the answer was left in the store
    try:
        assert ranks.exchange is not None
        meet = ranks.exchange.meet

        def seen(*args: Any, **how: Any) -> Any:
            answer = meet(*args, **how)
            left.append(answer is not None)
            return answer

        ranks.exchange.meet = seen  # type: ignore[method-assign]
        sizes = [len(ranks.from_coordinator(lambda n=n: bytes(n), what="testing")) for n in (1, LARGE, 2)]
        return sizes, left
    finally:
        ranks.close()


def test_small_and_large_answers_reach_all_ranks() -> None:
    assert run_world(passes_on, 3) == [([1, LARGE, 2], [True, False, True])] * 3


def announces_only(rank: int, world: int) -> tuple[list[int], str, bool]:
    ranks = Ranks(1.5)
    try:
        assert ranks.exchange is not None
        if rank == 0:
            ranks.exchange.meet("testing", None, lambda _: None)  # what says that the answer is a large one
            time.sleep(4)
            return [], "", ranks.broken
        with pytest.raises(RanksLostError) as caught:
            ranks.from_coordinator(lambda: b"", what="testing")
        return caught.value.ranks, caught.value.phase, ranks.broken
    finally:
        ranks.close()


def test_a_rank_that_is_missing_when_a_large_answer_is_passed_on_is_named() -> None:
    _, second = run_world(announces_only, 2)
    assert second == ([0], "passing on what rank 0 found", True)
