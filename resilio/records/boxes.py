"""From "this box of that piece" to byte ranges: which blocks to read, and how they reach the destination.

A piece is row-major bytes in an object, digested per 64 KiB block. Reading part of it means reading whole blocks,
checking them, and keeping what was asked for. Three shapes of request occur:

- one run of bytes into contiguous memory (row shards, the common case): whole blocks go straight into place, only the
  partial blocks at the two ends take a detour;
- many short runs close together (column shards): the span that covers them is read and picked from;
- long runs far apart: each is read by itself.

Pure: no I/O here.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from math import prod

from .digests import BLOCK_SIZE

__all__ = ["SPAN_LIMIT", "Box", "Run", "Span", "cut", "split"]

# Large enough that a request's fixed cost vanishes, small enough that several are in flight and bounded memory holds.
SPAN_LIMIT = 8 * 1024 * 1024


@dataclass(frozen=True)
class Box:
    """A hyper-rectangle of a piece: elements `offsets` … `offsets + lengths` of a row-major array of shape `sizes`."""

    sizes: tuple[int, ...]
    offsets: tuple[int, ...]
    lengths: tuple[int, ...]
    itemsize: int

    @cached_property
    def strides(self) -> tuple[int, ...]:
        """Elements between neighbours, per dim, in the whole piece."""
        return tuple(prod(self.sizes[dim + 1 :]) for dim in range(len(self.sizes)))

    @cached_property
    def first(self) -> int:
        """Byte offset of the first element in the piece."""
        return (
            0
            if not any(self.offsets)
            else self.itemsize * sum(o * s for o, s in zip(self.offsets, self.strides, strict=True))
        )

    @cached_property
    def end(self) -> int:
        """Byte offset behind the last element in the piece."""
        if self.lengths == self.sizes:
            return self.size_bytes
        last = sum((o + n - 1) * s for o, n, s in zip(self.offsets, self.lengths, self.strides, strict=True))
        return self.itemsize * (last + 1)

    @property
    def size_bytes(self) -> int:
        """Bytes of the elements themselves."""
        return self.itemsize * prod(self.lengths)

    @property
    def one_run(self) -> bool:
        """Whether the elements lie side by side in the piece."""
        return self.lengths == self.sizes or self.end - self.first == self.size_bytes

    def narrow(self, dim: int, start: int, length: int) -> Box:
        """The part `start` … `start + length` of dimension `dim`, counted within this box."""
        offsets = list(self.offsets)
        lengths = list(self.lengths)
        offsets[dim] += start
        lengths[dim] = length
        return Box(self.sizes, tuple(offsets), tuple(lengths), self.itemsize)


@dataclass(frozen=True)
class Span:
    """One read: bytes `start` … `end` of the piece, on block borders (or the piece's end), for the elements of `box`.

    `within` says where the box lies in the box that was split: offsets and lengths per dim.
    """

    start: int
    end: int
    box: Box
    within: tuple[int, ...]

    @property
    def first_block(self) -> int:
        """Index of the first block, within the piece."""
        return self.start // BLOCK_SIZE


@dataclass(frozen=True)
class Run:
    """One read: bytes `start` … `end` of the piece, as of a `Span`, for its bytes `first` … `stop`, side by side."""

    start: int
    end: int
    first: int
    stop: int


def cut(box: Box, limit: int = SPAN_LIMIT) -> Iterator[Run]:
    """The reads that fetch `box`, whose elements lie side by side: see `Box.one_run`.

    Args:
        box: with at least one element.
        limit: bytes per read, whole blocks.
    """
    piece_bytes = box.itemsize * prod(box.sizes)
    first = box.first
    while first < box.end:
        start = first // BLOCK_SIZE * BLOCK_SIZE
        stop = min(start + limit, box.end)
        yield Run(start, min(-(-stop // BLOCK_SIZE) * BLOCK_SIZE, piece_bytes), first, stop)
        first = stop


def split(box: Box, limit: int = SPAN_LIMIT) -> Iterator[Span]:
    """The reads that fetch `box`: each at most about `limit` bytes, together every element once.

    Args:
        box: with at least one element.
        limit: bytes per read; a run that cannot be divided further at element borders of one block may exceed it by two
            blocks.
    """
    yield from _split(box, (0,) * len(box.sizes), limit)


def _split(box: Box, within: tuple[int, ...], limit: int) -> Iterator[Span]:
    piece_bytes = box.itemsize * prod(box.sizes)
    start = box.first // BLOCK_SIZE * BLOCK_SIZE
    end = min(-(-box.end // BLOCK_SIZE) * BLOCK_SIZE, piece_bytes)
    dim = next((d for d, n in enumerate(box.lengths) if n > 1), None)
    if dim is None:
        yield Span(start, end, box, within)
        return
    row = box.narrow(dim, 0, 1)
    gap = box.strides[dim] * box.itemsize - (row.end - row.first)
    if gap >= 2 * BLOCK_SIZE:
        step = 1  # between two rows lie blocks nobody needs
    elif box.end - box.first <= limit:
        yield Span(start, end, box, within)
        return
    else:
        step = _rows_to_block_border(box, dim, limit)
    done = 0
    while done < box.lengths[dim]:
        take = min(step, box.lengths[dim] - done)
        inner = tuple(w + done if d == dim else w for d, w in enumerate(within))
        yield from _split(box.narrow(dim, done, take), inner, limit)
        done += take


def _rows_to_block_border(box: Box, dim: int, limit: int) -> int:
    """How many rows of `dim` make a read of at most `limit` bytes; a number that ends on a block border if one does.

    Cutting inside a block would have both neighbours read and check that block.
    """
    row_bytes = box.strides[dim] * box.itemsize
    rows = max(1, limit // row_bytes)
    for fewer in range(rows, max(0, rows - 64), -1):
        if fewer * row_bytes % BLOCK_SIZE == 0:
            return fewer
    return rows
