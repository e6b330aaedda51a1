"""Quarantine: what is written against a checkpoint counts, whatever it holds; nothing moves; it can be taken back."""

from __future__ import annotations

import logging

import pytest
from records.fake_store import FakeStore, edited, manager, save

from resilio.clock import FakeClock
from resilio.errors import AccessDeniedError, ConfigError, NoCheckpointError
from resilio.policies import keep_last
from resilio.records import keys
from resilio.records.catalog import discover
from resilio.records.fates import explain
from resilio.records.holds import pin
from resilio.records.quarantine import listed, quarantine, quarantined, release, why
from resilio.records.sweep import sweep
from resilio.types import CheckpointInfo, CheckpointRef, Damage

ONE, TWO, THREE = CheckpointRef(1, 1), CheckpointRef(1, 2), CheckpointRef(1, 3)


@pytest.fixture
def store() -> FakeStore:
    store = FakeStore(clock=FakeClock())
    writer = manager(store)
    for step in (1, 2, 3):
        save(store, writer, step)
    return store


def records(store: FakeStore) -> list[str]:
    return [key for key in store.objects if key.startswith("quarantine/")]


def test_it_is_written_down_with_reason_and_findings_and_nothing_else_changes(store: FakeStore):
    before = dict(store.objects)
    clock = FakeClock()
    found = [
        Damage("step-x/__0_0.distcp", "tensor 'w' is damaged in block 1"),
        Damage("step-x/.metadata", "is missing"),
    ]
    record = quarantine(store, TWO, "bad disk", found, more=3, found_by="verify", clock=clock)
    assert record is not None
    (key,) = store.objects.keys() - before.keys()
    assert {name: store.objects[name] for name in before} == before
    assert keys.parse_hold(key) == keys.parse_about(key) == TWO
    (read,) = quarantined(store)[TWO].records
    assert read == record
    assert (read.because, read.found_by, read.time_s, read.more) == ("bad disk", "verify", clock.now_s, 3)
    assert keys.parse_attempt(read.attempt) == TWO and read.version
    assert [(one.where, one.what) for one in read.problems] == [(one.where, one.what) for one in found]
    said = why(store, TWO, listed(store)[TWO])
    assert said == "bad disk: step-x/__0_0.distcp: tensor 'w' is damaged in block 1, and 4 more"
    assert release(store, TWO) == 1 and store.objects == before and release(store, TWO) == 0


def test_the_same_finding_is_written_once_and_another_beside_it(store: FakeStore):
    found = [Damage("a", "is missing")]
    assert quarantine(store, TWO, "x", found) is not None
    assert quarantine(store, TWO, "x", found) is None
    assert quarantine(store, TWO, "x", [Damage("b", "is missing")]) is not None
    assert quarantine(store, TWO, "y") is not None
    assert quarantine(store, ONE, "x", found) is not None
    assert len(records(store)) == 4
    assert quarantined(store)[TWO].why == "x: a: is missing; x: b: is missing; y"
    assert release(store, TWO) == 3
    assert list(listed(store)) == [ONE]


@pytest.mark.parametrize("gone", ["commit", "attempt"])
def test_what_is_no_such_checkpoint_any_more_gets_nothing(store: FakeStore, gone: str):
    attempt = discover(store).read(TWO).attempt
    if gone == "commit":
        del store.objects[keys.commit_key(TWO)]
    else:
        attempt = "step-000000002-g000001-0123456789abcdef"
    with pytest.raises(NoCheckpointError):
        quarantine(store, TWO, "x", attempt=attempt)
    assert records(store) == []


def test_the_commit_record_is_looked_at_last_before_it_is_written(store: FakeStore):
    """So what was found damaged was not being deleted while it was looked at."""
    store.log.clear()
    quarantine(store, TWO, "x")
    put = next(number for number, (verb, _) in enumerate(store.log) if verb == "put")
    assert store.log[put - 1] == ("read", keys.commit_key(TWO))


