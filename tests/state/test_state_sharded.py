"""Sharded models: capture after an evaluation forward, scratch like the live shards, uneven and empty ones included."""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import nn

from resilio.state.flat import FlatState, Ref, SavedState, TensorSpec
from resilio.state.restore import plan_restore
from resilio.state.training_state import TrainingState
from resilio.testing.worlds import run_world


def _sharded(seed: int, step: bool) -> dict[str, Any]:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    torch.manual_seed(seed)
    mesh = init_device_mesh("cpu", (torch.distributed.get_world_size(),))
    model = nn.Sequential(nn.Linear(3, 1), nn.LayerNorm(1), nn.Linear(1, 5))  # 1 row over 2 ranks: an empty shard
    for layer in model:
        fully_shard(layer, mesh=mesh, reshard_after_forward=False)
    fully_shard(model, mesh=mesh, reshard_after_forward=False)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    if step:
        model(torch.randn(2, 3)).square().sum().backward()
        optimizer.step()
        with torch.no_grad():
            model(torch.randn(2, 3))  # now named_parameters() shows gathered tensors, not the optimizer's
    return {"model": model, "optimizer": optimizer}


def _local(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.to_local() if isinstance(tensor, torch.distributed.tensor.DTensor) else tensor


def _stored(flat: FlatState, world: int) -> tuple[SavedState, dict[str, torch.Tensor]]:
    data = {key: _local(tensor).clone() for key, tensor in flat.tensors.items()}
    specs = {key: TensorSpec(tensor.dtype, tuple(tensor.shape)) for key, tensor in flat.tensors.items()}
    tree = {**copy.deepcopy(flat.tree), "rank": {}}
    assert isinstance(tree["step"], Ref)
    return SavedState(1, world, specs, dict(flat.values), dict(flat.ties), tree), data


def _round_trip(rank: int, world: int) -> list[tuple[str, tuple[int, ...], bool]]:
    saved = _sharded(0, step=True)
    first = TrainingState(**saved, rng=False).capture(1)
    record, data = _stored(first, world)
    live = _sharded(1, step=False)  # a fresh optimizer: nothing to see of how its moments will lie
    state = TrainingState(**live, rng=False)
    plan = plan_restore(state, record, rank=rank, world=world)
    for key, tensor in plan.scratch.items():
        assert _local(tensor).shape == data[key].shape, key
        _local(tensor).copy_(data[key])
    plan.apply()
    again = state.capture(1)
    assert again.tensors.keys() == first.tensors.keys()
    found = []
    for key, tensor in again.tensors.items():
        assert type(tensor) is type(first.tensors[key]), key
        assert torch.equal(_local(tensor), data[key]), key
        sharded = isinstance(tensor, torch.distributed.tensor.DTensor)
        found.append((key, tuple(_local(tensor).shape), sharded))
    saved["optimizer"].zero_grad()
    for parts in (saved, live):
        torch.manual_seed(5)
        parts["model"](torch.randn(2, 3)).square().sum().backward()
        parts["optimizer"].step()
    a, b = (TrainingState(**parts, rng=False).capture(2).tensors for parts in (saved, live))
    assert all(torch.equal(_local(a[key]), _local(b[key])) for key in a)
    return found


def test_br_22_uneven_and_empty_shards_come_back_and_training_goes_on_bit_for_bit() -> None:
    zero, one = ({key: (shape, sharded) for key, shape, sharded in found} for found in run_world(_round_trip, 2))
    assert zero["model.2.weight"] == ((3, 1), True)
    assert one["model.2.weight"] == ((2, 1), True)
    assert one["model.0.weight"] == ((0, 3), True)
    assert one["optimizer.state.0.weight.exp_avg"] == ((0, 3), True)
    assert one["optimizer.state.2.weight.exp_avg"] == ((2, 1), True)
    assert one["optimizer.state.2.weight.step"] == ((), False)


def _ddp_names(rank: int, world: int) -> set[str]:
    from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
    from torch.nn.parallel import DistributedDataParallel

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.module = checkpoint_wrapper(torch.compile(nn.Linear(2, 2), backend="eager"))

    model = torch.compile(DistributedDataParallel(Net()), backend="eager")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    return set(TrainingState(model=model, optimizer=optimizer, rng=False).capture(0).tensors)


def test_br_10_names_under_ddp_are_canonical_too() -> None:
    for keys in run_world(_ddp_names, 2):
        names = {"module.weight", "module.bias"}
        assert keys == {f"model.{n}" for n in names} | {f"optimizer.state.{n}.momentum_buffer" for n in names}
