"""Exactly the bytes this rank needs, checked, into place: the reader and planner under `dcp.load`.

DCP's own reader loads every saved piece whole and narrows afterwards, so N ranks read everything N times; and it checks
no content. This one knows from the manifest where the raw bytes lie and what their digests are.
"""

from __future__ import annotations

import io
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata
from torch.distributed.checkpoint.planner import LoadPlan, LoadPlanner, ReadItem
from torch.distributed.checkpoint.storage import StorageReader
from torch.futures import Future

from ..errors import IntegrityError, InternalError, NotFoundError, RestoreError
from ..ranks import portable
from ..records.digests import BLOCK_SIZE, DIGEST_SIZE, block_count, verify_blocks
from ..records.manifest import LoadedManifest, PlacedPiece
from ..storage.base import Storage
from . import dcp
from .boxes import SPAN_LIMIT, Box, Span, split
from .plan import local_tensor

__all__ = ["CheckpointReader", "Loader", "as_dtype"]


def as_dtype(name: str) -> torch.dtype:
    """The torch dtype of this name, or an error that says what is missing."""
    dtype = getattr(torch, name, None)
    if not isinstance(dtype, torch.dtype):
        raise RestoreError(
            f"the checkpoint has tensors of dtype {name!r}, which torch {torch.__version__} does not know"
        )
    return dtype


class Loader(LoadPlanner):
    """Plans the reads for tensors that are allocated like the live ones, sharded as they are.

    `dcp.load` gets these scratch tensors as its state; every one must be in the checkpoint with this shape and dtype
    (the state room compared them already).
    """

    def set_up_planner(
        self, state_dict: dict[str, Any], metadata: Metadata | None = None, is_coordinator: bool = False
    ) -> None:
        """Take the scratch tensors."""
        assert metadata is not None
        self._state: dict[str, torch.Tensor] = state_dict[dcp.ALL]
        self._metadata = metadata

    def create_local_plan(self) -> LoadPlan:
        """One read item per overlap of a saved piece and this rank's part."""
        items: list[ReadItem] = []
        for key, tensor in self._state.items():
            saved = self._metadata.state_dict_metadata[key]
            assert isinstance(saved, TensorStorageMetadata)
            items += dcp.read_items(key, saved, tensor)
        return LoadPlan(items)

    def create_global_plan(self, global_plan: list[LoadPlan]) -> list[LoadPlan]:
        """Each rank reads for itself."""
        return global_plan

    def finish_plan(self, central_plan: LoadPlan) -> LoadPlan:
        """As planned."""
        return central_plan

    def load_bytes(self, read_item: ReadItem, value: io.BytesIO) -> None:
        """Never called: values come from the manifest."""
        raise InternalError(f"a value was asked for as bytes: {read_item.dest_index.fqn}")

    def resolve_tensor(self, read_item: ReadItem) -> torch.Tensor:
        """The view of the scratch tensor that this item fills."""
        tensor = local_tensor(self._state[read_item.dest_index.fqn])
        for dim, (start, length) in enumerate(zip(read_item.dest_offsets, read_item.lengths, strict=True)):
            tensor = tensor.narrow(dim, start, length)
        return tensor

    def commit_tensor(self, read_item: ReadItem, tensor: torch.Tensor) -> None:
        """Filled in place already."""


@dataclass(frozen=True)
class _Read:
    """One span: where to read from, into which buffers, and what to do once they are filled.

    Attributes:
        piece: the saved piece.
        start: offset of the span in the object, in bytes.
        size_bytes: length of the span.
        wanted_bytes: of them asked for.
        prepare: makes the buffers; returns the ranges to fill, and the step that checks them and puts them in place.
    """

    piece: PlacedPiece
    start: int
    size_bytes: int
    wanted_bytes: int
    prepare: Callable[[], tuple[list[tuple[int, memoryview]], Callable[[], None]]]


