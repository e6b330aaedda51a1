"""A checkpoint in memory: what the engine would write and read back, without files."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

import torch

from resilio.records.values import decode_value, encode_value
from resilio.state.flat import FlatState, Outcome, Ref, SavedState, TensorSpec
from resilio.state.restore import RestorePlan, plan_restore
from resilio.state.tensors import local, memory_order
from resilio.state.training_state import TrainingState


@dataclass
class Stored:
    """A checkpoint: records and data."""

    saved: SavedState
    data: dict[str, torch.Tensor]


def _through_json(value: Any, where: str, ref_type: type | None = None) -> Any:
    return decode_value(json.loads(json.dumps(encode_value(value, where, ref_type))), where, ref_type)


def store(*ranks: FlatState, step: int = 7) -> Stored:
    """Save what each rank captured; row-major bytes, values and trees through JSON."""
    tensors: dict[str, TensorSpec] = {}
    data: dict[str, torch.Tensor] = {}
    values: dict[str, Any] = {}
    tree = _through_json(ranks[0].tree, "tree", Ref)
    tree["rank"] = {}
    for rank, flat in enumerate(ranks):
        assert set(flat.tensors) == set(flat.kinds)
        assert set(flat.paths) == {*flat.tensors, *flat.values, *flat.ties}
        tree["rank"][str(rank)] = _through_json(flat.local_tree, "tree", Ref)
        for key, tensor in flat.tensors.items():
            if rank == 0 or key.startswith(f"rank.{rank}."):
                tensors[key] = TensorSpec(tensor.dtype, tuple(tensor.shape), memory_order(tensor))
                data[key] = local(tensor).clone(memory_format=torch.contiguous_format)
        for key, value in flat.values.items():
            if rank == 0 or key.startswith(f"rank.{rank}."):
                values[key] = _through_json(value, key)
    saved = SavedState(step, len(ranks), tensors, values, dict(ranks[0].ties), tree)
    return Stored(saved, data)


def save(state: TrainingState | dict[str, Any]) -> Stored:
    """Capture and store as a single rank."""
    return store(TrainingState.of(state).capture(7))


def fill(plan: RestorePlan, stored: Stored) -> RestorePlan:
    """Be the engine: put the stored bytes into the scratch tensors."""
    for key, tensor in plan.scratch.items():
        assert (tensor.dtype, tuple(tensor.shape)) == (stored.saved.tensors[key].dtype, stored.saved.tensors[key].shape)
        local(tensor).copy_(stored.data[key])
    return plan


def restore(
    state: TrainingState | dict[str, Any], stored: Stored, *, rank: int = 0, world: int = 1, **options: Any
) -> dict[str, Outcome]:
    """Plan, fill, apply; outcomes by component."""
    plan = plan_restore(TrainingState.of(state), stored.saved, rank=rank, world=world, **options)
    return {outcome.component: outcome for outcome in fill(plan, stored).apply()}


def raw(tensor: torch.Tensor) -> bytes:
    """The bits of a tensor, row-major."""
    return bytes(local(tensor).detach().contiguous().reshape(-1).view(torch.uint8).tolist())


def bits(value: Any) -> Any:
    """`value` with tensors as their dtype, shape and bits, so that == is exact."""
    if isinstance(value, torch.Tensor):
        return str(value.dtype), tuple(value.shape), raw(value)
    if isinstance(value, dict):
        return type(value).__name__, {key: bits(below) for key, below in value.items()}
    if isinstance(value, (list, tuple)):
        return type(value).__name__, [bits(below) for below in value]
    return type(value).__name__, repr(value)


def picture(*parts: Any) -> Any:
    """All bits of models, optimizers and other things with a `state_dict`, gradients and generators."""
    seen = []
    for part in parts:
        seen.append(bits(part.state_dict()))
        if isinstance(part, torch.nn.Module):
            seen.append([None if p.grad is None else bits(p.grad) for p in part.parameters()])
            seen.append([(name, bits(b)) for name, b in part.named_buffers()])
    return seen, raw(torch.get_rng_state())


class Holder:
    """Anything with a state, be it a mapping or not."""

    def __init__(self, state: Any = None) -> None:
        self.state = state

    def state_dict(self) -> Any:
        return self.state

    def load_state_dict(self, state: Any) -> None:
        self.state = state
