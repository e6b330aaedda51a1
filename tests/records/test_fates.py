from __future__ import annotations

import copy
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from records.fake_store import Died, FakeStore, manager, save, steps, write_attempt

from resilio.clock import FakeClock
from resilio.errors import ResilioError, TransientError
from resilio.records import keys, schema
from resilio.records.catalog import discover
from resilio.records.fates import OFF_LINEAGE_S, Explanation, explain
from resilio.records.holds import lease, pin, unpin
from resilio.records.protocol import RunWriter
from resilio.records.sweep import SweepReport, sweep
from resilio.records.verify import verify_checkpoint
from resilio.types import CheckpointInfo, CheckpointRef

DAY_S = 86_400.0
LEFT = CheckpointRef(1, 3)  # what `branched` leaves behind


@pytest.fixture
def clock() -> FakeClock:
    return FakeClock()


@pytest.fixture
def store(clock: FakeClock) -> FakeStore:
    return FakeStore(clock=clock)


def all_of(infos: list[CheckpointInfo]) -> dict[CheckpointRef, str]:
    return {info.ref: "all" for info in infos}


def last(n: int) -> Callable[[list[CheckpointInfo]], dict[CheckpointRef, str]]:
    return lambda infos: {info.ref: f"one of the last {n}" for info in infos[-n:]}


def swept(store: FakeStore, keep: Any = all_of, **more: Any) -> SweepReport:
    return sweep(store, keep, generation=discover(store).newest_generation, **more)


def branched(store: FakeStore) -> RunWriter:
    """Generation 1 saves 1, 2, 3; generation 2 goes back to 2 and saves 4."""
    first = manager(store)
    for step in (1, 2, 3):
        save(store, first, step)
    second = manager(store, CheckpointRef(1, 2))
    save(store, second, 4)
    return second


# --- how long what is off the lineage lives ---------------------------------------------------------------------------


@pytest.mark.parametrize(("passed_s", "lives"), [(0, True), (OFF_LINEAGE_S - 1, True), (OFF_LINEAGE_S, False)])
def test_what_the_lineage_left_lives_for_a_week_of_the_stores_time(
    store: FakeStore, clock: FakeClock, passed_s: float, lives: bool
):
    second = branched(store)
    clock.advance(passed_s)
    save(store, second, 5)
    report = swept(store, clock=FakeClock(9e9))
    assert (LEFT in discover(store).off_lineage) == lives
    assert steps(discover(store)) == [1, 2, 4, 5]
    if lives:
        assert "less than 7 days" in report.kept[LEFT]
    else:
        assert report.deleted == {LEFT: "off the lineage since generation 2, for 7 days"}
        assert len({key.split("/")[0] for key in store.objects if key.startswith("step-")}) == 4


def test_the_time_ends_with_the_commit_just_made_not_with_the_sweep(store: FakeStore, clock: FakeClock):
    second = branched(store)
    save(store, second, 5)
    clock.advance(2 * OFF_LINEAGE_S)
    assert LEFT in swept(store).kept


def test_the_week_can_be_another_time(store: FakeStore, clock: FakeClock):
    second = branched(store)
    clock.advance(10)
    save(store, second, 5)
    assert LEFT in swept(store, abandoned_after_s=11).kept
    assert LEFT in swept(store, abandoned_after_s=10).deleted


def test_it_lives_until_the_new_branch_has_two_checkpoints(store: FakeStore, clock: FakeClock):
    second = branched(store)
    clock.advance(OFF_LINEAGE_S)
    save(store, second, 5)
    store.delete([keys.commit_key(CheckpointRef(2, 4))])
    assert "1 sound checkpoints" in swept(store).kept[LEFT]
    save(store, second, 6)
    assert LEFT in swept(store).deleted


