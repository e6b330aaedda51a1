"""A capture that looks through what the one before found gives what a first capture would, whatever has changed."""

from __future__ import annotations

import gc
import weakref
from collections import OrderedDict
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from resilio.errors import CaptureError
from resilio.state.flat import FlatState
from resilio.state.training_state import TrainingState
from resilio.testing.worlds import run_world


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 4, 3)
        self.norm = nn.BatchNorm1d(4)
        self.head = nn.Linear(4, 4)
        self.tail = nn.Linear(4, 4)
        self.head.weight = self.tail.weight  # tied
        self.register_buffer("mask", torch.ones(2), persistent=False)


class Loader:
    def __init__(self) -> None:
        self.state: dict[str, Any] = {"at": 1, "order": [1, 2], "seen": torch.zeros(3), "params": ["a"]}

    def state_dict(self) -> dict[str, Any]:
        return self.state

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.state = state


class Job:
    def __init__(self) -> None:
        torch.manual_seed(0)
        self.model = Net()
        self.ema = torch.optim.swa_utils.AveragedModel(self.model)
        self.optimizer = torch.optim.AdamW(self.model.parameters())
        self.step()
        self.scheduler = torch.optim.lr_scheduler.StepLR(self.optimizer, 2)
        self.loader = Loader()
        self.state = TrainingState(**self.parts())

    def parts(self) -> dict[str, Any]:
        return {
            "model": self.model,
            "optimizer": self.optimizer,
            "scheduler": self.scheduler,
            "ema": self.ema,
            "dataloader": self.loader,
            "table": {"a": torch.ones(2), "b": [torch.zeros(1), 3]},
            "epoch": 0,
        }

    def step(self) -> None:
        for parameter in self.optimizer.param_groups[0]["params"]:
            parameter.grad = torch.ones_like(parameter)
        self.optimizer.step()

    @property
    def first(self) -> dict[str, Any]:
        """State of the optimizer's first parameter."""
        return self.optimizer.state[self.optimizer.param_groups[0]["params"][0]]


def seen(flat: FlatState, *, memory: bool = True) -> Any:
    """All of it, in order, tensors by the memory they show, or by what is in it."""
    tensors = [
        (
            key,
            tensor.data_ptr() if memory else tensor.tolist(),
            tensor.dtype,
            tensor.shape,
            tensor.stride(),
            tensor.requires_grad,
        )
        for key, tensor in flat.tensors.items()
        if not key.endswith("rng.torch")  # a copy each time
    ]
    return tensors, repr(flat.values), flat.kinds, flat.paths, flat.ties, repr(flat.tree), repr(flat.local_tree)


def by_another(state: TrainingState) -> FlatState:
    """The same live things, by one that has never captured."""
    return TrainingState(rng=state.rng, **state._values).capture(7)


def again(job: Job) -> tuple[FlatState, FlatState]:
    """A capture after two others, and what it must be."""
    return job.state.capture(7), by_another(job.state)


CONTENT: dict[str, Callable[[Job], Any]] = {
    "nothing": lambda job: None,
    "a step": lambda job: job.step(),
    "learning rate": lambda job: job.optimizer.param_groups[0].update(lr=9.0),
    "data of a parameter": lambda job: setattr(job.model.conv.weight, "data", torch.ones(4, 3, 3, 3)),
    "a moment": lambda job: job.first.update(exp_avg=torch.ones(4, 3, 3, 3)),
    "scheduler": lambda job: job.scheduler.step(),
    "generators": lambda job: torch.rand(3),
    "a plain value": lambda job: job.state.__setitem__("epoch", 1),
    "training mode": lambda job: job.model.eval(),
    "gradients": lambda job: job.model.requires_grad_(False),
    "a forward hook": lambda job: job.model.register_forward_hook(lambda *_: None),
}


def replace_head(job: Job, **more: Any) -> None:
    job.model.head = nn.Linear(4, 4, **more)


def untie(job: Job) -> None:
    job.model.head.weight = nn.Parameter(torch.ones(4, 4))


def grows(job: Job) -> None:
    extra = nn.Parameter(torch.ones(2))
    job.model.register_parameter("extra", extra)
    job.optimizer.add_param_group({"params": [extra], "lr": 0.5})


