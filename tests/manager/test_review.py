"""Promises at their edges: odd moments, odd callers, one rank alone in trouble, every kind of object damaged."""

from __future__ import annotations

import asyncio
import gc
import json
import shutil
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from workload import assert_same, build, rng, snapshot

import resilio
from resilio import CheckpointManager, TrainingState, failpoints, per_rank, save_every
from resilio.clock import SystemClock
from resilio.errors import (
    ConfigError,
    FormatError,
    IntegrityError,
    LiveStateError,
    MismatchError,
    RestoreError,
    SaveError,
    TransientError,
)
from resilio.policies import KeepPolicy
from resilio.storage.memory import MemoryStorage
from resilio.testing.worlds import run_world


@pytest.fixture(autouse=True)
def _disarmed():
    yield
    failpoints.disarm()


def test_giving_up_to_await_a_save_does_not_cancel_it(tmp_path):
    job, held = build("single"), tmp_path / "held"
    failpoints.arm(f"save.staged=hold:{held}#1")

    async def wait_a_moment(handle: Any) -> None:
        with pytest.raises(asyncio.TimeoutError):
            await asyncio.wait_for(_awaited(handle), 0.05)

    with CheckpointManager(f"file://{tmp_path}/run", job.state()) as ckpt:
        ckpt.restore()
        handle = ckpt.save(1)
        asyncio.run(wait_a_moment(handle))
        assert not handle.done()
        while not held.exists():
            pass
        held.unlink()
        ckpt.save(2)
        assert asyncio.run(_awaited(handle)).step == 1
    assert [info.step for info in ckpt.checkpoints()] == [1, 2]


async def _awaited(handle: Any) -> Any:
    return await handle


def test_an_interrupt_while_waiting_for_a_save_leaves_it_to_end_well(tmp_path):
    job, held = build("single"), tmp_path / "held"
    failpoints.arm(f"save.data_open=hold:{held}#1")
    with pytest.raises(KeyboardInterrupt), CheckpointManager(f"file://{tmp_path}/run", job.state()) as ckpt:
        ckpt.restore()
        handle = ckpt.save(1)
        while not held.exists():
            pass
        wait = handle.exception

        def interrupted(timeout_s: float | None = None) -> None:
            handle.exception = wait
            held.unlink()
            raise KeyboardInterrupt

        handle.exception = interrupted
        ckpt.save(2)
    assert handle.done()  # the block was not left, and the groups not torn down, under the thread that saves
    assert [info.step for info in ckpt.checkpoints()] == [1]


class Stubborn:
    """Takes no state, not even its own back, once it is told to."""

    def __init__(self) -> None:
        self.fails = False

    def state_dict(self) -> dict[str, Any]:
        return {"x": 1}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        if self.fails:
            raise ValueError("no")


def test_a_manager_whose_live_state_became_a_mixture_saves_no_more_until_a_restore_goes_well(tmp_path):
    job, stubborn = build("single"), Stubborn()
    with CheckpointManager(f"file://{tmp_path}", {**job.state(), "odd": stubborn}, mode="sync") as ckpt:
        ckpt.restore()
        ckpt.save(1)
        ckpt.save(2)
        stubborn.fails = True
        with pytest.raises(LiveStateError):
            ckpt.restore(1)
        for save in (ckpt.save, ckpt.step):
            with pytest.raises(LiveStateError, match="mixture"):
                save(3)
        assert [info.step for info in ckpt.checkpoints()] == [1, 2]
        stubborn.fails = False
        ckpt.restore()
        ckpt.save(3)
    assert [info.step for info in ckpt.checkpoints()] == [1, 2, 3]


def test_a_step_asked_for_by_number_is_never_passed_over_because_the_run_is_fresh(tmp_path):
    url = f"file://{tmp_path}"
    with CheckpointManager(url, {"n": {"x": 5}}, mode="sync") as ckpt:
        ckpt.restore()
        ckpt.save(5)
    with CheckpointManager(url, {"n": {"x": 0}}, fresh=True) as ckpt, pytest.raises(ConfigError, match="fresh=True"):
        ckpt.restore(5)


