"""Objects in the memory of this process: ``memory://name``. For tests, examples and single-process experiments."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import NamedTuple

from ..errors import AlreadyExistsError, ConfigError, IntegrityError, NotFoundError
from .base import Buffer, Capabilities, ObjectInfo, Storage, Writer, byte_view, check_key, check_prefix

__all__ = ["Growing", "MemoryStorage", "open_memory"]


class _Stored(NamedTuple):
    data: bytes
    modified_s: float


# One dict per name. No lock: each verb is one atomic operation on a dict, and a lock could be held at a fork.
_STORES: dict[str, dict[str, _Stored]] = {}


class MemoryStorage(Storage):
    """One store per name and process; it lives as long as the process does.

    A pickled copy carries the name only: in another process it finds that process's store of this name.
    """

    def __init__(self, name: str) -> None:
        self.name = name
        self.url = f"memory://{name}"
        self.capabilities = Capabilities(shared=False)

    @property
    def _objects(self) -> dict[str, _Stored]:
        return _STORES.setdefault(self.name, {})

    def put(self, key: str, data: Buffer, *, if_absent: bool = False) -> ObjectInfo:
        """See `Storage.put`."""
        check_key(key)
        new = _Stored(bytes(byte_view(data)), time.time())
        if not if_absent:
            self._objects[key] = new
        elif self._objects.setdefault(key, new) is not new:
            raise AlreadyExistsError(f"{self.url}: there is an object {key!r} already", key=key, url=self.url)
        return ObjectInfo(key, len(new.data), new.modified_s)

    def writer(self, key: str, *, size_hint: int | None = None) -> AbstractContextManager[Writer]:
        """See `Storage.writer`."""
        return self._writing(check_key(key))

    @contextmanager
    def _writing(self, key: str) -> Iterator[Writer]:
        out = Growing()
        yield out
        self.put(key, out.data, if_absent=True)

    def read_into(self, key: str, ranges: Sequence[tuple[int, memoryview]]) -> None:
        """See `Storage.read_into`."""
        data = self.get(key)
        for offset, buffer in ranges:
            if len(buffer) and not 0 <= offset <= len(data) - len(buffer):
                raise IntegrityError(
                    f"{self.url}: {key!r} ends at byte {len(data)}, but bytes {offset} to {offset + len(buffer)} "
                    "were asked for",
                    key=key,
                    url=self.url,
                )
            buffer[:] = memoryview(data)[offset : offset + len(buffer)]

    def get(self, key: str) -> bytes:
        """See `Storage.get`."""
        return self._find(key).data

    def stat(self, key: str) -> ObjectInfo:
        """See `Storage.stat`."""
        found = self._find(key)
        return ObjectInfo(key, len(found.data), found.modified_s)

    def _find(self, key: str) -> _Stored:
        try:
            return self._objects[check_key(key)]
        except KeyError:
            raise NotFoundError(f"{self.url}: no object {key!r}", key=key, url=self.url) from None

    def list(self, prefix: str) -> Iterator[ObjectInfo]:
        """See `Storage.list`."""
        check_prefix(prefix)
        found = sorted(item for item in self._objects.copy().items() if item[0].startswith(prefix))
        return iter([ObjectInfo(key, len(stored.data), stored.modified_s) for key, stored in found])

    def delete(self, keys: Iterable[str]) -> None:
        """See `Storage.delete`."""
        for key in [check_key(key) for key in keys]:  # all are looked at before the first goes
            self._objects.pop(key, None)


class Growing:
    """A writer that keeps in memory what it is given."""

    def __init__(self) -> None:
        self.data = bytearray()

    def write(self, data: Buffer) -> int:
        """See `Writer.write`."""
        view = byte_view(data)
        self.data += view
        return len(view)


def open_memory(url: str) -> MemoryStorage:
    """Open ``memory://name``.

    Raises:
        ConfigError: the name is missing.
    """
    name = url.removeprefix("memory://")
    if not name:
        raise ConfigError("memory:// needs a name: memory://anything. Equal names share one store.", url=url)
    return MemoryStorage(name)