def move_to_end(job: Job) -> None:
    state = job.optimizer.state
    first = next(iter(state))
    state[first] = state.pop(first)


def shared_moment(job: Job) -> None:
    job.first["exp_avg_sq"] = job.first["exp_avg"]


def hides(job: Job) -> None:
    job.model._non_persistent_buffers_set.discard("mask")


def doubled(module: nn.Module, state: dict[str, Any], *_: Any) -> None:
    state["head.bias"] = state["head.bias"] * 2


def new_state_dict(job: Job) -> None:
    job.model.state_dict = lambda *_, **__: {"only": torch.ones(1)}  # type: ignore[method-assign]


FORM: dict[str, Callable[[Job], Any]] = {
    "a parameter is another": lambda job: setattr(job.model.conv, "bias", nn.Parameter(torch.ones(4))),
    "data of another shape": lambda job: setattr(job.model.norm.bias, "data", torch.ones(5)),
    "data of another dtype": lambda job: setattr(job.model.norm.bias, "data", torch.ones(4, dtype=torch.float16)),
    "data in another order": lambda job: setattr(
        job.model.conv.weight, "data", torch.ones(4, 3, 3, 3).to(memory_format=torch.channels_last)
    ),
    "a parameter less": lambda job: job.model.conv.register_parameter("bias", None),
    "a parameter that is trained more": grows,
    "a parameter that is not trained": lambda job: job.model.register_parameter("x", nn.Parameter(torch.ones(1))),
    "a buffer more": lambda job: job.model.register_buffer("more", torch.ones(1)),
    "a buffer is another": lambda job: setattr(job.model.norm, "running_mean", torch.ones(4)),
    "a hidden buffer shows": hides,
    "a module replaced": replace_head,
    "a module replaced, without bias": lambda job: replace_head(job, bias=False),
    "a module more": lambda job: job.model.add_module("more", nn.Linear(1, 1)),
    "a module less": lambda job: delattr(job.model, "norm"),
    "modules in another order": lambda job: job.model._modules.update(conv=job.model._modules.pop("conv")),
    "untied": untie,
    "tied": lambda job: setattr(job.model.head, "bias", job.model.tail.bias),
    "the class of a module": lambda job: setattr(job.model.tail, "__class__", type("Other", (nn.Linear,), {})),
    "a state dict hook": lambda job: job.model._register_state_dict_hook(doubled),
    "a hook before state_dict": lambda job: job.model.register_state_dict_pre_hook(
        lambda module, *_: module.register_buffer("late", torch.ones(1))
    ),
    "a load hook": lambda job: job.model.register_load_state_dict_pre_hook(lambda *_: None),
    "a state_dict of its own": new_state_dict,
    "no state of a parameter": lambda job: job.optimizer.state.popitem(),
    "no state at all": lambda job: job.optimizer.state.clear(),
    "an entry more": lambda job: job.first.update(max_exp_avg_sq=torch.ones(4, 3, 3, 3)),
    "an entry less": lambda job: job.first.pop("step"),
    "a number for a tensor": lambda job: job.first.update(step=3),
    "nested state": lambda job: job.first.update(step=[torch.ones(1)]),
    "a moment of another dtype": lambda job: job.first.update(exp_avg=torch.ones(4, 3, 3, 3, dtype=torch.float64)),
    "tied moments": shared_moment,
    "state in another order": move_to_end,
    "a group setting more": lambda job: job.optimizer.param_groups[0].update(mine=1),
    "a tensor as learning rate": lambda job: job.optimizer.param_groups[0].update(lr=torch.tensor(0.1)),
    "an optimizer's hook": lambda job: job.optimizer.register_state_dict_post_hook(lambda *_: {"other": 1}),
    "parameters in another order": lambda job: job.optimizer.param_groups[0]["params"].reverse(),
    "a value more": lambda job: job.loader.state.update(new=1),
    "a value less": lambda job: job.loader.state.pop("at"),
    "a tensor for a value": lambda job: job.loader.state.update(at=torch.ones(1)),
    "a value for a tensor": lambda job: job.loader.state.update(seen=1),
    "a tensor of another shape": lambda job: job.loader.state.update(seen=torch.zeros(4)),
    "a value under the key of what is trained": lambda job: job.loader.state.update(params=["b"]),
    "another container": lambda job: setattr(job.loader, "state", OrderedDict(job.loader.state)),
    "values in another order": lambda job: job.loader.state.update(at=job.loader.state.pop("at")),
    "another part": lambda job: job.state.__setitem__("more", 1),
    "a part is another": lambda job: job.state.__setitem__("model", Net()),
    "no generators": lambda job: setattr(job.state, "rng", False),
}


