"""What each rank writes, decided together: the save planner.

The local plan is made on the main thread from live placements, before anything is staged; the background thread only
sends it. Replicated values are written by rank 0, and proven equal on the way: each plan carries hashes, rank 0
compares, and no collective of our own is needed for it. Replicated tensors are shared out among the ranks.
"""

from __future__ import annotations

import io
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner, WriteItem, WriteItemType

from .. import failpoints
from ..errors import RanksDisagreeError, SaveError
from ..records.values import canonical_bytes, encode_value
from ..state.flat import FlatState, rank_prefix
from ..state.flat_shard import FlatShard
from . import dcp
from .agreed import AgreedPlan, Stand, tell_of_buffers
from .structure import Spec, Structure, hash_of, local_tensor

__all__ = ["FAILED", "LocalPlan", "Planner", "size_bytes", "spread"]

FAILED = "\0failed"  # a key no state can have, in what was staged: staging failed, and the value is the error

_ITEM_COST = 1 << 16  # bytes that are written in the time that an item costs besides its bytes


@dataclass(frozen=True)
class Evidence:
    """What rank 0 needs to compare ranks; travels as `planner_data`.

    Attributes:
        shared: flat key -> kind and shape of a tensor that must be the same on all ranks.
        values: flat key -> hash of a value that must be equal on all ranks.
        tree: hash of the shared tree.
        buffers: flat key -> hash of the content of plain buffers; a difference is worth a warning, no error.
        paths: flat key -> path, of the keys this rank alone has.
    """

    shared: dict[str, str]
    values: dict[str, str]
    tree: str
    buffers: dict[str, str]
    paths: dict[str, tuple[str | int, ...]]


@dataclass
class LocalPlan:
    """What this rank writes, and the manifest's side of it.

    Attributes:
        structure: what depends on names, shapes and placements alone.
        evidence: see there.
        values: flat key -> JSON-able value, of those this rank would write.
        ties: flat key -> twin.
        paths: flat key -> path, of all keys.
        form: of the state that it was made of, see `FlatState`.
        agreed: what all ranks have made of this very structure before, if this rank knows.
    """

    structure: Structure
    evidence: Evidence
    values: dict[str, Any]
    ties: dict[str, str]
    paths: dict[str, tuple[str | int, ...]]
    form: object
    agreed: AgreedPlan | None = None

    @classmethod
    def of(cls, flat: FlatState, rank: int, before: LocalPlan | None = None) -> LocalPlan:
        """Plan the writes of `flat` on `rank`. Local; reads plain buffers, copies nothing else.

        Args:
            flat: the state.
            rank: this process.
            before: the plan of another save of this rank; what still holds of it is not made again.

        Raises:
            CaptureError: a tensor is of a dtype that the format does not know.
        """
        own = rank_prefix(rank)
        if before is not None and (before.form is flat.form or before.structure.fits(flat)):
            structure = before.structure
        else:
            structure = Structure.of(flat, rank)
        hashes: dict[str, str] = {}
        values: dict[str, Any] = {}
        for key, value in flat.values.items():
            encoded = encode_value(value, key)
            if not key.startswith(own):
                hashes[key] = hash_of(canonical_bytes(encoded))
            if rank == 0 or key.startswith(own):
                values[key] = encoded
        evidence = Evidence(
            shared=structure.shared,
            values=hashes,
            tree=structure.tree_hash,
            buffers={key: _content_hash(flat.tensors[key]) for key in structure.buffers},
            paths={key: path for key, path in flat.paths.items() if key.startswith(own)},
        )
        return cls(structure, evidence, values, flat.ties, flat.paths, flat.form)

    @property
    def stand(self) -> Stand:
        """What this rank says of it before a save."""
        values = self.evidence.values
        return Stand(
            plan=None if self.agreed is None else self.agreed.name,
            shared=hash_of("\n".join(f"{key} {values[key]}" for key in sorted(values)).encode()),
            buffers=tuple(self.evidence.buffers.values()),
        )

    @property
    def items(self) -> list[WriteItem]:
        """DCP write items of this rank, before deduplication."""
        return self.structure.items

    @property
    def specs(self) -> dict[str, Spec]:
        """Of all tensors this rank knows."""
        return self.structure.specs

    @property
    def tree(self) -> Any:
        """JSON-able, for this rank's manifest part: rank 0's holds what all share, each its own under `rank.<r>`."""
        return self.structure.tree


