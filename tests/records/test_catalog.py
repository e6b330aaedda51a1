from __future__ import annotations

import threading
from typing import Any

import pytest
from records.fake_store import FakeStore, forged, manager, save, steps

from resilio.errors import (
    AccessDeniedError,
    FormatError,
    IntegrityError,
    NewerFormatError,
    NoCheckpointError,
    NotFoundError,
)
from resilio.records import keys, schema
from resilio.records.catalog import discover
from resilio.records.protocol import RunWriter
from resilio.records.run import check_folder, open_run, read_run
from resilio.types import CheckpointRef


@pytest.fixture
def store() -> FakeStore:
    return FakeStore()


def branched(store: FakeStore) -> None:
    """Generation 1 saves 10, 20, 30; generation 2 goes back to 20 and saves 25."""
    first = manager(store)
    for step in (10, 20, 30):
        save(store, first, step)
    save(store, manager(store, CheckpointRef(1, 20)), 25)


def test_discovery_is_three_requests(store: FakeStore):
    branched(store)
    store.log.clear()
    catalog = discover(store)
    assert [what for what in store.log if what[0] == "list"] == [("list", "commits/"), ("list", "generations/")]
    assert [key for verb, key in store.log if verb == "read"] == ["generations/000002.json"]
    assert steps(catalog) == [10, 20, 25]


def test_an_empty_store_has_an_empty_catalog(store: FakeStore):
    catalog = discover(store)
    assert (catalog.lineage, catalog.off_lineage, catalog.newest, catalog.newest_generation) == ([], [], None, 0)
    assert catalog.checkpoints() == ([], [])


def test_what_a_newer_branch_left_behind_is_off_the_lineage(store: FakeStore):
    branched(store)
    catalog = discover(store)
    assert catalog.newest == CheckpointRef(2, 25)
    assert catalog.off_lineage == [CheckpointRef(1, 30)]
    infos, damaged = catalog.checkpoints()
    assert [(i.step, i.on_lineage) for i in infos] == [(30, False), (10, True), (20, True), (25, True)]
    assert not damaged
    assert infos[-1].metrics == {"loss": 1.5}
    assert catalog.find(30) == CheckpointRef(1, 30)
    with pytest.raises(NoCheckpointError, match="25"):
        catalog.find(11)


def test_records_in_a_store_that_takes_several_reads_at_once_are_read_so(store: FakeStore):
    branched(store)
    catalog = discover(store)
    meeting, real = threading.Barrier(store.capabilities.concurrency), store.read_into

    def met(key: str, ranges: Any) -> None:
        meeting.wait(timeout=30)  # broken if one of them has to be read before another
        real(key, ranges)

    store.read_into = met  # type: ignore[method-assign]
    infos, damaged = catalog.checkpoints()
    assert [info.step for info in infos] == [30, 10, 20, 25] and not damaged


def test_a_step_on_the_lineage_is_found_before_one_off_it(store: FakeStore):
    branched(store)
    save(store, manager(store, CheckpointRef(2, 25)), 30)
    assert discover(store).find(30) == CheckpointRef(3, 30)


def test_a_generation_counts_from_its_first_commit(store: FakeStore):
    branched(store)
    writer = manager(store, CheckpointRef(1, 10))
    attempt = writer.begin_attempt(11)
    store.put(keys.generation_key(3), schema.encode(schema.GenerationRecord(format=1, generation=3, nonce="n")))
    assert attempt.startswith("step-000000011-g000003-")
    catalog = discover(store)
    assert steps(catalog) == [10, 20, 25]
    assert catalog.newest_generation == 3


def test_ancestors_whose_commit_is_gone_are_not_on_the_lineage(store: FakeStore):
    branched(store)
    store.delete([keys.commit_key(CheckpointRef(1, 10))])
    assert steps(discover(store)) == [20, 25]


def test_the_line_of_an_abandoned_checkpoint_is_its_own(store: FakeStore):
    branched(store)
    catalog = discover(store)
    assert [r.step for r in catalog.line_of(CheckpointRef(1, 30))] == [10, 20, 30]
    assert [r.step for r in catalog.line_of(CheckpointRef(1, 20))] == [10, 20]
    # and a manager that goes on from it has that line
    save(store, manager(store, CheckpointRef(1, 30)), 31)
    assert steps(discover(store)) == [10, 20, 30, 31]