@pytest.mark.parametrize("name", CONTENT)
def test_what_changes_content_alone_is_looked_through_and_all_content_is_new(name: str) -> None:
    job = Job()
    first = job.state.capture(5)
    assert job.state.capture(6).form is first.form
    CONTENT[name](job)
    found, want = again(job)
    assert seen(found) == seen(want)
    assert found.form is first.form


@pytest.mark.parametrize("name", FORM)
def test_whatever_changes_the_form_is_noticed(name: str) -> None:
    job = Job()
    first = job.state.capture(5)
    assert job.state.capture(6).form is first.form
    FORM[name](job)
    try:
        want = by_another(job.state)
    except CaptureError as error:
        with pytest.raises(CaptureError) as caught:
            job.state.capture(7)
        assert str(caught.value) == str(error)
        return
    found = job.state.capture(7)
    assert seen(found, memory=False) == seen(want, memory=False)
    assert found.form is not first.form


def test_a_method_of_a_class_that_is_replaced_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    job = Job()
    form = job.state.capture(5).form
    monkeypatch.setattr(nn.Linear, "get_extra_state", lambda self: {"x": 1}, raising=False)
    found, want = again(job)
    assert seen(found) == seen(want) and found.form is not form
    assert "model.head._extra_state.x" in found.values


def test_another_rank_or_world_is_another_form() -> None:
    job = Job()
    form = job.state.capture(5, rank=0, world=1).form
    assert job.state.capture(5, rank=0, world=2).form is not form
    assert any(key.startswith("rank.1.") for key in job.state.capture(5, rank=1, world=2).values)


def test_nothing_that_is_remembered_keeps_a_tensor_alive() -> None:
    job = Job()
    job.state.capture(5)
    job.state.capture(6)
    moment = weakref.ref(job.first["exp_avg"])
    weight = weakref.ref(job.model.conv.weight)
    job.optimizer.state.clear()
    job.optimizer.param_groups[0]["params"].clear()
    job.optimizer.zero_grad()
    job.model.conv = nn.Conv2d(3, 4, 3)
    job.ema = job.scheduler = None  # type: ignore[assignment]
    gc.collect()
    assert moment() is None and weight() is None


def fsdp2(rank: int, world: int) -> bool:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
    mesh = init_device_mesh("cpu", (world,))
    fully_shard(model[0], mesh=mesh, reshard_after_forward=False)
    fully_shard(model, mesh=mesh, reshard_after_forward=False)
    optimizer = torch.optim.AdamW(model.parameters())

    def step() -> None:
        model(torch.ones(2, 8)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()

    step()
    state = TrainingState(model=model, optimizer=optimizer)
    form = state.capture(1, rank=rank, world=world).form
    step()
    with torch.no_grad():
        model(torch.ones(2, 8))  # an evaluation leaves it gathered
    flat = state.capture(2, rank=rank, world=world)
    want = TrainingState(model=model, optimizer=optimizer).capture(2, rank=rank, world=world)
    assert list(flat.tensors) == list(want.tensors)
    for key, tensor in want.tensors.items():
        assert type(flat.tensors[key]) is type(tensor)
        if key.startswith(("model", "optimizer")):
            assert torch.equal(flat.tensors[key].to_local(), tensor.to_local()) if hasattr(tensor, "to_local") else True
    return flat.form is form


def test_a_model_that_fsdp2_left_gathered_is_resharded_and_looked_through() -> None:
    assert run_world(fsdp2, 2) == [True, True]
