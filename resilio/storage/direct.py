"""Large files past the page cache: `O_DIRECT`, from aligned memory that is used again.

A write into the page cache takes the kernel a page and a copy for every 4 KiB, and fsync then waits for all of them: on
few cores that takes longer than every digest of the same bytes. `O_DIRECT` leaves the cores alone, but asks for aligned
memory, offsets and lengths. So all bytes are copied into aligned buffers, and neither tensors nor their places in a
file need be aligned; each full buffer is written by a thread of the file's own while the next one is filled.
"""

from __future__ import annotations

import errno
import logging
import math
import mmap
import os
import threading
from contextlib import suppress
from pathlib import Path
from queue import SimpleQueue

from ..clock import SystemClock
from .disk import DISK, Disk

__all__ = ["ALIGNED", "BUFFER_BYTES", "LARGE_BYTES", "Buffers", "Direct", "pays"]

ALIGNED = 4096  # bytes: offsets, lengths and memory; enough for the blocks of all disks
BUFFER_BYTES = 4 << 20
LARGE_BYTES = 16 << 20  # files of fewer bytes are not worth the trial
_EACH = 2  # buffers of one file: one is filled while the other is written
_FILES = 8  # that have buffers at a time; others are written as small ones are
_TRIAL_BYTES = 8 << 20
# So many times as long as through the page cache it may take: it leaves the cores to the digests, and to the training.
_WORTH = 1.5
# What a filesystem or a kernel answers that does not know `O_DIRECT`, or files without a name.
_UNKNOWN = (errno.EINVAL, errno.EOPNOTSUPP, errno.EISDIR, errno.ENOSYS)
_COPY = 64 << 10  # bytes; to copy fewer takes less time than to let go of the GIL

_log = logging.getLogger("resilio")
_clock = SystemClock()
_verdicts: dict[int, bool] = {}  # by device
_trying = threading.Lock()  # one trial at a time: two would disturb each other


def _after_fork() -> None:
    global _trying  # the thread that holds it may not be in this process
    _trying = threading.Lock()


os.register_at_fork(after_in_child=_after_fork)


class Buffers:
    """Aligned memory for a few files at a time; what was given back is taken again. Thread-safe; pickles empty."""

    def __init__(self) -> None:
        # None: yet to be made. Single operations of a list need no lock, which a fork could leave locked for ever.
        self._sets: list[mmap.mmap | None] = [None] * _FILES

    def __reduce__(self) -> tuple[type[Buffers], tuple[()]]:
        return Buffers, ()

    def take(self) -> mmap.mmap | None:
        """Memory for the buffers of one file; None if there are too many files."""
        try:
            found = self._sets.pop()
        except IndexError:
            return None
        if found is None:
            try:
                found = _memory(_EACH * BUFFER_BYTES)
            except OSError:
                self._sets.append(None)
        return found

    def give_back(self, memory: mmap.mmap) -> None:
        """What a file is through with."""
        self._sets.append(memory)

    def clear(self) -> None:
        """Let go of all that are not in use."""
        for _ in range(len(self._sets)):
            with suppress(IndexError):
                self._sets.pop(0)
                self._sets.append(None)


