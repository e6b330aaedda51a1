"""`resilio plan`: what policies would save and delete, before a job runs for a week by them."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Annotated, Any

import typer

from .errors import Exit
from .options import Debug, Json
from .tables import Table

if TYPE_CHECKING:
    from ..policies import KeepPolicy, SavePolicy
    from ..types import CheckpointInfo, CheckpointRef
    from .simulate import Outcome, Start

__all__ = ["plan"]

_SHOWN = 12  # steps named in one line


def plan(
    save: Annotated[str, typer.Option(metavar="POLICY", help="When to save: 'save_every(500)'.", show_default=False)],
    steps: Annotated[int, typer.Option(metavar="N", help="How many steps to look ahead.", show_default=False)],
    url: Annotated[
        str | None,
        typer.Argument(
            metavar="[URL]", help="The run to go on from. Default: one without checkpoints.", show_default=False
        ),
    ] = None,
    keep: Annotated[str, typer.Option(metavar="POLICY", help="What to keep: 'keep_last(3)'.")] = "keep_all()",
    step_seconds: Annotated[
        float | None,
        typer.Option(metavar="S", help="How long a step takes; policies that look at time need it."),
    ] = None,
    from_step: Annotated[
        int | None,
        typer.Option(
            "--from", metavar="STEP", help="The step that was done last. Default: the newest checkpoint's.", min=0
        ),
    ] = None,
    as_json: Json = False,
    debug: Debug = False,
) -> int:
    """Tell what save and keep policies would save and delete in the next steps. Nothing is written or deleted.

    Signals, metrics, failures and the save at the end of training are not simulated.

    Exit codes: 0 good; 3 it stopped early, since there was too much to look at; 4 the run has no checkpoint.
    """
    from . import look, output
    from .simulate import simulate

    save_policy, keep_policy = look.save_policy(save), look.keep_policy(keep)
    now_s = time.time()
    shown_url, start, notes = _start(url, from_step, now_s)
    with output.progress_bar("simulating", in_bytes=False) as progress:
        outcome = simulate(save_policy, keep_policy, steps, start, step_s=step_seconds, progress=progress)
    notes += _notes(save_policy, keep_policy, outcome)
    page = {
        "url": shown_url,
        "save": repr(save_policy),
        "keep": repr(keep_policy),
        "from_step": start.step,
        "to_step": start.step + steps,
        "step_seconds": step_seconds,
        **_json(outcome, start, step_seconds),
        "notes": notes,
    }
    if as_json:
        output.emit_json(page)
    else:
        output.emit_page(*_page(page))
    return Exit.GOOD if outcome.stopped_at is None else Exit.INCONCLUSIVE


def _start(url: str | None, from_step: int | None, now_s: float) -> tuple[str | None, Start, list[str]]:
    """What there is at `url`, and what has to be said of it."""
    from ..errors import ConfigError
    from ..hooks import Calls, host, open_storage
    from ..records.holds import pins
    from ..types import CheckpointRef
    from . import look
    from .output import count
    from .simulate import Start

    if url is None:
        return None, Start(step=from_step or 0, now_s=now_s), []
    notes = []
    with open_storage(url) as storage:
        catalog = look.catalog_of(storage)
        infos, damaged = catalog.checkpoints()
        quarantined = look.in_quarantine(storage)
        held = {CheckpointRef(one.generation, one.step) for one in pins(storage)}
    try:
        held |= Calls(host()).pins(infos).keys()
    except ConfigError as error:
        notes.append(str(error))
    lineage = [info for info in infos if info.on_lineage]
    step = from_step if from_step is not None else max((info.step for info in lineage), default=0)
    on = [info for info in lineage if info.step <= step]
    off = len(infos) - len(on)
    if off:
        notes.append(f"{count(off, 'checkpoint')} off the lineage besides, which policies do not look at")
    notes += [
        f"step {info.step} is in quarantine, and does not count as one to keep: {quarantined[info.ref]}"
        for info in on
        if info.ref in quarantined
    ]
    if damaged:
        notes.append(f"{count(len(damaged), 'commit record')} cannot be read, and are left out")
    size_bytes = next((info.size_bytes for info in reversed(lineage) if info.size_bytes), None)
    return storage.url, Start(on, step, now_s, held, size_bytes, quarantined), notes


def _notes(save: SavePolicy, keep: KeepPolicy, outcome: Outcome) -> list[str]:
    """What the simulation could not know."""
    from .output import count

    notes = []
    if save.signals:
        notes.append(f"signals are not simulated: {', '.join(sorted(save.signals))}")
    if outcome.metrics:
        notes.append(
            f"metrics are not simulated: {keep!r} looks at {', '.join(sorted(outcome.metrics))}, which is not known of "
            "checkpoints that are yet to be; they count as without it"
        )
    if "keep_healthy(" in repr(keep):
        notes.append("health is not simulated: checkpoints that are yet to be count as healthy")
    if outcome.refused:
        notes.append(
            f"after {count(outcome.refused, 'save')} the keep policy has no reason for any checkpoint, and then none "
            "is deleted"
        )
    if outcome.stopped_at is not None:
        notes.append(f"stopped after step {outcome.stopped_at}: more is too much to look at; plan fewer steps")
    return notes


def _json(outcome: Outcome, start: Start, step_seconds: float | None) -> dict[str, Any]:
    from ..records.keys import stem

    return {
        "saves": [
            {
                "step": one.step,
                "after_s": None if step_seconds is None else (one.step - start.step) * step_seconds,
                "reason": one.reason,
                "deletes": list(map(stem, one.deletes)),
                "there": one.there,
            }
            for one in outcome.saves
        ],
        "end": [_end(info, start) for info in outcome.end],
        "most": outcome.most,
        "checkpoint_bytes": start.size_bytes,
        "most_bytes": None if start.size_bytes is None else outcome.most * start.size_bytes,
        "stopped_at": outcome.stopped_at,
    }


def _end(info: CheckpointInfo, start: Start) -> dict[str, Any]:
    from .look import named

    return {**named(info.ref), "simulated": _is_simulated(info.ref, start)}


def _is_simulated(ref: CheckpointRef, start: Start) -> bool:
    return ref.generation == start.generation


def _page(page: dict[str, Any]) -> list[Table | str]:
    from .output import clean, count, size

    timed = page["step_seconds"] is not None
    shown = Table("step", *(["after"] if timed else []), "saved because", "then goes", "there")
    for one in page["saves"]:
        shown.add_row(
            str(one["step"]),
            *([_duration(one["after_s"])] if timed else []),
            clean(one["reason"]),
            _some([str(int(name.partition("-")[0])) for name in one["deletes"]]) or "-",
            str(one["there"]),
        )
    end = _some([str(one["step"]) for one in page["end"]])
    most = "" if page["most_bytes"] is None else f", {size(page['most_bytes'])} by the newest checkpoint's size"
    steps = f"steps {page['from_step'] + 1} to {page['stopped_at'] or page['to_step']}"
    there = f"{count(len(page['end']), 'checkpoint')}{': ' if end else ''}{end}"
    return [
        shown,
        "",
        f"{steps}: {count(len(page['saves']), 'save')}; at the end {there}",
        f"at most {page['most']} at once{most}",
        *(clean(f"note: {note}") for note in page["notes"]),
    ]


def _some(steps: list[str]) -> str:
    if len(steps) <= _SHOWN:
        return ", ".join(steps)
    return f"{', '.join(steps[: _SHOWN // 2])}, … ({len(steps) - _SHOWN} more), {', '.join(steps[-_SHOWN // 2 :])}"


def _duration(seconds: float) -> str:
    """5025 -> "1:23:45"."""
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    days, hours = divmod(hours, 24)
    return (f"{days} d " if days else "") + f"{hours}:{minutes:02d}:{rest:02d}"
