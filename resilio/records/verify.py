"""Is every byte of a checkpoint what was saved? Without torch, and without stopping at the first finding."""

from __future__ import annotations

import os
import random
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import partial
from itertools import islice
from typing import Literal

from ..errors import FormatError, IntegrityError, NewerFormatError, NoCheckpointError, NotFoundError
from ..storage.base import Storage
from ..types import CheckpointRef, Damage
from . import keys
from .commits import find_commit
from .digests import BLOCK_SIZE, DIGEST_SIZE, bad_blocks, block_count, digester_for
from .manifest import LoadedManifest, load_manifest
from .problems import problems_of
from .read_ahead import in_order, readers
from .sampling import UNIT_LIMIT, Coverage, Sample, Unit, pieces_by_object, sample_units, units_of

__all__ = ["Verification", "examine_checkpoint", "verify_checkpoint"]

_LOCAL_THREADS = 4  # more gain nothing where the memory is the limit
_LOCAL_UNIT = 64 * BLOCK_SIZE  # the fastest of 1, 2, 4 and 8 MiB
_LOCAL_RUN = 8  # units that a thread takes at a time: to hand over each of them costs as much as to compare it

Progress = Callable[[int, int], None]
_Kept = Callable[[Unit, memoryview], Iterable[memoryview]]
_Bad = tuple[str, int, list[int]]  # tensor, where its piece begins, blocks


@dataclass(frozen=True)
class Verification:
    """What was found, and how much was looked at: the first says nothing without the second.

    Attributes:
        damage: what is damaged; empty if nothing was found.
        coverage: how much was read. Of a checkpoint whose manifest is damaged, nothing is.
    """

    damage: list[Damage]
    coverage: Coverage


def verify_checkpoint(storage: Storage, ref: CheckpointRef, progress: Progress | None = None) -> list[Damage]:
    """Read all of a checkpoint and compare it with its digests.

    Each object's size, each 64 KiB block of each piece, and the digest over what lies between the pieces, or over the
    whole object where the manifest has no such one: a flipped bit is named by object, and by tensor where it lies in
    one. A damaged manifest is reported alone, since it is what the rest is judged by.

    Ranks: any; local.

    Args:
        storage: the run's.
        ref: which checkpoint.
        progress: called with bytes done and bytes in all, from time to time.

    Returns:
        What is damaged; empty if all is well.

    Raises:
        NoCheckpointError: there is no commit record of `ref`, nor a pin that stands in for it.
        StorageError: the store failed: nothing is known.
    """
    return examine_checkpoint(storage, ref, progress=progress).damage


def examine_checkpoint(
    storage: Storage,
    ref: CheckpointRef,
    how: Sample | Literal["all", "inventory"] = "all",
    *,
    progress: Progress | None = None,
    rng: random.Random | None = None,
) -> Verification:
    """As `verify_checkpoint`, and also less than all of it.

    A sample reads the chain of digests, names and sizes of all objects, all block digests, the objects that hold no
    tensor, and some tensor data; what lies between tensors is under a digest that needs all of it, which a sample does
    not have. An inventory is the chain, names and sizes alone.

    Args:
        storage: the run's.
        ref: which checkpoint.
        how: how much to read.
        progress: called with bytes done and bytes in all, from time to time.
        rng: what a sample by share or amount is drawn with; the system's by default.

    Raises: as `verify_checkpoint`.
    """
    level: Literal["all", "sample", "inventory"] = "sample" if isinstance(how, Sample) else how
    where = keys.commit_key(ref)
    try:
        commit = find_commit(storage, ref)
        where = keys.attempt_key(commit.attempt, keys.MANIFEST)
        manifest = load_manifest(storage, commit)
    except NotFoundError as error:
        raise NoCheckpointError(f"{storage.url}: there is no checkpoint of {ref}", ref=ref) from error
    except (IntegrityError, FormatError) as error:
        newer = isinstance(error, NewerFormatError)
        damage = [
            Damage(_named(one.where) or where, one.what, {"newer": True} if newer or one.facts.get("newer") else {})
            for one in problems_of(error)
        ]
        return Verification(damage, Coverage(level, 0, 0))
    chosen = sample_units(manifest, how, rng) if isinstance(how, Sample) else None
    verifier = _Verifier(storage, manifest, progress or (lambda done, total: None), chosen, level)
    damage = list(verifier.run())
    total = sum(placed.piece.size_bytes for tensor in manifest.tensors.values() for placed in tensor.pieces)
    return Verification(damage, Coverage(level, verifier.judged, total))


