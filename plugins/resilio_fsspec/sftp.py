"""Files on another host, over SFTP with paramiko, fsspec's client for it.

A file is written under a temporary name, made durable, and then linked to its final one, as `file://` does: a link has
exactly one winner. The server must know the extension ``hardlink@openssh.com``, as OpenSSH's does.
"""

from __future__ import annotations

import errno
import stat
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Any, TypeVar

from resilio.errors import ConfigError, IntegrityError, StorageError
from resilio.storage import Capabilities
from resilio.storage.files import final_name, is_temp, temp_name

from .place import Place
from .ssh import address, connect
from .store import Begun, Listed, Range, Store, Upload, copy_into, pieces

__all__ = ["SftpStore"]

OPTIONS = ("known_hosts", "identity")
_ANSWER_S = 60
_CHANNELS = 4  # OpenSSH allows ten a connection
_WRITE_BYTES = 32 * 2**10  # what paramiko sends in one request
_IN_FLIGHT = 64
_FOLDER_TRIES = 100  # a delete elsewhere may remove a folder, empty, just before our first file is in it
_EXTENDED, _EXTENDED_REPLY = 200, 201  # of the protocol

_T = TypeVar("_T")


class SftpStore(Store):
    """A folder of a host."""

    @classmethod
    def capabilities(cls, place: Place) -> Capabilities:
        """See `Store.capabilities`."""
        return Capabilities(concurrency=_CHANNELS)

    @classmethod
    def check(cls, place: Place) -> None:
        """See `Store.check`."""
        import paramiko  # noqa: F401

        _, _, port = address(place.host)
        if not place.host or not place.folder or not (port or "22").isdecimal():
            raise ConfigError(f"{place.url}: write sftp://user@host:22/absolute/folder", url=place.url)

    def __init__(self, place: Place) -> None:
        super().__init__(place)
        self._client: Any = None
        self._channels: list[_Channel] = []
        self._next = 0
        self._changing = threading.Lock()

    def root(self) -> str:
        """See `Store.root`."""
        return f"/{self.place.folder}"

    # ---- connections

    @contextmanager
    def _channel(self) -> Iterator[Any]:
        """A channel of our own for a while: paramiko's answers go astray if two threads ask on one."""
        channel = self._choose()
        with channel.lock:
            yield channel.sftp

    def _choose(self) -> _Channel:
        with self._changing:
            if self._client is None or not self._client.get_transport().is_active():
                self._channels, self._client = [], connect(self.place)
            for channel in self._channels:
                if not channel.lock.locked():
                    return channel
            if len(self._channels) < _CHANNELS:
                self._channels.append(_Channel(self._client))
                return self._channels[-1]
            self._next += 1
            return self._channels[self._next % _CHANNELS]

    def close(self) -> None:
        """See `Store.close`."""
        with self._changing:
            client, self._client, self._channels = self._client, None, []
        if client is not None:
            client.close()

    # ---- writing

    def put(self, name: str, data: bytes, *, if_absent: bool) -> float | None:
        """See `Store.put`."""
        upload = _File(self, name)
        try:
            upload.part(bytearray(data))
            return upload.finish(overwrite=not if_absent)
        except BaseException:
            upload.abort()
            raise

    def upload(self, name: str) -> Upload:
        """See `Store.upload`."""
        return _File(self, name)

    def make_folders(self, sftp: Any, folder: str) -> None:
        """Make `folder` and what is missing above it."""
        if folder and not _mode(sftp, folder):
            self.make_folders(sftp, folder.rpartition("/")[0])
            try:
                sftp.mkdir(folder)
            except OSError:
                if not _mode(sftp, folder):
                    raise

    def remove_empty(self, sftp: Any, folder: str) -> None:
        """Remove `folder` and those above it, below our own, while they are empty."""
        while folder.startswith(f"{self.root()}/"):
            try:
                sftp.rmdir(folder)
            except OSError as error:
                if error.errno != errno.ENOENT:
                    return
            folder = folder.rpartition("/")[0]

    # ---- reading

    def read(self, name: str, ranges: Sequence[Range]) -> None:
        """See `Store.read`."""
        with self._channel() as sftp, _opened(sftp, name) as file:
            size_bytes = file.stat().st_size
            for offset, buffer in ranges:
                if offset + len(buffer) > size_bytes:
                    raise IntegrityError(
                        f"the object ends at byte {size_bytes}, but bytes {offset} to {offset + len(buffer)} were asked"
                    )
            for offset, buffer in pieces(ranges):
                (data,) = file.readv([(offset, len(buffer))], _IN_FLIGHT)
                copy_into(buffer, data, offset)

    def get(self, name: str) -> bytes:
        """See `Store.get`."""
        found = self.stat(name)
        if found is None:
            raise FileNotFoundError(name)
        body = bytearray(found.size_bytes)
        if body:
            self.read(name, [(0, memoryview(body))])
        return bytes(body)

    def stat(self, name: str) -> Listed | None:
        """See `Store.stat`."""
        with self._channel() as sftp:
            found = _attributes(sftp, name)
        if found is None or not stat.S_ISREG(found.st_mode):
            return None
        return Listed(name, found.st_size, found.st_mtime)

    def list(self, prefix: str) -> Iterator[Listed]:
        """See `Store.list`."""
        return (
            Listed(name, found.st_size, found.st_mtime)
            for name, found in self._walk(prefix)
            if not is_temp(found.filename)
        )

    def _walk(self, prefix: str) -> Iterator[tuple[str, Any]]:
        """Whatever is no folder, under the name that it has."""
        todo = [prefix.rpartition("/")[0]]
        while todo:
            folder = todo.pop()
            for found in self._entries(folder):
                name = f"{folder}/{found.filename}"
                if stat.S_ISDIR(found.st_mode):
                    if f"{name}/".startswith(prefix) or prefix.startswith(f"{name}/") or name.startswith(prefix):
                        todo.append(name)
                elif (name.removesuffix(found.filename) + final_name(found.filename)).startswith(prefix):
                    yield name, found

    def _entries(self, folder: str) -> Sequence[Any]:
        with self._channel() as sftp:
            try:
                return list(sftp.listdir_attr(folder))
            except FileNotFoundError:
                above = folder
                while above := above.rpartition("/")[0]:
                    if found := _attributes(sftp, above):
                        if stat.S_ISDIR(found.st_mode):
                            return ()
                        break
                raise StorageError(f"{above} is a file, where the store needs a folder") from None

    # ---- removing

    def delete(self, names: Sequence[str]) -> None:
        """See `Store.delete`."""
        folders: dict[str, None] = {}
        for name in names:
            with self._channel() as sftp:
                try:
                    sftp.remove(name)
                except FileNotFoundError:
                    pass
                except OSError:
                    found = _attributes(sftp, name)
                    if found is not None and not stat.S_ISDIR(found.st_mode):
                        raise
            folders[name.rpartition("/")[0]] = None
        for folder in folders:
            with self._channel() as sftp:
                self.remove_empty(sftp, folder)

    def incomplete(self, prefix: str) -> Iterator[Begun]:
        """See `Store.incomplete`."""
        for name, found in self._walk(prefix):
            if is_temp(found.filename):
                yield Begun(name.removesuffix(found.filename) + final_name(found.filename), name, found.st_mtime)

    def abort(self, name: str, token: str) -> None:
        """See `Store.abort`."""
        if not is_temp(token.rpartition("/")[2]) or not token.startswith(f"{self.root()}/"):
            raise ConfigError(f"{self.place.url}: {token!r} is no temporary file of this store", url=self.place.url)
        self.delete([token])

    def free_bytes(self) -> int | None:
        """See `Store.free_bytes`: for this user, on the filesystem of our folder. A quota is not seen."""
        with self._channel() as sftp:
            folder = self.root()
            while folder and not _mode(sftp, folder):
                folder = folder.rpartition("/")[0]
            kind, answer = sftp._request(_EXTENDED, "statvfs@openssh.com", folder or "/")
            if kind != _EXTENDED_REPLY:
                return None
            _, unit_bytes, blocks, _, available = (answer.get_int64() for _ in range(5))
            return int(available * unit_bytes) if blocks else None


