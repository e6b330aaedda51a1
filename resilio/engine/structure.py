"""What of a rank's plan depends on names, shapes and placements alone, so that the next save need not find it anew."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import xxhash
from torch.distributed.checkpoint.planner import WriteItem
from torch.distributed.tensor import DTensor

from ..errors import CaptureError
from ..records.health import trained_keys
from ..records.manifest import ITEMSIZE
from ..records.values import canonical_bytes, encode_value
from ..state.again import layout
from ..state.flat import FlatState, Ref, rank_prefix
from ..state.flat_shard import FlatShard
from ..state.tensors import local, memory_order
from ..state.tree import alike
from . import dcp

__all__ = ["Spec", "Structure", "hash_of", "local_tensor"]

Spec = tuple[str, list[int], list[int] | None]  # dtype name, logical shape, memory order if not row-major

_EARLY = 1 << 16  # bytes; a tensor below is copied sooner than it is looked after


def local_tensor(tensor: torch.Tensor) -> torch.Tensor:
    """This rank's part of a sharded tensor, a plain tensor as it is; detached."""
    if type(tensor) is not torch.Tensor:
        tensor = local(tensor)
    return tensor.detach() if tensor.requires_grad else tensor


@dataclass(frozen=True)
class Structure:
    """Of one rank's state, and what follows from it.

    Attributes:
        items: DCP write items of this rank, before deduplication. Of what is the same on all ranks, such as DDP's
            parameters, every rank has them, so that any may be the one that writes.
        specs: flat key -> spec, of all tensors this rank knows.
        shared: flat key -> kind and shape of a tensor that must be the same on all ranks.
        buffers: flat keys of plain buffers.
        late: flat keys of tensors in host memory that nothing but an optimizer's `step` changes: parameters it trains,
            and its own state. Not parameters that it does not have, such as an averaged copy; not what FSDP1 gathers
            into memory of its own.
        trained: flat keys of the parameters that an optimizer owns.
        finite: flat keys of the tensors that no infinity belongs in: these, and the optimizer's state.
        tree: JSON-able tree for this rank's manifest part.
        tree_hash: of the tree that all ranks share.
    """

    items: list[WriteItem]
    specs: dict[str, Spec]
    shared: dict[str, str]
    buffers: tuple[str, ...]
    late: frozenset[str]
    trained: frozenset[str]
    finite: frozenset[str]
    tree: Any
    tree_hash: str
    _facts: Any
    _trees: tuple[Any, Any]

    @classmethod
    def of(cls, flat: FlatState, rank: int) -> Structure:
        """Find that of `flat` on `rank`. Local.

        Raises:
            CaptureError: a tensor is of a dtype that the format does not know.
        """
        own = rank_prefix(rank)
        items: list[WriteItem] = []
        shared: dict[str, str] = {}
        specs: dict[str, Spec] = {}
        buffers: list[str] = []
        for key, tensor in flat.tensors.items():
            order = memory_order(tensor)
            spec = (
                str(tensor.dtype).removeprefix("torch."),
                list(tensor.shape),
                None if order is None else list(order),
            )
            if spec[0] not in ITEMSIZE:
                raise CaptureError(f"{key} has the dtype {spec[0]}, which the format does not know", key=key)
            specs[key] = spec
            if isinstance(tensor, (DTensor, FlatShard)):
                items += [item for item in dcp.write_items(key, tensor) if _holds_data(item)]
            elif rank == 0 or key.startswith(own) or flat.kinds.get(key) in ("parameter", "optimizer"):
                items += dcp.write_items(key, tensor)
            if not key.startswith(own):
                shared[key] = f"{spec[0]}{spec[1]}"
                if flat.kinds.get(key) == "buffer" and not isinstance(tensor, DTensor):
                    buffers.append(key)
        for key, value in flat.values.items():
            if rank == 0 or key.startswith(own):
                items += dcp.write_items(key, value)
        tree = encode_value(flat.tree, "state", ref_type=Ref)
        own_tree = encode_value(flat.local_tree, "state", ref_type=Ref)
        trained = trained_keys(flat.values, flat.ties, flat.tensors)
        return cls(
            items=items,
            specs=specs,
            shared=shared,
            buffers=tuple(buffers),
            late=frozenset(key for key in flat.tensors if _may_be_late(flat, key, trained)),
            trained=trained,
            finite=trained | {key for key, kind in flat.kinds.items() if kind == "optimizer"},
            tree={**(tree if rank == 0 else {}), "rank": {str(rank): own_tree}},
            tree_hash=hash_of(canonical_bytes(tree)),
            _facts=_facts(flat),
            _trees=(flat.tree, flat.local_tree),
        )

    def fits(self, flat: FlatState) -> bool:
        """Whether `flat` of the same rank has this structure."""
        same = alike(flat.tree, self._trees[0]) and alike(flat.local_tree, self._trees[1])
        return same and _facts(flat) == self._facts


def hash_of(data: bytes | memoryview) -> str:
    """Of what ranks compare with each other."""
    return xxhash.xxh3_64_hexdigest(data)


def _facts(flat: FlatState) -> Any:
    """All that a structure is found from, but for the trees."""
    groups = [(key, value) for key, value in flat.values.items() if key.endswith(".params")]  # what is trained
    return list(flat.kinds.items()), list(map(layout, flat.tensors.values())), list(flat.values), groups, flat.ties


def _may_be_late(flat: FlatState, key: str, trained: frozenset[str]) -> bool:
    tensor, kind = flat.tensors[key], flat.kinds.get(key)
    if isinstance(tensor, FlatShard) or tensor.device.type != "cpu":
        return False
    own = kind == "optimizer" or (kind == "parameter" and key in trained)
    return own and local_tensor(tensor).nbytes >= _EARLY


def _holds_data(item: WriteItem) -> bool:
    # A rank whose shard of an uneven DTensor is empty has nothing to write, and its zero-sized piece would collide with
    # that of the next empty rank. A tensor without any element keeps one piece, so that it is not lost.
    data = item.tensor_data
    return data is None or data.chunk.sizes.numel() > 0 or data.size.numel() == 0
