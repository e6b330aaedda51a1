from __future__ import annotations

import contextlib
import multiprocessing
import os
import signal
import socket
import subprocess
import sys
import time
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from resilio import failpoints
from resilio.errors import ConfigError
from resilio.testing import worlds
from resilio.testing.worlds import Exited, Killed, Raised, Unfinished, WorldError, run_world


@dataclass
class Box:
    """Defined in a test module: must pickle both ways."""

    value: int


def rank_and_sum(rank: int, world: int, box: Box) -> Box:
    total = torch.tensor([float(box.value + rank)])
    dist.all_reduce(total)
    return Box(rank * 1000 + int(total))


def raise_on_one(rank: int, world: int, bad: int) -> None:
    if rank == bad:
        raise RuntimeError("the disk of this rank is on fire")


def raise_while_others_wait(rank: int, world: int) -> None:
    if rank == 1:
        raise RuntimeError("left its peer alone")
    time.sleep(600)


class LateOnRank0:
    """An argument that keeps rank 0 from being ready until the process named in a file has ended."""

    def __init__(self, file: str) -> None:
        self.file = file

    def __setstate__(self, state: dict[str, str]) -> None:
        self.__dict__.update(state)
        if multiprocessing.current_process().name == "rank 0":
            while not Path(self.file).exists():
                time.sleep(0.01)
            assert gone(int(Path(self.file).read_text()))


def raise_while_others_start(rank: int, world: int, late: LateOnRank0) -> None:
    if rank == 1:
        Path(f"{late.file}.tmp").write_text(str(os.getpid()))
        os.rename(f"{late.file}.tmp", late.file)
        raise RuntimeError("left before its peer had come")
    time.sleep(600)


def hang_here_for_good(rank: int, world: int, bad: int, notes: str) -> None:
    (Path(notes) / str(rank)).write_text(str(os.getpid()))
    if rank == bad:
        time.sleep(600)


def kill_one(rank: int, world: int, bad: int) -> str:
    if rank == bad:
        os.kill(os.getpid(), signal.SIGKILL)
    return "alive"


def hit_failpoint(rank: int, world: int) -> str:
    try:
        failpoints.hit("save.staged", rank)
    except OSError as error:
        return str(error)
    return "passed"


def surroundings(rank: int, world: int) -> tuple[str, str | None, str | None]:
    return os.getcwd(), os.environ.get("FROM_CALLER"), os.environ.get("FROM_ARGUMENT")


def threads(rank: int, world: int) -> int:
    return torch.get_num_threads()


def group_there(rank: int, world: int) -> bool:
    return dist.is_initialized()


def leave_early(rank: int, world: int) -> None:
    os._exit(7)


def say(rank: int, world: int) -> None:
    print(f"hello from {rank}")
    print(f"trouble on {rank}", file=sys.stderr)


def return_a_lock(rank: int, world: int) -> object:
    return open(os.devnull)


def big(rank: int, world: int) -> bytes:
    return bytes([rank]) * 3_000_000


def numpy_random(rank: int, world: int) -> float:
    import numpy as np

    return float(np.random.random())


def pid_port_and_helper(rank: int, world: int) -> tuple[int, int]:
    helper = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
    return os.getpid(), helper.pid


def report_then_hang_in_teardown(rank: int, world: int) -> int:
    dist.destroy_process_group = partial(time.sleep, 600)
    return rank


class Holder:
    @staticmethod
    def static(rank: int, world: int) -> int:
        return rank

    def method(self, rank: int, world: int) -> int:
        return rank


def gone(pid: int) -> bool:
    """Whether the process has ended; one that was orphaned by a kill may take a moment to be reaped."""
    for _ in range(3000):
        try:
            os.kill(pid, 0)
            state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
        except (ProcessLookupError, FileNotFoundError):
            return True
        if state == "Z":
            return True
        time.sleep(0.01)
    return False


