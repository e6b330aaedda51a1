"""What a save in the background promises: a snapshot, one at a time, and a failure that everybody hears of."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed.checkpoint as dcp
from workload import assert_same, build, snapshot

import resilio
from resilio import CheckpointManager, TrainingState, failpoints, per_rank, save_every
from resilio.errors import RanksDisagreeError, SaveError
from resilio.testing.worlds import run_world


@pytest.fixture(autouse=True)
def _disarmed():
    yield
    failpoints.disarm()


def test_br_18_values_changed_right_after_an_async_save_returns_are_not_in_the_checkpoint(tmp_path):
    held = tmp_path / "held"
    job = build("single")
    job.train_step()
    extras = {
        "array": np.ones(3),
        "nested": {"lr": [0.1, {"deep": (1, 2)}]},
        "tensor": torch.ones(4),
        "scalar": torch.tensor(1.0),
    }
    state = {**job.state(), **extras}
    failpoints.arm(f"save.staged=hold:{held}")
    with CheckpointManager(f"file://{tmp_path}/run", state, mode="async") as ckpt:
        ckpt.restore()
        want = snapshot(job)
        handle = ckpt.save(1)
        assert not handle.done()  # held open: nothing has been written when the values change
        job.train_step()
        extras["array"][:] = -1
        extras["nested"]["lr"][0] = 9.0
        extras["nested"]["lr"][1]["deep"] = ()
        extras["tensor"].fill_(-1)
        extras["scalar"].fill_(2)
        while not held.exists():
            pass
        held.unlink()
        assert handle.result(60).step == 1
    twin = build("single", seed=3)
    fresh = {"array": np.zeros(3), "nested": {}, "tensor": torch.zeros(4), "scalar": torch.tensor(0.0)}
    with CheckpointManager(f"file://{tmp_path}/run", {**twin.state(), **fresh}) as ckpt:
        ckpt.restore()
    assert_same(snapshot(twin), want)
    assert fresh["array"].tolist() == [1, 1, 1]
    assert fresh["nested"] == {"lr": [0.1, {"deep": (1, 2)}]}
    assert fresh["tensor"].tolist() == [1, 1, 1, 1]
    assert fresh["scalar"].item() == 1


def fail_on_rank_1(rank: int, world: int, url: str) -> dict[str, Any]:
    job = build("fsdp2", rank, world)
    heard: list[tuple[int, str]] = []
    with CheckpointManager(url, job.state(), save=save_every(2), mode="async") as ckpt:
        ckpt.restore()
        for step in range(1, 9):
            job.train_step()
            try:
                ckpt.step(step)
            except SaveError as error:
                heard.append((step, str(error)))
        ckpt.save(9)
    return {"heard": heard, "steps": [info.step for info in ckpt.checkpoints()]}


@pytest.mark.parametrize("place", ["save.data_open", "save.part_written", "save.before_commit"])
def test_br_26_a_failed_background_save_is_the_same_error_on_all_ranks_at_the_same_step(tmp_path, place):
    rank = 0 if place == "save.before_commit" else 1
    env = {"RESILIO_FAILPOINTS": f"{place}=enospc@{rank}#2"}
    first, second = run_world(fail_on_rank_1, 2, f"file://{tmp_path}", env=env)
    assert first["heard"] == second["heard"]
    ((step, text),) = first["heard"]
    assert (
        5 <= step <= 6
    )  # the save of step 4 failed; told at one of the next steps, before the next save at the latest
    assert f"rank {rank}" in text and "No space left" in text
    # The failed attempt is no checkpoint; the ones after it are (step 6 was not saved if the error came in its place).
    assert 4 not in first["steps"] and {2, 8, 9} <= set(first["steps"])


def test_a_failure_nobody_looked_at_is_raised_by_close(tmp_path):
    job = build("single")
    failpoints.arm("save.data_written=raise")
    ckpt = CheckpointManager(f"file://{tmp_path}", job.state(), mode="async")
    ckpt.restore()
    ckpt.save(1)
    with pytest.raises(SaveError, match="failpoint"):
        ckpt.close()
    failpoints.disarm()
    assert list(Path(tmp_path).glob("commits/*")) == []


def test_saving_the_same_step_twice_gives_the_same_handle_and_one_checkpoint(tmp_path):
    job = build("single")
    with CheckpointManager(f"file://{tmp_path}", job.state(), save=save_every(1)) as ckpt:
        ckpt.restore()
        handle = ckpt.step(1)
        assert ckpt.save(1) is handle
        assert ckpt.step(1, last=True) is handle
    assert [info.step for info in ckpt.checkpoints()] == [1]


def test_a_step_whose_save_failed_in_the_background_is_told_and_then_saved(tmp_path):
    """Asked again for the same step, the manager must not hand out the failed attempt as if it were the checkpoint."""
    job = build("single")
    failpoints.arm("save.data_written=raise#1")
    with CheckpointManager(f"file://{tmp_path}", job.state(), mode="async") as ckpt:
        ckpt.restore()
        failed = ckpt.save(1)
        assert failed.exception(60) is not None
        with pytest.raises(SaveError, match="failpoint"):
            ckpt.save(1)
        again = ckpt.save(1)
        assert again is not failed and again.result(60).step == 1


def test_tensors_shared_inside_an_extra_come_back_shared(tmp_path):
    url = f"file://{tmp_path}"
    weight = torch.arange(3.0)
    with CheckpointManager(url, {"mine": {"shadow": {"a": weight, "b": weight, "c": torch.ones(3)}}}) as ckpt:
        ckpt.restore()
        ckpt.save(1)
    live: dict[str, Any] = {"shadow": {}}
    resilio.restore(url, {"mine": live})
    shadow = live["shadow"]
    assert shadow["a"] is shadow["b"] and shadow["c"] is not shadow["a"]
    assert (shadow["a"].tolist(), shadow["c"].tolist()) == ([0, 1, 2], [1, 1, 1])
    folder = next(Path(tmp_path).glob("step-*"))
    plain = {"mine": {"shadow": {"a": torch.zeros(3), "b": torch.zeros(3)}}}
    dcp.load(plain, checkpoint_id=folder)  # readers that know nothing of ties find both
    assert plain["mine"]["shadow"]["b"].tolist() == [0, 1, 2]


def differing(rank: int, world: int, url: str, declared: bool) -> Any:
    value = torch.tensor([rank * 10.0, rank * 10.0 + 1])
    extras = {"own": per_rank(value) if declared else {"offset": rank * 1000}}
    job = build("fsdp2", rank, world)
    with CheckpointManager(url, TrainingState(**job.state(), **extras), mode="sync") as ckpt:
        ckpt.restore()
        ckpt.save(1)
        torch.manual_seed(99)  # the same on all ranks: only a restore brings their own streams back
        value.zero_()
        ckpt.restore()
    return value.tolist(), torch.rand(1).item()


def test_br_17_a_value_that_differs_between_ranks_is_refused_by_name_unless_it_is_declared_per_rank(tmp_path):
    with pytest.raises(Exception, match=r"own\.offset.*rank 1.*per_rank"):
        run_world(differing, 2, f"file://{tmp_path}/a", False)
    (own0, _), (own1, _) = run_world(differing, 2, f"file://{tmp_path}/b", True)
    assert own0 == [0.0, 1.0]
    assert own1 == [10.0, 11.0]


def streams(rank: int, world: int, url: str) -> tuple[float, float]:
    torch.manual_seed(rank)
    job = {"counter": {"n": 0}}
    with CheckpointManager(url, job, mode="sync") as ckpt:
        ckpt.restore()
        ckpt.save(1)
        want = torch.rand(1).item()
        torch.manual_seed(99)
        ckpt.restore()
    return want, torch.rand(1).item()


def test_br_17_each_rank_gets_its_own_random_stream_back(tmp_path):
    (want0, got0), (want1, got1) = run_world(streams, 2, f"file://{tmp_path}")
    assert got0 == want0
    assert got1 == want1
    assert got0 != got1


def test_a_rank_given_other_arguments_is_named(tmp_path):
    with pytest.raises(Exception, match="rank 1 was given other arguments"):
        run_world(other_arguments, 2, f"file://{tmp_path}")


def other_arguments(rank: int, world: int, url: str) -> None:
    CheckpointManager(url, {"n": {"x": 1}}, save=save_every(2 + rank))


def test_memory_storage_is_refused_by_several_ranks():
    with pytest.raises(Exception, match="one process"):
        run_world(in_memory, 2)


def in_memory(rank: int, world: int) -> None:
    CheckpointManager("memory://run", {"n": {"x": 1}})


def fail_to_stage(rank: int, world: int, url: str) -> tuple[str, list[int]]:
    job = build("fsdp2", rank, world)
    with CheckpointManager(url, job.state(), mode="async") as ckpt:
        ckpt.restore()
        stager = ckpt._engine._stager
        if rank == 1:  # as a host without memory for the copy
            stager._copies = out_of_memory  # type: ignore[method-assign]
        ckpt.save(1)
        with pytest.raises(SaveError, match="rank 1: MemoryError") as caught:
            ckpt.save(2)
        stager.__dict__.pop("_copies", None)
        ckpt.save(3)
    return str(caught.value), [info.step for info in ckpt.checkpoints()]


def out_of_memory(state: dict[str, Any], late: Any) -> dict[str, Any]:
    raise MemoryError("no room for the copy")


def test_a_rank_that_cannot_stage_fails_the_save_on_all_and_leaves_nobody_waiting(tmp_path):
    first, second = run_world(fail_to_stage, 2, f"file://{tmp_path}")
    assert first == second
    assert first[1] == [3]


def test_a_fresh_run_over_an_old_one_starts_anew_and_then_restores_its_own(tmp_path):
    url = f"file://{tmp_path}"
    for step, fresh in ((5, False), (2, True)):
        job = build("single", seed=step)
        with CheckpointManager(url, job.state(), fresh=fresh) as ckpt:
            assert ckpt.restore().found is None
            job.train_step()
            want = snapshot(job)
            ckpt.save(step).result()
            if fresh:
                ckpt.restore()  # settles, and finds what this run has saved, not step 5
                assert ckpt.next_step == 3
                assert_same(snapshot(job), want)
    twin = build("single", seed=9)
    with CheckpointManager(url, twin.state()) as ckpt:
        assert ckpt.restore().step == 2
    assert [(info.step, info.on_lineage) for info in ckpt.checkpoints()] == [(5, False), (2, True)]


def test_the_first_save_over_checkpoints_nobody_asked_about_is_refused(tmp_path):
    job = build("single")
    with CheckpointManager(f"file://{tmp_path}", job.state()) as ckpt:
        ckpt.restore()
        ckpt.save(1)
    with CheckpointManager(f"file://{tmp_path}", job.state()) as ckpt:
        with pytest.raises(SaveError, match=r"restore\(\).*fresh=True"):
            ckpt.save(1)
        ckpt.restore()
        ckpt.save(2)


def test_a_signal_handler_that_exits_inside_a_sync_save_exits(tmp_path, monkeypatch):
    # as `signal.signal(SIGTERM, lambda *_: sys.exit(143))` does when the signal comes while bytes are written
    def leave(*_: Any) -> None:
        raise SystemExit(143)

    job = build("single")
    with CheckpointManager(f"file://{tmp_path}", job.state(), mode="sync") as ckpt:
        ckpt.restore()
        ckpt.save(1)
        monkeypatch.setattr("resilio.engine.writer.failpoints.hit", leave)
        with pytest.raises(SystemExit) as left:
            ckpt.save(2)
        assert left.value.code == 143
        monkeypatch.undo()
        ckpt.save(3)
    assert [info.step for info in ckpt.checkpoints()] == [1, 3]


def save_out_of_step(rank: int, world: int, url: str) -> str:
    with CheckpointManager(url, {"n": {"x": 1}}) as ckpt:
        ckpt.restore()
        with pytest.raises(RanksDisagreeError) as caught:
            ckpt.save(10 + rank)
        ckpt.save(12)
    return str(caught.value)


def test_ranks_that_save_different_steps_are_told_so_and_nothing_is_written(tmp_path):
    first, second = run_world(save_out_of_step, 2, f"file://{tmp_path}")
    assert first == second
    assert "[10, 11]" in first
