"""Tensors read a slab at a time are those that were saved, however they lie in pieces; what differs is counted."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from resilio.errors import IntegrityError
from resilio.records import schema
from resilio.records.compare import TensorDifference, compare_tensors, compare_values
from resilio.records.digests import BLOCK_SIZE, append_block_digests, digest_of
from resilio.records.fingerprints import to_text
from resilio.records.manifest import ITEMSIZE, LoadedManifest, PlacedPiece, SavedTensor
from resilio.records.tensors import WORDS, TensorReader, slabs
from resilio.storage.memory import MemoryStorage

Box = tuple[tuple[int, ...], tuple[int, ...]]


def cut(shape: tuple[int, ...], cuts: dict[int, list[int]]) -> list[Box]:
    """The pieces of a tensor that is cut across dims at these places."""
    boxes: list[Box] = [((), ())]
    for dim, size in enumerate(shape):
        borders = sorted({0, size, *(c for c in cuts.get(dim, []) if c < size)})
        boxes = [((*o, a), (*n, b - a)) for o, n in boxes for a, b in pairwise(borders)] or boxes
    return boxes


def reader(tensors: dict[str, tuple[str, np.ndarray[Any, Any], list[Box]]], **ties: str) -> TensorReader:
    """A store with these tensors: name -> dtype, words, pieces."""
    data, blocks = bytearray(b"head"), bytearray()
    saved = {}
    for name, (dtype, words, boxes) in tensors.items():
        pieces = []
        for offsets, sizes in boxes:
            part = words[tuple(slice(o, o + n) for o, n in zip(offsets, sizes, strict=True))].tobytes()
            piece = schema.Piece(
                offsets=list(offsets),
                sizes=list(sizes),
                object=0,
                at=len(data),
                size_bytes=len(part),
                block=len(blocks) // 8,
            )
            append_block_digests(blocks, part)
            data += part + b"gap"
            pieces.append(PlacedPiece(piece, 0, "data", "digests"))
        saved[name] = SavedTensor(dtype, words.shape, None, tuple(pieces))
    storage = MemoryStorage(f"memory://tensors-{np.random.default_rng().integers(1 << 60)}")
    objects = {}
    for key, content in (("data", bytes(data)), ("digests", bytes(blocks))):
        storage.put(key, content)
        objects[key] = schema.ObjectRecord(name=key, size_bytes=len(content), digest=digest_of(content))
    nothing: Any = None
    return TensorReader(storage, LoadedManifest(nothing, nothing, saved, {}, ties, {}, objects))


def words_of(shape: tuple[int, ...], dtype: str, seed: int = 0) -> np.ndarray[Any, Any]:
    raw = np.random.default_rng(seed).integers(0, 256, int(np.prod(shape)) * ITEMSIZE[dtype], np.uint8)
    return raw.view(WORDS[ITEMSIZE[dtype]]).reshape(shape)


@settings(max_examples=150, deadline=None)
@given(st.lists(st.integers(0, 9), max_size=4), st.integers(1, 200), st.sampled_from([1, 2, 8, 16]))
def test_slabs_tile_a_tensor_in_row_major_order(shape: list[int], limit: int, itemsize: int) -> None:
    whole = np.arange(int(np.prod(shape))).reshape(shape)
    got = [
        whole[tuple(slice(o, o + n) for o, n in zip(*box, strict=True))].ravel()
        for box in slabs(shape, itemsize, limit)
    ]
    assert np.concatenate([np.array([], int), *got]).tolist() == whole.ravel().tolist()
    assert all(part.size * itemsize <= max(limit, itemsize) for part in got)


@pytest.mark.parametrize("dtype", ["uint8", "bfloat16", "float32", "complex128"])
@pytest.mark.parametrize("cuts", [{}, {0: [7]}, {1: [1, 200]}, {0: [3, 50], 1: [33]}, {2: [1]}])
def test_a_tensor_comes_back_from_any_pieces(dtype: str, cuts: dict[int, list[int]], monkeypatch: Any) -> None:
    words = words_of((60, 300, 2), dtype)
    found = reader({"t": (dtype, words, cut(words.shape, cuts))})
    assert b"".join(part.tobytes() for part in found.stream("t")) == words.tobytes()
    many = [found.slab("t", box).tobytes() for box in slabs(words.shape, ITEMSIZE[dtype], 5_000)]
    assert len(many) > 5 and b"".join(many) == words.tobytes()


def test_scalars_and_empty_tensors_come_back() -> None:
    one, none = words_of((), "float32"), words_of((0, 3), "int64")
    found = reader({"one": ("float32", one, [((), ())]), "none": ("int64", none, [((0, 0), (0, 3))])})
    assert [part.tobytes() for part in found.stream("one")] == [one.tobytes()]
    assert list(found.stream("none")) == []


def test_a_flipped_bit_is_found_while_reading() -> None:
    words = words_of((40_000,), "float32")
    found = reader({"t": ("float32", words, cut(words.shape, {0: [10_000]}))})
    data = bytearray(found.storage.get("data"))
    data[100_000] ^= 1
    found.storage.put("data", bytes(data))
    with pytest.raises(IntegrityError, match=r"'t'.* is damaged in block"):
        list(found.stream("t"))


# --- what differs ---


def only(a: TensorReader, b: TensorReader) -> TensorDifference:
    (one,) = compare_tensors(a, b)
    return one


@pytest.mark.parametrize("other", [{}, {0: [100]}])
def test_one_element_of_many_is_found_whether_or_not_pieces_lie_alike(other: dict[int, list[int]]) -> None:
    x = np.linspace(-1, 1, 100_000).astype("<f4").reshape(200, 500)
    y = x.copy()
    y[150, 3] += 0.25
    one, two = (reader({"t": ("float32", z.view("<u4"), cut(z.shape, how))}) for z, how in ((x, {}), (y, other)))
    found = only(one, two)
    assert (found.kind, found.elements, found.of) == ("changed", 1, 100_000)
    assert found.largest == pytest.approx(0.25, abs=1e-6)
    assert found.read_bytes == (2 * BLOCK_SIZE if not other else 2 * x.nbytes)  # no more than it takes
    assert only(one, one).kind == "same" and only(one, one).read_bytes == 0
    same = reader({"t": ("float32", x.view("<u4"), cut(x.shape, {0: [100]}))})
    assert (only(one, same).kind, only(one, same).elements) == ("same", 0)


def test_equal_fingerprints_tell_that_nothing_differs_without_a_read_and_other_ones_do_not() -> None:
    words = words_of((100, 8), "float32")
    one = reader({"t": ("float32", words, cut(words.shape, {}))})
    two = reader({"t": ("float32", words, cut(words.shape, {0: [40]}))})
    (whole,), (first, second) = (side.manifest.tensors["t"].pieces for side in (one, two))
    whole.piece.fingerprint = to_text((5, 7))
    assert only(one, two).read_bytes > 0  # one side has none
    first.piece.fingerprint, second.piece.fingerprint = to_text((2, 3)), to_text((3, 4))
    assert (only(one, two).kind, only(one, two).read_bytes) == ("same", 0)
    second.piece.fingerprint = to_text((4, 4))
    assert only(one, two).read_bytes > 0


def test_added_removed_reshaped_and_tied_ones_are_told() -> None:
    x = words_of((6,), "float32")
    a = reader({"gone": ("float32", x, cut((6,), {})), "t": ("float32", x, cut((6,), {}))}, tied="t")
    b = reader(
        {
            "new": ("float32", x, cut((6,), {})),
            "t": ("float32", x.reshape(2, 3), cut((2, 3), {})),
            "tied": ("float32", x, cut((6,), {0: [2]})),
        }
    )
    assert [(one.name, one.kind) for one in compare_tensors(a, b)] == [
        ("gone", "removed"),
        ("new", "added"),
        ("t", "reshaped"),
        ("tied", "same"),
    ]
    assert [one.name for one in compare_tensors(a, b, lambda name: name.startswith("t"))] == ["t", "tied"]


@pytest.mark.parametrize(
    "dtype",
    [
        *(
            "bool",
            "uint8",
            "int8",
            "int16",
            "int64",
            "uint64",
            "float16",
            "bfloat16",
            "float32",
            "float64",
            "complex64",
        ),
        *("complex128", "float8_e4m3fn", "float8_e4m3fnuz", "float8_e5m2", "float8_e5m2fnuz", "float8_e8m0fnu"),
    ],
)
def test_the_largest_difference_is_that_of_torch(dtype: str) -> None:
    import torch

    kind = getattr(torch, dtype)
    words = torch.arange(0, 256, dtype=torch.uint8) if ITEMSIZE[dtype] == 1 else None
    if dtype == "bool":
        x, y = torch.tensor([True, False]), torch.tensor([True, True])
    elif words is not None:
        x, y = words.view(kind), words.roll(1).view(kind)
    else:
        x, y = torch.arange(256).to(kind), (torch.arange(256) * 3).to(kind)
    wide = torch.complex128 if kind.is_complex else torch.float64
    expected = (x.to(wide) - y.to(wide)).abs().max().item()
    word = WORDS[ITEMSIZE[dtype]]
    found = only(
        *(
            reader({"t": (dtype, z.contiguous().view(torch.uint8).numpy().view(word), cut((len(z),), {}))})
            for z in (x, y)
        )
    )
    assert found.largest == pytest.approx(expected, nan_ok=True)
    if words is not None and dtype != "bool":  # all but nan, which hides the rest
        for code in range(256):
            one = x.view(torch.uint8)[code : code + 1]
            zero = (
                torch.zeros(1, dtype=torch.uint8)
                if dtype != "float8_e8m0fnu"
                else torch.full((1,), 127, dtype=torch.uint8)
            )
            if int(one) != int(zero):
                a, b = (reader({"t": (dtype, z.numpy(), cut((1,), {}))}) for z in (one, zero))
                expected = (one.view(kind).double() - zero.view(kind).double()).abs().item()
                assert only(a, b).largest == pytest.approx(expected, nan_ok=True), code


def test_values_are_compared_by_their_bits_and_types() -> None:
    a = {"lr": 0.1, "same": {"b": 1, "a": 2}, "gone": 1, "kind": 1}
    b = {"lr": 0.2, "same": {"a": 2, "b": 1}, "new": None, "kind": 1.0}
    assert [(one.name, one.there, one.before, one.after) for one in compare_values(a, b)] == [
        ("gone", "a", 1, None),
        ("kind", "ab", 1, 1.0),
        ("lr", "ab", 0.1, 0.2),
        ("new", "b", None, None),
    ]
