"""A file that is being written."""

from __future__ import annotations

import os
from collections.abc import Callable
from contextlib import AbstractContextManager

from .base import Buffer, byte_view
from .direct import Buffers, Direct
from .disk import Disk

__all__ = ["NewFile"]


class NewFile:
    """A new file; what callers give goes to the disk as it comes, or past the page cache, in large pieces.

    Args:
        disk: what changes the filesystem.
        fd: of the file, empty.
        errors: makes errors of ours of those of the system; called with what is being done.
        direct: where the buffers are if it is to be written past the page cache.
    """

    def __init__(
        self, disk: Disk, fd: int, errors: Callable[[str], AbstractContextManager[None]], direct: Buffers | None
    ) -> None:
        self._disk, self._fd, self._errors = disk, fd, errors
        memory = direct.take() if direct is not None else None
        self._direct = Direct(disk, fd, direct, memory) if direct is not None and memory is not None else None
        self.modified_s = 0.0

    def write(self, data: Buffer) -> int:
        """See `Writer.write`."""
        view = byte_view(data)
        with self._errors("write"):
            if self._direct is not None:
                self._direct.write(view)
                return len(view)
            done = 0
            while done < len(view):
                done += self._disk.write(self._fd, view[done:])
        return done

    def finish(self) -> None:
        """Make it durable, or raise. After a failed fsync the kernel may have dropped the bytes: never a second one."""
        if self._direct is not None:
            with self._errors("write"):
                self._direct.finish()
        with self._errors("make durable"):
            self._disk.sync(self._fd)
            self.modified_s = os.fstat(self._fd).st_mtime
            self.close()

    def close(self) -> None:
        """Write no more. Idempotent."""
        try:
            if self._direct is not None:
                self._direct.close()
        finally:
            fd, self._fd = self._fd, -1
            if fd >= 0:
                os.close(fd)
