"""Whether training goes on when a save fails."""

from __future__ import annotations

import logging

from ..errors import ConfigError, FencedError, RanksLostError, ResilioError, SaveError

__all__ = ["Tolerance"]

_log = logging.getLogger("resilio")


class Tolerance:
    """Counts saves that failed in a row, the same on all ranks, since they raise the same errors.

    Only what may pass is ever tolerated: a full disk, a store that does not answer, a rank that was late. Being fenced,
    a wrong argument or state that cannot be saved will not get better by training on.

    Args:
        on_save_error: ``raise``, or ``warn`` to log the failure and train on.
        limit: how many in a row are only warned of.

    Raises:
        ConfigError: it cannot be either.
    """

    def __init__(self, on_save_error: str = "raise", limit: int = 3) -> None:
        if on_save_error not in ("raise", "warn"):
            raise ConfigError(f"on_save_error={on_save_error!r}: there are 'raise' and 'warn'")
        if isinstance(limit, bool) or not isinstance(limit, int) or limit < 1:
            raise ConfigError(
                f"save_errors_max={limit!r}: give how many failed saves in a row to go on after, 1 or more"
            )
        self._warn = on_save_error == "warn"
        self._limit = limit
        self._in_a_row = 0

    def failed(self, error: ResilioError, *, final: bool = False) -> None:
        """Note that a save failed, and raise `error` unless training may go on.

        Args:
            error: why.
            final: nothing comes after that could save what this one did not.
        """
        self._in_a_row += 1
        passing = isinstance(error, (SaveError, RanksLostError)) and not isinstance(error, FencedError)
        if not self._warn or final or not passing or self._in_a_row > self._limit:
            raise error
        _log.error("a save failed, going on in_a_row=%d of=%d error=%s", self._in_a_row, self._limit, error)

    def succeeded(self) -> None:
        """Note that a save was committed."""
        self._in_a_row = 0
