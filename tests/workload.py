"""A small training job for tests: uneven dimensions, a parameter smaller than any world, tied weights, a buffer.

Independent of the code under test: names are positions, full tensors come from torch itself.
"""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

GLOBAL_BATCH = 12
VOCAB = 31


class Block(nn.Module):
    def __init__(self, dropout: float) -> None:
        super().__init__()
        self.up, self.down, self.drop = nn.Linear(9, 129), nn.Linear(129, 9), nn.Dropout(dropout)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.drop(self.down(nn.functional.gelu(self.up(x))))


class Net(nn.Module):
    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        self.emb = nn.Embedding(VOCAB, 9)
        self.blocks = nn.ModuleList(Block(dropout) for _ in range(2))
        self.gain = nn.Parameter(torch.ones(1))
        self.norm = nn.LayerNorm(9)
        self.head = nn.Linear(9, VOCAB, bias=False)
        self.head.weight = self.emb.weight
        self.register_buffer("seen", torch.zeros((), dtype=torch.int64))
        self.register_buffer("scale", torch.linspace(0.5, 1.5, 9), persistent=False)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.emb(ids)
        for block in self.blocks:
            x = block(x)
        # "+ 0": FSDP2 warns about outputs that are views
        return self.head(self.norm(x * self.scale) * self.gain) + 0


class Loader:
    """Global sample positions, each once; this rank's slice of a global batch."""

    def __init__(self) -> None:
        self.position = 0

    def next(self, rank: int, world: int) -> torch.Tensor:
        ids = torch.arange(self.position, self.position + GLOBAL_BATCH)[rank::world]
        self.position += GLOBAL_BATCH
        return ids

    def state_dict(self) -> dict[str, Any]:
        return {"position": self.position}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.position = state["position"]


@dataclass
class Job:
    model: nn.Module
    optimizer: torch.optim.Optimizer
    scheduler: Any
    loader: Loader
    rank: int
    world: int

    def state(self) -> dict[str, Any]:
        return {
            "model": self.model,
            "optimizer": self.optimizer,
            "scheduler": self.scheduler,
            "dataloader": self.loader,
        }

    def train_step(self) -> float:
        ids = self.loader.next(self.rank, self.world)
        x = torch.stack([(ids * k + 1) % VOCAB for k in (1, 3, 7)], dim=1)
        y = torch.stack([(ids * k + 5) % VOCAB for k in (2, 5, 11)], dim=1)
        loss = nn.functional.cross_entropy(self.model(x).flatten(0, 1), y.flatten())
        loss.backward()
        self.optimizer.step()
        self.scheduler.step()
        self.optimizer.zero_grad()
        total = loss.detach().clone()
        if self.world > 1:
            dist.all_reduce(total)
            total /= self.world
        return total.item()


def build(
    strategy: str, rank: int = 0, world: int = 1, *, compile: bool = False, dropout: float = 0.0, seed: int = 0
) -> Job:
    seed_all(seed + 1000 * rank if dropout else seed)
    torch.manual_seed(seed)
    net = Net(dropout)
    model: nn.Module = net
    if strategy == "fsdp2":
        mesh = init_device_mesh("cpu", (world,))
        for block in net.blocks:
            fully_shard(block, mesh=mesh)
        fully_shard(net, mesh=mesh)
    elif strategy == "ddp":
        model = DistributedDataParallel(net)
    if compile:
        model = torch.compile(model, backend="eager")
    weights = [p for p in net.parameters() if p.dim() > 1]
    rest = [p for p in net.parameters() if p.dim() <= 1]
    groups = [{"params": weights, "weight_decay": 0.1}, {"params": rest, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=0.01)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 3, 0.5)
    if dropout:
        seed_all(seed + 1000 * rank)
    return Job(model, optimizer, scheduler, Loader(), rank, world)


def seed_all(seed: int) -> None:
    random.seed(seed)
    np.random.seed(seed)
    torch.manual_seed(seed)


def full(tensor: torch.Tensor) -> torch.Tensor:
    tensor = tensor.detach()
    return (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).clone()


def snapshot(job: Job) -> dict[str, Any]:
    """Every logical tensor and value, gathered. Collective."""
    job.model.state_dict()  # FSDP2: back to sharded parameters
    found: dict[str, Any] = {}
    for i, p in enumerate(job.model.parameters()):
        found[f"p{i}"] = full(p)
    for i, b in enumerate(job.model.buffers()):
        found[f"b{i}"] = full(b)
    i = 0
    for group in job.optimizer.param_groups:
        for p in group["params"]:
            for name, value in job.optimizer.state.get(p, {}).items():
                found[f"o{i}.{name}"] = full(value) if isinstance(value, torch.Tensor) else value
            i += 1
    found["groups"] = [{k: v for k, v in g.items() if k != "params"} for g in job.optimizer.param_groups]
    found["scheduler"] = {k: v for k, v in job.scheduler.state_dict().items() if not k.startswith("_get_lr")}
    found["loader"] = job.loader.state_dict()
    return found


def rng() -> dict[str, Any]:
    kind, keys, pos, gauss, cached = np.random.get_state()
    return {
        "python": random.getstate(),
        "numpy": (kind, keys.tolist(), pos, gauss, cached),
        "torch": torch.get_rng_state(),
    }


def assert_same(a: Any, b: Any, where: str = "state") -> None:
    """Bit for bit, type by type."""
    assert type(a) is type(b), f"{where}: {type(a)} is not {type(b)}"
    if isinstance(a, torch.Tensor):
        assert a.dtype == b.dtype and a.shape == b.shape, f"{where}: {a.dtype} {a.shape} is not {b.dtype} {b.shape}"
        same = a.contiguous().reshape(-1).view(torch.uint8).equal(b.contiguous().reshape(-1).view(torch.uint8))
        assert same, f"{where}: values differ by up to {(a.double() - b.double()).abs().max()}"
    elif isinstance(a, dict):
        assert a.keys() == b.keys(), f"{where}: keys differ: {a.keys() ^ b.keys()}"
        for key in a:
            assert_same(a[key], b[key], f"{where}.{key}")
    elif isinstance(a, (list, tuple)):
        assert len(a) == len(b), f"{where}: {len(a)} entries, {len(b)}"
        for i, (x, y) in enumerate(zip(a, b, strict=True)):
            assert_same(x, y, f"{where}[{i}]")
    else:
        assert a == b, f"{where}: {a!r} is not {b!r}"
