"""Public bug reports about model and optimizer state. BR-01, 05, 07, 12, 15, 21, 31, 43, 44."""

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
from resilio import CheckpointManager, TrainingState
from resilio.errors import CaptureError, MismatchError
from resilio.testing.worlds import run_world

# ------------------------------------------------------------------- BR-01: a checkpoint at step 0, and what it changes


@pytest.mark.parametrize("mode", ["sync", "async"])
def test_br_01_a_job_that_saved_before_its_first_gradient_trains_like_one_that_did_not(
    tmp_path: Any, mode: Any
) -> None:
    def pair() -> tuple[nn.Module, torch.optim.Optimizer]:
        torch.manual_seed(0)
        model = nn.Linear(3, 3, bias=False)
        # Weight decay of Adam leaks into the moments even if a step is taken with no gradient and a rate of 0.
        return model, torch.optim.Adam(model.parameters(), lr=0.1, weight_decay=0.5)

    saved, straight, resumed = pair(), pair(), pair()
    fired: list[str] = []
    for name in ("register_step_pre_hook", "register_step_post_hook"):
        getattr(saved[1], name)(lambda *_, name=name: fired.append(name))
    url = f"file://{tmp_path}"
    with CheckpointManager(url, {"model": saved[0], "optimizer": saved[1]}, mode=mode) as ckpt:
        ckpt.restore()
        ckpt.save(0)
    assert not fired and not saved[1].state and saved[0].weight.grad is None
    resilio.restore(url, {"model": resumed[0], "optimizer": resumed[1]})
    assert not resumed[1].state and resumed[0].weight.grad is None
    for model, optimizer in (straight, saved, resumed):
        for _ in range(2):
            model(torch.ones(2, 3)).square().sum().backward()
            optimizer.step()
            optimizer.zero_grad()
        assert_same(dict(model.state_dict()), dict(straight[0].state_dict()))
        assert_same(optimizer.state_dict(), straight[1].state_dict())


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


# --------------------------------------------------------------------------- BR-05 and 31: groups, empty ones and split


def test_br_05_each_of_several_empty_groups_keeps_its_own_hyper_parameters(tmp_path: Any) -> None:
    def pair(rates: list[float]) -> tuple[nn.Module, torch.optim.Optimizer]:
        model = nn.Linear(3, 2)
        members = [[], [model.weight], [], [], [model.bias]]
        return model, torch.optim.AdamW([{"params": p, "lr": lr} for p, lr in zip(members, rates, strict=True)])

    rates = [0.1, 0.2, 0.3, 0.4, 0.5]
    saved, resumed = pair(rates), pair([9.0] * 5)
    save_first(f"file://{tmp_path}", {"model": saved[0], "optimizer": saved[1]})
    resilio.restore(f"file://{tmp_path}", {"model": resumed[0], "optimizer": resumed[1]})
    assert [group["lr"] for group in resumed[1].param_groups] == rates


def test_br_31_one_group_that_was_split_is_refused_and_keeps_its_hyper_parameters(tmp_path: Any) -> None:
    model = nn.Linear(3, 2)
    one = torch.optim.AdamW(model.parameters(), lr=0.01, weight_decay=0.1)
    save_first(f"file://{tmp_path}", {"model": model, "optimizer": one})
    groups = [{"params": [model.weight], "weight_decay": 0.5}, {"params": [model.bias], "weight_decay": 0.0}]
    two = torch.optim.AdamW(groups, lr=0.02)
    for strict in (True, False):
        with pytest.raises(MismatchError, match=r"hyper-parameters(.|\n)*weight(.|\n)*bias"):
            resilio.restore(f"file://{tmp_path}", {"model": model, "optimizer": two}, strict=strict)
    assert [(group["lr"], group["weight_decay"]) for group in two.param_groups] == [(0.02, 0.5), (0.02, 0.0)]


# ------------------------------------------------------------------------- BR-43: a tensor that only wraps other ones


class Quantized(torch.Tensor):
    """8-bit data and a scale; has no memory of its own, and knows no operation that makes a new one."""

    @staticmethod
    def __new__(cls, data: torch.Tensor, scale: torch.Tensor) -> Quantized:
        made: Quantized = torch.Tensor._make_wrapper_subclass(cls, data.shape, dtype=torch.float32)  # type: ignore[attr-defined]
        return made

    def __init__(self, data: torch.Tensor, scale: torch.Tensor) -> None:
        self.data8, self.scale = data, scale

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten.detach.default:
            return cls(args[0].data8, args[0].scale)
        raise NotImplementedError(f"{func} of Quantized")


@pytest.mark.parametrize("mode", ["sync", "async"])
@pytest.mark.parametrize("where", ["parameter", "value"])
def test_br_43_a_wrapper_tensor_is_refused_by_name_before_anything_is_staged(
    tmp_path: Any, mode: Any, where: str
) -> None:
    tensor = Quantized(torch.ones(4, dtype=torch.int8), torch.tensor(0.5))
    model = nn.Module()
    model.weight = nn.Parameter(tensor) if where == "parameter" else nn.Parameter(torch.ones(4))
    state = {"model": model, "table": {"w": tensor if where == "value" else torch.ones(4)}}
    with CheckpointManager(f"file://{tmp_path}", state, mode=mode) as ckpt:
        ckpt.restore()
        with pytest.raises(CaptureError, match=r"(model\.weight|table\.w) is a .*Quantized"):
            ckpt.save(1)
    assert not list(tmp_path.glob("step-*"))


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
