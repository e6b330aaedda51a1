"""A storage of one dict that can lose answers, die, and pause; and checkpoints written by hand through the protocol."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from resilio.clock import FakeClock
from resilio.errors import AlreadyExistsError, IntegrityError, NotFoundError, TransientError
from resilio.records import keys, schema
from resilio.records.catalog import Catalog, discover
from resilio.records.digests import append_block_digests, digest_of
from resilio.records.protocol import RunWriter
from resilio.records.run import check_folder
from resilio.storage.base import Capabilities, ObjectInfo, Storage, check_key
from resilio.types import CheckpointRef


class Died(BaseException):
    """The process is gone: nothing in it runs any more."""


class FakeStore(Storage):
    """Bytes by key in a dict that several "processes" may share.

    Attributes:
        before: called with (verb, key) before each operation; may raise, or let another manager run.
        after: the same, once it took effect and before the caller has the answer.
        dies_at: number of the mutating operation before which this process dies.
        mutations: number of mutating operations so far.
        clock: the store's own; None: it does not tell when objects were written.
    """

    url = "fake://run"
    capabilities = Capabilities()

    def __init__(
        self, objects: dict[str, bytes] | None = None, dies_at: int | None = None, clock: FakeClock | None = None
    ) -> None:
        self.objects = {} if objects is None else objects
        self.clock = clock
        self.times: dict[str, float] = {}
        self.dies_at = dies_at
        self.mutations = 0
        self.before: Callable[[str, str], None] = lambda verb, key: None
        self.after: Callable[[str, str], None] = lambda verb, key: None
        self.log: list[tuple[str, str]] = []
        self.lock = threading.RLock()

    def twin(self, dies_at: int | None = None) -> FakeStore:
        """Another process that opened the same store."""
        twin = FakeStore(self.objects, dies_at, self.clock)
        twin.lock, twin.times = self.lock, self.times
        return twin

    def copy(self) -> FakeStore:
        """A store of its own with the same objects."""
        copy = FakeStore(dict(self.objects), clock=self.clock)
        copy.times = dict(self.times)
        return copy

    @contextmanager
    def _operation(self, verb: str, key: str) -> Iterator[None]:
        self.log.append((verb, key))
        self.before(verb, key)
        if verb in ("put", "delete"):
            if self.dies_at is not None and self.mutations >= self.dies_at:
                raise Died(f"before {verb} {key}")
            self.mutations += 1
        with self.lock:
            yield
        self.after(verb, key)

    def put(self, key: str, data: Any, *, if_absent: bool = False) -> ObjectInfo:
        check_key(key)
        with self._operation("put", key):
            if key in self.objects:
                if if_absent:
                    raise AlreadyExistsError(f"{key} exists", key=key)
                raise AssertionError(f"{key} is overwritten: an object once written is never modified")
            self.objects[key] = bytes(data)
            if self.clock:
                self.times[key] = self.clock.now_s
        return ObjectInfo(key, len(data), self.times.get(key))

    @contextmanager
    def writer(self, key: str, *, size_hint: int | None = None) -> Iterator[Any]:
        raise NotImplementedError

    def read_into(self, key: str, ranges: Sequence[tuple[int, memoryview]]) -> None:
        with self._operation("read", key):
            if key not in self.objects:
                raise NotFoundError(f"no {key}", key=key)
            data = self.objects[key]
            for offset, buffer in ranges:
                if offset + len(buffer) > len(data):
                    raise IntegrityError(f"{key} is too short")
                buffer[:] = data[offset : offset + len(buffer)]

    def stat(self, key: str) -> ObjectInfo:
        with self._operation("stat", key):
            if key not in self.objects:
                raise NotFoundError(f"no {key}", key=key)
            return ObjectInfo(key, len(self.objects[key]), self.times.get(key))

    def list(self, prefix: str) -> Iterator[ObjectInfo]:
        with self._operation("list", prefix):
            found = [
                ObjectInfo(k, len(v), self.times.get(k))
                for k, v in sorted(self.objects.items())
                if k.startswith(prefix)
            ]
        return iter(found)

    def delete(self, keys: Iterable[str]) -> None:
        for key in keys:  # one by one, so that a crash can fall between two
            with self._operation("delete", key):
                self.objects.pop(key, None)
                self.times.pop(key, None)


def lose_answer(store: FakeStore, prefix: str, times: int = 1) -> None:
    """The next `times` creates below `prefix` take effect, but their answer is lost."""
    left = [times]

    def after(verb: str, key: str) -> None:
        if verb == "put" and key.startswith(prefix) and left[0]:
            left[0] -= 1
            raise TransientError("connection reset")

    store.after = after


class Interleaved:
    """Two processes on one store that take turns as told: each runs in a thread, one operation of the store at a time.

    Args:
        store: what they share; each is given a twin.
        one, two: what they do.
    """

    def __init__(self, store: FakeStore, one: Callable[[FakeStore], Any], two: Callable[[FakeStore], Any]) -> None:
        self.answers: list[Any] = [None, None]
        self.counts = [0, 0]
        self._go = [threading.Semaphore(0), threading.Semaphore(0)]
        self._paused = [threading.Semaphore(0), threading.Semaphore(0)]
        self._done = [False, False]
        self._threads = [
            threading.Thread(target=self._run, args=(i, store.twin(), work), daemon=True)
            for i, work in enumerate((one, two))
        ]
        for i, thread in enumerate(self._threads):
            thread.start()
            self._paused[i].acquire()

    def _run(self, i: int, twin: FakeStore, work: Callable[[FakeStore], Any]) -> None:
        def before(verb: str, key: str) -> None:
            self._paused[i].release()
            self._go[i].acquire()
            self.counts[i] += 1

        twin.before = before
        try:
            self.answers[i] = work(twin)
        except Exception as error:
            self.answers[i] = error
        self._done[i] = True
        self._paused[i].release()

    def step(self, i: int, operations: int | None = None) -> bool:
        """Let process `i` do so many operations; None: all that are left. Whether it goes on after them."""
        while not self._done[i] and operations != 0:
            self._go[i].release()
            self._paused[i].acquire()
            operations = None if operations is None else operations - 1
        return not self._done[i]

    def finish(self) -> list[Any]:
        """Let both end, the first first; what they returned or raised."""
        self.step(0)
        self.step(1)
        for thread in self._threads:
            thread.join()
        return self.answers


def write_attempt(store: Storage, attempt: str, *, seed: int = 0, world: int = 2, rows: int = 40_000) -> bytes:
    """All of an attempt but the commit record, in write order; returns the bytes of its manifest.

    `model.weight` is float32 [rows, 2], split by rows over the ranks; each rank has a `rank.<r>.rng`; two values.
    """
    ref = keys.parse_attempt(attempt)
    assert ref is not None
    parts = []
    share = -(-rows // world)
    for rank in range(world):
        first, last = min(rank * share, rows), min((rank + 1) * share, rows)
        weight = bytes((seed + rank + i * 7) % 251 for i in range((last - first) * 8))
        rng = bytes([rank + 1, seed % 256]) * 50
        raw = b"head" + weight + b"-gap-" + rng + b"tail"
        blocks = bytearray()
        second = append_block_digests(blocks, weight)
        append_block_digests(blocks, rng)
        name = keys.data_name(rank, 0)
        objects = [_put(store, attempt, name, raw), _put(store, attempt, keys.digests_name(name), bytes(blocks))]
        objects[0].rest = digest_of(b"head" + b"-gap-" + b"tail")
        piece = schema.Piece(
            offsets=[first, 0], sizes=[last - first, 2], object=0, at=4, size_bytes=len(weight), block=0
        )
        own = schema.Piece(offsets=[0], sizes=[100], object=0, at=9 + len(weight), size_bytes=100, block=second)
        part = schema.ManifestPart(
            format=1,
            rank=rank,
            objects=objects,
            tensors={
                "model.weight": schema.TensorRecord(dtype="float32", shape=[rows, 2], pieces=[piece]),
                f"rank.{rank}.rng": schema.TensorRecord(dtype="uint8", shape=[100], pieces=[own]),
            },
            values={"step": ref.step, "lr": 0.5} if rank == 0 else {},
            tree={
                **({"model": {"weight": {"$ref": "model.weight"}}} if rank == 0 else {}),
                "rank": {str(rank): {"rng": {"$ref": f"rank.{rank}.rng"}}},
            },
        )
        record = _put(store, attempt, keys.part_name(rank), schema.encode(part))
        parts.append(schema.PartRef(rank=rank, name=record.name, size_bytes=record.size_bytes, digest=record.digest))
    metadata = _put(store, attempt, keys.METADATA, b"stock metadata")
    root = schema.Manifest(
        format=1,
        step=ref.step,
        attempt=attempt,
        world=world,
        digest="xxh3_128",
        parts=parts,
        objects=[metadata],
        ties={"head.weight": "model.weight"},
    )
    data = schema.encode(root)
    _put(store, attempt, keys.MANIFEST, data)
    return data


def save(
    store: Storage, writer: RunWriter, step: int, *, world: int = 2, rows: int = 20, non_finite: int | None = None
) -> CheckpointRef:
    """One whole save, small."""
    attempt = writer.begin_attempt(step)
    try:
        manifest = write_attempt(store, attempt, seed=step, world=world, rows=rows)
        check_folder(store, attempt, {keys.MANIFEST: len(manifest)})
    except Exception:
        writer.abandon(attempt)
        raise
    return commit(writer, attempt, manifest, world, non_finite)


def commit(
    writer: RunWriter, attempt: str, manifest: bytes, world: int = 2, non_finite: int | None = None
) -> CheckpointRef:
    """The end of a save."""
    return writer.commit(
        attempt,
        manifest_size_bytes=len(manifest),
        manifest_digest=digest_of(manifest),
        world=world,
        metrics={"loss": 1.5},
        reasons=["test"],
        non_finite=non_finite,
    )


def manager(store: Storage, which: CheckpointRef | None = None, nonce: str | None = None) -> RunWriter:
    """A writer that has restored the newest checkpoint, or `which`."""
    writer = RunWriter(store, clock=FakeClock(), nonce=nonce)
    catalog = discover(store)
    writer.saw_restore(catalog, which or catalog.newest)
    return writer


def steps(catalog: Catalog) -> list[int]:
    """Steps of the lineage."""
    return [ref.step for ref in catalog.lineage]


def forged(record: dict[str, Any]) -> bytes:
    """A small record as somebody would write it who keeps to the format, whatever is in it: with a check that fits."""
    record.pop("check", None)
    return schema.seal(json.dumps(record).encode())


def edited(data: bytes, old: bytes, new: bytes) -> bytes:
    """A small record with `old` in it made `new`, and its check made right again."""
    body = data[: data.rindex(b',"check":"')]
    assert old in body
    return schema.seal(body.replace(old, new, 1) + b"}")


def _put(store: Storage, attempt: str, name: str, data: bytes) -> schema.ObjectRecord:
    store.put(keys.attempt_key(attempt, name), data)
    return schema.ObjectRecord(name=name, size_bytes=len(data), digest=digest_of(data))
