"""Storages with one fault each, as real ones have had it: each breaks a promise, and `StorageContract` must see it."""

from __future__ import annotations

import os
import re
import threading
import time
import unicodedata
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from fnmatch import fnmatch
from pathlib import Path
from typing import Any, ClassVar
from urllib.parse import unquote

from resilio.errors import AlreadyExistsError, IntegrityError, NotFoundError, StorageError
from resilio.storage import (
    Buffer,
    Capabilities,
    Incomplete,
    LocalStorage,
    MemoryStorage,
    ObjectInfo,
    Writer,
    byte_view,
    check_key,
)

PART = 8 * 2**20


class Collected:
    def __init__(self) -> None:
        self.data = bytearray()

    def write(self, data: Buffer) -> int:
        self.data += byte_view(data)
        return byte_view(data).nbytes


class SharedMemory(MemoryStorage):
    """Sound: a copy within this process is another storage of the same store."""

    def __init__(self, name: str) -> None:
        super().__init__(name)
        self.capabilities = Capabilities()


# ---- whole objects


class WritesText(MemoryStorage):
    def put(self, key: str, data: Buffer, *, if_absent: bool = False) -> ObjectInfo:
        return super().put(key, bytes(byte_view(data)).replace(b"\n", b"\r\n"), if_absent=if_absent)


class ListsNoEmptyObject(MemoryStorage):
    def list(self, prefix: str) -> Iterator[ObjectInfo]:
        return (info for info in super().list(prefix) if info.size_bytes)


class StoresNothingForNoBytes(MemoryStorage):
    @contextmanager
    def _writing(self, key: str) -> Iterator[Writer]:
        yield (out := Collected())
        if out.data:
            self.put(key, out.data, if_absent=True)


class OverwritesTheBeginning(MemoryStorage):
    def put(self, key: str, data: Buffer, *, if_absent: bool = False) -> ObjectInfo:
        old = self.get(key) if self.exists(key) else b""
        info = super().put(key, data, if_absent=if_absent)
        super().put(key, self.get(key) + old[info.size_bytes :])
        return info


class LosesTheLastPart(MemoryStorage):
    @contextmanager
    def _writing(self, key: str) -> Iterator[Writer]:
        yield (out := Collected())
        whole = len(out.data) - len(out.data) % PART or len(out.data)
        self.put(key, out.data[:whole], if_absent=True)


class TrustsTheHint(MemoryStorage):
    @contextmanager
    def writer(self, key: str, *, size_hint: int | None = None) -> Iterator[Writer]:
        yield (out := Collected())
        data = out.data if size_hint is None else bytes(out.data).ljust(size_hint, b"\0")[:size_hint]
        self.put(check_key(key), data, if_absent=True)


class TakesBytesOnly(MemoryStorage):
    def put(self, key: str, data: Buffer, *, if_absent: bool = False) -> ObjectInfo:
        if not isinstance(data, bytes | bytearray):
            raise TypeError("a bytes-like object is required")
        return super().put(key, data, if_absent=if_absent)


class CountsItems(MemoryStorage):
    def put(self, key: str, data: Buffer, *, if_absent: bool = False) -> ObjectInfo:
        return ObjectInfo(super().put(key, data, if_absent=if_absent).key, len(data))


class KeepsViews(MemoryStorage):
    @contextmanager
    def _writing(self, key: str) -> Iterator[Writer]:
        kept: list[memoryview] = []

        class Out:
            def write(self, data: Buffer) -> int:
                kept.append(byte_view(data))
                return byte_view(data).nbytes

        yield Out()
        self.put(key, b"".join(kept), if_absent=True)


# ---- create if absent


class CreatesTheSameAgain(MemoryStorage):
    def put(self, key: str, data: Buffer, *, if_absent: bool = False) -> ObjectInfo:
        if if_absent and self.exists(key) and self.get(key) == byte_view(data):
            return self.stat(key)
        return super().put(key, data, if_absent=if_absent)


class TakesEmptyForAbsent(MemoryStorage):
    def put(self, key: str, data: Buffer, *, if_absent: bool = False) -> ObjectInfo:
        return super().put(key, data, if_absent=if_absent and self.exists(key) and bool(self.get(key)))


class RaisesItsOwn(MemoryStorage):
    def put(self, key: str, data: Buffer, *, if_absent: bool = False) -> ObjectInfo:
        if if_absent and self.exists(key):
            raise FileExistsError(key)
        return super().put(key, data, if_absent=if_absent)


class SaysNotWhich(MemoryStorage):
    def put(self, key: str, data: Buffer, *, if_absent: bool = False) -> ObjectInfo:
        if if_absent and self.exists(key):
            raise AlreadyExistsError(f"{key} is there")
        return super().put(key, data, if_absent=if_absent)


