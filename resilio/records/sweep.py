"""The deed of deleting: checkpoints that have no reason to live, and what crashes left behind.

A checkpoint dies in the order commit record, manifest, the rest: whatever moment a crash picks, what is left is either
a checkpoint or visibly none. Every deletion is of literal keys that were listed under a name of ours.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import dataclass, field

from .. import failpoints
from ..clock import Clock, SystemClock
from ..errors import ConfigError, StorageError
from ..storage.base import Incomplete, Storage
from ..types import CheckpointRef
from . import keys
from .catalog import RecordCache, list_generations
from .fates import OFF_LINEAGE_S, Claims, Fate, Keep, Looked, look
from .holds import Holds

__all__ = ["Keep", "SweepReport", "sweep"]


@dataclass
class SweepReport:
    """What a sweep did.

    Attributes:
        deleted: checkpoints that are no more -> why; from the deletion of their record on, even if the rest failed.
        kept: checkpoints that stay -> why; those off the lineage included.
        attempts: leftover attempts that were removed.
        records: commit records without an attempt that were removed.
        leases: leases that had run out long ago and were removed.
        failed: what could not be deleted or read, and why. The next sweep tries again.
        unfinished: attempts still there that are garbage, unless their record is there as well: to be passed as
            `failed` to the next sweep.
        refused: why nothing of the lineage was deleted although no policy kept anything; None if that is not so.
        idle: why nothing at all was deleted; None if that is not so.
        fenced_by: a newer generation that appeared; the sweep stopped there.
    """

    deleted: dict[CheckpointRef, str] = field(default_factory=dict)
    kept: dict[CheckpointRef, str] = field(default_factory=dict)
    attempts: list[str] = field(default_factory=list)
    records: list[CheckpointRef] = field(default_factory=list)
    leases: list[str] = field(default_factory=list)
    failed: list[str] = field(default_factory=list)
    unfinished: list[str] = field(default_factory=list)
    refused: str | None = None
    idle: str | None = None
    fenced_by: int | None = None


def sweep(
    storage: Storage,
    keep: Keep,
    *,
    claims: Claims | None = None,
    generation: int,
    failed: Collection[str] = (),
    begun: Collection[str] | None = None,
    cache: RecordCache | None = None,
    clock: Clock | None = None,
    abandoned_after_s: float = OFF_LINEAGE_S,
) -> SweepReport:
    """Delete checkpoints without a reason to live, and leftovers.

    Of the lineage stays, whatever `keep` says: the newest, the newest that is not quarantined, and the newest that is
    not unhealthy either, as far as known; all of it, if `keep` says nothing of any. Off the lineage, what was left less
    than `abandoned_after_s` ago, or for a branch of fewer than two such checkpoints. And always what a pin or an
    unexpired lease names, and names that are not ours. An attempt without a record is a leftover if its generation is
    older, or if it is in `failed`, or bears our number without being ours; another one of our own may be in flight, and
    those of a newer generation are not ours.

    Ranks: rank 0.

    Args:
        storage: the run's.
        keep: the pure decision about the lineage. Only what policies say: a reason that is always given (such as the
            one for the newest) would hide that they say nothing.
        claims: what somebody besides the policy keeps, on the lineage or off it; if it raises, nothing is deleted, and
            `failed` says why.
        generation: the caller's own; it must be the newest and have an acknowledged commit, else nothing is done.
        failed: attempts of the caller that failed before their commit was sent.
        begun: all attempts that the caller began in this generation. Others that bear its number are those of a manager
            that died, or will be fenced, before it could take the number: leftovers. None: there are none such.
        cache: commit records read before.
        clock: judges leases where the store does not tell times.
        abandoned_after_s: how long a checkpoint lives after the lineage left it, by the store's clock.

    Raises:
        StorageError: the store could not be looked at; nothing was deleted. Failed deletions are reported, not raised.
        IntegrityError, FormatError: the generation record is missing or not readable; nothing was deleted.
    """
    clock = clock or SystemClock()
    looked = look(
        storage,
        keep,
        claims=claims,
        generation=generation,
        failed=failed,
        begun=begun,
        cache=cache,
        clock=clock,
        abandoned_after_s=abandoned_after_s,
    )
    report = SweepReport(failed=looked.failed, idle=looked.idle)
    if looked.catalog.newest_generation > generation:
        report.fenced_by = looked.catalog.newest_generation
    if not looked.idle:
        _Sweep(storage, generation, looked, clock, report).run()
    there = looked.folders.keys() | looked.dangling.keys()
    report.unfinished += sorted(there & set(failed) - set(report.attempts))
    return report


class _Fenced(Exception):
    pass


@dataclass
class _Sweep:
    storage: Storage
    generation: int
    looked: Looked
    clock: Clock
    report: SweepReport

    def run(self) -> None:
        self.report.refused = self.looked.refused
        self.report.kept = {
            fate.ref: fate.why for fate in self.looked.fates if fate.kind == "checkpoint" and not fate.goes
        }
        failpoints.hit("sweep.begin")
        deeds = {"checkpoint": self._delete_checkpoint, "record": self._delete_record, "attempt": self._delete_attempt}
        try:
            for fate in self.looked.fates:
                if fate.goes:
                    deeds[fate.kind](fate)
        except _Fenced:
            return
        if self._delete(self.looked.leases):
            self.report.leases = self.looked.leases
        self._abort(self.looked.litter)

    def _delete_checkpoint(self, fate: Fate) -> None:
        assert fate.attempt is not None
        holder = self._holder(fate.ref)
        if holder:
            self.report.kept[fate.ref] = holder
            return
        if not self._delete([keys.commit_key(fate.ref)]):
            # It may be gone all the same, where making that durable was what failed. Then this is garbage from now on.
            self.report.unfinished.append(fate.attempt)
            return
        self.report.deleted[fate.ref] = fate.why
        failpoints.hit("sweep.record_deleted")
        # A reader or a pin may have come between: then the data must stay, for a later sweep to remove.
        if self._holder(fate.ref) or not self._delete_folder(fate.attempt):
            self.report.unfinished.append(fate.attempt)

    def _delete_record(self, fate: Fate) -> None:
        assert fate.attempt is not None
        manifest = keys.attempt_key(fate.attempt, keys.MANIFEST)
        try:
            # Looked for again: it may have been committed whole while we listed.
            there = self.storage.exists(manifest)
        except StorageError as error:
            self._failed(manifest, error)
            return
        if not there and not self._holder(fate.ref) and self._delete([keys.commit_key(fate.ref)]):
            self.report.records.append(fate.ref)

    def _delete_attempt(self, fate: Fate) -> None:
        assert fate.attempt is not None
        if not self._holder(fate.ref) and self._delete_folder(fate.attempt):
            self.report.attempts.append(fate.attempt)

    def _delete_folder(self, name: str) -> bool:
        manifest = keys.attempt_key(name, keys.MANIFEST)
        if not self._delete([manifest]):
            return False
        failpoints.hit("sweep.manifest_deleted")
        done = self._delete([key for key in self.looked.folders.get(name, ()) if key != manifest])
        done = self._abort(self.looked.dangling.get(name, ())) and done
        if done:
            failpoints.hit("sweep.data_deleted")
        return done

    def _abort(self, items: Iterable[Incomplete]) -> bool:
        done = True
        for item in items:
            try:
                self.storage.abort(item)
            except (StorageError, OSError) as error:
                self._failed(item.key, error)
                done = False
        return done

    def _delete(self, which: list[str]) -> bool:
        if not which:
            return True
        try:
            self.storage.delete(which)
        except (StorageError, ConfigError, OSError) as error:
            self._failed(which[0] if len(which) == 1 else f"{which[0]} and {len(which) - 1} more", error)
            return False
        return True

    def _holder(self, ref: CheckpointRef) -> str | None:
        """Look: stop if fenced; say which pin or lease holds `ref`. If that cannot be seen, it is held."""
        try:
            newest = max(list_generations(self.storage), default=0)
            if newest > self.generation:
                self.report.fenced_by = newest
                raise _Fenced
            return Holds(self.storage, self.looked.catalog.now_s, self.clock).of(ref)
        except StorageError as error:
            self._failed(keys.commit_key(ref), error)
            return "cannot look"

    def _failed(self, key: str, error: Exception) -> None:
        self.report.failed.append(f"{key}: {error}")
