"""Small immutable values that several rooms share."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal

__all__ = ["CheckpointInfo", "CheckpointRef", "Damage", "Mode", "Scalar", "Stage"]

Mode = Literal["sync", "async"]
Stage = Literal["overlap", "block"]

Scalar = str | int | float | bool | None  # the plain values of JSON


@dataclass(frozen=True, order=True)
class CheckpointRef:
    """Which checkpoint: the pair that names its commit record. Orders by generation, then step."""

    generation: int
    step: int

    def __str__(self) -> str:
        return f"step {self.step} (generation {self.generation})"


@dataclass(frozen=True)
class CheckpointInfo:
    """What is known of a checkpoint without reading its data: for policies, `ls` and reports.

    Attributes:
        ref: step and generation.
        attempt: name of its folder in the store.
        time_s: when it was committed, Unix seconds by rank 0's clock. For people and time policies, never for an order.
        world: number of ranks that saved it.
        metrics: rank 0's metrics at the save.
        reasons: why it was saved, as the save policy said it.
        on_lineage: False if a newer branch left it behind: never chosen by itself.
        size_bytes: total, where known.
        about: what plugins said of the save when it began: plugin -> name -> value.
        non_finite: how many values make it unhealthy: NaN in any tensor, infinities in parameters that an optimizer
            trains and in optimizer state; None where they were not counted.
    """

    ref: CheckpointRef
    attempt: str
    time_s: float
    world: int
    metrics: dict[str, float] = field(default_factory=dict)
    reasons: tuple[str, ...] = ()
    on_lineage: bool = True
    size_bytes: int | None = None
    about: dict[str, dict[str, Scalar]] = field(default_factory=dict)
    non_finite: int | None = None

    @property
    def healthy(self) -> bool | None:
        """Whether training can go on from its values; None where that is not known."""
        return None if self.non_finite is None else self.non_finite == 0

    @property
    def step(self) -> int:
        """Optimizer steps completed."""
        return self.ref.step

    def __repr__(self) -> str:
        size = [] if self.size_bytes is None else [f"{self.size_bytes:,} bytes"]
        off = [] if self.on_lineage else ["off the lineage"]
        bad = [f"not healthy: {self.non_finite:,} values not finite"] if self.non_finite else []
        metrics = [f"{name!r}: {value:.6g}" for name, value in self.metrics.items()]
        return f"<CheckpointInfo {', '.join([str(self.ref), f'{self.world} rank(s)', *size, *off, *bad, *metrics])}>"


@dataclass(frozen=True)
class Damage:
    """One finding of a verification: which object or tensor, and what is wrong with it."""

    where: str
    what: str
    facts: dict[str, Any] = field(default_factory=dict)

    def __str__(self) -> str:
        return f"{self.where}: {self.what}"
