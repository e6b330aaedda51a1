"""How far a restore has read: counted always, drawn on a terminal if it takes long."""

from __future__ import annotations

import sys
import threading
import time
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rich.progress import Progress, TaskID

__all__ = ["AFTER_S", "ReadProgress"]

AFTER_S = 1.0  # a read that is over by then needs no bar


class ReadProgress:
    """Counts the bytes of a restore, from any thread; a context manager that takes its bar away again.

    Args:
        title: what is being read.
        total_bytes: of this rank.
        shown: whether there may be a bar on stderr; None: if that is a terminal.

    Attributes:
        done_bytes: read so far.
    """

    def __init__(self, title: str, total_bytes: int, shown: bool | None) -> None:
        self.done_bytes = 0
        self._title, self._total_bytes = title, total_bytes
        self._shown = sys.stderr.isatty() if shown is None and sys.stderr is not None else bool(shown)
        self._began_s = time.monotonic()
        self._lock = threading.Lock()
        self._bar: Progress | None = None
        self._task: TaskID | None = None

    def __call__(self, size_bytes: int) -> None:
        """So many more bytes are in place."""
        with self._lock:
            self.done_bytes += size_bytes
            if self._shown and self._bar is None and time.monotonic() - self._began_s >= AFTER_S:
                self._bar, self._task = _start(self._title, self._total_bytes)
            if self._bar is not None and self._task is not None:
                self._bar.update(self._task, completed=min(self.done_bytes, self._total_bytes))

    def __enter__(self) -> ReadProgress:
        return self

    def __exit__(self, *exc: Any) -> None:
        with self._lock:
            if self._bar is not None:
                self._bar.stop()
            self._shown, self._bar = False, None


def _start(title: str, total_bytes: int) -> tuple[Progress, TaskID]:
    # Not before it is needed: most jobs never draw a bar.
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn, TransferSpeedColumn

    screen = Console(file=sys.stderr, force_terminal=True, markup=False, emoji=False, highlight=False)
    columns = (BarColumn(), DownloadColumn(binary_units=True), TransferSpeedColumn(), TimeRemainingColumn())
    bar = Progress(
        TextColumn(title, markup=False),
        *columns,
        console=screen,
        transient=True,
        redirect_stdout=False,  # the streams belong to the training
        redirect_stderr=False,
    )
    task = bar.add_task(title, total=total_bytes)
    bar.start()
    return bar, task
