"""Work on one range after the other, while the next ones are being read: in order, in bounded memory."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from itertools import chain, islice
from typing import TypeVar

__all__ = ["in_order", "readers"]

_T = TypeVar("_T")
_R = TypeVar("_R")


def readers(concurrency: int) -> int:
    """How many threads read ahead of one that works, for a storage of this `concurrency`."""
    return max(2, min(concurrency, 8))


def in_order(tasks: Iterable[_T], work: Callable[[_T], _R], threads: int) -> Iterator[_R]:
    """What `work` returns for each of `tasks`, in their order; one more than `threads` is begun and not yet taken.

    Of no `threads`, each is worked on when it is asked for.

    The first error ends it, after those that had begun have ended. What was yielded is the caller's until the next one
    is asked for: `threads + 2` results are in memory at the most.
    """
    given = iter(tasks)
    first = list(islice(given, 2))
    if len(first) < 2 or not threads:  # of the common small object a thread would only cost
        yield from map(work, chain(first, given))
        return
    begun: deque[Future[_R]] = deque()
    with ThreadPoolExecutor(threads, thread_name_prefix="resilio-read") as pool:
        try:
            for task in chain(first, given):
                begun.append(pool.submit(work, task))
                if len(begun) > threads:
                    yield begun.popleft().result()
            while begun:
                yield begun.popleft().result()
        finally:
            for future in begun:
                future.cancel()