class Direct:
    """Writes one new file past the page cache, or through it once the filesystem has refused that. Not thread-safe.

    Args:
        disk: what changes the filesystem.
        fd: of the file, empty; whoever opened it closes it, after `close`.
        buffers: where `memory` goes back to.
        memory: taken from there.
    """

    def __init__(self, disk: Disk, fd: int, buffers: Buffers, memory: mmap.mmap) -> None:
        self._disk, self._fd = disk, fd
        self._buffers = buffers
        self._memory: mmap.mmap | None = memory
        self._empty: SimpleQueue[memoryview] = SimpleQueue()
        self._full: SimpleQueue[memoryview | None] = SimpleQueue()
        views = [memoryview(memory)[at : at + BUFFER_BYTES] for at in range(0, len(memory), BUFFER_BYTES)]
        self._filling = views.pop()
        for view in views:
            self._empty.put(view)
        self._filled = 0
        self._thread: threading.Thread | None = None
        self._ended = threading.Event()
        self._error: BaseException | None = None
        self._direct = False
        self._switch(True)

    def write(self, data: memoryview) -> None:
        """Append `data`. What goes wrong may be raised by a later call; none is of use then."""
        import numpy as np  # not needed by who only reads

        self._raise()
        try:
            while len(data):
                part = data[: len(self._filling) - self._filled]
                target = self._filling[self._filled : self._filled + len(part)]
                if len(part) < _COPY:
                    target[:] = part
                else:
                    np.copyto(np.frombuffer(target, np.uint8), np.frombuffer(part, np.uint8))
                self._filled += len(part)
                data = data[len(part) :]
                if self._filled == len(self._filling):
                    self._hand_over()
        except BaseException as error:
            self._error = error  # a Ctrl-C leaves a hole: whoever goes on all the same must not publish it
            raise

    def finish(self) -> None:
        """Write what is left, the end of the file that fills no block through the page cache. Not durable yet."""
        self._raise()
        self._wait()
        self._raise()
        whole = self._filled - self._filled % ALIGNED
        self._put(self._filling[:whole])
        self._switch(False)
        self._put(self._filling[whole : self._filled])

    def close(self) -> None:
        """Write no more, and give the buffers back. Idempotent."""
        try:
            self._wait()
        finally:
            memory, self._memory = self._memory, None
            if memory is not None:
                self._buffers.give_back(memory)

    def _hand_over(self) -> None:
        if self._thread is None:
            try:
                self._thread = threading.Thread(target=self._run, name="resilio-direct", daemon=True)
                self._thread.start()
            except RuntimeError:  # no thread to be had, as at the end of a process
                self._ended.set()
        if self._ended.is_set():
            self._put(self._filling)
        else:
            self._full.put(self._filling)
            self._filling = self._empty.get()
        self._filled = 0
        self._raise()

    def _run(self) -> None:
        try:
            while (view := self._full.get()) is not None:
                if self._error is None:
                    try:
                        self._put(view)
                    except BaseException as error:  # noqa: BLE001  raised by the thread that fills
                        self._error = error
                self._empty.put(view)
        finally:
            self._ended.set()

    def _wait(self) -> None:
        """Until all that was handed over is written, whatever comes meanwhile."""
        interrupt: BaseException | None = None
        if self._thread is not None:
            self._full.put(None)
            # In a child that was forked meanwhile no thread is alive. Nor is one that a Ctrl-C kept us from seeing
            # start; it has nothing to write.
            while not self._ended.is_set() and self._thread.is_alive():
                try:
                    self._ended.wait()
                except BaseException as error:  # noqa: BLE001  raised below
                    interrupt = error
        if interrupt is not None:
            raise interrupt

    def _raise(self) -> None:
        if self._error is not None:
            raise self._error

    def _put(self, data: memoryview) -> None:
        while len(data):
            try:
                data = data[self._disk.write(self._fd, data) :]
            except OSError as error:
                # Also what follows a write that ended short, as on a full disk: told what it was by the next one.
                if error.errno != errno.EINVAL or not self._direct:
                    raise
                _log.debug("O_DIRECT refused: %s", error)
                self._switch(False)

    def _switch(self, on: bool) -> None:
        if on == self._direct:
            return
        try:
            self._disk.set_direct(self._fd, on)
        except OSError as error:
            if not on:
                raise
            _log.debug("O_DIRECT refused: %s", error)
        else:
            self._direct = on


def _memory(size_bytes: int) -> mmap.mmap:
    # Private: a child process must not write into what its parent is about to write out.
    memory = mmap.mmap(-1, size_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    with suppress(OSError, AttributeError):
        # A request to the disk takes so many pages, not bytes: with small ones this one wrote half as much a second.
        memory.madvise(mmap.MADV_HUGEPAGE)
    return memory


def pays(folder: Path) -> bool:
    """Whether `O_DIRECT` is worth it where `folder` is. Tried once for each device and process; leaves nothing there.

    Blocks: for the trial, some tens of milliseconds on a local disk.
    """
    try:
        device = folder.stat().st_dev
        with _trying:
            if device not in _verdicts:
                try:
                    through, past = _try(folder)
                except OSError as error:
                    if error.errno not in _UNKNOWN:
                        raise  # says nothing about the device, such as a full disk
                    through, past = 0.0, math.inf
                _verdicts[device] = past <= _WORTH * through
                _log.debug("O_DIRECT: device=%d through_s=%.4f past_s=%.4f", device, through, past)
            return _verdicts[device]
    except OSError as error:
        _log.debug("O_DIRECT was not tried: %s", error)
        return False


def _try(folder: Path) -> tuple[float, float]:
    """Seconds for a few MiB, durable, through the page cache and past it."""
    if not hasattr(os, "O_TMPFILE"):
        return 0.0, math.inf
    memory = _memory(_TRIAL_BYTES)
    memory.write(bytes([1]) * _TRIAL_BYTES)  # no pages of zeros, that need not be written
    best = {False: math.inf, True: math.inf}
    for direct in (True, False, False, True):
        fd = os.open(folder, os.O_TMPFILE | os.O_WRONLY, 0o600)  # a file without a name: gone with its descriptor
        try:
            DISK.set_direct(fd, direct)
            start_s = _clock.monotonic_s()
            view = memoryview(memory)
            while len(view):
                view = view[os.write(fd, view) :]
            os.fsync(fd)
            best[direct] = min(best[direct], _clock.monotonic_s() - start_s)
        finally:
            os.close(fd)
    return best[False], best[True]
