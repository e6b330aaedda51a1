"""A signal to one rank: all ranks save the same step and are asked to stop, and the handlers come back."""

from __future__ import annotations

import signal
import threading
from typing import Any

import pytest
from workload import build

from resilio import CheckpointManager, save_every, save_on_signal
from resilio.errors import ConfigError, FormatError
from resilio.testing.worlds import run_world


def train_until_signalled(rank: int, world: int, url: str, signalled: int, also_save: bool) -> dict[str, Any]:
    heard: list[int] = []
    signal.signal(signal.SIGUSR1, lambda number, frame: heard.append(number))
    before = signal.getsignal(signal.SIGTERM), signal.getsignal(signal.SIGUSR1)
    job = build("fsdp2", rank, world)
    stopped = 0
    policy = save_every(100) | save_on_signal("SIGTERM", "SIGUSR1")
    with CheckpointManager(url, job.state(), save=policy, mode="async") as ckpt:
        ckpt.restore()
        for step in range(1, 9):
            job.train_step()
            if step == 3 and rank == signalled:
                signal.raise_signal(signal.SIGTERM)
                signal.raise_signal(signal.SIGUSR1)
            if step == 4 and also_save:
                ckpt.save(3)  # a save by hand reads the vote: the signal must not get lost with it
            ckpt.step(step)
            if ckpt.stop_requested:
                stopped = step
                break
    after = signal.getsignal(signal.SIGTERM), signal.getsignal(signal.SIGUSR1)
    (info,) = [info for info in ckpt.checkpoints() if info.step > 3]
    return {
        "stopped": stopped,
        "saved": info.step,
        "why": info.reasons,
        "heard": len(heard),
        "restored": before == after,
    }


@pytest.mark.parametrize("also_save", [False, True])
@pytest.mark.parametrize("signalled", [0, 1])
def test_all_ranks_save_the_same_step_and_stop(tmp_path, signalled, also_save):
    results = run_world(train_until_signalled, 2, f"file://{tmp_path}", signalled, also_save)
    for rank, result in enumerate(results):
        assert result["stopped"] == result["saved"] == results[0]["stopped"]
        assert result["stopped"] == 4  # the step after the one it came in
        assert "SIGTERM" in result["why"][0]
        assert result["heard"] == (1 if rank == signalled else 0)  # the handler that was there was called too
        assert result["restored"]


def test_one_process_needs_no_other_step(tmp_path):
    job = build("single")
    with CheckpointManager(f"file://{tmp_path}", job.state(), save=save_on_signal("SIGUSR2")) as ckpt:
        ckpt.restore()
        assert ckpt.step(1) is None
        assert not ckpt.stop_requested
        signal.raise_signal(signal.SIGUSR2)
        ckpt.step(2)
        handle = ckpt.step(3)
        assert ckpt.stop_requested
        assert handle is not None and handle.result().step == 3
        ckpt.step(4)
        assert ckpt.stop_requested  # it stays
    assert [info.step for info in ckpt.checkpoints()] == [3]  # and one signal is one save


def test_it_is_refused_outside_the_main_thread(tmp_path):
    caught: list[BaseException] = []

    def make() -> None:
        try:
            CheckpointManager(f"file://{tmp_path}", {"n": {"x": 1}}, save=save_on_signal("SIGUSR2"))
        except ConfigError as error:
            caught.append(error)

    thread = threading.Thread(target=make)
    thread.start()
    thread.join()
    assert "main thread" in str(caught[0])
    assert signal.getsignal(signal.SIGUSR2) == signal.SIG_DFL


def test_a_manager_that_cannot_be_made_leaves_the_handlers_as_they_were(tmp_path):
    with CheckpointManager(f"file://{tmp_path}", {"n": {"x": 1}}) as ckpt:
        ckpt.restore()
        ckpt.save(1)
    next(tmp_path.glob("generations/*")).write_bytes(b"{}")
    with pytest.raises(FormatError):  # `fresh` must look at the run that it leaves
        CheckpointManager(f"file://{tmp_path}", {"n": {"x": 1}}, save=save_on_signal("SIGUSR2"), fresh=True)
    assert signal.getsignal(signal.SIGUSR2) == signal.SIG_DFL


def test_one_ctrl_c_asks_for_a_save_and_the_second_interrupts(tmp_path):
    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background job ignores it
    try:
        ask_and_insist(tmp_path)
    finally:
        signal.signal(signal.SIGINT, before)


def ask_and_insist(tmp_path):
    with CheckpointManager(f"file://{tmp_path}", {"n": {"x": 1}}, save=save_on_signal("SIGINT"), mode="sync") as ckpt:
        ckpt.restore()
        ckpt.step(1)
        signal.raise_signal(signal.SIGINT)
        ckpt.step(2)
        ckpt.step(3)
        assert ckpt.stop_requested and [info.step for info in ckpt.checkpoints()] == [3]
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_two_managers_that_listen_may_be_closed_in_any_order(tmp_path):
    before = signal.getsignal(signal.SIGTERM)
    first, second = (
        CheckpointManager(f"file://{tmp_path}/{name}", {"n": {"x": 1}}, save=save_on_signal("SIGTERM"), mode="sync")
        for name in "ab"
    )
    first.restore()
    second.restore()
    first.close()
    signal.raise_signal(signal.SIGTERM)  # would end this process if the first had put the default back
    second.step(1)
    second.step(2)
    assert second.stop_requested
    second.close()
    assert signal.getsignal(signal.SIGTERM) == before


def test_a_handler_installed_later_stays(tmp_path):
    before = signal.getsignal(signal.SIGUSR1)
    try:
        with CheckpointManager(f"file://{tmp_path}", {"n": {"x": 1}}, save=save_on_signal("SIGUSR1")):
            later = signal.SIG_IGN
            signal.signal(signal.SIGUSR1, later)
        assert signal.getsignal(signal.SIGUSR1) is later
    finally:
        signal.signal(signal.SIGUSR1, before)


def test_a_loop_that_only_saves_is_asked_to_stop_as_well(tmp_path):
    with CheckpointManager(f"file://{tmp_path}", {"n": {"x": 1}}, save=save_on_signal("SIGUSR1"), mode="sync") as ckpt:
        ckpt.restore()
        ckpt.save(1)
        signal.raise_signal(signal.SIGUSR1)
        for step in (2, 3):
            ckpt.save(step)
        assert ckpt.stop_requested