@pytest.mark.parametrize("mode", ["sync", "async"])
def test_a_keep_policy_that_raises_loses_no_checkpoint_and_hangs_nobody(tmp_path, mode):
    class Broken(KeepPolicy):
        def reasons(self, *args: Any, **kwargs: Any) -> Any:
            raise ZeroDivisionError("keep")

        keeps = decide = reasons

        def __repr__(self) -> str:
            return "broken"

    Broken.__abstractmethods__ = frozenset()
    with CheckpointManager(f"file://{tmp_path}", {"n": {"x": 1}}, keep=Broken(), mode=mode) as ckpt:
        ckpt.restore()
        for step in (1, 2):
            assert ckpt.save(step).result(30).step == step
    assert [info.step for info in ckpt.checkpoints()] == [1, 2]


def test_a_default_device_does_not_reach_what_is_ours(tmp_path):
    run_world(on_meta_device, 2, f"file://{tmp_path}")


def on_meta_device(rank: int, world: int, url: str) -> None:
    job = build("ddp", rank, world)
    want = snapshot(job)
    with torch.device("meta"):  # stands for torch.set_default_device("cuda")
        for mode in ("sync", "async"):
            with CheckpointManager(f"{url}/{mode}", job.state(), save=save_every(1), mode=mode) as ckpt:
                ckpt.restore()
                for step in (1, 2, 3):
                    ckpt.step(step)
                ckpt.restore()
    assert_same(snapshot(job), want)


def one_cannot_begin(rank: int, world: int, url: str) -> list[str]:
    state = {"n": {"x": 1}} if rank == 0 else {"rank": {"x": 1}}  # reserved
    said = []
    for begin in (CheckpointManager, resilio.restore):
        with pytest.raises(ConfigError, match="cannot name a part") as caught:
            begin(url, state, timeout_s=20)
        said.append(str(caught.value))
    return said


def test_a_rank_that_cannot_make_its_manager_or_its_state_is_named_on_all(tmp_path):
    first, second = run_world(one_cannot_begin, 2, f"file://{tmp_path}", timeout_s=40)
    assert first == second
    assert all("rank 1" in text for text in first)


def test_a_restore_that_cannot_learn_its_branch_changes_nothing(tmp_path):
    url = f"file://{tmp_path}"
    live = {"x": 0}
    with CheckpointManager(url, {"n": live}, mode="sync") as ckpt:
        ckpt.restore()
        for step in (1, 2):
            live["x"] = step
            ckpt.save(step)
        ckpt.restore(1)
        ckpt.save(3)
        live["x"] = -1
        record = tmp_path / "generations" / "000001.json"
        data = record.read_bytes()
        record.unlink()
        with pytest.raises(IntegrityError):
            ckpt.restore(2)
        assert live["x"] == -1
        ckpt.save(4)  # it goes on where it was
        record.write_bytes(data)
        assert ckpt.restore(2).step == 2
        assert live["x"] == 2


