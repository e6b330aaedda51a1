"""A job of one tensor, a disk that fails on demand, and a look at what the run holds on it."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import torch

import resilio
from resilio import TrainingState
from resilio.storage.disk import Disk


def state(live: torch.Tensor) -> TrainingState:
    return TrainingState(live=live, rng=False)


def value_of(root: Path, step: int) -> int:
    """What a reader of its own restores of `step`, every digest looked at."""
    live = torch.zeros(1)
    assert resilio.restore(f"file://{root}", state(live), which=step).step == step
    return int(live)


def committed(root: Path) -> list[int]:
    return sorted(int(path.name.split("-")[0]) for path in root.glob("commits/[0-9]*.json"))


def litter(root: Path) -> set[str]:
    """Attempts that are no checkpoints. An empty folder is nothing: no listing shows it."""
    folders = {path.parent.name for path in root.glob("step-*/*")}
    return {name for name in folders if int(name.split("-")[1]) not in committed(root)}


class Faulty(Disk):
    """Fails the n-th operation that changes the filesystem, alone or with all that come after it.

    Of a write that fails, half of the bytes are there. A full disk still lets names be taken away; one that is mounted
    read-only does not.
    """

    def __init__(self) -> None:
        self._writing = Path()
        self.disarm()

    def arm(self, nth: int, number: int, *, lasts: bool) -> None:
        self._done, self._nth, self._number, self._lasts = 0, nth, number, lasts
        self._place: Path | None = None

    def disarm(self) -> Path | None:
        """Fail no more; where the first failure was, if there was one."""
        place = getattr(self, "_place", None)
        self.arm(0, 0, lasts=False)
        return place

    def _hit(self, where: Path, *, takes_room: bool = True) -> None:
        if not self._number or (not takes_room and self._number in (errno.ENOSPC, errno.EDQUOT)):
            return
        self._done += 1
        if self._done == self._nth or (self._lasts and self._done > self._nth):
            self._place = self._place or where
            raise OSError(self._number, os.strerror(self._number), str(where))

    def create(self, path: Path) -> int:
        self._hit(path)
        self._writing = path
        return super().create(path)

    def write(self, fd: int, data: memoryview) -> int:
        try:
            self._hit(self._writing)
        except OSError:
            os.write(fd, data[: len(data) // 2])
            raise
        return super().write(fd, data)

    def sync(self, fd: int) -> None:
        self._hit(self._writing)
        super().sync(fd)

    def link(self, path: Path, new: Path) -> None:
        self._hit(new)
        super().link(path, new)

    def replace(self, path: Path, new: Path) -> None:
        self._hit(new)
        super().replace(path, new)

    def unlink(self, path: Path) -> None:
        self._hit(path, takes_room=False)
        super().unlink(path)

    def mkdir(self, folder: Path) -> None:
        self._hit(folder)
        super().mkdir(folder)

    def rmdir(self, folder: Path) -> None:
        self._hit(folder, takes_room=False)
        super().rmdir(folder)

    def sync_folder(self, folder: Path) -> None:
        self._hit(folder)
        super().sync_folder(folder)
