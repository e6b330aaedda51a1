"""Any other filesystem of fsspec, through the verbs that all of them have; it promises less than the others."""

from __future__ import annotations

import tempfile
import threading
from collections.abc import Iterator, Sequence
from contextlib import suppress
from datetime import datetime, timezone
from typing import Any

from resilio.errors import ConfigError, StorageError
from resilio.storage import Capabilities
from resilio.storage.files import final_name, is_temp, temp_name

from .place import Place
from .store import Begun, Listed, Range, Store, Upload, copy_into, pieces

__all__ = ["GenericStore"]

OPTIONS = None  # the filesystem's own

# Where `mv` of one file is a rename: an object is written under a temporary name, and has its own at once.
_RENAMES = ("file", "local", "hdfs", "webhdfs", "smb", "ftp")
_MEMORY = "memory"
_SPOOL_BYTES = 64 * 2**20
_GONE = (FileNotFoundError, NotADirectoryError, IsADirectoryError)
_TIMES = ("mtime", "modified", "last_modified", "LastModified", "created")

# fsspec's memory is this process's, so one lock over it gives its creates one winner. A child has its own memory.
_LOCK = threading.Lock()


class GenericStore(Store):
    """A folder of some filesystem."""

    @classmethod
    def capabilities(cls, place: Place) -> Capabilities:
        """See `Store.capabilities`."""
        memory = place.protocol == _MEMORY
        return Capabilities(create_if_absent=memory, shared=not memory, concurrency=1)

    @classmethod
    def check(cls, place: Place) -> None:
        """See `Store.check`."""
        import fsspec

        if "::" in place.url:
            raise ConfigError(f"{place.url}: chains of filesystems hide caches, and are not opened", url=place.url)
        try:
            fsspec.get_filesystem_class(place.protocol)
        except ValueError as error:
            raise ConfigError(f"{place.url}: fsspec does not know {place.protocol}://", url=place.url) from error

    def __init__(self, place: Place) -> None:
        super().__init__(place)
        self._made: tuple[Any, str] | None = None
        self._making = threading.Lock()

    def _open(self) -> tuple[Any, str]:
        """The filesystem, and the name of our folder in it."""
        from fsspec.core import url_to_fs

        with self._making:  # some connect at once
            if self._made is None:
                place = self.place
                fs, root = url_to_fs(
                    f"{place.protocol}://{place.host}/{place.folder}",
                    use_listings_cache=False,
                    skip_instance_cache=True,
                    **{name: _value(text) for name, text in place.options.items()},
                )
                self._made = fs, root.rstrip("/")
            return self._made

    @property
    def _fs(self) -> Any:
        return self._open()[0]

    def root(self) -> str:
        """See `Store.root`."""
        return self._open()[1]

    def put(self, name: str, data: bytes, *, if_absent: bool) -> float | None:
        """See `Store.put`. Only in memory a create has one winner."""
        if self.place.protocol == _MEMORY:
            with _LOCK:
                if if_absent and self._fs.exists(name):
                    raise FileExistsError(name)
                self._fs.pipe_file(name, data)
                return _seconds(self._fs.info(name))
        if if_absent and self._fs.exists(name):
            raise FileExistsError(name)
        target = self._begin(name)
        try:
            self._fs.pipe_file(target, data)
            return self._publish(target, name, len(data))
        except BaseException:
            self._drop(target, name)
            raise

    def upload(self, name: str) -> Upload:
        """See `Store.upload`."""
        return _Spooled(self, name)

    def _begin(self, name: str) -> str:
        """Where the bytes go first."""
        folder, _, last = name.rpartition("/")
        with suppress(FileExistsError, NotImplementedError):
            self._fs.makedirs(folder, exist_ok=True)
        return f"{folder}/{temp_name(last)}" if self._by_rename() else name

    def _publish(self, target: str, name: str, size_bytes: int) -> float | None:
        # A `close` that failed once may be silent when it is called again (BR-48).
        written = self._fs.info(target)
        if written["size"] != size_bytes:
            raise StorageError(f"the store holds another number of bytes than the {size_bytes} that were written")
        if target != name:
            self._fs.mv(target, name)
        return _seconds(written)

    def _drop(self, target: str, name: str) -> None:
        if target != name:
            with suppress(Exception):  # what stays is found by `incomplete`
                self._fs.rm_file(target)

    def _by_rename(self) -> bool:
        return self.place.protocol in _RENAMES

    def spool_out(self, name: str, spool: Any, size_bytes: int) -> None:
        """Write what lies in the file `spool` to `name`."""
        spool.seek(0)
        if self.place.protocol == _MEMORY:
            self.put(name, spool.read(), if_absent=True)
            return
        if self._fs.exists(name):
            raise FileExistsError(name)
        target = self._begin(name)
        try:
            file = self._fs.open(target, "wb")
            try:
                while data := spool.read(self.part_bytes):
                    file.write(data)
            except BaseException:
                # Its `close` would publish what there is (BR-45).
                with suppress(Exception):
                    file.discard()
                file.closed = True
                raise
            file.close()
            self._publish(target, name, size_bytes)
        except BaseException:
            self._drop(target, name)
            raise

    def read(self, name: str, ranges: Sequence[Range]) -> None:
        """See `Store.read`."""
        try:
            for offset, buffer in pieces(ranges):
                copy_into(buffer, self._fs.cat_file(name, start=offset, end=offset + len(buffer)), offset)
        except _GONE as error:
            raise FileNotFoundError(name) from error

    def get(self, name: str) -> bytes:
        """See `Store.get`."""
        try:
            return bytes(self._fs.cat_file(name))
        except _GONE as error:
            raise FileNotFoundError(name) from error

    def stat(self, name: str) -> Listed | None:
        """See `Store.stat`."""
        try:
            found = self._fs.info(name)
        except _GONE:
            return None
        return _listed(name, found) if found["type"] == "file" else None

    def list(self, prefix: str) -> Iterator[Listed]:
        """See `Store.list`."""
        return (_listed(name, info) for name, info in self._walk(prefix) if not is_temp(name.rpartition("/")[2]))

    def _walk(self, prefix: str) -> Iterator[tuple[str, dict[str, Any]]]:
        fs, root = self._open()
        found = fs.find(prefix.rpartition("/")[0] or root, detail=True, on_error=_missing_is_empty)
        for name, info in found.items():
            if not name.startswith(root):
                raise StorageError(f"a listing of {root!r} names {name!r}: this client's names are not understood")
            if name.startswith(prefix):
                yield name, info

    def delete(self, names: Sequence[str]) -> None:
        """See `Store.delete`. One by one: `rm` would take names for patterns (BR-49)."""
        for name in names:
            with suppress(*_GONE):
                self._fs.rm_file(name)

    def incomplete(self, prefix: str) -> Iterator[Begun]:
        """See `Store.incomplete`."""
        folder = prefix.rpartition("/")[0]
        for name, info in self._walk(f"{folder}/" if folder else ""):
            last = name.rpartition("/")[2]
            final = name.removesuffix(last) + final_name(last)
            if is_temp(last) and final.startswith(prefix):
                yield Begun(final, name, _seconds(info))

    def abort(self, name: str, token: str) -> None:
        """See `Store.abort`."""
        if not is_temp(token.rpartition("/")[2]) or not token.startswith(f"{self.root()}/"):
            raise ConfigError(f"{self.place.url}: {token!r} is no temporary file of this store", url=self.place.url)
        self.delete([token])

    def close(self) -> None:
        """See `Store.close`. There is no verb for it that all filesystems have: the collector does it."""
        self._made = None


