from __future__ import annotations

import threading

import pytest
from records.fake_store import FakeStore, commit, lose_answer, manager, save, steps, write_attempt

from resilio import failpoints
from resilio.clock import FakeClock
from resilio.errors import (
    AccessDeniedError,
    ConfigError,
    FencedError,
    SaveError,
    TransientError,
)
from resilio.records import keys, schema
from resilio.records.catalog import discover
from resilio.records.protocol import RunWriter
from resilio.types import CheckpointRef


@pytest.fixture
def store() -> FakeStore:
    return FakeStore()


def commits(store: FakeStore) -> list[str]:
    return [key for key in sorted(store.objects) if key.startswith("commits/")]


# --- the first save -------------------------------------------------------------------------------------------------


def test_the_first_save_makes_run_generation_and_commit_in_this_order(store: FakeStore):
    ref = save(store, manager(store), 5)
    assert ref == CheckpointRef(1, 5)
    made = [key for verb, key in store.log if verb == "put" and not key.startswith("step-")]
    assert made == ["resilio.json", "generations/000001.json", "commits/000000005-g000001.json"]
    order = [key for verb, key in store.log if verb == "put"]
    manifest = next(i for i, key in enumerate(order) if key.endswith("/manifest.json"))
    assert manifest < order.index("commits/000000005-g000001.json")
    record = discover(store).record
    assert record is not None
    assert (record.parent, record.ancestors) == (None, [])


def test_a_restored_manager_names_its_parent_and_ancestors(store: FakeStore):
    first = manager(store)
    for step in (1, 2, 3):
        save(store, first, step)
    store.delete([keys.commit_key(CheckpointRef(1, 1))])
    save(store, manager(store), 4)
    record = discover(store).record
    assert record is not None
    assert record.parent == schema.ParentRef(generation=1, step=3)
    assert [(a.generation, a.step) for a in record.ancestors] == [(1, 2), (1, 3)]


def test_a_save_over_checkpoints_that_restore_was_never_asked_about_is_refused(store: FakeStore):
    save(store, manager(store), 5)
    before = dict(store.objects)
    with pytest.raises(FencedError, match=r"restore\(\).*fresh=True"):
        RunWriter(store).begin_attempt(6)
    assert store.objects == before


def test_a_manager_that_never_restored_may_save_into_an_empty_store(store: FakeStore):
    assert save(store, RunWriter(store), 1) == CheckpointRef(1, 1)


def test_a_manager_that_never_restored_goes_on_after_a_crash_before_the_first_commit(store: FakeStore):
    failpoints.arm("save.before_commit=raise")
    try:
        with pytest.raises(OSError, match="failpoint"):
            save(store, RunWriter(store), 1)
    finally:
        failpoints.disarm()
    assert save(store, RunWriter(store), 1) == CheckpointRef(2, 1)


def test_restore_that_found_checkpoints_and_chose_none_is_no_fresh_start(store: FakeStore):
    save(store, manager(store), 5)
    with pytest.raises(ConfigError, match="fresh"):
        RunWriter(store).saw_restore(discover(store), None)


def test_fresh_begins_a_new_line_and_leaves_the_old_one_off_the_lineage(store: FakeStore):
    save(store, manager(store), 5)
    writer = RunWriter(store)
    writer.fresh(discover(store))
    assert save(store, writer, 1) == CheckpointRef(2, 1)
    catalog = discover(store)
    assert steps(catalog) == [1]
    assert catalog.off_lineage == [CheckpointRef(1, 5)]


def test_fresh_does_not_cover_what_was_committed_afterwards(store: FakeStore):
    old = manager(store)
    save(store, old, 5)
    writer = RunWriter(store)
    writer.fresh(discover(store))
    save(store, old, 6)
    with pytest.raises(FencedError, match="step 6"):
        save(store, writer, 1)


def test_what_another_committed_after_the_restore_fences_before_anything_is_made(store: FakeStore):
    old = manager(store)
    save(store, old, 5)
    late = manager(store)
    save(store, old, 6)
    with pytest.raises(FencedError) as caught:
        save(store, late, 6)
    assert caught.value.stored is False
    assert "generations/000002.json" not in store.objects
    assert save(store, old, 7)  # the one that goes on is not hurt


