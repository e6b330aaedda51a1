"""A checkpoint of one process restored by four that hold their rows (FSDP2 on gloo), and the other way round."""

from __future__ import annotations

import gc
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median

import torch.distributed as dist

from resilio.clock import SystemClock
from resilio.testing.worlds import run_world

from .contenders import Dcp, Resilio, quiet, sync
from .figures import Figure, paired
from .options import Options
from .state import Job

__all__ = ["measure"]

_clock = SystemClock()
_RESILIO, _DCP = "resilio", "dcp"
_MANY = 4


@dataclass
class Loads:
    """One rank's loads, an entry for each round; the first one warms up.

    Attributes:
        needed_bytes: of its part of the state.
        seconds: by contender.
        read_bytes: by contender: what its reads brought, by the kernel's count; empty where it keeps none.
    """

    needed_bytes: int
    seconds: dict[str, list[float]] = field(default_factory=lambda: {_RESILIO: [], _DCP: []})
    read_bytes: dict[str, list[int]] = field(default_factory=lambda: {_RESILIO: [], _DCP: []})


def measure(options: Options, folder: Path) -> list[Figure]:
    """All figures of other numbers of ranks. Called outside of any world."""
    timeout_s = 120 + options.rounds * options.mb / 5

    def restored(saved_by: int, loaded_by: int) -> list[Loads]:
        own = folder / f"{saved_by}to{loaded_by}"
        run_world(save, saved_by, options, own, timeout_s=timeout_s, group_timeout_s=timeout_s)
        return run_world(load, loaded_by, options, own, timeout_s=timeout_s, group_timeout_s=timeout_s)

    spread, gathered = restored(1, _MANY), restored(_MANY, 1)
    figures = []
    for name, loads in (("restore_1to4_vs_dcp", spread), ("restore_4to1_vs_dcp", gathered)):
        slowest = {
            who: [max(round_) for round_ in zip(*(one.seconds[who][1:] for one in loads), strict=True)]
            for who in (_DCP, _RESILIO)
        }
        figures.append(
            Figure(
                name,
                paired(slowest[_DCP], slowest[_RESILIO]),
                slowest,
                {f"read / needed of {who}": _amplification(loads, who) for who in (_DCP, _RESILIO)},
                note="the slowest rank; one thread of torch for each",
            )
        )
    ratio = _amplification(spread, _RESILIO)
    figures.append(
        Figure(
            "read_amplification",
            ratio,
            {_RESILIO: figures[0].seconds[_RESILIO]},
            {
                "needed_bytes": sum(one.needed_bytes for one in spread),
                "by rank": [_amplification([one], _RESILIO) for one in spread],
            },
            absent={} if ratio is not None else {_RESILIO: "this kernel does not count what a process reads"},
            note="of a warm restore; the manifest and the names in it count as read",
        )
    )
    return figures


def _amplification(loads: list[Loads], who: str) -> float | None:
    if not all(one.read_bytes[who] for one in loads):
        return None
    return sum(median(one.read_bytes[who][1:]) for one in loads) / sum(one.needed_bytes for one in loads)


def save(rank: int, world: int, options: Options, folder: Path) -> None:
    """The checkpoints that `load` loads. Runs on every rank."""
    quiet()
    job = Job(options.mb, options.layers, sharded=world > 1)
    for contender in (Resilio(job, folder), Dcp(job, folder, dist=True)):
        contender.open()
        contender.save(1)
        contender.close()
        dist.barrier()
    if rank == 0:
        sync(folder)


def load(_rank: int, world: int, options: Options, folder: Path) -> Loads:
    """Load both, by turns. Runs on every rank."""
    quiet()
    job = Job(options.mb, options.layers, sharded=world > 1)
    ours, plain = Resilio(job, folder), Dcp(job, folder, dist=True)
    ours.open()
    plain.where(1)
    found = Loads(job.size_bytes)
    loads: list[tuple[str, Callable[[], None]]] = [(_RESILIO, ours.load), (_DCP, plain.load)]
    for _ in range(options.rounds + 1):
        for name, act in loads:
            job.scramble()
            gc.collect()
            dist.barrier()
            before, start_s = _bytes_read(), _clock.monotonic_s()
            act()
            found.seconds[name].append(_clock.monotonic_s() - start_s)
            after = _bytes_read()
            if before is not None and after is not None:
                found.read_bytes[name].append(after - before)
            job.check()
        loads.reverse()
    ours.close()
    return found


def _bytes_read() -> int | None:
    try:
        lines = Path("/proc/self/io").read_text().splitlines()
    except OSError:
        return None
    return int(lines[0].removeprefix("rchar: "))
