"""Going back: a new branch; the abandoned one stays, never chosen by itself; and an old manager is told to stop."""

from __future__ import annotations

from typing import Any

import pytest
from workload import assert_same, build, snapshot

from resilio import CheckpointManager, keep_last
from resilio.errors import ConfigError, FencedError, NoCheckpointError
from resilio.testing.worlds import run_world
from resilio.types import CheckpointRef


def train_to(ckpt: CheckpointManager, job: Any, last: int, states: dict[int, Any]) -> None:
    for step in range(ckpt.next_step, last + 1):
        job.train_step()
        ckpt.save(step).result()
        states[step] = snapshot(job)


def lineage(ckpt: CheckpointManager) -> tuple[list[str], list[str]]:
    infos = ckpt.checkpoints()
    on, off = ([i for i in infos if i.on_lineage is side] for side in (True, False))
    return [f"{i.ref.generation}:{i.step}" for i in on], [f"{i.ref.generation}:{i.step}" for i in off]


def test_back_twice_in_one_process_and_to_an_abandoned_one_by_explicit_choice(tmp_path):
    url = f"file://{tmp_path}"
    job = build("single")
    first: dict[int, Any] = {}
    with CheckpointManager(url, job.state(), mode="sync") as ckpt:
        ckpt.restore()
        train_to(ckpt, job, 4, first)
        assert ckpt.restore(2).step == 2
        assert_same(snapshot(job), first[2])
        job.optimizer.param_groups[0]["lr"] = 0.5  # another branch, not the same steps again
        second: dict[int, Any] = {}
        train_to(ckpt, job, 3, second)
        assert lineage(ckpt) == (["1:1", "1:2", "2:3"], ["1:3", "1:4"])
        # The newest is that of the new branch, though the old one has a higher step.
        ckpt.restore()
        assert ckpt.next_step == 4
        assert_same(snapshot(job), second[3])
        ckpt.restore(1)
        train_to(ckpt, job, 2, {})
        assert lineage(ckpt) == (["1:1", "3:2"], ["1:2", "1:3", "1:4", "2:3"])
        # Step 4 exists on an abandoned branch alone: asked for by its number it is taken, and its line with it.
        assert ckpt.restore(4).step == 4
        assert_same(snapshot(job), first[4])
        train_to(ckpt, job, 5, {})
        assert lineage(ckpt) == (["1:1", "1:2", "1:3", "1:4", "4:5"], ["2:3", "3:2"])
    twin = build("single", seed=8)
    with CheckpointManager(url, twin.state()) as ckpt:
        assert ckpt.restore().step == 5
    assert_same(snapshot(twin), snapshot(job))


def test_a_step_that_two_branches_have_is_asked_for_by_its_ref(tmp_path):
    live = {"x": 0}
    with CheckpointManager(f"file://{tmp_path}", {"live": live}, keep=keep_last(1), mode="sync") as ckpt:
        ckpt.restore()
        for x in (1, 2):
            live["x"] = x
            ckpt.save(x)
            ckpt.pin(x, because="both branches")
        abandoned = ckpt.checkpoints()[-1].ref
        ckpt.restore(1)
        live["x"] = 22
        ckpt.save(2)
        assert ckpt.verify(abandoned) == [] and ckpt.unpin(abandoned) == 1
        ckpt.pin(abandoned, because="exactly this one")
        ckpt.restore(2)
        assert live == {"x": 22}
        assert ckpt.restore(abandoned).found.ref == abandoned
        assert live == {"x": 2}
        with pytest.raises(NoCheckpointError, match=r"no checkpoint step 2 \(generation 7\); of.* 1\), .* 2\)"):
            ckpt.restore(CheckpointRef(7, 2))


def fresh_over(rank: int, world: int, url: str) -> Any:
    job = build("fsdp2" if world > 1 else "single", rank, world, seed=5)
    with CheckpointManager(url, job.state(), fresh=True, mode="sync") as ckpt:
        assert ckpt.restore().found is None and ckpt.next_step == 1
        job.train_step()
        ckpt.save(1)
        return lineage(ckpt), snapshot(job)


