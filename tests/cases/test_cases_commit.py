"""Public bug reports about what lies on storage. BR-23, 32, 33, 51, 52, 53, 54, 59, 62."""

from __future__ import annotations

import json
import logging
import os
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from cases.case_tools import command, files, save_first
from workload import assert_same, build, snapshot

import resilio
from resilio import CheckpointManager, keep_all, keep_last, open_storage, save_every
from resilio.errors import AccessDeniedError, ConfigError, IntegrityError, NoCheckpointError
from resilio.storage import LocalStorage
from resilio.storage.memory import MemoryStorage
from resilio.testing.worlds import Killed, WorldError, run_world


def steps(url: str) -> list[tuple[int, bool]]:
    """Every checkpoint: its step, and whether it is on the lineage."""
    with CheckpointManager(url, {"live": {}}) as ckpt:
        return [(info.step, info.on_lineage) for info in ckpt.checkpoints()]


def folder_of(run: Path, step: int) -> Path:
    (found,) = run.glob(f"step-{step:09d}-*")
    return found


# ------------------------------------------------------------------------ BR-23: the same step saved at the same place


def save_step_1(rank: int, world: int, url: str, fill: float) -> None:
    job = build("fsdp2" if world > 1 else "single", rank, world)
    with torch.no_grad():
        for p in job.model.parameters():
            p.fill_(fill)
    with CheckpointManager(url, job.state(), fresh=fill > 1, mode="sync") as ckpt:
        ckpt.restore()
        ckpt.save(1)


def restored(url: str, which: int | str = "newest") -> tuple[int, set[float]]:
    """The generation that a restore takes, and every value that parameters have then."""
    job = build("single")
    found = resilio.restore(url, job.state(), which, exclude=["dataloader"]).found
    assert found is not None
    return found.ref.generation, {value for p in job.model.parameters() for value in p.flatten().tolist()}


def test_br_23_a_step_saved_again_is_a_folder_of_its_own_and_a_mixture_of_two_is_refused(tmp_path: Any) -> None:
    url = f"file://{tmp_path}"
    run_world(save_step_1, 2, url, 1.0)
    before = files(tmp_path)
    with pytest.raises(WorldError) as died:  # the second try dies with all data written, and no .metadata yet
        run_world(save_step_1, 1, url, 2.0, init=False, env={"RESILIO_FAILPOINTS": "save.before_metadata=kill"})
    assert isinstance(died.value.outcomes[0], Killed)
    assert len(list(tmp_path.glob("step-*"))) == 2
    assert restored(url) == (1, {1.0})
    save_step_1(0, 1, url, 3.0)  # fewer ranks: what the others wrote then is no part of this one
    assert restored(url) == (2, {3.0})
    (folder,) = tmp_path.glob("step-000000001-g000002-*/.metadata")
    assert not list(folder.parent.glob("*_1_0*"))
    run_world(save_step_1, 2, url, 4.0)
    assert restored(url) == (3, {4.0})
    now = files(tmp_path)
    assert {name: now[name] for name in before} == before  # nothing published was written to
    # The right names, the right sizes, and rank 1's data of the first time: for plain DCP, rows of both.
    old, new = (next(tmp_path.glob(f"step-000000001-g00000{g}-*/__1_0.distcp")) for g in (1, 3))
    assert old.stat().st_size == new.stat().st_size
    shutil.copyfile(old, new)
    with pytest.raises(IntegrityError, match="__1_0"):
        restored(url, 1)
    with pytest.raises(IntegrityError, match="__1_0"):  # begun with fresh=True: nothing older is on its lineage
        restored(url)


# ----------------------------------------------------------------------------------------------- BR-53: damaged shards


def two_tensors(value: float) -> dict[str, Any]:
    a, b = torch.full((50_000,), value), torch.full((50_000,), value + 0.5)
    return {"a": a, "b": b, "n": {"x": value}, "rng": False}


