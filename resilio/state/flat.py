"""The flat dict: the only currency between `resilio.state` and `resilio.engine`.

State is nested (`{"model": {"wte.weight": …}, "optimizer": {"state": {…}, "param_groups": […]}, "step": 7}`); storage
wants names with bytes. A `FlatState` holds both views: tensors and values by flat key (path parts joined by dots), and
the tree whose leaves say which flat key stands there. Restore goes the other way: a `SavedState` says what a checkpoint
holds, without its data; a plan made from it and the live objects says what to read, and applies it.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal

import torch

from ..errors import ResilioError

__all__ = ["FlatState", "Kind", "Outcome", "Ref", "SavedState", "TensorSpec", "Unread", "rank_prefix"]

Path = tuple[str | int, ...]
Kind = Literal["parameter", "buffer", "optimizer", "other"]


def rank_prefix(rank: int) -> str:
    """Prefix of the flat keys that belong to one rank alone."""
    return f"rank.{rank}."


@dataclass(frozen=True)
class Ref:
    """A leaf of a tree: the tensor or value that has this flat key."""

    key: str


@dataclass
class FlatState:
    """Captured training state of one rank: references, no copies.

    Attributes:
        tensors: flat key -> live tensor. A `DTensor` is this rank's view of a sharded or replicated tensor; a plain
            tensor under a shared key is the same on every rank, under a `rank.<r>.` key it is this rank's own.
        values: flat key -> Python value without tensors, of the types `resilio.records.values` can encode. Already
            copied: later changes of the live object do not reach it.
        kinds: flat key of each tensor -> what it is; staging and replica checks depend on it.
        paths: flat key -> path in the nested state, as plain DCP users see it.
        ties: flat key -> the flat key of the same tensor that is saved instead (tied weights). Not in `tensors`; in
            `paths`.
        tree: nested dicts, lists and tuples with `Ref` leaves: the state all ranks share.
        local_tree: the same for this rank's own state, below `rank.<r>`.
        form: that of another capture if nothing but content differs: what tensors and values hold.
    """

    tensors: dict[str, torch.Tensor] = field(default_factory=dict)
    values: dict[str, Any] = field(default_factory=dict)
    kinds: dict[str, Kind] = field(default_factory=dict)
    paths: dict[str, Path] = field(default_factory=dict)
    ties: dict[str, str] = field(default_factory=dict)
    tree: Any = field(default_factory=dict)
    local_tree: Any = field(default_factory=dict)
    form: object = field(default_factory=object, compare=False, repr=False)


@dataclass(frozen=True)
class TensorSpec:
    """A saved tensor without its data.

    Attributes:
        dtype: torch dtype.
        shape: of the whole logical tensor.
        order: dims from slowest to fastest in memory where not row-major, else None.
    """

    dtype: torch.dtype
    shape: tuple[int, ...]
    order: tuple[int, ...] | None = None


@dataclass(frozen=True)
class Unread:
    """Stands for a saved value that cannot be made here; that is an error only for who wants it."""

    error: ResilioError


@dataclass
class SavedState:
    """What a checkpoint holds, without tensor data: merged from its manifest, the same on every rank.

    Attributes:
        step: optimizer steps completed.
        world: number of ranks that saved it.
        tensors: flat key -> spec, of all ranks (`rank.<r>.` keys included); tied keys are left out.
        values: flat key -> decoded value, or `Unread`.
        ties: flat key -> flat key that holds the bytes.
        tree: nested state with `Ref` leaves; each saving rank's own state stands under `tree["rank"]["<r>"]`.
    """

    step: int
    world: int
    tensors: dict[str, TensorSpec]
    values: dict[str, Any]
    ties: dict[str, str]
    tree: Any


@dataclass(frozen=True)
class Outcome:
    """How one component came back.

    Attributes:
        component: top-level name: ``model``, ``optimizer``, ``rng``, …
        how: ``exact`` as saved; ``re-derived`` for another world; ``stayed live`` not in the checkpoint or not asked
            for.
        note: what a person should know, or empty.
    """

    component: str
    how: Literal["exact", "re-derived", "stayed live"]
    note: str = ""
