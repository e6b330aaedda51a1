"""A checkpoint of one process, loaded by several that hold a part each (FSDP2 on gloo)."""

from __future__ import annotations

import gc
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from time import process_time

import torch.distributed as dist

from resilio import CheckpointManager, TrainingState
from resilio.clock import SystemClock

from .contenders import Dcp, quiet
from .state import Job

__all__ = ["Loads", "load_sharded", "save_whole"]

_clock = SystemClock()
_RESILIO, _DCP = "resilio", "dcp"


@dataclass(frozen=True)
class Loads:
    """One rank's loads, an entry for each round; the first one warms up.

    Attributes:
        needed_bytes: of its part of the state.
        seconds: by contender.
        cpu_s: by contender: what this rank computed, all its threads together.
        read_bytes: by contender: what its reads brought, by the kernel's count; None where it keeps none.
    """

    needed_bytes: int
    seconds: dict[str, list[float]]
    cpu_s: dict[str, list[float]]
    read_bytes: dict[str, list[int | None]]


def save_whole(mb: float, folder: Path) -> None:
    """The checkpoints that `load_sharded` loads."""
    job = Job(mb)
    state = TrainingState(model=job.model, optimizer=job.optimizer)
    with CheckpointManager(folder / _RESILIO, state, mode="sync") as manager:
        manager.save(1)
    whole = Dcp(job)
    with whole.opened(folder / _DCP):
        whole.save(1)


def load_sharded(rank: int, world: int, mb: float, folder: str, rounds: int) -> Loads:
    """Load both, by turns. Runs on every rank."""
    quiet()
    job = Job(mb, sharded=True)
    state = TrainingState(model=job.model, optimizer=job.optimizer)
    plain = Dcp(job, dist=True)
    plain.folder = Path(folder, _DCP)
    plain.where(1)
    found = Loads(job.size_bytes, *({_RESILIO: [], _DCP: []} for _ in range(3)))  # type: ignore[arg-type]
    with CheckpointManager(Path(folder, _RESILIO), state, mode="sync") as manager:
        loads: list[tuple[str, Callable[[], object]]] = [(_RESILIO, manager.restore), (_DCP, plain.load)]
        for _ in range(rounds + 1):
            for name, load in loads:
                job.scramble()
                gc.collect()
                dist.barrier()
                before, cpu_s, wall_s = _bytes_read(), process_time(), _clock.monotonic_s()
                load()
                found.seconds[name].append(_clock.monotonic_s() - wall_s)
                found.cpu_s[name].append(process_time() - cpu_s)
                after = _bytes_read()
                found.read_bytes[name].append(None if before is None or after is None else after - before)
                job.check()
            loads.reverse()
    return found


def _bytes_read() -> int | None:
    try:
        lines = Path("/proc/self/io").read_text().splitlines()
    except OSError:
        return None
    return int(lines[0].removeprefix("rchar: "))