DAMAGE = {
    "bit_at_25": ("__0_0.distcp", lambda data: flipped(data, 0.25)),
    "bit_at_60": ("__0_0.distcp", lambda data: flipped(data, 0.6)),
    "page_zeroed": ("__0_0.distcp", lambda data: data[:200_000] + bytes(4096) + data[204_096:]),
    "all_zeroed": ("__0_0.distcp", lambda data: bytes(len(data))),
    "cut": ("__0_0.distcp", lambda data: data[: len(data) // 2]),
    "shard_gone": ("__0_0.distcp", lambda data: None),
    "metadata_gone": (".metadata", lambda data: None),
    "metadata_empty": (".metadata", lambda data: b""),
}


def flipped(data: bytes, where: float) -> bytes:
    changed = bytearray(data)
    changed[int(len(data) * where)] ^= 4
    return bytes(changed)


@pytest.mark.parametrize("how", DAMAGE)
def test_br_53_damage_is_found_named_and_passed_over_loudly(tmp_path: Any, capsys: Any, caplog: Any, how: str) -> None:
    url, live = f"file://{tmp_path}", two_tensors(1.0)
    with CheckpointManager(url, live, mode="sync") as ckpt:
        ckpt.restore()
        ckpt.save(1)
        live["a"].fill_(2)
        live["b"].fill_(2.5)
        live["n"]["x"] = 2.0
        ckpt.save(2)
    name, change = DAMAGE[how]
    path = folder_of(tmp_path, 2) / name
    before = path.read_bytes()
    data = change(before)
    path.unlink()
    if data is not None:
        path.write_bytes(data)
    assert command("verify", url, "2", "--json") == 1
    (found,) = json.loads(capsys.readouterr().out)["checkpoints"]
    assert name in json.dumps(found)
    other = two_tensors(0.0)
    with pytest.raises(IntegrityError):
        resilio.restore(url, other, 2)
    assert_same(other, two_tensors(0.0))
    with caplog.at_level(logging.WARNING, "resilio"):
        report = resilio.restore(url, other)
    assert report.step == 1
    assert_same(other, two_tensors(1.0))
    assert [damage.facts["ref"].step for damage in report.passed_over] == [2]
    assert "step 2" in caplog.text and name in caplog.text
    if data is None or len(data) != len(before):  # that shows without reading: parts must not come from two steps
        part: dict[str, Any] = {"n": {"x": 0.0}, "rng": False}
        assert resilio.restore(url, part, only=["n"]).step == 1
        assert part["n"] == {"x": 1.0}


# ------------------------------------------------------------------------------ BR-62: a load that fails in the middle


def test_br_62_a_restore_that_fails_at_the_second_tensor_leaves_the_first_one_alone(tmp_path: Any) -> None:
    url = f"file://{tmp_path}"
    save_first(url, {"a": torch.full((50_000,), 7.0), "z": torch.full((50_000,), 7.0), "n": {"x": 7}})
    shard = folder_of(tmp_path, 1) / "__0_0.distcp"
    manifest = json.loads((shard.parent / "manifest-0.json").read_bytes())
    data = bytearray(shard.read_bytes())
    data[manifest["tensors"]["z"]["pieces"][0]["at"] + 1000] ^= 1
    shard.unlink()
    shard.write_bytes(data)
    live: dict[str, Any] = {"a": torch.ones(50_000), "z": torch.ones(50_000), "n": {"x": 1}}
    torch.manual_seed(3)
    draws = torch.get_rng_state()
    for restore in (lambda: resilio.restore(url, live), lambda: CheckpointManager(url, live).restore(1)):
        with pytest.raises(IntegrityError, match="z"):
            restore()
        assert live["a"].eq(1).all() and live["z"].eq(1).all() and live["n"] == {"x": 1}
        assert torch.equal(torch.get_rng_state(), draws)


# ----------------------------------------------------------------------------------------- BR-33: an incomplete newest


@pytest.mark.parametrize("lacks", ["commit", ".metadata", "manifest.json", "manifest-0.json", "__0_0.distcp"])
def test_br_33_an_incomplete_newest_checkpoint_gives_way_to_the_complete_one(tmp_path: Any, lacks: str) -> None:
    url, live = f"file://{tmp_path}", {"x": 100}
    with CheckpointManager(url, {"live": live}, mode="sync") as ckpt:
        ckpt.restore()
        ckpt.save(100)
        live["x"] = 200
        ckpt.save(200)
    commit = next(tmp_path.glob("commits/000000200-*"))
    (commit if lacks == "commit" else folder_of(tmp_path, 200) / lacks).unlink()
    with CheckpointManager(url, {"live": live}, mode="sync") as ckpt:
        report = ckpt.restore()
        assert (report.step, live, ckpt.next_step) == (100, {"x": 100}, 101)
        # Without a commit record it never was a checkpoint; with one, it is a damaged one. What it lacks is said.
        told, other = report.passed_over, report.unfinished
        if lacks == "commit":
            told, other = other, told
        assert [one.facts["ref"].step for one in told] == [200]
        assert lacks in str(told[0]) and str(told[0]) in str(report)
        assert not other
        live["x"] = 300
        ckpt.save(300)
    assert resilio.restore(url, {"live": live}).step == 300


def test_br_33_a_first_save_that_never_ended_is_told_and_is_no_checkpoint_by_number_either(tmp_path: Any) -> None:
    url = f"file://{tmp_path}"
    with pytest.raises(WorldError):
        run_world(save_step_1, 1, url, 1.0, init=False, env={"RESILIO_FAILPOINTS": "save.before_manifest=kill"})
    with CheckpointManager(url, {"live": {"x": 1}}, mode="sync") as ckpt:
        report = ckpt.restore()
        (never,) = report.unfinished
        assert report.found is None and "did not end" in str(never) and str(never) in str(report)
        with pytest.raises(NoCheckpointError, match=rf"{never.where}.*did not end"):
            ckpt.restore(1)
        ckpt.save(5)  # a later generation's, so not newer than what is found now
    with CheckpointManager(url, {"live": {"x": 1}}, mode="sync") as ckpt:
        assert ckpt.restore().unfinished == ()


# ------------------------------------------------------------------------------------ BR-51: names that look like ours

STRANGERS = ["step-9", "step-10", "step-100.bak", "step-100-tmp", "my-step-7", "step-0020", "step-000000100"]
STRANGERS += ["step-000000100-g000001", "step-000000100-g000001-7f3a.bak", "xstep-000000100-g000001-7f3a"]


def test_br_51_only_exact_names_count_and_others_are_never_touched(tmp_path: Any) -> None:
    url, live = f"file://{tmp_path}", {"x": 0}
    for name in STRANGERS:
        (tmp_path / name).mkdir()
        (tmp_path / name / ".metadata").write_bytes(b"somebody's")
    (tmp_path / "commits").mkdir()
    for name in ("100.json", "000000100-g000001.json.bak", "000000100-g000001", "latest"):
        (tmp_path / "commits" / name).write_bytes(b"{}")
    before = files(tmp_path)
    with CheckpointManager(url, {"live": live}, keep=keep_last(1), mode="sync") as ckpt:
        assert ckpt.restore().found is None
        for step in (9, 10, 20):
            live["x"] = step
            ckpt.save(step)
        assert [info.step for info in ckpt.checkpoints()] == [20]  # 20 after 9, and nobody's 100
        assert ckpt.restore().step == 20
    now = files(tmp_path)
    assert {name: now[name] for name in before} == before
    assert len(list(tmp_path.iterdir())) == len(STRANGERS) + 4  # commits, generations, resilio.json, one folder


# ------------------------------------------------------------------------------------ BR-32: which ones are the oldest


def test_br_32_order_is_by_lineage_not_by_number_nor_by_time_and_what_was_just_saved_stays(tmp_path: Any) -> None:
    url, live = f"file://{tmp_path}", {"x": 0}

    def save(step: int, keep: Any, restore: int | str = "newest") -> None:
        with CheckpointManager(url, {"live": live}, keep=keep, mode="sync") as ckpt:
            ckpt.restore(restore)
            live["x"] = step
            ckpt.save(step)

    for step in (100, 5000):
        save(step, keep_all())
    for path in tmp_path.rglob("*"):  # as after a copy: the old ones are the newest by time
        if "5000" in str(path):
            os.utime(path, (4e9, 4e9))
    save(200, keep_last(2), restore=100)
    save(300, keep_last(2))
    assert steps(url) == [(5000, False), (200, True), (300, True)]
    assert resilio.restore(url, {"live": live}).step == 300
    assert live == {"x": 300}


@pytest.mark.parametrize("n", [0, -1])
def test_br_32_keeping_none_is_no_policy(n: int) -> None:
    with pytest.raises(ConfigError, match="keep_last"):
        keep_last(n)


# ----------------------------------------------------------------------------------------- BR-52: who deletes, and how


class Deletes(LocalStorage):
    """Notes what is deleted through it, and refuses if told to."""

    def __init__(self, root: str, refuses: bool = False) -> None:
        super().__init__(root)
        self.deleted: list[str] = []
        self.refuses = refuses

    def delete(self, keys: Any) -> None:
        keys = list(keys)
        self.deleted += keys
        if self.refuses:
            raise AccessDeniedError("not yours to delete")
        super().delete(keys)


def save_and_prune(rank: int, world: int, root: str, refuses: bool) -> tuple[int, list[int], str]:
    os.chdir(root if rank == 0 else "/")  # no rank needs to stand where another does
    storage = Deletes(root, refuses)
    job = build("fsdp2", rank, world)
    with CheckpointManager(storage, job.state(), save=save_every(1), keep=keep_last(1), mode="async") as ckpt:
        ckpt.restore()
        for step in range(1, 5):
            job.train_step()
            handle = ckpt.step(step)
            assert handle is not None and handle.result(60).step == step
    # After the end: rank 1 hears of the last commit before rank 0 has swept.
    listed = [info.step for info in ckpt.checkpoints()]
    with pytest.raises(ConfigError, match=r"rank 1.*other arguments") as caught:
        CheckpointManager("runs/relative", job.state())
    return len(storage.deleted), listed, str(caught.value)


@pytest.mark.parametrize("refuses", [False, True], ids=["works", "fails"])
def test_br_52_one_rank_prunes_and_a_deletion_that_fails_does_not_fail_training(tmp_path: Any, refuses: bool) -> None:
    (by_0, steps_0, text_0), (by_1, steps_1, text_1) = run_world(save_and_prune, 2, str(tmp_path), refuses)
    assert by_0 > 0 and by_1 == 0
    assert steps_0 == steps_1 == ([1, 2, 3, 4] if refuses else [4])
    assert text_0 == text_1
    assert not (tmp_path / "runs").exists()


class Raced(LocalStorage):
    """Somebody else is quicker with every deletion."""

    def delete(self, keys: Any) -> None:
        keys = list(keys)
        for key in keys:
            (Path(self.root) / key).unlink()
        super().delete(keys)


def test_br_52_what_somebody_else_has_deleted_counts_as_deleted(tmp_path: Any, caplog: Any) -> None:
    with (
        caplog.at_level(logging.INFO, "resilio"),
        CheckpointManager(Raced(tmp_path), {"live": {"x": 0}}, keep=keep_last(1), mode="sync") as ckpt,
    ):
        ckpt.restore()
        for step in (1, 2, 3):
            ckpt.save(step)
        assert [info.step for info in ckpt.checkpoints()] == [3]
    assert len(list(tmp_path.glob("step-*"))) == 1
    swept = [record.getMessage() for record in caplog.records if record.getMessage().startswith("swept")]
    assert swept == [f"swept checkpoints=[{step}] leftovers=0 failed=[]" for step in (1, 2)]


# --------------------------------------------------------------------------------- BR-54: copies, there and back again


def test_br_54_a_copy_to_another_store_and_back_is_the_same_run_and_nothing_of_it_is_cleaned_up(tmp_path: Any) -> None:
    there, back = MemoryStorage("copied"), tmp_path / "back"
    job = build("single")
    with CheckpointManager(f"file://{tmp_path}/run", job.state(), mode="sync") as ckpt:
        ckpt.restore()
        for step in (1, 2):
            job.train_step()
            ckpt.save(step)
    want = snapshot(job)
    (tmp_path / "run" / "notes").mkdir()
    (tmp_path / "run" / "notes" / "step-2.txt").write_text("mine")
    # Object by object, in no particular order, with neither times nor empty folders.
    for source, target in ((open_storage(f"file://{tmp_path}/run"), there), (there, LocalStorage(back))):
        for info in reversed(list(source.list(""))):
            target.put(info.key, source.get(info.key))
    before = files(back)
    assert before == files(tmp_path / "run")
    twin = build("single", seed=3)
    with CheckpointManager(back, twin.state(), keep=keep_last(1), mode="sync") as ckpt:
        report = ckpt.restore()
        assert (report.step, report.passed_over) == (2, ())
        assert ckpt.verify(1) == ckpt.verify(2) == []
        assert_same(snapshot(twin), want)
        now = {key: data for key, data in files(back).items() if not key.startswith("leases/")}
        assert now == before  # a manager that starts deletes nothing, and adds nothing but its hold
        twin.train_step()
        ckpt.save(3)
        assert [info.step for info in ckpt.checkpoints()] == [3]
    assert (back / "notes" / "step-2.txt").read_text() == "mine"


# -------------------------------------------------------------------------------------------- BR-59: the one asked for


def test_br_59_the_step_asked_for_is_the_one_all_parts_come_from(tmp_path: Any) -> None:
    url, job = f"file://{tmp_path}", build("single")
    states = {}
    with CheckpointManager(url, job.state(), mode="sync") as ckpt:
        ckpt.restore()
        for step in (1, 2):
            job.train_step()
            ckpt.save(step)
            states[step] = snapshot(job)
    for step in (1, 2):
        whole = build("single", seed=4)
        with CheckpointManager(url, whole.state()) as ckpt:
            report = ckpt.restore(step)
            assert (report.step, ckpt.next_step) == (step, step + 1)
        assert_same(snapshot(whole), states[step])
        bare = build("single", seed=4)
        assert resilio.restore(url, {"model": bare.model}, step, only=["model"]).step == step
        weights = {key: value for key, value in states[step].items() if key[0] in "pb" and key[1:].isdigit()}
        assert_same({key: value for key, value in snapshot(bare).items() if key in weights}, weights)
    (folder_of(tmp_path, 1) / "__0_0.distcp").unlink()
    with pytest.raises(IntegrityError):  # a whole newer one is no answer to who asked for this one
        resilio.restore(url, build("single").state(), 1)
