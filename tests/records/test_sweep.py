from __future__ import annotations

import pytest
from records.fake_store import Died, FakeStore, manager, save, steps, write_attempt

from resilio.clock import FakeClock
from resilio.errors import AccessDeniedError, FencedError, NotFoundError, StorageError, TransientError
from resilio.records import keys, schema
from resilio.records.catalog import discover
from resilio.records.manifest import load_manifest
from resilio.records.protocol import RunWriter
from resilio.records.sweep import SweepReport, sweep
from resilio.records.verify import verify_checkpoint
from resilio.storage.base import Incomplete
from resilio.types import CheckpointInfo, CheckpointRef


@pytest.fixture
def store() -> FakeStore:
    return FakeStore()


def none(infos: list[CheckpointInfo]) -> dict[CheckpointRef, str]:
    return {}


def last(n: int):
    return lambda infos: {info.ref: f"one of the last {n}" for info in infos[-n:]}


def run(store: FakeStore, writer: RunWriter, keep=None) -> SweepReport:
    assert writer.generation is not None
    return sweep(store, keep or last(1), generation=writer.generation, failed=writer.failed)


def folders(store: FakeStore) -> list[str]:
    return sorted({key.split("/")[0] for key in store.objects if key.startswith("step-")})


def filled(store: FakeStore, *at: int) -> RunWriter:
    writer = manager(store)
    for step in at:
        save(store, writer, step)
    return writer


def test_what_has_no_reason_goes_and_what_has_one_stays(store: FakeStore):
    writer = filled(store, 1, 2, 3, 4)
    report = run(store, writer, lambda infos: {CheckpointRef(1, 2): "every 2", CheckpointRef(1, 1): ""})
    assert steps(discover(store)) == [2, 4]
    assert list(report.deleted) == [CheckpointRef(1, 1), CheckpointRef(1, 3)]
    assert report.kept == {CheckpointRef(1, 2): "every 2", CheckpointRef(1, 4): "newest of the lineage"}
    assert len(folders(store)) == 2
    assert not report.failed


def test_the_newest_stays_without_any_reason(store: FakeStore):
    writer = filled(store, 1, 2)
    report = run(store, writer, lambda infos: {CheckpointRef(1, 1): "dear"})
    assert report.kept == {CheckpointRef(1, 1): "dear", CheckpointRef(1, 2): "newest of the lineage"}
    assert steps(discover(store)) == [1, 2]


@pytest.mark.parametrize("keep", [none, lambda infos: {info.ref: "" for info in infos}])
def test_a_policy_that_keeps_nothing_at_all_is_refused_and_the_rest_of_the_sweep_goes_on(store: FakeStore, keep):
    old = filled(store, 1)
    dead = old.begin_attempt(2)
    write_attempt(store, dead, rows=4)
    writer = manager(store)
    save(store, writer, 2)
    report = run(store, writer, keep)
    assert report.refused is not None
    assert "2 checkpoints" in report.refused
    assert (report.deleted, report.attempts) == ({}, [dead])
    assert steps(discover(store)) == [1, 2]
    assert "nothing is deleted" in report.kept[CheckpointRef(1, 1)]


def test_a_policy_without_a_word_is_not_called_out_where_it_changes_nothing(store: FakeStore):
    assert run(store, filled(store, 1), none).refused is None


def test_one_word_about_an_older_one_is_enough_for_a_policy(store: FakeStore):
    writer = filled(store, 1, 2, 3)
    assert list(run(store, writer, lambda infos: {CheckpointRef(1, 2): "dear"}).deleted) == [CheckpointRef(1, 1)]


def test_record_then_manifest_then_the_rest_and_only_literal_keys(store: FakeStore):
    writer = filled(store, 1, 2)
    store.log.clear()
    run(store, writer)
    gone = [key for verb, key in store.log if verb == "delete"]
    assert gone[0] == "commits/000000001-g000001.json"
    assert gone[1].endswith("/manifest.json")
    assert len(gone) == 9  # record, manifest, metadata, and per rank data, digests and part
    assert len({key.split("/")[0] for key in gone[1:]}) == 1


