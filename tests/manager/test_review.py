"""Promises at their edges: odd moments, odd callers, one rank alone in trouble, every kind of object damaged."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
import torch
from workload import assert_same, build, snapshot

import resilio
from resilio import CheckpointManager, failpoints, save_every
from resilio.errors import ConfigError, LiveStateError
from resilio.policies import KeepPolicy
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
