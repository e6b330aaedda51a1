"""What one rank of a world does, from the fork to its end; `worlds` is the other side.

Apart so that the server can load it before it forks, and so that nothing here needs the caller's modules.
"""

from __future__ import annotations

import contextlib
import ctypes
import faulthandler
import importlib
import importlib.util
import os
import pickle
import signal
import sys
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing import connection, forkserver
from pathlib import Path
from types import ModuleType
from typing import Any

from resilio import failpoints

__all__ = ["HOST", "STACKS_SIGNAL", "Job", "run_rank"]

HOST = "127.0.0.1"

# Code under test is free to use SIGUSR1 and SIGUSR2, and does.
STACKS_SIGNAL: int = getattr(signal, "SIGRTMAX", signal.SIGUSR2)


@dataclass
class Job:
    """What every rank is told."""

    module: str
    file: str
    qualname: str
    args: bytes
    world: int
    env: dict[str, str]
    group_timeout_s: float
    threads: int
    port: int | None = None


def run_rank(
    rank: int, job: Job, pipe: connection.Connection, stdout: int, stderr: int, result: int, stacks: int
) -> None:
    """What a rank does. Never returns: a gloo thread that hangs must not keep the process."""
    code = 1
    try:
        _settle_in(rank, job, stdout, stderr, stacks)
        fn, args = _load(job)
        if job.port is not None:
            _join_group(rank, job, job.port)
        pipe.send_bytes(b"r")
        answer, said = pickle.dumps(fn(rank, job.world, *args)), b"v"
        code = 0
    except BaseException:  # noqa: BLE001 - DCP's CheckpointException is no Exception, and SystemExit is news as well
        answer, said = traceback.format_exc().encode(errors="replace"), b"e"
    try:
        with os.fdopen(result, "wb") as file:
            file.write(answer)
        sys.stdout.flush()
        sys.stderr.flush()
        pipe.send_bytes(said)
        if said == b"v":
            pipe.recv_bytes()  # the others may still be talking to this rank
            _leave_group()
    finally:
        os._exit(code)


def _settle_in(rank: int, job: Job, stdout: int, stderr: int, stacks: int) -> None:
    """Become like a fresh child of the caller, whatever the server was when it started."""
    os.setpgid(0, 0)  # what it starts is ended with it
    _die_with_the_caller()
    os.dup2(stdout, 1)
    os.dup2(stderr, 2)
    faulthandler.enable()  # a crash in C shows on stderr
    faulthandler.register(STACKS_SIGNAL, file=stacks, all_threads=True)
    os.environ.clear()
    os.environ.update(job.env)
    failpoints.disarm()
    failpoints.arm(os.environ.get("RESILIO_FAILPOINTS", ""))

    import numpy as np
    import torch

    np.random.seed()  # else all ranks would share the state that was forked
    torch.set_num_threads(job.threads)
    if job.port is not None:
        os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank))
        os.environ.update(WORLD_SIZE=str(job.world), LOCAL_WORLD_SIZE=str(job.world))
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo" if sys.platform == "linux" else "lo0")


def _die_with_the_caller() -> None:
    """Have a caller that is killed take its ranks along: the server follows the caller, and the ranks the server."""
    if sys.platform != "linux":
        return
    pr_set_pdeathsig = 1
    ctypes.CDLL(None).prctl(pr_set_pdeathsig, signal.SIGKILL)
    # The server lives until nobody holds this pipe any more, and multiprocessing hands it to every child. Not a public
    # name: where it is called otherwise, ranks only outlive a caller that was killed.
    server = getattr(forkserver, "_forkserver", None)
    alive_fd = getattr(server, "_forkserver_alive_fd", None)
    if isinstance(alive_fd, int):
        os.close(alive_fd)
        setattr(server, "_forkserver_alive_fd", None)  # noqa: B010 - mypy does not know it


def _load(job: Job) -> tuple[Callable[..., Any], tuple[Any, ...]]:
    found: Any = _module(job.module, job.file)
    for part in job.qualname.split("."):
        found = getattr(found, part)
    # After the module: classes of the arguments may be defined in it.
    args: tuple[Any, ...] = pickle.loads(job.args)  # noqa: S301 - our own parent wrote it
    return found, args


def _module(name: str, file: str) -> ModuleType:
    """The module `name`, from `file`: by name where that leads to the file, else from the file under that name.

    The name is the caller's, so that classes defined in the module pickle both ways.
    """
    with contextlib.suppress(ModuleNotFoundError):
        module = importlib.import_module(name)
        if getattr(module, "__file__", None) and Path(str(module.__file__)).resolve() == Path(file):
            return module
    # As multiprocessing does: under its own name the main module would run as a script.
    spec = importlib.util.spec_from_file_location("__mp_main__" if name == "__main__" else name, file)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = sys.modules[name] = module
    spec.loader.exec_module(module)
    return module


def _join_group(rank: int, job: Job, port: int) -> None:
    import torch.distributed as dist

    timeout = timedelta(seconds=job.group_timeout_s)
    store = dist.TCPStore(  # type: ignore[attr-defined]
        HOST, port, is_master=False, wait_for_workers=False, timeout=timeout
    )
    dist.init_process_group("gloo", store=store, rank=rank, world_size=job.world, timeout=timeout)


def _leave_group() -> None:
    import torch.distributed as dist

    if dist.is_initialized():
        dist.destroy_process_group()