@pytest.mark.parametrize("folder", ["pins/", "leases/"])
@pytest.mark.parametrize("name", ["000000001-g000001.json", "000000001-g000001-reader-7f", "a/000000001-g000001"])
def test_what_is_pinned_or_leased_stays(store: FakeStore, folder: str, name: str):
    writer = filled(store, 1, 2, 3)
    store.put(folder + name, b"{}")
    report = run(store, writer)
    assert steps(discover(store)) == [1, 3]
    assert CheckpointRef(1, 1) in report.kept


def test_a_pin_that_comes_right_after_the_record_is_deleted_saves_the_data(store: FakeStore):
    writer = filled(store, 1, 2)

    def after(verb: str, key: str) -> None:
        if verb == "delete" and key.startswith("commits/"):
            store.objects["pins/000000001-g000001.json"] = b"{}"

    store.after = after
    run(store, writer)
    assert len(folders(store)) == 2
    store.after = lambda verb, key: None
    save(store, writer, 3)
    run(store, writer, last(9))
    later = manager(store)
    save(store, later, 4)
    run(store, later, last(9))  # nor is it a leftover to a newer generation
    assert any(name.startswith("step-000000001-") for name in folders(store))


def test_the_newest_that_is_not_quarantined_stays_too(store: FakeStore):
    writer = filled(store, 1, 2, 3)
    store.put("quarantine/000000003-g000001.json", b"{}")
    run(store, writer)
    assert steps(discover(store)) == [2, 3]


def test_what_is_off_the_lineage_is_not_touched_nor_shown_to_the_policy(store: FakeStore):
    filled(store, 1, 2, 3)
    writer = manager(store, CheckpointRef(1, 1))
    save(store, writer, 2)
    seen: list[CheckpointRef] = []

    def keep(infos: list[CheckpointInfo]) -> dict[CheckpointRef, str]:
        seen.extend(info.ref for info in infos)
        return last(1)(infos)

    run(store, writer, keep)
    assert seen == [CheckpointRef(1, 1), CheckpointRef(2, 2)]
    assert discover(store).commits == [CheckpointRef(1, 2), CheckpointRef(1, 3), CheckpointRef(2, 2)]


def test_unknown_names_are_never_touched(store: FakeStore):
    writer = filled(store, 1, 2)
    foreign = [
        "step-9/manifest.json",
        "step-100.bak/x",
        "my-step-7/x",
        "step-000000001-g000001-7f3a.bak/x",
        "commits/000000001-g000001.json.bak",
        "commits/notes.txt",
        "generations/old",
        "README",
        "step-000000001-g000001-7f3a",  # an object, no folder
    ]
    for key in foreign:
        store.put(key, b"mine")
    run(store, writer)
    assert set(foreign) <= store.objects.keys()
    assert steps(discover(store)) == [2]


def test_attempts_of_older_generations_without_a_commit_are_collected(store: FakeStore):
    old = filled(store, 1)
    dead = old.begin_attempt(2)
    write_attempt(store, dead, rows=4)
    writer = manager(store)
    save(store, writer, 2)
    report = run(store, writer, last(9))
    assert report.attempts == [dead]
    assert dead not in folders(store)
    assert steps(discover(store)) == [1, 2]


def test_what_died_under_our_number_before_it_could_take_it_is_a_leftover(store: FakeStore):
    dead, writer = manager(store), manager(store)
    left = dead.begin_attempt(1)
    write_attempt(store, left, rows=4)
    save(store, writer, 1)
    in_flight = writer.begin_attempt(2)
    write_attempt(store, in_flight, rows=4)
    report = sweep(store, last(1), generation=1, begun=writer.begun)
    assert report.attempts == [left]


