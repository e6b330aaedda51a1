"""Meetings of ranks: all values, one answer, a deadline that names the silent, and no step out of step afterwards."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from torch.distributed import HashStore

from resilio.errors import ConfigError, RanksDisagreeError, RanksLostError, ResilioError
from resilio.ranks.exchange import Exchange


class Ranks:
    """Threads that share a store, each with an exchange, as processes do."""

    def __init__(self, world: int, timeout_s: float) -> None:
        self.store = HashStore()
        self.exchanges = [Exchange(self.store, rank, world, timeout_s) for rank in range(world)]
        self.pool = ThreadPoolExecutor(world)

    def call(self, fn: Callable[[int, Exchange], Any], *ranks: int) -> list[Any]:
        """What `fn` returned or raised on each of `ranks` (all), by rank."""

        def one(rank: int) -> Any:
            try:
                return fn(rank, self.exchanges[rank])
            except Exception as error:
                return error

        return list(self.pool.map(one, ranks or range(len(self.exchanges))))


def meet(rank: int, exchange: Exchange) -> list[Any]:
    return exchange.meet("testing", rank * 10, list)


def test_all_get_what_rank_0_made_of_all_values() -> None:
    ranks = Ranks(3, 30)
    assert ranks.call(meet) == [[0, 10, 20]] * 3
    assert ranks.call(lambda rank, one: one.meet("sum", rank, sum)) == [3] * 3


def test_the_store_does_not_grow_with_the_number_of_meetings() -> None:
    ranks = Ranks(2, 30)
    for _ in range(5):
        ranks.call(meet)
    few = ranks.store.num_keys()
    for _ in range(50):
        ranks.call(meet)
    assert ranks.store.num_keys() == few


def test_what_the_judge_refuses_is_the_same_error_everywhere_and_the_next_meeting_is_in_step() -> None:
    def refuse(values: list[int]) -> None:
        raise ConfigError("no", values=values)

    ranks = Ranks(2, 30)
    errors = ranks.call(lambda rank, one: one.meet("testing", rank, refuse))
    assert [(type(error), str(error), error.values) for error in errors] == [(ConfigError, "no", [0, 1])] * 2
    assert ranks.call(meet) == [[0, 10]] * 2


def test_a_silent_rank_is_named_and_hears_of_it_when_it_comes() -> None:
    ranks = Ranks(3, 0.3)
    for error in ranks.call(meet, 0, 1):
        assert isinstance(error, RanksLostError) and error.ranks == [2] and error.phase == "testing"
        assert "testing: rank(s) 2 did not come within 0.3 s" in str(error)
    (late,) = ranks.call(meet, 2)
    assert isinstance(late, RanksLostError) and late.ranks == [2]
    assert ranks.call(meet) == [[0, 10, 20]] * 3


def test_rank_0_is_named_too_and_whoever_gave_up_is_not_gone_on_without() -> None:
    ranks = Ranks(2, 0.2)
    (error,) = ranks.call(meet, 1)
    assert isinstance(error, RanksLostError) and error.ranks == [0]
    (late,) = ranks.call(meet, 0)
    assert isinstance(late, RanksLostError) and late.ranks == [1] and "gave up" in str(late)
    assert ranks.call(meet) == [[0, 10]] * 2


def test_rank_0_that_comes_late_has_the_whole_time_for_the_others() -> None:
    ranks = Ranks(3, 2.0)
    began = threading.Event()

    def come(rank: int, exchange: Exchange) -> Any:
        if rank == 0:
            began.wait(10)
            time.sleep(1.0)
        elif rank == 1:
            began.set()
        else:
            began.wait(10)
            time.sleep(2.4)  # rank 1 waits for longer than its time, rank 0 does not
        return meet(rank, exchange)

    assert ranks.call(come) == [[0, 10, 20]] * 3


def test_ranks_at_different_calls_are_told_so() -> None:
    ranks = Ranks(2, 30)
    errors = ranks.call(lambda rank, one: one.meet(["saving", "restoring"][rank], None, list))
    assert {type(error) for error in errors} == {RanksDisagreeError}
    assert str(errors[0]).startswith("rank 0 is at 'saving', rank 1 at 'restoring'")


def test_whoever_leaves_is_not_waited_for() -> None:
    ranks = Ranks(2, 600)
    ranks.exchanges[1].leave("KeyboardInterrupt: ")
    (error,) = ranks.call(meet, 0)
    assert isinstance(error, RanksLostError) and error.ranks == [1]
    assert str(error) == "testing: rank 1 left (KeyboardInterrupt: )"


def test_ranks_that_missed_a_meeting_meet_again_by_its_name() -> None:
    ranks = Ranks(2, 0.2)
    ranks.call(lambda rank, one: one.meet("writing", None, list, name="attempt-1"), 0)
    ranks.call(lambda rank, one: one.meet("planning", None, list, name="attempt-1"), 0)  # one more than rank 1
    assert ranks.call(lambda rank, one: one.meet("writing", rank, list, name="attempt-2")) == [[0, 1]] * 2


def test_each_finds_out_who_is_absent() -> None:
    ranks = Ranks(3, 30)
    assert ranks.call(lambda rank, one: one.absent("vote 7", 0.2), 1, 2) == [[0], [0]]
    assert ranks.call(lambda rank, one: one.absent("vote 8", 30)) == [[]] * 3


def test_who_was_lost_is_forgotten_when_all_have_met_again() -> None:
    ranks = Ranks(2, 0.2)
    ranks.call(meet, 0)
    assert isinstance(ranks.exchanges[0].lost, RanksLostError)
    ranks.call(meet, 1)
    ranks.call(meet)
    assert [one.lost for one in ranks.exchanges] == [None, None]


def test_a_store_that_is_gone_is_an_error_of_ours() -> None:
    class Gone(HashStore):
        def set(self, *args: Any) -> None:
            raise RuntimeError("Broken pipe")

    exchange = Exchange(Gone(), 1, 2, 30)
    with pytest.raises(RanksLostError, match=r"testing: the store .* cannot be reached \(RuntimeError: Broken pipe\)"):
        meet(1, exchange)
    assert isinstance(exchange.lost, ResilioError)
    assert exchange.absent("vote 1", 1) == [0]


@pytest.mark.parametrize("hit", [0, 1])
def test_whoever_misses_a_meeting_is_named_there_and_in_step_afterwards(hit: int) -> None:
    ranks = Ranks(2, 600)
    told: list[Any] = ranks.call(
        lambda rank, one: one.miss("reading", KeyboardInterrupt()) if rank == hit else meet(rank, one)
    )
    assert told[hit] is None and isinstance(told[1 - hit], RanksLostError)
    assert told[1 - hit].ranks == [hit] and "was interrupted" in str(told[1 - hit])
    assert ranks.call(meet) == [[0, 10]] * 2
