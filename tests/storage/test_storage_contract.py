"""The storages that come with resilio keep the promises, and the promises can be broken."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from fnmatch import fnmatch
from pathlib import Path

import pytest

from resilio.clock import FakeClock
from resilio.storage import Buffer, LocalStorage, MemoryStorage, ObjectInfo, Storage, Writer, check_key, retrying
from resilio.testing import StorageContract


class TestLocal(StorageContract):
    def make_storage(self, tmp_path: Path) -> Storage:
        return LocalStorage(tmp_path / "run")


class TestMemory(StorageContract):
    def make_storage(self, tmp_path: Path) -> Storage:
        return MemoryStorage(str(tmp_path))


class TestRetrying(StorageContract):
    def make_storage(self, tmp_path: Path) -> Storage:
        return retrying(LocalStorage(tmp_path / "run"), clock=FakeClock())


# ---- the contract sees what it is there to see: each of these storages breaks one promise


class PublishesOnError(MemoryStorage):
    @contextmanager
    def _writing(self, key: str) -> Iterator[Writer]:
        kept = bytearray()

        class Out:
            def write(self, data: Buffer) -> int:
                kept.extend(memoryview(data).cast("B"))
                return memoryview(data).nbytes

        try:
            yield Out()
        finally:
            self.put(key, kept)  # as a file object's __exit__ does


class GlobbingDelete(MemoryStorage):
    def delete(self, keys: Iterable[str]) -> None:
        for pattern in [check_key(key) for key in keys]:
            super().delete([info.key for info in self.list("") if fnmatch(info.key, pattern)])


class TwoWinners(MemoryStorage):
    def put(self, key: str, data: Buffer, *, if_absent: bool = False) -> ObjectInfo:
        if if_absent and self.exists(key):
            return super().put(key, data, if_absent=True)
        time.sleep(0)  # between the look and the deed others do the same
        return super().put(key, data)


class ShortReads(MemoryStorage):
    def read_into(self, key: str, ranges: Sequence[tuple[int, memoryview]]) -> None:
        data = self.get(key)
        for offset, buffer in ranges:
            part = data[offset : offset + len(buffer)]
            buffer[: len(part)] = part


class KeepsViews(MemoryStorage):
    @contextmanager
    def _writing(self, key: str) -> Iterator[Writer]:
        kept: list[memoryview] = []

        class Out:
            def write(self, data: Buffer) -> int:
                kept.append(memoryview(data).cast("B"))
                return memoryview(data).nbytes

        yield Out()
        self.put(key, b"".join(kept), if_absent=True)


class StaleListing(MemoryStorage):
    _seen: list[ObjectInfo] | None = None

    def list(self, prefix: str) -> Iterator[ObjectInfo]:
        if self._seen is None:
            self._seen = [*super().list(prefix)]
        return iter(self._seen)


class FolderPrefix(MemoryStorage):
    def list(self, prefix: str) -> Iterator[ObjectInfo]:
        return (info for info in super().list("") if not prefix or info.key.startswith(prefix.rstrip("/") + "/"))


class WalksFolderByFolder(MemoryStorage):
    def list(self, prefix: str) -> Iterator[ObjectInfo]:
        return iter(sorted(super().list(prefix), key=lambda info: info.key.split("/")))


class TakesAnyKey(MemoryStorage):
    def delete(self, keys: Iterable[str]) -> None:
        for key in keys:
            self._objects.pop(key, None)


@pytest.mark.parametrize(
    ("broken", "test", "arguments"),
    [
        (PublishesOnError, "an_exception_in_the_block_publishes_nothing", (RuntimeError, 10)),
        (GlobbingDelete, "delete_takes_keys_to_the_letter", ("exp*", "exp-good")),
        (TwoWinners, "create_if_absent_has_exactly_one_winner", ()),
        (ShortReads, "a_range_beyond_the_end_is_refused", (9, 2)),
        (KeepsViews, "buffers_may_be_reused_at_once", ()),
        (StaleListing, "listing_shows_every_change_at_once", ()),
        (FolderPrefix, "a_prefix_is_a_string", ()),
        (WalksFolderByFolder, "listing_is_complete_and_sorted_by_key", ()),
        (TakesAnyKey, "illegal_keys_are_refused_by_every_verb", ("../up",)),
    ],
)
def test_the_contract_fails_a_storage_that_breaks_it(
    tmp_path: Path, broken: type[MemoryStorage], test: str, arguments: tuple[object, ...]
) -> None:
    promise = getattr(StorageContract(), f"test_{test}")
    promise(MemoryStorage(f"{tmp_path}/sound"), *arguments)
    with pytest.raises((AssertionError, pytest.fail.Exception)):
        promise(broken(f"{tmp_path}/broken"), *arguments)