def test_own_attempts_are_collected_only_if_they_failed_before_their_commit_was_sent(store: FakeStore):
    writer = filled(store, 1)
    failed, in_flight = writer.begin_attempt(2), writer.begin_attempt(2)
    write_attempt(store, failed, rows=4)
    write_attempt(store, in_flight, rows=4)
    writer.abandon(failed)
    report = run(store, writer, last(9))
    assert report.attempts == [failed]
    assert in_flight in folders(store)


def test_attempts_of_a_newer_generation_are_not_touched(store: FakeStore):
    writer = filled(store, 1)
    write_attempt(store, "step-000000002-g000002-abcd", rows=4)
    run(store, writer)
    assert "step-000000002-g000002-abcd" in folders(store)


def test_a_record_whose_attempt_is_gone_is_removed_and_does_not_count(store: FakeStore):
    writer = filled(store, 1, 2, 3)
    attempt = discover(store).read(CheckpointRef(1, 2)).attempt
    store.delete([key for key in store.objects if key.startswith(attempt)])
    report = run(store, writer, last(2))
    assert report.records == [CheckpointRef(1, 2)]
    assert steps(discover(store)) == [1, 3]  # the last two whole ones


def test_the_newest_record_stays_even_without_its_attempt_and_so_does_the_newest_that_is_whole(store: FakeStore):
    writer = filled(store, 1, 2, 3)
    attempt = discover(store).read(CheckpointRef(1, 3)).attempt
    store.delete([key for key in store.objects if key.startswith(attempt)])
    report = run(store, writer, lambda infos: {CheckpointRef(1, 1): "dear"})
    assert (report.records, report.deleted) == ([], {})
    assert report.kept == {
        CheckpointRef(1, 1): "dear",
        CheckpointRef(1, 2): "newest that is whole; newest that is not quarantined",
    }
    assert steps(discover(store)) == [1, 2, 3]


def test_a_record_that_cannot_be_read_is_reported_and_its_attempt_stays(store: FakeStore):
    writer = filled(store, 1, 2)
    store.objects["commits/000000001-g000001.json"] = b"{"
    report = run(store, writer)
    assert len(folders(store)) == 2
    assert "commits/000000001-g000001.json" in report.failed[0]


@pytest.mark.parametrize("error", [AccessDeniedError, NotFoundError, TransientError])
def test_what_a_listed_record_belongs_to_stays_whatever_keeps_it_from_being_read(store: FakeStore, error):
    """In the listing, so somebody sees a record there: that this reader does not makes no leftover of the data."""
    filled(store, 1, 2)
    save(store, second := manager(store), 3)

    def before(verb: str, key: str) -> None:
        if verb in ("read", "stat") and key == "commits/000000001-g000001.json":
            raise error("as planned")

    store.before = before
    report = run(store, second)
    assert [name[:14] for name in folders(store)] == ["step-000000001", "step-000000003"]
    assert [str(ref) for ref in report.deleted] == ["step 2 (generation 1)"]
    assert bool(report.failed) == (error is not NotFoundError)
    store.before = lambda verb, key: None
    assert steps(discover(store)) == [1, 3]


def test_before_the_first_commit_of_the_generation_nothing_is_collected(store: FakeStore):
    filled(store, 1, 2)
    writer = manager(store)
    writer.begin_attempt(3)
    before = dict(store.objects)
    assert run(store, writer) == SweepReport(idle="generation 2 has yet to commit")
    assert store.objects == before


def test_a_fenced_manager_deletes_nothing(store: FakeStore):
    old = filled(store, 1, 2)
    save(store, manager(store), 3)
    before = dict(store.objects)
    assert run(store, old).fenced_by == 2
    assert store.objects == before


def test_a_sweep_that_is_fenced_stops_after_the_deletion_it_was_in(store: FakeStore):
    writer = filled(store, 1, 2, 3)

    def after(verb: str, key: str) -> None:
        if verb == "delete" and key.startswith("commits/"):
            newer = schema.GenerationRecord(format=1, generation=2, nonce="other")
            store.objects[keys.generation_key(2)] = schema.encode(newer)

    store.after = after
    report = run(store, writer)
    assert report.fenced_by == 2
    assert list(report.deleted) == [CheckpointRef(1, 1)]
    assert len(folders(store)) == 3


