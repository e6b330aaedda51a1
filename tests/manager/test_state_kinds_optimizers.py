"""Every kind of optimizer: saved, restored exactly, and trained on bit for bit."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from manager.state_jobs import Job, assert_undone, loss_of, net, survives
from torch import nn


@pytest.fixture(autouse=True, scope="module")
def _one_thread() -> Iterator[None]:
    """Nothing here is large enough for two."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


class Lookahead(torch.optim.Optimizer):
    """A stranger's: state under names of its own, nested, and some that belongs to no parameter."""

    def __init__(self, params: Any, lr: float = 0.1) -> None:
        super().__init__(params, {"lr": lr, "schedule": {"every": 2, "names": ("fast", "slow")}})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        total = self.state["all"]
        total["calls"] = total.get("calls", 0) + 1
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is None:
                    continue
                own = self.state[p]
                if not own:
                    own["slow weights"] = p.clone()
                    own["past"] = []
                    own["stats"] = {"norms": {1: torch.zeros(()), 2: torch.zeros(())}, "seen": (0, None), "tag": "x"}
                own["past"] = [*own["past"], p.grad.clone()][-2:]
                own["stats"]["norms"][2] += p.grad.norm()
                own["stats"]["seen"] = (own["stats"]["seen"][0] + 1, float(p.grad.sum()))
                p.sub_(sum(own["past"]) + own["stats"]["norms"][2] * 0.01, alpha=group["lr"])
                if total["calls"] % group["schedule"]["every"] == 0:
                    own["slow weights"].lerp_(p, 0.5)
                    p.copy_(own["slow weights"])


class Outer(torch.optim.SGD):
    """Overrides both sides of its state: a counter of its own, and a tensor beside those of the parameters."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, lr=0.1, momentum=0.9)
        self.rounds, self.scale = 0, torch.ones(2)

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        self.rounds += 1
        self.scale *= 0.9
        for group in self.param_groups:
            group["lr"] = 0.1 * float(self.scale[0]) / self.rounds
        super().step(closure)

    def state_dict(self) -> dict[str, Any]:
        return {**super().state_dict(), "outer": {"rounds": self.rounds, "scale": self.scale}}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        outer = state_dict.pop("outer")
        super().load_state_dict(state_dict)
        self.rounds = outer["rounds"]
        self.scale.copy_(outer["scale"])


class Foreign(torch.optim.Optimizer):
    """Its state dict has nothing of the usual shape."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {"lr": 0.1})
        self.velocity = [torch.zeros_like(p) for p in self.param_groups[0]["params"]]

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for p, v in zip(self.param_groups[0]["params"], self.velocity, strict=True):
            p.sub_(v.mul_(0.9).add_(p.grad), alpha=0.1)

    def state_dict(self) -> dict[str, Any]:
        return {"velocity": list(self.velocity), "kind": "foreign"}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.velocity = list(state_dict["velocity"])


