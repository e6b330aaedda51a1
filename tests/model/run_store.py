"""The run's store in the model: what operations do to it, and what it promises whoever looks.

An object is there or not; a listing is complete; a create has one winner. What faults there are is bounded by
counters in the store itself: creates that get no answer (and arrive later, or never), writes that fail, weeks.
Fields marked (ghost) are no part of a real store: they remember what promises are about.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

__all__ = ["Attempt", "Commit", "Generation", "Pin", "Ref", "RunStore", "apply", "broken_promise", "happen", "line_of"]


class Ref(NamedTuple):
    """`CheckpointRef`."""

    generation: int
    step: int


class Attempt(NamedTuple):
    """The folder of an attempt; `by` and `number` are its random suffix."""

    ref: Ref
    by: str
    number: int


class Commit(NamedTuple):
    """A commit record. `life`, from one restore of one process to the next, is ghost; `week` is the store's time."""

    ref: Ref
    attempt: Attempt
    life: tuple[str, int]
    week: int = 0


class Generation(NamedTuple):
    """A generation record; `by` is its nonce, `week` the store's time. `seen` is ghost: what its owner knew of."""

    number: int
    by: str
    parent: Ref | None
    ancestors: tuple[Ref, ...]
    seen: frozenset[Ref]
    week: int = 0


class Pin(NamedTuple):
    """A pin; `attempt` stands for the bytes of the commit record."""

    ref: Ref
    by: str
    attempt: Attempt


class RunStore(NamedTuple):
    """Everything shared."""

    generations: frozenset[Generation] = frozenset()
    commits: frozenset[Commit] = frozenset()
    manifests: frozenset[Attempt] = frozenset()
    data: frozenset[Attempt] = frozenset()
    leases: frozenset[tuple[Ref, str, int]] = frozenset()
    pins: frozenset[Pin] = frozenset()
    flying: frozenset[tuple[str, Any]] = frozenset()  # creates without an answer: kind, record
    week: int = 0
    unanswered: int = 0  # creates that may yet get no answer
    unanswered_pins: int = 0
    echoes: bool = False  # whether one may even arrive after its record was made by another request, and deleted
    failures: int = 0  # writes that may yet fail
    weeks: int = 0  # that may yet pass
    acknowledged: frozenset[Ref] = frozenset()  # (ghost)
    landed: frozenset[Ref] = frozenset()  # (ghost) refs that ever had a record
    overstepped: frozenset[str] = frozenset()  # (ghost) who deleted a record when there was a newer generation
    broken: str | None = None  # (ghost) a promise that an operation broke


# -------------------------------------------------------------------------------------------------------- operations


def apply(store: RunStore, operation: tuple[Any, ...]) -> Iterable[tuple[Any, RunStore]]:
    """Each way `operation` may end: the answer, and the store afterwards."""
    kind, *args = operation
    outcomes: Iterable[tuple[Any, RunStore]] = _OPERATIONS[kind](store, *args)
    return outcomes


def happen(store: RunStore) -> Iterator[tuple[str, RunStore]]:
    """What happens by itself: a create whose answer was lost arrives, a week passes."""
    for kind, record in store.flying:
        there = store._replace(flying=store.flying - {(kind, record)})
        if kind == "pin":
            yield "a late pin arrives", there._replace(pins=store.pins | {record})
        elif kind == "generation":
            if all(one.number != record.number for one in store.generations):
                yield "a late generation record arrives", _land_generation(there, record)
        elif all(one.ref != record.ref for one in store.commits) and (store.echoes or record.ref not in store.landed):
            yield f"the late commit record of {show(record.ref)} arrives", _land_commit(there, record)
    if store.weeks:
        yield "a week passes", store._replace(weeks=store.weeks - 1, week=store.week + 1)


def _answer(store: RunStore, answer: Any) -> list[tuple[Any, RunStore]]:
    return [(answer, store)]


def _list_attempts(store: RunStore) -> Any:
    return _answer(store, (store.manifests, store.data))


def _list_commits(store: RunStore) -> Any:
    return _answer(store, store.commits)  # with content: a record never changes


def _list_generations(store: RunStore) -> Any:
    return _answer(store, store.generations)


def _list_leases(store: RunStore) -> Any:
    return _answer(store, frozenset(ref for ref, _, _ in store.leases))


def _list_pins(store: RunStore) -> Any:
    return _answer(store, frozenset((pin.ref, pin.attempt) for pin in store.pins))


def _look(store: RunStore, ref: Ref, acknowledge: bool) -> Any:
    """List generations; the answer is the newest. A save is acknowledged at this moment, if none is newer."""
    newest = max((one.number for one in store.generations), default=0)
    if acknowledge and newest <= ref.generation:
        store = store._replace(acknowledged=store.acknowledged | {ref})
    return _answer(store, newest)


def _acknowledge(store: RunStore, ref: Ref) -> Any:
    return _answer(store._replace(acknowledged=store.acknowledged | {ref}), None)


def _get_commit(store: RunStore, ref: Ref) -> Any:
    return _answer(store, next((one.attempt for one in store.commits if one.ref == ref), None))


