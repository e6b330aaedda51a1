"""The storages that come with resilio keep the promises. That these can be broken: `test_storage_contract_faults`."""

from __future__ import annotations

from pathlib import Path

from resilio.clock import FakeClock
from resilio.storage import LocalStorage, MemoryStorage, Storage, retrying
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
