"""Whether ranks that hold copies of a tensor hold the same values, before one of the copies is saved for all."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence

from torch.distributed.tensor import DTensor

from ..errors import RanksDisagreeError
from ..records.fingerprints import Lanes
from ..state.flat import FlatState, rank_prefix
from ..state.flat_shard import FlatShard
from .checking import Own, own_pieces

__all__ = ["Copies", "own_copies", "refuse_differing"]

Copies = dict[str, list[Own]]  # flat key -> what this rank has of it


def own_copies(flat: FlatState, rank: int) -> Copies:
    """Fingerprints of what other ranks may hold as well. Local; reads all of it.

    Left out are tensors of which each rank has its own part, those of one rank alone, and plain buffers: under DDP
    these may differ, and a difference is warned of anyway.
    """
    found: Copies = {}
    for key, tensor in flat.tensors.items():
        if isinstance(tensor, DTensor):
            copied = any(
                placement.is_replicate() and tensor.device_mesh.size(dim) > 1
                for dim, placement in enumerate(tensor.placements)
            )
        else:  # of FSDP1 nobody can tell
            copied = isinstance(tensor, FlatShard) or flat.kinds.get(key) != "buffer"
        if copied and not key.startswith(rank_prefix(rank)):
            found[key] = own_pieces(key, tensor)
    return found


def refuse_differing(told: Sequence[Copies], step: int) -> None:
    """Pass if copies of the same piece are the same on all ranks that have one.

    Args:
        told: what `own_copies` found, by rank.
        step: that is to be saved.

    Raises:
        RanksDisagreeError: names the first tensor that is not, and the ranks that hold others than most.
    """
    for key in sorted({key for copies in told for key in copies}):
        holders: dict[tuple[int, ...], dict[Lanes, list[int]]] = defaultdict(lambda: defaultdict(list))
        for rank, copies in enumerate(told):
            for offsets, _, lanes in copies.get(key, ()):
                holders[offsets][lanes].append(rank)
        for groups in holders.values():
            if len(groups) > 1:
                most, *others = sorted(groups.values(), key=lambda ranks: (-len(ranks), ranks))
                odd = sorted(rank for ranks in others for rank in ranks)
                raise RanksDisagreeError(
                    f"{key!r} on rank(s) {', '.join(map(str, odd))} differs from that on rank(s) "
                    f"{', '.join(map(str, most))} at step {step}: the replicas have drifted apart, and one of them "
                    "would be saved for all. Nothing was written. Go on from a checkpoint before it, and look for what "
                    "only some ranks do: a step that was skipped, a seed, a collective, faulty memory.",
                    key=key,
                    rank=odd[0],
                    ranks=odd,
                    step=step,
                )
