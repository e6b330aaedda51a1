"""Which bytes of a checkpoint a verification reads: all, some, or none; and what it then can say.

The data is cut into units in one order that follows from the manifest alone, so that `t` runs of `n/t` read each unit
exactly once, whoever runs them and whenever.
"""

from __future__ import annotations

import random
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

from ..errors import ConfigError
from .digests import BLOCK_SIZE
from .manifest import LoadedManifest, PlacedPiece

__all__ = [
    "UNIT_LIMIT",
    "Coverage",
    "Part",
    "Sample",
    "Unit",
    "parse_sample",
    "pieces_by_object",
    "sample_units",
    "units_of",
]

UNIT_LIMIT = 128 * BLOCK_SIZE  # bytes of a unit at the most; also what is in memory of one at a time
_UNITS = 1024  # that a sample chooses from, where the checkpoint is large enough
_SUFFIXES = {"": 1, "K": 1 << 10, "M": 1 << 20, "G": 1 << 30, "T": 1 << 40}
_PARTS_LIMIT = 10_000


@dataclass(frozen=True)
class Part:
    """A run of a piece's blocks within a unit.

    Attributes:
        name: of the tensor.
        placed: the piece.
        start: offset in the object, in bytes.
        size_bytes: of this part.
        block: number of its first block within the piece.
    """

    name: str
    placed: PlacedPiece
    start: int
    size_bytes: int
    block: int


@dataclass(frozen=True)
class Unit:
    """A range of a data object, and the parts of pieces in it. Units of an object are side by side."""

    key: str
    start: int
    end: int
    parts: tuple[Part, ...]

    @property
    def tensor_bytes(self) -> int:
        """Bytes that a block digest tells of."""
        return sum(part.size_bytes for part in self.parts)


@dataclass(frozen=True)
class Sample:
    """What to read: the `part`-th of `of` parts, or about this `fraction` or `size_bytes` of it, chosen at random."""

    part: int = 0
    of: int = 0
    fraction: float = 0.0
    size_bytes: int = 0


@dataclass(frozen=True)
class Coverage:
    """How much of a checkpoint's tensor data was read.

    Attributes:
        level: ``all``, ``sample``, or ``inventory``: names and sizes of objects alone.
        read_bytes: that were read and compared with their digests.
        total_bytes: there are.
    """

    level: Literal["all", "sample", "inventory"]
    read_bytes: int
    total_bytes: int


def parse_sample(text: str) -> Sample:
    """What ``2/7``, ``10%`` and ``500M`` mean.

    Raises:
        ConfigError: it means nothing.
    """
    if found := re.fullmatch(r"([0-9]{1,6})/([0-9]{1,6})", text):
        part, of = int(found[1]), int(found[2])
        if 1 <= part <= of <= _PARTS_LIMIT:
            return Sample(part=part, of=of)
    elif found := re.fullmatch(r"([0-9]{1,3}(?:\.[0-9]{1,6})?)%", text):
        if 0 < float(found[1]) <= 100:
            return Sample(fraction=float(found[1]) / 100)
    elif (found := re.fullmatch(r"([0-9]{1,15})([KMGT]?)(?:i?B)?", text)) and int(found[1]):
        return Sample(size_bytes=int(found[1]) * _SUFFIXES[found[2]])
    raise ConfigError(
        f"{text!r} is no sample. Say the second of seven parts as 2/7 (1/7 to 7/7 read all of it, once), a share "
        f"as 10%, or an amount as 500M; parts are at most {_PARTS_LIMIT}."
    )


def pieces_by_object(manifest: LoadedManifest) -> dict[str, list[tuple[str, PlacedPiece]]]:
    """The pieces in each data object, by offset, each with the name of its tensor."""
    found: dict[str, list[tuple[str, PlacedPiece]]] = {}
    for name, tensor in manifest.tensors.items():
        for placed in tensor.pieces:
            if placed.piece.size_bytes:
                found.setdefault(placed.key, []).append((name, placed))
    for pieces in found.values():
        pieces.sort(key=lambda one: one[1].piece.at)
    return found


def sample_units(manifest: LoadedManifest, sample: Sample, rng: random.Random | None = None) -> list[Unit]:
    """The units that `sample` chooses, in the order of their bytes; those without tensor data are left out.

    Args:
        manifest: of the checkpoint.
        sample: how much.
        rng: where chance comes from; the system's by default, so that each run reads something else.
    """
    pieces = pieces_by_object(manifest)
    total = sum(placed.piece.size_bytes for ones in pieces.values() for _, placed in ones)
    limit = min(UNIT_LIMIT, max(1, total // _UNITS // BLOCK_SIZE) * BLOCK_SIZE)
    units = [
        unit
        for key in sorted(pieces)
        for unit in units_of(key, manifest.objects[key].size_bytes, pieces[key], limit)
        if unit.parts
    ]
    if sample.of:
        return units[sample.part - 1 :: sample.of]
    wanted = sample.size_bytes or total * sample.fraction
    chosen, read = [], 0
    for i in (rng or random.SystemRandom()).sample(range(len(units)), len(units)):
        if read >= wanted:
            break
        chosen.append(i)
        read += units[i].tensor_bytes
    return [units[i] for i in sorted(chosen)]


def units_of(
    key: str, size_bytes: int, pieces: Sequence[tuple[str, PlacedPiece]], limit: int = UNIT_LIMIT
) -> Iterator[Unit]:
    """All of the data object `key`, of this size, in its order; `pieces` as `pieces_by_object` gives them.

    Cut where a piece begins, or on a border of its blocks: a unit takes many small pieces, or a part of a big one.
    """
    start = at = 0
    parts: list[Part] = []
    for name, placed in pieces:
        piece = placed.piece
        while piece.at - start > limit:  # what lies between pieces has no blocks: cut anywhere
            end = max(at, min(start + limit, piece.at))
            yield Unit(key, start, end, tuple(parts))
            start = at = end
            parts = []
        at = piece.at
        end = piece.at + piece.size_bytes
        while at < end:
            room = limit - (at - start)
            take = end - at if end - at <= room else room // BLOCK_SIZE * BLOCK_SIZE
            if take:
                parts.append(Part(name, placed, at, take, (at - piece.at) // BLOCK_SIZE))
                at += take
            if at < end:
                yield Unit(key, start, at, tuple(parts))
                start, parts = at, []
    while start < size_bytes:
        end = max(at, min(start + limit, size_bytes))
        yield Unit(key, start, end, tuple(parts))
        start = at = end
        parts = []