@pytest.mark.parametrize("what", ["quarantined", "gone"])
def test_checkpoints_that_are_not_sound_do_not_count_for_the_branch(store: FakeStore, clock: FakeClock, what: str):
    second = branched(store)
    clock.advance(OFF_LINEAGE_S)
    save(store, second, 5)
    if what == "quarantined":
        store.put("quarantine/000000004-g000002.json", b"{}")
    else:
        store.delete([keys.attempt_key(discover(store).read(CheckpointRef(2, 4)).attempt, keys.MANIFEST)])
    assert LEFT in swept(store).kept


def test_under_keep_last_1_it_goes_as_well(store: FakeStore, clock: FakeClock):
    second = branched(store)
    clock.advance(OFF_LINEAGE_S)
    for step in (5, 6, 7):
        save(store, second, step)
        swept(store, last(1))
    assert discover(store).commits == [CheckpointRef(2, 7)]


def test_a_pin_and_a_lease_outlast_the_week(store: FakeStore, clock: FakeClock):
    second = branched(store)
    pin(store, LEFT, "x")
    clock.advance(OFF_LINEAGE_S)
    hold = lease(store, LEFT, clock)
    save(store, second, 5)
    assert swept(store).kept[LEFT] == "pinned"
    unpin(store, LEFT)
    assert swept(store).kept[LEFT] == "leased"
    hold.release()
    assert LEFT in swept(store).deleted


@pytest.mark.parametrize("missing", ["all", "generation", "commit"])
def test_where_the_store_does_not_tell_it_lives_for_ever(store: FakeStore, clock: FakeClock, missing: str):
    second = branched(store)
    clock.advance(9 * OFF_LINEAGE_S)
    save(store, second, 5)
    for key in list(store.times):
        if missing == "all" or key == {"generation": "generations/000002.json"}.get(
            missing, "commits/000000005-g000002.json"
        ):
            del store.times[key]
    assert LEFT in swept(store).kept


def test_it_counts_from_when_it_was_left_the_last_time(store: FakeStore, clock: FakeClock):
    """Generation 2 left step 3, generation 3 went back to it, generation 4 left it again: and its own step."""
    branched(store)
    clock.advance(OFF_LINEAGE_S)
    third = manager(store, LEFT)
    save(store, third, 4)
    clock.advance(DAY_S)
    fourth = manager(store, CheckpointRef(2, 4))
    save(store, fourth, 5)
    clock.advance(OFF_LINEAGE_S - 1)
    save(store, fourth, 6)
    assert swept(store).deleted == {}
    clock.advance(1)
    save(store, fourth, 7)
    report = swept(store)
    assert set(report.deleted) == {LEFT, CheckpointRef(3, 4)}
    assert set(report.deleted.values()) == {"off the lineage since generation 4, for 7 days"}


def test_a_generation_that_never_committed_has_left_nothing(store: FakeStore, clock: FakeClock):
    """It takes its number, and dies before its commit; a week later the next one really leaves step 3."""
    first = manager(store)
    for step in (1, 2, 3):
        save(store, first, step)
    dead = schema.GenerationRecord(format=1, generation=2, nonce="dead")
    store.put(keys.generation_key(2), schema.encode(dead))
    clock.advance(2 * OFF_LINEAGE_S)
    third = manager(store, CheckpointRef(1, 2))
    save(store, third, 4)
    save(store, third, 5)
    assert swept(store).deleted == {}
    clock.advance(OFF_LINEAGE_S)
    save(store, third, 6)
    assert swept(store).deleted == {LEFT: "off the lineage since generation 3, for 7 days"}


def test_the_generation_that_left_it_is_found_when_its_own_commits_are_long_gone(store: FakeStore, clock: FakeClock):
    """A job that restarts every day and keeps one: a week after generation 2, though only generation 9 has commits."""
    branched(store)
    for day in range(6):
        clock.advance(DAY_S)
        save(store, manager(store), 5 + day)
        swept(store, last(1))
    assert {ref.generation for ref in discover(store).lineage} == {8}
    assert LEFT in discover(store).commits
    clock.advance(DAY_S)
    save(store, manager(store), 20)
    assert swept(store, last(1)).deleted[LEFT] == "off the lineage since generation 2, for 7 days"