def _stat_manifest(store: RunStore, attempt: Attempt) -> Any:
    return _answer(store, attempt in store.manifests)


def _stat_data(store: RunStore, attempt: Attempt) -> Any:
    return _answer(store, attempt in store.data)


def _create_generation(store: RunStore, record: Generation, if_absent: bool) -> Any:
    there = next((one for one in store.generations if one.number == record.number), None)
    if there is not None and if_absent:
        yield ("exists", there.by, there.parent), store
    if there is None or not if_absent:
        others = frozenset(one for one in store.generations if one is not there)
        yield "made", _land_generation(store._replace(generations=others), record)
    if store.unanswered:
        flying = store.flying | {("generation", record)}
        yield "no answer", store._replace(flying=flying, unanswered=store.unanswered - 1)


def _create_commit(store: RunStore, record: Commit) -> Any:
    there = next((one for one in store.commits if one.ref == record.ref), None)
    if there is not None:
        yield ("exists", there.attempt), store
    else:
        yield "made", _land_commit(store, record)
    if store.unanswered:
        flying = store.flying | {("commit", record)}
        yield "no answer", store._replace(flying=flying, unanswered=store.unanswered - 1)


def _land_generation(store: RunStore, record: Generation) -> RunStore:
    return store._replace(generations=store.generations | {record._replace(week=store.week)})


def _land_commit(store: RunStore, record: Commit) -> RunStore:
    ref, broken = record.ref, store.broken
    later = any(one.generation == ref.generation and one.step > ref.step for one in store.landed)
    if later and ref not in store.landed:
        broken = broken or f"steps grow within a generation: {show(ref)} came after a later one"
    commits = store.commits | {record._replace(week=store.week)}
    return store._replace(commits=commits, landed=store.landed | {ref}, broken=broken)


def _put_attempt(store: RunStore, attempt: Attempt) -> Any:
    """Data, then the manifest; or a failure or crash in between."""
    data = store.data | {attempt}
    yield True, store._replace(data=data, manifests=store.manifests | {attempt})
    if store.failures:
        yield False, store._replace(data=data, failures=store.failures - 1)


def _put_lease(store: RunStore, lease: tuple[Ref, str, int]) -> Any:
    return _answer(store._replace(leases=store.leases | {lease}), None)


def _put_pin(store: RunStore, pin: Pin) -> Any:
    yield True, store._replace(pins=store.pins | {pin})
    if store.unanswered_pins:
        flying = store.flying | {("pin", pin)}
        yield False, store._replace(flying=flying, unanswered_pins=store.unanswered_pins - 1)


def _delete_lease(store: RunStore, lease: tuple[Ref, str, int]) -> Any:
    return _answer(store._replace(leases=store.leases - {lease}), None)


def _delete_record(store: RunStore, ref: Ref, by: str, generation: int) -> Any:
    overstepped, broken = store.overstepped, store.broken
    if any(one.number > generation for one in store.generations):
        if by in overstepped:
            broken = broken or "a fenced sweeper finishes at most the one deletion it was in"
        overstepped |= {by}
    elif not _may_go(store, ref):
        broken = broken or f"an abandoned branch lives for a week and until the new one has two commits: {show(ref)}"
    commits = frozenset(one for one in store.commits if one.ref != ref)
    return _answer(store._replace(commits=commits, overstepped=overstepped, broken=broken), None)


def _delete_manifest(store: RunStore, attempt: Attempt) -> Any:
    return _answer(store._replace(manifests=store.manifests - {attempt}), None)


def _delete_data(store: RunStore, attempt: Attempt) -> Any:
    return _answer(store._replace(data=store.data - {attempt}), None)


def _chose(store: RunStore, ref: Ref, listed: frozenset[Commit]) -> Any:
    """No operation: a restore that asked for the newest chose `ref` from `listed`. Is that right?"""
    refs = frozenset(one.ref for one in listed)
    line = _chain_line(refs, store.generations)
    broken = store.broken
    if ref not in line:
        broken = broken or f"an abandoned branch is never chosen by itself: {show(ref)}"
    there = _whole(store)
    now = _chain_line(frozenset(one.ref for one in store.commits), store.generations)
    if any(one > ref for one in now if one in there):
        there |= set(line)  # those that have gone count too, as another has come in their place
    lost = [one for one in line if one in store.acknowledged and one in there and one > ref]
    if lost:
        broken = broken or f"the newest is chosen: {show(ref)} was, though {show(lost[-1])} was acknowledged before"
    return _answer(store._replace(broken=broken), None)


def _decide(store: RunStore, *what: str) -> Any:
    return [(True, store), (False, store)]


_OPERATIONS: dict[str, Any] = {
    "list attempts": _list_attempts,
    "list commits": _list_commits,
    "list generations": _list_generations,
    "list leases": _list_leases,
    "list pins": _list_pins,
    "look": _look,
    "acknowledge": _acknowledge,
    "get commit": _get_commit,
    "stat manifest": _stat_manifest,
    "stat data": _stat_data,
    "create generation": _create_generation,
    "create commit": _create_commit,
    "put attempt": _put_attempt,
    "put lease": _put_lease,
    "put pin": _put_pin,
    "delete lease": _delete_lease,
    "delete record": _delete_record,
    "delete manifest": _delete_manifest,
    "delete data": _delete_data,
    "chose": _chose,
    "decide": _decide,
}


