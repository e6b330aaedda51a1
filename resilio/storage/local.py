"""Objects as plain files in a folder: ``file:///abs/path``, or just a path.

A file is written under a temporary name, made durable, and then linked to its final name: `link` has exactly one winner
and never overwrites, which `rename` does silently. A folder comes into being with its first object and goes with its
last.
"""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, suppress
from pathlib import Path

from ..errors import (
    AccessDeniedError,
    AlreadyExistsError,
    ConfigError,
    IntegrityError,
    NotFoundError,
    OutOfSpaceError,
    StorageError,
)
from .base import Buffer, Capabilities, Incomplete, ObjectInfo, Storage, Writer, byte_view, check_key, check_prefix
from .direct import LARGE_BYTES, Buffers, pays
from .disk import DISK, Disk
from .files import final_name, is_temp, make_folders, nearest, open_to_read, same_file, temp_name
from .new_file import NewFile

__all__ = ["LocalStorage", "open_local"]

_FOLDER_TRIES = 100  # a delete elsewhere may remove a folder, empty, just before our first file is in it

_KINDS: dict[int | None, tuple[type[StorageError], str]] = {
    errno.ENOENT: (NotFoundError, "no such object"),
    errno.ENOSPC: (OutOfSpaceError, "the disk is full; free space or keep fewer checkpoints"),
    errno.EDQUOT: (OutOfSpaceError, "the quota is used up; free space or keep fewer checkpoints"),
    errno.EACCES: (AccessDeniedError, "permission denied; check owner and mode of the folder"),
    errno.EFBIG: (OutOfSpaceError, "files may not be as large; raise `ulimit -f`, or use another filesystem"),
    errno.EPERM: (AccessDeniedError, "not permitted; check owner, mode and attributes of the folder"),
    errno.EROFS: (AccessDeniedError, "the filesystem is mounted read-only"),
    errno.ENOTDIR: (StorageError, "a folder it needs is a file: the store cannot hold both `a` and `a/b`"),
    errno.EISDIR: (StorageError, "a folder has this name: the store cannot hold both `a` and `a/b`"),
}
_NO_LINKS = (errno.EPERM, errno.EOPNOTSUPP, errno.ENOTSUP, errno.ENOSYS)


