"""Copies made while the next forward and backward run: whatever the loop does, a checkpoint is of its own moment."""

from __future__ import annotations

import copy
import gc
import os
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import optimizer as torch_optimizer

from resilio import CheckpointManager, TrainingState
from resilio.engine import stage, structure
from resilio.errors import ConfigError, SaveError
from resilio.testing.worlds import run_world

WIDTH = 160  # a weight of 100 KiB: large enough to be copied late


class Gate:
    """Stands before every late copy until it is opened."""

    def __init__(self) -> None:
        self.reached, self.open = threading.Event(), threading.Event()
        self._copy = stage._Late.copy

    def __enter__(self) -> Gate:
        gate = self

        def copy(self: Any) -> None:
            gate.reached.set()
            assert gate.open.wait(60)
            gate._copy(self)

        stage._Late.copy = copy  # type: ignore[method-assign]
        return self

    def __exit__(self, *_: Any) -> None:
        self.open.set()
        stage._Late.copy = self._copy  # type: ignore[method-assign]


@pytest.fixture
def gate() -> Iterator[Gate]:
    with Gate() as made:
        yield made


class Model(nn.Module):
    """A trained layer, a frozen one, a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(WIDTH, WIDTH)
        self.frozen = nn.Linear(WIDTH, WIDTH).requires_grad_(False)
        self.register_buffer("seen", torch.zeros(WIDTH, WIDTH))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layer(x)


class Mine(torch.optim.SGD):
    """An optimizer of a user's own, with a `step` of its own."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for parameter in group["params"]:
                parameter.mul_(0.5)


def adamw(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=0.1)


def trained(make: Callable[[Any], torch.optim.Optimizer] = adamw) -> tuple[Model, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = Model()
    optimizer = make(model.layer.parameters())
    grads(model)
    optimizer.step()
    return model, optimizer


def grads(model: nn.Module) -> None:
    for parameter in model.parameters():
        if parameter.requires_grad:
            parameter.grad = torch.ones_like(parameter)


def look(model: nn.Module, optimizer: torch.optim.Optimizer) -> Any:
    return copy.deepcopy((model.state_dict(), optimizer.state_dict()))


def assert_saved(url: Any, want: Any, make: Callable[[Any], torch.optim.Optimizer] = adamw) -> None:
    torch.manual_seed(1)
    model = Model()
    optimizer = make(model.layer.parameters())
    with CheckpointManager(url, {"model": model, "optimizer": optimizer}) as ckpt:
        ckpt.restore(check_fingerprints=True)
    torch.testing.assert_close((model.state_dict(), optimizer.state_dict()), want, rtol=0, atol=0)


def in_thread(act: Callable[[], object]) -> threading.Thread:
    thread = threading.Thread(target=act, daemon=True)
    thread.start()
    return thread


@pytest.mark.parametrize("make", [adamw, Mine])
def test_an_optimizer_waits_for_the_copy_before_it_steps(tmp_path: Any, gate: Gate, make: Any) -> None:
    model, optimizer = trained(make)
    want = look(model, optimizer)
    with CheckpointManager(tmp_path, {"model": model, "optimizer": optimizer}) as ckpt:
        handle = ckpt.save(1)  # returns, though nothing large is copied
        assert gate.reached.wait(60)
        grads(model)
        stepping = in_thread(optimizer.step)
        stepping.join(0.2)
        assert stepping.is_alive(), "it stepped over a copy under way"
        gate.open.set()
        stepping.join(60)
        handle.result()
    assert_saved(tmp_path, want, make)


def test_so_does_one_that_the_manager_does_not_know(tmp_path: Any, gate: Gate) -> None:
    model, optimizer = trained()
    other = torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=1.0)
    with CheckpointManager(tmp_path, {"model": model, "optimizer": optimizer}) as ckpt:
        ckpt.save(1)
        stepping = in_thread(other.step)
        stepping.join(0.2)
        assert stepping.is_alive()
        gate.open.set()
        stepping.join(60)


def test_so_does_one_whose_step_is_compiled(tmp_path: Any) -> None:
    model, optimizer = trained(lambda parameters: torch.optim.SGD(parameters, lr=0.1))
    state = {"model": model, "optimizer": optimizer}
    compiled = torch.compile(optimizer.step, backend="eager")
    with CheckpointManager(tmp_path, state) as ckpt:
        grads(model)
        compiled()  # before the first save: what it traced must still wait
        want = look(model, optimizer)
        with Gate() as gate:
            handle = ckpt.save(1)
            assert gate.reached.wait(60)
            stepping = in_thread(compiled)
            stepping.join(0.5)
            assert stepping.is_alive()
            gate.open.set()
            stepping.join(60)
            handle.result()
    assert_saved(tmp_path, want, lambda parameters: torch.optim.SGD(parameters, lr=0.1))


def test_what_is_not_an_optimizers_alone_is_copied_before_save_returns(tmp_path: Any, gate: Gate) -> None:
    model, optimizer = trained()
    average = torch.optim.swa_utils.AveragedModel(model)
    table = torch.zeros(WIDTH, WIDTH)
    state = TrainingState(model=model, optimizer=optimizer, ema=average, table=table)
    want = look(model, optimizer)
    averaged = copy.deepcopy(average.state_dict())
    with CheckpointManager(tmp_path, state) as ckpt:
        handle = ckpt.save(1)
        assert gate.reached.wait(60)
        with torch.no_grad():
            model.seen.fill_(7)
            model.frozen.weight.fill_(7)
            table.fill_(7)
            for parameter in average.parameters():
                parameter.fill_(7)
        optimizer.param_groups[0]["lr"] = 7.0
        gate.open.set()
        handle.result()
    assert_saved_parts(tmp_path, want, averaged)


