"""A job of any kind, and what must hold of it: stopped and restored it goes on bit for bit; undone it is as it was."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import nn
from workload import assert_same, rng

from resilio import CheckpointManager
from resilio.errors import ResilioError, RestoreError
from resilio.storage import LocalStorage


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


class Unreadable(LocalStorage):
    """A store in which this host may not, or at the moment cannot, read one object of one checkpoint."""

    def __init__(self, root: str, error: type[ResilioError]) -> None:
        super().__init__(root)
        self._error = error

    def read_into(self, key: str, ranges: Any) -> None:
        if key.startswith("step-000000002") and key.endswith(".distcp"):
            raise self._error(f"{key}: as planned")
        super().read_into(key, ranges)
