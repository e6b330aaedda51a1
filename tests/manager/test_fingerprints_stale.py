"""A checkpoint whose trained parameters are all as in the one before is told of, unless nothing was to be learned."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import nn
from workload import build

from resilio import CheckpointManager
from resilio.testing.worlds import run_world


def make(optimizer: Callable[..., torch.optim.Optimizer] = torch.optim.AdamW, lr: object = 0.1) -> tuple:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4))
    model[1].weight.requires_grad_(False)
    return model, optimizer([p for p in model.parameters() if p.requires_grad], lr=lr)


def step(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    model(torch.randn(5, 3)).square().sum().backward()
    optimizer.step()
    optimizer.zero_grad()


def warned(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if "nothing was learned" in record.getMessage()]


def restored_by_somebody(model: nn.Module, optimizer: torch.optim.Optimizer) -> Callable[[], None]:
    """Training that trains, and puts old values back: counters move, values do not."""
    before = {key: value.clone() for key, value in model.state_dict().items()}

    def train() -> None:
        step(model, optimizer)
        model.load_state_dict(before)

    return train


@pytest.mark.parametrize("kind", [torch.optim.AdamW, torch.optim.SGD])
def test_parameters_that_stay_as_they_were_are_told_of_with_both_steps(tmp_path, caplog, kind):
    model, optimizer = make(kind)
    with CheckpointManager(tmp_path, {"model": model, "optimizer": optimizer}, mode="sync") as ckpt:
        step(model, optimizer)
        ckpt.save(1)
        train = restored_by_somebody(model, optimizer)
        train()
        ckpt.save(2)
        (text,) = warned(caplog)
        assert "from step 1 to step 2" in text
        step(model, optimizer)  # BatchNorm's buffers alone have moved before, and its frozen weight never does
        ckpt.save(3)
        assert len(warned(caplog)) == 1
        ckpt.restore(2)  # live state is another now
        ckpt.save(4)
        assert len(warned(caplog)) == 1


@pytest.mark.parametrize("lr", [0.0, torch.tensor(0.0)], ids=["number", "tensor"])
def test_not_at_a_learning_rate_of_zero(tmp_path, caplog, lr):
    model, optimizer = make(lr=lr)
    with CheckpointManager(tmp_path, {"model": model, "optimizer": optimizer}, mode="sync") as ckpt:
        for number in (1, 2):
            step(model, optimizer)
            ckpt.save(number)
        assert not warned(caplog)
        optimizer.param_groups[0]["lr"] = lr + 0.1
        restored_by_somebody(model, optimizer)()
        ckpt.save(3)
    assert len(warned(caplog)) == 1


def test_not_when_steps_were_skipped_nor_without_an_optimizer_or_fingerprints(tmp_path, caplog):
    model, optimizer = make()
    step(model, optimizer)
    states = {"skipped": {"model": model, "optimizer": optimizer}, "alone": {"model": model}, "without": None}
    for name, state in states.items():
        live = state or states["skipped"]
        with CheckpointManager(tmp_path / name, live, mode="sync", fingerprints=name != "without") as ckpt:
            ckpt.save(1)
            if name == "without":
                restored_by_somebody(model, optimizer)()
            ckpt.save(2)  # as a GradScaler does: the loop goes on, the optimizer does not
    assert not warned(caplog)


def scaled(
    kind: Callable[..., torch.optim.Optimizer],
) -> tuple[nn.Module, torch.optim.Optimizer, torch.amp.GradScaler]:
    torch.manual_seed(0)
    model = nn.Linear(3, 4)
    scaler = torch.amp.GradScaler(device="cpu", init_scale=1024.0, growth_interval=3)
    return model, kind(model.parameters(), lr=0.1), scaler


def scaled_step(
    model: nn.Module, optimizer: torch.optim.Optimizer, scaler: torch.amp.GradScaler, *, overflows: bool
) -> None:
    loss = model(torch.ones(5, 3)).square().sum()
    scaler.scale(loss * (float("inf") if overflows else 1.0)).backward()
    scaler.step(optimizer)
    scaler.update()
    optimizer.zero_grad()


@pytest.mark.parametrize("named", [False, True])
@pytest.mark.parametrize("kind", [torch.optim.SGD, torch.optim.AdamW])
def test_not_when_a_scaler_has_skipped_every_step_since_whatever_the_optimizer_counts(tmp_path, caplog, kind, named):
    model, optimizer, scaler = scaled(kind)
    live = {"model": model, "optimizer": optimizer, "scaler": {"only": scaler} if named else scaler}
    with CheckpointManager(tmp_path, live, mode="sync") as ckpt:
        scaled_step(model, optimizer, scaler, overflows=False)
        ckpt.save(1)
        before = model.weight.detach().clone()
        for _ in range(3):
            scaled_step(model, optimizer, scaler, overflows=True)
        assert torch.equal(model.weight, before) and scaler.get_scale() == 128.0
        ckpt.save(2)
    assert not warned(caplog)


def test_a_scaler_that_has_not_skipped_the_last_step_excuses_nothing(tmp_path, caplog):
    model, optimizer, scaler = scaled(torch.optim.SGD)
    with CheckpointManager(tmp_path, {"model": model, "optimizer": optimizer, "scaler": scaler}, mode="sync") as ckpt:
        before = {key: value.clone() for key, value in model.state_dict().items()}

        def train(*overflows: bool) -> None:
            for one in overflows:
                scaled_step(model, optimizer, scaler, overflows=one)
            model.load_state_dict(before)

        ckpt.save(1)
        train(False)  # the scale is as it was
        ckpt.save(2)
        train(True, False)  # it is lower, and a step was taken since
        ckpt.save(3)
        train(False, False)  # it has just grown: no steps since, as after a skipped one
        assert scaler.state_dict()["_growth_tracker"] == 0
        ckpt.save(4)
    assert [text.partition(":")[0] for text in warned(caplog)] == [
        f"nothing was learned from step {step} to step {step + 1}" for step in (1, 2, 3)
    ]


def put_back(model: nn.Module, values: list[torch.Tensor], but: str = "none") -> None:
    with torch.no_grad():
        for (name, p), value in zip(model.named_parameters(), values, strict=True):
            if name != but:
                p.copy_(value)


def trains(rank: int, world: int, url: str) -> list[str]:
    import logging

    said: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: said.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("resilio").addHandler(handler)
    job = build("fsdp2", rank, world)
    with CheckpointManager(url, {"model": job.model, "optimizer": job.optimizer}, mode="sync", timeout_s=60) as ckpt:
        job.train_step()
        ckpt.save(1)
        before = [p.detach().clone() for p in job.model.parameters()]
        job.train_step()
        put_back(job.model, before)
        ckpt.save(2)
        job.train_step()
        put_back(job.model, before, but="gain")  # one element, on one rank: that is enough
        ckpt.save(3)
    return [text for text in said if "nothing was learned" in text]


def test_shares_of_all_ranks_are_judged_by_rank_0(tmp_path):
    first, second = run_world(trains, 2, f"file://{tmp_path}")
    assert len(first) == 1 and "from step 1 to step 2" in first[0] and second == []


@pytest.mark.parametrize("names", [("model", "opt"), ("net", "optimizer"), ("net", "opt")], ids=" ".join)
def test_it_is_told_whatever_model_and_optimizer_are_called_unless_steps_were_skipped(tmp_path, caplog, names):
    model, optimizer = make()
    with CheckpointManager(tmp_path, dict(zip(names, (model, optimizer), strict=True)), mode="sync") as ckpt:
        step(model, optimizer)
        ckpt.save(1)
        ckpt.save(2)  # its counters stood still as well
        assert not warned(caplog)
        restored_by_somebody(model, optimizer)()
        ckpt.save(3)
        assert len(warned(caplog)) == 1