def damage(path: Path, how: str) -> None:
    data = bytearray(path.read_bytes())
    if how == "flip" and path.suffix == ".distcp":  # not between two tensors: only `verify` reads there
        part = json.loads((path.parent / "manifest-1.json").read_bytes())
        shared = [tensor for key, tensor in part["tensors"].items() if not key.startswith("rank.")]
        pieces = [piece for tensor in shared for piece in tensor["pieces"]]
        data[max(pieces, key=lambda piece: piece["size_bytes"])["at"]] ^= 1
    elif how == "flip":
        data[len(data) // 2] ^= 1
    elif how == "cut":
        del data[-1:]
    elif how == "zero":
        data[:] = bytes(len(data))
    path.unlink()
    if how != "gone":
        path.write_bytes(data)


@pytest.mark.parametrize("how", ["flip", "cut", "zero", "gone"])
@pytest.mark.parametrize("name", [".metadata", "manifest.json", "manifest-1.json", "__1_0.digests", "__1_0.distcp"])
def test_damage_to_any_object_is_found_by_a_restore_and_changes_nothing(two_ranks, tmp_path, name, how):
    shutil.copytree(two_ranks, tmp_path / "run")
    (folder,) = (tmp_path / "run").glob("step-*")
    damage(folder / name, how)
    job = build("single", seed=4)
    before, draws = snapshot(job), rng()
    with (
        CheckpointManager(f"file://{tmp_path}/run", job.state()) as ckpt,
        pytest.raises((IntegrityError, FormatError)),
    ):
        assert ckpt.verify(1)
        ckpt.restore(exclude=["dataloader"])
    assert_same(snapshot(job), before)
    assert_same(rng(), draws)


@pytest.fixture(scope="module")
def two_ranks(tmp_path_factory):
    path = tmp_path_factory.mktemp("two_ranks") / "run"
    run_world(save_one, 2, f"file://{path}")
    return path


def save_one(rank: int, world: int, url: str) -> None:
    job = build("fsdp2", rank, world)
    with CheckpointManager(url, job.state(), mode="sync") as ckpt:
        ckpt.restore()
        job.train_step()
        ckpt.save(1)


def one_reads_damage(rank: int, world: int, url: str) -> str:
    job = build("fsdp2", rank, world, seed=4)
    before, draws = snapshot(job), rng()
    with CheckpointManager(url, job.state(), mode="async", timeout_s=30) as ckpt:
        with pytest.raises(IntegrityError, match="rank 1") as caught:
            ckpt.restore()
        assert_same(snapshot(job), before)
        assert_same(rng(), draws)
        with pytest.raises(SaveError):  # nothing was restored: what is there must not be built over
            ckpt.save(1)
    return str(caught.value)


def test_damage_that_only_one_rank_reads_stops_the_restore_on_all(two_ranks, tmp_path):
    shutil.copytree(two_ranks, tmp_path / "run")
    (folder,) = (tmp_path / "run").glob("step-*")
    (piece,) = json.loads((folder / "manifest-1.json").read_text())["tensors"]["model.emb.weight"]["pieces"]
    data = bytearray((folder / "__1_0.distcp").read_bytes())
    data[piece["at"]] ^= 1  # in rank 1's rows: what both ranks have is written by either, and read by both
    (folder / "__1_0.distcp").write_bytes(data)
    first, second = run_world(one_reads_damage, 2, f"file://{tmp_path}/run")
    assert first == second


def one_differs(rank: int, world: int, url: str) -> str:
    job = build("fsdp2", rank, world, seed=4)
    before = snapshot(job)
    own = torch.zeros(3 + rank)  # rank 1's has another shape than the saved one
    with CheckpointManager(url, TrainingState(**job.state(), own=per_rank(own)), mode="sync", timeout_s=30) as ckpt:
        with pytest.raises(MismatchError, match=r"(?s)rank 1.*own") as caught:
            ckpt.restore(1)
        assert_same(snapshot(job), before)
    return str(caught.value)


def save_own(rank: int, world: int, url: str) -> None:
    job = build("fsdp2", rank, world)
    with CheckpointManager(url, TrainingState(**job.state(), own=per_rank(torch.ones(3))), mode="sync") as ckpt:
        ckpt.restore()
        ckpt.save(1)


def test_a_mismatch_on_one_rank_stops_the_restore_on_all(tmp_path):
    run_world(save_own, 2, f"file://{tmp_path}")
    first, second = run_world(one_differs, 2, f"file://{tmp_path}")
    assert first == second


class Fragile:
    """Refuses to load on one rank."""

    def __init__(self, fails: bool) -> None:
        self.x, self.fails = 1, fails

    def state_dict(self) -> dict[str, Any]:
        return {"x": self.x}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        if self.fails:
            self.fails = False
            raise KeyError("only here, only once")
        self.x = state["x"]


def load_fails_on_one(rank: int, world: int, url: str) -> tuple[str, int]:
    job, fragile = build("fsdp2", rank, world), Fragile(False)
    with CheckpointManager(url, {**job.state(), "odd": fragile}, mode="async", timeout_s=30) as ckpt:
        ckpt.restore()
        ckpt.save(1)
        job.train_step()
        fragile.x, fragile.fails = 7, rank == 1
        before = snapshot(job)
        with pytest.raises(RestoreError, match=r"rank 1.*odd") as caught:
            ckpt.restore()
        assert_same(snapshot(job), before)
        assert fragile.x == 7
        ckpt.restore()
        ckpt.close()
        ckpt.close()
    return str(caught.value), fragile.x


def test_a_load_that_fails_on_one_rank_is_undone_on_all_and_the_next_one_works(tmp_path):
    first, second = run_world(load_fails_on_one, 2, f"file://{tmp_path}")
    assert first == second
    assert first[1] == 1


def empty_groups(seed: int) -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(seed)
    net = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2), nn.Linear(4, 2))
    net[1].weight.requires_grad_(False)  # frozen; the third layer is never used
    groups = [{"params": [], "lr": 0.3}, {"params": [*net[0].parameters()]}, {"params": [], "lr": 0.7}]
    groups.append({"params": [net[1].bias, *net[2].parameters()], "weight_decay": 0.5})
    return net, torch.optim.AdamW(groups, lr=0.1, amsgrad=True)


