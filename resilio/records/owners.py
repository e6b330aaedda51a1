"""Who made a generation, in words: what a manager is told that was fenced by it."""

from __future__ import annotations

from datetime import datetime, timezone
from typing import Any

from ..errors import ResilioError
from ..storage.base import Storage
from .catalog import read_generation

__all__ = ["owner_of"]


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


def _utc(time_s: float) -> str:
    try:
        return datetime.fromtimestamp(time_s, timezone.utc).strftime("%Y-%m-%d %H:%M:%S UTC")
    except (ValueError, OverflowError, OSError):  # a number from outside
        return f"{time_s} s"
