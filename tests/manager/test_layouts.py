"""Memory order survives: a fused optimizer over channels_last parameters goes on exactly."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from workload import assert_same

from resilio import CheckpointManager


def build(seed: int) -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Conv2d(3, 5, 3), nn.BatchNorm2d(5), nn.ReLU(), nn.Conv2d(5, 2, 2))
    model = model.to(memory_format=torch.channels_last)
    return model, torch.optim.AdamW(model.parameters(), lr=0.1, fused=True)


def train(model: nn.Module, optimizer: torch.optim.Optimizer, steps: range) -> None:
    for step in steps:
        x = torch.randn(4, 3, 8, 8, generator=torch.Generator().manual_seed(step))
        model(x.contiguous(memory_format=torch.channels_last)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()


def everything(model: nn.Module, optimizer: torch.optim.Optimizer) -> Any:
    return [*model.state_dict().values()], [list(optimizer.state[p].values()) for p in model.parameters()]


def test_a_fused_optimizer_over_channels_last_parameters_resumes_bit_for_bit(tmp_path):
    straight = build(0)
    train(*straight, range(6))
    stopped = build(0)
    train(*stopped, range(3))
    with CheckpointManager(f"file://{tmp_path}", dict(zip(("model", "optimizer"), stopped, strict=True))) as ckpt:
        ckpt.restore()
        ckpt.save(3)
    resumed = build(1)
    with CheckpointManager(f"file://{tmp_path}", dict(zip(("model", "optimizer"), resumed, strict=True))) as ckpt:
        ckpt.restore()
    model, optimizer = resumed
    for p in model.parameters():
        # fused CPU AdamW is silently wrong where the two differ
        assert optimizer.state[p]["exp_avg"].stride() == p.stride()
    train(model, optimizer, range(3, 6))
    assert_same(everything(*resumed), everything(*straight))
