"""Whether pieces make up their tensor: each of its elements in exactly one of them."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import Protocol

__all__ = ["tiling_problem"]

# Pieces that share a place. In meshes that is about the root of the number of ranks; where it is more in every dim,
# comparing each with each would take for ever.
_ABREAST = 1024


class _Box(Protocol):
    offsets: list[int]
    sizes: list[int]


def tiling_problem(shape: list[int], pieces: Sequence[_Box]) -> str | None:
    """Why pieces, each within the shape, do not tile it; None if they do."""
    solid = [piece for piece in pieces if prod(piece.sizes)]
    if not pieces:
        return "are not there"
    if shape and len(solid) > 1:
        # Along the dim where the fewest of them are abreast: nearly linear for usual shardings.
        most, dim = min((_most_abreast(solid, dim), dim) for dim in range(len(shape)))
        if most > _ABREAST:
            return f"lie crosswise, {most} of them abreast, which no sharding does"
        abreast: list[_Box] = []
        for piece in sorted(solid, key=lambda piece: piece.offsets[dim]):
            abreast = [other for other in abreast if other.offsets[dim] + other.sizes[dim] > piece.offsets[dim]]
            if any(_overlap(piece, other) for other in abreast):
                return "overlap"
            abreast.append(piece)
    elif len(solid) > 1:
        return "overlap"
    missing = prod(shape) - sum(prod(piece.sizes) for piece in solid)
    return f"leave {missing} of its elements out" if missing else None


def _most_abreast(pieces: list[_Box], dim: int) -> int:
    """How many pieces at most share a place along `dim`."""
    borders = [(piece.offsets[dim], 1) for piece in pieces]
    borders += [(piece.offsets[dim] + piece.sizes[dim], -1) for piece in pieces]
    most = now = 0
    for _, change in sorted(borders):  # at one place those that end come first
        now += change
        most = max(most, now)
    return most


def _overlap(one: _Box, other: _Box) -> bool:
    return all(
        a < b + n and b < a + m for a, m, b, n in zip(one.offsets, one.sizes, other.offsets, other.sizes, strict=True)
    )
