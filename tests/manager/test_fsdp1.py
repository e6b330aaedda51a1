"""FSDP1: what is saved is the model and optimizer as they would be without it, at every sharding; and back again.

What a job under FSDP1 holds is asked of FSDP1 itself (its full state dicts), never of the code under test.
"""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import (
    FullOptimStateDictConfig,
    FullStateDictConfig,
    FullyShardedDataParallel,
    ShardingStrategy,
    StateDictType,
    fully_shard,
)
from torch.distributed.fsdp.wrap import ModuleWrapPolicy
from torch.nn.parallel import DistributedDataParallel
from workload import assert_same, full

import resilio
from resilio import CheckpointManager
from resilio.testing.worlds import run_world

warnings.filterwarnings("ignore", category=FutureWarning, module=r"torch\.distributed")
warnings.filterwarnings("ignore", message=".*NO_SHARD.*")

CPU = torch.device("cpu")


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(5, 7), nn.Linear(7, 5, bias=False)
        self.register_buffer("scale", torch.full((5,), 1.25))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.relu(self.up(x))) * self.scale


class Net(nn.Module):
    """Tied weights, uneven sizes, a parameter smaller than any world, a channels_last one, one that is never used."""

    def __init__(self) -> None:
        super().__init__()
        self.emb = nn.Embedding(11, 5)
        self.blocks = nn.ModuleList([Block(), Block()])
        self.gain = nn.Parameter(torch.ones(1))
        self.conv = nn.Conv2d(3, 5, 2).to(memory_format=torch.channels_last)
        self.unused: nn.Module | None = nn.Linear(3, 2)
        self.norm = nn.LayerNorm(5)
        self.head = nn.Linear(5, 11, bias=False)
        self.head.weight = self.emb.weight
        self.register_buffer("seen", torch.zeros((), dtype=torch.int64))
        self.register_buffer("hidden", torch.arange(5.0), persistent=False)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.emb(ids)
        for block in self.blocks:
            x = block(x)
        x = x + self.conv(torch.ones(1, 3, 2, 2)).flatten() * self.gain
        return self.head(self.norm(x)) + 0


def wrapped(net: nn.Module, layout: str, **more: Any) -> nn.Module:
    """`net` as `layout` shards it: ``fsdp1`` with the strategy and maybe ``flat`` behind dashes, or another."""
    kind, *words = layout.split("-")
    world = torch.distributed.get_world_size() if torch.distributed.is_initialized() else 1
    if kind == "fsdp1":
        return FullyShardedDataParallel(
            net,
            use_orig_params="flat" not in words,
            sharding_strategy=ShardingStrategy[words[0]],
            auto_wrap_policy=ModuleWrapPolicy({Block}),
            device_id=CPU,
            **more,
        )
    if kind == "fsdp2":
        mesh = init_device_mesh("cpu", (world,))
        for block in net.blocks:  # type: ignore[union-attr]
            fully_shard(block, mesh=mesh)
        fully_shard(net, mesh=mesh)
    return DistributedDataParallel(net, find_unused_parameters=True) if kind == "ddp" else net


def build(layout: str, seed: int, **more: Any) -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(seed)
    net = Net()
    net.seen += seed
    for block in net.blocks:
        block.scale += seed  # type: ignore[operator]
    if layout == "fsdp2":
        net.conv.to(memory_format=torch.contiguous_format)  # others it refuses
    if "flat" in layout or "used" in layout:
        net.unused = None  # a flat parameter has one state for all in it
    model = wrapped(net, layout, **more)
    return model, torch.optim.AdamW(model.parameters(), lr=0.01 * (seed + 1))


def train(model: nn.Module, optimizer: torch.optim.Optimizer, steps: int = 2) -> None:
    ids = torch.arange(11)
    for _ in range(steps):
        nn.functional.cross_entropy(model(ids), (ids + 1) % 11).backward()
        optimizer.step()
        optimizer.zero_grad()


def gathered(model: nn.Module) -> dict[str, torch.Tensor]:
    """The whole parameters and buffers, as FSDP1 gathers them."""
    how = FullStateDictConfig(offload_to_cpu=False, rank0_only=False)
    with FullyShardedDataParallel.state_dict_type(model, StateDictType.FULL_STATE_DICT, how):
        return {name: value.detach().clone() for name, value in model.state_dict().items()}