def test_while_nothing_is_a_week_old_no_generation_record_is_read_for_it(store: FakeStore, clock: FakeClock):
    second = branched(store)
    save(store, second, 5)
    store.log.clear()
    swept(store)
    assert {key for verb, key in store.log if verb == "read" and key.startswith("generations/")} == {
        "generations/000002.json"
    }


@pytest.mark.parametrize("damage", [b"{", None])
def test_if_a_generation_record_cannot_be_read_it_lives(store: FakeStore, clock: FakeClock, damage: bytes | None):
    branched(store)
    clock.advance(OFF_LINEAGE_S)
    third = manager(store)
    save(store, third, 5)
    if damage:
        store.objects["generations/000002.json"] = damage
    else:

        def before(verb: str, key: str) -> None:
            if (verb, key) == ("read", "generations/000002.json"):
                raise TransientError("down")

        store.before = before
    assert "cannot be told" in swept(store).kept[LEFT]


def test_a_generation_that_goes_back_and_has_yet_to_commit_keeps_it(store: FakeStore, clock: FakeClock):
    second = branched(store)
    clock.advance(OFF_LINEAGE_S)
    save(store, second, 5)
    back = schema.GenerationRecord(
        format=1,
        generation=3,
        nonce="x",
        parent=schema.ParentRef(generation=1, step=3),
        ancestors=[schema.ParentRef(generation=1, step=3)],
    )
    store.put(keys.generation_key(3), schema.encode(back))
    told = explain(store, all_of)
    assert told.idle is not None
    assert [fate.goes for fate in told.checkpoints] == [False] * 5
    assert "went back to it" in told.checkpoints[0].why


# --- explain --------------------------------------------------------------------------------------------------------


def by_ref(told: Explanation) -> dict[CheckpointRef, tuple[bool, str]]:
    return {fate.ref: (fate.goes, fate.why) for fate in told.checkpoints}


def test_explain_says_why_each_lives_or_that_it_goes_and_touches_nothing(store: FakeStore, clock: FakeClock):
    first = manager(store)
    for step in range(1, 8):
        save(store, first, step)
    writer = manager(store, CheckpointRef(1, 6))
    for step in (8, 9, 10):
        save(store, writer, step)
    pin(store, CheckpointRef(1, 1), "the paper")
    lease(store, CheckpointRef(1, 2), clock)
    store.objects["commits/000000003-g000001.json"] = b"{"
    store.delete([keys.attempt_key(discover(store).read(CheckpointRef(1, 4)).attempt, keys.MANIFEST)])
    store.put("quarantine/000000010-g000002.json", b"{}")
    dead, flying = "step-000000004-g000001-abcd", writer.begin_attempt(11)
    for attempt in (dead, flying):
        write_attempt(store, attempt, rows=4)
    before = dict(store.objects)
    told = explain(store, lambda infos: {CheckpointRef(1, 5): "every 5", CheckpointRef(2, 10): "every 5"})
    assert store.objects == before
    said = by_ref(told)
    assert said.pop(CheckpointRef(1, 3))[1].startswith("its commit record cannot be read: ")
    assert said == {
        CheckpointRef(1, 7): (False, "off the lineage for less than 7 days"),
        CheckpointRef(1, 1): (False, "pinned"),
        CheckpointRef(1, 2): (False, "leased"),
        CheckpointRef(1, 5): (False, "every 5"),
        CheckpointRef(1, 6): (True, "no policy has a reason to keep it"),
        CheckpointRef(2, 8): (True, "no policy has a reason to keep it"),
        CheckpointRef(2, 9): (False, "newest that is not quarantined"),
        CheckpointRef(2, 10): (False, "every 5; newest of the lineage"),
    }
    assert told.checkpoints[0].ref == CheckpointRef(1, 7)
    assert [(fate.kind, fate.attempt, fate.goes, fate.why) for fate in told.leftovers] == [
        ("record", discover(store).read(CheckpointRef(1, 4)).attempt, True, "its attempt has no manifest"),
        ("attempt", dead, True, "has no commit record"),
        ("attempt", flying, False, "may be under way"),
    ]


