"""What a sweep would delete, and why each of the others lives: the decision, which changes nothing.

`sweep` does what is decided here, and `explain` tells it, so the two cannot differ.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal

from ..clock import Clock, SystemClock
from ..errors import AccessDeniedError, FormatError, IntegrityError, NotFoundError, StorageError
from ..storage.base import Incomplete, Storage
from ..types import CheckpointInfo, CheckpointRef
from . import keys
from .abandoned import Abandonment
from .catalog import Catalog, RecordCache, discover, list_attempts
from .commits import find_commit
from .holds import Holds, pins
from .quarantine import asked_twice, listed
from .texts import clean

__all__ = ["OFF_LINEAGE_S", "Claims", "Explanation", "Fate", "Keep", "Looked", "explain", "look"]

OFF_LINEAGE_S = 7 * 86_400.0  # how long a checkpoint lives after the lineage left it
LITTER_S = 86_400.0  # somebody may be writing a younger one

# The checkpoints of the lineage, oldest to newest -> those that a policy has a reason to keep, and the reasons. As
# `policy.reasons(infos, now_s)` says it; what lives whatever policies say is added here.
Keep = Callable[[list[CheckpointInfo]], Mapping[CheckpointRef, str]]

# All checkpoints, off the lineage first -> those that somebody besides the policy keeps, such as plugins, and the
# reasons. If it raises, nothing is deleted, since what it would have kept is not known.
Claims = Callable[[list[CheckpointInfo]], Mapping[CheckpointRef, Sequence[str]]]

Kind = Literal["checkpoint", "damaged", "record", "attempt"]


@dataclass(frozen=True)
class Fate:
    """Whether one checkpoint, or what is left of one, goes at the next sweep, and why.

    Attributes:
        kind: ``checkpoint``; ``damaged``: its commit record cannot be read; ``record``: a commit record whose attempt
            is gone; ``attempt``: a folder without a commit record.
        ref: which checkpoint, or what it would have been.
        goes: whether it goes.
        reasons: why it goes, or each reason to live.
        on_lineage: whether it counts.
        info: what is known of it; checkpoints only.
        attempt: the folder, where known.
    """

    kind: Kind
    ref: CheckpointRef
    goes: bool
    reasons: tuple[str, ...]
    on_lineage: bool
    info: CheckpointInfo | None = None
    attempt: str | None = None

    @property
    def why(self) -> str:
        """The reasons as one text."""
        return "; ".join(self.reasons)


@dataclass(frozen=True)
class Explanation:
    """What the next sweep would do if it came now.

    Attributes:
        checkpoints: all of them, off the lineage first, then oldest to newest; damaged ones included.
        leftovers: records without an attempt and attempts without a record.
        refused: why no checkpoint of the lineage goes although no policy keeps any; None if that is not so.
        idle: why nothing at all goes; None if that is not so.
    """

    checkpoints: list[Fate] = field(default_factory=list)
    leftovers: list[Fate] = field(default_factory=list)
    refused: str | None = None
    idle: str | None = None

    def with_pins(self, storage: Storage) -> Explanation:
        """The same, each pin told with the reason that a person gave. Reads the pins."""
        words: dict[CheckpointRef, list[str]] = {}
        if any("pinned" in fate.reasons for fate in self.checkpoints):
            for pin in pins(storage):
                words.setdefault(CheckpointRef(pin.generation, pin.step), []).append(clean(pin.because))

        def told(fate: Fate) -> Fate:
            why = f"pinned: {', '.join(words[fate.ref])}" if fate.ref in words else "pinned"
            return replace(fate, reasons=tuple(why if one == "pinned" else one for one in fate.reasons))

        return replace(self, checkpoints=[told(fate) for fate in self.checkpoints])

    def __str__(self) -> str:
        said = [text for text in (self.idle, self.refused) if text]
        whole = [f"{fate.ref}: {'goes' if fate.goes else 'lives'}: {fate.why}" for fate in self.checkpoints]
        left = [
            f"{fate.attempt or fate.ref}: {'goes' if fate.goes else 'stays'}: {fate.why}" for fate in self.leftovers
        ]
        return "\n".join([*said, *whole, *left]) or "nothing there"


@dataclass
class Looked:
    """What a look at the run came to.

    Attributes:
        catalog: the run.
        fates: of all there is, off the lineage first, then oldest to newest, then leftovers.
        folders: attempt -> its keys.
        dangling: attempt -> uploads begun and never published.
        litter: small objects of ours whose writing was begun and never ended, long ago; they go.
        leases: keys of leases that ran out long ago; they go.
        failed: what could not be read, and why.
        refused: why no checkpoint of the lineage goes although no policy keeps any.
        idle: why nothing at all goes.
    """

    catalog: Catalog
    fates: list[Fate] = field(default_factory=list)
    folders: dict[str, list[str]] = field(default_factory=dict)
    dangling: dict[str, list[Incomplete]] = field(default_factory=dict)
    litter: list[Incomplete] = field(default_factory=list)
    leases: list[str] = field(default_factory=list)
    failed: list[str] = field(default_factory=list)
    refused: str | None = None
    idle: str | None = None


def explain(
    storage: Storage,
    keep: Keep,
    *,
    claims: Claims | None = None,
    generation: int | None = None,
    failed: Collection[str] = (),
    begun: Collection[str] | None = None,
    cache: RecordCache | None = None,
    clock: Clock | None = None,
    abandoned_after_s: float = OFF_LINEAGE_S,
) -> Explanation:
    """Why each checkpoint lives, or that it goes at the next sweep; and the same of leftovers. Changes nothing.

    Exactly what `sweep` would do with the same arguments, if nobody else did anything. The time is that of the newest
    commit, since a sweep follows a commit.

    Ranks: any; local.

    Args:
        storage: the run's.
        keep: as for `sweep`.
        claims: as for `sweep`.
        generation: who would sweep; the newest generation that has a commit, if it is not said.
        failed: as for `sweep`.
        begun: as for `sweep`.
        cache: as for `sweep`.
        clock: as for `sweep`.
        abandoned_after_s: as for `sweep`.

    Raises:
        StorageError: the store could not be looked at.
        IntegrityError, FormatError: the generation record is missing or not readable.
    """
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
    whole = [fate for fate in looked.fates if fate.kind in ("checkpoint", "damaged")]
    left = [fate for fate in looked.fates if fate.kind in ("record", "attempt")]
    return Explanation(whole, left, looked.refused, looked.idle)


def look(
    storage: Storage,
    keep: Keep,
    *,
    claims: Claims | None = None,
    generation: int | None,
    failed: Collection[str] = (),
    begun: Collection[str] | None = None,
    cache: RecordCache | None = None,
    clock: Clock | None = None,
    abandoned_after_s: float = OFF_LINEAGE_S,
) -> Looked:
    """List all, decide all. Arguments and errors are those of `explain`."""
    # This order: an attempt listed now whose commit is not listed afterwards had none, and a hold written since the
    # commit was seen is seen.
    folders = list_attempts(storage)
    dangling, begun_records = _list_incomplete(storage)
    catalog = discover(storage, cache)
    looked = Looked(catalog, folders=folders, dangling=dangling)
    if catalog.record is None:
        looked.idle = "nothing was ever committed"
        return looked
    if generation is None:
        generation = catalog.record.generation
    if catalog.newest_generation > generation:
        looked.idle = f"generation {catalog.newest_generation} is newer and has yet to commit, or to sweep"
    elif catalog.record.generation != generation:
        looked.idle = f"generation {generation} has yet to commit"
    clock = clock or SystemClock()
    holds = Holds(storage, catalog.now_s, clock)
    _Decision(looked, holds, generation, failed, begun, Abandonment(catalog, abandoned_after_s)).run(keep, claims)
    looked.leases = list(holds.run_out())
    if catalog.now_s is not None:
        old_s = catalog.now_s - LITTER_S
        looked.litter = [item for item in begun_records if item.started_s is not None and item.started_s < old_s]
    return looked


def _list_incomplete(storage: Storage) -> tuple[dict[str, list[Incomplete]], list[Incomplete]]:
    """What was begun in each attempt and never published, and the same of records."""
    records: list[Incomplete] = []
    dangling: dict[str, list[Incomplete]] = {}
    for item in storage.incomplete(""):
        found = keys.split_attempt_key(item.key)
        if found:
            dangling.setdefault(found[0], []).append(item)
        elif item.key == keys.RUN or any(
            parse(item.key) for parse in (keys.parse_commit, keys.parse_generation, keys.parse_hold)
        ):
            records.append(item)
    return dangling, records


@dataclass
class _Decision:
    looked: Looked
    holds: Holds
    generation: int
    failed: Collection[str]
    begun: Collection[str] | None
    abandonment: Abandonment
    claimed: Mapping[CheckpointRef, Sequence[str]] = field(default_factory=dict)

    def run(self, keep: Keep, claims: Claims | None) -> None:
        catalog = self.looked.catalog
        infos, absent, damaged, gone = self._split()
        on = [info for info in infos if info.on_lineage]
        quarantined = listed(catalog.storage)
        sound = [info.ref for info in on if info.ref not in quarantined]
        self._ask(infos, claims)
        fit = self._fit(on, sound)
        reasons = self._reasons(on, sound, fit, keep)
        attempts = self._attempts(damaged.keys() | gone)
        whole = [self._checkpoint(info, reasons, fit) for info in infos]
        whole += [fate for fate in attempts if fate.kind == "checkpoint"]
        for ref, why in damaged.items():
            whole.append(
                Fate("damaged", ref, False, (f"its commit record cannot be read: {why}",), ref in catalog.lineage)
            )
        self.looked.fates = [
            *sorted(whole, key=lambda fate: (fate.on_lineage, fate.ref)),
            *(self._record(ref) for ref in absent),
            *(fate for fate in attempts if fate.kind == "attempt"),
        ]

    def _split(
        self,
    ) -> tuple[list[CheckpointInfo], list[CheckpointRef], dict[CheckpointRef, str], set[CheckpointRef]]:
        """Whole checkpoints, records without a manifest, those that cannot be read and why, those gone since listed."""
        catalog = self.looked.catalog
        infos: list[CheckpointInfo] = []
        absent: list[CheckpointRef] = []
        damaged: dict[CheckpointRef, str] = {}
        gone: set[CheckpointRef] = set()
        for ref in [*catalog.off_lineage, *catalog.lineage]:
            try:
                info = catalog.info(ref)
            except NotFoundError:
                gone.add(ref)
                continue
            except (FormatError, IntegrityError, StorageError) as error:
                damaged[ref] = str(error)
                self.looked.failed.append(f"{keys.commit_key(ref)}: {error}")
                continue
            if self._has_manifest(info.attempt):
                infos.append(info)
            else:
                absent.append(ref)
        return infos, absent, damaged, gone

    @staticmethod
    def _fit(on: list[CheckpointInfo], sound: list[CheckpointRef]) -> list[CheckpointRef]:
        """Those to go on from. One whose values were never counted is among them: nothing goes on missing evidence."""
        fit = {info.ref for info in on if info.healthy is not False}
        return [ref for ref in sound if ref in fit]

    def _ask(self, infos: list[CheckpointInfo], claims: Claims | None) -> None:
        try:
            self.claimed = claims(infos) if claims else {}
        except Exception as error:  # noqa: BLE001  it may have kept anything
            self.looked.idle = self.looked.idle or str(error)
            self.looked.failed.append(str(error))

    def _reasons(
        self, on: list[CheckpointInfo], sound: list[CheckpointRef], fit: list[CheckpointRef], keep: Keep
    ) -> dict[CheckpointRef, list[str]]:
        """Of the lineage: why each lives, an empty list if nobody knows."""
        given = asked_twice(keep, on, sound)
        reasons = {info.ref: [given[info.ref]] if given.get(info.ref) else [] for info in on}
        silent = not any(reasons.values())
        newest = self.looked.catalog.newest
        if newest in reasons:
            reasons[newest].append("newest of the lineage")
        elif on:
            reasons[on[-1].ref].append("newest that is whole")
        if sound and sound[-1] != newest:
            reasons[sound[-1]].append("newest that is not quarantined")
        if fit and fit[-1] not in (newest, sound[-1]):
            reasons[fit[-1]].append("newest that is healthy")
        for ref, why in reasons.items():  # not before it is known whether the policy is silent
            why += self.claimed.get(ref, ())
        if silent and not all(reasons.values()):
            # A policy that keeps nothing at all is a mistake sooner than a wish (restic refuses it as well).
            self.looked.refused = f"the keep policy has no reason for any of {len(on)} checkpoints, so none is deleted"
            for why in reasons.values():
                why.append("the keep policy keeps none at all, so nothing is deleted")
        return reasons

    def _checkpoint(
        self, info: CheckpointInfo, reasons: dict[CheckpointRef, list[str]], fit: list[CheckpointRef]
    ) -> Fate:
        if info.on_lineage:
            goes, why = not reasons[info.ref], reasons[info.ref] or ["no policy has a reason to keep it"]
        else:
            goes, because = self.abandonment.judge(info.ref, fit)
            why = [because, *self.claimed.get(info.ref, ())]
            goes = goes and len(why) == 1
        return self._fate("checkpoint", info.ref, goes, why, info=info, attempt=info.attempt)

    def _record(self, ref: CheckpointRef) -> Fate:
        """A commit that arrived after its attempt had been collected."""
        catalog = self.looked.catalog
        goes = ref != catalog.newest
        why = "its attempt has no manifest" if goes else "its attempt has no manifest, but it is the newest record"
        return self._fate("record", ref, goes, [why], attempt=catalog.read(ref).attempt)

    def _attempts(self, unread: Collection[CheckpointRef]) -> list[Fate]:
        """What has no commit record: leftovers, attempts under way, checkpoints for whose record a pin stands in.

        Of those in `unread` a record was listed: which attempt it names is not known, so none of them is a leftover.
        """
        catalog = self.looked.catalog
        committed = {catalog.cache[ref].attempt for ref in catalog.commits if ref in catalog.cache}
        found = []
        for name in sorted(self.looked.folders.keys() | self.looked.dangling.keys()):
            ref = keys.parse_attempt(name)
            if ref is None or name in committed or ref in unread:
                continue
            info = self._pinned(ref, name)
            if info:
                found.append(self._fate("checkpoint", ref, False, ["its commit record is gone"], info, name))
                continue
            goes, why = True, "has no commit record"
            if ref.generation > self.generation:
                goes, why = False, f"of generation {ref.generation}, which is newer"
            elif ref.generation == self.generation and not self._is_over(name):
                goes, why = False, "may be under way"
            found.append(self._fate("attempt", ref, goes, [why], attempt=name))
        return found

    def _is_over(self, name: str) -> bool:
        return name in self.failed or (self.begun is not None and name not in self.begun)

    def _pinned(self, ref: CheckpointRef, attempt: str) -> CheckpointInfo | None:
        catalog = self.looked.catalog
        if self.holds.of(ref) != "pinned" or ref in catalog.commits or not self._has_manifest(attempt):
            return None
        try:
            record = find_commit(catalog.storage, ref)
        except (NotFoundError, FormatError, AccessDeniedError):
            return None
        return catalog.info_of(ref, record) if record.attempt == attempt else None

    def _has_manifest(self, attempt: str) -> bool:
        return keys.attempt_key(attempt, keys.MANIFEST) in self.looked.folders.get(attempt, ())

    def _fate(
        self,
        kind: Kind,
        ref: CheckpointRef,
        goes: bool,
        why: list[str],
        info: CheckpointInfo | None = None,
        attempt: str | None = None,
    ) -> Fate:
        """What was decided, unless it is held, or nothing at all goes."""
        held = self.holds.of(ref)
        if goes and held:
            goes, why = False, []
        if held:
            why = [*why, held]
        if goes and self.looked.idle:
            goes, why = False, [self.looked.idle]
        return Fate(kind, ref, goes, tuple(why), ref in self.looked.catalog.lineage, info, attempt)
