"""The plan that all ranks made together, kept so that the next save need not make it again.

What it holds follows from names, shapes and placements alone, on all ranks. So before a save each rank says in a
meeting that the ranks have anyhow which plan it holds, if its own structure is still the one that it was made from; and
what it has of the values that must be the same everywhere. Where all say the same, each writes its share by itself.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass

from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.planner import SavePlan

from .structure import Structure

__all__ = ["AgreedPlan", "Stand", "still_holds"]

_log = logging.getLogger("resilio")


@dataclass(frozen=True)
class AgreedPlan:
    """One rank's part of it.

    Attributes:
        name: the attempt that all ranks made it for.
        structure: this rank's, from which it was made.
        share: what this rank writes.
        metadata: of all ranks' shares, without where they lie. On other ranks than 0 there is nothing in it.
    """

    name: str
    structure: Structure
    share: SavePlan
    metadata: Metadata


@dataclass(frozen=True)
class Stand:
    """What a rank says before a save.

    Attributes:
        plan: name of the agreed plan that its state still has the structure of; None: there is none.
        shared: hash of the values that must be equal on all ranks.
        buffers: hashes of the content of plain buffers, in the order of their keys.
    """

    plan: str | None
    shared: str
    buffers: tuple[str, ...]


def still_holds(stands: Sequence[Stand | None]) -> bool:
    """Whether all ranks may write by the plan they hold. The same on all ranks; not collective by itself.

    Args:
        stands: of all ranks, in order; None: a rank could not say.
    """
    first = stands[0]
    if first is None or first.plan is None:
        return False
    return all(one is not None and (one.plan, one.shared) == (first.plan, first.shared) for one in stands)


def tell_of_buffers(keys: Sequence[str], hashes: Sequence[Sequence[str]]) -> None:
    """Warn where buffers differ between ranks.

    Args:
        keys: flat keys of rank 0's buffers.
        hashes: of their content, by rank, in the order of the keys.
    """
    for rank, other in enumerate(hashes[1:], 1):
        differing = [key for key, mine, theirs in zip(keys, hashes[0], other, strict=False) if mine != theirs]
        if differing:
            _log.warning(
                "buffers differ between ranks; rank 0's are saved rank=%d count=%d first=%s",
                *(rank, len(differing), differing[0]),
            )