# ---------------------------------------------------------------------------------------------------------- promises


def broken_promise(store: RunStore) -> str | None:
    """Which promise this store breaks, whoever looks."""
    if store.broken:
        return store.broken
    for commit in store.commits:
        if commit.attempt in store.manifests and commit.attempt not in store.data:
            return f"a checkpoint with a manifest is whole: {show(commit.ref)} has no data"
    for pin in store.pins:
        if pin.attempt not in store.manifests or pin.attempt not in store.data:
            return f"a pinned checkpoint stays whole: {show(pin.ref)}"
    return _lost(store) or _mixed(store)


def _lost(store: RunStore) -> str | None:
    """Whether acknowledged work is gone, or was left behind by somebody who did not know of it."""
    refs = frozenset(one.ref for one in store.commits)
    line = _chain_line(refs, store.generations)
    whole = _whole(store)
    newest = max((ref for ref in line if ref in whole), default=None)
    for ref in store.acknowledged:
        if _left_knowingly(ref, refs, store.generations):
            continue
        if ref in refs and ref not in line:
            return f"acknowledged work is not silently left behind: {show(ref)}"
        if newest is None or newest < ref:
            return f"the newest acknowledged checkpoint can be restored: {show(ref)} cannot"
    return None


def _mixed(store: RunStore) -> str | None:
    """Whether one generation holds commits of two lives, of which neither went on from the other."""
    lives: dict[int, set[tuple[str, int]]] = {}
    for one in store.commits:
        lives.setdefault(one.ref.generation, set()).add(one.life)
    mixed = [generation for generation, of in lives.items() if len(of) > 1]
    return f"a generation is one life: {mixed[0]} holds what did not lead to one another" if mixed else None


def _may_go(store: RunStore, ref: Ref) -> bool:
    """Whether `ref` is on the lineage (then the policy decides), or was abandoned long enough ago."""
    refs = frozenset(one.ref for one in store.commits)
    line = _chain_line(refs, store.generations)
    if ref not in refs or ref not in store.acknowledged or ref in line:
        return True
    now = next(one.week for one in store.commits if one.ref == line[-1])
    chain = _chain(refs, store.generations)
    left = [one for one in chain if one.number > ref.generation and ref not in one.ancestors]
    return any(now > one.week and sum(r.generation >= one.number for r in line) >= 2 for one in left)


def line_of(commits: frozenset[Ref], record: Generation) -> tuple[Ref, ...]:
    """`catalog._line`: the lineage as the code reads it, from the list of ancestors."""
    own = sorted(ref for ref in commits if ref.generation == record.number)
    return (*(ref for ref in record.ancestors if ref in commits), *own)


def _chain(commits: frozenset[Ref], generations: frozenset[Generation]) -> list[Generation]:
    """The newest generation that has a commit, its parent's, and so on."""
    by_number = {one.number: one for one in generations}
    at = max((ref.generation for ref in commits), default=0)
    chain = []
    while at in by_number:
        chain.append(by_number[at])
        parent = by_number[at].parent
        at = parent.generation if parent else 0
    return chain


def _chain_line(refs: frozenset[Ref], generations: frozenset[Generation]) -> list[Ref]:
    """The lineage as the rule words it, from parent to parent: it must come to the same."""
    line: list[Ref] = []
    upto: Ref | None = None
    for one in _chain(refs, generations):
        line += [ref for ref in refs if ref.generation == one.number and (upto is None or ref.step <= upto.step)]
        upto = one.parent
    return sorted(line)


def _left_knowingly(ref: Ref, commits: frozenset[Ref], generations: frozenset[Generation]) -> bool:
    chain = _chain(commits, generations)
    return any(one.number > ref.generation and ref in one.seen and ref not in one.ancestors for one in chain)


def _whole(store: RunStore) -> set[Ref]:
    return {one.ref for one in store.commits if one.attempt in store.manifests and one.attempt in store.data}


# -------------------------------------------------------------------------------------------------------- for people


def show(what: Any) -> str:
    """An operation or an answer, short."""
    if isinstance(what, Ref):
        return f"step {what.step} of g{what.generation}"
    if isinstance(what, Attempt):
        return f"attempt {what.number} of {what.by} at {show(what.ref)}"
    if isinstance(what, Commit):
        return f"commit of {show(what.attempt)}"
    if isinstance(what, Generation):
        return f"g{what.number} by {what.by} after {show(what.parent)}"
    if isinstance(what, Pin):
        return f"pin of {show(what.ref)}"
    if isinstance(what, tuple):
        return " ".join(show(one) for one in what)
    if isinstance(what, frozenset):
        return "{" + ", ".join(sorted(show(one) for one in what)) + "}"
    return str(what)
