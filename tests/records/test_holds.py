from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from itertools import count
from typing import Any

import pytest
from records.fake_store import Died, FakeStore, Interleaved, edited, forged, manager, save, steps

from resilio.clock import FakeClock
from resilio.errors import (
    AccessDeniedError,
    ConfigError,
    FormatError,
    NoCheckpointError,
    NotFoundError,
    OutOfSpaceError,
    TransientError,
)
from resilio.records import keys, schema
from resilio.records.catalog import discover
from resilio.records.holds import LEASE_TTL_S, Holds, lease, pin, pins, unpin
from resilio.records.manifest import load_manifest
from resilio.records.protocol import RunWriter
from resilio.records.sweep import SweepReport, sweep
from resilio.records.verify import verify_checkpoint
from resilio.types import CheckpointRef

ONE, TWO, THREE = CheckpointRef(1, 1), CheckpointRef(1, 2), CheckpointRef(1, 3)
DAY_S = 86_400.0


@pytest.fixture
def clock() -> FakeClock:
    return FakeClock()


@pytest.fixture
def store(clock: FakeClock) -> FakeStore:
    return FakeStore(clock=clock)


def filled(store: FakeStore, *at: int) -> RunWriter:
    writer = manager(store)
    for step in at:
        save(store, writer, step)
    return writer


def swept(store: FakeStore, **more: Any) -> SweepReport:
    """A sweep by the newest generation that keeps the newest only."""
    generation = discover(store).newest_generation
    return sweep(store, lambda infos: {infos[-1].ref: "newest"}, generation=generation, **more)


def under(store: FakeStore, prefix: str) -> list[str]:
    return [key for key in sorted(store.objects) if key.startswith(prefix)]


def whole(store: FakeStore, ref: CheckpointRef, data: bytes) -> bool:
    """Whether the checkpoint with this commit record is all there, whether the record itself is or not."""
    commit = schema.decode(data, schema.CommitRecord, "")
    try:
        load_manifest(store, commit).check_objects(store)
    except Exception:  # whatever is wrong with it
        return False
    return keys.parse_attempt(commit.attempt) == ref


def deny(store: FakeStore, prefix: str, error: Exception) -> None:
    def before(verb: str, key: str) -> None:
        if verb in ("put", "delete") and key.startswith(prefix):
            raise error

    store.before = before


# --- pins -----------------------------------------------------------------------------------------------------------


def test_what_is_pinned_lives_until_it_is_unpinned(store: FakeStore, clock: FakeClock):
    filled(store, 1, 2, 3)
    record = pin(store, ONE, "the paper", clock)
    assert (record.because, record.time_s, record.step, record.generation) == ("the paper", clock.now_s, 1, 1)
    clock.advance(999 * DAY_S)
    assert swept(store).kept[ONE] == "pinned"
    assert steps(discover(store)) == [1, 3]
    assert [one.because for one in pins(store)] == ["the paper"]
    assert unpin(store, ONE) == 1
    assert pins(store) == []
    assert unpin(store, ONE) == 0
    swept(store)
    assert steps(discover(store)) == [3]


def test_a_pin_leaves_nothing_else_behind(store: FakeStore):
    filled(store, 1)
    before = dict(store.objects)
    pin(store, ONE, "x")
    assert [key[:20] for key in store.objects.keys() - before.keys()] == ["pins/000000001-g0000"]
    assert under(store, "leases/") == []


def test_several_pins_are_counted_and_go_together(store: FakeStore):
    filled(store, 1, 2)
    for ref, because in ((ONE, "a"), (ONE, "b"), (TWO, "c")):
        pin(store, ref, because)
    assert sorted(one.because for one in pins(store)) == ["a", "b", "c"]
    assert unpin(store, ONE) == 2
    assert [one.because for one in pins(store)] == ["c"]


def test_a_pin_says_why(store: FakeStore):
    filled(store, 1)
    with pytest.raises(ConfigError, match="why"):
        pin(store, ONE, " ")
    assert under(store, "pins/") == []


