"""What a crash can leave in an object store: whole objects, any of those that were under way at once.

A put is there or not. An upload is invisible until it is completed. Requests of one rank come in order; those of
several ranks that wait for none of each other are cut at any place each. A request to delete several may have deleted
any of them. A request whose answer never came is done at any later moment, or never.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import groupby, product
from random import Random

from .log import Begin, Delete, Dropped, Entry, Known, Put, StoreCall
from .states import Found, State, subsets

__all__ = ["ObjectStates"]

_Group = tuple[int, list[StoreCall], Known]


class ObjectStates:
    """The states that a crash at each moment of a log can leave.

    Args:
        entries: of the log.
        seed: of the choice among too many.
        exhaustive: up to how many things at once every subset of them is tried.

    Attributes:
        operations: number of requests in the log.
        sampled: moments at which not every state was made.
    """

    def __init__(self, entries: Sequence[Entry], seed: int, exhaustive: int) -> None:
        self._entries = [
            (at, entry) for at, entry in enumerate(entries) if entry.call is None or isinstance(entry.call, StoreCall)
        ]
        self._rng, self._exhaustive = Random(seed), exhaustive
        self.operations = sum(entry.call is not None for _, entry in self._entries)
        self.sampled = 0

    def __iter__(self) -> Iterator[Found]:
        base, late = State({}), list[Put]()
        yield Found(base, Known(), 0, "before anything")
        for at, calls, known in self._groups():
            for done, how in self._cuts(calls):
                yield from self._with_late(_apply(base, done), late, known, at, how)
            base = _apply(base, calls)
            late += [call for call in calls if isinstance(call, Put) and call.late]

    def _groups(self) -> Iterator[_Group]:
        """Requests that may be under way at once; a change of what is known is a group of its own, without any."""
        for _, together in groupby(self._entries, key=lambda one: _together(*one)):
            group = list(together)
            calls = [entry.call for _, entry in group if isinstance(entry.call, StoreCall)]
            yield group[-1][0], calls, group[-1][1].known

    def _cuts(self, calls: list[StoreCall]) -> Iterator[tuple[list[StoreCall], str]]:
        first = calls[0] if calls else None
        if first is None:
            yield [], "once the job was told"
        elif isinstance(first, Delete):
            for gone in subsets(first.keys, self._exhaustive, self._rng, self._note):
                yield [Delete(gone)], f"in the deletion of {_some(first.keys)}; done: {_some(gone)}"
        else:
            ranks: dict[int | None, list[StoreCall]] = {}
            for call in calls:
                ranks.setdefault(call.lane, []).append(call)
            for cut in product(*(range(len(own) + 1) for own in ranks.values())):
                reached = [*zip(ranks.items(), cut, strict=True)]
                yield (
                    [call for (_, own), n in reached for call in own[:n]],
                    ", ".join(_place(lane, own, n) for (lane, own), n in reached),
                )

    def _with_late(self, state: State, late: list[Put], known: Known, at: int, how: str) -> Iterator[Found]:
        yield Found(state, known, at, how)
        for arrived in subsets(late, self._exhaustive, self._rng, self._note):
            if arrived:
                on_time = [Put(put.key, put.data, put.if_absent) for put in arrived]
                yield Found(_apply(state, on_time), known, at, f"{how}; late came {_some([p.key for p in arrived])}")

    def _note(self) -> None:
        self.sampled += 1


def _together(at: int, entry: Entry) -> tuple[str, int]:
    call = entry.call
    if isinstance(call, StoreCall) and call.lane is not None:
        return "ranks", 0
    return "one", at


def _apply(state: State, calls: Sequence[StoreCall]) -> State:
    objects, uploads = dict(state.objects), set(state.uploads)
    for call in calls:
        if isinstance(call, Begin):
            uploads.add(call.key)
        elif isinstance(call, Dropped):
            uploads.discard(call.key)
        elif isinstance(call, Delete):
            for key in call.keys:
                objects.pop(key, None)
        elif not call.late:
            if not (call.if_absent and call.key in objects):
                objects[call.key] = call.data
            uploads.discard(call.key)
    return State(objects, frozenset(uploads))


def _place(lane: int | None, own: list[StoreCall], done: int) -> str:
    who = "" if lane is None else f"rank {lane} "
    return f"{who}after {_name(own[done - 1])}" if done else f"{who}before {_name(own[0])}"


def _name(call: StoreCall) -> str:
    if isinstance(call, Put):
        return f"put {call.key}"
    if isinstance(call, Delete):
        return f"delete {_some(call.keys)}"
    return f"{'beginning' if isinstance(call, Begin) else 'giving up'} {call.key}"


def _some(keys: Sequence[str], limit: int = 3) -> str:
    more = f" and {len(keys) - limit} more" if len(keys) > limit else ""
    return (", ".join(keys[:limit]) or "nothing") + more