@pytest.mark.parametrize("world", [1, 2])
def test_fresh_begins_a_line_of_its_own_and_says_what_it_leaves(tmp_path, caplog, world):
    url = f"file://{tmp_path}"
    old = build("single")
    with CheckpointManager(url, old.state(), mode="sync") as ckpt:
        ckpt.restore()
        train_to(ckpt, old, 3, {})
    if world == 1:
        with caplog.at_level("WARNING", logger="resilio"):
            found, want = fresh_over(0, 1, url)
        assert "begun anew by fresh=True: 3 checkpoint(s) are left off the lineage newest=step 3" in caplog.text
    else:
        found, want = run_world(fresh_over, 2, url)[0]
    assert found == (["2:1"], ["1:1", "1:2", "1:3"])
    twin = build("single", seed=8)
    with CheckpointManager(url, twin.state()) as ckpt:
        assert ckpt.restore().step == 1
    if world == 1:
        assert_same(snapshot(twin), want)


def test_a_step_that_goes_back_without_a_restore_is_refused(tmp_path):
    job = build("single")
    with CheckpointManager(f"file://{tmp_path}", job.state()) as ckpt:
        ckpt.restore()
        ckpt.save(5)
        with pytest.raises(ConfigError, match=r"step 3 after step 5.*restore\(which"):
            ckpt.save(3)
        ckpt.save(6)


def test_retention_counts_the_new_branch_alone_and_leaves_the_abandoned_one(tmp_path):
    job = build("single")
    with CheckpointManager(f"file://{tmp_path}", job.state(), keep=keep_last(2), mode="sync") as ckpt:
        ckpt.restore()
        train_to(ckpt, job, 4, {})
        assert lineage(ckpt) == (["1:3", "1:4"], [])
        ckpt.restore(3)
        train_to(ckpt, job, 4, {})
        assert lineage(ckpt) == (["1:3", "2:4"], ["1:4"])
        train_to(ckpt, job, 6, {})
        assert lineage(ckpt) == (["2:5", "2:6"], ["1:4"])


def test_of_two_managers_on_one_run_the_older_is_fenced_and_its_work_is_not_lost(tmp_path):
    url = f"file://{tmp_path}"
    old, new = build("single"), build("single", seed=4)
    older = CheckpointManager(url, old.state(), mode="sync")
    older.restore()
    train_to(older, old, 2, {})
    with CheckpointManager(url, new.state(), mode="sync") as newer:
        newer.restore()
        train_to(newer, new, 3, {})
        old.train_step()
        with pytest.raises(FencedError, match="generation 2"):
            older.save(3)
        with pytest.raises(FencedError, match=r"restore\(\)"):  # and it stays so
            older.save(4)
        train_to(newer, new, 4, {})
        assert lineage(newer) == (["1:1", "1:2", "2:3", "2:4"], [])
        # The older one may ask for the run again: then the newer one is fenced.
        older.restore()
        assert_same(snapshot(old), snapshot(new))
        train_to(older, old, 5, {})
        with pytest.raises(FencedError):
            newer.save(5)
    older.close()


def two_jobs(rank: int, world: int, url: str) -> list[str]:
    """Two managers in one world, as when a scheduler starts a job anew while the old one still runs."""
    old, new = build("fsdp2", rank, world), build("fsdp2", rank, world, seed=4)
    told = []
    older = CheckpointManager(url, old.state(), mode="async")
    older.restore()
    older.save(1).result()
    with CheckpointManager(url, new.state(), mode="async") as newer:
        newer.restore()
        newer.save(2).result()
        handle = older.save(2)
        told.append(type(handle.exception()).__name__)
        try:
            older.close()
        except FencedError as error:
            told.append(str(error))
    return told


def test_a_fenced_save_in_the_background_is_told_to_every_rank(tmp_path):
    first, second = run_world(two_jobs, 2, f"file://{tmp_path}")
    assert first == second
    assert first[0] == "FencedError" and "generation 2" in first[1]
