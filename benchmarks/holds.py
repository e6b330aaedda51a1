"""How long an asynchronous save holds training, and what it does to the steps beside it."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

from resilio.testing.worlds import run_world

from .contenders import Contender, DcpAsync, Resilio, ResilioAsync, quiet
from .figures import Figure, paired
from .limits import Limits
from .loop import Hold, Loop
from .options import Options
from .peers import TorchCheckpointing, absent
from .state import Job
from .timing import Times, Turns

__all__ = ["first", "later"]

_OVERLAP, _BLOCK, _DCP, _PEER = "resilio overlap", "resilio block", "dcp async", "torch_checkpointing async"
_MEMCPY, _PACKAGE = "memcpy", "torch_checkpointing"

_FIRST: dict[str, Callable[[Job, Path], Contender]] = {
    _OVERLAP: partial(ResilioAsync, stage="overlap"),
    _BLOCK: partial(ResilioAsync, stage="block"),
    _DCP: DcpAsync,
    _PEER: partial(TorchCheckpointing, background=True),
}


def later(_rank: int, _world: int, options: Options, folder: Path) -> list[Figure]:
    """All figures of saves whose buffers are warm. In a fresh process."""
    quiet()
    job = Job(options.mb, options.layers, device=options.device)
    loop = Loop(job, options.step_s)
    missing = absent()
    limits = Limits(job.size_bytes, folder)
    contenders: list[Contender] = [
        ResilioAsync(job, folder, "overlap"),
        ResilioAsync(job, folder, "block"),
        DcpAsync(job, folder),
        DcpAsync(job, folder, reused=True),
        DcpAsync(job, folder, 2, reused=True),
        *([TorchCheckpointing(job, folder, background=True)] if _PACKAGE not in missing else []),
    ]
    holds: dict[str, list[Hold]] = {contender.name: [] for contender in contenders}
    copies = Times()

    def turn(contender: Contender) -> None:
        if not holds[contender.name]:
            contender.open()
        holds[contender.name].append(loop.hold(contender))
        if not isinstance(contender, Resilio):
            shutil.rmtree(contender.checkpoint)

    turns = Turns(
        {_MEMCPY: lambda: copies.time(_MEMCPY, limits.copy), **{c.name: partial(turn, c) for c in contenders}},
        may_fail={_PEER: _PACKAGE},
    )
    turns.run(options.rounds)
    copies.drop_first()
    for contender in contenders:
        del holds[contender.name][:1]
        if contender.name not in turns.absent:
            contender.close()
    if _PEER in turns.absent:
        missing[_PACKAGE] = turns.absent[_PEER]
    return _later_figures({name: held for name, held in holds.items() if held}, copies.wall[_MEMCPY], missing)


def _later_figures(holds: dict[str, list[Hold]], memcpy: list[float], missing: dict[str, str]) -> list[Figure]:
    total = {name: [hold.total_s for hold in held] for name, held in holds.items()}
    calls = {name: [hold.call_s + hold.wait_s for hold in held] for name, held in holds.items()}
    parts = {name: _parts(held) for name, held in holds.items()}
    note = "hold = call + wait + excess of the next step; call_and_wait is without that excess, which is noisy"
    figures = []
    for name, ours in (("hold_overlap", _OVERLAP), ("hold_block", _BLOCK)):
        named: dict[str, Any] = {"call_and_wait_ratio": paired(calls[_DCP], calls[ours])}
        for other in (name for name in total if name.startswith(f"{_DCP},")):
            named[f"ratio of {other}"] = paired(total[other], total[ours])
        shown = {key: value for key, value in total.items() if key not in (_PEER, _BLOCK, _OVERLAP) or key == ours}
        figures.append(Figure(name, paired(total[_DCP], total[ours]), shown, {**named, **parts}, note=note))
    figures.append(
        Figure(
            "hold_block_vs_memcpy",
            paired(total[_BLOCK], memcpy),
            {_BLOCK: total[_BLOCK], _MEMCPY: memcpy},
            {"call_and_wait_ratio": paired(calls[_BLOCK], memcpy), _BLOCK: parts[_BLOCK]},
            note=note,
        )
    )
    if _PEER in total:
        figures.append(
            Figure(
                "hold_vs_torch_checkpointing",
                paired(total[_PEER], total[_OVERLAP]),
                {_PEER: total[_PEER], _OVERLAP: total[_OVERLAP]},
                {"call_and_wait_ratio": paired(calls[_PEER], calls[_OVERLAP]), _PEER: parts[_PEER]},
                note="its lock is held around each optimizer step, as its users must",
            )
        )
    else:
        figures.append(Figure("hold_vs_torch_checkpointing", None, absent={_PACKAGE: missing[_PACKAGE]}))
    for name, of in (("step_during_save", _OVERLAP), ("step_during_dcp_save", _DCP)):
        during = [hold.during_s for hold in holds[of]]
        before = [hold.undisturbed_s for hold in holds[of]]
        figures.append(Figure(name, paired(during, before), {"during": during, "undisturbed": before}))
    return figures


def _parts(held: list[Hold]) -> dict[str, float]:
    return {
        part: median(getattr(hold, part) for hold in held)
        for part in ("setup_s", "call_s", "wait_s", "excess_s", "undisturbed_s")
    }


def first(options: Options, folder: Path) -> list[Figure]:
    """The first save of each of many fresh processes. Called outside of any world."""
    holds: dict[str, list[Hold]] = {}
    missing = absent()
    names = [name for name in _FIRST if name != _PEER or _PACKAGE not in missing]

    def turn(name: str, number: list[int]) -> None:
        number[0] += 1
        own = folder / f"first-{number[0]}"
        own.mkdir()
        found = run_world(
            first_of, 1, options, own, name, timeout_s=120 + options.mb, init=False, threads=options.threads
        )
        holds.setdefault(name, []).extend(found)
        shutil.rmtree(own)

    number = [0]
    turns = Turns({name: partial(turn, name, number) for name in names}, may_fail={_PEER: _PACKAGE})
    turns.run(options.rounds)  # the first round brings files of the contenders' code into the page cache
    if _PEER in turns.absent:
        missing[_PACKAGE] = turns.absent[_PEER]
    holds = {name: held[1:] for name, held in holds.items()}
    total = {name: [hold.total_s for hold in held] for name, held in holds.items()}
    return [
        Figure(
            "first_hold",
            paired(total[_DCP], total[_OVERLAP]),
            total,
            {
                "ratio of block": paired(total[_DCP], total[_BLOCK]),
                **{name: _parts(held) for name, held in holds.items()},
            },
            absent={_PACKAGE: missing[_PACKAGE]} if _PACKAGE in missing else {},
            note="setup_s, making the manager, counts; the processes have torch and DCP imported",
        )
    ]


def first_of(_rank: int, _world: int, options: Options, folder: Path, name: str) -> Hold:
    """Train, then save for the first time in this process."""
    quiet()
    job = Job(options.mb, options.layers, device=options.device)
    contender = _FIRST[name](job, folder)
    hold = Loop(job, options.step_s).hold(contender, setup=contender.open)
    contender.close()
    return hold
