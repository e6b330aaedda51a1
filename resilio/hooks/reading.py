"""A run's storage as plugins see it: they can read all of it, and change nothing."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import AbstractContextManager
from typing import NoReturn

from ..errors import ConfigError
from ..storage import Buffer, Incomplete, ObjectInfo, Storage, Writer

__all__ = ["ReadOnly"]


class ReadOnly(Storage):
    """`inner`, for reading."""

    def __init__(self, inner: Storage) -> None:
        self._inner = inner
        self.url = inner.url
        self.capabilities = inner.capabilities

    def read_into(self, key: str, ranges: Sequence[tuple[int, memoryview]]) -> None:
        """See `Storage.read_into`."""
        self._inner.read_into(key, ranges)

    def list(self, prefix: str) -> Iterator[ObjectInfo]:
        """See `Storage.list`."""
        return self._inner.list(prefix)

    def get(self, key: str) -> bytes:
        """See `Storage.get`."""
        return self._inner.get(key)

    def stat(self, key: str) -> ObjectInfo:
        """See `Storage.stat`."""
        return self._inner.stat(key)

    def exists(self, key: str) -> bool:
        """See `Storage.exists`."""
        return self._inner.exists(key)

    def free_bytes(self) -> int | None:
        """See `Storage.free_bytes`."""
        return self._inner.free_bytes()

    def incomplete(self, prefix: str) -> Iterator[Incomplete]:
        """See `Storage.incomplete`."""
        return self._inner.incomplete(prefix)

    def put(self, key: str, data: Buffer, *, if_absent: bool = False) -> ObjectInfo:
        """See `Storage.put`."""
        self._refuse()

    def writer(self, key: str, *, size_hint: int | None = None) -> AbstractContextManager[Writer]:
        """See `Storage.writer`."""
        self._refuse()

    def delete(self, keys: Iterable[str]) -> None:
        """See `Storage.delete`."""
        self._refuse()

    def abort(self, item: Incomplete) -> None:
        """See `Storage.abort`."""
        self._refuse()

    def _refuse(self) -> NoReturn:
        raise ConfigError(f"{self.url}: a plugin's hook reads a run and changes nothing in it", url=self.url)
