"""Exactly the bytes this rank needs, checked, into place: the reader under `dcp.load`.

DCP's own reader loads every saved piece whole and narrows afterwards, so N ranks read everything N times; and it checks
no content. This one knows from the manifest where the raw bytes lie and what their digests are.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.planner import LoadPlan, LoadPlanner, ReadItem

from ..errors import IntegrityError, NotFoundError
from ..ranks import Ranks
from ..records.boxes import SPAN_LIMIT, Box, Run, Span, cut, split
from ..records.digests import BLOCK_SIZE, DIGEST_SIZE, bad_blocks, block_count
from ..records.manifest import LoadedManifest, PlacedPiece
from ..records.problems import bad_blocks_of, joined
from ..storage.base import Storage
from . import dcp
from .loading import ParallelReader, as_dtype

__all__ = ["CheckpointReader"]


_Prepared = tuple[list[tuple[int, memoryview]], Callable[[], None]]
_Prepare = Callable[[], _Prepared]


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
    prepare: _Prepare


class CheckpointReader(ParallelReader):
    """Reads one of our own checkpoints by its manifest.

    Args:
        storage: the run's store.
        manifest: verified root and parts.
        ranks: that read together.
        progress: called with the number of bytes of each finished read.
        check_only: flat keys of tensors that are read and checked, and not touched.
    """

    def __init__(
        self,
        storage: Storage,
        manifest: LoadedManifest,
        ranks: Ranks,
        progress: Callable[[int], None] | None = None,
        check_only: Collection[str] = (),
    ) -> None:
        super().__init__(storage, ranks, progress)
        self._manifest = manifest
        self._check_only = check_only
        self._digests: dict[str, bytes | IntegrityError] = {}
        self._lock = threading.Lock()

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

    def tasks(self, plan: LoadPlan, planner: LoadPlanner) -> Iterator[Callable[[], None]]:
        """Batches of spans of one object."""
        reads = [read for item in plan.items for read in self._reads(item, planner)]
        for batch in _batches(reads):
            yield partial(self._fetch, batch)

    def _reads(self, item: ReadItem, planner: LoadPlanner) -> list[_Read]:
        name = item.storage_index.fqn
        assert item.storage_index.index is not None
        piece = self._manifest.tensors[name].pieces[item.storage_index.index]
        target = planner.resolve_tensor(item)
        if target.numel() == 0:
            return []
        box = Box(tuple(piece.piece.sizes), tuple(item.storage_offsets), tuple(item.lengths), target.element_size())

        def read(span: Run | Span, wanted_bytes: int, way: _Prepare) -> _Read:
            if name in self._check_only:
                way = partial(self._checked, piece, span, name)
            return _Read(piece, piece.piece.at + span.start, span.end - span.start, wanted_bytes, way)

        if box.one_run and target.is_contiguous() and target.device.type == "cpu":
            live, begin = _bytes_of(target), box.first
            return [
                read(
                    run,
                    run.stop - run.first,
                    partial(self._in_place, piece, run, live[run.first - begin : run.stop - begin], name),
                )
                for run in cut(box)
            ]
        return [
            read(span, span.box.size_bytes, partial(self._picked, piece, span, _narrow(target, span), name))
            for span in split(box)
        ]

    def _fetch(self, batch: list[_Read]) -> None:
        """Read spans of one object in one request, then check and place each."""
        prepared = [read.prepare() for read in batch]
        key = batch[0].piece.key
        try:
            self._storage.read_into(key, [one for ranges, _ in prepared for one in ranges])
        except NotFoundError as error:  # the manifest says that it is there
            raise IntegrityError(f"{self._storage.url}: {key} is missing", where=key, missing=True) from error
        failed: list[IntegrityError] = []
        for _, place in prepared:
            try:
                place()
            except IntegrityError as error:
                failed.append(error)
        if failed:
            raise joined(failed, key)
        self._progress(sum(read.wanted_bytes for read in batch))

    def _checked(self, piece: PlacedPiece, span: Run | Span, name: str) -> _Prepared:
        """Nothing is kept of it."""
        buffer = torch.empty(span.end - span.start, dtype=torch.uint8, device="cpu").numpy().data
        return [(piece.piece.at + span.start, buffer)], lambda: self._check(
            piece, span.start // BLOCK_SIZE, buffer, name
        )

    def _picked(self, piece: PlacedPiece, span: Span, target: torch.Tensor, name: str) -> _Prepared:
        """Elements picked from a buffer by strides: the copy also changes the memory order and crosses devices."""
        box = span.box
        buffer = torch.empty(span.end - span.start, dtype=torch.uint8, device="cpu")

        def place() -> None:
            self._check(piece, span.first_block, _bytes_of(buffer), name)
            elements = buffer[: buffer.numel() // box.itemsize * box.itemsize].view(target.dtype)
            target.copy_(elements.as_strided(box.lengths, box.strides, (box.first - span.start) // box.itemsize))

        return [(piece.piece.at + span.start, _bytes_of(buffer))], place

    def _in_place(self, piece: PlacedPiece, span: Run, live: memoryview, name: str) -> _Prepared:
        """Whole blocks straight into `live`; a partial one at either end through a buffer of its own."""
        at, first, end = piece.piece.at, span.first, span.stop
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
                self._check(piece, body_start // BLOCK_SIZE, body, name)
            for start, buffer in partials:
                self._check(piece, start // BLOCK_SIZE, buffer, name)
                low, high = max(first, start), min(end, start + len(buffer))
                live[low - first : high - first] = buffer[low - start : high - start]

        ranges = [(at + start, buffer) for start, buffer in partials]
        return ([*ranges, (at + body_start, body)] if len(body) else ranges), place

    def _check(self, piece: PlacedPiece, first_block: int, data: memoryview, name: str) -> None:
        start = DIGEST_SIZE * (piece.piece.block + first_block)
        expected = self._digests_of(piece)[start : start + DIGEST_SIZE * block_count(len(data))]
        bad = bad_blocks(data, expected)
        if bad:
            problem = bad_blocks_of(piece.key, name, piece.piece.at, [first_block + number for number in bad])
            raise IntegrityError(str(problem), where=piece.key, problems=[problem])

    def _digests_of(self, piece: PlacedPiece) -> bytes:
        with self._lock:  # many reads share one digests object: fetched once, small beside the data
            key = piece.digests_key
            if key not in self._digests:
                try:
                    self._digests[key] = self._manifest.read_object(self._storage, key)
                except IntegrityError as error:  # for each of its pieces
                    self._digests[key] = error
            found = self._digests[key]
        if isinstance(found, IntegrityError):
            raise IntegrityError(str(found), **found.facts)
        return found


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
    # Not reshape(-1): a single element of a larger tensor counts as contiguous, and keeps a stride that is not 1.
    return tensor.as_strided((tensor.numel(),), (1,)).view(torch.uint8).numpy().data