def test_a_record_that_went_although_its_deletion_failed_leaves_garbage_for_the_next_sweep(store: FakeStore):
    writer = filled(store, 1, 2)

    def after(verb: str, key: str) -> None:
        if verb == "delete" and key.startswith("commits/"):
            raise StorageError("gone, and making that durable failed")

    store.after = after
    report = run(store, writer)
    assert not report.deleted
    assert [name[:14] for name in folders(store)] == ["step-000000001", "step-000000002"]
    store.after = lambda verb, key: None
    sweep(store, last(1), generation=1, failed=report.unfinished, begun=writer.begun)
    assert [name[:14] for name in folders(store)] == ["step-000000002"]


def test_a_failed_deletion_is_reported_and_breaks_no_order(store: FakeStore):
    writer = filled(store, 1, 2, 3)

    def deny(verb: str, key: str) -> None:
        if verb == "delete" and (key.startswith("commits/000000001") or "/manifest.json" in key):
            raise AccessDeniedError("no")

    store.before = deny
    report = run(store, writer)
    assert list(report.deleted) == [CheckpointRef(1, 2)]
    assert len(report.failed) == 2
    assert not verify_checkpoint(store, CheckpointRef(1, 1))  # its record stayed, so all of it did
    assert [name[:14] for name in report.unfinished] == ["step-000000001", "step-000000002"]  # to be looked at again
    assert any(key.endswith(".distcp") and key.startswith("step-000000002") for key in store.objects)
    store.before = lambda verb, key: None
    sweep(store, last(1), generation=1, failed=report.unfinished)
    assert [name[:14] for name in folders(store)] == ["step-000000003"]


@pytest.mark.parametrize("folder", ["pins/", "leases/"])
def test_if_the_store_cannot_be_looked_at_nothing_more_is_deleted(store: FakeStore, folder: str):
    writer = filled(store, 1, 2)
    looks = [0]

    def before(verb: str, key: str) -> None:
        if (verb, key) == ("list", folder):
            looks[0] += 1
            if looks[0] > 1:
                raise TransientError("down")

    store.before = before
    report = run(store, writer)
    assert not report.deleted
    assert report.failed
    looks[0] = 1
    with pytest.raises(TransientError):
        run(store, writer)
    assert steps(discover(store)) == [1, 2]


def test_data_that_was_held_when_its_record_went_is_removed_once_it_is_not(store: FakeStore):
    writer = filled(store, 1, 2)

    def after(verb: str, key: str) -> None:
        if verb == "delete" and key.startswith("commits/"):
            store.objects["leases/000000001-g000001-abcd.json"] = b"{}"

    store.after = after
    unfinished = run(store, writer).unfinished
    assert [name[:14] for name in unfinished] == ["step-000000001"]
    store.after = lambda verb, key: None
    for _ in range(2):  # as long as it is held it is remembered
        report = sweep(store, last(1), generation=1, failed=unfinished)
        assert (report.unfinished, report.attempts) == (unfinished, [])
    del store.objects["leases/000000001-g000001-abcd.json"]
    report = sweep(store, last(1), generation=1, failed=unfinished)
    assert (report.unfinished, report.attempts) == ([], unfinished)
    assert len(folders(store)) == 1


def test_uploads_that_a_dead_attempt_left_dangling_are_aborted(store: FakeStore):
    filled(store, 1)
    writer = manager(store)
    dead, live = "step-000000002-g000001-abcd", writer.begin_attempt(2)
    dangling = [Incomplete(f"{dead}/__0_0.distcp", "t1"), Incomplete(f"{live}/__0_0.distcp", "t2")]
    aborted: list[str] = []
    store.incomplete = lambda prefix: iter(dangling)  # type: ignore[method-assign]
    store.abort = lambda item: aborted.append(item.token)  # type: ignore[method-assign]
    save(store, writer, 2)
    assert run(store, writer, last(9)).attempts == [dead]
    assert aborted == ["t1"]


