"""Real worlds: N processes with a real gloo group on loopback, started quickly and always ended.

The processes are forked from a server that has torch loaded already, so that a world costs a fraction of a second
instead of an import of torch per rank. The store of the group lives in the caller, as it lives in the agent under
torchrun: a rank that is killed does not take it along.

::

    def add_up(rank: int, world: int, start: int) -> int:
        total = torch.tensor([start + rank])
        torch.distributed.all_reduce(total)
        return int(total)

    assert run_world(add_up, 2, 10) == [21, 21]

The function goes to the ranks by name and file, never by value, so it must stand at the top level of a module (or be a
static method of a class there). The module need not be importable by name: test modules under pytest's importlib mode
are not. A script that calls `run_world` needs the usual `if __name__ == "__main__":`.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import operator
import os
import pickle
import signal
import socket
import sys
import tempfile
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from multiprocessing import connection, reduction
from pathlib import Path
from types import FunctionType
from typing import IO, Any

from resilio.clock import SystemClock
from resilio.errors import ConfigError, ResilioError
from resilio.testing._rank import HOST, STACKS_SIGNAL, Job, run_rank

__all__ = ["Exited", "Killed", "Raised", "Unfinished", "WorldError", "run_world"]

_START_S = 120.0  # the first world of a process waits for the server's import of torch, which may be cold
_GRACE_S = 5.0  # for the other ranks, once one has failed: their own errors are worth seeing, waiting for them is not
_EXIT_S = 5.0  # for a rank that has given its result: gloo sometimes hangs when it is taken down
_STACKS_S = 2.0  # for ranks to write down their stacks; one that is stopped never will

# Loaded once in the server. No module of the user: what it does at import could be fatal to every later world.
_PRELOAD = (
    "torch",
    "torch.distributed.checkpoint",
    "torch.distributed.checkpoint.state_dict",
    "torch.distributed.device_mesh",
    "torch.distributed.fsdp",
    "torch.distributed.tensor",
    "torch.nn.parallel",
    "torch._dynamo",  # every first optimizer imports it
    "resilio.testing._rank",
)

_clock = SystemClock()


@dataclass(frozen=True)
class Killed:
    """This rank was ended by a signal."""

    signal: int

    def __str__(self) -> str:
        known = {int(each): each.name for each in signal.Signals}
        return f"was killed by {known.get(self.signal, f'signal {self.signal}')}"


@dataclass(frozen=True)
class Raised:
    """This rank raised; `text` is the traceback as it would have been printed."""

    text: str

    def __str__(self) -> str:
        return f"raised:\n{self.text}"


@dataclass(frozen=True)
class Exited:
    """This rank left with an exit code of its own and without a result."""

    code: int

    def __str__(self) -> str:
        return f"left with exit code {self.code} and without a result"


@dataclass(frozen=True)
class Unfinished:
    """This rank was still running when the world was ended; `stacks` shows where."""

    stacks: str

    def __str__(self) -> str:
        return f"had not finished; it stood here:\n{self.stacks or '(no stacks: it is stopped, or had not begun)'}"


class WorldError(ResilioError):
    """Not every rank gave a result.

    Attributes:
        outcomes: by rank, what the function returned, or `Raised`, `Killed`, `Exited`, `Unfinished`.
    """

    outcomes: list[Any]


def run_world(
    fn: Callable[..., Any],
    world: int,
    *args: Any,
    timeout_s: float = 60.0,
    group_timeout_s: float = 30.0,
    env: Mapping[str, str] | None = None,
    init: bool = True,
    allow_killed: bool = False,
    threads: int = 1,
) -> list[Any]:
    """Run `fn(rank, world, *args)` on every rank of a new world.

    A rank sees the caller's present environment, working folder, stdout and stderr, as a child process would. A rank
    that has returned stays connected until all have; one that raises leaves at once.

    Args:
        fn: a function at the top level of a module, or a static method of a class there.
        world: number of ranks.
        *args: passed on; they must pickle, and so must what `fn` returns.
        timeout_s: for `fn` on all ranks, from the moment when the last one is ready to call it.
        group_timeout_s: of the default process group and its store.
        env: further environment variables. `RESILIO_FAILPOINTS` works; what torch reads when it is imported does not.
        init: whether the default process group is made before `fn` is called.
        allow_killed: a rank that a signal ended has `Killed` as its result, and the world is no failure for it.
        threads: `torch.set_num_threads` on each rank.

    Returns:
        What each rank returned, by rank.

    Raises:
        ConfigError: `fn` or an argument cannot be sent to another process.
        WorldError: a rank raised, was killed, left, or was not done in time. All ranks are ended by then.
    """
    if world < 1:
        raise ConfigError(f"a world has at least one rank, not {world}", world=world)
    job = Job(
        module=fn.__module__,
        file=_file_of(fn),
        qualname=fn.__qualname__,
        args=_pickled(args),
        world=world,
        env={**os.environ, **(env or {})},
        group_timeout_s=group_timeout_s,
        threads=threads,
    )
    with contextlib.ExitStack() as stack:
        if init:
            job.port = stack.enter_context(_store(group_timeout_s))
        ranks: list[_Rank] = []
        stack.callback(_end, ranks)
        for rank in range(world):
            ranks.append(_Rank(rank, job))
            ranks[-1].start()
        why = _wait(ranks, timeout_s, _START_S + (group_timeout_s if init else 0.0), allow_killed)
        _note_stacks([r for r in ranks if not r.settled])
        outcomes = [r.outcome for r in ranks]
    if any(_failed(outcome, allow_killed) for outcome in outcomes):
        raise WorldError(_message(fn, outcomes, why), outcomes=outcomes)
    return outcomes


# ---------------------------------------------------------------------------------------------- in the caller


@dataclass
class _Rank:
    """One process, as the caller sees it.

    The pipe carries single bytes only and the result goes through a file without a name: a rank killed halfway
    through a large result leaves nobody blocked in a read.
    """

    rank: int
    job: Job
    result: IO[bytes] = field(default_factory=tempfile.TemporaryFile)
    stacks: IO[bytes] = field(default_factory=tempfile.TemporaryFile)
    ready: bool = False
    settled: bool = False
    outcome: Any = None

    def start(self) -> None:
        """Fork it."""
        self.pipe, theirs = multiprocessing.Pipe()
        self.process = _context().Process(
            target=run_rank,
            args=(self.rank, self.job, theirs, *map(_Fd, (1, 2, self.result.fileno(), self.stacks.fileno()))),
            name=f"rank {self.rank}",
        )
        self.process.start()
        theirs.close()

    def waitables(self) -> list[Any]:
        """What becomes readable when there is news."""
        return [self.process.sentinel] if self.pipe.closed else [self.pipe, self.process.sentinel]

    def look(self) -> None:
        """Take in what happened, without waiting."""
        exitcode = self.process.exitcode  # asked first: what a rank said before its end is then in the pipe
        try:
            while not self.pipe.closed and not self.settled and self.pipe.poll():
                said = self.pipe.recv_bytes()
                self.ready = True
                if said != b"r":
                    self.settle(_unpickled(self.result) if said == b"v" else Raised(_text(self.result)))
        except (EOFError, OSError):
            self.pipe.close()
        if not self.settled and exitcode is not None:
            self.settle(Killed(-exitcode) if exitcode < 0 else Exited(exitcode))

    def settle(self, outcome: Any) -> None:
        """Say what became of it."""
        self.outcome, self.settled = outcome, True

    def dismiss(self) -> None:
        """Tell a rank that has returned that all have."""
        if not self.pipe.closed:
            with contextlib.suppress(OSError):
                self.pipe.send_bytes(b"x")

    def kill(self) -> None:
        """End it and what it started."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._pid(), signal.SIGKILL)
        self.process.kill()  # it may not be in its group yet

    def signal(self, number: int) -> None:
        """Send a signal, if it is still there."""
        with contextlib.suppress(ProcessLookupError):
            os.kill(self._pid(), number)

    def _pid(self) -> int:
        pid = self.process.pid
        assert pid is not None
        return pid

    def close(self) -> None:
        """Give back what the caller holds of it."""
        self.pipe.close()
        self.process.join(_EXIT_S)
        with contextlib.suppress(ValueError):  # not even SIGKILL ends a process that waits for a broken disk
            self.process.close()
        self.result.close()
        self.stacks.close()


