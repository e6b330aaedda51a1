"""Durable synchronous saves."""

from __future__ import annotations

import shutil
from functools import partial
from pathlib import Path
from statistics import median

from resilio import keep_all

from .contenders import Contender, Dcp, Resilio, TorchSave, quiet
from .figures import Figure, paired
from .limits import THREADS, Limits
from .options import Options
from .peers import PEERS, Safetensors, TorchCheckpointing, TorchSnapshot, absent, make_durable
from .state import Job
from .timing import Times, Turns

__all__ = ["measure"]

_OURS, _BARE, _PEER = "resilio", "resilio without fingerprints", "torch_checkpointing"
_FSYNC = "torch_checkpointing + fsync"


def measure(_rank: int, _world: int, options: Options, folder: Path) -> list[Figure]:
    """All figures of saves. In a fresh process."""
    quiet()
    job = Job(options.mb, options.layers)
    missing = absent()
    limits = Limits(job.size_bytes, _made(folder / "limits"))
    contenders: list[Contender] = [
        Resilio(job, folder, keep=keep_all()),
        Resilio(job, folder, _BARE, fingerprints=False, keep=keep_all()),
        *(Dcp(job, folder, threads) for threads in THREADS),
        TorchSave(job, folder),
    ]
    for name, kind in (("safetensors", Safetensors), ("torchsnapshot", TorchSnapshot), (_PEER, TorchCheckpointing)):
        if name not in missing:
            contenders.append(kind(job, folder))
    times, step = Times(), [0]

    def turn(contender: Contender) -> None:
        if contender.name not in times.wall:
            contender.open()
        step[0] += 1
        times.time(contender.name, partial(contender.save, step[0]))
        if not contender.durable:
            # Also, what it left in memory would be written during the next contender's time.
            times.time(f"{contender.name}: fsync", partial(make_durable, contender))
        # Nobody's time to delete an older checkpoint counts; it is long where the filesystem discards what it frees.
        if isinstance(contender, Resilio):
            for path in contender.folder.glob("step-*/*.distcp"):
                path.unlink()
        elif contender.checkpoint.is_dir():
            shutil.rmtree(contender.checkpoint)
        else:
            contender.checkpoint.unlink()

    writes = limits.writes()
    turns = {name: partial(times.time, name, write) for name, write in writes.items()}
    turns |= {contender.name: partial(turn, contender) for contender in contenders}
    run = Turns(turns, may_fail={contender.name: contender.name for contender in contenders[6:]})
    run.run(options.rounds, before=limits.clean)
    times.drop_first()
    for contender in contenders:
        if contender.name not in run.absent:
            contender.close()
    for name, why in run.absent.items():
        missing[name.removesuffix(" + fsync")] = why
    return _figures(times, list(writes), missing)


def _figures(times: Times, writes: list[str], missing: dict[str, str]) -> list[Figure]:
    wall = {name: held for name, held in times.wall.items() if held}
    ours = wall[_OURS]
    dcp = {name: held for name, held in wall.items() if name.split(",")[0] == "dcp"}
    best = min(dcp, key=lambda name: median(dcp[name]))
    limit = [min(round_) for round_ in zip(*(wall[name] for name in writes), strict=True)]
    others = {name: median(held) / median(ours) for name, held in wall.items() if name not in (_OURS, *writes)}
    cpu = {f"CPU s of {name}": median(times.cpu[name]) for name in (_OURS, "dcp")}
    figures = [
        Figure("save_vs_dcp_default", paired(wall["dcp"], ours), {"dcp": wall["dcp"], _OURS: ours}, cpu),
        Figure("save_vs_dcp_best", paired(wall[best], ours), {**dcp, _OURS: ours}, {"best": best}),
        Figure(
            "save_vs_limit",
            paired(limit, ours),
            {**{name: wall[name] for name in writes}, **wall},
            {"best write s": median(limit), **{f"{name} / ours": ratio for name, ratio in others.items()}},
            absent={name: missing[name] for name in PEERS if name in missing},
            note="torchsnapshot and torch_checkpointing are not durable by themselves; what fsync adds stands apart",
        ),
    ]
    if _PEER in wall:
        durable = [a + b for a, b in zip(wall[_PEER], wall[f"{_PEER}: fsync"], strict=True)]
        figures.append(
            Figure(
                "save_vs_torch_checkpointing",
                paired(wall[_PEER], ours),
                {_PEER: wall[_PEER], _FSYNC: durable, _OURS: ours},
                {"ratio with fsync": paired(durable, ours)},
                note="it does not fsync, we do; use_direct_io=False, for its default fails on ext4 (EINVAL)",
            )
        )
    else:
        figures.append(Figure("save_vs_torch_checkpointing", None, absent={_PEER: missing[_PEER]}))
    bare = wall[_BARE]
    figures.append(
        Figure(
            "integrity_cost",
            paired(ours, bare),
            {"with fingerprints": ours, "without": bare},
            {"CPU s with": median(times.cpu[_OURS]), "CPU s without": median(times.cpu[_BARE])},
            note="digests cannot be switched off, so their cost is on both sides",
        )
    )
    return figures


def _made(folder: Path) -> Path:
    folder.mkdir()
    return folder
