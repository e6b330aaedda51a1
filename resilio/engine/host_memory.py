"""How much host memory may still be taken, by what the kernel says of the machine and of this process's cgroup."""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path

__all__ = ["available_bytes", "lacks"]

WORTH_ASKING = 1 << 24  # bytes; less is never what a host lacks

_ROOT = Path("/")

# Limit, what is used, and where it says how much of that is page cache that would go first: cgroup 2, and 1.
_GROUPS = (
    ("sys/fs/cgroup/memory.max", "sys/fs/cgroup/memory.current", "sys/fs/cgroup/memory.stat", "inactive_file"),
    (
        "sys/fs/cgroup/memory/memory.limit_in_bytes",
        "sys/fs/cgroup/memory/memory.usage_in_bytes",
        "sys/fs/cgroup/memory/memory.stat",
        "total_inactive_file",
    ),
)


def available_bytes(root: Path = _ROOT) -> int | None:
    """What can be allocated without swapping or being killed; None where nobody says.

    A container counts by its own limit, which the machine's numbers do not show.

    Args:
        root: where ``/proc`` and ``/sys`` lie.
    """
    found: list[int] = []
    with suppress(OSError, ValueError, KeyError):
        found.append(1024 * _fields(root / "proc/meminfo")["MemAvailable"])
    for limit, used, stat, cache in _GROUPS:
        with suppress(OSError, ValueError, KeyError):  # "max" is no number: no limit
            most = int((root / limit).read_text())
            taken = int((root / used).read_text()) - _fields(root / stat)[cache]
            found.append(max(0, most - taken))
    return min(found, default=None)


def lacks(needed_bytes: int) -> bool:
    """Whether as much as this cannot be had by each of this job's processes on this host, as far as anybody says."""
    if needed_bytes < WORTH_ASKING:
        return False
    processes = os.environ.get("LOCAL_WORLD_SIZE", "")  # torchrun says it
    available = available_bytes()
    return available is not None and needed_bytes * int(processes if processes.isdecimal() else 1) > available


def _fields(path: Path) -> dict[str, int]:
    """The first number of each line, by name."""
    rows = (line.replace(":", " ").split() for line in path.read_text().splitlines())
    return {row[0]: int(row[1]) for row in rows if len(row) > 1 and row[1].isdigit()}
