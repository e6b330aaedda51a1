"""Public bug reports about saving in the background. BR-24, 25, 28, 57, 64, 65, 66."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from cases.case_tools import command, held_at, save_first
from workload import assert_same, build, snapshot

import resilio
from resilio import CheckpointManager, failpoints, keep_last, save_every
from resilio.errors import IntegrityError, NoCheckpointError, SaveError
from resilio.testing.worlds import run_world


@pytest.fixture(autouse=True)
def _disarmed() -> Iterator[None]:
    yield
    failpoints.disarm()


# ------------------------------------------------------------- BR-24: collectives of the saving thread and of the loop


def train_beside_saves(rank: int, world: int, url: str) -> list[int]:
    x = torch.ones(4)
    with CheckpointManager(url, {"weight": torch.ones(64)}, save=save_every(1), timeout_s=20) as ckpt:
        ckpt.restore()
        for step in range(1, 7):
            handle = ckpt.step(step)
            for _ in range(20):
                dist.all_reduce(x.fill_(1.0))
                assert x.tolist() == [world] * 4
            dist.barrier()
            assert handle is not None and handle.result(20).step == step
    return [info.step for info in ckpt.checkpoints()]


def test_br_24_collectives_of_the_loop_never_meet_those_of_a_save(tmp_path: Any) -> None:
    told = run_world(train_beside_saves, 2, f"file://{tmp_path}", group_timeout_s=20, timeout_s=60)
    assert told == [list(range(1, 7))] * 2


# ------------------------------------------------------- BR-25 and 65: nothing is published or deleted before its time


def listed(run: Path, capsys: Any) -> list[int]:
    assert command("ls", str(run), "--json") == 0
    return [one["step"] for one in json.loads(capsys.readouterr().out)["checkpoints"]]


@pytest.mark.parametrize("place", ["save.staged", "save.data_written", "save.before_metadata", "save.before_commit"])
def test_br_25_a_checkpoint_appears_and_older_ones_go_only_when_it_is_durable(
    tmp_path: Any, capsys: Any, place: str
) -> None:
    run, live = tmp_path / "run", torch.full((5,), 1.0)
    with CheckpointManager(f"file://{run}", {"live": live}, keep=keep_last(1), mode="async") as ckpt:
        ckpt.restore()
        ckpt.save(1).result(60)
        with held_at(place, tmp_path / "held", nth=1) as held:
            handle = ckpt.save(2)
            held.wait()
            assert not handle.done()
            assert [info.step for info in ckpt.checkpoints()] == listed(run, capsys) == [1]
            assert ckpt.verify(1) == []
            # Who starts now, the trainer being killed here, goes on from step 1.
            other = torch.zeros(5)
            assert resilio.restore(f"file://{run}", {"live": other, "rng": False}).step == 1
            assert other.tolist() == [1] * 5
            held.let_go()
            assert handle.result(60).step == 2
        assert listed(run, capsys) == [2]


@pytest.mark.parametrize("place", ["save.data_open", "save.part_written", "save.before_manifest", "save.before_commit"])
def test_br_65_keep_last_one_keeps_the_last_good_one_while_saves_fail(tmp_path: Any, place: str) -> None:
    url, live = f"file://{tmp_path}", torch.full((5,), 1.0)
    with CheckpointManager(url, {"live": live}, keep=keep_last(1), mode="async") as ckpt:
        ckpt.restore()
        ckpt.save(1).result(60)
        failpoints.arm(f"{place}=enospc")
        for step in (2, 4):
            live.fill_(step)
            assert isinstance(ckpt.save(step).exception(60), SaveError)
            with pytest.raises(SaveError, match="No space left"):  # told by the next step, or the one after it
                ckpt.step(step)
                ckpt.step(step + 1)
            assert [info.step for info in ckpt.checkpoints()] == [1]
            assert ckpt.verify(1) == []
        failpoints.disarm()
        other = torch.zeros(5)
        assert resilio.restore(url, {"live": other, "rng": False}).step == 1
        assert other.tolist() == [1] * 5
        ckpt.save(6).result(60)
        assert [info.step for info in ckpt.checkpoints()] == [6]
    assert len(list(tmp_path.glob("step-*"))) == 1  # and what failed is gone


# ----------------------------------------------------------------------- BR-28: what a save records is of its own step


def test_br_28_step_metrics_and_values_are_those_of_the_moment_of_the_save(tmp_path: Any) -> None:
    run, loss = tmp_path / "run", torch.tensor(0.5)
    progress = {"step": 1000}
    metrics = {"loss": loss, "seen": 64_000}
    with CheckpointManager(f"file://{run}", {"progress": progress}, mode="async") as ckpt:
        ckpt.restore()
        with held_at("save.before_metadata", tmp_path / "held", nth=1) as held:
            handle = ckpt.save(1000, metrics=metrics)
            held.wait()
            progress["step"] = 1001  # training goes on
            loss.fill_(9.0)
            metrics["seen"] = 64_064
            assert ckpt.step(1001, metrics={"loss": loss}) is None
            held.let_go()
            ref = handle.result(60)
        (info,) = ckpt.checkpoints()
        assert (ref.step, handle.step, info.step) == (1000, 1000, 1000)
        assert info.metrics == {"loss": 0.5, "seen": 64_000}
        assert info.attempt.startswith("step-000001000-")
        ckpt.restore()
        assert progress == {"step": 1000}
        assert ckpt.next_step == 1001


# -------------------------------------------------------------------------------------------- BR-57: host memory grows

MB = 2**20


def resident_bytes() -> int:
    # Not what the kernel holds for files: only memory of our own.
    fields = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    return int(fields["RssAnon"].split()[0]) * 1024


def save_again_and_again(rank: int, world: int, url: str, mode: str) -> list[int]:
    live = torch.ones(16 * MB // 4)
    sizes = []
    with CheckpointManager(url, {"live": live}, keep=keep_last(1), mode=mode) as ckpt:
        ckpt.restore()
        for step in range(1, 13):
            ckpt.save(step).result(60)
            if step in (3, 12):
                sizes.append(resident_bytes())
    return sizes


@pytest.mark.parametrize("mode", ["async", "sync"])
def test_br_57_memory_does_not_grow_with_the_number_of_saves(tmp_path: Any, mode: str) -> None:
    ((early, late),) = run_world(save_again_and_again, 1, f"file://{tmp_path}", mode, init=False)
    assert late - early < 2 * 16 * MB  # nine saves later


# ---------------------------------------------------------------------------- BR-64: the hint is gone, the data is not


def test_br_64_without_its_small_files_a_run_is_found_or_refused_and_never_begun_anew(tmp_path: Any) -> None:
    url, live = f"file://{tmp_path}", {"n": 0}
    with CheckpointManager(url, {"live": live}, save=save_every(1), mode="async") as ckpt:
        ckpt.restore()
        for step in (1, 2):
            live["n"] = step
            ckpt.step(step)
    (tmp_path / "resilio.json").unlink()
    other = {"n": 0}
    with CheckpointManager(url, {"live": other}) as ckpt:
        assert ckpt.restore().step == 2
        assert other == {"n": 2}
    for record in tmp_path.glob("generations/*"):
        record.unlink()
    other["n"] = -1
    with CheckpointManager(url, {"live": other}) as ckpt:
        with pytest.raises(IntegrityError, match="generation"):
            ckpt.restore()
        with pytest.raises((SaveError, IntegrityError)):  # not even if it is tried all the same
            ckpt.save(1).result(60)
    assert other == {"n": -1}
    assert len(list(tmp_path.glob("commits/*"))) == 2


def test_br_64_a_job_that_does_not_ask_for_a_restore_cannot_start_at_step_one_over_a_run(tmp_path: Any) -> None:
    url = f"file://{tmp_path}"
    save_first(url, {"live": {"n": 1}}, step=700)
    manager = CheckpointManager(url, {"live": {"n": 0}}, save=save_every(1), mode="async")
    with manager as ckpt, pytest.raises(SaveError, match=r"restore\(\)"):
        ckpt.step(1)
    assert [path.name[:9] for path in tmp_path.glob("commits/*")] == ["000000700"]
    with pytest.raises(NoCheckpointError):  # and a reader of a place where there is nothing is told so
        resilio.restore(f"{url}/elsewhere", {"live": {"n": 0}})


# -------------------------------------------------------- BR-66: buffers used again while the last save reads them yet


@pytest.mark.parametrize("place", ["save.staged", "save.data_open"])
def test_br_66_the_next_save_waits_for_the_last_one_before_it_takes_the_buffers(tmp_path: Any, place: str) -> None:
    job = build("single")
    states = {}
    with CheckpointManager(f"file://{tmp_path}/run", job.state(), mode="async") as ckpt:
        ckpt.restore()
        with held_at(place, tmp_path / "held", nth=1) as held:
            first = ckpt.save(1)
            states[1] = snapshot(job)
            held.wait()
            wait, waited = first.exception, []

            def let_go_when_waited_for(timeout_s: float | None = None) -> BaseException | None:
                if not waited:
                    held.let_go()
                waited.append(True)
                return wait(timeout_s)

            first.exception = let_go_when_waited_for  # type: ignore[method-assign]
            job.train_step()
            states[2] = snapshot(job)
            second = ckpt.save(2)
            if not waited:  # it took the buffers from under the first one
                let_go_when_waited_for(60)
            for handle in (first, second):
                handle.result(60)
        for step, state in states.items():
            assert ckpt.restore(step).step == step
            assert ckpt.verify(step) == []
            assert_same(snapshot(job), state)