def test_one_without_a_manifest_or_with_a_damaged_record_and_one_that_a_pin_holds_can_be_quarantined(store: FakeStore):
    del store.objects[keys.attempt_key(discover(store).read(ONE).attempt, keys.MANIFEST)]
    store.objects[keys.commit_key(TWO)] = b"{}"
    pin(store, THREE, "mine")
    del store.objects[keys.commit_key(THREE)]
    for ref in (ONE, TWO, THREE):
        assert quarantine(store, ref, "x") is not None
    assert list(quarantined(store)) == [ONE, TWO, THREE]


def good(store: FakeStore) -> bytes:
    quarantine(store, ONE, "x")
    (key,) = records(store)
    return store.objects.pop(key)


@pytest.mark.parametrize(
    ("name", "data"),
    [
        ("000000002-g000001-7f3a7f3a.json", b"no JSON"),
        ("000000002-g000001-7f3a7f3a.json", b""),
        ("000000002-g000001-7f3a7f3a.json", b"another's"),
        ("000000002-g000001-7f3a7f3a.json", b"newer"),
        ("000000002-g000001-7f3a7f3a.json", b" " * ((1 << 20) + 1)),
        ("000000002-g000001.bak", b"{}"),
    ],
)
def test_one_that_cannot_be_read_counts_with_a_warning(store: FakeStore, caplog, name: str, data: bytes):
    record = good(store)
    if data == b"another's":
        data = record
    elif data == b"newer":
        data = edited(record, b'"format":1', b'"format":2')
    store.objects[f"quarantine/{name}"] = data
    with caplog.at_level(logging.WARNING, "resilio"):
        found = quarantined(store)
    assert list(found) == [TWO] and found[TWO].records == () and "cannot be read" in found[TWO].why
    assert name in caplog.text
    explained = {fate.ref.step: fate.why for fate in explain(store, lambda infos: {infos[-1].ref: "x"}).checkpoints}
    assert "newest that is not quarantined" not in explained[2]
    assert release(store, TWO) == 1


def test_a_record_that_may_not_be_read_counts_too(store: FakeStore):
    quarantine(store, TWO, "x")

    def before(verb: str, key: str) -> None:
        if verb == "read" and key.startswith("quarantine/"):
            raise AccessDeniedError(f"{key}: a link")

    store.before = before
    assert "a link" in quarantined(store)[TWO].why


@pytest.mark.parametrize("name", ["x", "../commits/000000002-g000001.json", "000000002-g000000-7f3a.json", "２-g1"])
def test_names_that_are_about_nothing_are_passed_over(store: FakeStore, name: str):
    store.objects[f"quarantine/{name}"] = b"{}"
    assert listed(store) == {} and release(store, TWO) == 0 and keys.commit_key(TWO) in store.objects


def test_what_is_written_stays_small_whatever_was_found(store: FakeStore):
    found = [Damage("\x01" * 5000 + str(number), "\U0001f525" * 5000) for number in range(3000)]
    record = quarantine(store, TWO, "\udcff", found)
    assert record is not None and len(record.problems) == 100 and record.more == 2900
    assert quarantined(store)[TWO].records == (record,)
    assert quarantine(store, TWO, "\udcff", found) is None


@pytest.mark.parametrize("because", ["", "  ", "x" * 4097, "\udcff" * 4000])
def test_a_reason_is_given_and_has_bounds(store: FakeStore, because: str):
    with pytest.raises(ConfigError, match="says why"):
        quarantine(store, TWO, because)
    assert records(store) == []


def test_three_to_keep_are_three_that_can_be_resumed_from_and_it_lives_as_if_it_were_not(store: FakeStore):
    writer = manager(store)
    for step in (4, 5, 6):
        save(store, writer, step)
    quarantine(store, CheckpointRef(2, 5), "x")
    policy = keep_last(3)

    def keep(infos: list[CheckpointInfo]) -> dict[CheckpointRef, str]:
        return policy.reasons(infos, 0.0)

    told = {fate.ref.step: fate.why for fate in explain(store, keep).checkpoints if not fate.goes}
    assert set(told) == {3, 4, 5, 6}
    assert told[3].endswith("of those that are not quarantined") and "quarantined" not in told[4]
    sweep(store, keep, generation=2)
    assert [ref.step for ref in discover(store).lineage] == [3, 4, 5, 6]
    release(store, CheckpointRef(2, 5))
    sweep(store, keep, generation=2)
    assert [ref.step for ref in discover(store).lineage] == [4, 5, 6]
