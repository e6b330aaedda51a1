"""Named places where a crash, an error or a pause can be asked for: how crash consistency is tested for real.

A failpoint costs one dictionary look-up when nothing is asked for. `RESILIO_FAILPOINTS` asks, in the environment of the
process, a comma-separated list of `name=action[@rank][#n]`:

=============  ==================================================================================================
action         what happens when execution reaches the place
=============  ==================================================================================================
``kill``       SIGKILL to the own process, as a node that loses power or an OOM killer would do
``raise``      `OSError(EIO)`, as a broken disk would
``enospc``     `OSError(ENOSPC)`
``hold:PATH``  create the file PATH, then wait until it is gone (or ten minutes have passed)
=============  ==================================================================================================

`@rank` limits it to one rank, `#n` to the n-th time the place is reached (1 is the first; without it: each time).
Source: the idea is FreeBSD's fail(9) and SQLite's "fail the N-th operation, for all N".
"""

from __future__ import annotations

import errno
import os
import re
import signal
import time
from pathlib import Path

from .errors import ConfigError

__all__ = ["NAMES", "arm", "disarm", "hit"]

# Every place there is, in the order a save passes them. Tests kill at each one, so a name belongs here and in the code.
NAMES: tuple[str, ...] = (
    "save.staged",  # all ranks: state is copied, nothing is on storage
    "save.data_open",  # each rank: its data object is begun
    "save.data_written",  # each rank: its data object is durable
    "save.part_written",  # each rank: digests and manifest part are durable
    "save.before_metadata",  # rank 0: all ranks reported, nothing of the root is written
    "save.before_manifest",  # rank 0: .metadata is there
    "generation.before_create",  # rank 0: first save only
    "generation.created",  # rank 0: first save only
    "save.before_commit",  # rank 0: all but the commit record is there
    "save.committed",  # rank 0: the commit record is there, nobody knows yet
    "save.acknowledged",  # rank 0: fencing was looked at again; all ranks are about to be told
    "sweep.begin",  # rank 0: the decision is made, nothing is deleted
    "sweep.record_deleted",  # rank 0: the commit record is gone, the data is there
    "sweep.manifest_deleted",  # rank 0: the manifest is gone as well
    "sweep.data_deleted",  # rank 0: all is gone
)

_ENV = "RESILIO_FAILPOINTS"
_ASK = re.compile(r"(?P<name>[a-z_.]+)=(?P<action>kill|raise|enospc|hold:[^,@#]+)(?:@(?P<rank>\d+))?(?:#(?P<nth>\d+))?")

_armed: dict[str, tuple[str, int | None, int | None]] = {}
_reached: dict[str, int] = {}


def arm(asks: str) -> None:
    """Ask for what `RESILIO_FAILPOINTS` would, in this process.

    Raises:
        ConfigError: a name or an action is unknown.
    """
    for ask in filter(None, (part.strip() for part in asks.split(","))):
        found = _ASK.fullmatch(ask)
        if found is None or found["name"] not in NAMES:
            raise ConfigError(f"{_ENV}: cannot understand {ask!r}; known places: {', '.join(NAMES)}", ask=ask)
        rank, nth = found["rank"], found["nth"]
        _armed[found["name"]] = (found["action"], int(rank) if rank else None, int(nth) if nth else None)


def disarm() -> None:
    """Forget all that was asked for."""
    _armed.clear()
    _reached.clear()


def hit(name: str, rank: int = 0) -> None:
    """Say that execution reached the place `name` on `rank`."""
    ask = _armed.get(name)
    if ask is None:
        return
    action, only_rank, nth = ask
    if only_rank is not None and only_rank != rank:
        return
    _reached[name] = _reached.get(name, 0) + 1
    if nth is not None and _reached[name] != nth:
        return
    if action == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
        time.sleep(60)  # the signal is on its way; nothing after this place may run
    elif action in ("raise", "enospc"):
        number = errno.EIO if action == "raise" else errno.ENOSPC
        raise OSError(number, f"{os.strerror(number)} (failpoint {name})")
    else:
        _hold(Path(action.removeprefix("hold:")))


def _hold(path: Path, limit_s: float = 600.0) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(str(os.getpid()))
    end = time.monotonic() + limit_s
    while path.exists() and time.monotonic() < end:
        time.sleep(0.01)


arm(os.environ.get(_ENV, ""))