def test_names_that_are_not_ours_are_ignored(store: FakeStore):
    branched(store)
    for key in ("commits/999999999-g999999.json.bak", "commits/readme", "generations/x.json", "step-9/x", "notes"):
        store.put(key, b"?")
    assert steps(discover(store)) == [10, 20, 25]


def test_nothing_is_cached_between_discoveries_but_records_that_exist(store: FakeStore):
    writer = manager(store)
    save(store, writer, 1)
    cache: dict = {}
    discover(store, cache).checkpoints()
    save(store, writer, 2)
    store.log.clear()
    catalog = discover(store, cache)
    assert steps(catalog) == [1, 2]
    catalog.checkpoints()
    reads = {key for verb, key in store.log if verb == "read" and key.startswith("commits/")}
    assert reads == {keys.commit_key(CheckpointRef(1, 2))}
    store.delete([keys.commit_key(CheckpointRef(1, 1))])
    with pytest.raises(NotFoundError):
        discover(store, cache).read(CheckpointRef(1, 1))


@pytest.mark.parametrize("field", ["step", "generation", "attempt"])
def test_a_record_that_is_not_what_its_name_says_is_refused(store: FakeStore, field: str):
    ref = save(store, manager(store), 7)
    record = discover(store).read(ref)
    key = keys.commit_key(ref)
    wrong = {"step": 8, "generation": 2, "attempt": "step-000000008-g000001-abcd"}
    setattr(record, field, wrong[field])
    store.objects[key] = schema.encode(record)
    with pytest.raises(FormatError, match="000000007"):
        discover(store).read(ref)
    infos, damaged = discover(store).checkpoints()
    assert not infos
    assert damaged[0].where == key


def test_a_record_that_may_not_be_read_is_damaged_and_the_others_are_listed(store: FakeStore):
    branched(store)
    key = keys.commit_key(CheckpointRef(1, 20))

    def before(verb: str, of: str) -> None:
        if of == key:
            raise AccessDeniedError("a link")

    store.before = before
    infos, damaged = discover(store).checkpoints()
    assert [info.step for info in infos] == [30, 10, 25]
    assert [(one.where, one.what) for one in damaged] == [(key, "a link")]


def test_a_commit_without_its_generation_record_is_an_error_that_names_it(store: FakeStore):
    save(store, manager(store), 7)
    store.delete([keys.generation_key(1)])
    with pytest.raises(IntegrityError, match="generations/000001"):
        discover(store)


def test_a_generation_record_that_names_later_ancestors_is_refused(store: FakeStore):
    save(store, manager(store), 7)
    record = schema.GenerationRecord(
        format=1, generation=1, nonce="n", ancestors=[schema.ParentRef(generation=1, step=7)]
    )
    store.objects[keys.generation_key(1)] = schema.encode(record)
    with pytest.raises(FormatError):
        discover(store)


def test_a_run_is_made_once_and_adopted_by_the_others(store: FakeStore):
    assert read_run(store) is None
    mine = open_run(store)
    assert open_run(store.twin()) == mine == read_run(store)
    other = FakeStore()
    other.before = lambda verb, key: other.objects.setdefault(keys.RUN, schema.encode(mine)) if verb == "put" else None
    assert open_run(other) == mine  # made by another between the look and the create


def test_a_run_of_a_newer_resilio_is_refused(store: FakeStore):
    store.put(keys.RUN, forged({"format": 2, "run_id": "x", "what": []}))
    with pytest.raises(NewerFormatError):
        read_run(store)
    writer = RunWriter(store)
    with pytest.raises(NewerFormatError):
        save(store, writer, 1)
    assert not [key for key in store.objects if key.startswith(("commits/", "generations/"))]


def test_the_folder_must_hold_what_the_ranks_say(store: FakeStore):
    attempt = "step-000000001-g000001-abcd"
    store.put(f"{attempt}/a", b"12345")
    store.put(f"{attempt}/b", b"12345")
    check_folder(store, attempt, {"a": 5, "b": 5})
    with pytest.raises(IntegrityError, match="file://") as caught:
        check_folder(store, attempt, {"a": 5, "b": 6, "c": 1})
    assert (caught.value.missing, caught.value.differing) == (["c"], ["b"])
