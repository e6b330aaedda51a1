"""A rank that raises, hangs, dies or walks away: the others hear of it by name, in time, and the next save works."""

from __future__ import annotations

import signal
import time
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist
from workload import build

from resilio import CheckpointManager, failpoints, save_every
from resilio.errors import RanksDisagreeError, RanksLostError, ResilioError, SaveError
from resilio.testing.worlds import Killed, WorldError, run_world

SOON_S = 1.5  # a deadline that passes while a test waits
LATE_S = 300.0  # one that must not be waited for


def steps(ckpt: CheckpointManager) -> list[int]:
    return [info.step for info in ckpt.checkpoints()]


class Extra:
    """State of a user's whose `state_dict` fails once on one rank."""

    def __init__(self, fails: bool) -> None:
        self.fails = fails

    def state_dict(self) -> dict[str, Any]:
        if self.fails:
            self.fails = False
            raise ValueError("not today")
        return {"x": 1}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        pass


def raises_in_state_dict(rank: int, world: int, url: str, mode: Any) -> list[str]:
    job = build("fsdp2", rank, world)
    said = []
    with CheckpointManager(url, {**job.state(), "mine": Extra(rank == 1)}, mode=mode, timeout_s=LATE_S) as ckpt:
        ckpt.restore()
        for step in (1, 2):
            try:
                ckpt.save(step)
            except ResilioError as error:
                said.append(f"{type(error).__name__} {error} {error.rank} {error.phase}")
    return [*said, *map(str, steps(ckpt))]


@pytest.mark.parametrize("mode", ["sync", "async"])
def test_br_61_a_rank_that_fails_before_the_first_collective_fails_the_save_on_all(tmp_path, mode):
    first, second = run_world(raises_in_state_dict, 2, f"file://{tmp_path}", mode)
    assert first == second
    assert first[0].startswith("CaptureError rank 1: mine") and "not today" in first[0]
    assert first[0].endswith("1 planning a save")
    assert first[1:] == ["2"]


def hung_then_back(rank: int, world: int, url: str, folder: str, place: str, mode: Any) -> dict[str, Any]:
    job = build("fsdp2", rank, world)
    held = Path(folder) / "held"
    said: list[str] = []
    began_s = time.monotonic()
    if rank == 1:
        failpoints.arm(f"{place}=hold:{held}#1")
    with CheckpointManager(url, job.state(), mode=mode, timeout_s=SOON_S) as ckpt:
        ckpt.restore()
        for step in (1, 2):
            try:
                ckpt.save(step).result()
                ckpt.step(step)
            except RanksLostError as error:
                said.append(f"{error.ranks} {error.phase.split()[0]}")
                if rank == 0 and held.exists():
                    held.unlink()  # only now does the other go on
        # Whoever came back late is one error behind: all meet again in a save that works.
        for step in (3, 4, 5):
            try:
                ckpt.save(step).result()
            except ResilioError as error:
                said.append(f"later {type(error).__name__}")
        committed = steps(ckpt)
    return {"said": said, "committed": committed, "seconds": time.monotonic() - began_s}


@pytest.mark.parametrize("mode", ["sync", "async"])
@pytest.mark.parametrize(("place", "phase"), [("save.staged", "staging"), ("save.data_open", "writing")])
def test_a_rank_that_hangs_is_named_and_once_it_is_back_saves_work(tmp_path, place, phase, mode):
    run = tmp_path / "run"
    first, second = run_world(hung_then_back, 2, f"file://{run}", str(tmp_path), place, mode)
    assert first["said"][0] == f"[1] {phase}"
    assert f"[1] {phase}" in second["said"]  # the one that hung hears that it was given up
    assert 1 not in first["committed"] and first["committed"] == second["committed"]
    assert 5 in first["committed"]


