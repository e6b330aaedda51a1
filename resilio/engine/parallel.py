"""Several threads for one job that is all or nothing."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from queue import SimpleQueue
from typing import Any, TypeVar

__all__ = ["Stopped", "in_parallel"]

_T = TypeVar("_T")


class Stopped(Exception):
    """Raised by a task that has seen that it need not go on: another has failed."""


def in_parallel(tasks: Sequence[Callable[[Callable[[], None]], _T]], name: str) -> list[_T]:
    """What all tasks return, in order; the first runs in this thread, each other one in a thread of its own.

    Not an executor: Python gives those no work any more when the process ends, and a save in flight is waited for then.

    Args:
        tasks: each is given a function to call from time to time: it raises `Stopped` once the task need not go on.
        name: of the threads.

    Raises:
        BaseException: that of the task that failed first, or a Ctrl-C that came to this thread; not before all tasks
            have ended.
    """
    results: list[Any] = [None] * len(tasks)
    errors: list[BaseException] = []  # in the order they came
    begun: set[int] = set()  # in threads; of which nobody was told to stop before
    lock = threading.Lock()
    ended: SimpleQueue[int] = SimpleQueue()  # `join` takes a thread for ended that a Ctrl-C kept it from waiting for

    def check() -> None:
        if errors:
            raise Stopped

    def run(index: int) -> None:
        try:
            check()
            results[index] = tasks[index](check)
        except Stopped:
            pass
        except BaseException as error:  # noqa: BLE001  raised below
            fail(error)

    def fail(error: BaseException, *, first: bool = False) -> None:
        with lock:
            errors.insert(0 if first else len(errors), error)

    def run_in_thread(index: int) -> None:
        with lock:
            if errors:  # then nobody waits for it
                return
            begun.add(index)
        run(index)
        ended.put(index)

    started: set[int] = set()
    here = list(range(min(1, len(tasks))))
    try:
        for index in range(1, len(tasks)):
            try:
                threading.Thread(target=run_in_thread, args=(index,), name=name, daemon=True).start()
                started.add(index)
            except RuntimeError:  # no thread to be had, as at the end of a process
                here.append(index)
        for index in here:
            run(index)
    except BaseException as interrupt:  # noqa: BLE001  the others write to what whoever called would clean up
        fail(interrupt, first=True)
    over: set[int] = set()
    while True:
        try:
            with lock:
                waited_for = (begun if errors else started) - over
            if not waited_for:
                break
            over.add(ended.get())
        except BaseException as interrupt:  # noqa: BLE001  as above
            fail(interrupt, first=True)
    if errors:
        raise errors[0]
    return results
