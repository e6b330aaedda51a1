"""The calls by which `LocalStorage` changes a filesystem, one method each, so that they can be watched or left out."""

from __future__ import annotations

import errno
import fcntl
import os
from pathlib import Path

__all__ = ["DISK", "Disk"]


class Disk:
    """The filesystem itself. A subclass may record what is asked of it, or fail; reading does not come by here."""

    def create(self, path: Path) -> int:
        """Make a new, empty file; a descriptor to write to it.

        Raises:
            FileExistsError: the name is taken.
        """
        return os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o666)

    def write(self, fd: int, data: memoryview) -> int:
        """Write at the file's end; how many of the bytes it took."""
        return os.write(fd, data)

    def set_direct(self, fd: int, on: bool) -> None:
        """Have what is written to a file go past the page cache, or not any more."""
        flags = fcntl.fcntl(fd, fcntl.F_GETFL)
        fcntl.fcntl(fd, fcntl.F_SETFL, flags | os.O_DIRECT if on else flags & ~os.O_DIRECT)

    def sync(self, fd: int) -> None:
        """Make a file's bytes durable."""
        os.fsync(fd)

    def link(self, path: Path, new: Path) -> None:
        """Give a file another name.

        Raises:
            FileExistsError: the new name is taken.
        """
        os.link(path, new)

    def replace(self, path: Path, new: Path) -> None:
        """Rename a file, over another one if there is one."""
        path.replace(new)

    def unlink(self, path: Path) -> None:
        """Take a file's name away."""
        path.unlink()

    def mkdir(self, folder: Path) -> None:
        """Make a folder."""
        folder.mkdir()

    def rmdir(self, folder: Path) -> None:
        """Remove an empty folder."""
        folder.rmdir()

    def sync_folder(self, folder: Path) -> None:
        """Make the names in `folder` durable."""
        fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
        try:
            os.fsync(fd)
        except OSError as error:
            if error.errno != errno.EINVAL:  # the filesystem knows no such thing
                raise
        finally:
            os.close(fd)


DISK = Disk()
