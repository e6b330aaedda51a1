"""The run's folder goes away under a job, or another run lies in its place."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from manager.space_tools import committed, state, value_of

from resilio import CheckpointManager, failpoints
from resilio.errors import FencedError, SaveError
from resilio.testing.worlds import run_world

pytestmark = pytest.mark.usefixtures("calm")


def moved_away(root: Path) -> Callable[[], None]:
    away = root.with_name("away")
    root.rename(away)

    def back() -> None:
        shutil.rmtree(root, ignore_errors=True)
        away.rename(root)

    return back


@pytest.mark.parametrize("mode", ["sync", "async"])
def test_a_run_that_vanished_stops_saves_and_one_that_came_back_takes_them_again(tmp_path, mode):
    root, live = tmp_path / "run", torch.ones(1)
    with CheckpointManager(root, state(live), mode=mode) as ckpt:
        ckpt.save(1).result()
        back = moved_away(root)
        for _ in range(2):
            with pytest.raises(
                SaveError, match=r"the run is gone: its resilio.json was there.*begin a new run"
            ) as caught:
                ckpt.save(2)
            assert not isinstance(caught.value, FencedError)
            assert not root.exists()
        back()
        ckpt.save(2).result()
    assert committed(root) == [1, 2]


def test_a_run_that_vanished_before_the_first_save_after_a_restore_is_missed_as_well(tmp_path):
    root, live = tmp_path / "run", torch.ones(1)
    with CheckpointManager(root, state(live), mode="sync") as ckpt:
        ckpt.save(1)
    for fresh in (False, True):
        with CheckpointManager(root, state(live), mode="sync", fresh=fresh) as ckpt:
            ckpt.restore()
            back = moved_away(root)
            with pytest.raises(SaveError, match="the run is gone"):
                ckpt.save(2)
            assert not root.exists()
            back()


@pytest.mark.parametrize("when", ["save.data_written", "save.before_manifest"])
@pytest.mark.parametrize("commits", [0, 1])
def test_a_run_that_vanishes_in_the_middle_of_a_save_gets_no_commit(tmp_path, when, commits, monkeypatch):
    root, live = tmp_path / "run", torch.ones(1)
    with CheckpointManager(root, state(live), mode="sync") as ckpt:
        if commits:
            ckpt.save(1)
        else:
            failpoints.arm("save.before_commit=raise")  # the run and its generation are there, no checkpoint is
            with pytest.raises(SaveError):
                ckpt.save(1)
            failpoints.disarm()
        hit = failpoints.hit

        def vanish(name: str, rank: int = 0) -> None:
            if name == when:
                shutil.rmtree(root)
            hit(name, rank)

        monkeypatch.setattr(failpoints, "hit", vanish)
        with pytest.raises(SaveError):
            ckpt.save(2)
        monkeypatch.setattr(failpoints, "hit", hit)
        with pytest.raises(SaveError, match="the run is gone"):
            ckpt.save(2)
        assert not [*root.rglob("*.json")]
        assert ckpt.restore().found is None  # asked for: a new run
        live.fill_(3)
        ckpt.save(3)
    assert committed(root) == [3] and value_of(root, 3) == 3
    assert len([*(root / "generations").iterdir()]) == 1


def test_another_run_in_its_place_is_left_alone(tmp_path):
    root, live = tmp_path / "run", torch.ones(1)
    with CheckpointManager(root, state(live), mode="sync", on_save_error="warn") as ckpt:
        ckpt.save(1)
        shutil.rmtree(root)
        with CheckpointManager(root, state(live), mode="sync") as other:
            other.save(7)
        before = sorted(root.rglob("*"))
        for _ in range(2):
            with pytest.raises(FencedError, match="another run lies here now"):
                ckpt.save(8)
        assert sorted(root.rglob("*")) == before
        ckpt.restore()
        ckpt.save(8)
    assert committed(root) == [7, 8]


def sees_it_vanish(rank: int, world: int, root: str) -> list[str]:
    told = []
    with CheckpointManager(root, state(torch.ones(1)), mode="async", on_save_error="warn") as ckpt:
        ckpt.save(1).result()
        ckpt.save(2).result()
        if rank == 0:
            shutil.rmtree(root)
        for step in (3, 4):
            told.append(str(ckpt.save(step).exception()))
        ckpt.restore()
        ckpt.save(5)
    return told


def test_all_ranks_hear_of_it_and_a_warned_job_trains_on(tmp_path):
    root = tmp_path / "run"
    first, second = run_world(sees_it_vanish, 2, str(root))
    assert first == second
    assert all("the run is gone" in text for text in first)
    assert committed(root) == [5]
