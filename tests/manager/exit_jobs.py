"""Jobs that end in every way there is, in processes that really shut their interpreter down.

Run as a script it is a server: torch is loaded once, each job is a fork of it that leaves through the end of this file,
as a user's script would. One line in (`Ask` as JSON), one line out when all ranks have ended (their statuses).
"""

from __future__ import annotations

import contextlib
import gc
import json
import os
import queue
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint  # before the fork, not in each

from resilio import CheckpointManager, failpoints, save_every
from resilio.errors import ResilioError

GIVE_UP_S = 120.0


@dataclass
class Ask:
    """One job.

    Attributes:
        job: name of a function here.
        folder: of the test; the run is in it, and `held` while the save is held up.
        world: number of ranks.
        port: of their store; 0: no group, or one whose store rank 0 holds (`how["store"]`).
        how: what the function does it with.
        place: failpoint that the save in flight is held at.
        timeout_s: of the manager.
    """

    job: str
    folder: str
    world: int = 1
    port: int = 0
    how: dict[str, Any] = field(default_factory=dict)
    place: str = "save.data_open"
    timeout_s: float = 60.0
    rank: int = 0

    @property
    def url(self) -> str:
        return f"file://{self.folder}/run"

    def file(self, name: str) -> Path:
        return Path(self.folder) / name


# --------------------------------------------------------------------------------------------------- in the test


@dataclass
class Ended:
    """How a job ended.

    Attributes:
        statuses: by rank, exit code or minus the signal.
        said: by rank, stdout and stderr.
    """

    statuses: list[int]
    said: list[str]

    @property
    def status(self) -> int:
        (status,) = self.statuses
        return status


class Server:
    """The process that jobs are forked from."""

    def __init__(self) -> None:
        env = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), "GLOO_SOCKET_IFNAME": "lo"}
        self.process = subprocess.Popen(
            [sys.executable, __file__], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=env
        )
        self._lines: queue.Queue[str] = queue.Queue()
        threading.Thread(target=self._read, daemon=True).start()

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self._lines.put(line)
        self._lines.put("")

    def begin(self, ask: Ask) -> list[int]:
        """Start a job; the pids of its ranks."""
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps(asdict(ask)) + "\n")
        self.process.stdin.flush()
        pids: list[int] = json.loads(self._lines.get(timeout=GIVE_UP_S))
        return pids

    def kill(self, pids: list[int]) -> None:
        """End a job that did not come to where it should."""
        for pid in pids:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        self._lines.get(timeout=GIVE_UP_S)

    def end(self, ask: Ask, pids: list[int]) -> Ended:
        """Wait for all ranks of the job."""
        try:
            statuses = json.loads(self._lines.get(timeout=GIVE_UP_S))
        except queue.Empty:
            for pid in pids:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGABRT)  # faulthandler tells where it stood
            statuses = json.loads(self._lines.get(timeout=GIVE_UP_S))
        return Ended(statuses, [ask.file(f"out.{rank}").read_text() for rank in range(ask.world)])

    def run(self, ask: Ask) -> Ended:
        """A job from beginning to end."""
        return self.end(ask, self.begin(ask))

    def close(self) -> None:
        assert self.process.stdin is not None
        self.process.stdin.close()
        self.process.wait(30)


def wait_until(there: Callable[[], bool]) -> None:
    """Until it is so."""
    end_s = time.monotonic() + GIVE_UP_S
    while not there():
        assert time.monotonic() < end_s, "it never came to that"
        time.sleep(0.005)


