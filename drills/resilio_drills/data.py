"""The text and its order: Python's own standard library, and a sampler whose place can be saved.

Every machine that trains this model has the text already: the source files of the Python that runs it. Sample `i` is
the window of `block_size + 1` bytes at `i * block_size`: inputs are all but its last byte, targets all but its first.

Which samples step N trains on is a function of the seed and of N alone. The ranks of a job share out each *global
batch*; the number of ranks only decides who takes which part. So a job can go on at another number of ranks and no
sample is lost and none is seen twice, and all that a checkpoint needs of the data is one number: the position.
"""

from __future__ import annotations

import functools
import os
import sysconfig
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

__all__ = ["GlobalSampler", "MicroBatch", "corpus", "share_of", "windows"]

# Tests and other people's packages are not the library; the tables of encodings are no text to learn from.
_SKIPPED = {"__pycache__", "dist-packages", "encodings", "ensurepip", "idlelib", "lib2to3", "pydoc_data"}
_SKIPPED |= {"site-packages", "test", "tests", "turtledemo"}


@functools.cache
def corpus(max_bytes: int = 2_000_000) -> Tensor:
    """The standard library's source text: uint8, (at most `max_bytes`,). Files in the order of their paths.

    The same Python release gives the same bytes; another one may not.
    """
    root = Path(sysconfig.get_path("stdlib"))
    text = bytearray()
    for path in _sources(root):
        text += path.read_bytes()
        if len(text) >= max_bytes:
            break
    if not text:
        raise FileNotFoundError(
            f"no source files below {root}: this Python has its library packed; run a usual CPython"
        )
    return torch.frombuffer(text, dtype=torch.uint8)[:max_bytes].clone()


def _sources(root: Path) -> list[Path]:
    found: list[Path] = []
    for folder, folders, names in os.walk(root):
        folders[:] = [name for name in folders if name not in _SKIPPED]
        # _sysconfigdata_….py says how this very Python was built: it differs between machines.
        found += (Path(folder, n) for n in names if n.endswith(".py") and not n.startswith("_sysconfigdata"))
    return sorted(found)


def windows(text: Tensor, block_size: int) -> Tensor:
    """All samples as a view of `text`, (n_samples, block_size + 1): neighbours share one byte, nothing is copied."""
    if len(text) <= block_size:
        raise ValueError(
            f"{len(text)} bytes of text hold no sample of {block_size} + 1 bytes: use a smaller --block-size"
        )
    return text.unfold(0, block_size + 1, block_size)


# ---------------------------------------------------------------------------------------------------------------------


class GlobalSampler:
    """An endless shuffled order of sample ids, the same on every rank, with a position that belongs to the whole job.

    Each epoch is a permutation that only the seed and the epoch decide. So there is nothing to replay on resume, and
    nothing that depends on the number of ranks.

    Args:
        n_samples: ids go from 0 to `n_samples - 1`.
        seed: decides the order; at least 0.
    """

    def __init__(self, n_samples: int, seed: int = 0) -> None:
        if n_samples < 1:
            raise ValueError("a sampler needs at least one sample")
        self.n_samples = n_samples
        self.seed = seed
        self.position = 0  # samples handed out since the first step, by all ranks together

    @property
    def epoch(self) -> int:
        """Epochs completed."""
        return self.position // self.n_samples

    def sample_at(self, position: int) -> int:
        """The id at a global position, counted from the first step on."""
        epoch, place = divmod(position, self.n_samples)
        return int(_permutation(self.n_samples, self.seed, epoch)[place])

    def next_batch(self, size: int) -> list[int]:
        """The next `size` ids: the global batch of one step. Moves the position."""
        ids = [self.sample_at(self.position + i) for i in range(size)]
        self.position += size
        return ids

    def state_dict(self) -> dict[str, int]:
        """Plain values, equal on all ranks."""
        return {"position": self.position, "seed": self.seed, "n_samples": self.n_samples}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from a saved position, in the saved order.

        Raises:
            ValueError: the data has another number of samples than then, so a position means something else.
        """
        if state["n_samples"] != self.n_samples:
            raise ValueError(
                f"saved over {state['n_samples']} samples, but there are {self.n_samples} now: "
                "give the same --block-size and --corpus-bytes as before"
            )
        self.position, self.seed = state["position"], state["seed"]


@functools.lru_cache(maxsize=2)  # a batch may lie across two epochs
def _permutation(n_samples: int, seed: int, epoch: int) -> np.ndarray[Any, np.dtype[Any]]:
    # RandomState, not default_rng nor torch.randperm: NumPy promises that its stream never changes (NEP 19), and an
    # order that changes with an update would lose samples and repeat others.
    return np.random.RandomState([seed, epoch]).permutation(n_samples)


class MicroBatch(NamedTuple):
    """What one rank trains on in one forward and backward pass.

    Attributes:
        ids: sample ids; the last ones may be padding, so that all passes of all ranks have one shape (a compiled model
            is not compiled again, and FSDP's ranks run in step).
        n_real: how many of them count. Padding has weight 0.
    """

    ids: list[int]
    n_real: int


def share_of(batch: list[int], rank: int, world: int, micro_batch: int) -> list[MicroBatch]:
    """This rank's part of a global batch, cut into passes of at most `micro_batch` samples, equally many on each rank.

    Every id lands on exactly one rank in exactly one pass. 12 samples at `micro_batch=6`: 1 rank takes 2 passes of 6, 2
    ranks 1 pass of 6, 3 ranks 1 of 4, 4 ranks 1 of 3; 5 ranks 1 of 3, where the fifth has only padding.
    """
    per_rank = -(-len(batch) // world)
    n_passes = -(-per_rank // micro_batch)
    size = -(-per_rank // n_passes)
    passes = []
    for i in range(n_passes):
        start = (i * world + rank) * size
        real = batch[start : start + size]
        passes.append(MicroBatch(real + batch[:1] * (size - len(real)), len(real)))
    return passes
