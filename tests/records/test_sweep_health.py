"""Whatever policies say, the newest checkpoint to go on from lives where newer ones are not healthy."""

from __future__ import annotations

from collections.abc import Callable

from hypothesis import given, settings
from hypothesis import strategies as st
from records.fake_store import FakeStore, manager, save, steps

from resilio.clock import FakeClock
from resilio.records import keys
from resilio.records.catalog import discover
from resilio.records.fates import OFF_LINEAGE_S, explain
from resilio.records.protocol import RunWriter
from resilio.records.sweep import SweepReport, sweep
from resilio.types import CheckpointInfo, CheckpointRef

BAD = 12


def last(n: int) -> Callable[[list[CheckpointInfo]], dict[CheckpointRef, str]]:
    return lambda infos: {info.ref: f"one of the last {n}" for info in infos[-n:]}


def swept(store: FakeStore, n: int = 1) -> SweepReport:
    return sweep(store, last(n), generation=discover(store).newest_generation)


def test_the_last_healthy_one_outlives_any_number_of_newer_ones_and_goes_when_there_is_another():
    store = FakeStore()
    writer = manager(store)
    for step in range(1, 4):
        save(store, writer, step, non_finite=0)
    for step in range(4, 9):
        save(store, writer, step, non_finite=BAD)
        report = swept(store, 2)
        assert 3 in steps(discover(store))
    assert report.kept[CheckpointRef(1, 3)] == "newest that is healthy"
    assert steps(discover(store)) == [3, 7, 8]
    assert {fate.ref.step: fate.why for fate in explain(store, last(2)).checkpoints}[3] == "newest that is healthy"
    save(store, writer, 9, non_finite=0)
    swept(store, 2)
    assert steps(discover(store)) == [8, 9]


def test_one_whose_values_were_never_counted_counts_as_healthy():
    store = FakeStore()
    writer = manager(store)
    for step, count in ((1, 0), (2, None), (3, BAD), (4, BAD)):
        save(store, writer, step, non_finite=count)
    swept(store)
    assert steps(discover(store)) == [2, 4]


def test_newest_not_quarantined_and_newest_healthy_each_live_and_so_does_the_one_that_is_both():
    store = FakeStore()
    writer = manager(store)
    for step, count in ((1, 0), (2, 0), (3, 0), (4, BAD), (5, BAD)):
        save(store, writer, step, non_finite=count)
    for bad in (3, 5):
        store.put(f"quarantine/{keys.stem(CheckpointRef(1, bad))}.json", b"{}")
    kept = swept(store).kept
    assert {ref.step for ref in kept} == {2, 4, 5}
    assert kept[CheckpointRef(1, 2)] == "newest that is healthy"
    assert "newest that is not quarantined" in kept[CheckpointRef(1, 4)]
    assert "newest of the lineage" in kept[CheckpointRef(1, 5)]


def test_a_branch_of_unhealthy_ones_never_costs_what_it_left_behind():
    clock = FakeClock()
    store = FakeStore(clock=clock)
    save(store, manager(store), 1, non_finite=0)
    fresh = RunWriter(store, clock=clock)
    fresh.fresh(discover(store))
    for step in (1, 2, 3):
        save(store, fresh, step, non_finite=BAD)
        clock.advance(OFF_LINEAGE_S)
    save(store, fresh, 4, non_finite=BAD)
    assert "has 0 sound checkpoints" in swept(store, 3).kept[CheckpointRef(1, 1)]
    for step in (5, 6):
        save(store, fresh, step, non_finite=0)
    assert CheckpointRef(1, 1) in swept(store, 3).deleted


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.tuples(st.sampled_from([0, None, BAD, BAD]), st.booleans(), st.integers(0, 3)), min_size=1, max_size=8)
)
def test_what_training_would_go_back_to_is_there_after_every_sweep(saves: list[tuple[int | None, bool, int]]):
    store = FakeStore()
    writer = manager(store)
    fit: list[int] = []
    for step, (count, quarantined, n) in enumerate(saves, 1):
        ref = save(store, writer, step, world=1, rows=2, non_finite=count)
        if quarantined:
            store.put(f"quarantine/{keys.stem(ref)}.json", b"{}")
        elif count != BAD:
            fit.append(step)
        sweep(store, last(n) if n else lambda infos: {}, generation=1)
        assert set(fit[-1:]) <= set(steps(discover(store)))
