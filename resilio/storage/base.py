"""The narrow waist: bytes by key. Everything else in resilio is a client of these verbs or a wrapper around them.

Keys are relative, `/`-separated, and name objects; there are no directories, no rename, no append and no lock. The
promises below are tests in `resilio.testing.StorageContract`: a storage that passes them can hold checkpoints.
"""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, Protocol

from ..errors import ConfigError, NotFoundError

__all__ = [
    "Buffer",
    "Capabilities",
    "Incomplete",
    "ObjectInfo",
    "Storage",
    "Writer",
    "byte_view",
    "check_key",
    "check_prefix",
]

Buffer = bytes | bytearray | memoryview

_KEY_LIMIT = 1024  # bytes; the limit of S3
_ILLEGAL = re.compile(r"[\x00-\x1f\\]")


@dataclass(frozen=True)
class ObjectInfo:
    """An object as the store lists it.

    Attributes:
        key: relative to the storage's root.
        size_bytes: length.
        modified_s: Unix seconds by the store's own clock, None where it does not tell.
    """

    key: str
    size_bytes: int
    modified_s: float | None = None


@dataclass(frozen=True)
class Incomplete:
    """Something begun and never published: a multipart upload, a temporary file. Not an object yet.

    Attributes:
        key: the object it would have become.
        token: what `abort` needs to remove it.
        started_s: Unix seconds by the store's clock, None where it does not tell.
    """

    key: str
    token: str
    started_s: float | None = None


@dataclass(frozen=True)
class Capabilities:
    """What a storage can do.

    Attributes:
        create_if_absent: `put(if_absent=True)` has exactly one winner. Without it a run takes a single manager only.
        shared: other processes that open the same URL see the same objects.
        concurrency: number of parallel transfers that pay off.
        local_path: the folder that holds the objects as plain files at their keys, where there is one.
    """

    create_if_absent: bool = True
    shared: bool = True
    concurrency: int = 4
    local_path: str | None = None


class Writer(Protocol):
    """Takes the bytes of one new object, in order."""

    def write(self, data: Buffer, /) -> int:
        """Append `data`, whole. May keep no reference to it after it returned. Returns its length in bytes."""


