"""The storages that come with resilio keep the promises. That these can be broken: `test_storage_contract_faults`."""

from __future__ import annotations

from pathlib import Path

from resilio.clock import FakeClock
from resilio.storage import Buffer, Capabilities, LocalStorage, MemoryStorage, ObjectInfo, Storage, retrying
from resilio.testing import StorageContract


class TestLocal(StorageContract):
    def make_storage(self, tmp_path: Path) -> Storage:
        return LocalStorage(tmp_path / "run")


class TestMemory(StorageContract):
    def make_storage(self, tmp_path: Path) -> Storage:
        return MemoryStorage(str(tmp_path))


class TestRetrying(StorageContract):
    many_objects = 50  # it has no pages of its own

    def make_storage(self, tmp_path: Path) -> Storage:
        return retrying(LocalStorage(tmp_path / "run"), clock=FakeClock())


class Overwriting(MemoryStorage):
    """Promises less, and so less is asked of it."""

    def __init__(self, name: str) -> None:
        super().__init__(name)
        self.capabilities = Capabilities(create_if_absent=False, shared=False)

    def put(self, key: str, data: Buffer, *, if_absent: bool = False) -> ObjectInfo:
        info = super().put(key, data)
        return ObjectInfo(info.key, info.size_bytes)  # and it does not tell when


class TestWithoutCreate(StorageContract):
    def make_storage(self, tmp_path: Path) -> Storage:
        return Overwriting(str(tmp_path))
