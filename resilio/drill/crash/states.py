"""A state that a crash could leave, and a storage in memory that holds one."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from itertools import chain, combinations, takewhile
from random import Random
from typing import TypeVar

from ...clock import FakeClock
from ...errors import AlreadyExistsError, IntegrityError, NotFoundError
from ...storage.base import Buffer, Capabilities, Incomplete, ObjectInfo, Storage, Writer, byte_view
from ...storage.memory import Growing
from .log import Known

__all__ = ["Found", "ModelStorage", "State", "subsets"]

_T = TypeVar("_T")


@dataclass(frozen=True)
class State:
    """What is there after a crash.

    Attributes:
        objects: key -> bytes.
        uploads: keys of what was begun and never published.
    """

    objects: dict[str, bytes]
    uploads: frozenset[str] = frozenset()

    def __hash__(self) -> int:
        return hash((frozenset(self.objects.items()), self.uploads))


@dataclass(frozen=True)
class Found:
    """A state, what was known when the crash came, and how it came about, for people."""

    state: State
    known: Known
    at: int
    how: str


class ModelStorage(Storage):
    """A state as a storage of its own; what is written to it is not written to the state.

    Args:
        state: what is there, written when `clock` says it is now.
        clock: the store's; move it to let leases run out.
    """

    def __init__(self, state: State, clock: FakeClock) -> None:
        self.url = "memory://crash-state"
        self.capabilities = Capabilities(shared=False)
        self.clock = clock
        self._objects = {key: (data, clock.now_s) for key, data in state.objects.items()}
        self._sorted: list[str] | None = None  # keys
        self._uploads = set(state.uploads)
        self._begun_s = clock.now_s

    def put(self, key: str, data: Buffer, *, if_absent: bool = False) -> ObjectInfo:
        """See `Storage.put`."""
        if if_absent and key in self._objects:
            raise AlreadyExistsError(f"{self.url}: there is an object {key!r} already", key=key, url=self.url)
        self._objects[key] = bytes(byte_view(data)), self.clock.now_s
        self._sorted = None
        return ObjectInfo(key, len(self._objects[key][0]), self.clock.now_s)

    def writer(self, key: str, *, size_hint: int | None = None) -> AbstractContextManager[Writer]:
        """See `Storage.writer`."""
        return self._writing(key)

    @contextmanager
    def _writing(self, key: str) -> Iterator[Writer]:
        out = Growing()
        yield out
        self.put(key, out.data, if_absent=True)

    def read_into(self, key: str, ranges: Sequence[tuple[int, memoryview]]) -> None:
        """See `Storage.read_into`."""
        data = self.get(key)
        for offset, buffer in ranges:
            if offset + len(buffer) > len(data):
                raise IntegrityError(f"{self.url}: {key!r} ends at byte {len(data)}", key=key, url=self.url)
            buffer[:] = data[offset : offset + len(buffer)]

    def get(self, key: str) -> bytes:
        """See `Storage.get`."""
        try:
            return self._objects[key][0]
        except KeyError:
            raise NotFoundError(f"{self.url}: no object {key!r}", key=key, url=self.url) from None

    def stat(self, key: str) -> ObjectInfo:
        """See `Storage.stat`."""
        return ObjectInfo(key, len(self.get(key)), self._objects[key][1])

    def list(self, prefix: str) -> Iterator[ObjectInfo]:
        """See `Storage.list`."""
        if self._sorted is None:
            self._sorted = sorted(self._objects)
        first = bisect_left(self._sorted, prefix)
        found = takewhile(lambda key: key.startswith(prefix), self._sorted[first:])
        return iter([ObjectInfo(key, len(self._objects[key][0]), self._objects[key][1]) for key in found])

    def delete(self, keys: Iterable[str]) -> None:
        """See `Storage.delete`."""
        for key in keys:
            self._objects.pop(key, None)
        self._sorted = None

    def content(self, prefixes: tuple[str, ...]) -> Iterator[tuple[str, bytes]]:
        """Key and bytes of every object under one of `prefixes`."""
        return ((key, data) for key, (data, _) in self._objects.items() if key.startswith(prefixes))

    def incomplete(self, prefix: str) -> Iterator[Incomplete]:
        """See `Storage.incomplete`."""
        return iter([Incomplete(key, key, self._begun_s) for key in self._uploads if key.startswith(prefix)])

    def abort(self, item: Incomplete) -> None:
        """See `Storage.abort`."""
        self._uploads.discard(item.key)


def subsets(items: Sequence[_T], limit: int, rng: Random, sampled: Callable[[], None]) -> Iterator[tuple[_T, ...]]:
    """All subsets of `items`, in order. Of many, a choice: none, all, one, all but one, the first few, some at random.

    Args:
        items: of what.
        limit: up to how many items every subset is given.
        rng: for the random ones.
        sampled: called if it is a choice.
    """
    if len(items) <= limit:
        yield from chain.from_iterable(combinations(items, n) for n in range(len(items) + 1))
        return
    sampled()
    numbers = range(len(items))
    chosen = {frozenset(numbers), *(frozenset([i]) for i in numbers), *(frozenset(numbers) - {i} for i in numbers)}
    chosen |= {frozenset(range(i)) for i in numbers}
    chosen |= {frozenset(i for i in numbers if rng.random() < 0.5) for _ in range(2**limit)}
    for one in sorted(chosen, key=sorted):
        yield tuple(items[i] for i in sorted(one))