class Planner(SavePlanner):
    """Sends the local plan, compares on rank 0, serialises values.

    Args:
        local: this rank's plan.
        rank: this process.
        world: number of ranks.
        attempt: that it plans.
        arrive: called with what went wrong here so far, or None: raises on all ranks if one is missing or has failed.
        agreed: what all ranks do; None: they have yet to find it together.

    Attributes:
        made: what they found; None before.
    """

    def __init__(
        self,
        local: LocalPlan,
        rank: int,
        world: int,
        attempt: str,
        arrive: Callable[[BaseException | None], None],
        agreed: AgreedPlan | None = None,
    ) -> None:
        self._local = local
        self._rank = rank
        self._world = world
        self._attempt = attempt
        self._arrive = arrive
        self._metadata = Metadata({})
        self.made = agreed
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
        """The plan made before staging, or the share of the agreed one."""
        if self.made is not None:
            return self.made.share
        return SavePlan(self._local.items, planner_data=self._local.evidence)

    def create_global_plan(self, all_plans: list[SavePlan]) -> tuple[list[SavePlan], Metadata]:
        """Compare, deduplicate, describe. Rank 0 alone, or each by itself where that is agreed on already.

        Raises:
            RanksDisagreeError: ranks hold different structure, or different values under one key.
            SaveError: DCP does not take all ranks for one job.
        """
        if self.made is not None:
            return all_plans, self.made.metadata
        if len(all_plans) != self._world:
            # Without a default process group DCP saves on each rank as if it were alone, whatever group it is given.
            raise SaveError(
                f"DCP plans for {len(all_plans)} of {self._world} ranks: the job's process group is gone. Let a save "
                "end (close the manager) before destroy_process_group(). Nothing was written."
            )
        evidence: list[Evidence] = [plan.planner_data for plan in all_plans]
        _compare(evidence)
        plans, metadata = dcp.global_plan(_shared_out(all_plans))
        for key, twin in self._local.ties.items():
            metadata.state_dict_metadata[key] = metadata.state_dict_metadata[twin]
        paths = dict(self._local.paths)
        for one in evidence:
            paths.update(one.paths)
        metadata.planner_data = paths
        self._metadata = metadata
        return plans, metadata

    def finish_plan(self, new_plan: SavePlan) -> SavePlan:
        """As rank 0 decided."""
        if self.made is None:
            self.made = AgreedPlan(self._attempt, self._local.structure, new_plan, self._metadata)
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
        one, two = ({**evidence.shared, **evidence.values} for evidence in (first, other))
        for key in one.keys() | two.keys() if one != two else ():
            if one.get(key) == two.get(key):
                continue
            missing = [r for r, known in ((0, one), (rank, two)) if key not in known]
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
    tell_of_buffers(list(first.buffers), [list(one.buffers.values()) for one in evidence])


def _shared_out(plans: list[SavePlan]) -> list[SavePlan]:
    """Each item on one of the ranks that have it."""
    holders: dict[MetadataIndex, list[int]] = {}
    items: dict[MetadataIndex, WriteItem] = {}
    for rank, plan in enumerate(plans):
        for item in plan.items:
            holders.setdefault(item.index, []).append(rank)
            items[item.index] = item
    writer = spread(items, holders, len(plans))
    return [SavePlan([item for item in plan.items if writer[item.index] == rank]) for rank, plan in enumerate(plans)]


def spread(
    items: Mapping[MetadataIndex, WriteItem], places: Mapping[MetadataIndex, Sequence[int]], count: int
) -> dict[MetadataIndex, int]:
    """For each item one of its `places`, of `count` in all: the largest first, where least is to be written so far."""
    loads = [0] * count
    found: dict[MetadataIndex, int] = {}
    # What has a single place goes there: that is the load which the others are measured by.
    for index in sorted(items, key=lambda index: (len(places[index]) > 1, -size_bytes(items[index]))):
        found[index] = min(places[index], key=lambda place: (loads[place], place))
        loads[found[index]] += size_bytes(items[index]) + _ITEM_COST
    return found


def size_bytes(item: WriteItem) -> int:
    """Of the tensor data of an item; 0 for a value."""
    data = item.tensor_data
    return data.chunk.sizes.numel() * data.properties.dtype.itemsize if data is not None else 0


def _content_hash(tensor: torch.Tensor) -> str:
    flat = tensor.detach().cpu().resolve_conj().resolve_neg().contiguous().view(-1)
    return hash_of(flat.view(torch.uint8).numpy().data) if flat.numel() else ""