class RaisesWhatDoesNotPickle(MemoryStorage):
    def put(self, key: str, data: Buffer, *, if_absent: bool = False) -> ObjectInfo:
        if if_absent and self.exists(key):
            raise AlreadyExistsError(f"{key} is there", key=key, url=self.url, response=threading.Lock())
        return super().put(key, data, if_absent=if_absent)


class LooksThenPuts(MemoryStorage):
    def put(self, key: str, data: Buffer, *, if_absent: bool = False) -> ObjectInfo:
        if if_absent and self.exists(key):
            return super().put(key, data, if_absent=True)
        time.sleep(0)  # between the look and the deed others do the same
        return super().put(key, data)


class LocksThisProcess(LocalStorage):
    LOCK = threading.Lock()

    def put(self, key: str, data: Buffer, *, if_absent: bool = False) -> ObjectInfo:
        with self.LOCK:
            if if_absent and self.exists(key):
                return super().put(key, data, if_absent=True)
            time.sleep(0.005)
            return super().put(key, data)


class LastWriterWins(MemoryStorage):
    @contextmanager
    def _writing(self, key: str) -> Iterator[Writer]:
        yield (out := Collected())
        self.put(key, out.data)


class LooksOnlyAtTheBeginning(LastWriterWins):
    @contextmanager
    def _writing(self, key: str) -> Iterator[Writer]:
        if self.exists(key):
            raise AlreadyExistsError(f"{self.url}: {key} is there", key=key, url=self.url)
        with super()._writing(key) as out:
            yield out


# ---- whole or not at all


class PublishesAtOpen(MemoryStorage):
    @contextmanager
    def _writing(self, key: str) -> Iterator[Writer]:
        self.put(key, b"", if_absent=True)
        yield (out := Collected())
        self.put(key, out.data)


class PublishesOnError(MemoryStorage):
    """As a file object's `__exit__` does."""

    ON: ClassVar[type[BaseException]] = BaseException

    @contextmanager
    def _writing(self, key: str) -> Iterator[Writer]:
        out = Collected()
        with suppress(AlreadyExistsError):
            try:
                yield out
            except self.ON:
                self.put(key, out.data)
                raise
        self.put(key, out.data)


class AbortsOnExceptionOnly(MemoryStorage):
    @contextmanager
    def _writing(self, key: str) -> Iterator[Writer]:
        out, failed = Collected(), False
        try:
            yield out
        except Exception:
            failed = True
            raise
        finally:
            if not failed:
                self.put(key, out.data, if_absent=True)


class SwallowsTheException(MemoryStorage):
    @contextmanager
    def _writing(self, key: str) -> Iterator[Writer]:
        out = Collected()
        with suppress(Exception):
            yield out
            self.put(key, out.data, if_absent=True)


class LeavesItsUploads(MemoryStorage):
    def __init__(self, name: str) -> None:
        super().__init__(name)
        self.begun: dict[str, str] = {}

    def incomplete(self, prefix: str) -> Iterator[Incomplete]:
        return iter([Incomplete(key, token) for token, key in self.begun.items() if key.startswith(prefix)])

    @contextmanager
    def _writing(self, key: str) -> Iterator[Writer]:
        token = str(len(self.begun))
        self.begun[token] = key
        yield (out := Collected())
        self.put(key, out.data, if_absent=True)
        del self.begun[token]


class PublishesLargeOnesEarly(MemoryStorage):
    @contextmanager
    def _writing(self, key: str) -> Iterator[Writer]:
        outer, kept = self, bytearray()

        class Out:
            def write(self, data: Buffer) -> int:
                kept.extend(byte_view(data))
                if len(kept) > PART:
                    MemoryStorage.put(outer, key, kept)
                return byte_view(data).nbytes

        yield Out()
        self.put(key, kept, if_absent=len(kept) <= PART)


class DeletesWhatItFailedToWrite(MemoryStorage):
    """As DCP's clean-up on its fsspec writer does to the folder."""

    @contextmanager
    def _writing(self, key: str) -> Iterator[Writer]:
        out = Collected()
        try:
            yield out
        except BaseException:
            self.delete([info.key for info in self.list(key.rpartition("/")[0])])
            raise
        self.put(key, out.data, if_absent=True)