@pytest.mark.parametrize("hold", [lambda store, ref: pin(store, ref, "x"), lease])
def test_what_is_not_there_cannot_be_held(store: FakeStore, hold: Callable[..., Any]):
    filled(store, 1, 2)
    attempt = discover(store).read(ONE).attempt
    store.delete([f"{attempt}/manifest.json"])
    for ref in (ONE, CheckpointRef(1, 7)):
        with pytest.raises(NoCheckpointError, match="choose another"):
            hold(store, ref)
    store.objects["commits/000000002-g000001.json"] = b"{"
    with pytest.raises(FormatError):
        hold(store, TWO)
    assert under(store, "pins/") + under(store, "leases/") == []


def test_a_pin_holds_the_bytes_of_the_record_also_those_of_a_newer_release(store: FakeStore):
    filled(store, 1)
    key = keys.commit_key(ONE)
    store.objects[key] = edited(store.objects[key], b'{"format"', b'{"field_of_tomorrow":[1, 2],"format"')
    assert pin(store, ONE, "x").commit.encode() == store.objects[key]


def pinned_without_record(store: FakeStore) -> str:
    """Step 1 of three, its record swept while it was being pinned; the attempt."""
    filled(store, 1, 2, 3)
    attempt = discover(store).read(ONE).attempt
    pin(store, ONE, "the paper")
    store.delete([keys.commit_key(ONE)])
    return attempt


def test_a_pin_stands_in_for_a_record_that_is_gone(store: FakeStore):
    attempt = pinned_without_record(store)
    catalog = discover(store)
    assert catalog.commits == [TWO, THREE]
    assert catalog.find(1) == ONE
    assert catalog.read(ONE).attempt == attempt
    assert catalog.line_of(ONE) == []
    infos, damaged = discover(store).checkpoints()
    assert [(info.step, info.on_lineage) for info in infos] == [(1, False), (2, True), (3, True)]
    assert damaged == []
    assert verify_checkpoint(store, ONE) == []
    with lease(store, ONE) as hold:
        assert load_manifest(store, hold.commit).step == 1
    # a job that goes on from it begins a branch of its own
    save(store, manager(store, ONE), 5)
    assert steps(discover(store)) == [5]


def test_it_outlives_sweeps_of_all_generations_and_goes_when_it_is_unpinned(store: FakeStore):
    attempt = pinned_without_record(store)
    save(store, manager(store), 4)
    report = swept(store)
    assert report.kept[ONE] == "its commit record is gone; pinned"
    assert under(store, attempt)
    unpin(store, ONE)
    assert swept(store).attempts == [attempt]
    with pytest.raises(NoCheckpointError):
        discover(store).find(1)


def test_a_pin_stands_in_only_while_the_manifest_is_there(store: FakeStore):
    attempt = pinned_without_record(store)
    store.delete([f"{attempt}/manifest.json"])
    catalog = discover(store)
    with pytest.raises(NoCheckpointError):
        catalog.find(1)
    assert [info.step for info in catalog.checkpoints()[0]] == [2, 3]
    with pytest.raises(NoCheckpointError):
        lease(store, ONE)


def test_pins_are_looked_at_only_where_nothing_else_answers(store: FakeStore):
    pinned_without_record(store)
    store.log.clear()
    catalog = discover(store)
    catalog.find(2)
    catalog.read(TWO)
    assert not [key for _, key in store.log if key.startswith("pins/")]


UNREADABLE = {"format": 1, "step": 1, "generation": 1, "because": "x", "commit": "{}"}


@pytest.mark.parametrize("damage", [b"{", forged(UNREADABLE), b""], ids=["cut", "its-record", "empty"])
def test_a_pin_that_cannot_be_read_holds_and_is_passed_over(
    store: FakeStore, damage: bytes, caplog: pytest.LogCaptureFixture
):
    pinned_without_record(store)
    pin(store, TWO, "fine")
    store.objects[next(iter(under(store, "pins/000000001")))] = damage
    assert [one.because for one in pins(store)] == ["fine"]
    assert "pin passed over" in caplog.text
    catalog = discover(store)
    with pytest.raises(NotFoundError):
        catalog.read(ONE)
    save(store, manager(store), 4)
    assert swept(store).attempts == []


