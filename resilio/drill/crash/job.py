"""A training job without training: the manager's own code for rank 0, and ranks that write a few bytes.

Restore, commit and sweep are what `CheckpointManager` does on rank 0, called in its order; in place of tensors each
rank writes a few hundred bytes in the layout of a real attempt, both ranks at the same time.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field

from ...clock import Clock
from ...engine import Root
from ...manager.choosing import Picker
from ...manager.saving import Committer
from ...policies import KeepPolicy
from ...records import keys
from ...records.digests import append_block_digests, digest_of
from ...records.schema import FORMAT, ManifestPart, ObjectRecord, PartRef, Piece, TensorRecord, encode
from ...storage.base import Storage
from ...types import CheckpointRef

__all__ = ["WORLD", "Attempt", "Job"]

WORLD = 2
_ROWS = 40  # of a uint8 tensor of 4 columns, half of them on each rank


def _alone(rank: int) -> AbstractContextManager[None]:
    return nullcontext()


@dataclass
class Attempt:
    """What the ranks write of one attempt: name in its folder -> bytes."""

    name: str
    metadata: bytes = b"what stock DCP would have written"
    objects: dict[str, bytes] = field(default_factory=dict)
    parts: list[PartRef] = field(default_factory=list)

    @classmethod
    def of(cls, name: str, salt: int) -> Attempt:
        """Bytes that no other attempt has, unless `salt` is the same."""
        made = cls(name)
        ref = keys.parse_attempt(name)
        assert ref is not None
        share = _ROWS // WORLD
        for rank in range(WORLD):
            raw = bytes((salt * 31 + ref.generation * 17 + ref.step * 7 + rank + i) % 251 for i in range(share * 4))
            data, blocks = keys.data_name(rank, 0), bytearray()
            append_block_digests(blocks, raw)
            made.objects[data], made.objects[keys.digests_name(data)] = raw, bytes(blocks)
            piece = Piece(offsets=[rank * share, 0], sizes=[share, 4], object=0, at=0, size_bytes=len(raw), block=0)
            part = ManifestPart(
                format=FORMAT,
                rank=rank,
                objects=[_record(n, made.objects[n]) for n in (data, keys.digests_name(data))],
                tensors={"model.weight": TensorRecord(dtype="uint8", shape=[_ROWS, 4], pieces=[piece])},
                values={"step": ref.step} if rank == 0 else {},
                tree={"model": {"weight": {"$ref": "model.weight"}}} if rank == 0 else None,
            )
            content = encode(part)
            made.objects[keys.part_name(rank)] = content
            one = _record(keys.part_name(rank), content)
            made.parts.append(PartRef(rank=rank, name=one.name, size_bytes=one.size_bytes, digest=one.digest))
        return made

    @property
    def root(self) -> Root:
        """What rank 0 knows when all have written."""
        return Root(self.metadata, self.parts, {name: len(data) for name, data in self.objects.items()}, {})

    def overwrite(self, storage: Storage) -> None:
        """As nobody must: over whatever is there."""
        for name, data in self.objects.items():
            storage.put(keys.attempt_key(self.name, name), data)

    def write(self, storage: Storage, as_rank: Callable[[int], AbstractContextManager[None]] = _alone) -> None:
        """All ranks at once: each its data in two portions, then its digests, then its part of the manifest."""
        open_ones = []
        for rank in range(WORLD):
            with as_rank(rank):
                writer = storage.writer(keys.attempt_key(self.name, keys.data_name(rank, 0)))
                open_ones.append((rank, writer, writer.__enter__()))
        for half in (0, 1):
            for rank, _, out in open_ones:
                raw = self.objects[keys.data_name(rank, 0)]
                with as_rank(rank):
                    out.write(raw[: len(raw) // 2] if half == 0 else raw[len(raw) // 2 :])
        for rank, writer, _ in open_ones:
            with as_rank(rank):
                writer.__exit__(None, None, None)
        for name in (lambda rank: keys.digests_name(keys.data_name(rank, 0)), keys.part_name):
            for rank in range(WORLD):
                with as_rank(rank):
                    storage.put(keys.attempt_key(self.name, name(rank)), self.objects[name(rank)])


class Job:
    """One life of a job on a run.

    Args:
        storage: the run's.
        keep: which checkpoints it keeps.
        clock: of leases and records.
    """

    def __init__(self, storage: Storage, keep: KeepPolicy, clock: Clock) -> None:
        self.storage = storage
        self.clock = clock
        self.committer = Committer(storage, keep, clock, "xxh3_128")

    def restore(self, which: int | str = "newest") -> CheckpointRef | None:
        """Restore, as far as rank 0 does; None: there is nothing, and it begins anew."""
        picker = Picker(self.storage, which, self.clock)
        picked, _ = picker.next()
        chosen = picked[0].ref if picked else None
        self.committer.restored(picker, chosen)
        return chosen

    def begin(self, step: int) -> str:
        """Begin a save: the name of the attempt."""
        return self.committer.begin(step)

    def commit(self, attempt: Attempt) -> CheckpointRef:
        """Rank 0's part of a save: returns when it is acknowledged."""
        ref = keys.parse_attempt(attempt.name)
        assert ref is not None
        self.committer.job(attempt.name, ref.step, WORLD, {}, "selftest").commit(attempt.root)
        return ref

    def failed(self, name: str) -> None:
        """The save failed on some rank."""
        self.committer.writer.abandon(name)

    def sweep(self, name: str) -> None:
        """The sweep after the save `name`."""
        ref = keys.parse_attempt(name)
        assert ref is not None
        self.committer.job(name, ref.step, WORLD, {}, "selftest").sweep()

    def save(self, step: int) -> CheckpointRef:
        """A whole save, and the sweep after it."""
        attempt = Attempt.of(self.begin(step), salt=0)
        attempt.write(self.storage)
        ref = self.commit(attempt)
        self.sweep(attempt.name)
        return ref


def _record(name: str, data: bytes) -> ObjectRecord:
    return ObjectRecord(name=name, size_bytes=len(data), digest=digest_of(data))