def test_a_commit_between_the_first_test_and_the_generation_is_seen_by_the_second_test(store: FakeStore):
    old = manager(store)
    save(store, old, 5)
    late = manager(store)
    attempt = late.begin_attempt(6)
    manifest = write_attempt(store, attempt)
    other = store.twin()

    def before(verb: str, key: str) -> None:
        if (verb, key) == ("put", "generations/000002.json"):
            store.before = lambda verb, key: None
            save(other, rebound(old, other), 6)

    store.before = before
    with pytest.raises(FencedError, match="step 6"):
        commit(late, attempt, manifest)
    assert commits(store) == ["commits/000000005-g000001.json", "commits/000000006-g000001.json"]


def rebound(writer: RunWriter, store: FakeStore) -> RunWriter:
    writer.storage = store
    return writer


def test_anothers_generation_fences(store: FakeStore):
    one, two = manager(store), manager(store)
    save(store, one, 1)
    with pytest.raises(FencedError):
        save(store, two, 1)
    assert commits(store) == ["commits/000000001-g000001.json"]
    with pytest.raises(FencedError, match=r"restore\(\)"):
        two.begin_attempt(2)  # and stays so, without writing any data


def test_anothers_generation_of_our_number_fences_before_its_first_commit(store: FakeStore):
    writer = manager(store)
    other = schema.GenerationRecord(format=1, generation=1, nonce="other", host="node-7", pid=42)
    store.put(keys.generation_key(1), schema.encode(other))
    with pytest.raises(FencedError, match="node-7, process 42"):
        save(store, writer, 1)
    assert commits(store) == []


def test_a_newer_generation_without_a_commit_fences_too(store: FakeStore):
    one = manager(store)
    save(store, one, 1)
    newer = schema.GenerationRecord(format=1, generation=2, nonce="other")
    store.put(keys.generation_key(2), schema.encode(newer))
    with pytest.raises(FencedError) as caught:
        save(store, one, 2)
    assert caught.value.stored is False
    assert caught.value.generation == 2
    assert commits(store) == ["commits/000000001-g000001.json"]


def test_a_generation_that_appears_during_the_commit_leaves_it_stored_and_not_acknowledged(store: FakeStore):
    one = manager(store)
    save(store, one, 1)

    def after(verb: str, key: str) -> None:
        if verb == "put" and key.startswith("commits/"):
            newer = schema.GenerationRecord(format=1, generation=2, nonce="other")
            store.objects[keys.generation_key(2)] = schema.encode(newer)

    store.after = after
    # "was": the other may have deleted it by the time this is read.
    with pytest.raises(FencedError, match="was stored, not acknowledged") as caught:
        save(store, one, 2)
    assert caught.value.stored is True
    assert steps(discover(store)) == [1, 2]
    one.abandon(discover(store).read(CheckpointRef(1, 2)).attempt)
    assert one.failed == frozenset()


OTHER = schema.GenerationRecord(format=1, generation=2, nonce="other", host="node-7", pid=42, time_s=1_800_000_000.0)
TOLD = r"generation 2 \(host node-7, process 42, since 2027-01-15 08:00:00 UTC\)"


def test_who_is_fenced_before_the_commit_is_told_by_which_generation_host_and_when(store: FakeStore):
    one = manager(store)
    save(store, one, 1)
    store.put(keys.generation_key(2), schema.encode(OTHER))
    with pytest.raises(FencedError, match=TOLD) as caught:
        save(store, one, 2)
    error = caught.value
    assert (error.generation, error.own, error.host, error.pid, error.time_s) == (2, 1, "node-7", 42, OTHER.time_s)
    with pytest.raises(FencedError, match=TOLD) as caught:
        one.begin_attempt(3)
    assert (caught.value.generation, caught.value.host) == (2, "node-7")


def test_who_is_fenced_at_its_generation_or_by_a_newer_commit_is_told_the_same(store: FakeStore):
    first, late, later = manager(store), manager(store), manager(store)
    store.put(keys.generation_key(1), schema.encode(schema.GenerationRecord(format=1, generation=1, nonce="x")))
    restored = [manager(store) for _ in range(3)]  # each of them would be generation 2
    store.put(keys.generation_key(2), schema.encode(OTHER))
    with pytest.raises(FencedError, match=TOLD):
        save(store, restored[0], 1)  # somebody has its number
    with pytest.raises(FencedError, match=TOLD):
        save(store, first, 1)  # somebody has a newer one
    commit_of_2 = RunWriter(store, nonce="other")
    commit_of_2.saw_restore(discover(store), None)
    commit_of_2._generation, commit_of_2._entered = 2, True
    assert save(store, commit_of_2, 5) == CheckpointRef(2, 5)
    for writer in (restored[1], late, later):
        with pytest.raises(FencedError, match=TOLD):
            save(store, writer, 1)


