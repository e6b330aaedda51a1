"""How large everything is."""

from __future__ import annotations

import os
from dataclasses import dataclass

from .state import LAYERS

__all__ = ["Options"]


@dataclass(frozen=True)
class Options:
    """Sizes of a run.

    Attributes:
        mb: of parameters and moments, 10^6 bytes; 1490 is GPT-2 124M.
        layers: blocks of the model.
        rounds: measured ones, after one that warms up.
        sim_ranks: ranks that planning and the manifest are simulated for.
        sim_tensors: tensors of theirs, each with a row on each rank.
        saves: over which resident memory is watched.
        checkpoints: that `resilio ls` lists.
        loop_steps: that the loop's overhead is measured over.
        threads: of torch, but for worlds of several ranks, which have one each.
        device: of the state whose asynchronous saves are measured; all else is on the CPU.
    """

    mb: float = 400
    layers: int = LAYERS
    rounds: int = 5
    sim_ranks: int = 1024
    sim_tensors: int = 1000
    saves: int = 50
    checkpoints: int = 1000
    loop_steps: int = 1000
    threads: int = os.cpu_count() or 1
    device: str = "cpu"

    @property
    def step_s(self) -> float:
        """How long a step of the training loop should be."""
        return min(0.4, self.mb / 1000)
