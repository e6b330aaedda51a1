"""Bugs to plant: a check that finds nothing proves nothing until it has found these."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from ...errors import NotFoundError
from ...records import keys
from ...storage.base import Buffer, ObjectInfo, Storage
from .log import Log
from .recorder import RecordingDisk, Wrapper

__all__ = ["HEALTHY", "PLANTS", "Plant"]


@dataclass(frozen=True)
class Plant:
    """A bug.

    Attributes:
        what: it does.
        storage: a storage that has it, on top of a good one; None: the bug is elsewhere.
        disk: a filesystem on which the storage has it; None: the bug is elsewhere. Only for ``file://``.
        reuse: whether a retry reuses the folder of the attempt that failed.
    """

    what: str
    storage: Callable[[Storage], Storage] | None = None
    disk: Callable[[Log, str], RecordingDisk] | None = None
    reuse: bool = False


class _CommitFirst(Wrapper):
    """The manifest is written after the commit record; until then it only looks as if it were there."""

    def __init__(self, inner: Storage) -> None:
        super().__init__(inner)
        self._held: dict[str, bytes] = {}

    def put(self, key: str, data: Buffer, *, if_absent: bool = False) -> ObjectInfo:
        if key.endswith(f"/{keys.MANIFEST}"):
            self._held[key] = bytes(data)
            return ObjectInfo(key, len(data))
        info = self.inner.put(key, data, if_absent=if_absent)
        if key.startswith(keys.COMMITS):
            for held in list(self._held):
                self.inner.put(held, self._held.pop(held))
        return info

    def list(self, prefix: str) -> Iterator[ObjectInfo]:
        held = [ObjectInfo(key, len(data)) for key, data in self._held.items() if key.startswith(prefix)]
        return iter(sorted([*self.inner.list(prefix), *held], key=lambda info: info.key))


class _RecordLast(Wrapper):
    """A checkpoint's commit record is deleted after its folder; until then it only looks as if it were gone."""

    def __init__(self, inner: Storage) -> None:
        super().__init__(inner)
        self._held: set[str] = set()

    def delete(self, doomed: Iterable[str]) -> None:
        which = list(doomed)
        self._held |= {key for key in which if keys.parse_commit(key)}
        self.inner.delete([key for key in which if key not in self._held])
        data = [key for key in which if keys.split_attempt_key(key) and not key.endswith(f"/{keys.MANIFEST}")]
        if data and self._held:
            self.inner.delete(sorted(self._held))
            self._held.clear()

    def list(self, prefix: str) -> Iterator[ObjectInfo]:
        return iter([info for info in self.inner.list(prefix) if info.key not in self._held])

    def get(self, key: str) -> bytes:
        if key in self._held:
            raise NotFoundError(f"{self.url}: no object {key!r}", key=key)
        return self.inner.get(key)


class _RenameOver(Wrapper):
    """Whoever creates an object overwrites the one that is there."""

    def put(self, key: str, data: Buffer, *, if_absent: bool = False) -> ObjectInfo:
        return self.inner.put(key, data)


class _Unheld(Wrapper):
    """Pins and leases are written, and not seen by who deletes."""

    def list(self, prefix: str) -> Iterator[ObjectInfo]:
        hidden = prefix in (keys.PINS, keys.LEASES)
        return iter(()) if hidden else self.inner.list(prefix)


class _NoFolderSync(RecordingDisk):
    def sync_folder(self, folder: Path) -> None:
        """Left out."""


class _NoFileSync(RecordingDisk):
    def sync(self, fd: int) -> None:
        """Left out."""


HEALTHY = Plant("no bug")

PLANTS: dict[str, Plant] = {
    "commit-first": Plant("the commit record is written before the manifest", _CommitFirst),
    "delete-order": Plant("manifest and data are deleted before the commit record", _RecordLast),
    "holds-ignored": Plant("a sweep sees neither pins nor leases", _Unheld),
    "no-dir-fsync": Plant("the fsync of a folder is left out", disk=_NoFolderSync),
    "no-file-fsync": Plant("the fsync of a file is left out", disk=_NoFileSync),
    "rename-over": Plant("a create overwrites what is there, as rename does", _RenameOver),
    "reuse-attempt": Plant("a retry writes into the folder of the attempt that failed", reuse=True),
}
