"""A real SIGKILL at every failpoint of save and sweep: afterwards the old or the new checkpoint is found, whole."""

from __future__ import annotations

from typing import Any

import pytest
from workload import assert_same, build, snapshot

from resilio import CheckpointManager, failpoints, keep_last, open_storage
from resilio.testing.worlds import Killed, WorldError, run_world

# What a restore finds if the job dies there while it saves step 2, step 1 being committed. The generation's places are
# passed by the first save alone, so there the job dies with nothing committed.
OLD = {name: 1 for name in failpoints.NAMES if name.startswith("save.")} | {
    name: 0 for name in failpoints.NAMES if name.startswith("generation.")
}
NEW = {"save.committed": 2, "save.acknowledged": 2} | {
    name: 2 for name in failpoints.NAMES if name.startswith("sweep.")
}
FOUND = OLD | NEW
ON_EACH_RANK = ("save.staged", "save.data_open", "save.data_written", "save.part_written")


def train_until_killed(rank: int, world: int, url: str) -> None:
    job = build("fsdp2" if world > 1 else "single", rank, world)
    with CheckpointManager(url, job.state(), keep=keep_last(1), mode="async") as ckpt:
        ckpt.restore()
        for step in (1, 2):
            job.train_step()
            ckpt.save(step)
    raise AssertionError("the failpoint was never reached")


def resume(rank: int, world: int, url: str) -> dict[str, Any]:
    job = build("fsdp2" if world > 1 else "single", rank, world, seed=5)
    with CheckpointManager(url, job.state(), keep=keep_last(1), mode="sync") as ckpt:
        report = ckpt.restore()
        found = snapshot(job)
        damage = ckpt.verify(report.step) if report.found else []
        step = ckpt.next_step
        job.train_step()
        ckpt.save(step)
        left = [info.key for info in open_storage(url).list("")] if rank == 0 else []
        return {"step": report.step, "state": found, "damage": damage, "left": left, "end": snapshot(job)}


def straight(rank: int, world: int) -> list[dict[str, Any]]:
    job = build("fsdp2" if world > 1 else "single", rank, world)
    states = [{}]
    for _ in range(3):
        job.train_step()
        states.append(snapshot(job))
    return states


@pytest.fixture(scope="module")
def states() -> dict[int, list[dict[str, Any]]]:
    return {world: run_world(straight, world, init=world > 1)[0] for world in (1, 2)}


def places() -> list[Any]:
    found = []
    for name in failpoints.NAMES:
        # Step 1 passes all but the places of a deletion; the generation's are passed by step 1 alone.
        nth = 1 if FOUND[name] == 0 or (name.startswith("sweep.") and name != "sweep.begin") else 2
        for world in (1, 2):
            for rank in range(world) if name in ON_EACH_RANK else (0,):
                found.append(pytest.param(name, nth, world, rank, id=f"{name}-rank{rank}of{world}"))
    return found


@pytest.mark.parametrize(("name", "nth", "world", "rank"), places())
def test_killed_there_the_old_or_the_new_checkpoint_is_found_whole(tmp_path, states, name, nth, world, rank):
    url = f"file://{tmp_path}/run"
    env = {"RESILIO_FAILPOINTS": f"{name}=kill@{rank}#{nth}"}
    with pytest.raises(WorldError) as died:
        run_world(train_until_killed, world, url, env=env, init=world > 1)
    assert isinstance(died.value.outcomes[rank], Killed), died.value
    results = run_world(resume, world, url, init=world > 1)
    for result in results:
        assert result["step"] == FOUND[name]
        assert result["damage"] == []
        if result["step"]:
            assert_same(result["state"], states[world][result["step"]])
            assert_same(result["end"], states[world][result["step"] + 1])
    # The next save has swept what the dead job left: one checkpoint, one folder, one record.
    left = results[0]["left"]
    folders = {key.split("/")[0] for key in left if key.startswith("step-")}
    assert len(folders) == 1, left
    assert len([key for key in left if key.startswith("commits/")]) == 1, left


def test_every_failpoint_is_expected_somewhere():
    assert set(FOUND) == set(failpoints.NAMES)
