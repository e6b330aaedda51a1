"""Memory order survives: a fused optimizer over channels_last parameters goes on exactly."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard
from workload import assert_same

import resilio
from resilio import CheckpointManager
from resilio.testing.worlds import run_world


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


class Holder(nn.Module):
    def __init__(self, weight: torch.Tensor) -> None:
        super().__init__()
        self.weight = nn.Parameter(weight)


def weights() -> torch.Tensor:
    rows = torch.arange(3 * 3 * 4 * 5, dtype=torch.float32).view(3, 3, 4, 5)
    return rows.contiguous(memory_format=torch.channels_last)


def save_sharded(rank: int, world: int, url: str) -> bool:
    mesh = init_device_mesh("cpu", (world,))
    # Channels 0 and 1 on rank 0; channel 2 alone on rank 1, which lies the same in every order.
    local = weights()[:, :2] if rank == 0 else weights()[:, 2:]
    local = local.contiguous(memory_format=torch.channels_last)
    sharded = DTensor.from_local(local, mesh, [Shard(1)], shape=weights().shape, stride=weights().stride())
    with CheckpointManager(url, {"model": Holder(sharded)}, mode="sync") as ckpt:
        ckpt.restore()
        ckpt.save(1)
    return sharded.to_local().is_contiguous()


def test_ranks_whose_thin_shards_do_not_show_the_memory_order_save_a_readable_checkpoint(tmp_path):
    url = f"file://{tmp_path}"
    run_world(save_sharded, 2, url)
    holder = Holder(torch.zeros(3, 3, 4, 5).contiguous(memory_format=torch.channels_last))
    resilio.restore(url, {"model": holder, "rng": False})
    assert_same(holder.weight.detach(), weights())
