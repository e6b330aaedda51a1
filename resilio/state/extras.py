"""What else belongs to a job's state, and how it relates to ranks."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

__all__ = ["PerRank", "Replicated", "Resize", "per_rank", "replicated"]

Resize = Callable[[list[Any], int, int], Any]
"""`(states of all saved ranks in order, this rank, ranks now) -> state for this rank`."""


@dataclass(frozen=True)
class Replicated:
    """Holds something that is equal on all ranks."""

    value: Any


@dataclass(frozen=True)
class PerRank:
    """Holds something that differs between ranks, and what becomes of it at another number of ranks."""

    value: Any
    on_resize: Literal["refuse"] | Resize = "refuse"


def replicated(value: Any) -> Replicated:
    """Declare that `value` is equal on all ranks: saved once, and restored on every rank at any number of ranks.

    This is what an extra is taken for by default.
    """
    return Replicated(value)


def per_rank(value: Any, on_resize: Literal["refuse"] | Resize = "refuse") -> PerRank:
    """Declare that each rank has a `value` of its own: saved by each, restored to the rank it came from.

    Args:
        value: as for any extra.
        on_resize: at another number of ranks: ``"refuse"``, or a function of the states of all saved ranks, this rank
            and the number of ranks now, that returns the state for this rank.
    """
    return PerRank(value, on_resize)
