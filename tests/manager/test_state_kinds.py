"""Every kind of model, optimizer, scheduler, scaler and loader: saved, restored exactly, and trained on bit for bit."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import lr_scheduler as lrs
from torch.optim import swa_utils
from workload import assert_same, rng

from resilio import CheckpointManager, TrainingState, replicated
from resilio.errors import RestoreError


@pytest.fixture(autouse=True, scope="module")
def _one_thread() -> Iterator[None]:
    """Nothing here is large enough for two."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@dataclass
class Job:
    """A training job: what is saved of it, and one step of it."""

    state: dict[str, Any]
    step: Callable[[], Any]


Make = Callable[[], Job]


def seen(value: Any) -> Any:
    """A copy of all state below `value`."""
    if isinstance(value, dict):
        return {name: seen(below) for name, below in value.items()}
    return copy.deepcopy(value.state_dict() if hasattr(value, "state_dict") else value)


def survives(tmp_path: Any, make: Make) -> None:
    """A stopped job goes on like one that never stopped, be it new, or used with state of its own to lose."""
    url = f"file://{tmp_path}/run"
    torch.manual_seed(0)
    job = make()
    with CheckpointManager(url, job.state, mode="async") as ckpt:
        ckpt.restore()
        for _ in range(3):
            job.step()
        before = seen(job.state), rng()
        ckpt.save(3)
        assert_same((seen(job.state), rng()), before)
        want = [job.step() for _ in range(3)]
    end = seen(job.state), rng()
    for used in (False, True):
        torch.manual_seed(7)
        again = make()
        if used:
            again.step()
            again.step()
        with CheckpointManager(url, again.state) as ckpt:
            report = ckpt.restore()
        assert {one.how for one in report.outcomes} == {"exact"}, str(report)
        assert_same((seen(again.state), rng()), before)
        assert_same([again.step() for _ in range(3)], want)
        assert_same((seen(again.state), rng()), end)


class Refuses:
    """Will not be loaded."""

    def state_dict(self) -> dict[str, Any]:
        return {"x": 1}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        if state["x"] == 1:
            state["x"] = 2  # what it is given is its own
            raise ValueError("not today")


class Undoable(Refuses):
    """Will not be loaded but for its own state, as an undo does."""

    def state_dict(self) -> dict[str, Any]:
        return {"x": 0}


def assert_undone(tmp_path: Any, make: Make) -> None:
    """A restore that fails after all the rest was applied leaves a used job as it was."""
    url = f"file://{tmp_path}/undo"
    torch.manual_seed(0)
    job = make()
    with CheckpointManager(url, {**job.state, "zz": Refuses()}) as ckpt:
        ckpt.restore()
        job.step()
        ckpt.save(1)
    torch.manual_seed(7)
    again = make()
    again.step()
    again.step()
    before = seen(again.state), rng()
    with (
        CheckpointManager(url, {**again.state, "zz": Undoable()}) as ckpt,
        pytest.raises(RestoreError, match=r"zz.*not today"),
    ):
        ckpt.restore()
    assert_same((seen(again.state), rng()), before)


def net(dtype: torch.dtype = torch.float32) -> nn.Sequential:
    model = nn.Sequential(nn.Linear(5, 7), nn.BatchNorm1d(7), nn.Tanh(), nn.Dropout(0.2), nn.Linear(7, 3))
    return model.to(dtype)


