"""What differs between two checkpoints: told by fingerprints and digests, and read only where they do."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import lru_cache
from math import prod
from typing import Any

import numpy as np

from .digests import BLOCK_SIZE
from .fingerprints import Lanes, combine, from_text
from .manifest import ITEMSIZE, PlacedPiece, SavedTensor
from .read_ahead import in_order, readers
from .sampling import UNIT_LIMIT
from .tensors import WORDS, Reads, slabs
from .values import canonical_bytes

__all__ = ["TensorDifference", "ValueDifference", "compare_tensors", "compare_values"]

_Array = np.ndarray[Any, Any]


@dataclass(frozen=True)
class TensorDifference:
    """What became of one tensor from A to B.

    Attributes:
        name: flat key.
        kind: ``same``, ``changed``, ``added``, ``removed``, or ``reshaped``: another dtype or shape, not compared.
        elements: how many differ in a bit; 0 where they are not compared.
        of: how many there are in B, or in A if it was removed.
        largest: the largest absolute difference of an element; nan if a number became none; None where elements are
            not compared, or are no numbers.
        read_bytes: of A and B together that it took to know.
        before: dtype and shape in A; None if it was added.
        after: dtype and shape in B; None if it was removed.
    """

    name: str
    kind: str
    elements: int = 0
    of: int = 0
    largest: float | None = None
    read_bytes: int = 0
    before: tuple[str, tuple[int, ...]] | None = None
    after: tuple[str, tuple[int, ...]] | None = None


@dataclass(frozen=True)
class ValueDifference:
    """A value that is not the same in both, as tagged JSON; `there` says in which it is: ``a``, ``b`` or ``ab``."""

    name: str
    there: str
    before: Any = None
    after: Any = None


def compare_values(a: Mapping[str, Any], b: Mapping[str, Any]) -> list[ValueDifference]:
    """What differs between values of the one and of the other, tagged JSON by name."""
    found = []
    for name in sorted(a.keys() | b.keys()):
        there = ("a" if name in a else "") + ("b" if name in b else "")
        if there != "ab" or canonical_bytes(a[name]) != canonical_bytes(b[name]):
            found.append(ValueDifference(name, there, a.get(name), b.get(name)))
    return found


def compare_tensors(
    a: Reads, b: Reads, wanted: Callable[[str], bool] = lambda name: True
) -> Iterator[TensorDifference]:
    """Every tensor of either, by name; tied ones under each of their names.

    Args:
        a: the one.
        b: the other.
        wanted: which names to look at.

    Raises:
        IntegrityError: one of them is damaged where it was read.
    """
    ones, others = _named(a), _named(b)
    for name in sorted(filter(wanted, ones.keys() | others.keys())):
        key, other_key = ones.get(name), others.get(name)
        one = a.manifest.tensors[key] if key is not None else None
        other = b.manifest.tensors[other_key] if other_key is not None else None
        before, after = (None if t is None else (t.dtype, t.shape) for t in (one, other))
        last = one if other is None else other
        assert last is not None
        of = prod(last.shape)
        if one is None or other is None:
            yield TensorDifference(name, "added" if one is None else "removed", 0, of, None, 0, before, after)
        elif before != after:
            yield TensorDifference(name, "reshaped", 0, of, None, 0, before, after)
        else:
            assert key is not None and other_key is not None
            tally = _Tally(one.dtype)
            for x, y in _suspects(a, key, one, b, other_key, other):
                tally.add(x, y)
            kind = "changed" if tally.elements else "same"
            yield TensorDifference(name, kind, tally.elements, of, tally.largest, tally.read_bytes, before, after)


def _named(reader: Reads) -> dict[str, str]:
    return {**{name: name for name in reader.manifest.tensors}, **reader.manifest.ties}


def _suspects(
    a: Reads, key: str, one: SavedTensor, b: Reads, other_key: str, other: SavedTensor
) -> Iterator[tuple[_Array, _Array]]:
    """Words of both that may differ, side by side."""
    prints = _fingerprint(one), _fingerprint(other)
    if prints[0] is not None and prints[0] == prints[1]:
        return
    threads = readers(min(a.storage.capabilities.concurrency, b.storage.capabilities.concurrency))
    boxes_of = [[_box(placed.piece) for placed in tensor.pieces] for tensor in (one, other)]
    if not boxes_of[0] or boxes_of[0] != boxes_of[1]:
        boxes = slabs(one.shape, ITEMSIZE[one.dtype], UNIT_LIMIT)
        yield from in_order(boxes, lambda slab: (a.slab(key, slab), b.slab(other_key, slab)), threads)
        return
    word: Any = WORDS[ITEMSIZE[one.dtype]]
    for x, y in zip(one.pieces, other.pieces, strict=True):
        runs = _runs(np.frombuffer(a.digests(x), "<u8"), np.frombuffer(b.digests(y), "<u8"))

        def both(run: tuple[int, int], x: PlacedPiece = x, y: PlacedPiece = y) -> tuple[_Array, _Array]:
            return a.blocks(x, *run, key).view(word), b.blocks(y, *run, other_key).view(word)

        yield from in_order(runs, both, threads)


def _fingerprint(tensor: SavedTensor) -> Lanes | None:
    """Of the tensor, however it is sharded; None where a piece was saved without."""
    texts = [placed.piece.fingerprint for placed in tensor.pieces if placed.piece.size_bytes]
    if not tensor.pieces or None in texts:
        return None
    return combine(from_text(str(text), "a piece's fingerprint") for text in texts)


def _box(piece: Any) -> tuple[list[int], list[int]]:
    return piece.offsets, piece.sizes


def _runs(x: _Array, y: _Array) -> Iterator[tuple[int, int]]:
    """Runs of neighbouring blocks, first and end, whose digests differ."""
    limit = UNIT_LIMIT // BLOCK_SIZE
    blocks = np.flatnonzero(x != y).tolist()
    while blocks:
        end = next(
            (i for i in range(1, min(limit, len(blocks))) if blocks[i] != blocks[0] + i), min(limit, len(blocks))
        )
        yield blocks[0], blocks[0] + end
        blocks = blocks[end:]


class _Tally:
    """Counts what differs, and keeps the largest difference."""

    def __init__(self, dtype: str) -> None:
        self.numbers = _NUMBERS.get(dtype)
        self.elements = 0
        self.read_bytes = 0
        self.largest: float | None = None

    def add(self, x: _Array, y: _Array) -> None:
        self.read_bytes += x.nbytes + y.nbytes
        x, y = (np.ascontiguousarray(one).reshape(-1) for one in (x, y))
        if x.dtype.itemsize == 16:
            differs = (x.view("<u8") != y.view("<u8")).reshape(-1, 2).any(axis=1)
        else:
            differs = x != y
        count = int(differs.sum())
        self.elements += count
        if count and self.numbers:
            p, q = (self.numbers(one[differs]) for one in (x, y))
            with np.errstate(all="ignore"):
                largest = float(np.abs(q - p).max())
            self.largest = largest if self.largest is None else float(np.maximum(self.largest, largest))


def _viewed(dtype: str) -> Callable[[_Array], _Array]:
    wide = np.complex128 if dtype.startswith("<c") else np.float64
    return lambda words: words.view(dtype).astype(wide)


def _table(dtype: str) -> Callable[[_Array], _Array]:
    return lambda words: _minifloats(dtype)[words]


@lru_cache
def _minifloats(dtype: str) -> _Array:
    """What each of the 256 bytes of an 8-bit float means."""
    codes = np.arange(256)
    if dtype == "float8_e8m0fnu":
        return np.where(codes == 255, np.nan, 2.0 ** (codes - 127.0))
    digits = int(dtype[dtype.index("m") + 1])
    fnuz = dtype.endswith("fnuz")  # finite, nan, unsigned zero: what would be -0 is nan, and the bias is one more
    bias = (1 << (6 - digits)) - 1 + fnuz
    exponent, fraction = (codes & 127) >> digits, (codes & ((1 << digits) - 1)) / (1 << digits)
    size = np.where(exponent == 0, fraction * 2.0 ** (1 - bias), (1 + fraction) * 2.0 ** (exponent - bias))
    if fnuz:
        size[128] = np.nan
    elif dtype == "float8_e4m3fn":
        size[[127, 255]] = np.nan
    else:
        size[(codes & 127) == 124] = np.inf
        size[(codes & 127) > 124] = np.nan
    return np.where(codes < 128, size, -size)


# What the words of a dtype mean as numbers; the others are compared by their bits alone.
_NUMBERS: dict[str, Callable[[_Array], _Array]] = {
    **{f"{sign}{8 * n}": _viewed(f"<{sign[0]}{n}") for sign in ("int", "uint") for n in (1, 2, 4, 8)},
    **{f"float{8 * n}": _viewed(f"<f{n}") for n in (2, 4, 8)},
    "complex64": _viewed("<c8"),
    "complex128": _viewed("<c16"),
    "bool": _viewed("u1"),
    "bfloat16": lambda words: (words.astype("<u4") << 16).view("<f4").astype(np.float64),
    **{
        name: _table(name)
        for name in (
            "float8_e4m3fn",
            "float8_e4m3fnuz",
            "float8_e5m2",
            "float8_e5m2fnuz",
            "float8_e8m0fnu",
        )
    },
}