class LocalStorage(Storage):
    """Files under one folder.

    The folder need not exist: reading then finds nothing, writing makes it. Names that look like our temporary files
    are no keys. Symbolic links, pipes and sockets below the folder are listed, since somebody put them where an object
    belongs, but never followed or read: that is an error. The filesystem must offer hard links.

    Args:
        root: the folder; a relative one is taken from the current directory now.
        disk: what changes the filesystem.
        direct: whether files are written past the page cache; None: large ones, where that pays. What the filesystem
            refuses goes through the page cache all the same.
    """

    def __init__(self, root: str | os.PathLike[str], disk: Disk = DISK, *, direct: bool | None = None) -> None:
        self.root = os.path.abspath(os.fspath(root))  # noqa: PTH100  pathlib drops ".." only by following links
        self.url = f"file://{self.root}"
        self.capabilities = Capabilities(local_path=self.root)
        self._disk = disk
        self._direct = direct
        self._buffers = Buffers()

    # ---- writing

    def put(self, key: str, data: Buffer, *, if_absent: bool = False) -> ObjectInfo:
        """See `Storage.put`."""
        final, view = self._path(key), byte_view(data)
        with self._new_file(key, final, overwrite=not if_absent) as file:
            file.write(view)
        return ObjectInfo(key, view.nbytes, file.modified_s)

    def writer(self, key: str, *, size_hint: int | None = None) -> AbstractContextManager[Writer]:
        """See `Storage.writer`."""
        return self._new_file(key, self._path(key), overwrite=False, size_hint=size_hint)

    @contextmanager
    def _new_file(self, key: str, final: Path, *, overwrite: bool, size_hint: int | None = None) -> Iterator[NewFile]:
        if not overwrite:
            self._refuse_existing(key, final)  # before gigabytes are written in vain; `link` is what decides
        temp = final.with_name(temp_name(final.name))
        file: NewFile | None = None
        direct = self._direct
        if direct is None:
            direct = size_hint is not None and size_hint >= LARGE_BYTES and pays(nearest(temp.parent))
        buffers = self._buffers if direct else None
        try:
            with self._errors("create", key):
                file = NewFile(self._disk, self._open_new(temp), lambda doing: self._errors(doing, key), buffers)
            yield file
            file.finish()
            self._publish(key, temp, final, overwrite=overwrite)
        except BaseException:
            try:
                self._drop(file, temp)
            finally:
                self._remove_empty(temp.parent)  # no listing would ever show it
            raise
        self._drop(file, temp)

    def _drop(self, file: NewFile | None, temp: Path) -> None:
        try:
            if file is not None:
                file.close()  # waits for what is being written; a Ctrl-C may come then
        finally:
            with suppress(OSError):  # what stays is found by `incomplete`
                self._disk.unlink(temp)

    def _refuse_existing(self, key: str, final: Path) -> None:
        with self._errors("create", key):
            try:
                mode = final.lstat().st_mode
            except (FileNotFoundError, NotADirectoryError):
                return
            if stat.S_ISDIR(mode):
                raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR))
        raise self._exists(key)

    def _open_new(self, temp: Path) -> int:
        for _ in range(_FOLDER_TRIES):
            with suppress(FileNotFoundError):
                make_folders(temp.parent, self._disk)
                return self._disk.create(temp)
        raise OSError(
            errno.EBUSY,
            f"{temp.parent} cannot be made here, or was removed by somebody else each of {_FOLDER_TRIES} times",
        )

    def _publish(self, key: str, temp: Path, final: Path, *, overwrite: bool) -> None:
        with self._errors("publish", key):
            if overwrite:
                self._disk.replace(temp, final)
            else:
                try:
                    self._disk.link(temp, final)
                except OSError as error:
                    if not same_file(temp, final):  # else only the answer was lost, as happens on NFS: it was ours
                        raise self._not_linked(error, key, final) from error
                self._disk.unlink(temp)
            # Up to the root: another rank may have made a folder in between and not be through with its own fsync.
            # If one of these fails the object is there already, but whether it stays is not known.
            for folder in [final.parent, *final.parent.parents]:
                with suppress(FileNotFoundError):  # object and folder were deleted since
                    self._disk.sync_folder(folder)
                if folder == Path(self.root):
                    break

    def _not_linked(self, error: OSError, key: str, final: Path) -> Exception:
        if error.errno == errno.EEXIST and final.is_dir():
            return IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR))
        if error.errno == errno.EEXIST:
            return self._exists(key)
        if error.errno in _NO_LINKS:
            return StorageError(
                f"{self.url}: cannot publish {key!r}: this filesystem has no hard links ({error.strerror}), and "
                "without them no object can be created with exactly one winner. Use another filesystem, or an object "
                "store.",
                key=key,
                url=self.url,
                errno=error.errno,
            )
        return error

    def _exists(self, key: str) -> AlreadyExistsError:
        return AlreadyExistsError(f"{self.url}: there is an object {key!r} already", key=key, url=self.url)

    # ---- reading

    def read_into(self, key: str, ranges: Sequence[tuple[int, memoryview]]) -> None:
        """See `Storage.read_into`."""
        with self._errors("read", key), open_to_read(self._path(key)) as fd:
            for offset, buffer in ranges:
                self._fill(key, fd, offset, buffer)

    def get(self, key: str) -> bytes:
        """See `Storage.get`."""
        with self._errors("read", key), open_to_read(self._path(key)) as fd:
            buffer = bytearray(os.fstat(fd).st_size)
            self._fill(key, fd, 0, memoryview(buffer))
        return bytes(buffer)

    def _fill(self, key: str, fd: int, offset: int, buffer: memoryview) -> None:
        done = 0
        while done < len(buffer):
            count = os.preadv(fd, [buffer[done:]], offset + done)
            if count == 0:
                raise IntegrityError(
                    f"{self.url}: {key!r} ends at byte {os.fstat(fd).st_size}, but bytes {offset} to "
                    f"{offset + len(buffer)} were asked for: the file was cut short",
                    key=key,
                    url=self.url,
                )
            done += count

    def stat(self, key: str) -> ObjectInfo:
        """See `Storage.stat`."""
        with self._errors("look at", key):
            try:
                found = self._path(key).lstat()
            except NotADirectoryError as error:
                raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT)) from error
            if not stat.S_ISREG(found.st_mode):
                raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT))
        return ObjectInfo(key, found.st_size, found.st_mtime)

    def list(self, prefix: str) -> Iterator[ObjectInfo]:
        """See `Storage.list`. A file where the prefix has a folder is a StorageError."""
        found = [
            ObjectInfo(key, info.st_size, info.st_mtime)
            for key, path, info in self._walk(prefix)
            if not is_temp(path.name)
        ]
        return iter(sorted(found, key=lambda info: info.key))

    def _walk(self, prefix: str) -> Iterator[tuple[str, Path, os.stat_result]]:
        """Whatever is no folder, with the key that it has or, if temporary, would have had."""
        folder = check_prefix(prefix).rpartition("/")[0]
        todo = [(f"{folder}/", self._path(folder))] if folder else [("", Path(self.root))]
        while todo:
            base, path = todo.pop()
            with self._errors("list", base):
                for entry in self._entries(path):
                    key = base + final_name(entry.name)
                    if not key.startswith(prefix):
                        continue
                    with suppress(FileNotFoundError):  # deleted while we looked
                        if entry.is_dir(follow_symlinks=False):
                            todo.append((f"{key}/", Path(entry.path)))
                        elif _is_key(key):
                            yield key, Path(entry.path), entry.stat(follow_symlinks=False)

    def _entries(self, folder: Path) -> Sequence[os.DirEntry[str]]:
        try:
            with os.scandir(folder) as entries:
                return [*entries]
        except FileNotFoundError:
            return ()
        except NotADirectoryError as error:
            if self._no_folder():
                raise
            # Not the same as nothing: what lay there may be whole elsewhere, and must not be taken for deleted.
            raise StorageError(
                f"{self.url}: cannot list {folder}: it is a file, or lies below one, where the store needs a folder. "
                "Bring the folder back, or move the file away if there was none.",
                key=folder.relative_to(self.root).as_posix(),
                url=self.url,
                errno=error.errno,
            ) from error

    def _no_folder(self) -> bool:
        """Whether the root can be no folder, because it or something above it is a file."""
        try:
            return not stat.S_ISDIR(Path(self.root).stat().st_mode)
        except FileNotFoundError:
            return False
        except NotADirectoryError:
            return True

    # ---- removing

    def delete(self, keys: Iterable[str]) -> None:
        """See `Storage.delete`. A folder that became empty is removed as well; of a link, the link itself."""
        # All keys are looked at before the first object goes.
        self._unlink([(key, self._path(key, anything=True)) for key in keys])

    def _unlink(self, paths: Sequence[tuple[str, Path]]) -> None:
        touched: dict[Path, str] = {}
        for key, path in paths:
            with self._errors("delete", key):
                try:
                    self._disk.unlink(path)
                except (FileNotFoundError, NotADirectoryError):
                    pass
                except IsADirectoryError:
                    continue  # a folder is no object
            touched[path.parent] = key
        for folder, key in {self._remove_empty(folder): key for folder, key in touched.items()}.items():
            with self._errors("delete", key), suppress(FileNotFoundError, NotADirectoryError):
                self._disk.sync_folder(folder)

    def _remove_empty(self, folder: Path) -> Path:
        """Remove `folder` and those above it, below the root, while they are empty; returns the first that stays."""
        while folder != Path(self.root):
            try:
                self._disk.rmdir(folder)
            except FileNotFoundError:
                pass
            except OSError:
                break
            folder = folder.parent
        return folder

    def incomplete(self, prefix: str) -> Iterator[Incomplete]:
        """See `Storage.incomplete`. `started_s` is the last write; of a very long name only the beginning is known."""
        root = Path(self.root)
        found = [
            Incomplete(key, path.relative_to(root).as_posix(), info.st_mtime)
            for key, path, info in self._walk(prefix)
            if is_temp(path.name)
        ]
        return iter(sorted(found, key=lambda item: (item.key, item.token)))

    def abort(self, item: Incomplete) -> None:
        """See `Storage.abort`."""
        path = self._path(item.token, temporary=True, anything=True)
        if not is_temp(path.name):
            raise ConfigError(
                f"{self.url}: {item.token!r} is no temporary file of this store", key=item.key, url=self.url
            )
        self._unlink([(item.key, path)])

    def free_bytes(self) -> int | None:
        """See `Storage.free_bytes`: of the filesystem, for this user. A quota is not seen."""
        try:
            found = os.statvfs(nearest(Path(self.root)))
        except OSError:
            return None
        return found.f_bavail * found.f_frsize if found.f_blocks else None  # some do not count them

    def close(self) -> None:
        """See `Storage.close`: gives back the memory that large files are written from."""
        self._buffers.clear()

    # ---- borders

    def _path(self, key: str, *, temporary: bool = False, anything: bool = False) -> Path:
        """Where `key` lies. `temporary`: it may be a temporary file's; `anything`: a link or a pipe may lie there."""
        check_key(key)
        # As text: to make a `Path` of each step takes longer than to look at it.
        path, parts = self.root, key.split("/")
        with self._errors("look at", key):
            for depth, part in enumerate(parts, 1):
                path = os.path.join(path, part)  # noqa: PTH118
                if is_temp(part) and not temporary:
                    raise ConfigError(
                        f"{self.url}: {key!r} is no key here: such names are our temporary files", key=key
                    )
                mode = _mode(path)
                if mode is None or stat.S_ISDIR(mode) or stat.S_ISREG(mode) or (anything and depth == len(parts)):
                    continue
                if stat.S_ISLNK(mode):
                    raise AccessDeniedError(
                        f"{self.url}: {key!r} leads over the symbolic link {path}, and links inside a store are not "
                        "followed. Replace it by what it points to, or open the store there.",
                        key=key,
                        url=self.url,
                    )
                raise AccessDeniedError(
                    f"{self.url}: cannot use {key!r}: {path} is no plain file but a pipe, a socket or a device. Put "
                    "back what belongs there, or remove it.",
                    key=key,
                    url=self.url,
                )
        return Path(path)

    @contextmanager
    def _errors(self, doing: str, key: str) -> Iterator[None]:
        try:
            yield
        except StorageError:
            raise
        except OSError as error:
            kind, why = _KINDS.get(error.errno, (StorageError, error.strerror or str(error)))
            if error.errno == errno.ENOTDIR and self._no_folder():
                why = "this is no folder and cannot become one: it, or something above it, is a file"
            message = f"{self.url}: cannot {doing} {key!r}: {why}"
            raise kind(message, key=key, url=self.url, errno=error.errno) from error
        except UnicodeEncodeError as error:
            raise ConfigError(f"{self.url}: {key!r} cannot be a file name: {error}", key=key, url=self.url) from error


def open_local(url: str) -> LocalStorage:
    """Open ``file:///abs/path``. What follows ``file://`` is the path to the letter: no ``%20``, no query.

    Raises:
        ConfigError: the path is not absolute, or a host is named.
    """
    path = url.removeprefix("file://")
    if not path.startswith("/"):
        raise ConfigError(f"{url}: write file:///absolute/path, with three slashes, or give the path alone", url=url)
    return LocalStorage(path)


def _mode(path: str | Path) -> int | None:
    try:
        return os.lstat(path).st_mode
    except (FileNotFoundError, NotADirectoryError):
        return None


def _is_key(text: str) -> bool:
    try:
        check_key(text)
    except ConfigError:
        return False  # a stranger's file
    return True
