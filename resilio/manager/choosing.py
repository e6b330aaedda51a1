"""Which checkpoint a restore begins with, and which one it goes on to if that is damaged."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator

from ..clock import Clock
from ..engine import ForeignCheckpoint
from ..errors import (
    AuthExpiredError,
    ConfigError,
    FormatError,
    IntegrityError,
    NewerFormatError,
    NoCheckpointError,
    NotFoundError,
    OutOfSpaceError,
    ResilioError,
    StorageError,
    ThrottledError,
    TransientError,
    UnknownTypeError,
)
from ..records.catalog import Catalog, discover
from ..records.holds import Lease, lease
from ..records.keys import METADATA, attempt_key
from ..records.manifest import LoadedManifest, load_manifest
from ..records.problems import joined, problems_of
from ..records.quarantine import listed, why
from ..records.run import refuse_newer
from ..records.unfinished import unfinished
from ..storage.base import ObjectInfo, Storage
from ..types import CheckpointInfo, CheckpointRef, Damage

__all__ = [
    "Picked",
    "Picker",
    "Source",
    "Which",
    "candidates",
    "is_damage",
    "is_finding",
    "nothing_left",
    "passed_over",
]

_log = logging.getLogger("resilio")

Which = int | str | CheckpointRef
Source = LoadedManifest | ForeignCheckpoint
Picked = tuple[CheckpointInfo, Source]

_BY_ITSELF = ("newest", "healthy")  # choices that go on to the next one where one is damaged
_LISTED = 20  # in an error
_LISTINGS = 5  # of one restore: a job that deletes faster than it is looked at must not keep a reader for ever

# Faults of the way to the store, not of what lies there: the newest may well be whole, and an older one in its place
# would lose work that is not lost. `AccessDeniedError` is none of them: one unreadable object is one damaged
# checkpoint.
_PASSING = (TransientError, ThrottledError, AuthExpiredError, OutOfSpaceError)


def candidates(catalog: Catalog, which: Which) -> Iterator[CheckpointRef]:
    """The checkpoints that `which` may mean, best first.

    Args:
        catalog: what the run holds.
        which: ``"newest"``: the lineage from the newest back. ``"healthy"``: those of it that are known to be. A step:
            that one alone, on the lineage if it has it, else on the newest abandoned branch that has: it was asked for
            by number, and is never overridden. A ref: that one.

    Raises:
        NoCheckpointError: no checkpoint of that step, or none on the lineage though there are others.
        ConfigError: `which` is none of these.
    """
    if which in _BY_ITSELF:
        if catalog.newest is None and catalog.off_lineage:
            listed = ", ".join(str(ref) for ref in catalog.off_lineage[-_LISTED:])
            raise NoCheckpointError(
                f"{catalog.storage.url} has checkpoints, but none on the lineage: {listed}. Restore one of them by its "
                f"step, or begin anew with fresh=True.",
                url=catalog.storage.url,
            )
        return reversed(catalog.lineage) if which == "newest" else _healthy(catalog)
    if not isinstance(which, int | CheckpointRef) or isinstance(which, bool):
        raise ConfigError(
            f"restore(which={which!r}): which is 'newest', 'healthy', the number of a step, or the ref of a checkpoint",
            which=which,
        )
    try:
        found = catalog.find(which)
        others = [str(ref) for ref in catalog.commits if ref.step == found.step and ref != found]
        if others and isinstance(which, int):
            _log.info("several checkpoints of one step chosen=%r others=%s", str(found), others)
        return iter([found])
    except NoCheckpointError as error:
        step = which if isinstance(which, int) else which.step
        begun = [one for one in unfinished(catalog, None) if one.facts["ref"].step == step]
        if not begun:
            raise
        raise NoCheckpointError(f"{error}. {begun[0]}", **error.facts) from None


def _healthy(catalog: Catalog) -> Iterator[CheckpointRef]:
    """Those of the lineage that are known to be healthy, the newest first, by their commit records alone.

    Raises, at its end:
        NoCheckpointError: there was none, though there are others; lists them.
    """
    found, others = False, []
    for ref in reversed(catalog.lineage):
        try:
            count = catalog.read(ref).non_finite
        except ResilioError as error:
            if not is_damage(error):
                raise
            others.append(f"{ref}: its commit record cannot be read")
            yield ref  # whoever opens it hears why, and passes it over
            continue
        if count == 0:
            found = True
            yield ref
        else:
            others.append(f"{ref}: {'its values were never counted' if count is None else f'{count:,} are not finite'}")
    if others and not found:
        more = [f"and {len(others) - _LISTED} more"] if len(others) > _LISTED else []
        listed = "".join(f"\n  {one}" for one in [*others[:_LISTED], *more])
        raise NoCheckpointError(
            f"{catalog.storage.url}: none of the {len(others)} checkpoint(s) of the lineage is known to be healthy; "
            f"live state is as it was.{listed}\n"
            "Restore one of them by its step, or begin anew beside them with fresh=True.",
            url=catalog.storage.url,
        )


def open_checkpoint(catalog: Catalog, ref: CheckpointRef, clock: Clock) -> tuple[CheckpointInfo, LoadedManifest, Lease]:
    """Everything of a checkpoint but its data, checked: records, manifest, presence and sizes of all objects.

    The lease keeps the sweep of a running job away from it until it is released.

    Raises:
        ResilioError: it cannot be restored, and nothing is held; see `is_damage`.
    """
    storage = catalog.storage
    catalog.line_of(ref)  # what the next save needs to know: must not fail once live state is another
    try:
        hold = lease(storage, ref, clock, owner="restore")
    except NoCheckpointError as error:  # it is listed, so this is a commit record without its attempt
        raise IntegrityError(
            f"{storage.url}: {ref} is listed, but its manifest.json is missing, or it was just deleted",
            where=str(ref),
            missing=True,
        ) from error
    try:
        manifest = load_manifest(storage, hold.commit)
        problems: list[ResilioError] = []
        for look in (
            lambda: manifest.check_objects(storage),
            # Not needed here; but what damaged this one may have damaged others, and readers by plain DCP need it.
            lambda: manifest.read_object(storage, attempt_key(manifest.attempt, METADATA)),
        ):
            try:
                look()
            except IntegrityError as error:
                problems.append(error)
        if problems:
            raise joined(problems, f"{storage.url}: {manifest.attempt}")
        return catalog.info_of(ref, hold.commit), manifest, hold
    except BaseException:
        hold.release()
        raise


class Picker:
    """The choice of a restore: one checkpoint after the other, the best first, each leased while it is tried.

    Where the newest is asked for, those in quarantine are passed over unread.

    Every rank has one; rank 0's is asked, so that all ranks take the same.

    Args:
        storage: the run's.
        which: see `candidates`.
        clock: of the lease.
        foreign: what to take where there is no run, if anything.
    """

    def __init__(
        self, storage: Storage, which: Which, clock: Clock, foreign: Callable[[], Picked | None] | None = None
    ) -> None:
        self.catalog: Catalog | None = None  # what the run held when the choice was made
        self.hold: Lease | None = None  # on the one picked last
        self.findings: list[Damage] = []  # on rank 0: what of those passed over is a finding about their content
        self._storage = storage
        self.which = which
        self._clock = clock
        self._foreign = foreign
        self._refs: Iterator[CheckpointRef] = iter(())
        self._tried: list[CheckpointRef] = []
        self._quarantined: dict[CheckpointRef, list[ObjectInfo]] = {}
        self._listings = 0

    def next(self) -> tuple[Picked | None, list[Damage]]:
        """The next one whose records are whole, and those before it whose records are not, or are in quarantine.

        One that a running job's sweep has deleted since it was listed is not damaged: there is a newer one then.

        Ranks: rank 0.
        """
        self.let_go()
        if self.catalog is None:
            catalog = discover(self._storage)
            if self._foreign and not catalog.commits:
                found = self._foreign()
                if found is not None:
                    self.catalog = catalog
                    return found, []
            if catalog.commits:
                refuse_newer(self._storage)
            self._choose_from(catalog)
        elif self._tried:
            self._look_anew(self._tried[-1])
        bad: list[Damage] = []
        while (ref := next(self._refs, None)) is not None:
            assert self.catalog is not None
            self._tried.append(ref)
            reasons = self._reasons(ref)
            if reasons is not None and self.which in _BY_ITSELF:
                bad.append(Damage(str(ref), f"in quarantine: {reasons}", {"ref": ref, "quarantined": reasons}))
                continue
            if reasons is not None:
                _log.warning("restoring what is in quarantine, as asked for: %s because %s", ref, reasons)
            try:
                info, manifest, self.hold = open_checkpoint(self.catalog, ref, self._clock)
                return (info, manifest), bad
            except ResilioError as error:
                if not self.may_pass_over(error):
                    raise
                if not self._look_anew(ref):
                    bad.append(passed_over(ref, error))
                    if is_finding(error):
                        self.findings.append(bad[-1])
        return None, bad

    def found(self, damage: Damage, error: ResilioError) -> None:
        """The one picked last was read, and is `damage`.

        Ranks: any; rank 0 keeps it, if the checkpoint was held all the while.
        """
        if self.hold is not None and self.hold.sure and is_finding(error):
            self.findings.append(
                Damage(damage.where, damage.what, {**damage.facts, "attempt": self.hold.commit.attempt})
            )

    def _reasons(self, ref: CheckpointRef) -> str | None:
        """Why `ref` is in quarantine; None if it is not."""
        return why(self._storage, ref, self._quarantined[ref]) if ref in self._quarantined else None

    def _choose_from(self, catalog: Catalog) -> None:
        self._listings += 1
        self.catalog = catalog
        self._quarantined = listed(self._storage) if catalog.commits else {}
        self._refs = (ref for ref in candidates(catalog, self.which) if ref not in self._tried)

    def _look_anew(self, ref: CheckpointRef) -> bool:
        """Whether `ref` has gone since it was listed. If so, the choice begins anew with what is there now."""
        if self._listings >= _LISTINGS:
            return False
        catalog = discover(self._storage)
        if ref in catalog.commits:
            return False
        self._choose_from(catalog)
        return True

    def unfinished(self, chosen: CheckpointRef | None) -> list[Damage]:
        """Saves begun after `chosen` (None: nothing was found) that never became a checkpoint.

        Not told where one was asked for by its step; and a listing that fails is no reason to fail a restore.

        Ranks: rank 0.
        """
        if self.which not in _BY_ITSELF or self.catalog is None:
            return []
        try:
            return unfinished(self.catalog, chosen)
        except ResilioError as error:
            _log.warning("cannot tell which saves did not end url=%s error=%s", self._storage.url, error)
            return []

    def may_pass_over(self, error: ResilioError) -> bool:
        """Whether another one may be taken after `error`: none was asked for by its step, and this one is damaged."""
        return self.which in _BY_ITSELF and is_damage(error)

    def let_go(self) -> None:
        """Hold nothing any more. Idempotent, never fails."""
        if self.hold is not None:
            self.hold.release()
            self.hold = None


def is_damage(error: BaseException) -> bool:
    """Whether `error` says that a checkpoint is damaged, so that an older one may take its place.

    Not so a fault of the way to the store, a record of a newer resilio, an unknown type, or state that does not fit.
    """
    if isinstance(error, (*_PASSING, NewerFormatError, UnknownTypeError)):
        return False
    return isinstance(error, (IntegrityError, FormatError, StorageError))


def is_finding(error: ResilioError) -> bool:
    """Whether damage is of the checkpoint itself, so that it would be found again elsewhere, and can be written down.

    Not so where this host may not read it, where two ranks have read different things, or where there is what this
    resilio does not know: a newer one may.
    """
    if any(one.facts.get("newer") for one in problems_of(error)):
        return False
    content = isinstance(error, IntegrityError | FormatError | NotFoundError)
    return content and is_damage(error) and not error.facts.get("ranks_differ")


def passed_over(ref: CheckpointRef, error: ResilioError) -> Damage:
    """A line of the report: which checkpoint was not taken, and why."""
    return Damage(str(ref), f"{type(error).__name__}: {error}", {"ref": ref, **error.facts})


def nothing_left(url: str, passed: list[Damage], *, healthy: bool = False) -> IntegrityError:
    """What to raise when no checkpoint of the lineage can be restored: never a reason for a fresh start."""
    lines = "".join(f"\n  {damage}" for damage in passed)
    held = [damage for damage in passed if "quarantined" in damage.facts]
    way_out = "restore an abandoned one by its step, or begin anew beside them with fresh=True."
    if held:
        step = held[0].facts["ref"].step
        way_out = f"release what is in quarantine if it is good (`resilio release {url} {step}`), {way_out}"
    which = "healthy checkpoint(s)" if healthy else "checkpoint(s)"
    return IntegrityError(
        f"{url}: none of the {len(passed)} {which} of the lineage can be restored; live state is as it was."
        f"{lines}\nMend the store, {way_out}",
        url=url,
        passed_over=passed,
    )
