"""How much of a small record is read: never more than such a record may have, however large the object is."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from records.fake_store import FakeStore, manager, save, steps

from resilio.errors import ConfigError, FormatError, ResilioError
from resilio.records import keys, schema
from resilio.records.catalog import discover, read_generation
from resilio.records.fates import explain
from resilio.records.holds import Holds, lease, pin, pins
from resilio.records.run import open_run, read_run, refuse_newer
from resilio.records.sweep import sweep
from resilio.records.verify import verify_checkpoint
from resilio.types import CheckpointRef

ONE, TWO = CheckpointRef(1, 1), CheckpointRef(1, 2)


class Sparse(bytes):
    """What a store says is 1 TiB."""

    def __len__(self) -> int:
        return 1 << 40


@pytest.fixture
def store() -> FakeStore:
    store = FakeStore()
    writer = manager(store)
    save(store, writer, 1)
    save(store, writer, 2)
    return store


def swell(store: FakeStore, key: str) -> None:
    """Make an object 1 TiB large; to read of it is a failure of the test."""
    store.objects[key] = Sparse()

    def before(verb: str, of: str) -> None:
        assert (verb, of) != ("read", key), "a terabyte is read"

    store.before = before


@pytest.mark.parametrize(
    "look",
    [
        lambda store: discover(store).read(ONE),
        lambda store: lease(store, ONE),
        lambda store: pin(store, ONE, "x"),
        lambda store: discover(store).info(ONE),
    ],
)
def test_a_commit_record_of_a_terabyte_is_damage(store: FakeStore, look: Callable[[FakeStore], Any]):
    swell(store, keys.commit_key(ONE))
    with pytest.raises(FormatError, match=r"1099511627776 bytes.*1048576"):
        look(store)
    infos, damaged = discover(store).checkpoints()
    assert ([info.step for info in infos], [one.where for one in damaged]) == ([2], [keys.commit_key(ONE)])
    assert [one.where for one in verify_checkpoint(store, ONE)] == [keys.commit_key(ONE)]
    assert explain(store, lambda infos: {}).checkpoints[0].kind == "damaged"


def test_a_generation_record_of_a_terabyte_is_damage(store: FakeStore):
    swell(store, keys.generation_key(1))
    for look in (discover, lambda store: read_generation(store, 1)):
        with pytest.raises(FormatError, match=r"generations/000001\.json.*1099511627776 bytes"):
            look(store)


def test_a_run_record_of_a_terabyte_is_damage(store: FakeStore):
    swell(store, keys.RUN)
    for look in (read_run, open_run):
        with pytest.raises(FormatError, match=r"resilio\.json.*1099511627776 bytes"):
            look(store)
    refuse_newer(store)


def test_a_pin_and_a_lease_of_a_terabyte_hold_and_are_passed_over(store: FakeStore):
    pin(store, ONE, "x")
    swell(store, next(key for key in store.objects if key.startswith("pins/")))
    assert pins(store) == []
    store.delete([keys.commit_key(ONE)])
    assert discover(store).pinned() == []
    store.before = lambda verb, key: None
    lease(store, TWO)
    swell(store, next(key for key in store.objects if key.startswith("leases/")))
    assert Holds(store, 9e9, manager(store)._clock).of(TWO) == "leased"


@pytest.mark.parametrize("key", [keys.commit_key(CheckpointRef(1, 3)), keys.generation_key(2)])
def test_what_lies_where_a_record_is_to_be_created_is_not_read_if_it_is_huge(store: FakeStore, key: str):
    """Listed by nobody: it comes between the look and the create."""
    writer = manager(store) if "generations" in key else None
    if writer is None:
        store = FakeStore()
        save(store, writer := manager(store), 1)
    real = store.put

    def put(of: str, data: Any, **more: Any) -> Any:
        if of == key and key not in store.objects:
            swell(store, key)
        return real(of, data, **more)

    store.put = put  # type: ignore[method-assign]
    with pytest.raises(ResilioError, match="1099511627776 bytes"):
        save(store, writer, 3)
    del store.objects[key]
    store.put, store.before = real, lambda verb, key: None  # type: ignore[method-assign]
    save(store, writer, 4)
    assert steps(discover(store))[-1] == 4


def test_the_size_is_asked_for_only_where_no_listing_told_it(store: FakeStore):
    pin(store, ONE, "x")
    store.log.clear()
    discover(store).checkpoints()
    assert [what for what in store.log if what[0] != "list"] == [
        ("read", keys.generation_key(1)),
        ("read", keys.commit_key(ONE)),
        ("read", keys.commit_key(TWO)),
    ]
    store.log.clear()
    sweep(store, lambda infos: {info.ref: "all" for info in infos}, generation=1)
    pins(store)
    assert not [what for what in store.log if what[0] == "stat"]


def test_a_record_that_could_not_be_read_again_is_not_written():
    store = FakeStore()
    writer = manager(store)
    attempt = writer.begin_attempt(1)
    with pytest.raises(ConfigError, match="metrics"):
        writer.commit(
            attempt,
            manifest_size_bytes=1,
            manifest_digest="xxh3_128:00",
            world=1,
            metrics={f"metric {i:0100d}": 0.5 for i in range(10_000)},
        )
    assert not [key for key in store.objects if key.startswith("commits/")]
    assert attempt in writer.failed
    save(store, writer, 2)


def test_a_generation_may_have_many_ancestors_and_a_pin_the_largest_commit():
    """A run of years that keeps all must go on; the record of its lineage is the one that grows."""
    ancestors = [schema.ParentRef(generation=1, step=step) for step in range(100_000)]
    record = schema.GenerationRecord(format=1, generation=2, nonce="n", ancestors=ancestors)
    store = FakeStore({keys.generation_key(2): schema.encode(record)})
    assert read_generation(store, 2) == record
    text = "\\" * schema.CommitRecord.limit_bytes
    assert len(schema.encode(schema.PinRecord(format=1, step=1, generation=1, because="x", commit=text))) > len(text)