def dies_in_a_save(rank: int, world: int, url: str, place: str) -> str:
    job = build("fsdp2", rank, world)
    with CheckpointManager(url, job.state(), mode="async", timeout_s=SOON_S) as ckpt:
        ckpt.restore()
        ckpt.save(1).result()
        if rank == 1:
            failpoints.arm(f"{place}=kill")
        try:
            ckpt.save(2).result()
        except ResilioError as error:
            print(f"HEARD {type(error).__name__} {error}", flush=True)
            raise
    return "done"


@pytest.mark.parametrize("place", ["save.staged", "save.data_written", "save.part_written"])
def test_a_rank_that_dies_is_named_by_the_others_and_nothing_is_committed(tmp_path, place):
    with pytest.raises(WorldError, match=r"rank\(s\) 1 did not") as caught:
        run_world(dies_in_a_save, 2, f"file://{tmp_path}", place)
    assert isinstance(caught.value.outcomes[1], Killed) and caught.value.outcomes[1].signal == signal.SIGKILL
    assert len(list(tmp_path.glob("commits/*"))) == 1


def hangs_in_a_step(rank: int, world: int, url: str, folder: str) -> dict[str, Any]:
    """Rank 1 is late for a vote by more than the deadline."""
    job = build("fsdp2", rank, world)
    told = Path(folder) / "told"
    said: list[str] = []
    # A time due never comes; it only makes the ranks vote at every step.
    with CheckpointManager(url, job.state(), save=save_every(hours=9), mode="sync", timeout_s=SOON_S) as ckpt:
        ckpt.restore()
        for step in range(1, 8):
            if rank == 1 and step == 3:
                while not told.exists():
                    time.sleep(0.02)
            try:
                ckpt.step(step)
            except ResilioError as error:
                said.append(f"{type(error).__name__} {error.ranks}")
                told.touch()
        ckpt.save(9)
        return {"said": said, "steps": steps(ckpt)}


def test_a_rank_late_for_a_vote_is_named_and_the_groups_are_made_anew(tmp_path):
    first, second = run_world(hangs_in_a_step, 2, f"file://{tmp_path}/run", str(tmp_path))
    assert first["said"][0] == "RanksLostError [1]"
    assert first["steps"] == second["steps"] == [9]


def walks_away(rank: int, world: int, url: str, place: str) -> str:
    job = build("fsdp2", rank, world)
    try:
        with CheckpointManager(url, job.state(), mode="sync", timeout_s=LATE_S) as ckpt:
            ckpt.restore()
            ckpt.save(1)
            if rank == 1 and place == "before":
                raise KeyboardInterrupt
            if rank == 1:
                failpoints.arm(f"{place}=raise")
                raise_in_place(place)
            ckpt.save(2)
    except (KeyboardInterrupt, ResilioError) as error:
        return f"{type(error).__name__} {error}"
    return "done"


def raise_in_place(place: str) -> None:
    raise ValueError("my own mistake")


def test_a_rank_that_leaves_by_an_exception_is_not_waited_for(tmp_path):
    began_s = time.monotonic()
    first, second = run_world(walks_away, 2, f"file://{tmp_path}", "before", timeout_s=120)
    assert second == "KeyboardInterrupt "
    assert first.startswith("RanksLostError") and "rank 1 left (KeyboardInterrupt" in first
    assert time.monotonic() - began_s < LATE_S


def leaves_a_vote_open(rank: int, world: int, url: str, folder: str) -> float:
    """Rank 0 leaves by an exception with a vote on its way that rank 1 has yet to come to."""
    gone = Path(folder) / "gone"
    job = build("fsdp2", rank, world)
    began_s = 0.0
    try:
        with CheckpointManager(url, job.state(), save=save_every(hours=9), timeout_s=LATE_S) as ckpt:
            ckpt.restore()
            if rank == 0:
                ckpt.step(1)
                began_s = time.monotonic()
                raise ValueError("my own mistake")
            while not gone.exists():
                time.sleep(0.02)
    except ValueError:
        gone.touch()
    return time.monotonic() - began_s if rank == 0 else 0.0