def test_explain_says_if_a_policy_is_refused(store: FakeStore):
    branched(store)
    told = explain(store, lambda infos: {})
    assert told.refused is not None
    assert not any(fate.goes for fate in told.checkpoints)


def test_an_empty_run_has_nothing_to_explain(store: FakeStore):
    assert explain(store, all_of) == Explanation(idle="nothing was ever committed")


def test_for_a_manager_that_has_yet_to_commit_nothing_goes(store: FakeStore):
    branched(store)
    told = explain(store, last(1), generation=3)
    assert told.idle == "generation 3 has yet to commit"
    assert not any(fate.goes for fate in told.checkpoints)


ACTIONS = st.lists(
    st.tuples(
        st.sampled_from(
            ["save", "save", "save", "back", "restart", "dead", "late", "damage", "pin", "unpin", "lease", "bad", "day",
             "week", "orphan", "sweep", "fresh"]
        ),
        st.integers(0, 99),
    ),
    max_size=25,
)  # fmt: skip


def lived(store: FakeStore, clock: FakeClock, actions: list[tuple[str, int]]) -> RunWriter:
    """A run to which all this happened; its last manager, which has committed."""
    writer, step = manager(store), 0
    unfinished: set[str] = set()
    for action, n in actions:
        commits = discover(store).commits
        ref = commits[n % len(commits)] if commits else None
        if action == "save" or ref is None:
            step += 1
            save(store, writer, step, world=1, rows=2, non_finite=(None, 0, 3)[n % 3])
        elif action in ("back", "restart"):
            writer = manager(store, ref if action == "back" else None)
        elif action == "fresh":
            writer = RunWriter(store, clock=clock)
            writer.fresh(discover(store))
        elif action == "dead":
            attempt = writer.begin_attempt(step + 1)
            write_attempt(store, attempt, world=1, rows=2)
            if n % 2:
                writer.abandon(attempt)
        elif action == "late":
            store.delete(
                [key for key in store.objects if key.startswith(f"step-{keys.stem(ref)}") and "manifest" in key]
            )
        elif action == "damage":
            store.objects[keys.commit_key(ref)] = b"{"
        elif action == "orphan":
            if ref != discover(store).newest and ref.generation < discover(store).newest_generation:
                store.delete([keys.commit_key(ref)])
        elif action == "bad":
            store.objects[f"quarantine/{keys.stem(ref)}.json"] = b"{}"
        elif action in ("day", "week"):
            clock.advance(DAY_S if action == "day" else OFF_LINEAGE_S)
        elif action == "sweep" and writer.last:
            keep = last(1 + n % 3)
            report = sweep(store, keep, generation=writer.last.generation, failed=writer.failed | unfinished)
            unfinished = set(report.unfinished)
        elif action in ("pin", "unpin", "lease"):
            with suppress(ResilioError):  # nothing whole to hold
                if action == "pin":
                    pin(store, ref, "x", clock)
                elif action == "unpin":
                    unpin(store, ref)
                else:
                    lease(store, ref, clock, ttl_s=1 + n * 3600)
    save(store, writer, step + 1, world=1, rows=2)
    return writer


def gone(before: set[str], after: set[str], folder: str) -> set[CheckpointRef | None]:
    return {keys.parse_commit(key) for key in before - after if key.startswith(folder)}