class _Channel:
    def __init__(self, client: Any) -> None:
        self.sftp = client.open_sftp()
        self.sftp.get_channel().settimeout(_ANSWER_S)
        self.lock = threading.Lock()


class _File(Upload):
    """A new file on its way, on one channel."""

    def __init__(self, store: SftpStore, name: str) -> None:
        self._store, self._name = store, name
        self._folder, _, last = name.rpartition("/")
        self._temp = f"{self._folder}/{temp_name(last)}"
        self._channel = store._choose()
        self._file: Any = None
        self._locked(self._open)

    def _locked(self, do: Callable[[Any], _T]) -> _T:
        with self._channel.lock:
            return do(self._channel.sftp)

    def _open(self, sftp: Any) -> None:
        if stat.S_ISDIR(_mode(sftp, self._name)):
            raise StorageError("a folder has this name: the store cannot hold both `a` and `a/b`")
        for tries_left in range(_FOLDER_TRIES, 0, -1):
            try:
                self._store.make_folders(sftp, self._folder)
                self._file = sftp.open(self._temp, "wx")
                return
            except FileNotFoundError:
                if tries_left == 1:
                    raise

    def part(self, data: bytearray) -> None:
        def write(_: Any) -> None:
            view = memoryview(data)
            last = (len(view) - 1) // _WRITE_BYTES * _WRITE_BYTES
            self._file.set_pipelined(True)
            if last > 0:
                self._file.write(view[:last])
            self._file.set_pipelined(False)  # the last request waits for the answers to all before it
            self._file.write(view[max(0, last) :])

        if data:
            self._locked(write)

    def publish(self, data: bytearray) -> None:
        self.part(data)
        self.finish(overwrite=False)

    def finish(self, *, overwrite: bool) -> float | None:
        """Make it durable and visible; returns its time."""

        def done(sftp: Any) -> float | None:
            self._file.flush()
            with _suppress_unsupported():
                sftp._request(_EXTENDED, "fsync@openssh.com", self._file.handle)
            stored_s: int | None = self._file.stat().st_mtime
            self._file.close()
            if overwrite:
                sftp.posix_rename(self._temp, self._name)
                return stored_s
            try:
                sftp._request(_EXTENDED, "hardlink@openssh.com", self._temp, self._name)
            except OSError as error:
                if _mode(sftp, self._name):
                    raise FileExistsError(self._name) from error
                if _unsupported(error):
                    raise StorageError(
                        "this server does not know hardlink@openssh.com, and without it no object can be created with "
                        "exactly one winner; use OpenSSH's server"
                    ) from error
                raise
            sftp.remove(self._temp)
            return stored_s

        return self._locked(done)

    def abort(self) -> None:
        def drop(sftp: Any) -> None:
            if self._file is not None:
                with suppress(Exception):
                    self._file.close()
            with suppress(FileNotFoundError):
                sftp.remove(self._temp)
            self._store.remove_empty(sftp, self._folder)

        self._locked(drop)


@contextmanager
def _opened(sftp: Any, name: str) -> Iterator[Any]:
    found = _attributes(sftp, name)
    if found is None or not stat.S_ISREG(found.st_mode):
        raise FileNotFoundError(name)
    file = sftp.open(name, "rb")
    try:
        yield file
    finally:
        file.close()


@contextmanager
def _suppress_unsupported() -> Iterator[None]:
    """What a server does not know is left out."""
    try:
        yield
    except OSError as error:
        if not _unsupported(error):
            raise


def _unsupported(error: OSError) -> bool:
    return error.errno is None and "unsupported" in str(error).lower()


def _attributes(sftp: Any, name: str) -> Any:
    try:
        return sftp.lstat(name)
    except FileNotFoundError:
        return None
    except OSError as error:
        if "not a directory" in str(error).lower():
            return None
        raise


def _mode(sftp: Any, name: str) -> int:
    found = _attributes(sftp, name)
    return 0 if found is None else int(found.st_mode)
