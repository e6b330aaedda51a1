"""Who made a generation, in words: what a manager is told that was fenced by it."""

from __future__ import annotations

from datetime import datetime, timezone
from typing import Any

from ..errors import FencedError, ResilioError
from ..storage.base import Storage
from ..types import CheckpointRef
from .catalog import read_generation

__all__ = ["owner_of", "replaced_by"]


def owner_of(storage: Storage, generation: int) -> tuple[str, dict[str, Any]]:
    """Generation, host, process and time, for people; and the same as facts of an error.

    Its number alone where its record cannot be read: nobody must stay unfenced because of that.
    """
    facts: dict[str, Any] = {"generation": generation}
    try:
        record = read_generation(storage, generation)
    except ResilioError:
        return f"generation {generation} (another manager)", facts
    facts |= {"host": record.host, "pid": record.pid, "time_s": record.time_s}
    host = "".join(char for char in record.host if char.isprintable())[:100] or "unknown"
    return f"generation {generation} (host {host}, process {record.pid}, since {_utc(record.time_s)})", facts


def replaced_by(
    who: str, facts: dict[str, Any], url: str, own: int | None, stored: bool | None, ref: CheckpointRef | None
) -> FencedError:
    """What to raise in generation `own` when `who` owns the run; `stored`, whether the checkpoint of `ref` was."""
    fate = {
        True: f"The checkpoint of {ref} was stored, not acknowledged; the other manager may delete it",
        False: "Nothing was committed",
        None: f"The checkpoint of {ref} is not acknowledged; whether it was stored is not known",
    }[stored]
    return FencedError(
        f"{url}: {who} owns the run now; this manager is generation {own}. {fate}. Stop this job if the other one is "
        "meant to run; else stop the other one and call restore() here.",
        own=own,
        stored=stored,
        **facts,
    )


def _utc(time_s: float) -> str:
    try:
        return datetime.fromtimestamp(time_s, timezone.utc).strftime("%Y-%m-%d %H:%M:%S UTC")
    except (ValueError, OverflowError, OSError):  # a number from outside
        return f"{time_s} s"
