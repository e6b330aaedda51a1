"""What each rank writes, decided together: the save planner.

The local plan is made on the main thread from live placements, before anything is staged; the background thread only
sends it. Replicated state is written by rank 0, and proven equal on the way: each plan carries hashes, rank 0 compares,
and no collective of our own is needed for it.
"""

from __future__ import annotations

import io
import logging
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
import xxhash
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner, WriteItem, WriteItemType
from torch.distributed.tensor import DTensor

from .. import failpoints
from ..errors import CaptureError, RanksDisagreeError, SaveError
from ..records.health import trained_keys
from ..records.manifest import ITEMSIZE
from ..records.values import canonical_bytes, encode_value
from ..state.flat import FlatState, Ref, rank_prefix
from ..state.flat_shard import FlatShard
from . import dcp

__all__ = ["FAILED", "LocalPlan", "Planner", "local_tensor"]

FAILED = "\0failed"  # a key no state can have, in what was staged: staging failed, and the value is the error

_log = logging.getLogger("resilio")


def local_tensor(tensor: torch.Tensor) -> torch.Tensor:
    """This rank's part of a sharded tensor, a plain tensor as it is; detached."""
    if isinstance(tensor, FlatShard):
        return tensor.run.detach()
    tensor = tensor.detach()
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


@dataclass(frozen=True)
class Evidence:
    """What rank 0 needs to compare ranks; travels as `planner_data`.

    Attributes:
        shared: flat key -> hash of what must be equal on all ranks: a replicated value, or kind and shape of a tensor.
        tree: hash of the shared tree.
        buffers: flat key -> hash of the content of plain buffers; a difference is worth a warning, no error.
        paths: flat key -> path, of the keys this rank alone has.
    """

    shared: dict[str, str]
    tree: str
    buffers: dict[str, str]
    paths: dict[str, tuple[str | int, ...]]


@dataclass
class LocalPlan:
    """What this rank writes, and the manifest's side of it.

    Attributes:
        items: DCP write items of this rank, before deduplication.
        evidence: see there.
        specs: flat key -> (dtype name, logical shape, memory order or None) of all tensors this rank knows.
        values: flat key -> JSON-able value, of those this rank would write.
        tree: JSON-able tree for this rank's manifest part: rank 0's holds what all share, each its own under
            `rank.<r>`.
        ties: flat key -> twin.
        paths: flat key -> path, of all keys.
        trained: flat keys of the parameters that an optimizer owns.
        finite: flat keys of the tensors that no infinity belongs in: these, and the optimizer's state.
    """

    items: list[WriteItem]
    evidence: Evidence
    specs: dict[str, tuple[str, list[int], list[int] | None]]
    values: dict[str, Any]
    tree: Any
    ties: dict[str, str]
    paths: dict[str, tuple[str | int, ...]]
    trained: frozenset[str] = frozenset()
    finite: frozenset[str] = frozenset()

    @classmethod
    def of(cls, flat: FlatState, rank: int) -> LocalPlan:
        """Plan the writes of `flat` on `rank`. Local; reads plain buffers, copies nothing else.

        Raises:
            CaptureError: a tensor is of a dtype that the format does not know.
        """
        own = rank_prefix(rank)
        items: list[WriteItem] = []
        shared: dict[str, str] = {}
        specs: dict[str, tuple[str, list[int], list[int] | None]] = {}
        buffers: dict[str, str] = {}
        for key, tensor in flat.tensors.items():
            spec = (str(tensor.dtype).removeprefix("torch."), list(tensor.shape), memory_order(tensor))
            if spec[0] not in ITEMSIZE:
                raise CaptureError(f"{key} has the dtype {spec[0]}, which the format does not know", key=key)
            specs[key] = spec
            if isinstance(tensor, (DTensor, FlatShard)):
                items += [item for item in dcp.write_items(key, tensor) if _holds_data(item)]
            elif rank == 0 or key.startswith(own):
                items += dcp.write_items(key, tensor)
            if not key.startswith(own):
                shared[key] = f"{spec[0]}{spec[1]}"
                if flat.kinds.get(key) == "buffer" and not isinstance(tensor, DTensor):
                    buffers[key] = _content_hash(tensor)
        values: dict[str, Any] = {}
        for key, value in flat.values.items():
            encoded = encode_value(value, key)
            if not key.startswith(own):
                shared[key] = _hash(canonical_bytes(encoded))
            if rank == 0 or key.startswith(own):
                items += dcp.write_items(key, value)
                values[key] = encoded
        tree = encode_value(flat.tree, "state", ref_type=Ref)
        own_tree = encode_value(flat.local_tree, "state", ref_type=Ref)
        evidence = Evidence(
            shared=shared,
            tree=_hash(canonical_bytes(tree)),
            buffers=buffers,
            paths={key: path for key, path in flat.paths.items() if key.startswith(own)},
        )
        part_tree = {**(tree if rank == 0 else {}), "rank": {str(rank): own_tree}}
        trained = trained_keys(flat.values, flat.ties)
        finite = trained | {key for key, kind in flat.kinds.items() if kind == "optimizer"}
        ties, paths = dict(flat.ties), dict(flat.paths)
        return cls(items, evidence, specs, values, part_tree, ties, paths, trained, finite)


