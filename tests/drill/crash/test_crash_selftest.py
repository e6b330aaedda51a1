"""Every crash of every scenario leaves a run that can be restored; every planted bug is found; nothing stays behind."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from resilio.drill.crash import INVARIANTS, PLANTS, SCENARIOS, Report, crash_selftest
from resilio.errors import AlreadyExistsError, ConfigError, NotFoundError, TransientError
from resilio.hooks import open_storage
from resilio.storage.base import Capabilities, ObjectInfo, Storage


class DictStorage(Storage):
    """A user's own: one dict, no uploads to list, no times."""

    url = "dict://mine"
    capabilities = Capabilities(shared=False)

    def __init__(self) -> None:
        self.objects: dict[str, bytes] = {}

    def put(self, key: str, data: Any, *, if_absent: bool = False) -> ObjectInfo:
        if if_absent and key in self.objects:
            raise AlreadyExistsError(f"{key} exists", key=key)
        self.objects[key] = bytes(data)
        return ObjectInfo(key, len(data))

    @contextmanager
    def writer(self, key: str, *, size_hint: int | None = None) -> Iterator[Any]:
        class Out(bytearray):
            def write(self, data: Any) -> int:
                self.extend(data)
                return len(data)

        out = Out()
        yield out
        self.put(key, out, if_absent=True)

    def read_into(self, key: str, ranges: Sequence[tuple[int, memoryview]]) -> None:
        if key not in self.objects:
            raise NotFoundError(f"no {key}", key=key)
        for offset, buffer in ranges:
            buffer[:] = self.objects[key][offset : offset + len(buffer)]

    def list(self, prefix: str) -> Iterator[ObjectInfo]:
        return iter([ObjectInfo(k, len(v)) for k, v in sorted(self.objects.items()) if k.startswith(prefix)])

    def delete(self, keys: Iterable[str]) -> None:
        for key in keys:
            self.objects.pop(key, None)


def found(report: Report) -> set[tuple[str, str]]:
    return {(one.scenario, one.level) for one in report.scenarios if one.violated}


def test_no_crash_on_a_filesystem_loses_anything(tmp_path: Path) -> None:
    root = tmp_path / "runs"
    report = crash_selftest(open_storage(root), exhaustive=2, on_storage=1)
    assert [v for one in report.scenarios for v in one.violations] == []
    assert report.good
    assert not report.skipped
    assert report.left is None
    assert [(one.scenario, one.level) for one in report.scenarios] == [
        (name, level) for name in SCENARIOS for level in ("objects", "posix")
    ]
    for one in report.scenarios:
        assert one.states >= one.distinct > 30
        assert one.on_storage == 1
        assert one.operations > 30
        assert one.ended is None
        assert not one.stopped
    assert not root.exists()  # it was not there before


def test_no_crash_on_an_object_store_loses_anything() -> None:
    storage = open_storage("memory://crash-selftest")
    report = crash_selftest(storage, exhaustive=3, on_storage=1)
    assert [v for one in report.scenarios for v in one.violations] == []
    assert {one.level for one in report.scenarios} == {"objects"}
    assert sum(one.distinct for one in report.scenarios) > 1000
    assert [*storage.list("")] == []


def test_a_storage_of_a_users_own_is_tried_and_left_as_it_was() -> None:
    storage = DictStorage()
    storage.objects["step-000000001-g000001-7f3a/manifest.json"] = b"of a run"
    report = crash_selftest(storage, scenarios=["saves", "pins", "races"], exhaustive=2)
    assert report.good, report.violated
    assert storage.objects == {"step-000000001-g000001-7f3a/manifest.json": b"of a run"}


# The plant, the scenario that finds it, and what it breaks there.
FOUND = [
    ("commit-first", "saves", "order"),
    ("delete-order", "restarts", "order"),
    ("holds-ignored", "pins", "pinned"),
    ("no-dir-fsync", "saves", "acknowledged"),
    ("no-file-fsync", "saves", "repair"),
    ("rename-over", "races", "written-once"),
    ("reuse-attempt", "retries", "acknowledged"),
]


@pytest.mark.parametrize(("plant", "scenario", "invariant"), FOUND)
def test_a_planted_bug_is_found_by_name(tmp_path: Path, plant: str, scenario: str, invariant: str) -> None:
    report = crash_selftest(open_storage(tmp_path), plant=plant, scenarios=[scenario], exhaustive=2, on_storage=0)
    assert invariant in report.violated
    assert report.violated.keys() <= INVARIANTS.keys()
    assert [*tmp_path.iterdir()] == []


