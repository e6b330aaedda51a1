"""Whole tensors of a checkpoint as numpy arrays, a slab at a time: in bounded memory, each byte checked, without torch.

A slab is a box of a tensor; slabs come in row-major order, so their bytes one after the other are those of the tensor.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping, Sequence
from itertools import product
from math import prod
from typing import Any, Protocol

import numpy as np

from ..errors import IntegrityError, NotFoundError
from ..storage.base import Storage
from .boxes import Box, Span, split
from .digests import BLOCK_SIZE, DIGEST_SIZE, block_count, verify_blocks
from .manifest import ITEMSIZE, LoadedManifest, PlacedPiece, SavedTensor
from .read_ahead import in_order, readers

__all__ = ["SLAB_LIMIT", "WORDS", "Held", "Reads", "Slab", "TensorReader", "slabs"]

SLAB_LIMIT = 16 << 20  # bytes: large requests, and a few of them in memory

Slab = tuple[tuple[int, ...], tuple[int, ...]]  # offsets and lengths

# Bits are moved as they are, whatever they mean.
WORDS: dict[int, Any] = {
    1: np.dtype("u1"),
    2: np.dtype("<u2"),
    4: np.dtype("<u4"),
    8: np.dtype("<u8"),
    16: np.dtype("<c16"),
}


def slabs(shape: Sequence[int], itemsize: int, limit: int = SLAB_LIMIT) -> Iterator[Slab]:
    """Boxes of at most about `limit` bytes that tile a tensor in row-major order; none of one without elements."""
    if 0 in shape:
        return
    if not shape:
        yield (), ()
        return
    row_bytes = [itemsize * prod(shape[dim + 1 :]) for dim in range(len(shape))]
    dim = next(dim for dim, size in enumerate(row_bytes) if size <= limit or dim == len(shape) - 1)
    rows = max(1, limit // row_bytes[dim])
    rest = len(shape) - dim - 1
    for index in product(*(range(n) for n in shape[:dim])):
        for start in range(0, shape[dim], rows):
            lengths = (*(1 for _ in index), min(rows, shape[dim] - start), *shape[dim + 1 :])
            yield (*index, start, *(0,) * rest), lengths


class Held(Protocol):
    """What a checkpoint holds, by flat key; see `LoadedManifest`."""

    @property
    def tensors(self) -> Mapping[str, SavedTensor]:
        """Those that are stored."""

    @property
    def ties(self) -> Mapping[str, str]:
        """Those that are another one by a second name."""

    @property
    def values(self) -> Mapping[str, Any]:
        """Tagged JSON."""

    @property
    def tree(self) -> Any:
        """Nested state, tagged JSON."""


class Reads(Protocol):
    """What reads tensors of a checkpoint, as `TensorReader` does. One without pieces has neither blocks nor digests."""

    @property
    def storage(self) -> Storage:
        """Where it lies."""

    @property
    def manifest(self) -> Held:
        """What it holds."""

    def stream(self, name: str) -> Iterator[np.ndarray[Any, Any]]:
        """The slabs of a tensor, in order, as words of its item size."""

    def slab(self, name: str, slab: Slab) -> np.ndarray[Any, Any]:
        """One box of a tensor."""

    def blocks(self, placed: PlacedPiece, first: int, last: int, name: str) -> np.ndarray[Any, Any]:
        """The bytes of blocks `first` … `last - 1` of a piece."""

    def digests(self, placed: PlacedPiece) -> memoryview:
        """The block digests of a piece."""


class TensorReader:
    """Reads tensors of one checkpoint by its manifest. Thread-safe.

    Args:
        storage: the run's.
        manifest: of the checkpoint.
    """

    def __init__(self, storage: Storage, manifest: LoadedManifest) -> None:
        self.storage = storage
        self.manifest = manifest
        self._digests: dict[str, bytes] = {}
        self._lock = threading.Lock()

    def stream(self, name: str) -> Iterator[np.ndarray[Any, Any]]:
        """The slabs of a tensor, in order, as words of its item size; the next ones are read meanwhile.

        Raises:
            IntegrityError: a byte is not what was saved, or is not there.
        """
        tensor = self.manifest.tensors[name]
        boxes = slabs(tensor.shape, ITEMSIZE[tensor.dtype])
        threads = readers(self.storage.capabilities.concurrency)
        return in_order(boxes, lambda slab: self.slab(name, slab), threads)

    def slab(self, name: str, slab: Slab) -> np.ndarray[Any, Any]:
        """One box of a tensor.

        Raises:
            IntegrityError: a byte is not what was saved, or is not there.
        """
        offsets, lengths = slab
        tensor = self.manifest.tensors[name]
        itemsize = ITEMSIZE[tensor.dtype]
        found: np.ndarray[Any, Any] = np.empty(lengths, WORDS[itemsize])
        for placed in tensor.pieces:
            piece = placed.piece
            low = [max(a, b) for a, b in zip(offsets, piece.offsets, strict=True)]
            high = [min(a + n, b + m) for a, n, b, m in zip(offsets, lengths, piece.offsets, piece.sizes, strict=True)]
            if all(a < b for a, b in zip(low, high, strict=True)):
                within = tuple(a - b for a, b in zip(low, piece.offsets, strict=True))
                part = tuple(b - a for a, b in zip(low, high, strict=True))
                place: Any = (*(slice(a - o, b - o) for a, b, o in zip(low, high, offsets, strict=True)), ...)
                self._fill(found[place], placed, Box(tuple(piece.sizes), within, part, itemsize), name)
        return found

    def blocks(self, placed: PlacedPiece, first: int, last: int, name: str) -> np.ndarray[Any, Any]:
        """The bytes of blocks `first` … `last - 1` of a piece."""
        size = min(last * BLOCK_SIZE, placed.piece.size_bytes) - first * BLOCK_SIZE
        return self._read(placed, first, size, name)

    def digests(self, placed: PlacedPiece) -> memoryview:
        """The block digests of a piece."""
        with self._lock:  # many pieces share one digests object: fetched once, small beside the data
            if placed.digests_key not in self._digests:
                self._digests[placed.digests_key] = self.manifest.read_object(self.storage, placed.digests_key)
            whole = self._digests[placed.digests_key]
        start = DIGEST_SIZE * placed.piece.block
        return memoryview(whole)[start : start + DIGEST_SIZE * block_count(placed.piece.size_bytes)]

    def _fill(self, target: np.ndarray[Any, Any], placed: PlacedPiece, box: Box, name: str) -> None:
        for span in split(box):
            data = self._read(placed, span.first_block, span.end - span.start, name)
            place = tuple(slice(o, o + n) for o, n in zip(span.within, span.box.lengths, strict=True))
            target[place] = _picked(data, span, target.dtype)

    def _read(self, placed: PlacedPiece, first: int, size_bytes: int, name: str) -> np.ndarray[Any, Any]:
        data: np.ndarray[Any, Any] = np.empty(size_bytes, np.uint8)
        at = placed.piece.at + first * BLOCK_SIZE
        try:
            self.storage.read_into(placed.key, [(at, data.data)])
        except NotFoundError as error:  # the manifest says that it is there
            raise IntegrityError(f"{self.storage.url}: {placed.key} is missing", where=placed.key) from error
        expected = self.digests(placed)[DIGEST_SIZE * first :][: DIGEST_SIZE * block_count(size_bytes)]
        verify_blocks(data.data, expected, f"{self.storage.url}: {placed.key} (tensor {name!r})", first)
        return data


def _picked(data: np.ndarray[Any, Any], span: Span, dtype: np.dtype[Any]) -> np.ndarray[Any, Any]:
    box = span.box
    strides = tuple(stride * box.itemsize for stride in box.strides)
    view: np.ndarray[Any, Any] = np.ndarray(
        box.lengths, dtype, buffer=data, offset=box.first - span.start, strides=strides
    )
    return view
