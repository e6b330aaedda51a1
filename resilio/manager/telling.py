"""What a manager tells its plugins, and asks them: on rank 0 alone, so that one job speaks with one voice."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from typing import Any

from ..clock import Clock
from ..errors import ConfigError
from ..events import Event, SaveFailed
from ..hooks import Calls, SaveFacts
from ..types import Scalar

__all__ = ["Held", "Teller"]


class Teller:
    """One manager's plugins.

    Args:
        calls: to their hooks.
        url: of the run.
        clock: of the time in events.
        coordinator: whether this is rank 0; on another rank nothing is told.
    """

    def __init__(self, calls: Calls, url: str, clock: Clock, coordinator: bool) -> None:
        self.calls = calls
        self._url = url
        self._clock = clock
        self._coordinator = coordinator

    def tell(self, kind: Callable[..., Event], **fields: Any) -> None:
        """Tell of an event of `kind`. Never raises."""
        if self._coordinator:
            self.calls.tell(kind(url=self._url, time_s=self._clock.wall_s(), **fields))

    def save_failed(self, step: int, reason: str, error: BaseException) -> None:
        """Tell that a save failed: by the class of what was the cause, where it came as another."""
        name = str(getattr(error, "cause", None) or type(error).__name__)
        self.tell(SaveFailed, step=step, reason=reason, error=name, message=str(error))

    def describe(
        self, step: int, world: int, metrics: Mapping[str, float], reason: str
    ) -> dict[str, dict[str, Scalar]]:
        """What plugins say of a save that begins; nothing on other ranks than 0."""
        if not self._coordinator:
            return {}
        return self.calls.describe(SaveFacts(self._url, step, world, dict(metrics), reason))

    def refuse_inside(self) -> None:
        """Refuse what a hook must not do: the other ranks would wait for this one, or it for itself.

        Raises:
            ConfigError: this thread is in a plugin's hook.
        """
        if self.calls.inside:
            raise ConfigError(
                "a plugin's hook called step, save, restore or close of its manager, which all ranks do together: set "
                "a flag, and let the training loop do it"
            )


class Held:
    """How long the training loop was held by one save: a stopwatch, read in the saving thread; a context manager."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._lock = threading.Lock()
        self._before_s = 0.0
        self._since_s: float | None = None

    def __enter__(self) -> None:
        with self._lock:
            self._since_s = self._clock.monotonic_s()

    def __exit__(self, *exc: object) -> None:
        with self._lock:
            assert self._since_s is not None
            self._before_s += self._clock.monotonic_s() - self._since_s
            self._since_s = None

    @property
    def seconds(self) -> float:
        """So far."""
        with self._lock:
            return self._before_s + (0.0 if self._since_s is None else self._clock.monotonic_s() - self._since_s)
