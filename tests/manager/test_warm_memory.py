"""Memory that a restore has read into: live state where there was none, else a buffer of the next save, never both."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn

from resilio import CheckpointManager, TrainingState
from resilio.errors import IntegrityError

WIDTH = 160


class Keeper:
    """Keeps whatever it is given, as some averagers do."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self.kept = {"weight": tensor}

    def state_dict(self) -> dict[str, Any]:
        return self.kept

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.kept = state


class Job:
    """A model, its optimizer, and somebody who holds one of its parameters as well."""

    def __init__(self, *, steps: int = 1) -> None:
        torch.manual_seed(steps)
        self.model = nn.Linear(WIDTH, WIDTH)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.1)
        self.keeper = Keeper(self.model.weight)
        for _ in range(steps):
            self.train()

    def train(self) -> None:
        self.model.zero_grad()
        self.model(torch.ones(3, WIDTH)).sum().backward()
        self.optimizer.step()

    @property
    def state(self) -> TrainingState:
        return TrainingState(model=self.model, optimizer=self.optimizer, keeper=self.keeper)

    def tensors(self) -> list[torch.Tensor]:
        moments = [value for entry in self.optimizer.state.values() for value in entry.values()]
        return [*self.model.parameters(), *moments, *self.keeper.kept.values()]

    def values(self) -> list[torch.Tensor]:
        return copy.deepcopy([tensor.detach() for tensor in self.tensors()])


def assert_equal(one: list[torch.Tensor], other: list[torch.Tensor]) -> None:
    assert len(one) == len(other)
    assert all(map(torch.equal, one, other))


def buffers(ckpt: CheckpointManager) -> dict[str, int]:
    return {key: buffer.data_ptr() for key, buffer in ckpt._engine._stager._buffers.items()}


def assert_apart(ckpt: CheckpointManager, job: Job) -> None:
    assert not set(buffers(ckpt).values()) & {tensor.data_ptr() for tensor in job.tensors()}


@pytest.fixture(params=["overlap", "block"])
def stage(request: Any) -> Iterator[str]:
    yield request.param


def open_run(tmp_path: Any, job: Job, **arguments: Any) -> CheckpointManager:
    return CheckpointManager(tmp_path / "run", job.state, **arguments)


def test_a_restore_reads_into_the_buffers_of_saves_and_the_next_save_has_them_again(tmp_path, stage):
    job = Job()
    with open_run(tmp_path, job, mode="async", stage=stage) as ckpt:
        ckpt.restore()
        ckpt.save(1).result()
        saved, before = job.values(), buffers(ckpt)
        job.train()
        ckpt.restore()
        assert_equal(job.values(), saved)
        # What is handed to another's load is no buffer any more: it may have kept it.
        expected = {key: at for key, at in before.items() if key not in ("keeper.weight", "rank.0.rng.torch")}
        assert buffers(ckpt) == expected and len(expected) == 8
        assert_apart(ckpt, job)
        job.train()
        ckpt.save(2).result()
        assert buffers(ckpt).items() >= expected.items()


def test_what_a_new_optimizer_got_is_no_buffer_and_what_parameters_got_is(tmp_path, stage):
    job = Job()
    with open_run(tmp_path, job, mode="async", stage=stage) as ckpt:
        ckpt.restore()
        ckpt.save(1).result()
    new = Job(steps=0)
    with open_run(tmp_path, new, mode="async", stage=stage) as ckpt:
        ckpt.restore()
        assert_equal(new.values(), job.values())
        kept = buffers(ckpt)
        assert "model.bias" in kept
        assert not any(key.startswith("optimizer.") for key in kept)
        assert_apart(ckpt, new)
        new.train()
        ckpt.save(2).result()
        assert buffers(ckpt)["model.bias"] == kept["model.bias"]
        assert_apart(ckpt, new)


def test_a_buffer_that_became_live_state_is_not_staged_into(tmp_path, stage):
    job = Job()
    with open_run(tmp_path, job, mode="async", stage=stage) as ckpt:
        ckpt.restore()
        ckpt.save(1).result()
        before = set(buffers(ckpt).values())
        job.optimizer.state.clear()
        ckpt.restore()
        assert before & {tensor.data_ptr() for tensor in job.tensors()}, "nothing was lent: this shows nothing"
        assert_apart(ckpt, job)
        saved = job.values()
        ckpt.save(2)
        for _ in range(3):  # while it is written
            job.train()
        ckpt.step(3)
    new = Job(steps=0)
    with open_run(tmp_path, new) as ckpt:
        assert ckpt.restore(2).step == 2
    assert_equal(new.values(), saved)


def test_without_staging_nothing_is_kept(tmp_path):
    job = Job()
    with open_run(tmp_path, job, mode="sync") as ckpt:
        ckpt.restore()
        ckpt.save(1)
        ckpt.restore()
        assert buffers(ckpt) == {}


def test_past_damage_the_same_memory_serves_the_older_one(tmp_path, stage):
    job = Job()
    with open_run(tmp_path, job, mode="async", stage=stage) as ckpt:
        ckpt.restore()
        ckpt.save(1).result()
        saved, before = job.values(), buffers(ckpt)
        job.train()
        ckpt.save(2).result()
        (data,) = (tmp_path / "run").glob("step-000000002-*/*.distcp")
        content = bytearray(data.read_bytes())
        content[len(content) // 2] ^= 1
        data.write_bytes(content)
        job.train()
        now = job.values()
        with pytest.raises(IntegrityError):
            ckpt.restore(2)
        assert_equal(job.values(), now)
        assert ckpt.restore().step == 1
        assert_equal(job.values(), saved)
        assert buffers(ckpt).keys() <= before.keys()
        assert_apart(ckpt, job)
