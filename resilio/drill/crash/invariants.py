"""What must hold in every state that a crash can leave, judged by the code that restores, verifies and sweeps."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Set
from dataclasses import dataclass
from typing import NamedTuple

from ...clock import FakeClock
from ...errors import FormatError, ResilioError
from ...manager.choosing import open_checkpoint
from ...policies import keep_last
from ...records import keys
from ...records.catalog import Catalog, discover
from ...records.commits import list_pins
from ...records.fates import explain
from ...records.verify import verify_checkpoint
from ...storage.base import Storage
from ...types import CheckpointRef
from .job import Job
from .log import Known
from .states import ModelStorage

__all__ = ["INVARIANTS", "Broken", "Judge"]

INVARIANTS: dict[str, str] = {
    "acknowledged": "what was reported as saved is listed and can be restored, until it may be deleted",
    "chosen": "a restore takes the last save that was reported, or the one being committed; it never begins anew",
    "whole": "a commit record stands over a whole checkpoint, or none of it is taken for one: never over a torn one",
    "order": "a commit record is there only while the manifest is: it is written last and deleted first",
    "bytes": "every checkpoint holds the bytes that its ranks wrote",
    "pinned": "what was pinned can be restored, even if its record was being deleted",
    "known-state": "everything that is there is a checkpoint, or a leftover that a sweep knows by name",
    "repair": "the next job restores, saves and sweeps, and after that nothing is left that nobody needs",
    "written-once": "an object once written is never changed",
    "answers": "the store shows what was written, all of it, as soon as it said so",
}

_LATER_S = 30 * 86_400.0  # after this leases have run out and branches are forgotten
_KEEP = 2


class Broken(NamedTuple):
    """An invariant that does not hold, and how that shows."""

    invariant: str
    what: str


class Judge:
    """Judges the states of one scenario. What it found of a checkpoint counts for all states that hold the same of it.

    Args:
        truth: folder of an attempt -> name -> bytes that a rank meant to write.
    """

    def __init__(self, truth: Mapping[str, Mapping[str, bytes]]) -> None:
        self._truth = truth
        self._memo: dict[object, list[Broken]] = {}

    def __call__(self, storage: Storage, known: Known, clock: FakeClock) -> list[Broken]:
        """What is wrong with a state. Repairs it, as a next job would: the storage is another one afterwards.

        Args:
            storage: holds the state, and nothing else. Of a `ModelStorage` the time is moved, so that leases run out.
            known: what had been promised.
            clock: the storage's, if it is a `ModelStorage`.
        """
        try:
            return [*_Look(storage, known, clock, self._truth, self._memo).run()]
        except (ResilioError, OSError) as error:
            return [Broken("known-state", f"{type(error).__name__}: {error}")]


@dataclass
class _Look:
    storage: Storage
    known: Known
    clock: FakeClock
    truth: Mapping[str, Mapping[str, bytes]]
    memo: dict[object, list[Broken]]

    def run(self) -> Iterator[Broken]:
        catalog = discover(self.storage)
        refs = [*catalog.commits, *catalog.pinned()]
        for ref in refs:
            yield from self._whole(catalog, ref)
        promised = dict.fromkeys(self.known.acknowledged - self.known.doomed, "acknowledged")
        promised |= dict.fromkeys(self.known.pinned, "pinned")
        for ref in sorted(promised):
            if ref in refs:
                yield from self._restorable(catalog, ref, promised[ref])
            else:
                yield Broken(promised[ref], f"{ref} is gone")
        for fate in explain(self.storage, lambda infos: {}).checkpoints:
            if fate.kind == "damaged":
                yield Broken("known-state", f"{fate.ref}: {fate.why}")
        job = Job(self.storage, keep_last(_KEEP), self.clock)
        try:
            began = job.restore()
        except ResilioError as error:
            yield Broken("chosen", f"restore fails: {error}")
            return
        if began not in {self.known.newest, *self.known.flying}:
            yield Broken("chosen", f"{began or 'nothing'} is chosen; reported last was {self.known.newest}")
        yield from self._repair(job, began)

    def _whole(self, catalog: Catalog, ref: CheckpointRef) -> Iterator[Broken]:
        try:
            attempt = catalog.read(ref).attempt
        except FormatError as error:
            yield Broken("whole", f"{ref}: {error}")
            return
        if not self.storage.exists(keys.attempt_key(attempt, keys.MANIFEST)):
            yield Broken("order", f"{ref} has a commit record and no manifest")
            return
        pins = () if ref in catalog.commits else (keys.PINS,)  # they stand in for a record
        yield from self._once("whole", ref, attempt, lambda: self._bytes(ref, attempt), *pins)

    def _bytes(self, ref: CheckpointRef, attempt: str) -> Iterator[Broken]:
        damage = verify_checkpoint(self.storage, ref)
        if damage:
            yield Broken("whole", f"{ref}: {damage[0]}")
            return
        for name, data in self.truth.get(attempt, {}).items():
            if self.storage.get(keys.attempt_key(attempt, name)) != data:
                yield Broken("bytes", f"{ref}: {name} is whole, and not what was saved")

    def _restorable(self, catalog: Catalog, ref: CheckpointRef, invariant: str) -> Iterator[Broken]:
        def opened() -> Iterator[Broken]:
            try:
                open_checkpoint(catalog, ref, self.clock)[2].release()
            except ResilioError as error:
                yield Broken(invariant, f"{ref} cannot be restored: {error}")

        try:
            attempt = catalog.read(ref).attempt
        except FormatError as error:
            yield Broken(invariant, f"{ref} cannot be restored: {error}")
            return
        yield from self._once(invariant, ref, attempt, opened, keys.GENERATIONS, keys.PINS)

    def _once(
        self, what: str, ref: CheckpointRef, attempt: str, look: Callable[[], Iterator[Broken]], *more: str
    ) -> list[Broken]:
        """`look`, or what it came to in another state in which all that it can depend on was the same."""
        if not isinstance(self.storage, ModelStorage):
            return list(look())
        parts = f"{attempt}/", keys.commit_key(ref), *more
        key = what, ref, frozenset(self.storage.content(parts))
        if key not in self.memo:
            self.memo[key] = list(look())
        return self.memo[key]

    def _repair(self, job: Job, began: CheckpointRef | None) -> Iterator[Broken]:
        """A next job; where something is still held by then, and time can pass, also when leases have run out."""
        try:
            saved = {job.save((began.step if began else 0) + 1)}
            needed = {*saved, *self.known.pinned, *([began] if began else [])}
            if isinstance(self.storage, ModelStorage) and [*self._litter(needed)]:
                self.clock.advance(_LATER_S)
                saved.add(job.save(max(saved).step + 1))
                yield from self._litter(saved | self.known.pinned)
        except (ResilioError, OSError) as error:
            yield Broken("repair", f"the next job ends with {type(error).__name__}: {error}")
            return
        catalog = discover(self.storage)
        for ref in self.known.pinned:
            yield from self._restorable(catalog, ref, "pinned")
        for ref in [*catalog.commits, *catalog.pinned()]:
            for _, what in self._whole(catalog, ref) if ref not in saved else self._opens(catalog, ref):
                yield Broken("repair", f"after the next job's sweep, {what}")
        for fate in job.committer.explain().leftovers:
            if "leased" not in fate.reasons:
                yield Broken("repair", f"{fate.attempt or fate.ref} is left behind: {fate.why}")

    def _opens(self, catalog: Catalog, ref: CheckpointRef) -> Iterator[Broken]:
        try:
            open_checkpoint(catalog, ref, self.clock)[2].release()
        except ResilioError as error:
            yield Broken("repair", str(error))

    def _litter(self, needed: Set[CheckpointRef]) -> Iterator[Broken]:
        pinned = {one.ref for one in list_pins(self.storage)}  # granted, or about to be
        for info in self.storage.list(""):
            folder = info.key.partition("/")[0]
            ref = keys.parse_attempt(folder) or keys.parse_commit(info.key) or keys.parse_hold(info.key)
            if info.key.startswith(keys.LEASES) or (ref is not None and ref not in needed | pinned):
                yield Broken("repair", f"{info.key} is left behind")
        for item in self.storage.incomplete(""):
            yield Broken("repair", f"the unfinished upload of {item.key} is left behind")