class _Fd:
    """A file descriptor on its way to a new process, where it arrives as a number."""

    def __init__(self, fd: int) -> None:
        self.fd = fd

    def __reduce__(self) -> tuple[Any, ...]:
        return operator.methodcaller("detach"), (reduction.DupFd(self.fd),)


def _context() -> multiprocessing.context.ForkServerContext:
    context = multiprocessing.get_context("forkserver")
    # The test runner is imported by every test module. Later calls change nothing: the server runs by then.
    context.set_forkserver_preload([*_PRELOAD, *(name for name in ("pytest", "hypothesis") if name in sys.modules)])
    return context


@contextlib.contextmanager
def _store(timeout_s: float) -> Iterator[int]:
    """Serve a store on a free port of the loopback interface only; yields the port."""
    import torch.distributed as dist

    with contextlib.closing(socket.create_server((HOST, 0))) as listener:
        port = int(listener.getsockname()[1])
        fd = listener.detach()  # the store closes it
    timeout = timedelta(seconds=timeout_s)
    store = dist.TCPStore(  # type: ignore[attr-defined]
        HOST, port, is_master=True, wait_for_workers=False, timeout=timeout, master_listen_fd=fd
    )
    try:
        yield port
    finally:
        del store


def _wait(ranks: Sequence[_Rank], timeout_s: float, start_s: float, allow_killed: bool) -> str:
    """Wait until all have settled or waiting is no longer worth it; says why it ended."""
    why, end_s = f"not all ranks were ready within {start_s:g} s", _clock.monotonic_s() + start_s
    all_ready = one_failed = False
    while running := [r for r in ranks if not r.settled]:
        left_s = end_s - _clock.monotonic_s()
        if left_s <= 0:
            return why
        connection.wait([item for r in running for item in r.waitables()], left_s)
        for r in running:
            r.look()
        now_s = _clock.monotonic_s()
        if not (all_ready or one_failed) and all(r.ready or r.settled for r in ranks):
            all_ready, why, end_s = True, f"not all ranks were done within {timeout_s:g} s", now_s + timeout_s
        if not one_failed and any(r.settled and _failed(r.outcome, allow_killed) for r in ranks):
            one_failed = True
            if now_s + _GRACE_S < end_s:
                why, end_s = f"the others were ended {_GRACE_S:g} s after the first failure", now_s + _GRACE_S
    return ""


