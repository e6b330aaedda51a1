"""What shows over many steps and saves: the price of a `step` that does not save, and memory that is not given back."""

from __future__ import annotations

import gc
import os
from pathlib import Path
from statistics import median

from torch import nn

from resilio import CheckpointManager, TrainingState, keep_last, save_every
from resilio.clock import SystemClock
from resilio.testing.worlds import run_world

from .contenders import quiet
from .figures import Figure
from .options import Options
from .state import Job

__all__ = ["loop_overhead", "memory"]

_clock = SystemClock()
_STEP_S = 0.05
_SHARE = 10  # of --mb is saved here: it is saved often


def loop_overhead(options: Options, folder: Path) -> list[Figure]:
    """`ckpt.step` at two ranks. Called outside of any world."""
    found = run_world(steps, 2, options.loop_steps, options.rounds, folder / "loop", timeout_s=300)
    slowest = [max(pair) for pair in zip(*found, strict=True)]
    return [
        Figure(
            "loop_overhead",
            median(slowest) / _STEP_S,
            {"a step, mean of a round": slowest},
            {"steps a round": options.loop_steps},
            note="nothing is trained between: the ranks meet at each step at once, and nothing hides the all-reduce",
        )
    ]


def steps(_rank: int, _world: int, count: int, rounds: int, folder: Path) -> list[float]:
    """Mean seconds of `step`, by round. Runs on every rank."""
    quiet()
    found = []
    with CheckpointManager(folder, {"model": nn.Linear(8, 8)}, save=save_every(10**9), mode="async") as manager:
        step = 0
        for _ in range(rounds + 1):
            gc.collect()
            start_s = _clock.monotonic_s()
            for _ in range(count):
                step += 1
                manager.step(step)
            found.append((_clock.monotonic_s() - start_s) / count)
    return found[1:]


def memory(_rank: int, _world: int, options: Options, folder: Path) -> list[Figure]:
    """Resident memory over many saves. In a fresh process."""
    quiet()
    job = Job(options.mb / _SHARE, options.layers)
    state = TrainingState(model=job.model, optimizer=job.optimizer)
    seconds, resident = [], []
    with CheckpointManager(folder / "memory", state, keep=keep_last(2), mode="async") as manager:
        for step in range(1, options.saves + 1):
            start_s = _clock.monotonic_s()
            manager.save(step).result()
            seconds.append(_clock.monotonic_s() - start_s)
            gc.collect()
            resident.append(_resident_bytes())
    if resident[0] is None or resident[-1] is None:
        return [Figure("memory", None, absent={"resilio": "this system does not tell resident memory"})]
    # After a few: the first ones fill pools that are kept.
    start = min(len(resident) - 1, 5)
    return [
        Figure(
            "memory",
            resident[-1] / (resident[start] or 1),
            {"save until committed": seconds},
            {
                "resident bytes": resident,
                "state bytes": job.size_bytes,
                "growth over state": (resident[-1] - (resident[start] or 0)) / job.size_bytes,
            },
            note=f"{options.saves} asynchronous saves of a tenth of --mb; against the one after the {start}th",
        )
    ]


def _resident_bytes() -> int | None:
    try:
        pages = Path("/proc/self/statm").read_text().split()[1]
    except OSError:
        return None
    return int(pages) * os.sysconf("SC_PAGE_SIZE")