def loss_of(model: nn.Module, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return model(torch.randn(4, 5).to(dtype)).float().square().mean()


# ---------------------------------------------------------------------------------------------------------- optimizers


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


# ---------------------------------------------------------------------------------------------------------- schedulers


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


# -------------------------------------------------------------------------------------------- averages, several models


def averaged(model: nn.Module, how: str) -> tuple[nn.Module, Callable[[], None]]:
    if how == "copy":
        ema = copy.deepcopy(model).requires_grad_(False)

        def update() -> None:
            for mine, theirs in zip(ema.parameters(), model.parameters(), strict=True):
                mine.lerp_(theirs.detach(), 0.1)

        return ema, update
    fn = swa_utils.get_ema_multi_avg_fn(0.9) if how == "ema" else None
    average = swa_utils.AveragedModel(model, multi_avg_fn=fn, use_buffers=how == "ema")
    return average, lambda: average.update_parameters(model)


@pytest.mark.parametrize("how", ["swa", "ema", "copy"])
def test_averaged_models(tmp_path, how):
    def make() -> Job:
        model = net()
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
        ema, update = averaged(model, how)

        def step() -> Any:
            optimizer.zero_grad()
            loss = loss_of(model)
            loss.backward()
            optimizer.step()
            update()
            with torch.no_grad():
                return loss.item(), ema.eval()(torch.ones(1, 5)).sum().item()

        return Job({"model": model, "optimizer": optimizer, "ema": ema}, step)

    survives(tmp_path, make)


@pytest.mark.parametrize("shared", [False, True], ids=["apart", "shared"])
def test_a_gan_with_two_of_everything(tmp_path, shared):
    """Shared: one embedding in both models, and a parameter in both optimizers."""

    def make() -> Job:
        gen, disc = nn.Sequential(nn.Embedding(6, 5), nn.Linear(5, 5)), nn.Sequential(nn.Linear(5, 5), nn.Linear(5, 1))
        if shared:
            disc[0].weight = gen[1].weight
            disc.table = gen[0]
        optimizer = {
            "gen": torch.optim.Adam(gen.parameters(), lr=0.01),
            "disc": torch.optim.RMSprop(disc.parameters(), lr=0.01),
        }
        scheduler = {name: lrs.ExponentialLR(one, 0.9) for name, one in optimizer.items()}

        def step() -> Any:
            losses = []
            for name, sign in (("disc", 1), ("gen", -1)):
                made = gen(torch.randint(6, (4,)))
                made = made if name == "gen" else made.detach()
                loss = sign * disc[1](disc[0](made)).mean() + disc[1](disc[0](torch.randn(4, 5))).square().mean()
                loss.backward()
                optimizer[name].step()
                scheduler[name].step()
                for one in optimizer.values():
                    one.zero_grad()
                losses.append(loss.item())
            return losses

        return Job({"model": {"gen": gen, "disc": disc}, "optimizer": optimizer, "scheduler": scheduler}, step)

    survives(tmp_path, make)
    if shared:
        job = make()
        with CheckpointManager(f"file://{tmp_path}/run", job.state) as ckpt:
            ckpt.restore()
        models = job.state["model"]
        assert models["gen"][1].weight is models["disc"][0].weight
        assert models["gen"][0] is models["disc"].table


# -------------------------------------------------------------------------------------------- precision, frozen, scaler


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
@pytest.mark.parametrize("name", ["adamw-fused", "sgd-momentum", "adafactor"])
def test_models_of_other_precision(tmp_path, dtype, name):
    def make() -> Job:
        model = net(dtype)
        optimizer = OPTIMIZERS[name](list(model.parameters()))

        def step() -> float:
            optimizer.zero_grad()
            loss = loss_of(model, dtype)
            loss.backward()
            optimizer.step()
            return loss.item()

        return Job({"model": model, "optimizer": optimizer}, step)

    survives(tmp_path, make)


def test_bf16_weights_with_fp32_masters_in_the_optimizer(tmp_path):
    """The optimizer owns the masters; they are passed as a module of their own."""

    def make() -> Job:
        model = net(torch.bfloat16)
        masters = nn.ParameterList(p.detach().float() for p in model.parameters())
        optimizer = torch.optim.AdamW(masters.parameters(), lr=0.01)

        def step() -> float:
            loss = loss_of(model, torch.bfloat16)
            loss.backward()
            for p, master in zip(model.parameters(), masters, strict=True):
                master.grad, p.grad = p.grad.float(), None
            optimizer.step()
            with torch.no_grad():
                for p, master in zip(model.parameters(), masters, strict=True):
                    p.copy_(master)
            return loss.item()

        return Job({"model": model, "masters": masters, "optimizer": optimizer}, step)

    survives(tmp_path, make)


@pytest.mark.parametrize("inside", [False, True], ids=["left-out", "in-the-optimizer"])
def test_frozen_parts(tmp_path, inside):
    def make() -> Job:
        model = net()
        model[0].requires_grad_(False)
        optimizer = torch.optim.Adam([p for p in model.parameters() if inside or p.requires_grad], lr=0.01)

        def step() -> float:
            optimizer.zero_grad()
            loss = loss_of(model)
            loss.backward()
            optimizer.step()
            return loss.item()

        return Job({"model": model, "optimizer": optimizer}, step)

    survives(tmp_path, make)
    job = make()
    with CheckpointManager(f"file://{tmp_path}/run", job.state) as ckpt:
        ckpt.restore()
    assert [p.requires_grad for p in job.state["model"].parameters()] == [False] * 2 + [True] * 4


def test_a_grad_scaler_that_grows_and_backs_off(tmp_path):
    scales = []

    def make() -> Job:
        model = nn.Linear(5, 3)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        scaler = torch.amp.GradScaler("cpu", init_scale=2.0**14, growth_interval=2)

        def step() -> Any:
            optimizer.zero_grad()
            with torch.autocast("cpu", torch.float16):
                loss = (model(torch.randn(4, 5)) * 30).square().mean()
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()
            scales.append(scaler.get_scale())
            return loss.item(), scales[-1]

        return Job({"model": model, "optimizer": optimizer, "scaler": scaler}, step)

    survives(tmp_path, make)
    assert len(set(scales)) > 1


# -------------------------------------------------------------------------------------------------------------- loaders


class Positions(torch.utils.data.Sampler):
    """Hands out shuffled positions without end; where it goes on is counted by the loop, not by what it handed out."""

    def __init__(self, size: int, seed: int) -> None:
        self.size, self.seed, self.done = size, seed, 0

    def __iter__(self) -> Iterator[int]:
        position = self.done
        while True:
            epoch, at = divmod(position, self.size)
            order = torch.randperm(self.size, generator=torch.Generator().manual_seed(self.seed + epoch))
            yield int(order[at])
            position += 1

    def state_dict(self) -> dict[str, Any]:
        return {"seed": self.seed, "done": self.done}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.seed, self.done = state["seed"], state["done"]


class Squares(torch.utils.data.Dataset):
    def __getitem__(self, i: int) -> torch.Tensor:
        return torch.full((5,), float(i * i))


def test_a_plain_data_loader_with_workers_over_a_sampler_with_state(tmp_path):
    """The workers have read ahead when it is saved. A generator of its own: else making its iterator draws from the
    global one."""

    def make() -> Job:
        model = nn.Sequential(nn.Linear(5, 4), nn.Dropout(0.5), nn.Linear(4, 1))
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-6)
        sampler = Positions(10, seed=int(torch.randint(100, ())))
        loader = torch.utils.data.DataLoader(
            Squares(), batch_size=3, sampler=sampler, num_workers=2, generator=torch.Generator()
        )
        batches: list[Iterator[torch.Tensor]] = []

        def step() -> Any:
            if not batches:
                batches.append(iter(loader))
            x = next(batches[0])
            sampler.done += len(x)
            loss = model(x).square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            return x, loss.item()

        return Job({"model": model, "optimizer": optimizer, "dataloader": replicated(sampler)}, step)

    url = f"file://{tmp_path}"
    torch.manual_seed(0)
    job = make()
    with CheckpointManager(url, TrainingState(**job.state)) as ckpt:
        ckpt.restore()
        for _ in range(3):
            job.step()
        ckpt.save(3)
        want = [job.step() for _ in range(3)]
    torch.manual_seed(7)
    again = make()
    with CheckpointManager(url, again.state) as ckpt:
        ckpt.restore()
    assert_same([again.step() for _ in range(3)], want)