def test_records_that_a_crash_left_half_written_go_a_day_later_and_nobody_elses():
    store = FakeStore(clock=FakeClock())
    writer = filled(store, 1)
    now_s = discover(store).now_s
    assert now_s is not None
    old_s, young_s = now_s - 86_401, now_s - 86_399
    ours = ["resilio.json", "commits/000000009-g000001.json", "generations/000009.json"]
    ours += ["pins/000000001-g000001-abcd.json", "leases/000000001-g000001-abcd.json"]
    begun = [Incomplete(key, f"old {key}", old_s) for key in ours]
    begun += [Incomplete(key, "young", young_s) for key in ours] + [Incomplete(ours[0], "of unknown age", None)]
    begun += [Incomplete(key, "a stranger's", old_s) for key in ("notes.txt", "commits/latest", "mine/resilio.json")]
    aborted: list[str] = []
    store.incomplete = lambda prefix: iter(one for one in begun if one.key.startswith(prefix))  # type: ignore[method-assign]
    store.abort = lambda item: aborted.append(item.token)  # type: ignore[method-assign]
    run(store, writer)
    assert aborted == [f"old {key}" for key in ours]


# --- crashes: die before the n-th mutating operation, for all n ------------------------------------------------------


def life(store: FakeStore, acknowledged: list[CheckpointRef]) -> None:
    """Restore the newest, then save, save, sweep twice over, keeping one."""
    writer = manager(store)
    for _ in range(2):
        for _ in range(2):
            step = acknowledged[-1].step + 1 if acknowledged else 1
            acknowledged.append(save(store, writer, max(step, (writer.last.step if writer.last else 0) + 1)))
        run(store, writer, last(1))


def total_mutations() -> int:
    store = FakeStore()
    life(store, [])
    return store.mutations


@pytest.mark.parametrize("n", range(total_mutations()))
def test_a_crash_anywhere_leaves_the_newest_whole_and_the_next_life_goes_on_and_cleans_up(n: int):
    store = FakeStore(dies_at=n)
    acknowledged: list[CheckpointRef] = []
    with pytest.raises(Died):
        life(store, acknowledged)
    after = store.twin()
    catalog = discover(after)
    if acknowledged:
        assert catalog.newest is not None
        # the one acknowledged last, or one that was committed and whose answer the dead never saw
        assert catalog.newest >= acknowledged[-1]
    for ref in catalog.lineage:
        load_manifest(after, catalog.read(ref))
        assert verify_checkpoint(after, ref) == []

    writer = manager(after)
    ref = save(after, writer, catalog.newest.step + 1 if catalog.newest else 1)
    report = run(after, writer, last(1))
    assert not report.failed
    assert discover(after).commits == [ref]
    # A crash before any generation was made leaves an attempt under our own number; it goes with the next generation.
    assert all(name == discover(after).read(ref).attempt or "-g000001-" in name for name in folders(after))
    writer = manager(after)
    ref = save(after, writer, ref.step + 1)
    assert run(after, writer, last(1)).kept == {ref: "one of the last 1; newest of the lineage"}
    assert folders(after) == [discover(after).read(ref).attempt]
    with pytest.raises(FencedError):  # the dead one, should it have been only paused
        old = RunWriter(after)
        old.begin_attempt(99)


def test_the_crash_test_reaches_every_kind_of_state():
    """Crashes between record, manifest and data of a deletion are among them, and before each object of a save."""
    store = FakeStore()
    life(store, [])
    kinds = [
        "commit" if key.startswith("commits/") else "manifest" if key.endswith("/manifest.json") else "other"
        for verb, key in store.log
        if verb == "delete"
    ]
    assert kinds[:3] == ["commit", "manifest", "other"]
    assert store.mutations > 50
