"""Several threads for one job: all of it, or the first error once nobody works on it any more."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable

import pytest

from resilio.engine.parallel import in_parallel

Check = Callable[[], None]


def test_results_come_in_order_and_all_tasks_run_at_the_same_time() -> None:
    meet = threading.Barrier(3)

    def task(number: int) -> Callable[[Check], int]:
        def act(check: Check) -> int:
            meet.wait(60)
            return number

        return act

    assert in_parallel([task(1), task(2), task(3)], "t") == [1, 2, 3]
    assert in_parallel([], "t") == []


@pytest.mark.parametrize("failing", [0, 1])
def test_the_first_error_ends_the_others_and_is_raised_when_they_have_ended(failing: int) -> None:
    begun, ended = threading.Event(), threading.Event()

    def fail(check: Check) -> None:
        assert begun.wait(60)
        raise OSError("disk")

    def work(check: Check) -> None:
        begun.set()
        try:
            while True:  # an endless task ends only by being told
                check()
        finally:
            ended.set()

    tasks = [fail, work] if failing == 0 else [work, fail]
    with pytest.raises(OSError, match="disk"):
        in_parallel(tasks, "t")
    assert ended.is_set()


def test_without_threads_all_is_done_in_this_one(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(self: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", refuse)
    seen: list[str] = []
    assert in_parallel(
        [lambda check, i=i: seen.append(threading.current_thread().name) or i for i in range(3)], "t"
    ) == [
        0,
        1,
        2,
    ]
    assert seen == ["MainThread"] * 3


CTRL_C = """
import os, signal, sys, threading, time
from resilio.engine.parallel import in_parallel
def quick(check): pass
def slow(check):
    os.kill(os.getpid(), signal.SIGINT)
    try:
        while True:
            check(); time.sleep(0.01)
    finally:
        print("ended", flush=True)
try:
    in_parallel([quick, slow], "t")
except KeyboardInterrupt:
    print("interrupted", flush=True)
"""


def test_a_ctrl_c_waits_for_the_others_to_end() -> None:
    assert signal.getsignal(signal.SIGINT) is not signal.SIG_IGN
    done = subprocess.run([sys.executable, "-c", CTRL_C], capture_output=True, text=True, timeout=120, env=os.environ)
    assert done.stdout.split() == ["ended", "interrupted"], done.stderr
