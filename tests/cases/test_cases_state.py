"""Public bug reports about model and optimizer state, each with the outcome that is right. BR-07, 12, 15, 21, 44."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from cases.case_tools import save_first
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from workload import assert_same, full

import resilio
from resilio import TrainingState
from resilio.errors import MismatchError
from resilio.testing.worlds import run_world

# -------------------------------------------------------------------------------------------- BR-07: the learning rate


@pytest.mark.parametrize("kind", [float, torch.tensor], ids=["number", "tensor"])
def test_br_07_the_first_step_after_a_resume_uses_the_saved_learning_rate(tmp_path: Any, kind: Any) -> None:
    def pair() -> tuple[nn.Module, torch.optim.Optimizer]:
        torch.manual_seed(0)
        model = nn.Linear(3, 2)
        return model, torch.optim.AdamW(model.parameters(), lr=kind(0.1))

    def step(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        model(torch.ones(2, 3)).square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()

    straight, stopped, resumed = pair(), pair(), pair()
    for model, optimizer in (straight, stopped):
        step(model, optimizer)
        optimizer.param_groups[0]["lr"] = kind(0.0123)
    url = f"file://{tmp_path}"
    save_first(url, {"model": stopped[0], "optimizer": stopped[1]})
    resilio.restore(url, {"model": resumed[0], "optimizer": resumed[1]})
    lr = resumed[1].param_groups[0]["lr"]
    assert type(lr) is type(kind(0.1)) and float(lr) == float(kind(0.0123))
    step(*straight)
    step(*resumed)
    assert_same(dict(resumed[0].state_dict()), dict(straight[0].state_dict()))


# ------------------------------------------------------------------------------------------------- BR-12: other shapes

SHAPES = {
    "smaller": ((4, 3), (2, 3)),
    "larger": ((4, 3), (5, 3)),
    "transposed": ((4, 3), (3, 4)),
    "scalar_for_one": ((1,), ()),
    "one_for_scalar": ((), (1,)),
    "more_dims": ((4, 3), (4, 3, 1)),
    "flattened": ((4, 3), (12,)),
}


@pytest.mark.parametrize("array", [torch.full, np.full], ids=["tensor", "numpy"])
def test_br_12_another_shape_is_always_an_error_that_names_the_key_and_changes_nothing(
    tmp_path: Any, array: Any
) -> None:
    url = f"file://{tmp_path}"
    save_first(url, {name: array(saved, 7.0) for name, (saved, _) in SHAPES.items()})
    live = {name: array(shape, 1.0) for name, (_, shape) in SHAPES.items()}
    with pytest.raises(MismatchError) as caught:
        resilio.restore(url, live)
    assert all(name in str(caught.value) for name in SHAPES)
    for name, (_, shape) in SHAPES.items():
        assert tuple(live[name].shape) == shape
        assert bool((live[name] == 1).all())
        with pytest.raises(MismatchError, match=name):  # nor by itself, nor if lenience is asked for
            resilio.restore(url, {name: live[name]}, only=[name], strict=False)


# ------------------------------------------------------------------------------------------------- BR-15: plain values


def test_br_15_plain_values_come_back_where_the_caller_holds_them(tmp_path: Any) -> None:
    url = f"file://{tmp_path}"
    save_first(url, {"epoch": 7, "progress": {"tokens": 1000, "best": None, "obj": [1, 2]}, "history": [1, 2]})
    progress, history = {"tokens": 0, "obj": [0], "stale": True}, [0]
    state = TrainingState(epoch=0, progress=progress, history=history)
    resilio.restore(url, state)
    assert state["epoch"] == 7  # a number has no place of its own: it is read from the state
    assert state["progress"] is progress and progress == {"tokens": 1000, "best": None, "obj": [1, 2]}
    assert state["history"] is history and history == [1, 2]


# ------------------------------------------------------------------------------------------------- BR-21: tied weights


class Tied(nn.Module):
    def __init__(self, seed: int) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.emb, self.mid, self.head = nn.Embedding(7, 4), nn.Linear(4, 4), nn.Linear(4, 7, bias=False)
        self.head.weight = self.emb.weight

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.head(torch.tanh(self.mid(self.emb(ids))))


def train_tied(model: Tied, optimizer: torch.optim.Optimizer) -> None:
    model(torch.tensor([1, 2, 5])).square().sum().backward()
    optimizer.step()
    optimizer.zero_grad()


def test_br_21_the_moments_of_a_tied_weight_are_saved_once_and_training_goes_on_exactly(tmp_path: Any) -> None:
    models = [Tied(seed) for seed in (0, 0, 1)]
    pairs = [(model, torch.optim.AdamW(model.parameters(), lr=0.1)) for model in models]
    straight, stopped, resumed = pairs
    for pair in (straight, stopped):
        train_tied(*pair)
    save_first(f"file://{tmp_path}", {"model": stopped[0], "optimizer": stopped[1]})
    resilio.restore(f"file://{tmp_path}", {"model": resumed[0], "optimizer": resumed[1]})
    model, optimizer = resumed
    assert model.head.weight is model.emb.weight
    assert len(optimizer.state) == 3  # one for the shared weight
    train_tied(*straight)
    train_tied(*resumed)
    assert_same(optimizer.state_dict(), straight[1].state_dict())
    assert_same(dict(model.state_dict()), dict(straight[0].state_dict()))


# --------------------------------------------------------------------- BR-44: dimensions that the mesh does not divide

WIDTHS = (3, 7)


def wide(n: int, seed: int, layout: str, world: int) -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(4, n), nn.Linear(n, 4, bias=False))
    if layout == "tp":
        mesh = init_device_mesh("cpu", (2, world // 2), mesh_dim_names=("dp", "tp"))
        parallelize_module(model, mesh["tp"], {"0": ColwiseParallel(), "1": RowwiseParallel()})
        fully_shard(model, mesh=mesh["dp"])
    elif layout == "fsdp":
        fully_shard(model, mesh=init_device_mesh("cpu", (world,)))
    return model, torch.optim.AdamW(model.parameters(), lr=0.1)


def everything(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    found = {name: full(p) for name, p in model.named_parameters()}
    for name, p in model.named_parameters():
        found |= {f"{name}.{key}": full(value) for key, value in optimizer.state[p].items()}
    return found


def move(rank: int, world: int, source: str, layout: str, target: str | None) -> list[dict[str, Any]]:
    """Restore both widths from `source` in `layout`; save them below `target` if one is given."""
    held = []
    for n in WIDTHS:
        model, optimizer = wide(n, 5, layout, world)
        resilio.restore(f"{source}/{n}", {"model": model, "optimizer": optimizer, "rng": False})
        if target:
            save_first(f"{target}/{n}", {"model": model, "optimizer": optimizer, "rng": False})
        held.append(everything(model, optimizer))
    return held


def test_br_44_widths_that_no_mesh_divides_go_from_plain_to_tensor_parallel_to_fsdp_and_back(tmp_path: Any) -> None:
    root, want = f"file://{tmp_path}", []
    for n in WIDTHS:
        model, optimizer = wide(n, 0, "plain", 1)
        model(torch.ones(2, 4)).square().sum().backward()
        optimizer.step()
        save_first(f"{root}/plain/{n}", {"model": model, "optimizer": optimizer, "rng": False})
        want.append(everything(model, optimizer))
    for source, layout, world in (("plain", "tp", 4), ("tp", "fsdp", 3)):
        for held in run_world(move, world, f"{root}/{source}", layout, f"{root}/{layout}"):
            assert_same(held, want)
    assert_same(move(0, 1, f"{root}/fsdp", "plain", None), want)
