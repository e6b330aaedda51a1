"""What checkpoints a run has, and which of them count: discovery and lineage.

Source: the lineage rule is the project's own; that a listing must be complete and uncached, and that the newest must
never be chosen by a clock, are lessons of public bug reports.
"""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import cached_property

from ..errors import AccessDeniedError, ConfigError, FormatError, IntegrityError, NoCheckpointError, NotFoundError
from ..storage.base import Storage
from ..types import CheckpointInfo, CheckpointRef, Damage
from . import keys, schema
from .commits import find_commit, list_pins
from .reading import read_record
from .values import decode_metrics

__all__ = ["Catalog", "RecordCache", "discover", "list_attempts", "list_generations", "read_generation"]

# Commit records never change, so a manager may keep those it has read from one discovery to the next.
RecordCache = dict[CheckpointRef, schema.CommitRecord]


@dataclass
class Catalog:
    """A run's checkpoints at one moment.

    A record whose attempt has no manifest is listed here all the same (telling them apart takes a listing of every
    attempt); whoever chooses one must find its manifest before it counts.

    A checkpoint whose commit record was deleted while somebody pinned it is there as long as its manifest is: the pin
    stands in for the record. It is off the lineage whatever it was before, and since pins are not looked at in
    discovery it is in none of the lists below; `find`, `read`, `pinned` and `checkpoints` know it.

    Attributes:
        storage: where it was read.
        lineage: checkpoints that count, oldest to newest.
        off_lineage: checkpoints that a newer branch left behind, by generation and step; never chosen by themselves.
        generations: numbers of all generations, also those that never committed, ascending.
        record: record of the newest generation that has a commit, None if nothing was ever committed.
        stored_s: key of a commit or generation record -> when the store says it was written; none where it says not.
        sizes: key of a commit or generation record -> its size in bytes, as listed.
    """

    storage: Storage
    lineage: list[CheckpointRef] = field(default_factory=list)
    off_lineage: list[CheckpointRef] = field(default_factory=list)
    generations: list[int] = field(default_factory=list)
    record: schema.GenerationRecord | None = None
    cache: RecordCache = field(default_factory=dict, repr=False)
    stored_s: dict[str, float] = field(default_factory=dict, repr=False)
    sizes: dict[str, int] = field(default_factory=dict, repr=False)
    _lines: dict[CheckpointRef, list[CheckpointRef]] = field(default_factory=dict, repr=False)

    @cached_property
    def _on(self) -> frozenset[CheckpointRef]:
        return frozenset(self.lineage)

    @property
    def newest(self) -> CheckpointRef | None:
        """The newest checkpoint of the lineage."""
        return self.lineage[-1] if self.lineage else None

    @property
    def newest_generation(self) -> int:
        """The highest number any generation has, whether it committed or not; 0 if there is none."""
        return self.generations[-1] if self.generations else 0

    @property
    def commits(self) -> list[CheckpointRef]:
        """All checkpoints, on the lineage and off it, by generation and step."""
        return sorted([*self.lineage, *self.off_lineage])

    @property
    def now_s(self) -> float | None:
        """When the store says the newest commit was written: the newest moment that is sure to have come.

        None where there is none, or the store does not tell.
        """
        return self.stored_s.get(keys.commit_key(self.newest)) if self.newest else None

    def pinned(self) -> list[CheckpointRef]:
        """Checkpoints for whose commit record a pin stands in, by generation and step. Looks anew, at pins only."""
        there = set(self.commits)
        found = []
        for ref in sorted({pin.ref for pin in list_pins(self.storage)} - there):
            try:
                attempt = find_commit(self.storage, ref).attempt
            except (NotFoundError, FormatError, AccessDeniedError):
                continue
            if self.storage.exists(keys.attempt_key(attempt, keys.MANIFEST)):
                found.append(ref)
        return found

    def find(self, step: int | CheckpointRef) -> CheckpointRef:
        """The checkpoint of `step`: the newest such on the lineage, else off it, else one that only a pin holds.

        A step may be there more than once, on branches; a `CheckpointRef` means exactly that one.

        Raises:
            NoCheckpointError: there is none.
            ConfigError: `step` is no number.
        """
        if isinstance(step, CheckpointRef):
            if step in self.commits or step in self.pinned():
                return step
            have = ", ".join(str(ref) for ref in self.commits if ref.step == step.step) or "none"
            raise NoCheckpointError(f"{self.storage.url}: no checkpoint {step}; of that step: {have}", step=step.step)
        if isinstance(step, bool) or not isinstance(step, int):
            raise ConfigError(f"step={step!r}: give the number of a step, or the ref of a checkpoint", step=step)

        def of_step(refs: list[CheckpointRef]) -> list[CheckpointRef]:
            return [ref for ref in refs if ref.step == step]

        found = of_step(self.lineage) or of_step(self.off_lineage) or of_step(self.pinned())
        if found:
            return found[-1]
        have = ", ".join(str(ref.step) for ref in self.lineage[-10:]) or "none"
        raise NoCheckpointError(f"{self.storage.url}: no checkpoint of step {step}; newest steps: {have}", step=step)

    def read(self, ref: CheckpointRef) -> schema.CommitRecord:
        """The commit record of `ref`, or what a pin holds of it.

        Raises:
            NotFoundError: it is gone by now, and no pin stands in.
            FormatError: it cannot be understood, or is not the record of `ref`.
        """
        if ref not in self.cache:
            self.cache[ref] = find_commit(self.storage, ref, self.sizes.get(keys.commit_key(ref)))
        return self.cache[ref]

    def info(self, ref: CheckpointRef) -> CheckpointInfo:
        """What its commit record says of `ref`. Raises as `read` does."""
        return self.info_of(ref, self.read(ref))

    def info_of(self, ref: CheckpointRef, record: schema.CommitRecord) -> CheckpointInfo:
        """What `record`, its commit record, says of `ref`."""
        return CheckpointInfo(
            ref=ref,
            attempt=record.attempt,
            time_s=record.time_s,
            world=record.world,
            metrics=decode_metrics(record.metrics, keys.commit_key(ref)),
            reasons=tuple(record.reasons),
            on_lineage=ref in self._on,
            size_bytes=record.size_bytes or None,
            about=record.about,
            non_finite=record.non_finite,
        )

    def checkpoints(self) -> tuple[list[CheckpointInfo], list[Damage]]:
        """All checkpoints, off the lineage first, then oldest to newest; and the commit records that cannot be read.

        A record that was deleted since the discovery is left out, unless a pin stands in.
        """
        infos, damaged = [], []
        for found in self._look([*sorted([*self.off_lineage, *self.pinned()]), *self.lineage]):
            if isinstance(found, CheckpointInfo):
                infos.append(found)
            elif found is not None:
                damaged.append(found)
        return infos, damaged

    def _look(self, refs: list[CheckpointRef]) -> list[CheckpointInfo | Damage | None]:
        """What is known of each, in their order; None for one that is gone. As many reads at once as the store takes:
        one by one, a thousand records in an object store are half a minute of waiting.
        """

        def one(ref: CheckpointRef) -> CheckpointInfo | Damage | None:
            try:
                return self.info(ref)
            except NotFoundError:
                return None
            except (FormatError, IntegrityError, AccessDeniedError) as error:
                return Damage(keys.commit_key(ref), str(error), {"ref": ref})

        at_once = min(len(refs), self.storage.capabilities.concurrency)
        if at_once < 2 or self.storage.capabilities.local_path is not None:  # a small local file waits for nothing
            return [one(ref) for ref in refs]
        with ThreadPoolExecutor(at_once) as pool:
            return list(pool.map(one, refs))

    def read_generation(self, generation: int) -> schema.GenerationRecord:
        """The record of a generation. Raises as the function of this name does."""
        return read_generation(self.storage, generation, self.sizes.get(keys.generation_key(generation)))

    def line_of(self, ref: CheckpointRef) -> list[CheckpointRef]:
        """The checkpoints that lead to `ref`, it included, as far as they still have a commit; oldest to newest.

        Looked up once: asked again it reads nothing, and so cannot fail.

        Raises:
            IntegrityError: the record of its generation, which is never deleted, is missing.
        """
        if ref in self.lineage:
            return self.lineage[: self.lineage.index(ref) + 1]
        if ref not in self._lines:
            own = _line(self.commits, self.read_generation(ref.generation))
            self._lines[ref] = [one for one in own if one.generation < ref.generation or one.step <= ref.step]
        return self._lines[ref]