class SharedCounter(torch.optim.Optimizer):
    """All parameters have one and the same counter, advanced in place; the moments of a pair are one tensor as well."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {"lr": 0.1})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        first = self.param_groups[0]["params"][0]
        if not self.state:
            counter, pair = torch.zeros(()), torch.zeros(2)
            for p in self.param_groups[0]["params"]:
                self.state[p] = {"step": counter, "pair": {"mine": pair, "ours": [pair]}}
        self.state[first]["step"] += 1
        self.state[first]["pair"]["mine"] += first.grad.mean()
        for p in self.param_groups[0]["params"]:
            p.sub_(p.grad, alpha=0.1 / float(self.state[p]["step"]))
            p.sub_(self.state[p]["pair"]["ours"][0].sum())


OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "sgd": lambda ps: torch.optim.SGD(ps, lr=0.1),
    "sgd-momentum": lambda ps: torch.optim.SGD(ps, lr=0.1, momentum=0.9, nesterov=True),
    "adam-amsgrad": lambda ps: torch.optim.Adam(ps, lr=0.01, amsgrad=True),
    "adam-foreach": lambda ps: torch.optim.Adam(ps, lr=0.01, foreach=True),
    "adamw-fused": lambda ps: torch.optim.AdamW(ps, lr=0.01, fused=True),
    "adamw-tensor-lr": lambda ps: torch.optim.AdamW(ps, lr=torch.tensor(0.01), foreach=False),
    "adamw-fused-tensor-lr": lambda ps: torch.optim.AdamW(ps, lr=torch.tensor(0.01), fused=True),
    "adamw-maximize": lambda ps: torch.optim.AdamW(ps, lr=0.01, betas=(0.8, 0.9), maximize=True),
    "adagrad": lambda ps: torch.optim.Adagrad(ps, lr=0.1, lr_decay=0.1, initial_accumulator_value=0.1),
    "rmsprop": lambda ps: torch.optim.RMSprop(ps, lr=0.01, centered=True, momentum=0.9),
    "adafactor": lambda ps: torch.optim.Adafactor(ps, lr=0.01),
    "nadam": lambda ps: torch.optim.NAdam(ps, lr=0.01),
    "radam": lambda ps: torch.optim.RAdam(ps, lr=0.01),
    "adadelta": lambda ps: torch.optim.Adadelta(ps),
    "adamax": lambda ps: torch.optim.Adamax(ps),
    "asgd": lambda ps: torch.optim.ASGD(ps, t0=2),
    "rprop": lambda ps: torch.optim.Rprop(ps),
    "muon": lambda ps: torch.optim.Muon([p for p in ps if p.dim() == 2], lr=0.01),
    "lookahead": Lookahead,
    "shared-counter": SharedCounter,
    "overridden": Outer,
    "foreign": Foreign,
}


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_optimizers(tmp_path, name):
    def make() -> Job:
        model = net()
        optimizer = OPTIMIZERS[name](list(model.parameters()))

        def step() -> float:
            optimizer.zero_grad()
            loss = loss_of(model)
            loss.backward()
            optimizer.step()
            return loss.item()

        return Job({"model": model, "optimizer": optimizer}, step)

    survives(tmp_path, make)
    if name in ("sgd-momentum", "adamw-fused-tensor-lr", "lookahead", "shared-counter", "overridden", "foreign"):
        assert_undone(tmp_path, make)


@pytest.mark.parametrize("line_search", [None, "strong_wolfe"])
def test_lbfgs_with_its_lists_on_the_first_parameter(tmp_path, line_search):
    def make() -> Job:
        model = nn.Sequential(nn.Linear(5, 4), nn.Tanh(), nn.Linear(4, 1))
        optimizer = torch.optim.LBFGS(
            model.parameters(), lr=0.5, max_iter=3, history_size=5, line_search_fn=line_search
        )

        def step() -> float:
            x = torch.randn(6, 5)

            def closure() -> torch.Tensor:
                optimizer.zero_grad()
                loss = (model(x) - x.sum(1, keepdim=True)).square().mean()
                loss.backward()
                return loss

            return float(optimizer.step(closure).detach())

        return Job({"model": model, "optimizer": optimizer}, step)

    survives(tmp_path, make)


def test_sparse_adam_beside_another_optimizer(tmp_path):
    def make() -> Job:
        table, head = nn.Embedding(9, 4, sparse=True), nn.Linear(4, 1)
        sparse = torch.optim.SparseAdam(table.parameters(), lr=0.1)
        dense = torch.optim.Adam(head.parameters(), lr=0.1)

        def step() -> float:
            loss = head(table(torch.randint(9, (3,)))).square().mean()
            loss.backward()
            for one in (sparse, dense):
                one.step()
                one.zero_grad()
            return loss.item()

        model = nn.ModuleDict({"table": table, "head": head})
        return Job({"model": model, "optimizer": {"sparse": sparse, "dense": dense}}, step)

    survives(tmp_path, make)