def test_leaving_by_an_exception_waits_for_nobody(tmp_path):
    first, _ = run_world(leaves_a_vote_open, 2, f"file://{tmp_path}/run", str(tmp_path), timeout_s=120)
    assert first < 30


class Late:
    """State of a user's that hangs on one rank while it is loaded, or right after."""

    def __init__(self, rank: int, told: Path) -> None:
        self.rank, self.told, self.x = rank, told, 0

    def state_dict(self) -> dict[str, int]:
        return {"x": self.x}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.x = state["x"]
        while self.rank == 1 and not self.told.exists():
            time.sleep(0.02)


def late_in_a_restore(rank: int, world: int, url: str, folder: str) -> Any:
    told = Path(folder) / "told"
    mine = Late(rank, told)
    live = {"a": 0}
    with CheckpointManager(url, {"mine": mine, "live": live}, mode="sync", timeout_s=SOON_S) as ckpt:
        ckpt.restore()
        mine.x = live["a"] = 5
        ckpt.save(1)
        mine.x = live["a"] = 6
        with pytest.raises(RanksLostError) as caught:
            try:
                ckpt.restore()
            finally:
                told.touch()
        left = mine.x, live["a"]
        report = ckpt.restore()  # all are here again
        return caught.value.ranks, caught.value.phase, left, report.step, (mine.x, live["a"])


def test_a_rank_lost_in_a_restore_leaves_live_state_as_it_was_on_all(tmp_path):
    outcomes = run_world(late_in_a_restore, 2, f"file://{tmp_path}/run", str(tmp_path))
    assert outcomes == [([1], "putting state back", (6, 6), 1, (5, 5))] * 2


def calls_otherwise(rank: int, world: int, url: str) -> list[str]:
    said = []
    with CheckpointManager(url, {"n": {"x": 1}}, mode="sync", timeout_s=LATE_S) as ckpt:
        ckpt.restore()
        for mine in (
            [lambda: ckpt.save(1), lambda: ckpt.restore()],
            [lambda: ckpt.save(-1), lambda: ckpt.save(2)],
            [lambda: ckpt.step(3, last=True), lambda: ckpt.save(4)],
        ):
            with pytest.raises(ResilioError) as caught:
                mine[rank]()
            said.append(f"{type(caught.value).__name__} {caught.value}")
        ckpt.save(5)
        return [*said, *map(str, steps(ckpt))]


def test_ranks_that_make_different_calls_are_told_so_and_go_on(tmp_path):
    first, second = run_world(calls_otherwise, 2, f"file://{tmp_path}")
    assert first == second
    assert first[0].startswith("RanksDisagreeError rank 0 is at 'beginning a save', rank 1 at")
    assert "step=-1" in first[1]
    assert first[-1] == "5"


def group_gone_first(rank: int, world: int, url: str) -> list[Any]:
    job = build("fsdp2", rank, world)
    ckpt = CheckpointManager(url, job.state(), mode="async", timeout_s=20)
    ckpt.restore()
    handle = ckpt.save(1)
    dist.destroy_process_group()
    error = handle.exception(60)
    try:
        ckpt.close()
    except ResilioError as failed:
        return [type(error).__name__, type(failed).__name__]
    return [type(error).__name__]


def test_a_job_that_destroys_its_groups_first_gets_its_save_or_an_error(tmp_path):
    for outcome in run_world(group_gone_first, 2, f"file://{tmp_path}"):
        assert set(outcome) <= {"NoneType", "SaveError", "RanksLostError"}
    assert len(list(tmp_path.glob("commits/*"))) <= 1


def test_errors_of_a_lost_rank_are_no_save_errors_but_ours():
    assert not issubclass(RanksLostError, SaveError) and issubclass(RanksDisagreeError, ResilioError)