def _note_stacks(running: Sequence[_Rank]) -> None:
    """Have each of these ranks write down where it stands, and settle it as unfinished."""
    # Before faulthandler is set up the signal would end it, and there would be nothing to see.
    waiting = [r for r in running if r.ready]
    for r in waiting:
        r.signal(STACKS_SIGNAL)
    end_s = _clock.monotonic_s() + _STACKS_S
    sizes: list[int] = []
    while waiting and _clock.monotonic_s() < end_s:
        before, sizes = sizes, [os.fstat(r.stacks.fileno()).st_size for r in waiting]
        if all(sizes) and sizes == before:
            break
        _clock.sleep(0.05)
    for r in running:
        r.settle(Unfinished(_text(r.stacks)))


def _end(ranks: Sequence[_Rank]) -> None:
    """Leave no process: those that returned may go by themselves, within bounds."""
    started = [r for r in ranks if getattr(r, "process", None) is not None and r.process.pid is not None]
    returned = [r for r in started if r.settled and not _failed(r.outcome, allow_killed=False)]
    for r in returned:
        r.dismiss()
    end_s = _clock.monotonic_s() + _EXIT_S
    for r in returned:
        r.process.join(max(0.0, end_s - _clock.monotonic_s()))
    for r in started:
        r.kill()
    for r in started:
        r.close()


def _failed(outcome: Any, allow_killed: bool) -> bool:
    return isinstance(outcome, (Raised, Exited, Unfinished)) or (isinstance(outcome, Killed) and not allow_killed)


def _message(fn: Callable[..., Any], outcomes: Sequence[Any], why: str) -> str:
    bad = {rank: outcome for rank, outcome in enumerate(outcomes) if _failed(outcome, allow_killed=False)}
    # What went wrong comes first, who was only waiting for it last.
    order = sorted(bad, key=lambda rank: isinstance(bad[rank], Unfinished))
    head = f"{fn.__qualname__} in a world of {len(outcomes)}: {len(bad)} ranks gave no result"
    return "\n".join([f"{head}; {why}" if why else head, *(f"\nrank {rank} {bad[rank]}" for rank in order)])


def _file_of(fn: Callable[..., Any]) -> str:
    """The file that `fn` can be imported from, once it is sure that it can."""
    where = f"{getattr(fn, '__module__', '?')}.{getattr(fn, '__qualname__', fn)}"
    module = sys.modules.get(getattr(fn, "__module__", None) or "")
    file = getattr(module, "__file__", None)
    found: Any = module
    for part in getattr(fn, "__qualname__", "<none>").split("."):
        found = getattr(found, part, None)
    if not isinstance(fn, FunctionType) or found is not fn or file is None:
        raise ConfigError(
            f"{where} cannot be called in another process: pass a function from the top level of a module that has "
            "a file, no lambda, nested function, method or partial, and its values as arguments",
            fn=where,
        )
    return str(Path(file).resolve())


def _pickled(args: tuple[Any, ...]) -> bytes:
    try:
        return pickle.dumps(args)
    except Exception as error:
        raise ConfigError(f"the arguments of a world's function must pickle: {error}") from error


def _unpickled(file: IO[bytes]) -> Any:
    file.seek(0)
    try:
        return pickle.load(file)  # noqa: S301 - our own child wrote it
    except Exception:  # noqa: BLE001 - whatever a class does when it is put together again
        return Raised(f"its result does not unpickle in the caller:\n{traceback.format_exc()}")


def _text(file: IO[bytes]) -> str:
    file.seek(0)
    return file.read().decode(errors="replace")