@pytest.mark.parametrize("damage", [b"{", b""])
def test_who_is_fenced_by_a_record_that_cannot_be_read_is_told_at_least_its_number(store: FakeStore, damage: bytes):
    one = manager(store)
    save(store, one, 1)
    store.put(keys.generation_key(2), damage)
    with pytest.raises(FencedError, match=r"generation 2 \(another manager\)"):
        save(store, one, 2)


def test_a_manager_whose_attempt_was_collected_is_told_by_whom_and_only_then(store: FakeStore):
    one = manager(store)
    one.refuse_if_replaced("")  # nothing is there
    failpoints.arm("generation.created=raise")
    try:
        with pytest.raises(OSError, match="failpoint"):
            save(store, one, 1)
    finally:
        failpoints.disarm()
    one.refuse_if_replaced("")  # its own record, and it does not know yet that it is there
    late = manager(FakeStore())
    late.storage = store
    late.begin_attempt(1)
    with pytest.raises(FencedError, match=r"generation 1 \(host "):  # it would have had the same number
        late.refuse_if_replaced("")
    save(store, one, 1)
    one.refuse_if_replaced("")
    store.put(keys.generation_key(2), schema.encode(OTHER))
    store.before = lambda verb, key: (_ for _ in ()).throw(TransientError("down"))
    one.refuse_if_replaced("")  # what failed is told then, not this
    store.before = lambda verb, key: None
    one.refuse_if_replaced(discover(store).read(CheckpointRef(1, 1)).attempt)  # committed: not "nothing was"
    with pytest.raises(FencedError, match=TOLD):
        one.refuse_if_replaced("")


# --- steps and branches ---------------------------------------------------------------------------------------------


def test_steps_only_grow_within_a_generation(store: FakeStore):
    writer = manager(store)
    save(store, writer, 5)
    for step in (5, 4):
        with pytest.raises(ConfigError, match=r"restore\("):
            writer.begin_attempt(step)
    assert save(store, writer, 6) == CheckpointRef(1, 6)


def test_a_step_before_the_restored_one_is_refused(store: FakeStore):
    save(store, manager(store), 5)
    with pytest.raises(ConfigError, match="next_step"):
        manager(store).begin_attempt(4)


def test_a_failed_attempt_may_be_repeated_at_its_step_in_a_new_folder(store: FakeStore):
    writer = manager(store)
    first = writer.begin_attempt(5)
    writer.abandon(first)
    second = writer.begin_attempt(5)
    assert first != second
    assert writer.failed == {first}
    assert commit(writer, second, write_attempt(store, second)) == CheckpointRef(1, 5)


def test_going_back_in_one_process_begins_a_new_generation_on_a_branch(store: FakeStore):
    writer = manager(store)
    for step in (1, 2, 3):
        save(store, writer, step)
    writer.saw_restore(discover(store), CheckpointRef(1, 2))
    assert save(store, writer, 3) == CheckpointRef(2, 3)
    catalog = discover(store)
    assert catalog.lineage == [CheckpointRef(1, 1), CheckpointRef(1, 2), CheckpointRef(2, 3)]
    assert catalog.off_lineage == [CheckpointRef(1, 3)]
    assert catalog.record is not None
    assert catalog.record.parent == schema.ParentRef(generation=1, step=2)


def test_restoring_the_newest_of_its_own_goes_on_in_the_same_generation(store: FakeStore):
    writer = manager(store)
    save(store, writer, 1)
    writer.saw_restore(discover(store), CheckpointRef(1, 1))
    assert save(store, writer, 2) == CheckpointRef(1, 2)


def test_a_fenced_manager_may_go_on_after_restoring_what_fenced_it(store: FakeStore):
    one, two = manager(store), manager(store)
    save(store, one, 1)
    with pytest.raises(FencedError):
        save(store, two, 1)
    catalog = discover(store)
    two.saw_restore(catalog, catalog.newest)
    assert save(store, two, 2) == CheckpointRef(2, 2)
    with pytest.raises(FencedError):
        save(store, one, 2)