class Storage(ABC):
    """Bytes by key, in one store under one root.

    Keys are taken to the letter: two that differ, in case or unicode form say, name two objects. An object may have no
    bytes.

    Synchronous and thread-safe. Picklable as configuration: a copy in another process connects anew; connections are
    made lazily, per process, and never cross a fork. Errors are those of `resilio.errors` (`StorageError` and below),
    with `key` and `url` as attributes; a backend does not retry, `resilio.storage.retrying` does.

    Attributes:
        url: what it was opened with, without credentials. Shown to people.
        capabilities: what it can do.
    """

    url: str
    capabilities: Capabilities

    @abstractmethod
    def put(self, key: str, data: Buffer, *, if_absent: bool = False) -> ObjectInfo:
        """Store a small object whole; durable on return. Readers see all of it or nothing.

        Args:
            key: where. An object that is there is replaced, in one step (resilio itself never overwrites).
            data: the bytes.
            if_absent: create instead; of several racing creates exactly one wins.

        Raises:
            AlreadyExistsError: `if_absent` and there is such an object, even one with these very bytes.
        """

    @abstractmethod
    def writer(self, key: str, *, size_hint: int | None = None) -> AbstractContextManager[Writer]:
        """Begin a large object; it becomes visible, whole and durable, when the block ends cleanly.

        An exception inside the block aborts: nothing is published, and nothing that was there is touched. `size_hint`
        is the expected length in bytes; it may be wrong.

        Raises:
            AlreadyExistsError: there is such an object; found at the latest when the block ends. A store without
                `capabilities.create_if_absent` may overwrite it instead.
        """

    @abstractmethod
    def read_into(self, key: str, ranges: Sequence[tuple[int, memoryview]]) -> None:
        """Fill each `(offset, buffer)` with exactly `len(buffer)` bytes from `offset` on.

        Buffers are writable, one-dimensional, of format ``B``; empty ones are allowed.

        Raises:
            NotFoundError: no such object.
            IntegrityError: the object ends before a range does. Buffers may then hold anything.
        """

    @abstractmethod
    def list(self, prefix: str) -> Iterator[ObjectInfo]:
        """All objects whose key starts with the string `prefix`, sorted by key.

        Complete: an object is listed from the moment `put` or `writer` returned, a deleted one never after `delete`
        did. Incomplete uploads and temporary files are no objects.
        """

    @abstractmethod
    def delete(self, keys: Iterable[str]) -> None:
        """Delete these objects. Keys are literal, never patterns; a missing object is no error."""

    def incomplete(self, prefix: str) -> Iterator[Incomplete]:
        """Uploads under `prefix` that were begun and never published; the default knows of none."""
        return iter(())

    def abort(self, item: Incomplete) -> None:
        """Remove what `incomplete` found; missing is no error. Touches no other upload, not even of the same key."""
        raise NotImplementedError(f"{type(self).__name__} lists incomplete uploads but cannot abort them")

    def free_bytes(self) -> int | None:
        """How many more bytes can be stored now, None where the store does not tell. Never raises.

        Asked before a save, so that one without room is refused before it has written half of it.
        """
        return None

    def close(self) -> None:  # noqa: B027  most storages have nothing to give back
        """Give back connections. Idempotent; the storage may be used again. Nothing to other copies of it."""

    def get(self, key: str) -> bytes:
        """The whole of a small object.

        Raises:
            NotFoundError: no such object.
        """
        buffer = bytearray(self.stat(key).size_bytes)
        self.read_into(key, [(0, memoryview(buffer))])
        return bytes(buffer)

    def stat(self, key: str) -> ObjectInfo:
        """Size and time of one object.

        Raises:
            NotFoundError: no such object.
        """
        for info in self.list(check_key(key)):
            if info.key == key:
                return info
        raise NotFoundError(f"{self.url}: no object {key!r}", key=key, url=self.url)

    def exists(self, key: str) -> bool:
        """Whether there is such an object."""
        try:
            self.stat(key)
        except NotFoundError:
            return False
        return True

    def __enter__(self) -> Storage:
        return self

    def __exit__(self, *exc: Any) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self.url}>"


def check_key(key: str) -> str:
    """Return `key` if it is a legal key, else raise.

    Keys inside a store may come from outside (a manifest someone edited), so a key that leaves the root is refused
    here, before any backend sees it.

    Raises:
        ConfigError: empty, absolute, too long, or with a part that is empty, ``.`` or ``..``, or with a NUL or newline.
    """
    parts = key.split("/")
    bad = (
        not key
        or len(key.encode("utf-8", "surrogatepass")) > _KEY_LIMIT
        or any(part in ("", ".", "..") for part in parts)
        or _ILLEGAL.search(key) is not None
    )
    if bad:
        raise ConfigError(
            f"not a legal key: {key!r}. Keys are relative and /-separated, without empty, '.' or '..' parts, control "
            f"characters or backslashes, and at most {_KEY_LIMIT} bytes.",
            key=key,
        )
    return key


def check_prefix(prefix: str) -> str:
    """Return `prefix` if legal keys can start with it, else raise. Its last part may be anything: it is only compared.

    Raises:
        ConfigError: the part up to the last ``/`` is no legal key.
    """
    if "/" in prefix:
        check_key(prefix.rpartition("/")[0])
    return prefix


def byte_view(data: Buffer) -> memoryview:
    """The bytes of `data` as a flat view of format ``B``, whatever its items are; no copy."""
    view = memoryview(data)
    return view.cast("B") if view.nbytes else memoryview(b"")  # views with a 0 in their shape cannot be cast