def discover(storage: Storage, cache: RecordCache | None = None) -> Catalog:
    """Look what there is: list `commits/`, list `generations/`, get the newest generation that has a commit. Uncached.

    Ranks: rank 0; it broadcasts what it chose.

    Args:
        storage: the run's.
        cache: commit records read before, kept by the caller from one discovery to the next.

    Raises:
        IntegrityError: a generation has commits and no record.
        FormatError: its record cannot be understood.
    """
    cache = {} if cache is None else cache
    # Commits first: a generation is made before its first commit, so every commit found has its generation listed.
    commit_infos, generation_infos = list(storage.list(keys.COMMITS)), list(storage.list(keys.GENERATIONS))
    commits = sorted(ref for info in commit_infos if (ref := keys.parse_commit(info.key)))
    generations = sorted(n for info in generation_infos if (n := keys.parse_generation(info.key)))
    listed = [*commit_infos, *generation_infos]
    stored_s = {info.key: info.modified_s for info in listed if info.modified_s is not None}
    sizes = {info.key: info.size_bytes for info in listed}
    for gone in cache.keys() - set(commits):
        del cache[gone]
    if not commits:
        return Catalog(storage, generations=generations, cache=cache, stored_s=stored_s, sizes=sizes)
    newest = commits[-1].generation
    record = read_generation(storage, newest, sizes.get(keys.generation_key(newest)))
    lineage = _line(commits, record)
    on = set(lineage)
    off = [ref for ref in commits if ref not in on]
    return Catalog(storage, lineage, off, generations, record, cache, stored_s, sizes)


