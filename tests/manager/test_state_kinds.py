"""Every kind of model, scaler and loader: saved, restored exactly, and trained on bit for bit."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from manager.state_jobs import Job, loss_of, net, survives
from torch import nn
from torch.optim import lr_scheduler as lrs
from torch.optim import swa_utils
from workload import assert_same

from resilio import CheckpointManager, TrainingState, replicated


@pytest.fixture(autouse=True, scope="module")
def _one_thread() -> Iterator[None]:
    """Nothing here is large enough for two."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


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


PRECISE: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "adamw-fused": lambda ps: torch.optim.AdamW(ps, lr=0.01, fused=True),
    "sgd-momentum": lambda ps: torch.optim.SGD(ps, lr=0.1, momentum=0.9, nesterov=True),
    "adafactor": lambda ps: torch.optim.Adafactor(ps, lr=0.01),
}


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
@pytest.mark.parametrize("name", PRECISE)
def test_models_of_other_precision(tmp_path, dtype, name):
    def make() -> Job:
        model = net(dtype)
        optimizer = PRECISE[name](list(model.parameters()))

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