def open_files() -> set[str]:
    links = set()
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(FileNotFoundError):
            links.add(f"{name} {os.readlink(f'/proc/self/fd/{name}')}")
    return links


@pytest.fixture(scope="module", autouse=True)
def server_with_other_surroundings():
    """What is there before each test: a server that was started elsewhere, so nothing comes from it by chance."""
    run_world(threads, 1, init=False)


def test_results_come_by_rank_from_one_real_group_and_own_classes_pickle_both_ways():
    assert run_world(rank_and_sum, 3, Box(10)) == [Box(33), Box(1033), Box(2033)]


def test_an_exception_on_one_rank_names_rank_and_text():
    with pytest.raises(WorldError) as caught:
        run_world(raise_on_one, 2, 1)
    assert "rank 1 raised" in str(caught.value)
    assert "the disk of this rank is on fire" in str(caught.value)
    assert "in raise_on_one" in str(caught.value)
    assert "rank 0" not in str(caught.value)
    assert caught.value.outcomes[0] is None
    assert isinstance(caught.value.outcomes[1], Raised)


def test_a_failed_rank_ends_the_wait_for_the_others_long_before_the_timeout(monkeypatch):
    monkeypatch.setattr(worlds, "_GRACE_S", 0.2)
    with pytest.raises(
        WorldError, match=r"after the first failure(.|\n)*left its peer alone(.|\n)*rank 0 had not finished"
    ) as caught:
        run_world(raise_while_others_wait, 2, timeout_s=250)
    assert isinstance(caught.value.outcomes[0], Unfinished)


def test_a_rank_that_is_ready_only_after_the_first_failure_gets_no_new_time(monkeypatch, tmp_path):
    monkeypatch.setattr(worlds, "_GRACE_S", 1.0)
    with pytest.raises(WorldError, match="the others were ended 1 s after the first failure"):
        run_world(raise_while_others_start, 2, LateOnRank0(str(tmp_path / "pid")), timeout_s=15, init=False)


def test_a_rank_that_hangs_is_ended_with_its_stacks(tmp_path):
    with pytest.raises(WorldError, match=r"within 1 s") as caught:
        run_world(hang_here_for_good, 2, 1, str(tmp_path), timeout_s=1)
    assert "hang_here_for_good" in caught.value.outcomes[1].stacks
    assert "test_worlds.py" in str(caught.value)
    assert caught.value.outcomes[0] is None
    assert all(gone(int((tmp_path / rank).read_text())) for rank in "01")


def test_a_killed_rank_is_reported_by_signal():
    with pytest.raises(WorldError, match="rank 1 was killed by SIGKILL"):
        run_world(kill_one, 2, 1)


def test_a_killed_rank_is_a_result_where_that_is_allowed():
    assert run_world(kill_one, 2, 0, allow_killed=True) == [Killed(signal.SIGKILL), "alive"]


def test_an_exit_without_a_result_is_reported():
    with pytest.raises(WorldError, match="rank 0 left with exit code 7") as caught:
        run_world(leave_early, 1, init=False)
    assert caught.value.outcomes == [Exited(7)]


def test_failpoints_of_the_environment_reach_the_ranks_and_end_with_their_world():
    armed = {"RESILIO_FAILPOINTS": "save.staged=raise@1"}
    first = run_world(hit_failpoint, 2, env=armed, init=False)
    assert first[0] == "passed" and "failpoint save.staged" in first[1]
    assert run_world(hit_failpoint, 2, init=False) == ["passed", "passed"]


def test_a_failpoint_kills_for_real():
    armed = {"RESILIO_FAILPOINTS": "save.staged=kill@0"}
    assert run_world(hit_failpoint, 2, env=armed, allow_killed=True) == [Killed(signal.SIGKILL), "passed"]