def test_a_pin_or_lease_that_may_not_be_read_holds_and_is_passed_over(store: FakeStore):
    pinned_without_record(store)
    pin(store, TWO, "fine")
    lease(store, THREE)
    denied = [under(store, "pins/000000001")[0], under(store, "leases/")[0]]

    def before(verb: str, key: str) -> None:
        if key in denied:
            raise AccessDeniedError("a link")

    store.before = before
    assert [one.because for one in pins(store)] == ["fine"]
    catalog = discover(store)
    assert catalog.pinned() == []
    with pytest.raises(NotFoundError):
        catalog.read(ONE)
    assert Holds(store, 9e9, FakeClock(9e9)).of(THREE) == "leased"
    save(store, manager(store), 4)
    assert swept(store).attempts == []


def test_a_pin_that_says_another_step_than_its_name_does_not_stand_in(store: FakeStore):
    pinned_without_record(store)
    key = under(store, "pins/000000001")[0]
    store.objects[key] = edited(store.objects[key], b'"step":1,', b'"step":2,')
    with pytest.raises(NotFoundError):
        discover(store).read(ONE)


def test_a_pin_that_could_not_be_leased_meanwhile_is_granted_only_if_the_record_is_still_there(store: FakeStore):
    filled(store, 1, 2)
    deny(store, "leases/", AccessDeniedError("no"))
    assert pin(store, TWO, "x")
    deny_leases = store.before

    def before(verb: str, key: str) -> None:
        deny_leases(verb, key)
        if verb == "put" and key.startswith("pins/"):
            store.objects.pop(keys.commit_key(ONE))

    store.before = before
    with pytest.raises(NoCheckpointError):
        pin(store, ONE, "x")
    assert under(store, "pins/000000001") == []


@pytest.mark.parametrize("error", [TransientError("reset"), AccessDeniedError("no"), KeyboardInterrupt()])
def test_a_pin_without_an_answer_keeps_its_lease_so_that_it_may_still_arrive(
    store: FakeStore, clock: FakeClock, error: BaseException
):
    """Whatever the answer was: one of its requests may be on its way, and what it pins must not be half deleted."""
    writer = filled(store, 1, 2)
    late = {}

    def before(verb: str, key: str) -> None:
        if verb == "put" and key.startswith("pins/"):
            raise error

    put = store.put

    def sent(key: str, data: bytes, **more: Any) -> Any:
        if key.startswith("pins/"):
            late[key] = bytes(data)
        return put(key, data, **more)

    store.before, store.put = before, sent  # type: ignore[method-assign]
    with pytest.raises(type(error)):
        pin(store, ONE, "x", clock)
    store.before = lambda verb, key: None
    attempt = discover(store).read(ONE).attempt
    assert swept(store).kept[ONE] == "leased"
    store.objects |= late
    clock.advance(LEASE_TTL_S + 1)
    save(store, writer, 3)
    assert swept(store).kept[ONE] == "pinned"
    assert under(store, f"{attempt}/manifest.json")


@pytest.mark.parametrize("knows", ["store", "wall"])
def test_a_pin_by_a_host_that_was_suspended_is_granted_only_if_the_record_is_still_there(clock: FakeClock, knows: str):
    """Its monotonic clock stood still meanwhile; the store's clock, or its own on the wall, went on."""

    class Suspended(FakeClock):
        def monotonic_s(self) -> float:
            return 0.0

    store = FakeStore(clock=clock if knows == "store" else None)
    own = Suspended()
    filled(store, 1, 2)

    def before(verb: str, key: str) -> None:
        if verb == "put" and key.startswith("pins/"):
            (clock if knows == "store" else own).advance(LEASE_TTL_S + 1)
            store.objects.pop(keys.commit_key(ONE))

    store.before = before
    with pytest.raises(NoCheckpointError):
        pin(store, ONE, "x", own)
    assert under(store, "pins/") == []


