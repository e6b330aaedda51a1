"""What `LocalStorage` asks of the filesystem: names of temporary files, and durable folders."""

from __future__ import annotations

import errno
import os
import re
import secrets
import stat
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from .disk import Disk

__all__ = ["final_name", "is_temp", "make_folders", "nearest", "open_to_read", "same_file", "temp_name"]

_TEMP = re.compile(r"\.tmp-\d+-[0-9a-f]{16}-(?P<name>.+)")
_NAME_LIMIT = 255  # bytes; what Linux filesystems allow a single name


def temp_name(name: str) -> str:
    """A new name for what is to become `name`; of a very long one it holds only the beginning."""
    start = f".tmp-{os.getpid()}-{secrets.token_hex(8)}-"  # secrets: the global random state belongs to the training
    return start + os.fsencode(name)[: _NAME_LIMIT - len(start)].decode(errors="ignore")


def is_temp(name: str) -> bool:
    """Whether `name` is one of `temp_name`'s."""
    return _TEMP.fullmatch(name) is not None


def final_name(name: str) -> str:
    """The name that a temporary file was to become; other names as they are."""
    found = _TEMP.fullmatch(name)
    return found["name"] if found else name


def same_file(one: Path, other: Path) -> bool:
    """Whether both names are links to one file."""
    with suppress(OSError):
        return os.path.samestat(one.lstat(), other.lstat())
    return False


def nearest(folder: Path) -> Path:
    """`folder`, or what there is above it as long as it is not made."""
    while not folder.exists() and folder != folder.parent:
        folder = folder.parent
    return folder


def make_folders(folder: Path, disk: Disk) -> None:
    """Make `folder` and what is missing above it, durably."""
    missing = []
    while not folder.exists():
        missing.append(folder)
        folder = folder.parent
    for new in reversed(missing):
        with suppress(FileExistsError):  # exist_ok would look again, and by then somebody may have removed it
            disk.mkdir(new)
        disk.sync_folder(new.parent)


@contextmanager
def open_to_read(path: Path) -> Iterator[int]:
    """The descriptor of a plain file; whatever else has this name counts as missing.

    Raises:
        FileNotFoundError: no plain file has this name.
    """
    missing = FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), str(path))
    try:
        # O_NONBLOCK: a stranger's FIFO must not hold us; it changes nothing for files.
        fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
    except NotADirectoryError as error:
        raise missing from error
    try:
        if not stat.S_ISREG(os.fstat(fd).st_mode):
            raise missing
        yield fd
    finally:
        os.close(fd)