@settings(max_examples=150, deadline=None)
@given(ACTIONS, st.integers(0, 4), st.booleans())
def test_what_explain_says_is_exactly_what_the_next_sweep_does(actions: list[tuple[str, int]], n: int, tells: bool):
    clock = FakeClock()
    store = FakeStore(clock=clock if tells else None)
    writer = lived(store, clock, actions)
    keep = last(n) if n else lambda infos: {}
    asks: dict[str, Any] = {"failed": writer.failed, "begun": writer.begun, "clock": clock}
    objects = copy.copy(store.objects)
    told = explain(store, keep, **asks)
    assert store.objects == objects
    report = sweep(store, keep, generation=discover(store).newest_generation, **asks)
    assert set(report.unfinished) <= writer.failed  # those that are held, or may belong to a record that is damaged
    all_fates = [*told.checkpoints, *told.leftovers]
    goes = [fate for fate in all_fates if fate.goes]
    before, after = set(objects), set(store.objects)
    assert gone(before, after, "commits/") == {fate.ref for fate in goes if fate.kind in ("checkpoint", "record")}
    folders_before, folders_after = (
        {key.split("/")[0] for key in s if key.startswith("step-")} for s in (before, after)
    )
    assert folders_before - folders_after == {f.attempt for f in goes if f.kind in ("checkpoint", "attempt")}
    assert report.deleted == {f.ref: f.why for f in goes if f.kind == "checkpoint"}
    assert report.kept == {f.ref: f.why for f in all_fates if f.kind == "checkpoint" and not f.goes}
    assert report.refused == told.refused
    # and what stays is as it was
    assert all(store.objects[key] == objects[key] for key in after)
    kept = {fate.attempt for fate in all_fates if not fate.goes}
    assert {key for key in before - after if key.split("/")[0] in kept} == set()
    # a second sweep finds nothing more to do but what the first one's deletions made obvious
    again = explain(store, keep, **asks)
    assert not any(fate.goes for fate in again.checkpoints if fate.on_lineage)


# --- crashes: die before the n-th mutating operation, for all n -------------------------------------------------------


def life(store: FakeStore, clock: FakeClock, granted: list[CheckpointRef]) -> None:
    """Pins, leases, a branch that is left and forgotten, and sweeps that keep one."""
    first = manager(store)
    for step in (1, 2, 3):
        save(store, first, step, world=1, rows=2)
    granted.append(pin(store, CheckpointRef(1, 1), "x", clock) and CheckpointRef(1, 1))
    lease(store, CheckpointRef(1, 2), clock)  # of a reader that is killed
    second = manager(store, CheckpointRef(1, 2))
    for step in (4, 5, 6):
        save(store, second, step, world=1, rows=2)
        swept(store, last(1))
        clock.advance(OFF_LINEAGE_S)
    granted.clear()
    unpin(store, CheckpointRef(1, 1))
    save(store, second, 7, world=1, rows=2)
    swept(store, last(1))


def life_mutations() -> int:
    clock = FakeClock()
    store = FakeStore(clock=clock)
    life(store, clock, [])
    assert discover(store).commits == [CheckpointRef(2, 7)]
    assert not [key for key in store.objects if key.startswith(("pins/", "leases/"))]
    return store.mutations


@pytest.mark.parametrize("n", range(life_mutations()))
def test_a_crash_anywhere_leaves_checkpoints_whole_and_holds_in_force_and_the_next_life_cleans_up(n: int):
    clock = FakeClock()
    store = FakeStore(dies_at=n, clock=clock)
    granted: list[CheckpointRef] = []
    with pytest.raises(Died):
        life(store, clock, granted)
    after = store.twin()
    catalog = discover(after)
    for ref in catalog.commits:
        assert verify_checkpoint(after, ref) == []
    for ref in granted:
        assert verify_checkpoint(after, ref) == []
    step = catalog.newest.step if catalog.newest else 0
    for _ in range(2):  # the second life also knows what died under the number of the first
        writer = manager(after)
        for _ in range(2):
            clock.advance(OFF_LINEAGE_S)
            step += 1
            ref = save(after, writer, step, world=1, rows=2)
            swept(after, last(1), clock=clock)
        for one in granted:
            assert verify_checkpoint(after, one) == []
    for one in {ref for ref in catalog.commits if ref.step == 1}:
        unpin(after, one)
    swept(after, last(1), clock=clock)
    assert discover(after).commits == [ref]
    left = {key.split("/")[0] for key in after.objects}
    assert left == {"resilio.json", "generations", "commits", discover(after).read(ref).attempt}
