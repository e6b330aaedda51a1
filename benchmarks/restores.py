"""Restores into live model and optimizer, by the process that has saved."""

from __future__ import annotations

import os
from collections.abc import Callable
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any
from unittest import mock

from resilio import TrainingState
from resilio.engine import Engine, saved_state
from resilio.engine.reader import CheckpointReader
from resilio.state.restore import plan_restore

from .contenders import Contender, Dcp, Resilio, ResilioAsync, TorchSave, files_of, quiet, sync
from .figures import Figure, paired
from .limits import Limits
from .options import Options
from .peers import PEERS, Safetensors, TorchCheckpointing, TorchSnapshot, absent
from .state import SPOILT, Job
from .timing import Times, Turns

__all__ = ["measure"]

_OURS, _SYNC, _IN_PLACE = "resilio overlap", "resilio sync", "resilio, unchecked in place"
_PEER, _ALONE = "torch_checkpointing", "dcp.load alone"
_MAPPED, _COLD = "torch.load, mmap", ": cold"


def measure(_rank: int, _world: int, options: Options, folder: Path) -> list[Figure]:
    """All figures of restores. In a fresh process."""
    quiet()
    job = Job(options.mb, options.layers)
    missing = absent()
    raw = folder / "limits"
    raw.mkdir()
    limits = Limits(job.size_bytes, raw)
    whole = TorchSave(job, folder)
    ours = ResilioAsync(job, folder, "overlap")
    contenders: list[Contender] = [ours, Dcp(job, folder), whole, Resilio(job, folder, _SYNC)]
    for name, kind in (("safetensors", Safetensors), ("torchsnapshot", TorchSnapshot), (_PEER, TorchCheckpointing)):
        if name not in missing:
            contenders.append(kind(job, folder))
    reads = limits.reads()
    for threads in (1, 2, 4):
        limits.write(threads)
    times = Times()

    def checked(name: str, load: Callable[[], None]) -> None:
        job.scramble()
        times.time(name, load)
        job.check()

    def warm(contender: Contender) -> None:
        if contender.name not in times.wall:
            contender.open()
            contender.save(1)
            contender.settle()
            sync(contender.folder)
        checked(contender.name, contender.load)
        if isinstance(contender, Dcp):
            times.add(_ALONE, contender.call_s)

    def cold(contender: Contender) -> None:
        _drop(contender.folder)
        checked(contender.name + _COLD, contender.load)

    def cold_raw(name: str, read: Callable[[], None]) -> None:
        _drop(raw)
        times.time(name + _COLD, read)

    turns = {name: partial(times.time, name, read) for name, read in reads.items()}
    turns |= {contender.name: partial(warm, contender) for contender in contenders}
    turns[_IN_PLACE] = partial(in_place, ours, job, times)
    turns[_MAPPED] = partial(checked, _MAPPED, partial(whole.load, mmap=True))
    run = Turns(turns, may_fail={contender.name: "" for contender in contenders[4:]})
    run.run(options.rounds)
    # Apart: what is dropped from the page cache would not be warm for the others.
    dropped = {contender.name: partial(cold, contender) for contender in contenders[:2]}
    dropped |= {name: partial(cold_raw, name, read) for name, read in reads.items()}
    Turns(dropped).run(options.rounds)
    times.drop_first()
    for contender in contenders:
        if contender.name not in run.absent:
            contender.close()
    for name, why in run.absent.items():
        missing[name.removesuffix(" + fsync")] = why
    return _figures(times, list(reads), missing)


def in_place(ours: Resilio, job: Job, times: Times) -> None:
    """Time the reader alone: into the live tensors themselves, no digest looked at."""
    engine: Engine = ours.manager._engine
    found: list[Any] = []
    fill = Engine.fill

    def seen(self: Engine, scratch: Any, manifest: Any, *arguments: Any, **named: Any) -> None:
        found.append(manifest)
        fill(self, scratch, manifest, *arguments, **named)

    with mock.patch.object(Engine, "fill", seen):
        ours.load()
    (manifest,) = found
    state = TrainingState(model=job.model, optimizer=job.optimizer)
    plan = plan_restore(state, saved_state(manifest), rank=0, world=1)
    live = plan.memory.in_place()
    job.scramble()
    with mock.patch.object(CheckpointReader, "_check", lambda *_: None):
        times.time(_IN_PLACE, lambda: engine.fill(plan.scratch, manifest))
    if not live or any(tensor.reshape(-1)[0] == SPOILT for tensor in live.values()):
        raise AssertionError("what was read did not come into the live tensors: its time means nothing")
    ours.load()  # what is too small to be read in place


def _figures(times: Times, reads: list[str], missing: dict[str, str]) -> list[Figure]:
    wall = {name: held for name, held in times.wall.items() if held}
    ours, cold = wall[_OURS], wall[_OURS + _COLD]
    limit = [min(round_) for round_ in zip(*(wall[name] for name in reads), strict=True)]
    raw_cold = [min(round_) for round_ in zip(*(wall[name + _COLD] for name in reads), strict=True)]
    warm = {name: held for name, held in wall.items() if not name.endswith(_COLD)}
    own = (_OURS, _IN_PLACE, "dcp", *reads)
    others = {f"{name} / ours": paired(held, ours) for name, held in warm.items() if name not in own}
    figures = [
        Figure(
            "restore_warm_vs_dcp",
            paired(wall["dcp"], ours),
            {name: held for name, held in warm.items() if name not in (*reads, _IN_PLACE)},
            {**others, "CPU s": median(times.cpu[_OURS]), "CPU s of dcp": median(times.cpu["dcp"])},
            absent={name: missing[name] for name in PEERS if name in missing},
            note="ours checks every digest and changes nothing live before everything is read; the others do neither",
        ),
        Figure(
            "restore_vs_preadv",
            paired(limit, wall[_IN_PLACE]),
            {**{name: wall[name] for name in reads}, _IN_PLACE: wall[_IN_PLACE], _OURS: ours},
            {"best preadv s": median(limit), "preadv / all of a restore": paired(limit, ours)},
            note="our reader alone, through dcp.load, straight into live tensors; no restore reads unchecked",
        ),
    ]
    if _PEER in wall:
        seconds = {_PEER: wall[_PEER], _OURS: ours}
        figures.append(Figure("restore_vs_torch_checkpointing", paired(wall[_PEER], ours), seconds))
    else:
        figures.append(Figure("restore_vs_torch_checkpointing", None, absent={_PEER: missing[_PEER]}))
    figures.append(
        Figure(
            "restore_cold_vs_dcp",
            paired(wall["dcp" + _COLD], cold),
            {name: held for name, held in wall.items() if name.endswith(_COLD)},
            {"best raw read s": median(raw_cold), "ours / best raw read": paired(cold, raw_cold)},
            note="fadvise(DONTNEED) after fsync: asked for, not proven; what is below the machine may still cache",
        )
    )
    return figures


def _drop(folder: Path) -> None:
    for path in files_of(folder):
        with path.open("rb") as file:
            os.fsync(file.fileno())
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