def test_a_pin_of_another_checkpoints_name_does_not_stand_in(store: FakeStore):
    pinned_without_record(store)
    pin(store, TWO, "x")
    store.objects[under(store, "pins/000000001")[0]] = store.objects[under(store, "pins/000000002")[0]]
    with pytest.raises(NotFoundError):
        discover(store).read(ONE)


# --- leases ---------------------------------------------------------------------------------------------------------


def test_what_is_leased_lives_until_it_is_released(store: FakeStore, clock: FakeClock):
    filled(store, 1, 2)
    with lease(store, ONE, clock, owner="eval") as hold:
        record = schema.decode(store.objects[under(store, "leases/")[0]], schema.LeaseRecord, "")
        assert (record.owner, record.ttl_s, record.time_s) == ("eval", LEASE_TTL_S, clock.now_s)
        assert hold.commit.step == 1
        assert swept(store).kept[ONE] == "leased"
    assert under(store, "leases/") == []
    hold.release()
    assert list(swept(store).deleted) == [ONE]


@pytest.mark.parametrize(("passed_s", "lives"), [(0.0, True), (99.0, True), (101.0, False)])
def test_the_lease_of_a_killed_reader_runs_out_by_the_stores_clock(
    store: FakeStore, clock: FakeClock, passed_s: float, lives: bool
):
    writer = filled(store, 1)
    lease(store, ONE, FakeClock(1e9), ttl_s=100)  # the reader's own clock is decades behind
    clock.advance(passed_s)
    save(store, writer, 2)
    swept(store, clock=FakeClock(3e9))  # and the sweeper's ahead
    assert (steps(discover(store)) == [1, 2]) == lives


def test_time_is_that_of_the_commit_just_made_not_of_the_sweeper(store: FakeStore, clock: FakeClock):
    filled(store, 1, 2)
    lease(store, ONE, clock, ttl_s=100)
    clock.advance(1000)
    assert swept(store, clock=clock).kept[ONE] == "leased"


@pytest.mark.parametrize(("passed_s", "lives"), [(99.0, True), (DAY_S, True), (DAY_S + 101, False)])
def test_where_the_store_tells_no_times_clocks_may_differ_by_a_day(passed_s: float, lives: bool):
    store, clock = FakeStore(), FakeClock()
    filled(store, 1, 2)
    lease(store, ONE, clock, ttl_s=100)
    clock.advance(passed_s)
    swept(store, clock=clock)
    assert (steps(discover(store)) == [1, 2]) == lives


def test_a_lease_that_vanishes_while_it_is_looked_at_holds_this_time(store: FakeStore):
    filled(store, 1, 2)
    hold = lease(store, ONE)

    def before(verb: str, key: str) -> None:
        if verb == "stat" and key.startswith("leases/"):
            store.objects.pop(key, None)

    store.before = before
    assert swept(store).kept[ONE] == "leased"
    hold.release()


def test_a_renewed_lease_holds_on(store: FakeStore, clock: FakeClock):
    writer = filled(store, 1)
    hold = lease(store, ONE, clock, ttl_s=100)
    for _ in range(5):
        assert not hold.due
        clock.advance(60)
        assert hold.due
        assert hold.sure
        hold.renew()
    save(store, writer, 2)
    assert swept(store).kept[ONE] == "leased"
    hold.release()
    assert under(store, "leases/") == []


def test_a_lease_renewed_in_time_goes_on_though_the_record_went(store: FakeStore, clock: FakeClock):
    """A sweep that saw it too late for the record has spared the data: the reader need not stop."""
    filled(store, 1, 2)
    hold = lease(store, ONE, clock, ttl_s=100)
    store.delete([keys.commit_key(ONE)])
    clock.advance(99)
    hold.renew()
    assert hold.held


