"""Room for one more checkpoint: how much it may take at most, and a refusal before anything is written."""

from __future__ import annotations

import errno
import math
import os
import pickle
from pathlib import Path

import msgspec
from torch.distributed.checkpoint.planner import WriteItemType
from torch.serialization import DEFAULT_PROTOCOL

from ..engine.plan import LocalPlan
from ..engine.structure import Structure
from ..errors import SaveError
from ..records.digests import BLOCK_SIZE, DIGEST_SIZE
from ..records.manifest import ITEMSIZE
from ..state.flat import FlatState, rank_prefix
from ..storage.files import nearest

__all__ = ["fixed_bytes", "refuse_without_room", "unwritable", "value_bytes", "worst_case_bytes"]

# Measured on states of a thousand tiny tensors and values with long names, and rounded up. Of each item: the zip of
# `torch.save` 1600 bytes, its line in the manifest 330, in `.metadata` 300.
_ITEM = 2560
_NAME = 6  # how often an item's name is written, at most
_RANK = 16 * 1024  # what a filesystem rounds a rank's files up by, and its line in the root manifest
_ROOT = 64 * 1024  # the same for the run's records and folders, of rank 0


def worst_case_bytes(flat: FlatState, local: LocalPlan, rank: int) -> int:
    """The most that a save may add to storage: of this rank, so that the sum over ranks bounds the whole attempt.

    What all ranks share is on every rank, in parts or whole, and is written once: rank 0 counts it at its full size,
    so nothing need be known of who will write which part.

    Args:
        flat: this rank's captured state.
        local: what it plans to write of it.
        rank: this process.
    """
    return fixed_bytes(local.structure, rank) + value_bytes(flat, local)


def fixed_bytes(structure: Structure, rank: int) -> int:
    """The share of it that is the same for all states of one structure."""
    own = rank_prefix(rank)
    total = _RANK + (_ROOT if rank == 0 else 0)
    for key, (dtype, shape, _) in structure.specs.items():
        if rank == 0 or key.startswith(own):
            total += math.prod(shape) * ITEMSIZE[dtype]
    total += -(-total // BLOCK_SIZE) * DIGEST_SIZE
    for item in structure.items:
        if not (rank == 0 or item.type == WriteItemType.SHARD or item.index.fqn.startswith(own)):
            continue  # rank 0 has it as well
        dims = len(item.tensor_data.size) if item.tensor_data else 0
        total += _ITEM + _NAME * len(item.index.fqn.encode()) + 64 * dims
    return total + len(msgspec.json.encode(structure.tree))


def value_bytes(flat: FlatState, local: LocalPlan) -> int:
    """The share of values: of them in the manifest, and as plain DCP pickles them."""
    return sum(
        len(msgspec.json.encode(value)) + len(pickle.dumps(flat.values[key], protocol=DEFAULT_PROTOCOL))
        for key, value in local.values.items()
    )


def refuse_without_room(url: str, step: int, needed_bytes: int, free_bytes: int | None) -> None:
    """Pass if there is room, or if the store does not tell.

    Args:
        url: of the run.
        step: to be saved.
        needed_bytes: of all ranks.
        free_bytes: as the store tells it.

    Raises:
        SaveError: there is not; the numbers are attributes.
    """
    if free_bytes is None or needed_bytes <= free_bytes:
        return
    raise SaveError(
        f"{url}: no room to save step {step}: it needs up to {needed_bytes:,} bytes, and {free_bytes:,} are free. Free "
        "space or keep fewer checkpoints (a smaller keep=...; `resilio ls` shows what is there). Nothing was written, "
        "and the next save looks again.",
        cause="OutOfSpaceError",
        errno=errno.ENOSPC,
        step=step,
        needed_bytes=needed_bytes,
        free_bytes=free_bytes,
    )


def unwritable(folder: str) -> str | None:
    """Why nothing can be saved below `folder`, as far as that can be told without writing; None if it looks well."""
    place = Path(folder)
    try:
        place = nearest(place)
        if os.statvfs(place).f_flag & os.ST_RDONLY:
            return f"the filesystem of {place} is mounted read-only"
        if not os.access(place, os.W_OK | os.X_OK):
            return f"no permission to write to {place}"
    except OSError as error:
        return f"{place}: {error.strerror}"
    return None
