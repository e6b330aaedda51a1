"""Signals that ask for a save and a stop: noticed at once, acted upon at the next step, by all ranks together."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterable
from types import FrameType
from typing import Any

from ..errors import ConfigError

__all__ = ["SignalFlags"]


class SignalFlags:
    """Notes which of these signals this process has received. The handler does nothing else: no I/O, no collective.

    A handler that was there before is called too, unless it is the default (which would end the process before the
    save) or ignores the signal. `close` puts the handlers back.

    Args:
        names: such as ``SIGTERM``.

    Raises:
        ConfigError: not in the main thread, where alone Python handles signals.
    """

    def __init__(self, names: Iterable[str]) -> None:
        self._names = tuple(sorted(names))
        self._seen: set[str] = set()
        self._before: dict[int, Any] = {}
        if self._names and threading.current_thread() is not threading.main_thread():
            raise ConfigError(
                f"save_on_signal({', '.join(map(repr, self._names))}): make the CheckpointManager in the main thread, "
                "where Python handles signals"
            )
        for name in self._names:
            number = signal.Signals[name]
            self._before[number] = signal.signal(number, self._note)

    @property
    def names(self) -> tuple[str, ...]:
        """What is watched for, sorted."""
        return self._names

    def take(self) -> frozenset[str]:
        """The signals received since the last call."""
        seen, self._seen = self._seen, set()
        return frozenset(seen)

    def close(self) -> None:
        """Put back the handlers that were there before. Idempotent; in another thread than the main one, too late."""
        if threading.current_thread() is not threading.main_thread():
            return
        for number, handler in self._before.items():
            # None: it was not installed from Python, and cannot be put back from it.
            signal.signal(number, signal.SIG_DFL if handler is None else handler)
        self._before = {}

    def _note(self, number: int, frame: FrameType | None) -> None:
        self._seen.add(signal.Signals(number).name)
        before = self._before.get(number)
        if callable(before):
            before(number, frame)