@pytest.mark.parametrize("counts", ["both", "store", "reader"])
def test_a_lease_renewed_too_late_asks_again_and_says_if_the_checkpoint_is_gone(clock: FakeClock, counts: str):
    """A suspended host may not have counted the time; a store may not tell it."""
    store, own = FakeStore(clock=None if counts == "reader" else clock), FakeClock()
    clocks = {"both": [clock, own], "store": [clock], "reader": [own]}[counts]
    filled(store, 1, 2)
    hold = lease(store, ONE, own, ttl_s=100)
    for one in clocks:
        one.advance(101)
    hold.renew()
    assert hold.held  # nobody had come
    for one in clocks:
        one.advance(101)
    store.delete([keys.commit_key(ONE)])
    with pytest.raises(NoCheckpointError):
        hold.renew()
    assert not hold.held
    assert under(store, "leases/") == []


def test_a_renewal_that_fails_is_asked_for_again_later_and_hurts_nobody(store: FakeStore, clock: FakeClock):
    filled(store, 1, 2)
    hold = lease(store, ONE, clock, ttl_s=80)
    clock.advance(40)
    deny(store, "leases/", TransientError("down"))
    hold.renew()
    assert not hold.due
    store.before = lambda verb, key: None
    clock.advance(10)
    assert hold.due
    hold.renew()
    assert len(under(store, "leases/")) == 2


@pytest.mark.parametrize("error", [AccessDeniedError("read-only"), OutOfSpaceError("full")])
def test_where_nothing_can_be_written_it_is_read_without_a_lease_and_said_once(
    store: FakeStore, error: Exception, caplog: pytest.LogCaptureFixture
):
    filled(store, 1)
    before = dict(store.objects)
    deny(store, "", error)
    with lease(store, ONE) as hold:
        assert hold.commit.step == 1
        assert not hold.held
        assert not hold.due
        hold.renew()
    assert store.objects == before
    assert caplog.text.count("read without a lease") == 1
    with pytest.raises(NoCheckpointError):
        lease(store, TWO)


def test_a_release_that_fails_is_logged_and_left_to_run_out(store: FakeStore, caplog: pytest.LogCaptureFixture):
    filled(store, 1)
    hold = lease(store, ONE)
    deny(store, "leases/", TransientError("down"))
    hold.release()
    assert "left behind" in caplog.text
    assert not hold.held


@pytest.mark.parametrize("ttl_s", [0, -1, schema.LEASE_LIMIT_S + 1, float("nan"), float("inf")])
def test_a_lease_lasts_within_bounds(store: FakeStore, ttl_s: float):
    filled(store, 1)
    with pytest.raises(ConfigError, match="ttl_s"):
        lease(store, ONE, ttl_s=ttl_s)


@pytest.mark.parametrize("tells", [True, False])
def test_leases_that_ran_out_long_ago_are_removed_and_nothing_else(tells: bool, clock: FakeClock):
    store = FakeStore(clock=clock if tells else None)
    writer = filled(store, 1)
    lease(store, ONE, clock, ttl_s=100)
    dead_key = under(store, "leases/")
    store.put("leases/000000001-g000001-beef.json", b"?")
    store.put("leases/somebody-else", store.objects[dead_key[0]])
    store.put("leases/000000001-g000001-reader.json", store.objects[dead_key[0]])
    lease(store, ONE, clock, ttl_s=2 * DAY_S)  # ran out, but not long ago
    clock.advance(2.5 * DAY_S)
    live = lease(store, ONE, clock, ttl_s=100)
    save(store, writer, 2)
    report = swept(store, clock=clock)
    assert report.leases == dead_key
    live.release()
    assert {"leases/000000001-g000001-beef.json", "leases/000000001-g000001-reader.json", "leases/somebody-else"} < set(
        under(store, "leases/")
    )
    assert len(under(store, "leases/")) == 4


