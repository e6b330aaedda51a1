"""Every kind of learning-rate scheduler: saved, restored exactly, and trained on bit for bit."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from manager.state_jobs import Job, assert_undone, loss_of, net, survives
from torch.optim import lr_scheduler as lrs
from torch.optim import swa_utils


@pytest.fixture(autouse=True, scope="module")
def _one_thread() -> Iterator[None]:
    """Nothing here is large enough for two."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def half(epoch: int) -> float:
    return 0.5**epoch


class Warm:
    """A callable with state of its own, which torch saves as its `__dict__`."""

    def __init__(self) -> None:
        self.calls = 0

    def __call__(self, epoch: int) -> float:
        self.calls += 1
        return 1 / (1 + self.calls)


class Zigzag(lrs.LRScheduler):
    """A stranger's scheduler: attributes of several types."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self.history: list[float] = []
        self.odd = {1: "one", "best": math.inf, "pair": (1, 2.5)}
        self.phase = torch.zeros(2)
        super().__init__(optimizer)

    def get_lr(self) -> list[Any]:
        self.phase = self.phase + 1
        self.history.append(float(self.phase[0]))
        return [base / (1 + self.history[-1] % 3) for base in self.base_lrs]


class Hand:
    """No LRScheduler at all."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self.optimizer, self.n = optimizer, 0

    def step(self) -> None:
        self.n += 1
        for group in self.optimizer.param_groups:
            group["lr"] *= 0.9

    def state_dict(self) -> dict[str, Any]:
        return {"n": self.n}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.n = state["n"]


SCHEDULERS: dict[str, Callable[[Any], Any]] = {
    "step": lambda o: lrs.StepLR(o, 2, 0.5),
    "multistep": lambda o: lrs.MultiStepLR(o, [1, 4, 4], 0.5),
    "constant": lambda o: lrs.ConstantLR(o, 0.3, 4),
    "linear": lambda o: lrs.LinearLR(o, 0.3, total_iters=5),
    "exponential": lambda o: lrs.ExponentialLR(o, 0.9),
    "cosine": lambda o: lrs.CosineAnnealingLR(o, 4),
    "cosine-restarts": lambda o: lrs.CosineAnnealingWarmRestarts(o, 2, 2),
    "cyclic": lambda o: lrs.CyclicLR(o, 0.01, 0.1, 2, mode="exp_range", gamma=0.9),
    "cyclic-own-scale": lambda o: lrs.CyclicLR(o, 0.01, 0.1, 2, scale_fn=half),
    "one-cycle": lambda o: lrs.OneCycleLR(o, 0.5, total_steps=12),
    "one-cycle-linear": lambda o: lrs.OneCycleLR(o, [0.5, 0.2], total_steps=12, anneal_strategy="linear"),
    "polynomial": lambda o: lrs.PolynomialLR(o, 5, 2.0),
    "plateau": lambda o: lrs.ReduceLROnPlateau(o, patience=0, cooldown=1),
    "sequential": lambda o: lrs.SequentialLR(
        o, [lrs.LinearLR(o, 0.1, total_iters=2), lrs.CosineAnnealingLR(o, 3), lrs.MultiStepLR(o, [1])], [2, 4]
    ),
    "chained": lambda o: lrs.ChainedScheduler([lrs.ExponentialLR(o, 0.9), lrs.MultiStepLR(o, [2, 4])], o),
    "lambda": lambda o: lrs.LambdaLR(o, [half, lambda n: 1 / (1 + n)]),
    "lambda-object": lambda o: lrs.LambdaLR(o, [Warm(), Warm()]),
    "multiplicative": lambda o: lrs.MultiplicativeLR(o, lambda n: 0.9),
    "swa": lambda o: swa_utils.SWALR(o, 0.02, anneal_epochs=4),
    "own": Zigzag,
    "by-hand": Hand,
}


@pytest.mark.parametrize("tensor_lr", [False, True], ids=["float-lr", "tensor-lr"])
@pytest.mark.parametrize("name", SCHEDULERS)
def test_schedulers(tmp_path, name, tensor_lr):
    def make() -> Job:
        model = net()
        lr: Any = torch.tensor(0.1) if tensor_lr else 0.1
        other: Any = torch.tensor(0.05) if tensor_lr else 0.05
        groups = [{"params": model[0].parameters()}, {"params": model[4].parameters(), "lr": other}]
        optimizer = torch.optim.SGD(groups, lr=lr, momentum=0.9, foreach=False)
        scheduler = SCHEDULERS[name](optimizer)
        plateau = isinstance(scheduler, lrs.ReduceLROnPlateau)

        def step() -> Any:
            optimizer.zero_grad()
            loss = loss_of(model)
            loss.backward()
            optimizer.step()
            scheduler.step(*[loss.item()] * plateau)
            return loss.item(), [float(group["lr"]) for group in optimizer.param_groups]

        return Job({"model": model, "optimizer": optimizer, "scheduler": scheduler}, step)

    survives(tmp_path, make)
    if not tensor_lr:
        assert_undone(tmp_path, make)


def test_one_cycle_over_the_betas_of_adam(tmp_path):
    def make() -> Job:
        model = net()
        optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
        scheduler = lrs.OneCycleLR(optimizer, 0.1, total_steps=12)

        def step() -> Any:
            optimizer.zero_grad()
            loss = loss_of(model)
            loss.backward()
            optimizer.step()
            scheduler.step()
            return loss.item(), optimizer.param_groups[0]["betas"]

        return Job({"model": model, "optimizer": optimizer, "scheduler": scheduler}, step)

    survives(tmp_path, make)
