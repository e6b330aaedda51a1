"""Keep the first checkpoints of a run: ``keep_first(2)``."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from resilio.errors import ConfigError
from resilio.policies import KeepPolicy
from resilio.types import CheckpointInfo, CheckpointRef


@dataclass(frozen=True, repr=False)
class KeepFirst(KeepPolicy):
    """Gives the oldest `n` of the lineage a reason to live."""

    n: int

    def __post_init__(self) -> None:
        if not isinstance(self.n, int) or self.n < 1:
            raise ConfigError(f"keep_first(n) takes a whole number of at least 1, not {self.n!r}")

    def reasons(self, checkpoints: Sequence[CheckpointInfo], now_s: float) -> dict[CheckpointRef, str]:
        """See `KeepPolicy.reasons`."""
        return {info.ref: f"one of the first {self.n}" for info in checkpoints[: self.n]}

    def __repr__(self) -> str:
        return f"keep_first({self.n})"  # what is printed can be read again
