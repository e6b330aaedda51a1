"""Failures at odd places: errors that do not travel, state that cannot be looked at, a Ctrl-C caught in the block."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate

from resilio import CheckpointManager, save_every, save_on_signal
from resilio.errors import CaptureError, RanksLostError, ResilioError, StorageError
from resilio.ranks import portable, raise_first
from resilio.storage.local import LocalStorage
from resilio.testing.worlds import run_world

LATE_S = 300.0  # a deadline that must not be waited for


class QuotaError(StorageError):
    """A plugin's own, with arguments of its own."""

    def __init__(self, bucket: str, used: int) -> None:
        super().__init__(f"{bucket} is full: {used}", bucket=bucket)


class Bare(CaptureError):
    """Never told its base anything."""

    def __init__(self, key: str) -> None:
        self.key = key


class Mute(ResilioError):
    """Has no text either."""

    def __str__(self) -> str:
        raise ValueError("no text")


def local_class() -> ResilioError:
    class Local(StorageError):
        """Cannot be imported anywhere."""

    return Local("local", key="k")


@pytest.mark.parametrize(
    ("error", "kind", "says"),
    [
        (QuotaError("b", 3), StorageError, "b is full: 3"),
        (Bare("k"), CaptureError, ""),
        (Mute("x"), ResilioError, "(it has no text)"),
        (local_class(), StorageError, "local"),
    ],
    ids=["other arguments", "no facts", "no text", "local"],
)
def test_an_error_of_a_class_of_somebodys_own_travels_as_the_one_of_ours_that_it_is(
    error: ResilioError, kind: type[ResilioError], says: str
) -> None:
    told = portable(error)
    assert type(told) is kind and says in str(told)
    assert told.facts["cause"] == type(error).__name__
    with pytest.raises(kind, match="rank 1: ") as caught:
        raise_first([None, told], "looking")
    assert caught.value.facts["rank"] == 1


def test_an_error_of_ours_travels_as_it_is() -> None:
    error = CaptureError("x", key="k")
    assert portable(error) is error


class Refusing(LocalStorage):
    """Its reads fail with an error of a class of its own."""

    fails = False

    def read_into(self, key: str, ranges: Any) -> None:
        if self.fails and key.endswith(".distcp"):
            raise QuotaError("b", 3)
        super().read_into(key, ranges)


def reads_badly(rank: int, world: int, folder: str) -> list[Any]:
    storage = Refusing(folder)
    said: list[Any] = []
    with CheckpointManager(storage, {"live": torch.ones(3)}, mode="sync", timeout_s=LATE_S) as ckpt:
        ckpt.restore()
        ckpt.save(1)
        storage.fails = rank == 1
        with pytest.raises(ResilioError) as caught:
            ckpt.restore(1)
        said.append(f"{type(caught.value).__name__} {caught.value}")
        storage.fails = False
        return [*said, ckpt.restore(1).step]


def test_a_storage_that_raises_a_class_of_its_own_is_heard_on_all_ranks(tmp_path: Path) -> None:
    said = run_world(reads_badly, 2, str(tmp_path))
    assert said == [["StorageError rank 1: b is full: 3", 1]] * 2


class Hidden:
    """A part that cannot even be looked at, once it is told to."""

    fails = False

    @property
    def state_dict(self) -> Any:
        if self.fails:
            raise ZeroDivisionError("not today")
        return lambda: {"x": 1}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        pass


def cannot_be_looked_at(rank: int, world: int, folder: str) -> list[Any]:
    hidden, net = Hidden(), nn.Linear(2, 2)
    state = {"model": net, "optimizer": torch.optim.SGD(net.parameters()), "hidden": hidden}
    said: list[Any] = []
    with CheckpointManager(f"file://{folder}", state, mode="sync", timeout_s=LATE_S) as ckpt:
        ckpt.restore()
        hidden.fails = rank == 1
        with pytest.raises(ResilioError) as caught:
            ckpt.save(1)
        said.append(f"{type(caught.value).__name__} {caught.value}")
        hidden.fails = False
        ckpt.save(2)
        return [*said, [info.step for info in ckpt.checkpoints()]]


def test_state_that_one_rank_cannot_look_at_fails_the_save_on_all(tmp_path: Path) -> None:
    """Also where ranks meet before they capture, as under FSDP1."""
    said = run_world(cannot_be_looked_at, 2, str(tmp_path))
    assert said == [["SaveError rank 1: ZeroDivisionError: not today", [2]]] * 2


class Interrupted:
    """A Ctrl-C comes while its state is taken, once."""

    def __init__(self) -> None:
        self.due = False

    def state_dict(self) -> dict[str, Any]:
        if self.due:
            self.due = False
            raise KeyboardInterrupt
        return {"x": 1}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        pass


