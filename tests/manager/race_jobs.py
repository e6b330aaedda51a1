"""What the tests of races share: small jobs on one run, and places where processes wait for each other."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from resilio import CheckpointManager
from resilio.testing.worlds import run_world


def run(url: Any, state: dict[str, Any], **options: Any) -> CheckpointManager:
    """A manager of one small dict."""
    return CheckpointManager(url, {"state": state}, mode="sync", **options)


def go_on(url: Any, saves: int = 1, **options: Any) -> int:
    """A job that restores, saves so many times, and ends; the step of the last one. `x` is always the step."""
    state = {"x": 0}
    with run(url, state, **options) as ckpt:
        found = ckpt.restore().step
        assert state["x"] == (found or 0), f"step {found} holds the state of step {state['x']}"
        for state["x"] in range(ckpt.next_step, ckpt.next_step + saves):
            ckpt.save(state["x"])
        return state["x"]


def committed(path: Path) -> list[int]:
    """Steps of all commit records."""
    return sorted(int(one.name[:9]) for one in path.glob("commits/0*.json"))


def folders(path: Path) -> list[str]:
    """Step and generation of all attempts."""
    return sorted(one.name[5:22] for one in path.glob("step-*"))


def meet(place: Path, name: Any, count: int) -> None:
    """Wait until `count` processes, each by a name of its own, have come to `place`."""
    place.mkdir(parents=True, exist_ok=True)
    (place / str(name)).touch()
    end_s = time.monotonic() + 60
    while len(os.listdir(place)) < count:
        assert time.monotonic() < end_s, f"{place}: only {os.listdir(place)} came"
        os.sched_yield()


@contextmanager
def beside(fn: Callable[..., Any], world: int, *args: Any) -> Iterator[list[Any]]:
    """So many independent processes that run `fn` while the block does; afterwards, what they returned."""
    results: list[Any] = []
    failed: list[BaseException] = []

    def work() -> None:
        try:
            results.extend(run_world(fn, world, *args, init=False))
        except BaseException as error:  # raised below
            failed.append(error)

    thread = threading.Thread(target=work)
    thread.start()
    try:
        yield results
    finally:
        thread.join()
    if failed:
        raise failed[0]
