"""What every process does with a run: discover, choose, hold. And those that do nothing else: readers and pinners.

Each method names the function of `resilio` it stands for, and keeps its order of operations. Left out is what no other
process can see: bytes, digests, the ranks below rank 0. A record is listed with its content, since it never changes;
and a lease lasts as long as its process.
"""

from __future__ import annotations

from collections.abc import Generator, Hashable
from typing import Any, NamedTuple

from model.rules import Rules
from model.run_store import Attempt, Commit, Generation, Pin, Ref, RunStore, line_of, show

__all__ = ["Catalog", "NoCheckpointError", "Pinner", "Process", "Reader", "View", "broken_among", "broken_to"]

Operation = tuple[Any, ...]


class Catalog(NamedTuple):
    """`catalog.Catalog`."""

    commits: frozenset[Commit]
    generations: frozenset[Generation]
    lineage: tuple[Ref, ...]

    @property
    def refs(self) -> frozenset[Ref]:
        return frozenset(one.ref for one in self.commits)

    @property
    def newest(self) -> Ref | None:
        return self.lineage[-1] if self.lineage else None

    @property
    def newest_generation(self) -> int:
        return max((one.number for one in self.generations), default=0)

    def line_of(self, ref: Ref) -> tuple[Ref, ...]:
        if ref in self.lineage:
            return self.lineage[: self.lineage.index(ref) + 1]
        own = line_of(self.refs, next(one for one in self.generations if one.number == ref.generation))
        return tuple(one for one in own if one.generation < ref.generation or one.step <= ref.step)


class NoCheckpointError(Exception):
    pass


class Process:
    """What a manager and a reader have in common: looking, leasing, choosing."""

    kept: tuple[str, ...] = ("held", "leases", "leased")  # attributes that are state

    def __init__(self, name: str, rules: Rules) -> None:
        self.name = name
        self.rules = rules
        self.held: Attempt | None = None  # what must not be deleted now
        self.leases: tuple[tuple[Ref, str, int], ...] = ()
        self.leased = 0

    def run(self) -> Generator[Operation, Any, None]:
        raise NotImplementedError

    def state(self) -> Hashable:
        return tuple(getattr(self, name) for name in self.kept)

    def view(self) -> Hashable:
        return View(self.name, None, self.held, None)

    def discover(self) -> Generator[Operation, Any, Catalog]:
        """`catalog.discover`."""
        if "commits before generations" in self.rules:
            commits = yield ("list commits",)
            generations = yield ("list generations",)
        else:
            generations = yield ("list generations",)
            commits = yield ("list commits",)
        refs = frozenset(one.ref for one in commits)
        counting: Any = [one for one in generations if any(ref.generation == one.number for ref in refs)]
        if "counts from first commit" not in self.rules:
            counting = generations
        lineage = line_of(refs, max(counting)) if counting else ()
        if "lineage" not in self.rules:
            lineage = tuple(sorted(refs, key=lambda ref: (ref.step, ref.generation)))
        return Catalog(commits, generations, lineage)

    def lease(self, ref: Ref) -> Generator[Operation, Any, Attempt | None]:
        """`holds.Lease`: write it, then look. None if there is no checkpoint any more; then nothing is held."""
        self.leased += 1
        lease = (ref, self.name, self.leased)
        if "lease, then look" in self.rules:
            yield ("put lease", lease)
            found = yield from self.look_for(ref)
        else:
            found = yield from self.look_for(ref)
            yield ("put lease", lease)
        if found is None:
            yield ("delete lease", lease)
        else:
            self.leases, self.held = (*self.leases, lease), found
        return found

    def look_for(self, ref: Ref) -> Generator[Operation, Any, Attempt | None]:
        """`commits.find_commit_bytes` and `holds._find_manifest`."""
        attempt = yield ("get commit", ref)
        if attempt is None:
            pins = yield ("list pins",)
            attempt = next((pinned for of, pinned in sorted(pins) if of == ref), None)
        if attempt is None:
            return None
        there = yield ("stat manifest", attempt)
        return attempt if there else None

    def let_go(self) -> Generator[Operation, Any, None]:
        """`choosing.Picker.let_go`."""
        self.held = None
        yield from self.release()

    def release(self) -> Generator[Operation, Any, None]:
        """`holds.Lease.release`."""
        while self.leases:
            lease, self.leases = self.leases[0], self.leases[1:]
            yield ("delete lease", lease)

    def choose(self, which: Ref | str) -> Generator[Operation, Any, tuple[Catalog, Ref | None]]:
        """`choosing.Picker.next`: what there is, and the one chosen of it, leased; None if there is nothing at all."""
        newest = which == "newest"
        catalog = yield from self.discover()
        if newest and not catalog.commits:
            return catalog, None
        tried: tuple[Ref, ...] = ()
        while ref := self.candidate(catalog, which, tried):
            tried = (*tried, ref)
            attempt = yield from self.lease(ref)
            if attempt is not None:
                whole = yield ("stat data", attempt)
                if whole:
                    if newest:
                        yield ("chose", ref, catalog.commits)
                    return catalog, ref
                del whole
                yield from self.let_go()
            del attempt
            if newest and "look anew when one is gone" in self.rules:
                now = yield from self.discover()
                if ref not in now.refs:
                    catalog = now
                del now
        raise NoCheckpointError

    def candidate(self, catalog: Catalog, which: Ref | str, tried: tuple[Ref, ...]) -> Ref | None:
        """`choosing.candidates`."""
        refs: Any = reversed(catalog.lineage) if which == "newest" else (which,)
        return next((ref for ref in refs if ref not in tried), None)


class Reader(Process):
    """`readonly.restore`: fences nobody."""

    def __init__(self, name: str, rules: Rules, which: Ref | str) -> None:
        super().__init__(name, rules)
        self.which = which

    def run(self) -> Generator[Operation, Any, None]:
        try:
            yield from self.choose(self.which)
        except NoCheckpointError:
            return
        yield from self.let_go()


class Pinner(Process):
    """`holds.pin`."""

    def __init__(self, name: str, rules: Rules, ref: Ref) -> None:
        super().__init__(name, rules)
        self.ref = ref

    def run(self) -> Generator[Operation, Any, None]:
        leased = "pin under a lease" in self.rules
        attempt = yield from (self.lease(self.ref) if leased else self.look_for(self.ref))
        if attempt is None:
            return
        answered = yield ("put pin", Pin(self.ref, self.name, attempt))
        if answered or "an unanswered pin keeps its lease" not in self.rules:
            yield from self.let_go()


class View(NamedTuple):
    """What of a process promises are about: the generation it writes as, what it holds, what went wrong for it."""

    name: str
    owns: int | None
    held: Attempt | None
    broken: str | None


def broken_to(store: RunStore, view: View) -> str | None:
    """Which promise to a process is broken."""
    held = view.held
    if held is not None and (held not in store.manifests or held not in store.data):
        return f"what is held stays whole: {view.name} holds {show(held.ref)}"
    return view.broken


def broken_among(views: list[View]) -> str | None:
    """Which promise is broken between processes."""
    owners = [view.owns for view in views if view.owns is not None]
    return "a generation has one owner" if len(set(owners)) < len(owners) else None
