"""Saving and loading next to plain DCP and torch.save, side by side in one run.

    python -m benchmarks.save_load [--mb 300] [--rounds 5] [--ranks 2] [--dir FOLDER] [--json]

Nothing here passes or fails: figures of one machine on one day are no promise, the ratios are what to read.
"""

from __future__ import annotations

import argparse
import gc
import json
import signal
import sys
import tempfile
from collections.abc import Callable
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from shutil import rmtree
from statistics import median
from time import process_time
from typing import Any

from rich.box import SIMPLE
from rich.console import Console
from rich.table import Table

from resilio.clock import SystemClock
from resilio.testing.worlds import run_world

from .contenders import Contender, Dcp, DcpAsync, Resilio, ResilioAsync, TorchSave, quiet
from .limits import Limits, machine
from .reshard import Loads, load_sharded, save_whole
from .state import Job

_clock = SystemClock()

_LIMIT = "plain bytes"  # what the machine can do: the best of these, in the same round, is the limit


def main(arguments: list[str] | None = None) -> int:
    """Measure and print; returns the exit code."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.save_load", description=__doc__)
    parser.add_argument("--mb", type=float, default=300, help="size of the state, 10^6 bytes; 1490 is GPT-2 124M")
    parser.add_argument("--rounds", type=int, default=5, help="measured rounds, after one that warms up")
    parser.add_argument("--ranks", type=int, default=2, help="ranks of the resharding load; 0 leaves it out")
    parser.add_argument("--dir", type=Path, default=Path.cwd(), help="where to make the temporary folder")
    parser.add_argument("--json", action="store_true", help="print JSON, with every single time")
    options = parser.parse_args(arguments)
    if options.mb <= 0 or options.rounds < 1 or options.ranks < 0:
        parser.error("--mb and --rounds must be positive, --ranks must not be negative")
    if not options.dir.is_dir():
        parser.error(f"--dir {options.dir} is no folder")
    quiet()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # else the temporary folder would stay
    with tempfile.TemporaryDirectory(prefix=".bench-", dir=options.dir, ignore_cleanup_errors=True) as folder:
        result = measure(options.mb, options.rounds, options.ranks, Path(folder))
    if options.json:
        json.dump(result, sys.stdout, indent=2)
        print()
    else:
        show(result, Console())
    return 0


# ------------------------------------------------------------------------------------------------------------ measuring


class Times:
    """Seconds by contender, an entry for each round; the first one warms up."""

    def __init__(self) -> None:
        self.wall: dict[str, list[float]] = {}
        self.cpu: dict[str, list[float]] = {}

    def run(self, name: str, act: Callable[[], object]) -> None:
        """Time one call, in seconds by the clock and in seconds that this process computed, all threads together."""
        gc.collect()
        cpu_s, wall_s = process_time(), _clock.monotonic_s()
        act()
        self.add(name, _clock.monotonic_s() - wall_s, process_time() - cpu_s)

    def add(self, name: str, wall_s: float, cpu_s: float) -> None:
        """Note one call."""
        self.wall.setdefault(name, []).append(wall_s)
        self.cpu.setdefault(name, []).append(cpu_s)

    def rows(self, ours: str, size_bytes: int) -> list[dict[str, Any]]:
        """A row for each contender, ours first. Ratios are taken round by round: drift cancels."""
        limits = [seconds for name, seconds in self.wall.items() if name.startswith(_LIMIT)]
        best = [min(of_round) for of_round in zip(*limits, strict=True)]
        rows = []
        for name in sorted(self.wall, key=lambda name: (name != ours, name.startswith(_LIMIT))):
            own = self.wall[name]
            row = {
                "name": name,
                "median_s": median(own[1:]),
                "gb_per_s": size_bytes / 1e9 / median(own[1:]),
                "times_ours": _ratio(own, self.wall[ours]),
                "cpu_s": median(self.cpu[name][1:]),
                "first_s": own[0],
                "seconds": own[1:],
            }
            if best:
                row["times_limit"] = _ratio(own, best)
            rows.append(row)
        return rows


def _ratio(these: list[float], those: list[float]) -> float:
    return median(a / b for a, b in zip(these[1:], those[1:], strict=True))


def measure(mb: float, rounds: int, ranks: int, folder: Path) -> dict[str, Any]:
    """Everything, as plain values."""
    result: dict[str, Any] = {"machine": machine(folder)}
    job = Job(mb)
    result["state"] = {"size_bytes": job.size_bytes, "tensors": len(job.tensors()), "rounds": rounds}
    result |= _one_process(job, rounds, folder)
    del job
    gc.collect()
    if ranks:
        save_whole(mb, folder)
        timeout_s = 120 + rounds * mb / 10
        found = run_world(load_sharded, ranks, mb, str(folder), rounds, timeout_s=timeout_s, group_timeout_s=timeout_s)
        result["reshard"] = _reshard(found)
    return result


def _one_process(job: Job, rounds: int, folder: Path) -> dict[str, list[dict[str, Any]]]:
    save, load, hold, commit = Times(), Times(), Times(), Times()
    contenders = [Resilio(job), Dcp(job), Dcp(job, 2), TorchSave(job, fsync=True), TorchSave(job, fsync=False)]
    readers = contenders[0], contenders[1], contenders[4]  # the others' files are read in the same way
    behind: list[Contender] = [ResilioAsync(job), DcpAsync(job)]
    limits = Limits(job.size_bytes, _new(folder, "limits"))
    with ExitStack() as stack:
        for contender in behind:
            stack.enter_context(contender.opened(_new(folder, contender.name)))
        for number in range(rounds + 1):
            for threads, name in ((1, _LIMIT), (2, f"{_LIMIT}, 2 threads")):
                save.run(name, partial(limits.write, threads))
                load.run(name, partial(limits.read, threads))
            hold.run(_LIMIT, limits.copy)
            limits.clean()
            for contender in contenders:
                own = _new(folder, contender.name)
                with contender.opened(own):
                    save.run(contender.name, partial(contender.save, 1))
                    contender.settle()
                    if contender in readers:
                        job.scramble()
                        load.run(contender.name, contender.load)
                        job.check()
                        if isinstance(contender, Dcp):
                            load.add("dcp.load alone", *contender.call_s)
                rmtree(own)
            for contender in behind:
                cpu_s, wall_s = process_time(), _clock.monotonic_s()
                hold.run(contender.name, partial(contender.save, number + 1))
                contender.settle()
                commit.add(contender.name, _clock.monotonic_s() - wall_s, process_time() - cpu_s)
                if isinstance(contender, DcpAsync):
                    rmtree(contender.checkpoint)
            # Who follows whom changes, so that what one leaves behind does not always fall to the same one.
            contenders.reverse()
            behind.reverse()
    return {
        "save": save.rows("resilio", job.size_bytes),
        "load": load.rows("resilio", job.size_bytes),
        "async_hold": hold.rows("resilio async", job.size_bytes),
        "async_commit": commit.rows("resilio async", job.size_bytes),
    }


def _new(folder: Path, name: str) -> Path:
    made = folder / name.replace(" ", "-")
    made.mkdir()
    return made


def _reshard(found: list[Loads]) -> dict[str, Any]:
    slowest = Times()
    for name in found[0].seconds:
        walls = zip(*(one.seconds[name] for one in found), strict=True)
        cpus = zip(*(one.cpu_s[name] for one in found), strict=True)
        for wall_s, cpu_s in zip(walls, cpus, strict=True):
            slowest.add(name, max(wall_s), sum(cpu_s))
    rows = slowest.rows("resilio", sum(one.needed_bytes for one in found))
    for row in rows:
        row["read_over_needed"] = []
        for one in found:
            read = one.read_bytes[row["name"]][-1]
            row["read_over_needed"].append(None if read is None else read / one.needed_bytes)
    return {"ranks": len(found), "needed_bytes": [one.needed_bytes for one in found], "rows": rows}


# -------------------------------------------------------------------------------------------------------------- showing


def show(result: dict[str, Any], console: Console) -> None:
    """The same as tables."""
    state, about = result["state"], result["machine"]
    console.print(
        f"{state['size_bytes'] / 1e6:.0f} MB in {state['tensors']} tensors, medians of {state['rounds']} rounds, all "
        "contenders by turns in one run.",
        f"{about['cores']} cores, {about['memory_gb']} GB memory, load {about['load_1_min']}, {about['filesystem']}, "
        f"{about['system']}, Python {about['python']}, torch {about['torch']} with {about['torch_threads']} threads.",
        f"Page cache {about['page_cache']}.\n",
        sep="\n",
    )
    ranks = result.get("reshard", {}).get("ranks")
    for title, rows in (
        ("save, until the checkpoint is complete", result["save"]),
        ("load, into live model and optimizer", result["load"]),
        ("asynchronous save: how long the loop is held", result["async_hold"]),
        ("asynchronous save: until the checkpoint is complete", result["async_commit"]),
        (
            f"{ranks} ranks load what 1 has saved: the slowest rank, CPU of all",
            result["reshard"]["rows"] if ranks else [],
        ),
    ):
        if rows:
            console.print(_table(title, rows))


def _table(title: str, rows: list[dict[str, Any]]) -> Table:
    columns: dict[str, Callable[[dict[str, Any]], str]] = {
        "": lambda row: row["name"],
        "s": lambda row: f"{row['median_s']:.3f}",
        "GB/s": lambda row: f"{row['gb_per_s']:.2f}",
        "/ ours": lambda row: f"{row['times_ours']:.2f}",
        "/ limit": lambda row: f"{row['times_limit']:.2f}",
        "CPU s": lambda row: f"{row['cpu_s']:.2f}",
        "first s": lambda row: f"{row['first_s']:.3f}",
        "read / needed": lambda row: "  ".join("?" if r is None else f"{r:.2f}" for r in row["read_over_needed"]),
    }
    if "times_limit" not in rows[0]:
        del columns["/ limit"]
    if "read_over_needed" not in rows[0]:
        del columns["read / needed"]
    table = Table(title=title, title_justify="left", box=SIMPLE)
    for name in columns:
        table.add_column(name, justify="right" if name else "left", no_wrap=True)
    for row in rows:
        table.add_row(*(cell(row) for cell in columns.values()))
    return table


if __name__ == "__main__":
    sys.exit(main())