def gone(pid: int) -> bool:
    """Whether the process has ended, be it waited for or not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except FileNotFoundError:
        return True


# ---------------------------------------------------------------------------------------------------- in a rank


def manager(ask: Ask, live: torch.Tensor, mode: Any = "async", **more: Any) -> CheckpointManager:
    return CheckpointManager(ask.url, {"live": live, "rng": False}, mode=mode, timeout_s=ask.timeout_s, **more)


def flying(ask: Ask, ckpt: CheckpointManager, live: torch.Tensor) -> Any:
    """Step 1 committed, step 2 begun and held up on the way."""
    ckpt.restore()
    ckpt.save(1).result(60)
    ask.file("one").touch()
    live.fill_(2.0)
    if ask.how.get("fail"):
        failpoints.arm("save.before_commit=enospc")
    failpoints.arm(f"{ask.place}=hold:{ask.file('held')}@{ask.how.get('held', 0)}")
    handle = ckpt.save(2)
    live.fill_(-1.0)
    if ask.how.get("wait"):
        wait_until(ask.file("held").exists)  # nobody lets it go
    return handle


def let_go(ask: Ask, handle: Any) -> None:
    """Let the save go on, once it stands where it is held, if it comes there. For the rank that is held."""
    if ask.rank != ask.how.get("held", 0):
        return
    held = ask.file("held")
    wait_until(lambda: held.exists() or handle.done())
    held.unlink(missing_ok=True)


def let_go_at_shutdown(ask: Ask, handle: Any) -> None:
    """Only when the interpreter is being shut down, before it waits for threads: so the save is in flight then."""
    threading._register_atexit(let_go, ask, handle)  # type: ignore[attr-defined]


def let_go_when_waited_for(ask: Ask, handle: Any) -> None:
    """Only when somebody waits for the save."""
    wait = handle.exception

    def exception(timeout_s: float | None = None) -> Any:
        handle.exception = wait
        let_go(ask, handle)
        return wait(timeout_s)

    handle.exception = exception


def note_meeting(ask: Ask, exchange: Any) -> None:
    """Make the file `meets` when this rank begins to wait for the others in the meeting that is asked for."""
    poll = exchange._poll if exchange else None

    def polled(what: str, *rest: Any) -> Any:
        if what.startswith(ask.how["meets"]) and ask.file("one").exists():
            ask.file("meets").touch()
        return poll(what, *rest)

    if exchange and ask.how.get("meets") and ask.rank != ask.how["held"]:
        exchange._poll = polled


def note_waiting(handle: Any, *files: Path) -> None:
    """Make a file each time that somebody begins to wait for the save."""
    wait, left = handle.exception, list(files)

    def exception(timeout_s: float | None = None) -> Any:
        if left:
            left.pop(0).touch()
        return wait(timeout_s)

    handle.exception = exception


def leave(way: str) -> None:
    """What may come at the end of a job, or in place of it."""
    if way == "exit":
        sys.exit(3)
    if way == "raise":
        raise ValueError("my own mistake")
    if way == "destroy":
        dist.destroy_process_group()
    if way == "hard":
        os._exit(0)
    assert way in ("return", "exit", "raise", "destroy", "hard")


def bare(ask: Ask) -> None:
    """No `with`, no `close`."""
    live = torch.ones(5)
    ckpt = manager(ask, live, save=save_every(hours=9))
    handle = flying(ask, ckpt, live)
    let_go_at_shutdown(ask, handle)
    if not ask.how.get("drop"):
        globals()["kept"] = ckpt  # until the interpreter is taken down, as a script's own names are
    del ckpt, handle
    gc.collect()
    leave(ask.how["way"] if ask.rank == ask.how.get("bad", ask.rank) else "return")


def inside(ask: Ask) -> None:
    """In the `with`."""
    live = torch.ones(5)
    with manager(ask, live) as ckpt:
        let_go_when_waited_for(ask, flying(ask, ckpt, live))
        leave(ask.how["way"])


def closed(ask: Ask) -> None:
    """A failure that was raised, and nothing after it."""
    live = torch.ones(5)
    ckpt = manager(ask, live)
    let_go_when_waited_for(ask, flying(ask, ckpt, live))
    try:
        ckpt.close()
    except ResilioError:
        print("HEARD")


def interrupted(ask: Ask) -> None:
    """A Ctrl-C while a save is waited for."""
    live = torch.ones(5)
    with manager(ask, live, ask.how["mode"]) as ckpt:
        note_meeting(ask, ckpt._ranks.saving.exchange)
        handle = flying(ask, ckpt, live)
        note_waiting(handle, ask.file("waits"), ask.file("leaves"))
        threading._register_atexit(ask.file("ends").touch)  # type: ignore[attr-defined]
        handle.result()


def one_leaves(ask: Ask) -> None:
    """Rank 1 leaves by an exception while rank 0 makes no call of ours; then rank 0 goes on."""
    live = torch.ones(5)
    pid, leaves = ask.file("pid"), ask.file("leaves")
    if ask.rank == 1:
        pid.write_text(str(os.getpid()))
    with manager(ask, live, save=save_every(hours=9)) as ckpt:
        handle = flying(ask, ckpt, live)
        if ask.rank == 1:
            note_waiting(handle, leaves)
            raise ValueError("my own mistake")
        wait_until(leaves.exists)
        let_go(ask, handle)
        wait_until(lambda: gone(int(pid.read_text())))
        ckpt.save(3)


def restoring(ask: Ask) -> None:
    """A Ctrl-C while a checkpoint is read; afterwards it is read again."""
    live = torch.ones(5)
    with manager(ask, live, "sync") as ckpt:
        ckpt.restore()
        ckpt.save(1)
        live.fill_(7.0)
        ask.file("one").touch()
        note_meeting(ask, ckpt._ranks.exchange)
        read = type(ckpt._storage).read_into

        def read_into(self: Any, key: str, ranges: Any) -> None:
            if key.endswith(".distcp") and ask.rank == ask.how["held"]:
                failpoints._hold(ask.file("held"))
            read(self, key, ranges)

        type(ckpt._storage).read_into = read_into  # type: ignore[method-assign]
        try:
            ckpt.restore()
        except KeyboardInterrupt:
            print("INTERRUPTED")
        except ResilioError as error:
            print("HEARD", type(error).__name__, error)
        assert live.tolist() == [7.0] * 5
        type(ckpt._storage).read_into = read  # type: ignore[method-assign]
        assert ckpt.restore().step == 1
        assert live.tolist() == [1.0] * 5


JOBS = {job.__name__: job for job in (bare, inside, closed, interrupted, one_leaves, restoring)}


def settle_in(ask: Ask) -> None:
    """Become what a job is when it is started."""
    import faulthandler

    out = os.open(ask.file(f"out.{ask.rank}"), os.O_CREAT | os.O_WRONLY | os.O_APPEND)
    os.dup2(out, 1)
    os.dup2(out, 2)
    faulthandler.enable()
    signal.signal(signal.SIGINT, signal.default_int_handler)
    if ask.port or ask.how.get("store"):
        timeout = timedelta(seconds=60)
        host, at = "127.0.0.1", ask.file("port")
        first = ask.rank == 0 and not ask.port
        if not (first or ask.port):
            wait_until(at.exists)
            ask.port = int(at.read_text())
        store: Any = dist.TCPStore(  # type: ignore[attr-defined]
            host, ask.port, is_master=first, wait_for_workers=False, timeout=timeout
        )
        if first:
            ask.file("port.new").write_text(str(store.port))
            ask.file("port.new").rename(at)
        dist.init_process_group("gloo", store=store, rank=ask.rank, world_size=ask.world, timeout=timeout)


def serve() -> Ask | None:
    """Fork a process for each rank that is asked for; None when there is no more to do. Returns in each of them."""
    for line in sys.stdin:
        ask = Ask(**json.loads(line))
        pids = []
        for rank in range(ask.world):
            pid = os.fork()
            if pid == 0:
                ask.rank = rank
                return ask
            pids.append(pid)
        print(json.dumps(pids), flush=True)
        statuses = [os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in pids]
        print(json.dumps(statuses), flush=True)
    return None


if __name__ == "__main__":
    gc.freeze()
    mine = serve()
    if mine is not None:
        settle_in(mine)
        JOBS[mine.job](mine)
