"""Each rank's bytes onto storage: one data object, its block digests, its part of the manifest.

A tensor inside the data object is the small zip that `torch.save` makes, so plain DCP can read it. The raw bytes lie in
it uncompressed and reach the stream as one write straight from the tensor's memory; noting where that write fell is
what lets our reader skip the zip and read exactly the bytes it needs.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner, WriteItem, WriteItemType
from torch.distributed.checkpoint.storage import StorageWriter, WriteResult
from torch.futures import Future

from .. import failpoints
from ..errors import InternalError, SaveError
from ..ranks import portable
from ..records import keys
from ..records.digests import DIGEST_SIZE, TAMPER_EVIDENT, Digester, append_block_digests, digest_of
from ..records.schema import FORMAT, ManifestPart, ObjectRecord, PartRef, Piece, TensorRecord, encode
from ..storage.base import Storage, Writer
from . import dcp, health, trained
from .health import NOT_COUNTED, Health
from .pieces import PieceFacts
from .plan import LocalPlan
from .trained import UNKNOWN, Trained

__all__ = ["AttemptWriter", "Root"]

# A key no state can have: the report of a rank to rank 0 rides along with DCP's own results.
_PART = MetadataIndex("\0resilio")
_SMALL = 256 * 1024  # bytes; below, a copy costs less than a call


@dataclass(frozen=True)
class Root:
    """What rank 0 knows when all ranks have written.

    Attributes:
        metadata: bytes of `.metadata`.
        parts: all ranks' manifest parts.
        sizes: name -> length in bytes of every object the ranks wrote.
        ties: flat key -> the flat key whose bytes it shares.
        trained: what it says of the progress of training.
        health: what it says of values that are not finite.
    """

    metadata: bytes
    parts: list[PartRef]
    sizes: dict[str, int]
    ties: dict[str, str]
    trained: Trained = UNKNOWN
    health: Health = NOT_COUNTED


class AttemptWriter(StorageWriter):
    """Writes one attempt.

    Args:
        storage: the run's store.
        attempt: name of the attempt's folder.
        local: this rank's plan.
        rank: this process.
        digest: algorithm of the whole-object digests.
        fingerprints: whether to compute those of what is written.
        arrive: called with what went wrong here, or None: raises on all ranks if one is missing or has failed.

    Attributes:
        root: on rank 0, what all ranks have written, once they have.
    """

    def __init__(
        self,
        storage: Storage,
        attempt: str,
        local: LocalPlan,
        rank: int,
        digest: str,
        fingerprints: bool,
        arrive: Callable[[BaseException | None], None],
    ) -> None:
        super().__init__()
        self._storage = storage
        self._attempt = attempt
        self._local = local
        self._rank = rank
        self._digest = digest
        self._fingerprints = fingerprints
        self._arrive = arrive
        self.root: Root | None = None

    def reset(self, checkpoint_id: Any = None) -> None:
        """A writer is for one attempt; there is nothing to reset."""

    # DCP looks for a parameter literally named `kwargs` before it passes the rank.
    def set_up_storage_writer(self, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        """Nothing: all is known from the start."""

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        """As planned."""
        return plan

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        """As planned."""
        return plans

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        """Write this rank's objects, each durable when this returns, and wait for those of the other ranks.

        So DCP's collective, which comes next, is never open while somebody writes, however long that takes.
        """
        results: list[WriteResult] = []
        failure: BaseException | None = None
        try:
            results = self._write(plan, planner)
        except BaseException as error:  # noqa: BLE001  told to all ranks, which raise it together; a Ctrl-C as well
            failure = error
        self._arrive(failure)
        future: Future[list[WriteResult]] = Future()
        future.set_result(results)
        return future

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        """Rank 0: gather the ranks' reports. The commit comes when DCP has closed its collective."""
        try:
            where: dict[MetadataIndex, Any] = {}
            parts: list[PartRef] = []
            sizes: dict[str, int] = {}
            shares: list[tuple[Trained, Health]] = []
            for result in (one for of_rank in results for one in of_rank):
                if result.index == _PART:
                    part, written, share = result.storage_data
                    shares.append(share)
                    parts.append(part)
                    sizes.update(written)
                else:
                    where[result.index] = result.storage_data
            failpoints.hit("save.before_metadata", self._rank)
            data = dcp.finish_metadata(metadata, where, self._local.ties, self._attempt)
            progress, condition = zip(*shares, strict=True)
            self.root = Root(
                data, parts, sizes, self._local.ties, trained.together(progress), health.together(condition)
            )
        except Exception as error:
            raise portable(error, SaveError) from error

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: Any) -> bool:
        """Never chosen by DCP itself."""
        return False

    def _write(self, plan: SavePlan, planner: SavePlanner) -> list[WriteResult]:
        failpoints.hit("save.data_open", self._rank)
        name = keys.data_name(self._rank, 0)
        data = _DataObject(self._digest)
        results: list[WriteResult] = []
        tensors: dict[str, TensorRecord] = {}
        # torch.save's CRC32 would be the slowest pass over the data, and our digests cover the same bytes.
        # Thread-local.
        crc = torch.serialization.get_crc32_options()
        torch.serialization.set_crc32_options(False)
        try:
            key = keys.attempt_key(self._attempt, name)
            facts = PieceFacts(fingerprints=self._fingerprints)
            with self._storage.writer(key, size_hint=_size_hint(plan)) as sink, facts:
                data.sink = sink
                for item in plan.items:
                    start = data.tell()
                    resolved = planner.resolve_data(item)
                    if isinstance(resolved, torch.Tensor):
                        plain = row_major(resolved)
                        piece = self._note(tensors, item)
                        facts.begin(piece, plain)
                        piece.at, piece.size_bytes, piece.block = data.write_tensor(plain)
                    else:
                        data.write(resolved.getbuffer())
                    info = dcp.storage_info(name, start, data.tell() - start)
                    results.append(WriteResult(item.index, data.tell() - start, info))
                data.hand_on(b"")
        finally:
            torch.serialization.set_crc32_options(crc)
        failpoints.hit("save.data_written", self._rank)
        objects = [ObjectRecord(name=name, size_bytes=data.tell(), digest=data.digest.text(), rest=data.rest())]
        objects.append(self._put(keys.digests_name(name), bytes(data.blocks)))
        written_values = {item.index.fqn for item in plan.items if item.type == WriteItemType.BYTE_IO}
        part = ManifestPart(
            format=FORMAT,
            rank=self._rank,
            objects=objects,
            tensors=tensors,
            values={key: value for key, value in self._local.values.items() if key in written_values},
            tree=self._local.tree,
            counted=True,
        )
        of_part = self._put(keys.part_name(self._rank), encode(part))
        failpoints.hit("save.part_written", self._rank)
        ref = PartRef(rank=self._rank, name=of_part.name, size_bytes=of_part.size_bytes, digest=of_part.digest)
        sizes = {one.name: one.size_bytes for one in [*objects, of_part]}
        share = (
            trained.summary(self._local.structure.trained, tensors, self._local.values),
            health.summary(self._local.structure.finite, tensors),
        )
        return [*results, WriteResult(_PART, of_part.size_bytes, (ref, sizes, share))]

    def _put(self, name: str, data: bytes) -> ObjectRecord:
        self._storage.put(keys.attempt_key(self._attempt, name), data)
        return ObjectRecord(name=name, size_bytes=len(data), digest=digest_of(data, self._digest))

    def _note(self, tensors: dict[str, TensorRecord], item: WriteItem) -> Piece:
        assert item.tensor_data is not None
        key = item.index.fqn
        dtype, shape, order = self._local.specs[key]
        record = tensors.setdefault(key, TensorRecord(dtype=dtype, shape=shape, pieces=[], order=order))
        chunk = item.tensor_data.chunk
        # Where its bytes are is known when they are written.
        piece = Piece(offsets=list(chunk.offsets), sizes=list(chunk.sizes), object=0, at=0, size_bytes=0, block=0)
        record.pieces.append(piece)
        return piece