def assert_saved_parts(url: Any, want: Any, averaged: Any) -> None:
    model, optimizer = trained()
    average = torch.optim.swa_utils.AveragedModel(model)
    table = torch.ones(WIDTH, WIDTH)
    with CheckpointManager(url, TrainingState(model=model, optimizer=optimizer, ema=average, table=table)) as ckpt:
        ckpt.restore()
    torch.testing.assert_close((model.state_dict(), optimizer.state_dict()), want, rtol=0, atol=0)
    torch.testing.assert_close(average.state_dict(), averaged, rtol=0, atol=0)
    assert not table.any()


@pytest.mark.parametrize("what", ["parameter", "moment"])
def test_what_something_else_changes_under_the_copy_fails_the_save_by_name(
    tmp_path: Any, gate: Gate, what: str
) -> None:
    model, optimizer = trained()
    with CheckpointManager(tmp_path, {"model": model, "optimizer": optimizer}) as ckpt:
        ckpt.save(1)
        assert gate.reached.wait(60)
        weight = model.layer.weight
        changed = weight if what == "parameter" else optimizer.state[weight]["exp_avg"]
        changed.data.clamp_(-1e-3, 1e-3)
        gate.open.set()
        with pytest.raises(SaveError, match=r"layer\.weight.*was changed while it was copied.*stage='block'"):
            ckpt.save(2)
        assert ckpt.checkpoints() == []
        ckpt.save(3)
    assert [info.step for info in ckpt.checkpoints()] == [3]


def test_a_ctrl_c_that_keeps_the_copy_from_beginning_leaves_no_optimizer_waiting(
    tmp_path: Any, monkeypatch: Any
) -> None:
    model, optimizer = trained()
    start = threading.Thread.start

    def interrupted(self: threading.Thread) -> None:
        if self.name == "resilio-stage":
            raise KeyboardInterrupt
        start(self)

    with CheckpointManager(tmp_path, {"model": model, "optimizer": optimizer}) as ckpt:
        with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
            patch.setattr(threading.Thread, "start", interrupted)
            ckpt.save(1)
        grads(model)
        stepping = in_thread(optimizer.step)
        stepping.join(60)
        assert not stepping.is_alive()
        want = look(model, optimizer)
        ckpt.save(2).result()
    assert_saved(tmp_path, want)


def test_stage_block_copies_all_before_save_returns(tmp_path: Any) -> None:
    model, optimizer = trained()
    want = look(model, optimizer)
    with CheckpointManager(tmp_path, {"model": model, "optimizer": optimizer}, stage="block") as ckpt:
        ckpt.save(1)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.zero_()
            for entries in optimizer.state.values():
                entries["exp_avg"].zero_()
    assert_saved(tmp_path, want)


def test_a_stage_there_is_not_is_refused(tmp_path: Any) -> None:
    with pytest.raises(ConfigError, match="'overlap' and 'block'"):
        CheckpointManager(tmp_path, {"n": {"x": 1}}, stage="late")  # type: ignore[arg-type]


def test_nothing_is_left_in_torch_when_a_manager_ends(tmp_path: Any) -> None:
    before = len(torch_optimizer._global_optimizer_pre_hooks)
    model, optimizer = trained()
    with CheckpointManager(tmp_path, {"model": model, "optimizer": optimizer}):
        assert len(torch_optimizer._global_optimizer_pre_hooks) == before + 1
    assert len(torch_optimizer._global_optimizer_pre_hooks) == before
    with CheckpointManager(tmp_path, {"model": model, "optimizer": optimizer}, mode="sync"):
        assert len(torch_optimizer._global_optimizer_pre_hooks) == before
    dropped = CheckpointManager(tmp_path, {"model": model, "optimizer": optimizer})
    del dropped
    gc.collect()
    assert len(torch_optimizer._global_optimizer_pre_hooks) == before


def test_an_optimizer_of_a_forked_child_waits_for_nothing(tmp_path: Any, gate: Gate) -> None:
    model, optimizer = trained()
    with CheckpointManager(tmp_path, {"model": model, "optimizer": optimizer}) as ckpt:
        ckpt.save(1)
        assert gate.reached.wait(60)
        child = os.fork()
        if child == 0:
            torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=1.0).step()
            os._exit(42)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 42
        gate.open.set()


def train_over_saves(rank: int, world: int, url: str, strategy: str) -> None:
    """A loop that saves at every step: each checkpoint is that of its own step."""
    from workload import assert_same, build, snapshot

    structure._EARLY = 0  # all of its small tensors late
    job = build(strategy, rank, world)
    want = {}
    with CheckpointManager(url, job.state(), timeout_s=60) as ckpt:
        ckpt.restore()
        for step in range(1, 7):
            job.train_step()
            want[step] = snapshot(job)
            ckpt.step(step, last=step == 6)
            ckpt.save(step)
    twin = build(strategy, rank, world)
    with CheckpointManager(url, twin.state(), mode="sync", timeout_s=60) as ckpt:
        for step, was in want.items():
            twin.train_step()
            assert ckpt.restore(step, check_fingerprints=True).step == step
            assert_same(snapshot(twin), was, f"step {step}")


@pytest.mark.parametrize(("strategy", "world"), [("single", 1), ("fsdp2", 2), ("ddp", 2)])
def test_each_checkpoint_of_a_loop_is_of_its_own_step(tmp_path: Any, strategy: str, world: int) -> None:
    run_world(train_over_saves, world, str(tmp_path), strategy, init=world > 1)
