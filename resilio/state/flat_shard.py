"""A rank's part of a tensor that was flattened and cut by number of elements, wherever the cut falls in a row.

So FSDP1 shards: it lays parameters end to end and gives each rank an equal run of the whole. DCP knows boxes (offsets
and sizes) only; a run of an n-dimensional tensor is at most 2n - 1 of them, each of them contiguous. So it can be saved
and read where it lies, without gathering anything.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch

__all__ = ["Box", "FlatShard", "boxes"]


@dataclass(frozen=True)
class Box:
    """A part of a run that is a box of the whole tensor.

    Attributes:
        offsets: in the whole tensor, by dim.
        sizes: by dim.
        tensor: its elements, a view.
    """

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    tensor: torch.Tensor


class FlatShard(torch.Tensor):
    """The elements `start` to `start + len(run)` of a tensor of this shape, counted in memory order.

    It has the shape and dtype of the whole, like a `DTensor`, and no operations but `detach`.

    Args:
        run: this rank's elements, one dim; may be empty.
        start: number of the first of them.
        shape: of the whole tensor.
        order: dims from slowest to fastest in memory, None for row-major.
    """

    run: torch.Tensor
    start: int
    order: tuple[int, ...] | None

    @staticmethod
    def __new__(cls, run: torch.Tensor, start: int, shape: Sequence[int], order: tuple[int, ...] | None) -> FlatShard:
        """A tensor without memory of its own."""
        made: FlatShard = torch.Tensor._make_wrapper_subclass(cls, tuple(shape), dtype=run.dtype, device=run.device)
        made.run, made.start, made.order = run, start, order
        return made

    def like(self, run: torch.Tensor) -> FlatShard:
        """The same part of a tensor of the same shape, with these elements."""
        return FlatShard(run, self.start, self.shape, self.order)

    def lies_like(self, other: FlatShard) -> bool:
        """Whether both are the same part of tensors of the same shape."""
        mine, others = ((one.start, len(one.run), one.shape, one.order) for one in (self, other))
        return mine == others

    def boxes(self) -> Iterator[Box]:
        """The run as boxes of the whole, in its order. None if it is empty."""
        if self.numel() == 0:  # has a place nevertheless
            yield Box((0,) * self.dim(), tuple(self.shape), self.run.view(self.shape))
            return
        order = self.order or tuple(range(self.dim()))
        back = sorted(range(len(order)), key=lambda position: order[position])
        at = 0
        for offsets, sizes in boxes([self.shape[dim] for dim in order], self.start, self.start + len(self.run)):
            count = math.prod(sizes)
            tensor = self.run[at : at + count].view(sizes).permute(back)
            yield Box(tuple(offsets[i] for i in back), tuple(sizes[i] for i in back), tensor)
            at += count

    def box_at(self, offsets: Sequence[int]) -> torch.Tensor:
        """The elements of the box that begins there."""
        return next(box.tensor for box in self.boxes() if box.offsets == tuple(offsets))

    def __repr__(self) -> str:  # type: ignore[override]
        return f"FlatShard({self.start}+{len(self.run)} of {tuple(self.shape)})"

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        if func is torch.ops.aten.detach.default:
            return args[0].like(args[0].run.detach())
        raise NotImplementedError(f"{func} of a FlatShard; it only says where elements belong")


def boxes(shape: Sequence[int], start: int, end: int) -> Iterator[tuple[tuple[int, ...], tuple[int, ...]]]:
    """The elements `start` to `end` of a row-major tensor as (offsets, sizes) of boxes, in order."""
    if start >= end:
        return
    if len(shape) < 2:
        yield tuple(start for _ in shape), tuple(end - start for _ in shape)
        return
    below, row_size = tuple(shape[1:]), math.prod(shape[1:])
    first, last = -(-start // row_size), end // row_size  # the rows that are whole
    if first > last:
        yield from _in_row(below, first - 1, start, end, row_size)
        return
    yield from _in_row(below, first - 1, start, first * row_size, row_size)
    if first < last:
        yield (first, *(0 for _ in below)), (last - first, *below)
    yield from _in_row(below, last, last * row_size, end, row_size)


def _in_row(
    below: tuple[int, ...], row: int, start: int, end: int, row_size: int
) -> Iterator[tuple[tuple[int, ...], tuple[int, ...]]]:
    for offsets, sizes in boxes(below, start - row * row_size, end - row * row_size):
        yield (row, *offsets), (1, *sizes)
