"""The deed of deleting: checkpoints that have no reason to live, and what crashes left behind.

A checkpoint dies in the order commit record, manifest, the rest: whatever moment a crash picks, what is left is either
a checkpoint or visibly none. Every deletion is of literal keys that were listed under a name of ours.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field

from .. import failpoints
from ..errors import ConfigError, FormatError, NotFoundError, StorageError
from ..storage.base import Incomplete, Storage
from ..types import CheckpointInfo, CheckpointRef
from . import keys
from .catalog import Catalog, RecordCache, discover, list_generations

__all__ = ["Keep", "SweepReport", "sweep"]

# The checkpoints of the lineage, oldest to newest -> those with a reason to live, and the reasons.
# As `policies.decide(...).kept` says it.
Keep = Callable[[list[CheckpointInfo]], Mapping[CheckpointRef, str]]


@dataclass
class SweepReport:
    """What a sweep did.

    Attributes:
        deleted: checkpoints that are no more; from the deletion of their record on, even if the rest failed.
        kept: checkpoints of the lineage that stay -> why.
        attempts: leftover attempts that were removed.
        records: commit records without an attempt that were removed.
        failed: what could not be deleted or read, and why. The next sweep tries again.
        unfinished: attempts whose deletion was begun and failed: garbage, to be passed as `failed` to the next sweep.
        fenced_by: a newer generation that appeared; the sweep stopped there.
    """

    deleted: list[CheckpointRef] = field(default_factory=list)
    kept: dict[CheckpointRef, str] = field(default_factory=dict)
    attempts: list[str] = field(default_factory=list)
    records: list[CheckpointRef] = field(default_factory=list)
    failed: list[str] = field(default_factory=list)
    unfinished: list[str] = field(default_factory=list)
    fenced_by: int | None = None


def sweep(
    storage: Storage,
    keep: Keep,
    *,
    generation: int,
    failed: Collection[str] = (),
    begun: Collection[str] | None = None,
    cache: RecordCache | None = None,
) -> SweepReport:
    """Delete checkpoints of the lineage without a reason to live, and leftovers.

    Stays, whatever `keep` says: the newest of the lineage and the newest that is not quarantined; what a pin or lease
    names; what is off the lineage; names that are not ours. An attempt without a record is a leftover if its generation
    is older, or if it is in `failed`, or bears our number without being ours; another one of our own may be in flight,
    and those of a newer generation are not ours.

    Ranks: rank 0.

    Args:
        storage: the run's.
        keep: the pure decision.
        generation: the caller's own; it must be the newest and have an acknowledged commit, else nothing is done.
        failed: attempts of the caller that failed before their commit was sent.
        begun: all attempts that the caller began in this generation. Others that bear its number are those of a manager
            that died, or will be fenced, before it could take the number: leftovers. None: there are none such.
        cache: commit records read before.

    Raises:
        StorageError: the store could not be listed. Failed deletions are reported, not raised.
        IntegrityError, FormatError: the generation record is missing or not readable; nothing was deleted.
    """
    return _Sweep(storage, generation, SweepReport(), begun).run(keep, failed, cache)


class _Fenced(Exception):
    pass


@dataclass
class _Sweep:
    storage: Storage
    generation: int
    report: SweepReport
    begun: Collection[str] | None
    folders: dict[str, list[str]] = field(default_factory=dict)  # attempt -> keys
    dangling: dict[str, list[Incomplete]] = field(default_factory=dict)  # attempt -> uploads never published

    def run(self, keep: Keep, failed: Collection[str], cache: RecordCache | None) -> SweepReport:
        # This order: an attempt listed now whose commit is not listed afterwards had none.
        self._list_attempts()
        catalog = discover(self.storage, cache)
        if catalog.newest_generation > self.generation:
            self.report.fenced_by = catalog.newest_generation
            return self.report
        if catalog.record is None or catalog.record.generation != self.generation:
            return self.report  # nothing committed yet: who we go on from is not settled
        infos, absent, unread = self._split(catalog)
        victims = self._victims(catalog, infos, keep)
        committed = {catalog.cache[ref].attempt for ref in catalog.commits if ref in catalog.cache}
        leftovers = [name for name in self._all_attempts() if self._is_leftover(name, committed, unread, failed)]
        failpoints.hit("sweep.begin")
        try:
            for info in victims:
                self._delete_checkpoint(info)
            for ref in absent:
                self._delete_record_alone(ref, catalog)
            for name in leftovers:
                self._delete_leftover(name)
        except _Fenced:
            pass
        return self.report

    def _list_attempts(self) -> None:
        for info in self.storage.list(keys.STEP_PREFIX):
            found = keys.split_attempt_key(info.key)
            if found:
                self.folders.setdefault(found[0], []).append(info.key)
        for item in self.storage.incomplete(keys.STEP_PREFIX):
            found = keys.split_attempt_key(item.key)
            if found:
                self.dangling.setdefault(found[0], []).append(item)

    def _all_attempts(self) -> list[str]:
        return sorted(self.folders.keys() | self.dangling.keys())

    def _split(self, catalog: Catalog) -> tuple[list[CheckpointInfo], list[CheckpointRef], set[CheckpointRef]]:
        """Whole checkpoints of the lineage, records whose attempt has no manifest, records that cannot be read."""
        infos: list[CheckpointInfo] = []
        absent: list[CheckpointRef] = []
        unread: set[CheckpointRef] = set()
        for ref in [*catalog.off_lineage, *catalog.lineage]:
            try:
                info = catalog.info(ref)
            except NotFoundError:
                continue
            except (FormatError, StorageError) as error:
                unread.add(ref)
                self._failed(keys.commit_key(ref), error)
                continue
            if keys.attempt_key(info.attempt, keys.MANIFEST) not in self.folders.get(info.attempt, ()):
                absent.append(ref)
            elif info.on_lineage:
                infos.append(info)
        return infos, absent, unread

    def _victims(self, catalog: Catalog, infos: list[CheckpointInfo], keep: Keep) -> list[CheckpointInfo]:
        quarantined = [info.key for info in self.storage.list(keys.QUARANTINE)]
        sound = [info for info in infos if not any(keys.holds(key, info.ref) for key in quarantined)]
        spared: dict[CheckpointRef, str] = {ref: why for ref, why in keep(infos).items() if why}
        for refs, why in (
            ([catalog.newest] if catalog.newest else [], "newest of the lineage"),
            ([info.ref for info in infos], "newest that is whole"),
            ([info.ref for info in sound], "newest that is not quarantined"),
        ):
            if refs:
                spared.setdefault(refs[-1], why)
        self.report.kept = {info.ref: spared[info.ref] for info in infos if info.ref in spared}
        return [info for info in infos if info.ref not in spared]

    def _is_leftover(self, name: str, committed: set[str], unread: set[CheckpointRef], failed: Collection[str]) -> bool:
        ref = keys.parse_attempt(name)
        if ref is None or name in committed or ref in unread:
            return False
        if ref.generation != self.generation:
            return ref.generation < self.generation
        return name in failed or (self.begun is not None and name not in self.begun)

    def _delete_checkpoint(self, info: CheckpointInfo) -> None:
        holder = self._holder(info.ref)
        if holder:
            self.report.kept[info.ref] = holder
            return
        if not self._delete([keys.commit_key(info.ref)]):
            return
        self.report.deleted.append(info.ref)
        failpoints.hit("sweep.record_deleted")
        if self._holder(info.ref):
            return  # a reader or a pin came between; it holds the record's bytes, and the data must stay
        if not self._delete_folder(info.attempt):
            self.report.unfinished.append(info.attempt)

    def _delete_record_alone(self, ref: CheckpointRef, catalog: Catalog) -> None:
        """A commit that arrived after its attempt had been collected."""
        manifest = keys.attempt_key(catalog.read(ref).attempt, keys.MANIFEST)
        try:
            # Looked for again: it may have been committed whole while we listed.
            there = self.storage.exists(manifest)
        except StorageError as error:
            self._failed(manifest, error)
            return
        if there or ref == catalog.newest or self._holder(ref):
            return
        if self._delete([keys.commit_key(ref)]):
            self.report.records.append(ref)

    def _delete_leftover(self, name: str) -> None:
        ref = keys.parse_attempt(name)
        if ref is None or self._holder(ref):
            return
        if self._delete_folder(name):
            self.report.attempts.append(name)

    def _delete_folder(self, name: str) -> bool:
        manifest = keys.attempt_key(name, keys.MANIFEST)
        if not self._delete([manifest]):
            return False
        failpoints.hit("sweep.manifest_deleted")
        done = self._delete([key for key in self.folders.get(name, ()) if key != manifest])
        for item in self.dangling.get(name, ()):
            try:
                self.storage.abort(item)
            except (StorageError, OSError) as error:
                self._failed(item.key, error)
                done = False
        if done:
            failpoints.hit("sweep.data_deleted")
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
            for folder, word in ((keys.PINS, "pinned"), (keys.LEASES, "leased")):
                if any(keys.holds(info.key, ref) for info in self.storage.list(folder)):
                    return word
        except StorageError as error:
            self._failed(keys.commit_key(ref), error)
            return "cannot look"
        return None

    def _failed(self, key: str, error: Exception) -> None:
        self.report.failed.append(f"{key}: {error}")
