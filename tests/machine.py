"""What a test may leave on a machine: processes, zombies, ports, open files, threads. Linux alone."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from multiprocessing import forkserver, resource_tracker
from pathlib import Path

__all__ = ["KEPT", "MARK", "children", "listening", "open_files", "processes", "servers", "settle", "threads"]

MARK = "RESILIO_CLEAN_MACHINE"  # whoever inherits it comes from a test here
KEPT: set[int] = set()  # what a fixture of the whole session has started, and ends itself


def servers() -> set[int]:
    """What multiprocessing starts once and keeps for the life of this process."""
    server = getattr(forkserver, "_forkserver", None)  # neither name is public
    tracker = getattr(resource_tracker, "_resource_tracker", None)
    return {pid for pid in (getattr(server, "_forkserver_pid", None), getattr(tracker, "_pid", None)) if pid}


def processes(token: str) -> dict[int, str]:
    """Every program on the machine that was started with this token in its environment, by whomever."""
    found = {}
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            state = (folder / "stat").read_text().rpartition(")")[2].split()[0]
            if state != "Z" and f"{MARK}={token}".encode() in (folder / "environ").read_bytes().split(b"\0"):
                found[int(folder.name)] = (folder / "cmdline").read_bytes().replace(b"\0", b" ").decode()
        except OSError:  # it has ended, or is somebody else's
            continue
    return {pid: words for pid, words in found.items() if pid not in servers() | KEPT | {os.getpid()}}


def children() -> set[int]:
    """The children of this process and of the server that worlds are forked from, dead ones that it keeps as well."""
    while True:
        found = set()
        try:
            for parent in (os.getpid(), *servers()):
                for thread in Path(f"/proc/{parent}/task").glob("*/children"):
                    found.update(map(int, thread.read_text().split()))
        except OSError:  # a thread ended meanwhile, and its children are another's now
            continue
        return found - servers() - KEPT


def listening() -> set[str]:
    """TCP ports that are listened on, by the sockets of this process."""
    mine = set()
    for fd in Path("/proc/self/fd").iterdir():
        try:
            target = os.readlink(fd)
        except OSError:
            continue
        mine.add(target.removeprefix("socket:[").removesuffix("]"))
    ports = set()
    for name in ("tcp", "tcp6"):
        for line in Path(f"/proc/net/{name}").read_text().splitlines()[1:]:
            fields = line.split()
            if fields[3] == "0A" and fields[9] in mine:
                ports.add(fields[1])
    return ports


def threads() -> int:
    return len(list(Path("/proc/self/task").iterdir()))


def open_files() -> int:
    return len(os.listdir("/proc/self/fd"))


def settle(clean: Callable[[], bool], limit_s: float = 5.0) -> None:
    """What was killed is gone a moment later."""
    end_s = time.monotonic() + limit_s
    while not clean() and time.monotonic() < end_s:
        time.sleep(0.02)