class CheckpointReader(StorageReader):
    """Reads one of our own checkpoints by its manifest.

    Args:
        storage: the run's store.
        manifest: verified root and parts.
        progress: called with the number of bytes of each finished read.
    """

    def __init__(
        self, storage: Storage, manifest: LoadedManifest, progress: Callable[[int], None] | None = None
    ) -> None:
        super().__init__()
        self._storage = storage
        self._manifest = manifest
        self._progress = progress or (lambda size_bytes: None)
        self._digests: dict[str, bytes] = {}
        self._lock = threading.Lock()

    def reset(self, checkpoint_id: Any = None) -> None:
        """A reader is for one checkpoint; there is nothing to reset."""

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        """DCP's metadata, made from the manifest: nothing is unpickled."""
        return Metadata(
            {
                key: dcp.tensor_metadata(
                    as_dtype(tensor.dtype), tensor.shape, ((p.piece.offsets, p.piece.sizes) for p in tensor.pieces)
                )
                for key, tensor in self._manifest.tensors.items()
            }
        )

    def set_up_storage_reader(self, metadata: Metadata, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        """Nothing: all is known from the start."""

    def prepare_local_plan(self, plan: LoadPlan) -> LoadPlan:
        """As planned."""
        return plan

    def prepare_global_plan(self, plans: list[LoadPlan]) -> list[LoadPlan]:
        """As planned."""
        return plans

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        """Fill every item, several reads at a time. Errors become portable ones here."""
        try:
            reads = [read for item in plan.items for read in self._reads(item, planner)]
            workers = max(1, self._storage.capabilities.concurrency)
            with ThreadPoolExecutor(workers, thread_name_prefix="resilio-read") as pool:
                try:
                    for _ in pool.map(self._fetch, _batches(reads)):
                        pass
                except BaseException:
                    pool.shutdown(wait=True, cancel_futures=True)
                    raise
        except Exception as error:
            raise portable(error, RestoreError) from error
        future: Future[None] = Future()
        future.set_result(None)
        return future

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: Any) -> bool:
        """Never chosen by DCP itself."""
        return False

    def _reads(self, item: ReadItem, planner: LoadPlanner) -> list[_Read]:
        tensor = self._manifest.tensors[item.storage_index.fqn]
        assert item.storage_index.index is not None
        piece = tensor.pieces[item.storage_index.index]
        target = planner.resolve_tensor(item)
        if target.numel() == 0:
            return []
        sizes = tuple(piece.piece.sizes)
        box = Box(sizes, tuple(item.storage_offsets), tuple(item.lengths), target.element_size())
        where = f"{piece.key} (tensor {item.storage_index.fqn!r})"
        return [self._read(piece, span, _narrow(target, span), where) for span in split(box)]

    def _read(self, piece: PlacedPiece, span: Span, target: torch.Tensor, where: str) -> _Read:
        in_place = span.box.one_run and target.is_contiguous() and target.device.type == "cpu"
        way = self._in_place if in_place else self._picked
        return _Read(
            piece,
            piece.piece.at + span.start,
            span.end - span.start,
            span.box.size_bytes,
            partial(way, piece, span, target, where),
        )

    def _fetch(self, batch: list[_Read]) -> None:
        """Read spans of one object in one request, then check and place each."""
        prepared = [read.prepare() for read in batch]
        key = batch[0].piece.key
        try:
            self._storage.read_into(key, [one for ranges, _ in prepared for one in ranges])
        except NotFoundError as error:  # the manifest says that it is there
            raise IntegrityError(f"{self._storage.url}: {key} is missing", where=key, missing=True) from error
        for _, place in prepared:
            place()
        self._progress(sum(read.wanted_bytes for read in batch))

    def _picked(
        self, piece: PlacedPiece, span: Span, target: torch.Tensor, where: str
    ) -> tuple[list[tuple[int, memoryview]], Callable[[], None]]:
        """Elements picked from a buffer by strides: the copy also changes the memory order and crosses devices."""
        box = span.box
        buffer = torch.empty(span.end - span.start, dtype=torch.uint8, device="cpu")

        def place() -> None:
            self._check(piece, span.first_block, _bytes_of(buffer), where)
            elements = buffer[: buffer.numel() // box.itemsize * box.itemsize].view(target.dtype)
            target.copy_(elements.as_strided(box.lengths, box.strides, (box.first - span.start) // box.itemsize))

        return [(piece.piece.at + span.start, _bytes_of(buffer))], place

    def _in_place(
        self, piece: PlacedPiece, span: Span, target: torch.Tensor, where: str
    ) -> tuple[list[tuple[int, memoryview]], Callable[[], None]]:
        """Whole blocks straight into `target`; a partial one at either end through a buffer of its own."""
        at, live = piece.piece.at, _bytes_of(target)
        first, end = span.box.first, span.box.end
        body_start = span.start if first == span.start else min(span.start + BLOCK_SIZE, span.end)
        body_end = span.end if end == span.end else end // BLOCK_SIZE * BLOCK_SIZE
        if body_start >= body_end:  # no whole block is wanted
            body_start = body_end = span.end
        partials = [
            (start, memoryview(bytearray(stop - start)))
            for start, stop in ((span.start, body_start), (body_end, span.end))
            if start < stop
        ]
        body = live[body_start - first : body_end - first] if body_start < body_end else memoryview(b"")

        def place() -> None:
            if len(body):
                self._check(piece, body_start // BLOCK_SIZE, body, where)
            for start, buffer in partials:
                self._check(piece, start // BLOCK_SIZE, buffer, where)
                low, high = max(first, start), min(end, start + len(buffer))
                live[low - first : high - first] = buffer[low - start : high - start]

        ranges = [(at + start, buffer) for start, buffer in partials]
        return ([*ranges, (at + body_start, body)] if len(body) else ranges), place

    def _check(self, piece: PlacedPiece, first_block: int, data: memoryview, where: str) -> None:
        start = DIGEST_SIZE * (piece.piece.block + first_block)
        expected = self._digests_of(piece)[start : start + DIGEST_SIZE * block_count(len(data))]
        verify_blocks(data, expected, where, first_block)

    def _digests_of(self, piece: PlacedPiece) -> bytes:
        with self._lock:  # many reads share one digests object: fetched once, small beside the data
            if piece.digests_key not in self._digests:
                self._digests[piece.digests_key] = self._manifest.read_object(self._storage, piece.digests_key)
            return self._digests[piece.digests_key]


def _batches(reads: list[_Read]) -> Iterator[list[_Read]]:
    """Reads of one object, in the order of its bytes, until a request is large enough: most tensors are small."""
    batch: list[_Read] = []
    size = 0
    for read in sorted(reads, key=lambda read: (read.piece.key, read.start)):
        if batch and (size + read.size_bytes > SPAN_LIMIT or read.piece.key != batch[0].piece.key):
            yield batch
            batch, size = [], 0
        batch.append(read)
        size += read.size_bytes
    if batch:
        yield batch


def _narrow(target: torch.Tensor, span: Span) -> torch.Tensor:
    for dim, (start, length) in enumerate(zip(span.within, span.box.lengths, strict=True)):
        target = target.narrow(dim, start, length)
    return target


def _bytes_of(tensor: torch.Tensor) -> memoryview:
    return tensor.reshape(-1).view(torch.uint8).numpy().data
