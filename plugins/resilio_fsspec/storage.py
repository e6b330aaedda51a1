"""The storage itself: keys, parts, errors and processes; what is special about each kind of store is elsewhere."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager

from resilio.errors import IntegrityError, NotFoundError, ResilioError, StorageError
from resilio.storage import (
    Buffer,
    Incomplete,
    ObjectInfo,
    Storage,
    Writer,
    byte_view,
    check_key,
    check_prefix,
)

from .errors import translate
from .place import Place
from .store import Listed, Store, Upload

__all__ = ["FsspecStorage"]

_LOG = logging.getLogger("resilio.storage")

_PARTS_WANTED = 4_000  # S3 allows 10,000
_PARTS_BETWEEN = 660  # beyond them parts double every so many: 10,000 hold the 5 TiB that S3 takes, none is above 5 GiB


class FsspecStorage(Storage):
    """Objects in one folder of a store that fsspec knows.

    Args:
        place: where.
        kind: the kind of store.
        reopen: makes the same storage from its URL, in another process.
    """

    def __init__(self, place: Place, kind: type[Store], reopen: Callable[[str], FsspecStorage]) -> None:
        self.url = place.url
        self.capabilities = kind.capabilities(place)
        self._place, self._kind, self._reopen = place, kind, reopen
        # By process. A child's copy keeps its parent's store and never touches it: not even its end, by the collector.
        self._stores: dict[int, Store] = {}

    def __reduce__(self) -> tuple[Callable[[str], FsspecStorage], tuple[str]]:
        return self._reopen, (self.url,)

    @property
    def _store(self) -> Store:
        store = self._stores.get(os.getpid())
        # No lock, which could be held at a fork: of two threads one wins, and the other's was never connected.
        return store or self._stores.setdefault(os.getpid(), self._kind(self._place))

    # ---- writing

    def put(self, key: str, data: Buffer, *, if_absent: bool = False) -> ObjectInfo:
        """See `Storage.put`."""
        check_key(key)
        body = bytes(byte_view(data))
        with self._errors("put", key):
            stored_s = self._store.put(self._name(key), body, if_absent=if_absent)
        return ObjectInfo(key, len(body), stored_s)

    def writer(self, key: str, *, size_hint: int | None = None) -> AbstractContextManager[Writer]:
        """See `Storage.writer`."""
        return self._writing(check_key(key), size_hint or 0)

    @contextmanager
    def _writing(self, key: str, size_hint: int) -> Iterator[Writer]:
        out = _Parts(self, key, size_hint)
        try:
            yield out
            out.publish()
        except BaseException:
            out.abort()
            raise

    # ---- reading

    def read_into(self, key: str, ranges: Sequence[tuple[int, memoryview]]) -> None:
        """See `Storage.read_into`."""
        check_key(key)
        wanted = [(offset, buffer) for offset, buffer in ranges if len(buffer)]
        if not wanted:
            self.stat(key)
            return
        with self._errors("read", key):
            self._store.read(self._name(key), wanted)

    def get(self, key: str) -> bytes:
        """See `Storage.get`."""
        check_key(key)
        with self._errors("read", key):
            return self._store.get(self._name(key))

    def stat(self, key: str) -> ObjectInfo:
        """See `Storage.stat`."""
        check_key(key)
        with self._errors("look at", key):
            found = self._store.stat(self._name(key))
        if found is None:
            raise NotFoundError(f"{self.url}: no object {key!r}", key=key, url=self.url)
        return ObjectInfo(key, found.size_bytes, found.modified_s)

    def list(self, prefix: str) -> Iterator[ObjectInfo]:
        """See `Storage.list`. What lies there under a name that is no key is passed over."""
        check_prefix(prefix)
        with self._errors("list", prefix):
            found = [self._info(one) for one in self._store.list(self._under() + prefix)]
        return iter(sorted((info for info in found if _is_key(info.key)), key=lambda info: info.key))

    # ---- removing

    def delete(self, keys: Iterable[str]) -> None:
        """See `Storage.delete`."""
        doomed = [check_key(key) for key in keys]  # all are looked at before the first object goes
        if doomed:
            with self._errors("delete", doomed[0]):
                self._store.delete([self._name(key) for key in doomed])

    def incomplete(self, prefix: str) -> Iterator[Incomplete]:
        """See `Storage.incomplete`."""
        check_prefix(prefix)
        with self._errors("list the uploads of", prefix):
            found = [
                Incomplete(one.name.removeprefix(self._under()), one.token, one.started_s)
                for one in self._store.incomplete(self._under() + prefix)
            ]
        return iter(sorted(found, key=lambda item: (item.key, item.token)))

    def abort(self, item: Incomplete) -> None:
        """See `Storage.abort`."""
        check_key(item.key)
        with self._errors("abort the upload of", item.key):
            self._store.abort(self._name(item.key), item.token)

    def free_bytes(self) -> int | None:
        """See `Storage.free_bytes`."""
        try:
            return self._store.free_bytes()
        except Exception as error:  # noqa: BLE001  it only answers a question
            _LOG.debug("free space not known: url=%s error=%s", self.url, type(error).__name__)
            return None

    def close(self) -> None:
        """See `Storage.close`."""
        store = self._stores.pop(os.getpid(), None)
        if store is not None:
            try:
                store.close()
            except Exception as error:  # noqa: BLE001  nothing more can be done about it
                _LOG.warning("connections not given back: url=%s error=%s", self.url, type(error).__name__)

    # ---- names and errors

    def _under(self) -> str:
        root = self._store.root()
        return f"{root}/" if root else ""

    def _name(self, key: str) -> str:
        return self._under() + key

    def _info(self, found: Listed) -> ObjectInfo:
        return ObjectInfo(found.name.removeprefix(self._under()), found.size_bytes, found.modified_s)

    @contextmanager
    def _errors(self, doing: str, key: str) -> Iterator[None]:
        try:
            yield
        except (StorageError, IntegrityError) as error:
            if "key" in error.facts:
                raise
            facts = {**error.facts, "key": key, "url": self.url}
            raise type(error)(f"{self.url}: cannot {doing} {key!r}: {error}", **facts) from error.__cause__
        except ResilioError:
            raise
        except Exception as error:
            raise translate(error, doing, key=key, url=self.url) from error


class _Parts:
    """Takes the bytes of an object, and sends them part by part."""

    def __init__(self, storage: FsspecStorage, key: str, size_hint: int) -> None:
        self._storage, self._key = storage, key
        self._store = storage._store
        step = self._store.part_bytes
        self._first_bytes = step * max(1, -(-size_hint // (step * _PARTS_WANTED)))
        self._sent = 0
        self._held = bytearray()
        self._upload: Upload | None = None
        self._failed = False

    def write(self, data: Buffer) -> int:
        view = byte_view(data)
        done = 0
        while done < len(view):
            taken = view[done : done + self._part_bytes() - len(self._held)]
            self._held += taken
            done += len(taken)
            if len(self._held) == self._part_bytes() and done < len(view):
                self._send()
        return len(view)

    def _part_bytes(self) -> int:
        doublings = max(0, (self._sent - _PARTS_WANTED) // _PARTS_BETWEEN + 1)
        return self._first_bytes << doublings

    def _send(self) -> None:
        part, self._held = self._held, bytearray()
        with self._sending():
            if self._upload is None:
                self._upload = self._store.upload(self._storage._name(self._key))
            self._upload.part(part)
        self._sent += 1

    def publish(self) -> None:
        if self._failed:  # and the block went on all the same
            raise StorageError(
                f"{self._storage.url}: a write to {self._key!r} failed before: it is not published",
                key=self._key,
                url=self._storage.url,
            )
        with self._sending():
            if self._upload is not None:
                self._upload.publish(self._held)
            else:
                create = self._storage.capabilities.create_if_absent
                self._store.put(self._storage._name(self._key), bytes(self._held), if_absent=create)

    @contextmanager
    def _sending(self) -> Iterator[None]:
        try:
            with self._storage._errors("write", self._key):
                yield
        except BaseException:
            self._failed = True
            raise

    def abort(self) -> None:
        if self._upload is not None:
            try:
                self._upload.abort()
            except Exception as error:  # noqa: BLE001  what failed first matters; this can be found by `incomplete`
                _LOG.warning(
                    "upload not aborted: url=%s key=%r error=%s", self._storage.url, self._key, type(error).__name__
                )


def _is_key(key: str) -> bool:
    try:
        check_key(key)
    except ResilioError:
        return False
    return True