def test_young_leases_are_not_read_unless_what_they_hold_is_asked_for(store: FakeStore, clock: FakeClock):
    writer = filled(store, 1)
    lease(store, ONE, clock)
    lease(store, CheckpointRef(1, 1), clock)
    save(store, writer, 2)
    store.log.clear()
    sweep(store, lambda infos: {info.ref: "all" for info in infos}, generation=1)
    reads = {key for verb, key in store.log if verb == "read" and key.startswith("leases/")}
    assert len(reads) == 1  # the first is enough to know that step 1 is leased


def test_logging_does_not_shout(store: FakeStore, caplog: pytest.LogCaptureFixture):
    caplog.set_level(logging.WARNING)
    filled(store, 1)
    pin(store, ONE, "x")
    lease(store, ONE).release()
    assert caplog.text == ""


# --- races ----------------------------------------------------------------------------------------------------------


def _pin(store: FakeStore) -> bytes:
    return pin(store, ONE, "x").commit.encode()


def _lease(store: FakeStore) -> bytes:
    return lease(store, ONE).data


def _leftover(store: FakeStore) -> None:
    """Step 1 is held by a pin alone, and a newer generation sweeps."""
    save(store, manager(store), 3)
    pin(store, ONE, "y")
    store.delete([keys.commit_key(ONE)])


@pytest.mark.parametrize("hold", [_pin, _lease], ids=["pin", "lease"])
@pytest.mark.parametrize("first", [0, 1], ids=["sweep_first", "hold_first"])
def test_wherever_sweep_and_hold_interrupt_each_other_what_was_granted_is_whole(
    hold: Callable[[FakeStore], bytes], first: int
):
    """Every schedule in which the first is interrupted twice and the second once."""
    before = FakeStore(clock=FakeClock())
    writer = manager(before)
    for step in (1, 2):
        save(before, writer, step, world=1, rows=2)
    granted = refused = without_record = 0
    for (i, j, k), store, race in schedules(before, first, hold):
        report, held = race.finish()
        assert isinstance(report, SweepReport)
        if isinstance(held, NoCheckpointError):
            refused += 1
            assert under(store, "pins/") + under(store, "leases/") == []
            continue
        granted += 1
        assert whole(store, ONE, held), (i, j, k)
        without_record += keys.commit_key(ONE) not in store.objects
        if i == k:  # and it stays so, whoever sweeps next
            save(store, manager(store), 5, world=1, rows=2)
            swept(store)
            assert whole(store, ONE, held), (i, j, k)
    assert granted
    assert refused
    assert without_record


def schedules(
    before: FakeStore, first: int, hold: Callable[[FakeStore], bytes]
) -> Iterator[tuple[tuple[int, int, int], FakeStore, Interleaved]]:
    """So many operations of the first, then of the second, then of the first again; each until it has no more."""
    for i in count():
        for j in count(1):
            for k in count(1):
                store = before.copy()
                race = Interleaved(store, swept, hold)
                on = race.step(first, i), race.step(1 - first, j), race.step(first, k)
                race.step(1 - first)
                yield (i, j, k), store, race
                if not on[2]:
                    break
            if not on[1]:
                break
        if not on[0]:
            return


def test_a_reader_of_what_only_a_pin_holds_is_as_safe():
    for k in range(60):
        store = FakeStore(clock=FakeClock())
        filled(store, 1, 2)
        _leftover(store)
        race = Interleaved(store, swept, _lease)
        race.step(0, k)
        race.step(1)
        _, held = race.finish()
        assert isinstance(held, bytes)
        unpin(store, ONE)
        swept(store)
        assert whole(store, ONE, held)


# --- crashes --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("n", range(4))
def test_whoever_dies_while_pinning_leaves_a_pin_that_was_granted_or_none(n: int):
    clock = FakeClock()
    store = FakeStore(clock=clock)
    writer = filled(store, 1)
    dying = store.twin(dies_at=n)
    try:
        pin(dying, ONE, "x", clock)
    except Died:
        pass
    else:
        assert n == 3  # lease, pin, release
    clock.advance(LEASE_TTL_S + 1)
    save(store, writer, 2)
    swept(store)
    assert (steps(discover(store)) == [1, 2]) == bool(under(store, "pins/")) == (n >= 2)
