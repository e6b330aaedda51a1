"""Signals that ask for a save and a stop: noticed at once, acted upon at the next step, by all ranks together."""

from __future__ import annotations

import os
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
    save) or ignores the signal. Python's own for SIGINT is called from the second SIGINT on: one Ctrl-C asks, two
    insist. `close` puts back what was there before. A fork of the process is ended by them as if nobody listened.

    Args:
        names: such as ``SIGTERM``.

    Raises:
        ConfigError: not in the main thread, where alone Python handles signals.
    """

    def __init__(self, names: Iterable[str]) -> None:
        self._names = tuple(sorted(names))
        self._seen: set[str] = set()
        self._asked: set[str] = set()  # ever
        self._before: dict[int, Any] = {}
        self._closed = False
        self._pid = os.getpid()
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

    def give_back(self, names: frozenset[str]) -> None:
        """Note signals once more that were taken in vain."""
        self._seen |= names

    def close(self) -> None:
        """Put back the handlers that were there before. Idempotent; in another thread than the main one, too late."""
        if threading.current_thread() is not threading.main_thread():
            return
        self._closed = True
        for number in self._before:
            # A handler that was installed since is somebody's who is still there, and may well call ours.
            if signal.getsignal(number) == self._note:
                handler = self._beneath(number)
                # None: it was not installed from Python, and cannot be put back from it.
                signal.signal(number, signal.SIG_DFL if handler is None else handler)

    def _beneath(self, number: int) -> Any:
        """What was there before; not the handler of flags that were closed while ours stood above it."""
        handler = self._before[number]
        other = getattr(handler, "__self__", None)
        return other._beneath(number) if isinstance(other, SignalFlags) and other._closed else handler

    def _note(self, number: int, frame: FrameType | None) -> None:
        if os.getpid() != self._pid:
            # A fork of the job, such as a worker that loads data: nobody reads its flags, and who ends it waits for it.
            handler = self._beneath(number)
            signal.signal(number, signal.SIG_DFL if handler is None else handler)
            os.kill(os.getpid(), number)
            return
        name = signal.Signals(number).name
        before = self._before[number]
        insists = name in self._asked or self._closed
        self._seen.add(name)
        self._asked.add(name)
        if callable(before) and (before is not signal.default_int_handler or insists):
            before(number, frame)
