"""How long `verify` takes, next to reading the same files and doing nothing with them.

    python -m benchmarks.verify [--mb 1490] [--rounds 5] [--dir FOLDER]

Warm: everything is in the page cache. Cold: the files are dropped from it before each reading, which is asked for and
may not be granted. Within a round reading and verifying take turns, and the ratio is the median of the rounds' ratios.
"""

from __future__ import annotations

import argparse
import os
import tempfile
from collections.abc import Callable
from pathlib import Path
from statistics import median

from rich.box import SIMPLE
from rich.console import Console
from rich.table import Table

from resilio import CheckpointManager
from resilio.clock import SystemClock
from resilio.records.catalog import discover
from resilio.records.verify import verify_checkpoint
from resilio.storage.local import LocalStorage

from .contenders import quiet
from .state import Job

_clock = SystemClock()
_BUFFER = 1 << 20


def main(arguments: list[str] | None = None) -> int:
    """Measure and print; returns the exit code."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.verify", description=__doc__)
    parser.add_argument("--mb", type=float, default=1490, help="size of the state, 10^6 bytes; 1490 is GPT-2 124M")
    parser.add_argument("--rounds", type=int, default=5, help="measured rounds, after one that warms up")
    parser.add_argument("--dir", type=Path, default=Path.cwd(), help="where to make the temporary folder")
    options = parser.parse_args(arguments)
    quiet()
    with tempfile.TemporaryDirectory(prefix=".bench-", dir=options.dir) as folder:
        _measure(Path(folder), options.mb, options.rounds)
    return 0


def _measure(folder: Path, mb: float, rounds: int) -> None:
    job = Job(mb)
    with CheckpointManager(folder, {"model": job.model, "optimizer": job.optimizer}, mode="sync") as ckpt:
        ckpt.restore()
        ckpt.save(1)
    size_bytes = job.size_bytes
    del job
    storage = LocalStorage(folder)
    ref = discover(storage).commits[-1]
    files = [path for path in folder.rglob("*") if path.is_file()]

    def verify() -> None:
        if verify_checkpoint(storage, ref):
            raise AssertionError("a checkpoint just saved is damaged: its time means nothing")

    def read() -> None:
        _read(files)

    table = Table("", "read s", "verify s", "verify / read", "read CPU s", "verify CPU s", box=SIMPLE)
    for name in ("warm", "cold"):
        times: dict[Callable[[], None], list[tuple[float, float]]] = {read: [], verify: []}
        for number in range(rounds + 1):
            for act in (read, verify) if number % 2 else (verify, read):
                if name == "cold":
                    _drop(files)
                times[act].append(_time(act))
        ratio = median(ours[0] / plain[0] for plain, ours in zip(times[read][1:], times[verify][1:], strict=True))
        seconds = [median(one[i] for one in times[act][1:]) for i in (0, 1) for act in (read, verify)]
        table.add_row(name, *(f"{value:.2f}" for value in (*seconds[:2], ratio, *seconds[2:])))
    console = Console()
    console.print(f"{size_bytes / 1e6:.0f} MB, {rounds} rounds")
    console.print(table)


def _time(act: Callable[[], None]) -> tuple[float, float]:
    """Seconds by the clock, and of this process on all cores."""
    before, start = os.times(), _clock.monotonic_s()
    act()
    took_s, after = _clock.monotonic_s() - start, os.times()
    return took_s, after.user + after.system - before.user - before.system


def _read(files: list[Path]) -> None:
    buffer = memoryview(bytearray(_BUFFER))
    for path in files:
        with path.open("rb", buffering=0) as file:
            while file.readinto(buffer):
                pass


def _drop(files: list[Path]) -> None:
    for path in files:
        with path.open("rb") as file:
            os.fsync(file.fileno())
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


if __name__ == "__main__":
    raise SystemExit(main())