def test_an_attempt_of_another_generation_is_not_committed(store: FakeStore):
    writer = manager(store)
    with pytest.raises(ConfigError):
        commit(writer, "step-000000001-g000009-abcd", b"")


# --- lost answers ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("prefix", ["resilio.json", "generations/", "commits/"])
@pytest.mark.parametrize("times", [1, 3])
def test_a_create_whose_answer_was_lost_is_recognised_as_our_own(store: FakeStore, prefix: str, times: int):
    writer = manager(store)
    lose_answer(store, prefix, times)
    if prefix == "resilio.json":
        with pytest.raises(TransientError):
            save(store, writer, 1)  # nothing of the attempt was sent yet: it may simply fail, and the next one adopts
    assert save(store, writer, 1) == CheckpointRef(1, 1)
    assert steps(discover(store)) == [1]


def test_a_create_that_did_not_arrive_is_repeated_with_the_same_bytes(store: FakeStore):
    writer = manager(store)
    sent: list[bytes] = []
    put = store.put

    def flaky(key: str, data: bytes, *, if_absent: bool = False):
        if key.startswith("commits/"):
            sent.append(bytes(data))
            if len(sent) < 4:
                raise TransientError("reset")
        return put(key, data, if_absent=if_absent)

    store.put = flaky  # type: ignore[method-assign]
    save(store, writer, 1)
    assert len(sent) == 4
    assert len(set(sent)) == 1


def test_an_own_generation_of_a_failed_first_attempt_is_taken_up_again(store: FakeStore):
    writer = manager(store)
    failpoints.arm("generation.created=raise")
    try:
        with pytest.raises(OSError, match="failpoint"):
            save(store, writer, 1)
    finally:
        failpoints.disarm()
    assert len(writer.failed) == 1
    assert save(store, writer, 1) == CheckpointRef(1, 1)


def test_a_lost_commit_is_given_up_on_when_a_newer_generation_appears(store: FakeStore):
    writer = manager(store)
    save(store, writer, 1)

    def before(verb: str, key: str) -> None:
        if verb == "put" and key.startswith("commits/"):
            newer = schema.GenerationRecord(format=1, generation=2, nonce="other")
            store.objects[keys.generation_key(2)] = schema.encode(newer)
            raise TransientError("reset")

    store.before = before
    with pytest.raises(FencedError, match="not known") as caught:
        save(store, writer, 2)
    assert caught.value.stored is None
    assert writer.failed == frozenset()


def test_an_unanswered_commit_is_settled_by_the_next_attempt_and_never_called_failed(store: FakeStore):
    writer = manager(store)
    save(store, writer, 1)

    def before(verb: str, key: str) -> None:
        if verb == "put" and key.startswith("commits/"):
            raise TransientError("down")

    store.before = before
    attempt = writer.begin_attempt(2)
    manifest = write_attempt(store, attempt)
    with pytest.raises(SaveError, match="next save asks again"):
        commit(writer, attempt, manifest)
    writer.abandon(attempt)
    assert writer.failed == frozenset()
    with pytest.raises(SaveError):
        writer.begin_attempt(3)
    store.before = lambda verb, key: None
    assert save(store, writer, 3) == CheckpointRef(1, 3)
    assert steps(discover(store)) == [1, 2, 3]


def unanswered(store: FakeStore, writer: RunWriter, step: int, prefix: str = "commits/") -> dict[str, bytes]:
    """A save whose request for an object below `prefix` gets no answer; what is still on its way."""
    flying: dict[str, bytes] = {}
    put = store.put

    def lost(key: str, data: bytes, *, if_absent: bool = False):
        if key.startswith(prefix):
            flying[key] = bytes(data)
            raise TransientError("no answer")
        return put(key, data, if_absent=if_absent)

    store.put = lost  # type: ignore[method-assign]
    with pytest.raises(SaveError, match="not known"):
        save(store, writer, step)
    store.put = put  # type: ignore[method-assign]
    return flying


def test_who_is_fenced_by_a_late_commit_of_its_own_is_not_told_that_another_made_it(store: FakeStore):
    writer = manager(store)
    save(store, writer, 1)
    late = unanswered(store, writer, 2)
    catalog = discover(store)
    writer.saw_restore(catalog, catalog.newest)
    store.objects |= late
    with pytest.raises(FencedError, match=r"its own request.*arrived only after") as caught:
        save(store, writer, 2)
    assert "another" not in str(caught.value)
    catalog = discover(store)
    writer.saw_restore(catalog, catalog.newest)
    assert save(store, writer, 3) == CheckpointRef(2, 3)
    assert discover(store).lineage == [CheckpointRef(1, 1), CheckpointRef(1, 2), CheckpointRef(2, 3)]


