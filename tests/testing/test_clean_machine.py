"""A world leaves a machine as it found it, however it ended; and its end is bounded."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from machine import MARK, children, listening, open_files, processes, settle, threads

from resilio import CheckpointManager, failpoints, open_storage, save_every
from resilio.testing import worlds
from resilio.testing.worlds import WorldError, run_world

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="looks at /proc")


@pytest.fixture(scope="module", autouse=True)
def _what_stays_for_the_life_of_the_caller() -> None:
    for _ in range(2):
        run_world(fine, 1, "")


@pytest.fixture(autouse=True)
def clean(tmp_path: Path, monkeypatch: Any, request: Any) -> Iterator[str]:
    """Fails a test after which anything is left: a process, a zombie, a port, a file, an open one, a thread."""
    token, temp = f"{os.getpid()}.{time.monotonic_ns()}", tmp_path / "temp"
    temp.mkdir()
    monkeypatch.setenv(MARK, token)
    monkeypatch.setenv("TMPDIR", str(temp))
    monkeypatch.setattr(tempfile, "tempdir", None)
    before = children(), listening(), open_files(), threads()
    yield token
    settle(lambda: not processes(token) and (children(), listening(), open_files(), threads()) == before)
    assert processes(token) == {}
    assert (children(), listening(), open_files(), threads()) == before
    assert list(temp.iterdir()) == []


# ------------------------------------------------------------------------------------------------------- what worlds do


def spread(folder: str) -> None:
    """Leave what a careless job leaves: a helper, a helper of a helper, a port, a thread that never ends."""
    import socket
    import threading

    subprocess.Popen([sys.executable, "-c", "import os, time; os.fork(); time.sleep(600)"])
    globals()["kept"] = socket.create_server(("127.0.0.1", 0))
    threading.Thread(target=time.sleep, args=(600,)).start()
    if folder:
        (Path(folder) / f"up.{os.getpid()}").touch()


def fine(rank: int, world: int, folder: str) -> int:
    dist.all_reduce(torch.ones(1))
    return rank


def spreads(rank: int, world: int, folder: str) -> None:
    spread(folder)
    dist.barrier()


def raises(rank: int, world: int, folder: str) -> None:
    spreads(rank, world, folder)
    if rank == 1:
        raise ValueError("on purpose")
    time.sleep(600)


def killed(rank: int, world: int, folder: str) -> None:
    spreads(rank, world, folder)
    if rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    time.sleep(600)


def leaves(rank: int, world: int, folder: str) -> None:
    spreads(rank, world, folder)
    os._exit(7)


def stops(rank: int, world: int, folder: str) -> None:
    """As a debugger or a batch system does it: no signal but SIGKILL reaches it."""
    spreads(rank, world, folder)
    os.kill(os.getpid(), signal.SIGSTOP)


def ignores(rank: int, world: int, folder: str) -> None:
    signal.pthread_sigmask(signal.SIG_BLOCK, set(signal.valid_signals()))
    spreads(rank, world, folder)
    time.sleep(600)


def hangs_at_the_end(rank: int, world: int, folder: str) -> int:
    spreads(rank, world, folder)
    dist.destroy_process_group = lambda *_: time.sleep(600)  # type: ignore[assignment]
    return rank


def saves(rank: int, world: int, folder: str, place: str, action: str) -> None:
    """Dies, fails or hangs in the middle of a save of ours."""
    with CheckpointManager(f"file://{folder}/run", {"live": torch.ones(9)}, save=save_every(hours=9)) as ckpt:
        ckpt.restore()
        ckpt.step(1)
        ckpt.save(1).result()
        if rank == 1:
            failpoints.arm(f"{place}={action}")
        ckpt.save(2)
        ckpt.step(3)


BAD = [raises, killed, leaves, stops, ignores]


@pytest.mark.parametrize("fn", [fine, spreads, hangs_at_the_end])
def test_a_world_that_ends_well_leaves_nothing(tmp_path: Path, monkeypatch: Any, fn: Callable[..., Any]) -> None:
    monkeypatch.setattr(worlds, "_EXIT_S", 0.5)
    run_world(fn, 2, "")


@pytest.mark.parametrize("fn", BAD)
def test_a_world_that_ends_badly_leaves_nothing(tmp_path: Path, monkeypatch: Any, fn: Callable[..., Any]) -> None:
    monkeypatch.setattr(worlds, "_GRACE_S", 0.5)
    monkeypatch.setattr(worlds, "_STACKS_S", 0.5)
    up = tmp_path / "up"
    up.mkdir()
    with pytest.raises(WorldError):
        run_world(fn, 2, str(up), timeout_s=3.0)
    assert len(list(up.iterdir())) == 2  # it had really begun to spread


@pytest.mark.parametrize("action", ["kill", "enospc", "hold"])
def test_a_save_that_breaks_off_leaves_nothing_but_its_attempt(tmp_path: Path, monkeypatch: Any, action: str) -> None:
    monkeypatch.setattr(worlds, "_GRACE_S", 0.5)
    ask = f"hold:{tmp_path}/held" if action == "hold" else action
    with pytest.raises(WorldError):
        run_world(saves, 2, str(tmp_path), "save.data_written", ask, timeout_s=4.0)
    storage = open_storage(f"file://{tmp_path}/run")
    assert list(storage.incomplete("")) == []
    with CheckpointManager(storage, {"live": torch.ones(9)}, mode="sync") as ckpt:  # and what it left goes
        assert ckpt.restore().step == 1
        ckpt.save(2)
    assert len({info.key.split("/")[0] for info in storage.list("step-")}) == 2


def test_a_ctrl_c_of_the_caller_takes_its_world_along(tmp_path: Path, clean: str) -> None:
    up = tmp_path / "up"
    up.mkdir()
    previous = signal.signal(signal.SIGALRM, interrupt_when(lambda: len(list(up.iterdir())) == 2))
    signal.setitimer(signal.ITIMER_REAL, 0.05, 0.05)
    try:
        with pytest.raises(KeyboardInterrupt):
            run_world(ignores, 2, str(up), timeout_s=60)
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, previous)


def interrupt_when(ready: Callable[[], bool]) -> Any:
    def look(number: int, frame: Any) -> None:
        if ready():
            signal.setitimer(signal.ITIMER_REAL, 0)
            raise KeyboardInterrupt

    return look


@pytest.mark.timeout(120)
def test_the_end_of_a_world_is_bounded_whatever_its_ranks_do(tmp_path: Path, monkeypatch: Any) -> None:
    """Each wait in it has its own bound; the ranks would like ten minutes."""
    for name, value in {"_GRACE_S": 0.2, "_STACKS_S": 0.2, "_EXIT_S": 0.2}.items():
        monkeypatch.setattr(worlds, name, value)
    for fn in (ignores, stops):
        with pytest.raises(WorldError):
            run_world(fn, 2, "", timeout_s=1.0)


@pytest.mark.parametrize("what", ["process", "port", "file", "open file", "thread"])
def test_what_is_left_is_seen(tmp_path: Path, what: str, clean: str) -> None:
    """Else the check after each test here could not fail."""
    import socket
    import threading

    before = children(), listening(), open_files(), threads()
    end = threading.Event()
    if what == "process":
        child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
        settle(lambda: child.pid in processes(clean))
        assert child.pid in processes(clean) and child.pid in children() - before[0]
        child.kill()
        assert child.pid in children()  # a zombie
        child.wait()
    elif what == "port":
        with socket.create_server(("127.0.0.1", 0)):
            assert len(listening() - before[1]) == 1
    elif what == "file":
        handle, name = tempfile.mkstemp()
        os.close(handle)
        assert Path(name) in list((tmp_path / "temp").iterdir())
        os.unlink(name)
    elif what == "open file":
        with open(os.devnull):
            assert open_files() == before[2] + 1
    else:
        thread = threading.Thread(target=end.wait)
        thread.start()
        assert threads() == before[3] + 1
        end.set()
        thread.join()
