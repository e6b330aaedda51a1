"""Every figure of the data path, side by side in one run.

    python -m benchmarks.run [--mb 400] [--rounds 5] [--only FIGURE,...] [--json] [--dir FOLDER]

Nothing here passes or fails: figures of one machine on one day are no promise, the ratios are what to read.
"""

from __future__ import annotations

import argparse
import json
import signal
import sys
import tempfile
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from rich.console import Console

from resilio.clock import SystemClock
from resilio.testing.worlds import run_world

from . import holds, long, reshard, restores, saves, scale
from .contenders import quiet
from .figures import FIGURES, Figure, show
from .limits import machine
from .options import Options
from .peers import absent, versions

_clock = SystemClock()
_Measure = Callable[[Options, Path], list[Figure]]


def _alone(fn: Callable[[int, int, Options, Path], list[Figure]]) -> _Measure:
    """In a fresh process: what one group leaves in memory shall not help or hinder the next."""

    def measure(options: Options, folder: Path) -> list[Figure]:
        timeout_s = 300 + 2 * options.mb
        found: list[list[Figure]] = run_world(
            fn, 1, options, folder, timeout_s=timeout_s, init=False, threads=options.threads
        )
        return found[0]

    return measure


# What is measured together, and by what.
GROUPS: list[tuple[tuple[str, ...], _Measure]] = [
    (
        (
            *("hold_overlap", "hold_block", "hold_block_vs_memcpy", "hold_vs_torch_checkpointing"),
            *("step_during_save", "step_during_dcp_save"),
        ),
        _alone(holds.later),
    ),
    (("first_hold",), holds.first),
    (
        (
            *("save_vs_dcp_default", "save_vs_dcp_best", "save_vs_limit", "save_vs_torch_checkpointing"),
            "integrity_cost",
        ),
        _alone(saves.measure),
    ),
    (
        ("restore_warm_vs_dcp", "restore_vs_preadv", "restore_vs_torch_checkpointing", "restore_cold_vs_dcp"),
        _alone(restores.measure),
    ),
    (("restore_1to4_vs_dcp", "restore_4to1_vs_dcp", "read_amplification"), reshard.measure),
    (("replan", "manifest"), _alone(scale.planning)),
    (("loop_overhead",), long.loop_overhead),
    (("memory",), _alone(long.memory)),
    (("ls",), scale.ls),
]


def main(arguments: list[str] | None = None) -> int:
    """Measure and print; returns the exit code."""
    options, only, folder, as_json = _parsed(arguments)
    quiet()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # else the temporary folder would stay
    about: dict[str, Any] = {**machine(folder), "mb": options.mb, "rounds": options.rounds, "peers": versions(absent())}
    figures: list[Figure] = []
    if as_json:
        print(json.dumps({"about": about}), flush=True)
    for names, measure in GROUPS:
        if only.isdisjoint(names):
            continue
        with tempfile.TemporaryDirectory(prefix=".bench-", dir=folder, ignore_cleanup_errors=True) as own:
            start_s = _clock.monotonic_s()
            found = measure(options, Path(own))
        print(f"{_clock.monotonic_s() - start_s:.0f} s for {', '.join(names)}", file=sys.stderr)
        for figure in found:
            if figure.name not in only:
                continue
            print(figure, file=sys.stderr, flush=True)
            figures.append(figure)
            if as_json:
                print(json.dumps(figure.line()), flush=True)
    if not as_json:
        show(about, figures, Console())
    return 0


def _parsed(arguments: list[str] | None) -> tuple[Options, set[str], Path, bool]:
    known = Options()
    parser = argparse.ArgumentParser(prog="python -m benchmarks.run", description=__doc__)
    add = partial(parser.add_argument, metavar="N")
    add("--mb", type=float, default=known.mb, help="size of the state, 10^6 bytes; 1490 is GPT-2 124M")
    add("--layers", type=int, default=known.layers, help="of the model; fewer are wider")
    add("--rounds", type=int, default=known.rounds, help="measured rounds, after one that warms up")
    add("--sim-ranks", type=int, default=known.sim_ranks, help="simulated ranks of replan and manifest")
    add("--sim-tensors", type=int, default=known.sim_tensors, help="tensors of theirs")
    add("--saves", type=int, default=known.saves, help="saves that memory is watched over")
    add("--checkpoints", type=int, default=known.checkpoints, help="that `resilio ls` lists")
    add("--loop-steps", type=int, default=known.loop_steps, help="in each round of loop_overhead")
    add("--threads", type=int, default=known.threads, help="of torch, in a single process")
    parser.add_argument("--device", default=known.device, help="of the state in hold and step figures, such as cuda")
    parser.add_argument("--only", default="", help="names of figures, separated by commas")
    parser.add_argument("--dir", type=Path, default=Path.cwd(), help="where to make the temporary folder")
    parser.add_argument("--json", action="store_true", help="a line of JSON for each figure, with every single time")
    given = parser.parse_args(arguments)
    only = set(filter(None, given.only.split(","))) or set(FIGURES)
    if only - FIGURES.keys():
        parser.error(f"no figure is called {', '.join(sorted(only - FIGURES.keys()))}; there are {', '.join(FIGURES)}")
    sizes = {name: getattr(given, name) for name in Options.__dataclass_fields__ if name != "device"}
    if min(sizes.values()) <= 0:
        parser.error("sizes and counts must be positive")
    if not given.dir.is_dir():
        parser.error(f"--dir {given.dir} is no folder")
    try:
        torch.zeros(1, device=given.device)
    except (RuntimeError, AssertionError) as error:
        parser.error(f"--device {given.device}: {error}")
    return Options(**sizes, device=given.device), only, given.dir, given.json


if __name__ == "__main__":
    sys.exit(main())