def test_every_bug_that_can_be_planted_has_a_test() -> None:
    assert [name for name, _, _ in FOUND] == [*PLANTS]


@pytest.mark.parametrize(("plant", "scenario", "invariant"), [one for one in FOUND if not PLANTS[one[0]].disk])
def test_bugs_above_the_storage_are_found_on_any(plant: str, scenario: str, invariant: str) -> None:
    report = crash_selftest(DictStorage(), plant=plant, scenarios=[scenario], exhaustive=2, on_storage=0)
    assert invariant in report.violated


def test_a_bug_that_this_storage_cannot_have_is_refused_before_anything_is_written() -> None:
    storage = DictStorage()
    with pytest.raises(ConfigError, match=r"file://"):
        crash_selftest(storage, plant="no-dir-fsync")
    with pytest.raises(ConfigError, match="commit-first"):
        crash_selftest(storage, plant="no-such-bug")
    assert storage.objects == {}


class LateListing(DictStorage):
    """Lists an object only after it was listed without it once."""

    def __init__(self) -> None:
        super().__init__()
        self.listed: set[str] = set()

    def list(self, prefix: str) -> Iterator[ObjectInfo]:
        shown = [info for info in super().list(prefix) if info.key in self.listed]
        self.listed |= {key for key in self.objects if key.startswith(prefix)}
        return iter(shown)

    def stat(self, key: str) -> ObjectInfo:
        if key not in self.objects:
            raise NotFoundError(f"no {key}", key=key)
        return ObjectInfo(key, len(self.objects[key]))


class LastOneWins(DictStorage):
    """Promises that a create has one winner, and overwrites."""

    def put(self, key: str, data: Any, *, if_absent: bool = False) -> ObjectInfo:
        return super().put(key, data)


class Forgetful(DictStorage):
    """Loses the last byte."""

    def put(self, key: str, data: Any, *, if_absent: bool = False) -> ObjectInfo:
        super().put(key, bytes(data)[:-1] if key.endswith(".digests") else data, if_absent=if_absent)
        return ObjectInfo(key, len(data))


@pytest.mark.parametrize(
    ("storage", "scenario", "invariant"),
    [(LateListing, "saves", "answers"), (LastOneWins, "races", "written-once"), (Forgetful, "saves", "answers")],
)
def test_a_storage_that_breaks_its_promises_is_found_out(
    storage: type[DictStorage], scenario: str, invariant: str
) -> None:
    report = crash_selftest(storage(), scenarios=[scenario], exhaustive=2, on_storage=0)
    assert invariant in report.violated


def test_a_storage_without_create_if_absent_is_tried_without_a_race() -> None:
    storage = LastOneWins()
    storage.capabilities = Capabilities(create_if_absent=False, shared=False)
    report = crash_selftest(storage, scenarios=["saves", "races"], exhaustive=1, on_storage=0)
    assert report.good
    assert [*report.skipped] == ["races"]


def test_a_storage_that_fails_is_an_error_and_no_verdict() -> None:
    class Broken(DictStorage):
        def put(self, key: str, data: Any, *, if_absent: bool = False) -> ObjectInfo:
            if "/commits/" in key:
                raise ConnectionRefusedError("down")
            return super().put(key, data, if_absent=if_absent)

    storage = Broken()
    with pytest.raises(ConnectionRefusedError, match="down"):
        crash_selftest(storage)
    assert storage.objects == {}


def test_an_interrupted_selftest_leaves_nothing(tmp_path: Path) -> None:
    (tmp_path / "mine").write_text("x")

    def interrupt(what: str, done: int, total: int) -> None:
        assert len([*tmp_path.iterdir()]) == 2  # it is at it
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        crash_selftest(open_storage(tmp_path), progress=interrupt)
    assert [path.name for path in tmp_path.iterdir()] == ["mine"]


def test_what_cannot_be_removed_is_told() -> None:
    class Sticky(DictStorage):
        def delete(self, keys: Iterable[str]) -> None:
            which = [*keys]
            if len(which) > 15:  # only the clean-up asks for so many
                raise TransientError("no answer")
            super().delete(which)

    report = crash_selftest(Sticky(), scenarios=["saves"], exhaustive=1, on_storage=0)
    assert report.good
    assert "resilio-selftest-" in (report.left or "")
