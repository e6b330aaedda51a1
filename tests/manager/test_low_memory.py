"""Where the host has no memory for scratch: checked first, then read in place. As exact, and damage changes nothing."""

from __future__ import annotations

import copy
import logging
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

from resilio import CheckpointManager
from resilio.engine import Engine, host_memory
from resilio.errors import IntegrityError, LiveStateError
from resilio.testing.worlds import run_world

WIDTH = 160  # a weight of 100 KiB: large enough to be worth it


class Job:
    """Model and optimizer; some tensors are too small, tied or not row-major, and are read the usual way."""

    def __init__(self, seed: int) -> None:
        torch.manual_seed(seed)
        self.model = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH))
        self.model[1].weight = self.model[0].weight
        self.model[2].weight.data = self.model[2].weight.data.t()
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.1)

    def train(self) -> Job:
        self.model.zero_grad()
        self.model(torch.ones(3, WIDTH)).sum().backward()
        self.optimizer.step()
        return self

    @property
    def state(self) -> dict[str, Any]:
        return {"model": self.model, "optimizer": self.optimizer}

    def tensors(self) -> list[torch.Tensor]:
        moments = [value for entry in self.optimizer.state.values() for value in entry.values()]
        return [*self.model.parameters(), *moments]

    def values(self) -> list[torch.Tensor]:
        return copy.deepcopy([tensor.detach() for tensor in self.tensors()])


def equal(one: list[torch.Tensor], other: list[torch.Tensor]) -> bool:
    return len(one) == len(other) and all(map(torch.equal, one, other))


def without_memory() -> None:
    host_memory.available_bytes = lambda *_: 0  # type: ignore[assignment]
    host_memory.WORTH_ASKING = 0


@pytest.fixture
def short(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host_memory, "available_bytes", lambda *_: 0)
    monkeypatch.setattr(host_memory, "WORTH_ASKING", 0)


def damage(folder: Path, step: int) -> None:
    (data,) = folder.glob(f"step-{step:09}-*/*.distcp")
    content = bytearray(data.read_bytes())
    content[len(content) // 2] ^= 1
    data.write_bytes(content)


def manager(tmp_path: Path, job: Job) -> CheckpointManager:
    return CheckpointManager(tmp_path, job.state, mode="sync")


@pytest.mark.parametrize("trained", [True, False], ids=["trained", "new"])
def test_it_comes_back_as_exact_and_every_byte_is_counted(tmp_path, monkeypatch, caplog, trained):
    job = Job(0).train()
    with manager(tmp_path, job) as ckpt:
        ckpt.restore()
        ckpt.save(1)
        once = ckpt.restore().read_bytes
    new = Job(1).train() if trained else Job(1)
    places = [tensor.data_ptr() for tensor in new.tensors()]
    filled: list[set[str]] = []
    fill = Engine.fill

    def seen(self: Engine, scratch: Any, *args: Any, **kwargs: Any) -> None:
        filled.append({*scratch})
        fill(self, scratch, *args, **kwargs)

    monkeypatch.setattr(Engine, "fill", seen)
    monkeypatch.setattr(host_memory, "available_bytes", lambda *_: 0)
    monkeypatch.setattr(host_memory, "WORTH_ASKING", 0)
    with manager(tmp_path, new) as ckpt, caplog.at_level(logging.WARNING, "resilio"):
        report = ckpt.restore(1)
    assert equal(new.values(), job.values())
    assert [tensor.data_ptr() for tensor in new.tensors()][: len(places)] == places
    assert "no host memory" in caplog.text
    twice = filled[1]
    assert twice < filled[0]
    moments = {f"optimizer.state.0.weight.{name}" for name in ("exp_avg", "exp_avg_sq")}
    assert twice == (moments if trained else set())
    assert report.read_bytes == once + 4 * WIDTH * WIDTH * len(twice)


def test_a_backward_over_what_was_read_in_place_is_refused(tmp_path, short):
    job = Job(0).train()
    weight = nn.Parameter(torch.randn(WIDTH, WIDTH))
    job.model.register_parameter("own", weight)
    with manager(tmp_path, job) as ckpt:
        ckpt.restore()
        ckpt.save(1)
        loss = (weight * weight).sum()
        ckpt.restore()
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            loss.backward()


def test_damage_changes_nothing_and_an_older_one_is_found(tmp_path, short):
    job = Job(0).train()
    with manager(tmp_path, job) as ckpt:
        ckpt.restore()
        ckpt.save(1)
        saved = job.values()
        ckpt.save(2)
        damage(tmp_path, 2)
        job.train()
        now = job.values()
        with pytest.raises(IntegrityError):
            ckpt.restore(2)
        assert equal(job.values(), now)
        assert ckpt.restore().step == 1
        assert equal(job.values(), saved)


def test_bytes_that_change_between_the_two_reads_are_told_to_have_made_a_mixture(tmp_path, monkeypatch, short):
    job = Job(0).train()
    with manager(tmp_path, job) as ckpt:
        ckpt.restore()
        ckpt.save(1)
        saved = job.values()
        fill = Engine.fill

        def fill_and_spoil(self: Engine, *args: Any, **kwargs: Any) -> None:
            fill(self, *args, **kwargs)
            monkeypatch.setattr(Engine, "fill", fill)
            for data in tmp_path.glob("step-*/*.distcp"):
                content = data.read_bytes()
                spoilt.append((data, content))
                data.write_bytes(bytes(len(content)))

        spoilt: list[tuple[Path, bytes]] = []
        monkeypatch.setattr(Engine, "fill", fill_and_spoil)
        with pytest.raises(LiveStateError, match="mixture"):
            ckpt.restore()
        for data, content in spoilt:
            data.write_bytes(content)
        ckpt.restore(1)
        assert equal(job.values(), saved)


class Columns(nn.Module):
    """A parameter of which each rank has columns."""

    def __init__(self) -> None:
        super().__init__()
        mesh = init_device_mesh("cpu", (dist.get_world_size(),))
        self.weight = nn.Parameter(distribute_tensor(torch.zeros(4 * WIDTH, WIDTH), mesh, [Shard(1)]))


def columns(rank: int, world: int, folder: Path, short_rank: int) -> tuple[bool, bool]:
    whole = torch.arange(4.0 * WIDTH * WIDTH).reshape(4 * WIDTH, WIDTH)
    if rank == short_rank:
        without_memory()
    model = Columns()
    with CheckpointManager(folder, {"model": model}, mode="sync") as ckpt:
        report = ckpt.restore(only=["model"])
    assert isinstance(model.weight, DTensor)
    mine = model.weight.to_local()
    return torch.equal(mine, whole.chunk(world, 1)[rank]), report.read_bytes > mine.nbytes


def test_ranks_agree_on_it_and_column_shards_come_back_as_exact(tmp_path):
    model = nn.Linear(WIDTH, 4 * WIDTH, bias=False)
    model.weight.data = torch.arange(4.0 * WIDTH * WIDTH).reshape(4 * WIDTH, WIDTH)
    with CheckpointManager(tmp_path, {"model": model}, mode="sync") as ckpt:
        ckpt.restore()
        ckpt.save(1)
    assert run_world(columns, 2, tmp_path, 1) == [(True, True)] * 2