@pytest.mark.parametrize("arrives", ["before the next save", "in the next save"])
def test_a_late_generation_record_of_ours_does_not_say_where_a_later_branch_came_from(store: FakeStore, arrives: str):
    """The record that comes late names the parent of then; since then the manager went back to another."""
    first = manager(store)
    for step in (1, 2):
        save(store, first, step)
    writer = manager(store)
    late = unanswered(store, writer, 3, "generations/")
    writer.saw_restore(discover(store), CheckpointRef(1, 1))

    def before(verb: str, key: str) -> None:
        if verb == "put" and key.startswith("generations/"):
            store.objects |= late

    if arrives == "in the next save":
        store.before = before
    else:
        store.objects |= late
    ref = save(store, writer, 2)
    store.before = lambda verb, key: None
    assert discover(store).lineage == [CheckpointRef(1, 1), ref]
    assert discover(store).off_lineage == [CheckpointRef(1, 2)]


def test_a_commit_the_store_clearly_refused_is_not_sent_again(store: FakeStore):
    writer = manager(store)
    save(store, writer, 1)

    def before(verb: str, key: str) -> None:
        if verb == "put" and key.startswith("commits/"):
            raise AccessDeniedError("no")

    store.before = before
    with pytest.raises(AccessDeniedError):
        save(store, writer, 2)
    store.before = lambda verb, key: None
    save(store, writer, 3)
    assert steps(discover(store)) == [1, 3]


def test_another_record_under_our_name_is_never_taken_for_ours(store: FakeStore):
    writer = manager(store)
    save(store, writer, 1)
    store.put("commits/000000002-g000001.json", b"{}")
    with pytest.raises(SaveError, match="no checkpoint"):
        save(store, writer, 2)


# --- races ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("round_", range(10))
def test_of_managers_that_race_from_one_restore_exactly_one_is_acknowledged(round_: int):
    store = FakeStore()
    save(store, manager(store), 1)
    writers = [manager(store.twin()) for _ in range(6)]
    start = threading.Barrier(len(writers))
    won: list[CheckpointRef] = []
    lost: list[FencedError] = []

    def run(writer: RunWriter) -> None:
        start.wait()
        try:
            won.append(save(writer.storage, writer, 2))
        except FencedError as error:
            lost.append(error)

    threads = [threading.Thread(target=run, args=(writer,)) for writer in writers]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert (len(won), len(lost)) == (1, 5)
    assert discover(store).newest == won[0]


@pytest.mark.parametrize("pause", range(40))
def test_wherever_one_manager_pauses_while_another_takes_over_acknowledged_work_stays_on_the_lineage(pause: int):
    """A pauses before its n-th operation; B restores what is there, saves twice; A goes on."""
    store = FakeStore()
    a = manager(store)
    acknowledged = [save(store, a, 1)]
    other = store.twin()
    count = [0]

    def before(verb: str, key: str) -> None:
        count[0] += 1
        if count[0] == pause + 1:
            b = manager(other)
            assert b._parent is not None
            acknowledged.append(save(other, b, b._parent.step + 10))
            acknowledged.append(save(other, b, b._parent.step + 20))

    store.before = before
    try:
        second = save(store, a, 2)
    except FencedError:
        pass
    else:
        # acknowledged before B took over, so B went on from it
        acknowledged.append(second)
    if count[0] > pause:
        with pytest.raises(FencedError):
            save(store, a, 3)
    store.before = lambda verb, key: None
    assert set(acknowledged) <= set(discover(store).lineage)


def test_the_clock_decides_nothing(store: FakeStore):
    late = RunWriter(store, clock=FakeClock(2e9))
    late.saw_restore(discover(store), None)
    save(store, late, 1)
    early = RunWriter(store, clock=FakeClock(1e9))
    catalog = discover(store)
    early.saw_restore(catalog, catalog.newest)
    assert discover(store).newest == CheckpointRef(1, 1)
    save(store, early, 2)
    assert discover(store).newest == CheckpointRef(2, 2)
