"""No test leaves a process behind: not its own, and not one that a world of its ranks started."""

from __future__ import annotations

import gc
import multiprocessing
import os
import sys
import time
from collections.abc import Iterator

import pytest
from machine import MARK, children, processes, settle


@pytest.fixture(autouse=True)
def _no_child_is_left() -> Iterator[None]:
    if sys.platform != "linux":
        yield
        return
    before = children()
    yield
    if not children() <= before:
        # A loader's iterator that an error stopped half-made is part of a cycle. It terminates its workers when it is
        # collected, and leaves it to others to wait for them.
        gc.collect()
        settle(lambda: not multiprocessing.active_children())  # which waits for those that have ended
    settle(lambda: children() <= before)
    assert children() <= before, "a process that this test started is still there, or was never waited for"


@pytest.fixture(scope="session", autouse=True)
def _nothing_of_this_session_is_left() -> Iterator[None]:
    """Orphans too: whoever has inherited this session's mark."""
    if sys.platform != "linux":
        yield
        return
    os.environ[MARK] = token = f"{os.getpid()}.{time.monotonic_ns()}"
    yield
    assert processes(token) == {}, "processes of this session are still there"