def memory_order(tensor: torch.Tensor) -> list[int] | None:
    """The dims of this rank's part of a dense tensor from slowest to fastest where that is not row-major, else None.

    Only layouts that a permutation of dims explains count (channels_last, a transposed weight); expanded or padded ones
    are saved as row-major.
    """
    if isinstance(tensor, FlatShard):
        return None if tensor.order is None else list(tensor.order)
    tensor = local_tensor(tensor)
    if tensor.dim() < 2 or tensor.is_contiguous():
        return None
    strides = tensor.stride()
    order = sorted(range(tensor.dim()), key=lambda dim: (-strides[dim], dim))
    return order if tensor.permute(order).is_contiguous() else None


class Planner(SavePlanner):
    """Sends the local plan, compares on rank 0, serialises values.

    Args:
        local: this rank's plan.
        rank: this process.
        world: number of ranks.
        arrive: called with what went wrong here so far, or None: raises on all ranks if one is missing or has failed.
    """

    def __init__(self, local: LocalPlan, rank: int, world: int, arrive: Callable[[BaseException | None], None]) -> None:
        self._local = local
        self._rank = rank
        self._world = world
        self._arrive = arrive
        self._state: dict[str, Any] = {}

    def set_up_planner(
        self, state_dict: dict[str, Any], storage_meta: Any = None, is_coordinator: bool = False
    ) -> None:
        """Take what was staged: flat key -> local tensor on the CPU, or value."""
        self._state = state_dict[dcp.ALL]
        failure: BaseException | None = self._state.get(FAILED)
        try:
            failpoints.hit("save.staged", self._rank)
        except OSError as error:
            failure = error
        self._arrive(failure)  # DCP's first collective comes next

    def create_local_plan(self) -> SavePlan:
        """The plan made before staging."""
        return SavePlan(self._local.items, planner_data=self._local.evidence)

    def create_global_plan(self, all_plans: list[SavePlan]) -> tuple[list[SavePlan], Metadata]:
        """Compare, deduplicate (the lowest rank that holds an item writes it), describe. Rank 0 alone.

        Raises:
            RanksDisagreeError: ranks hold different structure, or different values under one key.
            SaveError: DCP does not take all ranks for one job.
        """
        if len(all_plans) != self._world:
            # Without a default process group DCP saves on each rank as if it were alone, whatever group it is given.
            raise SaveError(
                f"DCP plans for {len(all_plans)} of {self._world} ranks: the job's process group is gone. Let a save "
                "end (close the manager) before destroy_process_group(). Nothing was written."
            )
        evidence: list[Evidence] = [plan.planner_data for plan in all_plans]
        _compare(evidence)
        taken: set[Any] = set()
        plans = []
        for plan in all_plans:
            items = [item for item in plan.items if item.index not in taken]
            taken.update(item.index for item in items)
            plans.append(SavePlan(items))
        plans, metadata = dcp.global_plan(plans)
        for key, twin in self._local.ties.items():
            metadata.state_dict_metadata[key] = metadata.state_dict_metadata[twin]
        paths = dict(self._local.paths)
        for one in evidence:
            paths.update(one.paths)
        metadata.planner_data = paths
        return plans, metadata

    def finish_plan(self, new_plan: SavePlan) -> SavePlan:
        """As rank 0 decided."""
        return replace(new_plan)

    def resolve_data(self, write_item: WriteItem) -> torch.Tensor | io.BytesIO:
        """The bytes' source: this rank's part of a tensor, or a value pickled as plain DCP does."""
        value = self._state[write_item.index.fqn]
        if isinstance(value, FlatShard):
            return value.box_at(write_item.index.offset or ())
        if write_item.type != WriteItemType.BYTE_IO:
            return local_tensor(value)
        buffer = io.BytesIO()
        torch.save(value, buffer)
        return buffer


def _compare(evidence: list[Evidence]) -> None:
    first = evidence[0]
    for rank, other in enumerate(evidence[1:], 1):
        for key in first.shared.keys() | other.shared.keys():
            if first.shared.get(key) == other.shared.get(key):
                continue
            missing = [r for r, one in ((0, first), (rank, other)) if key not in one.shared]
            what = f"is missing on rank {missing[0]}" if missing else f"differs between rank 0 and rank {rank}"
            raise RanksDisagreeError(
                f"{key!r} {what}, but it is saved once for all ranks. Make it equal, or declare it with "
                f"resilio.per_rank(...).",
                key=key,
                rank=rank,
            )
        if first.tree != other.tree:
            raise RanksDisagreeError(
                f"the structure of the state differs between rank 0 and rank {rank}, though its keys are the same (for "
                f"example a list on one rank and a tuple on the other)",
                rank=rank,
            )
        differing = [key for key, digest in first.buffers.items() if other.buffers.get(key) != digest]
        if differing:
            _log.warning(
                "buffers differ between ranks; rank 0's are saved rank=%d count=%d first=%s",
                rank,
                len(differing),
                differing[0],
            )


def _holds_data(item: WriteItem) -> bool:
    # A rank whose shard of an uneven DTensor is empty has nothing to write, and its zero-sized piece would collide with
    # that of the next empty rank. A tensor without any element keeps one piece, so that it is not lost.
    data = item.tensor_data
    return data is None or data.chunk.sizes.numel() > 0 or data.size.numel() == 0


def _hash(data: bytes) -> str:
    return xxhash.xxh3_64_hexdigest(data)


def _content_hash(tensor: torch.Tensor) -> str:
    flat = tensor.detach().cpu().resolve_conj().resolve_neg().contiguous().view(-1)
    return xxhash.xxh3_64_hexdigest(flat.view(torch.uint8).numpy().data) if flat.numel() else ""
