"""A damaged newest checkpoint: all ranks take the next older whole one, and say what was passed over and why."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from manager.state_jobs import Unreadable
from records.fake_store import edited
from workload import assert_same, build, rng, snapshot

from resilio import CheckpointManager, keep_best, keep_last
from resilio.errors import (
    AccessDeniedError,
    ConfigError,
    FormatError,
    IntegrityError,
    MismatchError,
    NewerFormatError,
    ResilioError,
    TransientError,
)
from resilio.storage import LocalStorage
from resilio.testing.worlds import run_world


def damage(run: Path, step: int, name: str, how: str) -> None:
    """Damage an object of the checkpoint of `step`, in the middle of a tensor where it is the data."""
    folder = next(run.glob(f"step-{step:09d}-*"))
    path = next(run.glob(f"commits/{step:09d}-*")) if name == "commit" else folder / name
    data = bytearray(path.read_bytes())
    at = len(data) // 2
    if name.endswith(".distcp"):
        tensors = json.loads((folder / "manifest-0.json").read_bytes())["tensors"]
        at = tensors["model.emb.weight"]["pieces"][0]["at"]
    path.unlink()
    if how == "flip":
        data[at] ^= 1
    elif how == "cut":
        del data[at:]
    if how != "gone":
        path.write_bytes(data)


def saved_steps(url: str, steps: Sequence[int]) -> dict[int, Any]:
    job = build("single")
    states = {}
    with CheckpointManager(url, job.state(), mode="sync") as ckpt:
        ckpt.restore()
        for step in range(1, max(steps) + 1):
            job.train_step()
            if step in steps:
                ckpt.save(step)
                states[step] = snapshot(job), rng()
    return states


KINDS = [
    (name, how)
    for name in ("__0_0.distcp", "__0_0.digests", "manifest-0.json", "manifest.json", ".metadata", "commit")
    for how in ("flip", "cut", "gone")
    if (name, how) != ("commit", "gone")  # then it was never a checkpoint
]


@pytest.mark.parametrize(("name", "how"), KINDS, ids=["-".join(kind) for kind in KINDS])
def test_the_next_older_one_is_taken_whatever_is_damaged_and_training_goes_on(tmp_path, name, how):
    url = f"file://{tmp_path}"
    states = saved_steps(url, (1, 2, 3))
    damage(tmp_path, 3, name, how)
    job = build("single", seed=7)
    with CheckpointManager(url, job.state(), mode="sync") as ckpt:
        report = ckpt.restore()
        assert report.step == 2
        (passed,) = report.passed_over
        assert "step 3" in str(passed) and "step 3" in str(report)
        assert_same((snapshot(job), rng()), states[2])
        # A damaged one may be asked for by number, and then nothing else is given.
        with pytest.raises((IntegrityError, FormatError)):
            ckpt.restore(3)
        assert ckpt.restore(2).step == 2
        job.train_step()
        ckpt.save(3)
        assert_same(snapshot(job), states[3][0])
    assert [(info.step, info.ref.generation) for info in ckpt.checkpoints() if info.on_lineage] == [
        (1, 1),
        (2, 1),
        (3, 2),
    ]


def hit(path: Path, old: bytes, new: bytes) -> None:
    """One flipped bit in a record."""
    (where,) = [i for i in range(len(old)) if old[i] != new[i]]
    assert (old[where] ^ new[where]).bit_count() == 1
    data = path.read_bytes()
    assert data.count(old) == 1
    path.unlink()
    path.write_bytes(data.replace(old, new))


@pytest.mark.parametrize(("old", "new"), [(b'"metrics"', b'"letrics"'), (b'"format":1', b'"format":3')])
def test_a_bit_that_makes_another_field_of_a_commit_record_is_damage_and_deletes_nothing(tmp_path, old, new):
    """With its metrics unseen the best one would be as good as any, and with another format nothing is restored."""
    url, live = f"file://{tmp_path}", {"n": 0}
    with CheckpointManager(url, {"live": live}, mode="sync") as ckpt:
        ckpt.restore()
        for step, loss in ((1, 0.1), (2, 0.5), (3, 0.4)):
            live["n"] = step
            ckpt.save(step, metrics={"loss": loss})
    hit(next(tmp_path.glob("commits/000000001-*")), old, new)
    hit(next(tmp_path.glob("commits/000000003-*")), old, new)
    with CheckpointManager(url, {"live": live}, mode="sync", keep=keep_best(1, "loss")) as ckpt:
        report = ckpt.restore()
        assert (report.step, live) == (2, {"n": 2})
        assert "step 3" in str(report.passed_over[0]) and "FormatError" in str(report.passed_over[0])
        for step in (4, 5):
            ckpt.save(step, metrics={"loss": 0.9})
    folders = {folder.name[:14] for folder in tmp_path.glob("step-*")}
    assert folders == {f"step-{step:09d}" for step in (1, 2, 3, 5)}


@pytest.mark.parametrize(("old", "new"), [(b'"ancestors"', b'"cncestors"'), (b'"format":1', b'"format":3')])
def test_a_bit_that_makes_another_field_of_a_generation_record_costs_no_lineage(tmp_path, old, new):
    """Without its ancestors all that came before this generation would be off the lineage."""
    url = f"file://{tmp_path}"
    for steps in ((1, 2), (3,)):
        with CheckpointManager(url, {"live": {"n": 1}}, mode="sync") as ckpt:
            ckpt.restore()
            for step in steps:
                ckpt.save(step)
    hit(tmp_path / "generations" / "000002.json", old, new)
    with CheckpointManager(url, {"live": {"n": 1}}) as ckpt:
        with pytest.raises(FormatError, match=r"generations/000002\.json.*backup") as caught:
            ckpt.restore()
        assert not isinstance(caught.value, NewerFormatError)
    hit(tmp_path / "generations" / "000002.json", new, old)
    with CheckpointManager(url, {"live": {"n": 1}}) as ckpt:
        assert ckpt.restore().step == 3
        assert [info.step for info in ckpt.checkpoints() if info.on_lineage] == [1, 2, 3]


def test_two_damaged_ones_are_both_passed_over_and_both_named(tmp_path):
    url = f"file://{tmp_path}"
    states = saved_steps(url, (1, 2, 3))
    damage(tmp_path, 3, "__0_0.distcp", "flip")
    damage(tmp_path, 2, "manifest.json", "gone")
    job = build("single", seed=7)
    with CheckpointManager(url, job.state()) as ckpt:
        report = ckpt.restore()
    assert report.step == 1
    assert [str(one.facts["ref"]) for one in report.passed_over] == ["step 3 (generation 1)", "step 2 (generation 1)"]
    assert_same((snapshot(job), rng()), states[1])


@pytest.mark.parametrize("steps", [(1,), (1, 2)])
def test_if_all_are_damaged_it_is_an_error_and_never_a_fresh_start(tmp_path, steps):
    url = f"file://{tmp_path}"
    saved_steps(url, steps)
    for step in steps:
        damage(tmp_path, step, "__0_0.distcp", "flip")
    job = build("single", seed=7)
    before = snapshot(job), rng()
    with CheckpointManager(url, job.state()) as ckpt:
        with pytest.raises(IntegrityError, match="none of the") as caught:
            ckpt.restore()
        assert all(f"step {step}" in str(caught.value) for step in steps)
        assert_same((snapshot(job), rng()), before)
        with pytest.raises(ResilioError, match=r"restore\(\)"):  # nor does it become one by going on
            ckpt.save(1)


@pytest.mark.parametrize("what", ["links", "fifos", "a file for the folder"])
def test_commit_records_that_are_no_files_are_damage_and_never_a_fresh_start(tmp_path, what):
    """As somebody leaves them who moved records to another disk: what they belong to is whole and must stay."""
    root, url = tmp_path / "run", f"file://{tmp_path}/run"
    saved_steps(url, (1, 2, 3))
    records = sorted(root.glob("commits/*"))
    for path in records:
        moved = tmp_path / path.name
        path.rename(moved)
        if what == "links":
            path.symlink_to(moved)
        elif what == "fifos":
            os.mkfifo(path)
    if what == "a file for the folder":
        (root / "commits").rmdir()
        (root / "commits").write_bytes(b"")
    job = build("single", seed=7)
    before, match = snapshot(job), "run/commits" if what == "a file for the folder" else "none of the 3 checkpoint"
    with CheckpointManager(url, job.state(), mode="sync") as ckpt:
        with pytest.raises(ResilioError, match=match):
            ckpt.restore()
        with pytest.raises(ResilioError):
            ckpt.save(1)
    assert_same(snapshot(job), before)
    assert len([*root.glob("step-*/manifest.json")]) == 3
    if what == "a file for the folder":
        (root / "commits").unlink()
        (root / "commits").mkdir()
    for path in records[:2]:
        path.unlink(missing_ok=True)
        (tmp_path / path.name).rename(path)
    with CheckpointManager(url, job.state(), mode="sync", keep=keep_last(2)) as ckpt:
        report = ckpt.restore()
        assert report.step == 2
        if what != "a file for the folder":  # there the third is gone for good
            assert "step 3" in str(report.passed_over[0])
        ckpt.save(4)
        ckpt.save(5)
    whole = {folder.name[:14] for folder in root.glob("step-*") if (folder / "manifest.json").exists()}
    assert whole == {"step-000000004", "step-000000005"} | (set() if "folder" in what else {"step-000000003"})


def test_a_link_to_the_newest_generation_s_record_is_an_error_and_never_a_fresh_start(tmp_path):
    root, url = tmp_path / "run", f"file://{tmp_path}/run"
    saved_steps(url, (1, 2))
    (path,) = root.glob("generations/*")
    path.rename(tmp_path / "moved")
    path.symlink_to(tmp_path / "moved")
    with CheckpointManager(url, build("single").state()) as ckpt, pytest.raises(AccessDeniedError, match="link"):
        ckpt.restore()


def test_what_a_newer_resilio_wrote_is_no_damage(tmp_path):
    url = f"file://{tmp_path}"
    saved_steps(url, (1, 2))
    record = next(tmp_path.glob("commits/000000002-*"))
    record.write_bytes(edited(record.read_bytes(), b'"format":1', b'"format":2'))
    with CheckpointManager(url, build("single").state()) as ckpt, pytest.raises(NewerFormatError, match="Upgrade"):
        ckpt.restore()


def test_state_that_does_not_fit_is_no_damage(tmp_path):
    url = f"file://{tmp_path}"
    saved_steps(url, (1, 2))
    with CheckpointManager(url, {"model": torch.nn.Linear(2, 2)}) as ckpt, pytest.raises(MismatchError):
        ckpt.restore()


def one_rank_cannot_read(rank: int, world: int, root: str, error: type[ResilioError]) -> tuple[int, list[str]]:
    storage = Unreadable(root, error) if rank == 1 else LocalStorage(root)
    job = build("fsdp2", rank, world, seed=7)
    before = snapshot(job)
    with CheckpointManager(storage, job.state()) as ckpt:
        if error is TransientError:
            with pytest.raises(TransientError, match="rank 1"):
                ckpt.restore()
            assert_same(snapshot(job), before)
            return 0, []
        report = ckpt.restore()
    return report.step, [str(one) for one in report.passed_over]


@pytest.mark.parametrize("error", [AccessDeniedError, TransientError])
def test_one_rank_that_cannot_read_decides_for_all_unless_the_fault_may_pass(tmp_path, error):
    saved_steps(f"file://{tmp_path}", (1, 2))
    first, second = run_world(one_rank_cannot_read, 2, str(tmp_path), error)
    assert first == second
    assert first[0] == (1 if error is AccessDeniedError else 0)
    assert all("rank 1" in one and "step 2" in one for one in first[1])


def test_a_step_that_is_not_there_is_refused_and_the_others_are_listed(tmp_path):
    saved_steps(f"file://{tmp_path}", (1, 2))
    with CheckpointManager(f"file://{tmp_path}", build("single").state()) as ckpt:
        with pytest.raises(LookupError, match=r"no checkpoint of step 5.*1, 2"):
            ckpt.restore(5)
        with pytest.raises(ConfigError, match="newest"):
            ckpt.restore("latest")
