"""Exactly the bytes this rank needs, checked, into place: the reader and planner under `dcp.load`.

DCP's own reader loads every saved piece whole and narrows afterwards, so N ranks read everything N times; and it checks
no content. This one knows from the manifest where the raw bytes lie and what their digests are.
"""

from __future__ import annotations

import io
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import torch
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata
from torch.distributed.checkpoint.planner import LoadPlan, LoadPlanner, ReadItem
from torch.distributed.checkpoint.storage import StorageReader
from torch.futures import Future

from ..errors import InternalError, RestoreError
from ..ranks import portable
from ..records.digests import BLOCK_SIZE, DIGEST_SIZE, block_count, verify_blocks
from ..records.manifest import LoadedManifest, PlacedPiece
from ..storage.base import Storage
from . import dcp
from .boxes import Box, Span, split
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
        self._state: dict[str, torch.Tensor] = state_dict
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
    item: ReadItem
    piece: PlacedPiece
    target: torch.Tensor
    span: Span


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
                    for _ in pool.map(self._fetch, reads):
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
        return [_Read(item, piece, target, span) for span in split(box)]

    def _fetch(self, read: _Read) -> None:
        span, box = read.span, read.span.box
        target = read.target
        for dim, (start, length) in enumerate(zip(span.within, box.lengths, strict=True)):
            target = target.narrow(dim, start, length)
        if box.one_run and target.is_contiguous() and target.device.type == "cpu":
            self._fetch_in_place(read, _bytes_of(target))
        else:
            # Elements picked from a buffer by strides: the copy also casts the memory order and crosses devices.
            buffer = torch.empty(span.end - span.start, dtype=torch.uint8)
            view = _bytes_of(buffer)
            self._storage.read_into(read.piece.key, [(read.piece.piece.at + span.start, view)])
            self._check(read, span.first_block, view)
            elements = buffer[: buffer.numel() // box.itemsize * box.itemsize].view(target.dtype)
            offset = (box.first - span.start) // box.itemsize
            target.copy_(elements.as_strided(box.lengths, box.strides, offset))
        self._progress(box.size_bytes)

    def _fetch_in_place(self, read: _Read, target: memoryview) -> None:
        """Whole blocks straight into `target`; a partial one at either end through a buffer of its own."""
        span, at = read.span, read.piece.piece.at
        first, end = span.box.first, span.box.end
        body_start = span.start if first == span.start else min(span.start + BLOCK_SIZE, span.end)
        body_end = span.end if end == span.end else end // BLOCK_SIZE * BLOCK_SIZE
        if body_start >= body_end:  # no whole block is wanted
            body_start = body_end = span.end
        pieces = [
            (start, memoryview(bytearray(stop - start)))
            for start, stop in ((span.start, body_start), (body_end, span.end))
            if start < stop
        ]
        body = target[body_start - first : body_end - first] if body_start < body_end else memoryview(b"")
        ranges = [(at + start, buffer) for start, buffer in pieces]
        if len(body):
            ranges.append((at + body_start, body))
        self._storage.read_into(read.piece.key, ranges)
        if len(body):
            self._check(read, body_start // BLOCK_SIZE, body)
        for start, buffer in pieces:
            self._check(read, start // BLOCK_SIZE, buffer)
            low, high = max(first, start), min(end, start + len(buffer))
            target[low - first : high - first] = buffer[low - start : high - start]

    def _check(self, read: _Read, first_block: int, data: memoryview) -> None:
        where = f"{read.piece.key} (tensor {read.item.storage_index.fqn!r})"
        start = DIGEST_SIZE * (read.piece.piece.block + first_block)
        expected = self._digests_of(read.piece)[start : start + DIGEST_SIZE * block_count(len(data))]
        verify_blocks(data, expected, where, first_block)

    def _digests_of(self, piece: PlacedPiece) -> bytes:
        with self._lock:  # many reads share one digests object: fetched once, small beside the data
            if piece.digests_key not in self._digests:
                self._digests[piece.digests_key] = self._manifest.read_object(self._storage, piece.digests_key)
            return self._digests[piece.digests_key]


def _bytes_of(tensor: torch.Tensor) -> memoryview:
    return tensor.reshape(-1).view(torch.uint8).numpy().data
