"""What lives is decided anew from the store by every manager: a restart forgets nothing, on any storage."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import resilio
from resilio import CheckpointManager, keep_best, keep_every, keep_last, open_storage
from resilio.clock import FakeClock
from resilio.storage import LocalStorage, Storage

LOSS = {1: 3.0, 2: 0.5, 3: float("nan"), 4: 2.0, 5: 0.7, 6: 1.0, 7: 4.0}


class Elsewhere(LocalStorage):
    """A store that tells no times and has no path, as one of a plugin may."""

    def __init__(self, path: Path) -> None:
        super().__init__(path)
        self.capabilities = type(self.capabilities)()

    def list(self, prefix: str) -> Any:
        for info in super().list(prefix):
            yield type(info)(info.key, info.size_bytes)


@pytest.fixture(params=["file", "memory", "plugin"])
def store(request: Any, tmp_path: Path) -> Any:
    """What each life of the job passes as its URL."""
    return {
        "file": lambda: f"file://{tmp_path}",
        "memory": lambda: f"memory://{tmp_path}",
        "plugin": lambda: Elsewhere(tmp_path),
    }[request.param]


def live_once(url: str | Storage, step: int, **how: Any) -> list[int]:
    """One life of a job that saves one step; the steps that live after it."""
    live = {"x": step - 1}
    with CheckpointManager(url, {"live": live}, mode="sync", **how) as ckpt:
        assert ckpt.restore().step == step - 1 and live["x"] == step - 1
        live["x"] = step
        ckpt.save(step, metrics={"loss": LOSS[step]})
        return [info.step for info in ckpt.checkpoints()]


def test_every_life_keeps_what_the_policies_say_of_the_whole_run(store: Any) -> None:
    keep = keep_last(1) | keep_best(1, "loss", mode="min") | keep_every(4)
    lived = [live_once(store(), step, keep=keep) for step in range(1, 8)]
    assert lived == [[1], [2], [2, 3], [2, 4], [2, 4, 5], [2, 4, 6], [2, 4, 7]]
    folders = {key.split("/")[0] for key in keys(store()) if key.startswith("step-")}
    assert len(folders) == 3  # and nothing is left of the others
    for step in (2, 4, 7):
        live: dict[str, int] = {}
        assert resilio.restore(store(), {"live": live}, step).step == step and live == {"x": step}


def test_periods_of_time_go_on_over_restarts(store: Any) -> None:
    clock = FakeClock(1_700_000_000 - 800)  # at the full hour
    lived = []
    for step in range(1, 8):
        lived = live_once(store(), step, keep=keep_every(hours=1) | keep_last(1), clock=clock)
        clock.advance(1800)
    assert lived == [1, 3, 5, 7]  # the first of each hour


def test_a_pin_outlives_restarts_and_an_unpin_gives_the_next_sweep_its_way(store: Any) -> None:
    live = {"x": 0}
    with CheckpointManager(store(), {"live": live}, keep=keep_last(1), mode="sync") as ckpt:
        ckpt.restore()
        ckpt.save(1)
        ckpt.pin(1, because="the paper")
        live["x"] = 1
    assert live_once_from(store(), 2) == [1, 2]
    assert live_once_from(store(), 3) == [1, 3]
    with CheckpointManager(store(), {"live": live}, keep=keep_last(1), mode="sync") as ckpt:
        ckpt.unpin(1)
    assert live_once_from(store(), 4) == [4]


def live_once_from(url: str | Storage, step: int) -> list[int]:
    with CheckpointManager(url, {"live": {"x": 0}}, keep=keep_last(1), mode="sync") as ckpt:
        ckpt.restore()
        ckpt.save(step)
        return [info.step for info in ckpt.checkpoints()]


def keys(url: str | Storage) -> list[str]:
    storage = open_storage(url)
    return [info.key for info in storage.list("")]