def test_ranks_see_the_present_folder_and_environment_of_the_caller(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("FROM_CALLER", "a")
    assert run_world(surroundings, 1, env={"FROM_ARGUMENT": "b"}, init=False) == [(str(tmp_path), "a", "b")]


def test_output_of_the_ranks_is_the_callers(capfd):
    run_world(say, 2, init=False)
    out, err = capfd.readouterr()
    assert sorted(out.splitlines()) == ["hello from 0", "hello from 1"]
    assert "trouble on 1" in err


def test_one_thread_unless_asked():
    assert run_world(threads, 1, init=False) == [1]
    assert run_world(threads, 1, init=False, threads=2) == [2]


def test_the_group_is_there_unless_it_is_not_wanted():
    assert run_world(group_there, 1) == [True]
    assert run_world(group_there, 1, init=False) == [False]


def test_large_results_arrive_whole():
    assert run_world(big, 2, init=False) == [bytes([0]) * 3_000_000, bytes([1]) * 3_000_000]


def test_a_result_that_does_not_pickle_is_an_error_of_its_rank():
    with pytest.raises(WorldError, match=r"rank 0 raised(.|\n)*pickle"):
        run_world(return_a_lock, 1, init=False)


def test_ranks_do_not_share_numpys_random_state():
    first, second = run_world(numpy_random, 2, init=False)
    assert first != second


def test_a_teardown_that_hangs_costs_no_result(monkeypatch):
    monkeypatch.setattr(worlds, "_EXIT_S", 0.2)
    assert run_world(report_then_hang_in_teardown, 2) == [0, 1]


def test_nothing_is_left_behind_not_even_what_the_ranks_started():
    run_world(threads, 1)  # what stays for the life of the caller is there by now
    before = open_files()
    pids = [pid for pair in run_world(pid_port_and_helper, 2) for pid in pair]
    assert len(set(pids)) == 4
    assert all(gone(pid) for pid in pids)
    assert open_files() == before


def test_the_store_listens_on_loopback_only_and_its_port_is_free_afterwards():
    with worlds._store(5.0) as port:
        socket.create_connection(("127.0.0.1", port)).close()
        listening = [line.split() for line in Path("/proc/net/tcp").read_text().splitlines()[1:]]
        at = {fields[1] for fields in listening if fields[3] == "0A" and fields[1].endswith(f":{port:04X}")}
        assert at == {f"0100007F:{port:04X}"}
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(("127.0.0.1", port))


@pytest.mark.timeout(120)
def test_ranks_die_with_a_caller_that_is_killed(tmp_path):
    script = tmp_path / "caller.py"
    script.write_text(
        "import os, pathlib, time\n"
        "from resilio.testing.worlds import run_world\n"
        "def wait(rank, world, notes):\n"
        "    (pathlib.Path(notes) / f'{rank}.tmp').write_text(str(os.getpid()))\n"
        "    os.rename(f'{notes}/{rank}.tmp', f'{notes}/{rank}')\n"
        "    time.sleep(600)\n"
        "if __name__ == '__main__':\n"
        f"    run_world(wait, 2, {str(tmp_path)!r}, timeout_s=500, init=False)\n"
    )
    caller = subprocess.Popen([sys.executable, str(script)])
    try:
        while caller.poll() is None and not all((tmp_path / rank).exists() for rank in "01"):
            time.sleep(0.02)
        assert caller.poll() is None
    finally:
        caller.kill()
        caller.wait()
    assert all(gone(int((tmp_path / rank).read_text())) for rank in "01")


def test_a_static_method_is_fine():
    assert run_world(Holder.static, 2, init=False) == [0, 1]


def test_what_cannot_be_found_by_name_is_refused_before_anything_starts():
    def nested(rank: int, world: int) -> None: ...

    for fn in (lambda rank, world: None, nested, Holder().method, partial(threads), time.sleep):
        with pytest.raises(ConfigError, match="top level of a module"):
            run_world(fn, 1)
    with pytest.raises(ConfigError, match="must pickle"):
        run_world(threads, 1, lambda: None)
    with pytest.raises(ConfigError, match="at least one rank"):
        run_world(threads, 0)