class PutsHalfFirst(MemoryStorage):
    def put(self, key: str, data: Buffer, *, if_absent: bool = False) -> ObjectInfo:
        info = super().put(key, byte_view(data)[: byte_view(data).nbytes // 2], if_absent=if_absent)
        time.sleep(0.003)
        super().put(key, data)
        return ObjectInfo(key, byte_view(data).nbytes, info.modified_s)


class DeletesThenPuts(MemoryStorage):
    def put(self, key: str, data: Buffer, *, if_absent: bool = False) -> ObjectInfo:
        if not if_absent:
            self.delete([key])
            time.sleep(0.003)
        return super().put(key, data, if_absent=if_absent)


# ---- several at once, and what dangles


class OneBufferForAll(MemoryStorage):
    @contextmanager
    def _writing(self, key: str) -> Iterator[Writer]:
        self.out = Collected()
        yield self.out
        self.put(key, self.out.data, if_absent=True)


class OneFailureIsAll(MemoryStorage):
    failed = False

    @contextmanager
    def _writing(self, key: str) -> Iterator[Writer]:
        out = Collected()
        try:
            yield out
        except BaseException:
            self.failed = True
            raise
        if self.failed:
            raise StorageError("the session was aborted", key=key, url=self.url)
        self.put(key, out.data, if_absent=True)


class WritesUnderTheFinalName(LocalStorage):
    @contextmanager
    def writer(self, key: str, *, size_hint: int | None = None) -> Iterator[Writer]:
        path = Path(self.root, check_key(key))
        path.parent.mkdir(parents=True, exist_ok=True)
        try:
            with path.open("xb", buffering=0) as file:
                yield file
        except BaseException:
            path.unlink()
            raise


class AbortsAllOfTheKey(LocalStorage):
    def abort(self, item: Incomplete) -> None:
        for other in self.incomplete(""):
            if other.key == item.key:
                super().abort(other)


class AbortsByPrefix(LocalStorage):
    def abort(self, item: Incomplete) -> None:
        for other in self.incomplete(item.key):
            if other == item or other.key != item.key:
                super().abort(other)


class AbortsNothingTwice(LocalStorage):
    def abort(self, item: Incomplete) -> None:
        if item not in [*self.incomplete(item.key)]:
            raise NotFoundError(f"{self.url}: no such upload", key=item.key, url=self.url)
        super().abort(item)


# ---- reading


class EndsOneEarly(MemoryStorage):
    def read_into(self, key: str, ranges: Sequence[tuple[int, memoryview]]) -> None:
        super().read_into(key, [(offset, buffer[:-1]) for offset, buffer in ranges])


class ReadsShort(MemoryStorage):
    def read_into(self, key: str, ranges: Sequence[tuple[int, memoryview]]) -> None:
        data = self.get(key)
        for offset, buffer in ranges:
            part = data[offset : offset + len(buffer)]
            buffer[: len(part)] = part


class FillsUpWithZeros(ReadsShort):
    def read_into(self, key: str, ranges: Sequence[tuple[int, memoryview]]) -> None:
        for _, buffer in ranges:
            buffer[:] = bytes(len(buffer))
        super().read_into(key, ranges)


class CallsTheEndMissing(MemoryStorage):
    def read_into(self, key: str, ranges: Sequence[tuple[int, memoryview]]) -> None:
        try:
            super().read_into(key, ranges)
        except IntegrityError as error:
            raise NotFoundError(str(error), key=key, url=self.url) from error


class ReadsNothingFromNothing(MemoryStorage):
    def get(self, key: str) -> bytes:
        return super().get(key) if self.exists(key) else b""


class HasAFolderForAnObject(MemoryStorage):
    def stat(self, key: str) -> ObjectInfo:
        return ObjectInfo(key, 0) if [*self.list(f"{key}/")] else super().stat(key)


class SharesOnePosition(MemoryStorage):
    def read_into(self, key: str, ranges: Sequence[tuple[int, memoryview]]) -> None:
        for offset, buffer in ranges:
            self.position = offset
            time.sleep(0.0005)
            super().read_into(key, [(self.position, buffer)])


# ---- listing


class WalksFolderByFolder(MemoryStorage):
    def list(self, prefix: str) -> Iterator[ObjectInfo]:
        return iter(sorted(super().list(prefix), key=lambda info: info.key.split("/")))


class SortsNumbersAsPeopleDo(MemoryStorage):
    def list(self, prefix: str) -> Iterator[ObjectInfo]:
        def order(info: ObjectInfo) -> list[Any]:
            return [(not part.isdigit(), int(part) if part.isdigit() else part) for part in info.key.split("/")]

        return iter(sorted(super().list(prefix), key=order))


class GivesOnePage(MemoryStorage):
    def list(self, prefix: str) -> Iterator[ObjectInfo]:
        return iter([*super().list(prefix)][:1000])


class DeletesOnePage(MemoryStorage):
    def delete(self, keys: Iterable[str]) -> None:
        super().delete([*keys][:1000])


class TakesThePrefixForAFolder(MemoryStorage):
    def list(self, prefix: str) -> Iterator[ObjectInfo]:
        return (info for info in super().list("") if not prefix or info.key.startswith(prefix.rstrip("/") + "/"))


class ListsOneLevel(MemoryStorage):
    def list(self, prefix: str) -> Iterator[ObjectInfo]:
        return (info for info in super().list(prefix) if "/" not in info.key[len(prefix) :])


def matches(pattern: str, key: str, kind: str, *, begins: bool) -> bool:
    """Whether `key` is what something takes `pattern` for, other than itself."""
    if kind == "glob":
        return fnmatch(key, pattern + "*" * begins)
    if kind == "like":
        expression = "".join({"%": ".*", "_": "."}.get(char, re.escape(char)) for char in pattern)
        return bool(re.fullmatch(expression + ".*" * begins, key, re.IGNORECASE))
    if kind == "regex":
        return bool((re.match if begins else re.fullmatch)(pattern, key))
    fold = unicodedata.normalize("NFC", key)
    return fold.startswith(pattern) if begins else fold == pattern


class Globs(MemoryStorage):
    KIND = "glob"

    def list(self, prefix: str) -> Iterator[ObjectInfo]:
        every = super().list("/".join([*prefix.split("/")[:-1], ""]) if self.KIND == "none" else "")
        return (info for info in every if matches(prefix, info.key, self.KIND, begins=True))

    def delete(self, keys: Iterable[str]) -> None:
        for pattern in [check_key(key) for key in keys]:
            found = [info.key for info in super().list("") if matches(pattern, info.key, self.KIND, begins=False)]
            super().delete(found)


class UsesLike(Globs):
    KIND = "like"


class UsesRegex(Globs):
    KIND = "regex"


class FoldsUnicode(Globs):
    KIND = "unicode"


class RemembersTheListing(MemoryStorage):
    _seen: list[ObjectInfo] | None = None

    def list(self, prefix: str) -> Iterator[ObjectInfo]:
        if self._seen is None:
            self._seen = [*super().list(prefix)]
        return iter(self._seen)


class RemembersWhatWasMissing(MemoryStorage):
    def exists(self, key: str) -> bool:
        missing = self.__dict__.setdefault("missing", set())
        if key not in missing and not super().exists(key):
            missing.add(key)
        return key not in missing


class CountsMilliseconds(MemoryStorage):
    def list(self, prefix: str) -> Iterator[ObjectInfo]:
        return (ObjectInfo(info.key, info.size_bytes, time.time() * 1000) for info in super().list(prefix))


# ---- deleting


class DeletesByPrefix(MemoryStorage):
    def delete(self, keys: Iterable[str]) -> None:
        for prefix in [check_key(key) for key in keys]:
            super().delete([info.key for info in self.list(prefix)])


class DeletesFolders(MemoryStorage):
    def delete(self, keys: Iterable[str]) -> None:
        for key in [check_key(key) for key in keys]:
            super().delete([key, *(info.key for info in self.list(f"{key}/"))])


class MissesWhatIsMissing(MemoryStorage):
    def delete(self, keys: Iterable[str]) -> None:
        for key in [check_key(key) for key in keys]:
            self.stat(key)
            super().delete([key])


class GoesThroughKeysTwice(MemoryStorage):
    def delete(self, keys: Iterable[str]) -> None:
        for key in keys:
            check_key(key)
        super().delete(keys)


# ---- keys


class NormalisesKeys(MemoryStorage):
    @staticmethod
    def spelt(key: str) -> str:
        return unicodedata.normalize("NFC", key)

    def put(self, key: str, data: Buffer, *, if_absent: bool = False) -> ObjectInfo:
        return super().put(self.spelt(check_key(key)), data, if_absent=if_absent)

    def get(self, key: str) -> bytes:
        return super().get(self.spelt(key))


class FoldsCase(NormalisesKeys):
    @staticmethod
    def spelt(key: str) -> str:
        return key.lower()


class UnquotesKeys(NormalisesKeys):
    @staticmethod
    def spelt(key: str) -> str:
        return unquote(key).replace("+", " ")


class HidesDotFiles(MemoryStorage):
    def list(self, prefix: str) -> Iterator[ObjectInfo]:
        return (info for info in super().list(prefix) if not info.key.startswith("."))


class DeletesAnyKey(MemoryStorage):
    def delete(self, keys: Iterable[str]) -> None:
        for key in keys:
            self._objects.pop(key, None)


class DeletesBeforeItLooks(MemoryStorage):
    def delete(self, keys: Iterable[str]) -> None:
        for key in keys:
            super().delete([key])


class ListsAnyPrefix(MemoryStorage):
    def list(self, prefix: str) -> Iterator[ObjectInfo]:
        return (info for info in super().list("") if info.key.startswith(prefix))


# ---- threads, processes, copies, close


class HoldsALock(MemoryStorage):
    def __init__(self, name: str) -> None:
        super().__init__(name)
        self.lock = threading.Lock()


class PicklesAnotherStore(MemoryStorage):
    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (f"{self.name}-{os.getpid()}",)


class WritesBackLater(SharedMemory):
    """Keeps what it is given to itself until `close`."""

    @property
    def _objects(self) -> dict[str, Any]:
        return self.__dict__.setdefault("mine", {})  # type: ignore[no-any-return]

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self.name,)


class KeepsAReadCache(SharedMemory):
    def get(self, key: str) -> bytes:
        cache = self.__dict__.setdefault("cache", {})
        if key not in cache:
            cache[key] = super().get(key)
        return cache[key]  # type: ignore[no-any-return]

    def put(self, key: str, data: Buffer, *, if_absent: bool = False) -> ObjectInfo:
        self.__dict__.setdefault("cache", {}).pop(key, None)
        return super().put(key, data, if_absent=if_absent)


class ConnectsOnce(LocalStorage):
    """Its connection is of the process that used it first."""

    _pid: int | None = None

    def list(self, prefix: str) -> Iterator[ObjectInfo]:
        self._connected()
        return super().list(prefix)

    def put(self, key: str, data: Buffer, *, if_absent: bool = False) -> ObjectInfo:
        self._connected()
        return super().put(key, data, if_absent=if_absent)

    def read_into(self, key: str, ranges: Sequence[tuple[int, memoryview]]) -> None:
        self._connected()
        super().read_into(key, ranges)

    def get(self, key: str) -> bytes:
        self._connected()
        return super().get(key)

    def _connected(self) -> None:
        self._pid = self._pid or os.getpid()
        if self._pid != os.getpid():
            raise StorageError("the connection is of another process", url=self.url)


class SaysGoodbyeForAll(LocalStorage):
    """What a child closes is closed for its parent, as a shared TLS connection is."""

    def close(self) -> None:
        Path(f"{self.root}.closed").touch()

    def get(self, key: str) -> bytes:
        if Path(f"{self.root}.closed").exists():
            raise StorageError("the connection was closed by the peer", key=key, url=self.url)
        return super().get(key)


class UsesOneTemporaryFile(LocalStorage):
    @contextmanager
    def writer(self, key: str, *, size_hint: int | None = None) -> Iterator[Writer]:
        temp = Path(f"{self.root}.tmp")
        yield (out := Collected())
        temp.write_bytes(out.data)
        time.sleep(0.002)
        self.put(key, temp.read_bytes(), if_absent=True)


class ClosesForGood(MemoryStorage):
    closed = False

    def close(self) -> None:
        self.closed = True

    def list(self, prefix: str) -> Iterator[ObjectInfo]:
        if self.closed:
            raise StorageError("closed", url=self.url)
        return super().list(prefix)


class ClosesOnceOnly(MemoryStorage):
    closed = False

    def close(self) -> None:
        if self.closed:
            raise StorageError("closed already", url=self.url)
        self.closed = True


class ClosesTheOthers(MemoryStorage):
    """One connection for all storages of a process, closed by the first that closes."""

    CLOSED: ClassVar[set[str]] = set()

    def close(self) -> None:
        self.CLOSED.add(self.name)

    def get(self, key: str) -> bytes:
        if self.name in self.CLOSED:
            raise StorageError("closed", key=key, url=self.url)
        return super().get(key)


# ---- what it says of itself


class ShowsThePassword(MemoryStorage):
    def __init__(self, name: str) -> None:
        super().__init__(name)
        self.url = f"store://me:secret@host/{name}"


class HasNoConcurrency(MemoryStorage):
    def __init__(self, name: str) -> None:
        super().__init__(name)
        self.capabilities = Capabilities(concurrency=0)


class HasNegativeSpace(MemoryStorage):
    def free_bytes(self) -> int | None:
        return 1 - len(self._objects)


class CannotTellTheSpace(MemoryStorage):
    def free_bytes(self) -> int | None:
        raise StorageError("quota: not supported", url=self.url)


class PromisesAFolder(MemoryStorage):
    def __init__(self, name: str) -> None:
        super().__init__(name)
        self.capabilities = Capabilities(local_path=name)
