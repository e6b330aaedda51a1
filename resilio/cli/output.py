"""How the command speaks: tables for people, JSON for programs, and what it does when nobody listens any more.

Names and texts in a store are data from outside: control characters are shown as escapes, never sent to the terminal.
"""

from __future__ import annotations

import json
import math
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import datetime, timezone
from typing import TYPE_CHECKING, Any

from ..records.texts import clean
from .tables import Table

if TYPE_CHECKING:
    from rich.console import Console

__all__ = ["ago", "clean", "console", "count", "emit", "emit_json", "emit_page", "iso", "progress_bar", "size"]


def emit(text: str) -> None:
    """Write to stdout. A reader that went away (`| head`) has enough: what else is to be said goes nowhere, quietly."""
    try:
        sys.stdout.write(text)
        sys.stdout.flush()
    except BrokenPipeError:
        # The descriptor itself, or Python's own flush at exit would complain.
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, sys.stdout.fileno())
        os.close(nowhere)


def emit_json(value: Any) -> None:
    """Write `value` as one JSON document; nan and infinities as the strings "nan", "inf", "-inf"."""
    emit(json.dumps(_finite(value), indent=2, sort_keys=True, allow_nan=False) + "\n")


def emit_page(*parts: Table | str) -> None:
    """Write tables and lines to stdout; in colour if that is a terminal, and nobody set NO_COLOR."""
    styled = sys.stdout.isatty() and not os.environ.get("NO_COLOR") and os.environ.get("TERM", "dumb") != "dumb"
    lines: list[str] = []
    for part in parts:
        lines += part.lines(styled=styled) if isinstance(part, Table) else [part]
    emit("".join(f"{line}\n" for line in lines))


def console() -> Console:
    """A console on stderr that takes texts as they are: no markup, no emoji, no guessing at highlights."""
    from rich.console import Console

    return Console(file=sys.stderr, markup=False, emoji=False, highlight=False)


@contextmanager
def progress_bar(title: str, *, in_bytes: bool = True) -> Iterator[Callable[[int, int], None] | None]:
    """A bar on stderr, if that is a terminal, while the block runs; gives what to call with how much is done, and in
    all.
    """
    if not sys.stderr.isatty():
        yield None
        return
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn, TransferSpeedColumn

    amounts = (DownloadColumn(binary_units=True), TransferSpeedColumn()) if in_bytes else ()
    columns = (BarColumn(), *amounts, TimeRemainingColumn())
    with Progress(TextColumn(title, markup=False), *columns, console=console(), transient=True) as bar:
        task = bar.add_task(title, total=None)
        yield lambda done, total: bar.update(task, completed=done, total=total)


def count(number: int, what: str) -> str:
    """1, "checkpoint" -> "1 checkpoint"; 2 -> "2 checkpoints"."""
    return f"{number:,} {what}{'' if number == 1 else 's'}"


def size(size_bytes: int | None) -> str:
    """1536 -> "1.5 KiB"."""
    if size_bytes is None:
        return "?"
    if size_bytes < 1024:
        return f"{size_bytes} B"
    value, units = size_bytes / 1024, ["KiB", "MiB", "GiB", "TiB", "PiB", "EiB"]
    while value >= 1023.95 and len(units) > 1:
        value, _ = value / 1024, units.pop(0)
    return f"{value:.1f} {units[0]}"


def iso(time_s: float) -> str:
    """Unix seconds as UTC to the second; "?" where a record holds no time that exists."""
    try:
        return datetime.fromtimestamp(time_s, timezone.utc).strftime("%Y-%m-%dT%H:%M:%SZ")
    except (ValueError, OverflowError, OSError):
        return "?"


def ago(time_s: float, now_s: float) -> str:
    """How long before `now_s`: "20 min ago". Clocks of hosts differ, so a little in the future is "just now"."""
    passed_s = now_s - time_s
    if not math.isfinite(passed_s) or passed_s < -60:
        return "in the future"
    for unit, unit_s in (("d", 86400), ("h", 3600), ("min", 60)):
        if passed_s >= 2 * unit_s or (unit == "min" and passed_s >= unit_s):
            return f"{int(passed_s // unit_s)} {unit} ago"
    return f"{int(passed_s)} s ago" if passed_s >= 5 else "just now"


def _finite(value: Any) -> Any:
    if isinstance(value, dict):
        return {str(key): _finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(item) for item in value]
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    return value
