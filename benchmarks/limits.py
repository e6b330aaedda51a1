"""What this machine can do at the moment: the same number of bytes, without any checkpoint around them."""

from __future__ import annotations

import os
import platform
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import torch

__all__ = ["THREADS", "Limits", "machine"]

THREADS = 1, 2, 4
_ALIGNED = 4096


class Limits:
    """Plain writes, reads and copies of `size_bytes` between files in `folder` and memory that was touched before.

    The size is rounded up so that `O_DIRECT` takes the part of each thread.
    """

    def __init__(self, size_bytes: int, folder: Path) -> None:
        self._folder = folder
        unit = _ALIGNED * max(THREADS)
        self.size_bytes = -(-size_bytes // unit) * unit
        self._memory = _aligned(self.size_bytes)
        self._other = _aligned(self.size_bytes)

    def writes(self) -> dict[str, Callable[[], None]]:
        """Every way to write them durably, by name. What the filesystem refuses is left out."""
        direct = {f"O_DIRECT, {n} threads": partial(self.write, n, direct=True) for n in THREADS}
        try:
            self.write(1, direct=True)
        except (OSError, AttributeError):
            direct = {}
        return {**{f"buffered + fsync, {n} threads": partial(self.write, n) for n in THREADS}, **direct}

    def write(self, threads: int, *, direct: bool = False) -> None:
        """Write and fsync, a file for each thread."""
        write = partial(self._write, direct=os.O_DIRECT if direct else 0)
        with ThreadPoolExecutor(threads) as pool:
            list(pool.map(write, *zip(*self._parts(threads), strict=True)))

    def reads(self) -> dict[str, Callable[[], None]]:
        """Every way to read what the buffered writes left, by name."""
        return {f"preadv, {n} threads": partial(self.read, n) for n in THREADS}

    def read(self, threads: int) -> None:
        """What `write` of as many threads left, into touched memory."""
        with ThreadPoolExecutor(threads) as pool:
            list(pool.map(self._read, *zip(*self._parts(threads), strict=True)))

    def copy(self) -> None:
        """Memory to touched memory."""
        self._other.copy_(self._memory)

    def clean(self) -> None:
        """Remove the files."""
        for file in self._folder.iterdir():
            file.unlink()

    def _parts(self, threads: int) -> list[tuple[Path, memoryview]]:
        parts = self._memory.tensor_split(threads)
        return [(self._folder / f"{threads}-{i}", memoryview(part.numpy().data)) for i, part in enumerate(parts)]

    def _write(self, path: Path, data: memoryview, direct: int) -> None:
        fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | direct, 0o600)
        try:
            done = 0
            while done < len(data):
                done += os.write(fd, data[done:])
            os.fsync(fd)
        finally:
            os.close(fd)

    def _read(self, path: Path, into: memoryview) -> None:
        fd = os.open(path, os.O_RDONLY)
        try:
            done = 0
            while done < len(into):
                count = os.preadv(fd, [into[done:]], done)
                if count == 0:
                    raise AssertionError(f"{path} is shorter than what was written")
                done += count
        finally:
            os.close(fd)


def _aligned(size_bytes: int) -> torch.Tensor:
    """Touched memory that `O_DIRECT` takes."""
    raw = torch.ones(size_bytes + _ALIGNED, dtype=torch.uint8)
    start = -raw.data_ptr() % _ALIGNED
    return raw[start : start + size_bytes]


def machine(folder: Path) -> dict[str, Any]:
    """What one must know to read the figures."""
    pages, page = os.sysconf("SC_PHYS_PAGES"), os.sysconf("SC_PAGE_SIZE")
    affinity = getattr(os, "sched_getaffinity", None)
    return {
        "cores": len(affinity(0)) if affinity else os.cpu_count(),
        "memory_gb": round(pages * page / 1e9, 1),
        "load_1_min": round(os.getloadavg()[0], 1),
        "filesystem": _filesystem(folder),
        "system": f"{platform.system()} {platform.release()} {platform.machine()}",
        "python": platform.python_version(),
        "torch": str(torch.__version__),
        "torch_threads": torch.get_num_threads(),
    }


def _filesystem(folder: Path) -> str:
    try:
        lines = Path("/proc/self/mounts").read_text().splitlines()
    except OSError:
        return "unknown"
    mounts = [(point, kind) for _, point, kind, *_ in (line.split(" ") for line in lines)]
    inside = [(point, kind) for point, kind in mounts if folder.resolve().is_relative_to(point)]
    return max(inside, key=lambda mount: len(mount[0]), default=("", "unknown"))[1]