def test_empty_groups_frozen_and_unused_parameters_come_back_as_they_were(tmp_path):
    pairs = [empty_groups(seed) for seed in (0, 1)]
    states = [{"model": net, "optimizer": optimizer} for net, optimizer in pairs]
    net, optimizer = pairs[0]
    for _ in range(2):
        net[1](net[0](torch.ones(2, 3))).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    optimizer.param_groups[2]["lr"] = 0.9
    for state in states:
        with CheckpointManager(f"file://{tmp_path}", state) as ckpt:
            if not ckpt.restore().found:
                ckpt.save(1)
    one, other = (optimizer.state_dict() for _, optimizer in pairs)
    assert_same(other, one)
    assert_same(dict(pairs[1][0].state_dict()), dict(pairs[0][0].state_dict()))


def test_what_a_save_held_is_let_go_with_it(tmp_path):
    big = torch.zeros(1000)
    alive = weakref.ref(big)
    state = TrainingState(big=big)
    with CheckpointManager(f"file://{tmp_path}", state, mode="async") as ckpt:
        ckpt.restore()
        kept = [ckpt.save(1)]
        kept[0].result()
        failpoints.arm("save.data_written=raise")
        kept.append(ckpt.save(2))
        with pytest.raises(SaveError):
            ckpt.save(3)
        failpoints.disarm()
        state["big"] = torch.zeros(10)
        del big
        gc.collect()
        assert alive() is None, gc.get_referrers(alive())
        assert kept[1].exception() is not None
        ckpt.save(4)
    assert [info.step for info in ckpt.checkpoints()] == [1, 4]


def test_a_save_in_inference_mode_spoils_no_later_one():
    live = torch.ones(3)
    with CheckpointManager("memory://review-inference", {"live": live}, mode="async") as ckpt:
        ckpt.restore()
        with torch.inference_mode():
            ckpt.save(1)
        live.fill_(2)
        ckpt.save(2)
        live.zero_()
        ckpt.restore()
    assert live.tolist() == [2, 2, 2]


def test_waiting_too_long_for_a_save_is_a_timeout_and_nothing_else(tmp_path):
    held = tmp_path / "held"
    failpoints.arm(f"save.staged=hold:{held}")
    with CheckpointManager(f"file://{tmp_path}/run", {"n": {"x": 1}}, mode="async") as ckpt:
        ckpt.restore()
        handle = ckpt.save(1)
        for ask in (handle.result, handle.exception):
            with pytest.raises(TimeoutError, match="step 1"):
                ask(0.01)
        while not held.exists():
            pass
        held.unlink()
        assert handle.result(60).step == 1


class LosesCommits(MemoryStorage):
    """Once told to, gets no answer for commit records, and has not stored them."""

    lost = False

    def put(self, key: str, data: Any, *, if_absent: bool = False) -> Any:
        if self.lost and key.startswith("commits/"):
            raise TransientError("no answer", key=key)
        return super().put(key, data, if_absent=if_absent)


class HurriedClock(SystemClock):
    """Waits pass at once."""

    def __init__(self) -> None:
        self.ahead_s = 0.0

    def monotonic_s(self) -> float:
        return super().monotonic_s() + self.ahead_s

    def sleep(self, seconds: float) -> None:
        self.ahead_s += seconds


def test_a_restore_leaves_a_commit_without_an_answer_behind():
    storage, live = LosesCommits("review-lost"), {"x": 2}
    with CheckpointManager(storage, {"n": live}, mode="sync", clock=HurriedClock()) as ckpt:
        ckpt.restore()
        ckpt.save(2)
        storage.lost, live["x"] = True, 4
        with pytest.raises(SaveError, match="no answer"):
            ckpt.save(4)
        storage.lost = False
        assert ckpt.restore().step == 2
        live["x"] = 40  # another way on from 2 than the attempt above: that one must not come up beside it
        ckpt.save(4)
        ckpt.save(5)
    back = {"x": 0}
    with CheckpointManager(storage, {"n": back}) as ckpt:
        ckpt.restore(4)
    assert back == {"x": 40}
