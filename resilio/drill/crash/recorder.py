"""Storages that watch: one that lives under a prefix, one that logs, and a disk that logs."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace
from pathlib import Path

from ...errors import NotFoundError
from ...storage.base import Buffer, Incomplete, ObjectInfo, Storage, Writer, byte_view, check_key
from ...storage.disk import Disk
from .log import Begin, Create, Delete, Dropped, Link, Log, Mkdir, Put, Replace, Sync, SyncFolder, Unlink, Write

__all__ = ["RecordingDisk", "RecordingStorage", "Scratch", "Wrapper"]


class Wrapper(Storage):
    """Passes everything on: a base for storages that change one thing of another.

    Attributes:
        inner: the storage that does the work.
    """

    def __init__(self, inner: Storage) -> None:
        self.inner = inner
        self.url = inner.url
        self.capabilities = inner.capabilities

    def put(self, key: str, data: Buffer, *, if_absent: bool = False) -> ObjectInfo:
        """See `Storage.put`."""
        return self.inner.put(key, data, if_absent=if_absent)

    def writer(self, key: str, *, size_hint: int | None = None) -> AbstractContextManager[Writer]:
        """See `Storage.writer`."""
        return self.inner.writer(key, size_hint=size_hint)

    def read_into(self, key: str, ranges: Sequence[tuple[int, memoryview]]) -> None:
        """See `Storage.read_into`."""
        self.inner.read_into(key, ranges)

    def list(self, prefix: str) -> Iterator[ObjectInfo]:
        """See `Storage.list`."""
        return self.inner.list(prefix)

    def delete(self, keys: Iterable[str]) -> None:
        """See `Storage.delete`."""
        self.inner.delete(keys)

    def incomplete(self, prefix: str) -> Iterator[Incomplete]:
        """See `Storage.incomplete`."""
        return self.inner.incomplete(prefix)

    def abort(self, item: Incomplete) -> None:
        """See `Storage.abort`."""
        self.inner.abort(item)

    def get(self, key: str) -> bytes:
        """See `Storage.get`."""
        return self.inner.get(key)

    def stat(self, key: str) -> ObjectInfo:
        """See `Storage.stat`."""
        return self.inner.stat(key)

    def close(self) -> None:
        """See `Storage.close`."""
        self.inner.close()


class Scratch(Wrapper):
    """A part of another storage: all that lies under `prefix`, and nothing else can be reached.

    Args:
        inner: the other storage.
        prefix: ends with a slash.
    """

    def __init__(self, inner: Storage, prefix: str) -> None:
        super().__init__(inner)
        self.prefix = prefix
        self.url = f"{inner.url.rstrip('/')}/{prefix.rstrip('/')}"
        self.capabilities = replace(inner.capabilities, local_path=None)

    def put(self, key: str, data: Buffer, *, if_absent: bool = False) -> ObjectInfo:
        """See `Storage.put`."""
        return self._ours(self.inner.put(self._key(key), data, if_absent=if_absent))

    def writer(self, key: str, *, size_hint: int | None = None) -> AbstractContextManager[Writer]:
        """See `Storage.writer`."""
        return self.inner.writer(self._key(key), size_hint=size_hint)

    def read_into(self, key: str, ranges: Sequence[tuple[int, memoryview]]) -> None:
        """See `Storage.read_into`."""
        self.inner.read_into(self._key(key), ranges)

    def list(self, prefix: str) -> Iterator[ObjectInfo]:
        """See `Storage.list`."""
        return map(self._ours, self.inner.list(self.prefix + prefix))

    def delete(self, keys: Iterable[str]) -> None:
        """See `Storage.delete`."""
        self.inner.delete([self._key(key) for key in keys])

    def incomplete(self, prefix: str) -> Iterator[Incomplete]:
        """See `Storage.incomplete`."""
        for item in self.inner.incomplete(self.prefix + prefix):
            yield replace(item, key=item.key.removeprefix(self.prefix))

    def abort(self, item: Incomplete) -> None:
        """See `Storage.abort`."""
        self.inner.abort(replace(item, key=self.prefix + item.key))

    def get(self, key: str) -> bytes:
        """See `Storage.get`."""
        return self.inner.get(self._key(key))

    def stat(self, key: str) -> ObjectInfo:
        """See `Storage.stat`."""
        return self._ours(self.inner.stat(self._key(key)))

    def clear(self) -> None:
        """Delete all there is, unfinished uploads too."""
        for item in [*self.incomplete("")]:
            self.abort(item)
        self.delete([info.key for info in self.list("")])

    def _key(self, key: str) -> str:
        return self.prefix + check_key(key)  # before it is a part of another: `..` must not lead out

    def _ours(self, info: ObjectInfo) -> ObjectInfo:
        return replace(info, key=info.key.removeprefix(self.prefix))


class RecordingStorage(Wrapper):
    """Logs every change, and compares every answer with what was written.

    Args:
        inner: an empty storage that nobody else uses.
        log: where it notes them.

    Attributes:
        before: called with (verb, key) before each change: for scenarios in which somebody else comes between.
        late: whether a put of this key is one whose answer never comes; it is noted and not done.
    """

    def __init__(self, inner: Storage, log: Log) -> None:
        super().__init__(inner)
        self.log = log
        self.before: Callable[[str, str], None] = lambda verb, key: None
        self.late: Callable[[str], bool] = lambda key: False
        self._objects: dict[str, bytes] = {}  # what must be there

    def put(self, key: str, data: Buffer, *, if_absent: bool = False) -> ObjectInfo:
        """See `Storage.put`."""
        lane, content = self.log.lane, bytes(byte_view(data))
        if self.late(key):
            self.log.add(Put(key, content, if_absent, lane, late=True))
            raise TimeoutError(f"no answer for {key}")
        self.before("put", key)
        info = self.inner.put(key, data, if_absent=if_absent)
        self._appeared(Put(key, content, if_absent, lane))
        return info

    def writer(self, key: str, *, size_hint: int | None = None) -> AbstractContextManager[Writer]:
        """See `Storage.writer`."""
        return self._writing(key, size_hint)

    @contextmanager
    def _writing(self, key: str, size_hint: int | None) -> Iterator[Writer]:
        lane = self.log.lane
        try:
            with self.inner.writer(key, size_hint=size_hint) as out:
                self.log.add(Begin(key, lane))
                seen = _Seen(out)
                yield seen
        except BaseException:
            self.log.add(Dropped(key, lane))
            raise
        self._appeared(Put(key, bytes(seen.data), True, lane))

    def _appeared(self, put: Put) -> None:
        old = self._objects.get(put.key)
        if old is not None and old != put.data:
            self.log.note("written-once", f"{put.key} was written again, with other bytes")
        elif old is not None and put.if_absent:
            self.log.note("answers", f"{put.key} was created although it was there")
        self._objects[put.key] = put.data
        self.log.add(put)

    def delete(self, keys: Iterable[str]) -> None:
        """See `Storage.delete`."""
        doomed = tuple(keys)
        for key in doomed:
            self.before("delete", key)
        self.inner.delete(doomed)
        for key in doomed:
            self._objects.pop(key, None)
        self.log.add(Delete(doomed, self.log.lane))

    def list(self, prefix: str) -> Iterator[ObjectInfo]:
        """See `Storage.list`."""
        found = [*self.inner.list(prefix)]
        says = {info.key: info.size_bytes for info in found}
        is_there = {key: len(data) for key, data in self._objects.items() if key.startswith(prefix)}
        for key in sorted(says.keys() | is_there.keys()):
            if says.get(key) != is_there.get(key):
                self.log.note(
                    "answers", f"a listing of {prefix!r} shows {key} with {_size(says, key)}; {_size(is_there, key)}"
                )
        return iter(found)

    def get(self, key: str) -> bytes:
        """See `Storage.get`."""
        try:
            data = self.inner.get(key)
        except NotFoundError:
            if key in self._objects:
                self.log.note("answers", f"{key} is said to be missing; it was written")
            raise
        if data != self._objects.get(key):
            self.log.note("answers", f"{key} is not read as it was written")
        return data

    def stat(self, key: str) -> ObjectInfo:
        """See `Storage.stat`."""
        try:
            info = self.inner.stat(key)
        except NotFoundError:
            if key in self._objects:
                self.log.note("answers", f"{key} is said to be missing; it was written")
            raise
        if info.size_bytes != len(self._objects.get(key, b"")) or key not in self._objects:
            self.log.note("answers", f"{key} has not the length it was written with")
        return info

    def read_into(self, key: str, ranges: Sequence[tuple[int, memoryview]]) -> None:
        """See `Storage.read_into`."""
        self.inner.read_into(key, ranges)
        for offset, buffer in ranges:
            if self._objects.get(key, b"")[offset : offset + len(buffer)] != buffer:
                self.log.note("answers", f"{key} is not read as it was written")


class RecordingDisk(Disk):
    """Does what is asked, and logs it.

    Args:
        log: where.
        root: the folder below which it logs.
    """

    def __init__(self, log: Log, root: str) -> None:
        self.log = log
        self._root = Path(root)
        self._open: dict[int, int] = {}
        self._files = 0

    def create(self, path: Path) -> int:
        """See `Disk.create`."""
        fd = super().create(path)
        self._files += 1
        self._open[fd] = self._files  # a closed descriptor's number is given out again
        self.log.add(Create(self._name(path), self._files))
        return fd

    def write(self, fd: int, data: memoryview) -> int:
        """See `Disk.write`."""
        count = super().write(fd, data)
        self.log.add(Write(self._open[fd], bytes(data[:count])))
        return count

    def sync(self, fd: int) -> None:
        """See `Disk.sync`."""
        super().sync(fd)
        self.log.add(Sync(self._open[fd]))

    def link(self, path: Path, new: Path) -> None:
        """See `Disk.link`."""
        super().link(path, new)
        self.log.add(Link(self._name(path), self._name(new)))

    def replace(self, path: Path, new: Path) -> None:
        """See `Disk.replace`."""
        super().replace(path, new)
        self.log.add(Replace(self._name(path), self._name(new)))

    def unlink(self, path: Path) -> None:
        """See `Disk.unlink`."""
        super().unlink(path)
        self.log.add(Unlink(self._name(path)))

    def mkdir(self, folder: Path) -> None:
        """See `Disk.mkdir`."""
        super().mkdir(folder)
        if self._inside(folder):
            self.log.add(Mkdir(self._name(folder)))

    def rmdir(self, folder: Path) -> None:
        """See `Disk.rmdir`."""
        super().rmdir(folder)
        self.log.add(Unlink(self._name(folder), folder=True))

    def sync_folder(self, folder: Path) -> None:
        """See `Disk.sync_folder`."""
        super().sync_folder(folder)
        if folder == self._root or self._inside(folder):
            self.log.add(SyncFolder(self._name(folder)))

    def _name(self, path: Path) -> str:
        return os.fspath(path.relative_to(self._root))

    def _inside(self, path: Path) -> bool:
        return self._root in path.parents


class _Seen:
    def __init__(self, out: Writer) -> None:
        self.out, self.data = out, bytearray()

    def write(self, data: Buffer) -> int:
        self.data += byte_view(data)
        return self.out.write(data)


def _size(sizes: dict[str, int], key: str) -> str:
    return f"{sizes[key]} bytes" if key in sizes else "nothing"