def caught_inside(rank: int, world: int, folder: str, hit: int, place: str, mode: Any, by_step: bool) -> list[Any]:
    mine, said = Interrupted(), []
    with CheckpointManager(
        f"file://{folder}", {"mine": mine, "live": torch.ones(3)}, mode=mode, timeout_s=LATE_S
    ) as ckpt:
        ckpt.restore()
        ckpt.save(1).result()
        if rank == hit and place == "capture":
            mine.due = True
        elif rank == hit:
            interrupt_at(ckpt, place)
        try:
            ckpt.save(2).result()
            said.append("saved")
        except KeyboardInterrupt:
            said.append("INTERRUPTED")
        except RanksLostError as error:
            said.append(f"{error.ranks} {'KeyboardInterrupt' in str(error)}")
        if mode == "async" and place != "capture":
            with pytest.raises(RanksLostError, match="KeyboardInterrupt"):  # the manager raises it as well, on all
                ckpt.step(3) if by_step else ckpt.save(3)
        dist.barrier()  # both go on together, as training does
        ckpt.save(4).result()
        return [*said, [info.step for info in ckpt.checkpoints()]]


def interrupt_at(ckpt: CheckpointManager, place: str) -> None:
    """A Ctrl-C comes when the save is at `place`, once."""
    owner: Any = {"hook": ckpt._teller, "planned": ckpt._engine}[place]
    name = {"hook": "tell", "planned": "save"}[place]
    before = getattr(owner, name)

    def interrupted(*args: Any, **named: Any) -> Any:
        setattr(owner, name, before)
        raise KeyboardInterrupt

    setattr(owner, name, interrupted)


@pytest.mark.parametrize("mode", ["sync", "async"])
@pytest.mark.parametrize("place", ["capture", "hook", "planned"])
@pytest.mark.parametrize("hit", [0, 1])
def test_a_ctrl_c_on_one_rank_caught_inside_the_block_is_told_at_once_and_the_next_save_works(
    tmp_path: Path, hit: int, place: str, mode: str
) -> None:
    began_s = time.monotonic()
    outcomes = run_world(caught_inside, 2, str(tmp_path), hit, place, mode, hit == 0, timeout_s=120)
    assert outcomes[hit] == ["INTERRUPTED", [1, 4]]
    assert outcomes[1 - hit] == [f"[{hit}] True", [1, 4]]
    assert time.monotonic() - began_s < LATE_S


def leaves_and_stays(rank: int, world: int, folder: str) -> str:
    """Rank 1 leaves the block with a vote of its own under way, and its process goes on."""
    said = ""
    try:
        with CheckpointManager(
            f"file://{folder}", {"live": torch.ones(3)}, save=save_every(hours=9), timeout_s=LATE_S
        ) as ckpt:
            ckpt.restore()
            for step in range(1, 9):
                ckpt.step(step)
                if rank == 1 and step == 3:
                    raise ValueError("my own mistake")
    except (ValueError, RanksLostError) as error:
        said = f"{type(error).__name__} {error}"
    dist.barrier()
    return said


def test_a_rank_that_left_the_block_is_not_waited_for_in_a_vote(tmp_path: Path) -> None:
    first, second = run_world(leaves_and_stays, 2, str(tmp_path), timeout_s=120)
    assert second == "ValueError my own mistake"
    assert first.startswith("RanksLostError") and "rank 1" in first


def test_a_fork_of_a_job_that_listens_for_a_signal_is_ended_by_it(tmp_path: Path) -> None:
    """As a worker is by `terminate()`; multiprocessing waits for its daemons when the job ends."""
    with CheckpointManager(f"file://{tmp_path}", {"live": {"x": 1}}, save=save_on_signal("SIGTERM")) as ckpt:
        ckpt.restore()
        child = os.fork()
        if child == 0:
            os.kill(os.getpid(), signal.SIGTERM)
            os._exit(3)  # it went on
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -signal.SIGTERM
        os.kill(os.getpid(), signal.SIGTERM)  # the job itself still saves and stops
        ckpt.step(1)
        ckpt.step(2)
        assert ckpt.stop_requested


def spread_metric(rank: int, world: int, folder: str) -> list[Any]:
    mesh = init_device_mesh("cpu", (world,))
    local = torch.tensor(rank + 1.0)
    heard = []
    with CheckpointManager(f"file://{folder}", {"live": torch.ones(5)}, mode="sync") as ckpt:
        ckpt.restore()
        for placement in (Partial(), Replicate()):
            loss = DTensor.from_local(local, mesh, [placement], run_check=False)
            try:
                ckpt.save(1, metrics={"loss": loss})
            except ResilioError as error:
                heard.append(f"{type(error).__name__} {error}")
        return [heard, [info.metrics for info in ckpt.checkpoints()]]


def test_a_metric_of_which_each_rank_has_a_part_is_refused_and_not_taken_for_its_part(tmp_path: Path) -> None:
    for heard, metrics in run_world(spread_metric, 2, str(tmp_path)):
        assert len(heard) == 1 and "ConfigError" in heard[0] and "full_tensor()" in heard[0]
        assert metrics == [{"loss": 1.0}]