def moments(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """The optimizer's state by parameter and entry, gathered by FSDP1."""
    if any(hasattr(p, "_is_flat_param") for p in model.parameters()):
        how = FullStateDictConfig(False, False), FullOptimStateDictConfig(False, False)
        with FullyShardedDataParallel.state_dict_type(model, StateDictType.FULL_STATE_DICT, *how):
            state = FullyShardedDataParallel.optim_state_dict(model, optimizer)["state"]
        return {f"{name}.{entry}": one.clone() for name, entries in state.items() for entry, one in entries.items()}
    # Its own helper fails on a parameter that was never stepped: moments are gathered in the place of the parameters.
    parameters = {name.replace("_fsdp_wrapped_module.", ""): p for name, p in model.named_parameters()}
    here = {
        f"{name}.{entry}": None if one.dim() else one.item()
        for name, p in parameters.items()
        for entry, one in optimizer.state.get(p, {}).items()
    }
    everywhere: list[Any] = [None] * torch.distributed.get_world_size()
    torch.distributed.all_gather_object(everywhere, here)
    there = {key: value for one in everywhere for key, value in one.items()}
    found: dict[str, Any] = {key: torch.tensor(value) for key, value in there.items() if value is not None}
    before = {p: p.detach().clone() for p in parameters.values()}
    for entry in sorted({key.rpartition(".")[2] for key in there if key not in found}):
        with torch.no_grad():
            for p in parameters.values():
                if entry in optimizer.state.get(p, {}):
                    p.copy_(optimizer.state[p][entry])
        found |= {f"{name}.{entry}": one for name, one in gathered(model).items() if f"{name}.{entry}" in there}
    with torch.no_grad():
        for p, value in before.items():
            p.copy_(value)
    return found


def whole(model: nn.Module, optimizer: torch.optim.Optimizer | None = None) -> dict[str, Any]:
    """Every tensor and number by name, gathered. Collective."""
    net = model.module if isinstance(model, (FullyShardedDataParallel, DistributedDataParallel)) else model
    fsdp1 = isinstance(model, FullyShardedDataParallel)
    found: dict[str, Any] = gathered(model) if fsdp1 else {k: full(value) for k, value in net.state_dict().items()}
    found |= {name: buffer.clone() for name, buffer in net.named_buffers() if name == "hidden"}
    if optimizer is not None:
        if fsdp1:
            found |= moments(model, optimizer)
        else:
            names = {p: name for name, p in net.named_parameters()}
            for p, entries in optimizer.state.items():
                found |= {f"{names[p]}.{entry}": full(value) for entry, value in entries.items()}
        found["groups"] = [
            {key: value for key, value in group.items() if key not in ("params", "foreach", "fused")}
            for group in optimizer.param_groups
        ]
    return {name: value.contiguous() if isinstance(value, torch.Tensor) else value for name, value in found.items()}


def parts(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    return {"model": model, "optimizer": optimizer, "rng": False}


def save(url: str, state: dict[str, Any], mode: Any = "sync") -> None:
    with CheckpointManager(url, state, mode=mode) as ckpt:
        ckpt.restore()
        ckpt.save(1)


LAYOUTS = ["fsdp1-FULL_SHARD", "fsdp1-SHARD_GRAD_OP", "fsdp1-NO_SHARD", "fsdp2", "ddp"]
FLAT = ["fsdp1-FULL_SHARD-flat", "fsdp1-NO_SHARD-flat", "fsdp1-FULL_SHARD-used"]


def save_each(rank: int, world: int, url: str, layouts: list[str]) -> dict[str, Any]:
    found = {}
    for layout in layouts:
        job = build(layout, 0)
        train(*job)
        before = whole(*job)
        save(f"{url}/{layout}", parts(*job))
        assert_same(whole(*job), before)
        found[layout] = before
    return found


def load_each(rank: int, world: int, url: str, layouts: list[str], targets: list[str]) -> dict[str, Any]:
    found = {}
    for layout in layouts:
        for target in targets:
            job = build(target, 1)
            if target != targets[0]:
                train(*job)  # over state that is there already, and memory that a forward has gathered
                job[0](torch.arange(11))
            resilio.restore(f"{url}/{layout}", parts(*job))
            steps = [entries["step"].data_ptr() for entries in job[1].state.values()]
            assert len(set(steps)) == len(steps), "one counter for several parameters counts their steps together"
            found[layout, target] = whole(*job)
    return found


def crossed(tmp_path: Path, layouts: list[str], targets: list[str]) -> None:
    url = f"file://{tmp_path}"
    saved, other = run_world(save_each, 2, url, layouts)
    assert_same(saved, other)
    alone = load_each(0, 1, url, layouts, ["plain-used" if "flat" in targets[0] else "plain"])
    many = [*run_world(load_each, 1, url, layouts, targets), *run_world(load_each, 3, url, layouts, targets)]
    for found in (alone, *many):
        for (layout, target), one in found.items():
            try:
                assert_same(one, saved[layout])
            except AssertionError as error:
                raise AssertionError(f"{layout} into {target}") from error


def test_what_fsdp1_saves_comes_back_in_other_layouts_and_the_other_way_round(tmp_path: Path) -> None:
    crossed(tmp_path, ["fsdp1-FULL_SHARD", "fsdp2"], ["fsdp1-FULL_SHARD", "fsdp2"])


def test_what_lies_in_flat_parameters_comes_back_too(tmp_path: Path) -> None:
    crossed(tmp_path, FLAT[:1], FLAT[:2])


@pytest.mark.full
@pytest.mark.parametrize("layouts", [LAYOUTS, FLAT], ids=["layouts", "flat"])
def test_each_layout_comes_back_in_each_other_one_at_one_and_three_ranks(tmp_path: Path, layouts: list[str]) -> None:
    crossed(tmp_path, layouts, layouts)