def _named(where: str) -> str | None:
    """The key that an error of the chain names, which may name the tensor behind it as well."""
    key = where.partition(":")[0]
    return key if keys.split_attempt_key(key) else None


class _Verifier:
    """Looks at one checkpoint.

    Args:
        storage: the run's.
        manifest: what it is judged by.
        progress: told of bytes done and in all.
        chosen: the units to read; None for all.
        level: what is read besides them.
    """

    def __init__(
        self, storage: Storage, manifest: LoadedManifest, progress: Progress, chosen: list[Unit] | None, level: str
    ) -> None:
        self.storage = storage
        self.manifest = manifest
        self.progress = progress
        self.level = level
        self.done = 0
        self.judged = 0  # bytes of tensors
        self.pieces = pieces_by_object(manifest)
        self.chosen: dict[str, list[Unit]] | None = None
        if chosen is not None:
            self.chosen = {}
            for unit in chosen:
                self.chosen.setdefault(unit.key, []).append(unit)
        self.total = sum(map(self._to_read, manifest.objects))
        self.digests: dict[str, bytes] = {}  # only those that are whole themselves
        # Of a local disk the kernel reads ahead: a thread pays where it compares as well, and does so in C.
        local = storage.capabilities.local_path is not None
        cores = min(os.cpu_count() or 1, _LOCAL_THREADS)
        self.threads = (cores if cores > 1 else 0) if local else readers(storage.capabilities.concurrency)
        self.limit = _LOCAL_UNIT if local else UNIT_LIMIT
        self.at_a_time = _LOCAL_RUN if local else 1
        largest = max((one.size_bytes for one in manifest.objects.values()), default=0)
        self.buffer_bytes = max([min(largest, self.limit), *(unit.end - unit.start for unit in chosen or ())])
        # Used over and over, the last one first: fresh memory costs more than reading into it, cold memory too.
        self.buffers: deque[memoryview] = deque()

    def _to_read(self, key: str) -> int:
        if self.level == "inventory":
            return 0
        if self.chosen is not None and key in self.pieces:
            return sum(unit.end - unit.start for unit in self.chosen.get(key, []))
        return self.manifest.objects[key].size_bytes

    def run(self) -> Iterator[Damage]:
        prefix = keys.attempt_key(self.manifest.attempt, "")
        sizes = {info.key: info.size_bytes for info in self.storage.list(prefix)}
        # Digests objects first: the data is judged by them.
        for key in sorted(self.manifest.objects, key=lambda key: (not key.endswith(".digests"), key)):
            expected = self.manifest.objects[key].size_bytes
            if key not in sizes:
                yield Damage(key, "is missing")
            elif sizes[key] != expected:
                yield Damage(key, f"has {sizes[key]} bytes, saved were {expected}")
            elif self.level == "inventory":
                continue
            elif key.endswith(".digests"):
                try:
                    self.digests[key] = self.manifest.read_object(self.storage, key)
                except IntegrityError as error:
                    yield Damage(key, str(error))
                self._advance(expected)
            elif self.chosen is not None and key in self.pieces:
                yield from self._data(key, self.chosen.get(key, []), whole=False)
            else:
                yield from self._data(key, units_of(key, expected, self.pieces.get(key, []), self.limit), whole=True)

    def _data(self, key: str, units: Iterable[Unit], *, whole: bool) -> Iterator[Damage]:
        record = self.manifest.objects[key]
        known = all(placed.digests_key in self.digests for _, placed in self.pieces.get(key, []))
        # Each byte once: those of pieces against their blocks, the others against `rest`.
        rest = record.rest if known else None
        expected = rest or record.digest
        digester = digester_for(expected, key)
        bad: dict[tuple[str, int], list[int]] = {}  # (tensor, where its piece begins) -> blocks
        try:
            look = partial(self._look, (_outside if rest else _all) if whole else None)
            for run, between, found in in_order(_runs(units, self.at_a_time), look, self.threads):
                digester.update(between)
                parts = (part for unit in run for part in unit.parts)
                self.judged += sum(part.size_bytes for part in parts if part.placed.digests_key in self.digests)
                for name, at, blocks in found:
                    bad.setdefault((name, at), []).extend(blocks)
                self._advance(sum(unit.end - unit.start for unit in run))
        except (IntegrityError, NotFoundError) as error:
            yield Damage(key, f"changed while it was read: {error}")
            return
        for (name, at), blocks in bad.items():
            some = ", ".join(map(str, blocks[:8])) + (", …" if len(blocks) > 8 else "")
            what = f"tensor {name!r}: {len(blocks)} of its 64 KiB blocks here differ from what was saved ({some})"
            yield Damage(key, what, {"tensor": name, "at": at, "blocks": blocks})
        if whole and (rest or not bad) and digester.text() != expected:
            subject = "the digest of what lies outside of all tensors" if rest else "its digest"
            what = f"{subject} is {digester.text()}, saved was {expected}"
            yield Damage(key, what + ("; the difference lies outside of all tensors" if known and not rest else ""))

    def _look(self, kept: _Kept | None, run: list[Unit]) -> tuple[list[Unit], bytes, list[_Bad]]:
        """Read units and compare; `kept` of their bytes are returned as well."""
        try:
            buffer = self.buffers.pop()
        except IndexError:
            buffer = memoryview(bytearray(self.buffer_bytes))
        between: list[bytes] = []
        found: list[_Bad] = []
        for unit in run:
            self.storage.read_into(unit.key, [(unit.start, buffer[: unit.end - unit.start])])
            if kept is not None:
                between.append(b"".join(kept(unit, buffer)))
            found += self._compare(unit, buffer)
        self.buffers.append(buffer)
        return run, b"".join(between), found

    def _compare(self, unit: Unit, buffer: memoryview) -> Iterator[_Bad]:
        """Tensor, where its piece begins, and which of its blocks are bad."""
        for part in unit.parts:
            known = self.digests.get(part.placed.digests_key)
            if known is not None:
                chunk = buffer[part.start - unit.start :][: part.size_bytes]
                start = DIGEST_SIZE * (part.placed.piece.block + part.block)
                blocks = bad_blocks(chunk, memoryview(known)[start:][: DIGEST_SIZE * block_count(len(chunk))])
                if blocks:
                    yield part.name, part.placed.piece.at, [part.block + i for i in blocks]

    def _advance(self, size_bytes: int) -> None:
        self.done += size_bytes
        self.progress(self.done, self.total)


def _runs(units: Iterable[Unit], length: int) -> Iterator[list[Unit]]:
    left = iter(units)
    while run := list(islice(left, length)):
        yield run


def _all(unit: Unit, buffer: memoryview) -> Iterator[memoryview]:
    yield buffer[: unit.end - unit.start]


def _outside(unit: Unit, buffer: memoryview) -> Iterator[memoryview]:
    """What lies in no piece."""
    at = unit.start
    for part in unit.parts:
        yield buffer[at - unit.start : part.start - unit.start]
        at = part.start + part.size_bytes
    yield buffer[at - unit.start : unit.end - unit.start]