class _Spooled(Upload):
    """Collects the object on this machine's disk first: how a client sends it, and when it shows, is not known."""

    def __init__(self, store: GenericStore, name: str) -> None:
        self._store, self._name, self._size_bytes = store, name, 0
        self._spool = tempfile.SpooledTemporaryFile(_SPOOL_BYTES)  # noqa: SIM115  closed by both ways out

    def part(self, data: bytearray) -> None:
        self._spool.write(data)
        self._size_bytes += len(data)

    def publish(self, data: bytearray) -> None:
        self.part(data)
        self._store.spool_out(self._name, self._spool, self._size_bytes)
        self._spool.close()

    def abort(self) -> None:
        self._spool.close()


def _value(text: str) -> object:
    """An option as its type; in a URL everything is text, and the text "false" would be true."""
    if text in ("true", "false"):
        return text == "true"
    return int(text) if text.isdecimal() else text


def _missing_is_empty(error: Exception) -> None:
    """Fsspec leaves out of a listing what it cannot list."""
    if not isinstance(error, FileNotFoundError):
        raise error


def _listed(name: str, info: dict[str, Any]) -> Listed:
    if info.get("size") is None:
        raise StorageError(f"the store does not tell the size of {name!r}")
    return Listed(name, int(info["size"]), _seconds(info))


def _seconds(info: dict[str, Any]) -> float | None:
    for field in _TIMES:
        found = info.get(field)
        if isinstance(found, datetime):
            return (found if found.tzinfo else found.replace(tzinfo=timezone.utc)).timestamp()
        if isinstance(found, int | float):
            return float(found)
    return None