class _DataObject:
    """The stream `torch.save` writes into: counts, digests, and notices the raw bytes of the tensor passing by."""

    def __init__(self, algorithm: str) -> None:
        self.sink: Writer | None = None
        self.digest = Digester(algorithm)
        self.blocks = bytearray()
        self._rest = None if algorithm in TAMPER_EVIDENT else Digester(algorithm)
        self._between = bytearray()  # what `_rest` has yet to take
        self._position = 0
        self._awaited: tuple[int, int] | None = None  # address and length of the tensor being written
        self._seen_at: list[int] = []  # where its bytes went
        self._failure: Exception | None = None
        # torch.save makes 39 small writes for each tensor: handed on one by one they would cost more than the tensors.
        self._small = bytearray()

    def tell(self) -> int:
        return self._position

    def rest(self) -> str | None:
        """The digest over what is in no tensor; None where that and block digests are no match for `digest`."""
        if self._rest is None:
            return None
        self._rest.update(self._between)
        self._between.clear()
        return self._rest.text()

    def flush(self) -> None:
        pass

    def write(self, data: bytes | memoryview) -> int:
        if self._failure is not None:  # torch.save still closes its zip
            raise self._failure
        view = memoryview(data).cast("B")
        if self._awaited is not None and len(view) == self._awaited[1] and _address(view) == self._awaited[0]:
            self._seen_at.append(self._position)
            append_block_digests(self.blocks, view)
        elif self._rest is not None:
            self._between += view
            if len(self._between) >= _SMALL:
                self.rest()
        if len(view) < _SMALL:
            self._small += view
            if len(self._small) >= _SMALL:
                self.hand_on(b"")
        else:
            self.hand_on(view)
        self._position += len(view)
        return len(view)

    def hand_on(self, view: bytes | memoryview) -> None:
        """Pass what was collected, then `view`, to storage."""
        assert self.sink is not None
        small, self._small = self._small, bytearray()
        try:
            for data in (small, view):
                if len(data):
                    self.sink.write(data)
                    self.digest.update(data)
        except Exception as error:
            self._failure = error
            raise

    def write_tensor(self, tensor: torch.Tensor) -> tuple[int, int, int]:
        """Append `tensor`, as `row_major` made it, as `torch.save` would; return offset and number of its raw bytes,
        and its first block's index.
        """
        block = len(self.blocks) // DIGEST_SIZE
        if tensor.numel() == 0:
            self._save(tensor)
            return self._position, 0, block
        self._awaited = tensor.data_ptr(), tensor.nbytes
        self._seen_at.clear()
        self._save(tensor)
        self._awaited = None
        if len(self._seen_at) != 1:
            raise InternalError(
                f"torch {torch.__version__} did not write the bytes of a tensor from its own memory (shape "
                f"{tuple(tensor.shape)}, {tensor.dtype}); this resilio does not know that way of torch.save"
            )
        return self._seen_at[0], tensor.nbytes, block

    def _save(self, tensor: torch.Tensor) -> None:
        try:
            torch.save(tensor, self)  # type: ignore[arg-type]  # write and flush are all it uses
        except RuntimeError as error:
            # On its way out torch.save closes its zip, finds it cut short, and says that instead of what happened.
            if self._failure is not None:
                raise self._failure from None
            if error.__context__ is not None and not isinstance(error.__context__, Exception):
                raise error.__context__ from None  # a Ctrl-C
            raise


def row_major(tensor: torch.Tensor) -> torch.Tensor:
    """`tensor` on the CPU, as the bytes to be written: itself where it has a storage of its own and lies so."""
    tensor = tensor.detach().cpu()
    whole = tensor.untyped_storage().nbytes() == tensor.nbytes
    if not (tensor.is_contiguous() and whole) or tensor.is_conj() or tensor.is_neg():
        # torch.save writes whole storages: a view would drag its base along
        tensor = tensor.clone(memory_format=torch.contiguous_format).resolve_conj().resolve_neg()
    return tensor


def _address(view: memoryview) -> int:
    return int(np.frombuffer(view, dtype=np.uint8).__array_interface__["data"][0]) if len(view) else 0


def _size_hint(plan: SavePlan) -> int:
    total = 0
    for item in plan.items:
        if item.tensor_data is not None:
            total += item.tensor_data.chunk.sizes.numel() * item.tensor_data.properties.dtype.itemsize
    return total