def list_generations(storage: Storage) -> list[int]:
    """Numbers of all generations, ascending: one request, the look that tells whether a manager is fenced."""
    return sorted(n for info in storage.list(keys.GENERATIONS) if (n := keys.parse_generation(info.key)))


def list_attempts(storage: Storage) -> dict[str, list[str]]:
    """Name of each attempt's folder -> keys of what is in it, whatever became of it."""
    folders: dict[str, list[str]] = {}
    for info in storage.list(keys.STEP_PREFIX):
        found = keys.split_attempt_key(info.key)
        if found:
            folders.setdefault(found[0], []).append(info.key)
    return folders


def _line(commits: list[CheckpointRef], record: schema.GenerationRecord) -> list[CheckpointRef]:
    there = set(commits)
    ancestors = dict.fromkeys(CheckpointRef(a.generation, a.step) for a in record.ancestors)
    return [ref for ref in ancestors if ref in there] + [r for r in commits if r.generation == record.generation]


def read_generation(storage: Storage, generation: int, size_bytes: int | None = None) -> schema.GenerationRecord:
    """The record of a generation.

    Args:
        storage: the run's.
        generation: its number.
        size_bytes: of the record where a listing told it, which saves a request.

    Raises:
        IntegrityError: there is none.
        FormatError: it cannot be understood, or is not the record of `generation`.
    """
    key = keys.generation_key(generation)
    where = f"{storage.url}: {key}"
    try:
        record = read_record(storage, key, schema.GenerationRecord, size_bytes)
    except NotFoundError as error:
        raise IntegrityError(
            f"{where} is missing although generation {generation} has commits; without it nobody knows which older "
            "checkpoints belong to them. Bring it back from a backup, or copy the checkpoint you want "
            "out of its folder with plain DCP.",
            key=key,
        ) from error
    named = [*record.ancestors, *([record.parent] if record.parent else [])]
    if record.generation != generation or any(a.generation >= generation for a in named):
        raise FormatError(f"{where} contradicts its own name or names later generations as ancestors", key=key)
    return record
