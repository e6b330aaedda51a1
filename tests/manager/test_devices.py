"""State on an accelerator: everything that holds on the CPU holds there. Each test runs on the CPU as well."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from manager.state_jobs import Job, survives
from torch import nn
from workload import assert_same

from resilio import CheckpointManager
from resilio.state.fingerprint import fp1

ACCELERATOR = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
WIDTH = 160  # a weight of 100 KiB: large enough to be copied late on a CPU


@pytest.fixture(params=["cpu", "accelerator"])
def device(request: Any) -> torch.device:
    if request.param == "cpu":
        return torch.device("cpu")
    if ACCELERATOR is None:
        pytest.skip("no accelerator here")
    return torch.device(ACCELERATOR.type, 0)


def model_on(device: torch.device) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH), nn.Linear(WIDTH, 3)).to(device)


def on_host(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return value.detach().cpu().clone()
    if isinstance(value, dict):
        return {key: on_host(below) for key, below in value.items()}
    return [on_host(below) for below in value] if isinstance(value, list | tuple) else value


def seen(model: nn.Module, optimizer: torch.optim.Optimizer) -> Any:
    return on_host(dict(model.state_dict())), on_host(optimizer.state_dict())


@pytest.mark.parametrize("how", ["plain", "foreach", "fused", "capturable"])
def test_a_job_stopped_and_restored_goes_on_bit_for_bit(tmp_path: Path, device: torch.device, how: str) -> None:
    if how == "capturable" and device.type == "cpu":
        pytest.skip("for accelerators only")

    def make() -> Job:
        model = model_on(device)
        options = {} if how == "plain" else {how: True}
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, **options)  # type: ignore[arg-type]
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2)

        def step() -> Any:
            loss = model(torch.randn(8, WIDTH, device=device)).square().sum()
            loss.backward()
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
            return loss.detach().cpu()

        return Job({"model": model, "optimizer": optimizer, "scheduler": scheduler}, step)

    survives(tmp_path, make)


@pytest.mark.parametrize("stage", ["overlap", "block"])
def test_a_checkpoint_is_of_its_own_moment(tmp_path: Path, device: torch.device, stage: Any) -> None:
    """Steps go on while it is written, and every save meets buffers of the one before."""
    model = model_on(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    want = {}
    with CheckpointManager(tmp_path, {"model": model, "optimizer": optimizer}, stage=stage) as ckpt:
        ckpt.restore()
        for number in range(1, 6):
            model(torch.randn(8, WIDTH, device=device)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            want[number] = copy.deepcopy(seen(model, optimizer))
            ckpt.save(number)
    for number, was in want.items():
        model = model_on(device)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        with CheckpointManager(tmp_path, {"model": model, "optimizer": optimizer}, mode="sync") as ckpt:
            assert ckpt.restore(number, check_fingerprints=True).step == number
        assert_same(seen(model, optimizer), was, f"step {number}")
        assert all(parameter.device == device for parameter in model.parameters())


def test_what_was_saved_on_one_device_is_restored_on_the_other(tmp_path: Path, device: torch.device) -> None:
    there, here = model_on(device), model_on(torch.device("cpu"))
    with torch.no_grad():
        for parameter in there.parameters():
            parameter.add_(1)
    for number, (source, target) in enumerate(((there, here), (here, there))):
        with torch.no_grad():
            next(source.parameters()).mul_(number + 2)
        with CheckpointManager(tmp_path / str(number), {"model": source}, mode="sync") as ckpt:
            ckpt.save(1)
        with CheckpointManager(tmp_path / str(number), {"model": target}, mode="sync") as ckpt:
            ckpt.restore(check_fingerprints=True)
        assert_same(on_host(dict(target.state_dict())), on_host(dict(source.state_dict())))


@pytest.mark.parametrize("dtype", [torch.uint8, torch.bfloat16, torch.float32, torch.int64, torch.complex64], ids=str)
def test_a_fingerprint_is_the_same_on_every_device(device: torch.device, dtype: torch.dtype) -> None:
    torch.manual_seed(1)
    for shape in ((), (7,), (300, 41), (2, 3, 5001), (70_001,)):
        count = max(1, torch.Size(shape).numel()) * dtype.itemsize
        bits = torch.randint(0, 256, (count,), dtype=torch.uint8)
        tensor = bits.view(dtype).reshape(shape)
        for one in (tensor, tensor.T if tensor.dim() == 2 else tensor):
            assert fp1(one.to(device)) == fp1(one, compiled=False), (shape, dtype)
