"""NaN and infinite elements are counted exactly, of every dtype that the format knows, wherever they stand."""

from __future__ import annotations

import math

import pytest
import torch

from resilio.engine.health import NOT_COUNTED, Health, non_finite, summary, together
from resilio.records.manifest import ITEMSIZE
from resilio.records.schema import Piece, TensorRecord

FLOATS = [torch.float16, torch.bfloat16, torch.float32, torch.float64]
COMPLEX = [torch.complex32, torch.complex64, torch.complex128]
BYTES = [torch.float8_e4m3fn, torch.float8_e4m3fnuz, torch.float8_e5m2, torch.float8_e5m2fnuz, torch.float8_e8m0fnu]
BAD = [math.nan, math.inf, -math.inf]


def slow(tensor: torch.Tensor) -> tuple[int, int]:
    """One Python number after the other."""
    found = [0, 0]
    wide = tensor.to(torch.complex128 if tensor.is_complex() else torch.float64)
    for value in wide.reshape(-1).tolist():
        parts = (value.real, value.imag) if isinstance(value, complex) else (value,)
        if any(map(math.isnan, parts)):
            found[0] += 1
        elif any(map(math.isinf, parts)):
            found[1] += 1
    return found[0], found[1]


@pytest.mark.parametrize("dtype", FLOATS + COMPLEX, ids=str)
@pytest.mark.parametrize("size", [1, 7, 64, 1000, (1 << 16) + 3])
def test_each_kind_of_bad_element_is_found_at_either_end_and_within(dtype, size):
    parts = 2 if dtype.is_complex else 1
    clean = (torch.arange(size * parts) % 100 - 50).to(torch.float64)
    for bad in BAD:
        for at in {0, size // 2, size * parts - 1}:
            raw = clean.clone()
            raw[at] = bad
            tensor = torch.view_as_complex(raw.view(-1, 2)).to(dtype) if parts == 2 else raw.to(dtype)
            expected = (1, 0) if math.isnan(bad) else (0, 1)
            assert non_finite(tensor) == expected, (bad, at)
    assert non_finite(torch.zeros(size, dtype=dtype)) == (0, 0)


@pytest.mark.parametrize("dtype", FLOATS + COMPLEX, ids=str)
def test_many_in_any_layout_are_counted_as_one_by_one(dtype):
    torch.manual_seed(0)
    raw = torch.randn(33, 40, 2, dtype=torch.float64)
    for bad in BAD:
        raw[torch.rand(raw.shape) < 0.1] = bad
    tensor = torch.view_as_complex(raw).to(dtype) if dtype.is_complex else raw.to(dtype)
    for one in (tensor, tensor.transpose(0, 1), tensor[::3, 5:], tensor.conj(), tensor[:0]):
        assert non_finite(one) == slow(one)
    assert sum(non_finite(tensor)) > 0
    assert non_finite(tensor.reshape(-1)[0]) == slow(tensor.reshape(-1)[0])  # without dims


@pytest.mark.parametrize("dtype", BYTES, ids=str)
def test_every_code_of_eight_bits_counts_as_what_it_means(dtype):
    for code in range(256):
        tensor = torch.tensor([1, code, 2], dtype=torch.uint8).view(dtype)
        assert non_finite(tensor) == slow(tensor), hex(code)
        assert non_finite(tensor[1]) == slow(tensor[1])
    torch.manual_seed(0)
    many = torch.randint(0, 256, (50, 60), dtype=torch.uint8).view(dtype)
    assert non_finite(many) == slow(many)
    assert non_finite(many.t()) == slow(many)
    assert non_finite(many[:0]) == (0, 0)


def test_largest_finite_numbers_and_dtypes_without_any_bad_one_are_clean():
    for dtype in FLOATS:
        most = torch.finfo(dtype).max
        assert non_finite(torch.tensor([most, -most], dtype=dtype)) == (0, 0)
    rest = set(ITEMSIZE) - {str(dtype).removeprefix("torch.") for dtype in FLOATS + COMPLEX + BYTES}
    for name in rest - {"quint8", "qint8", "qint32"}:
        raw = torch.full((16,), 0xFF, dtype=torch.uint8)
        tensor = raw.bool() if name == "bool" else raw.view(getattr(torch, name))
        assert non_finite(tensor) == (0, 0), name


def record(*counts: tuple[int, int]) -> TensorRecord:
    pieces = [
        Piece(offsets=[i], sizes=[1], object=0, at=0, size_bytes=4, block=0, nan=nan, inf=inf)
        for i, (nan, inf) in enumerate(counts)
    ]
    return TensorRecord(dtype="float32", shape=[len(counts)], pieces=pieces)


def test_a_share_counts_nan_anywhere_and_infinities_where_none_belongs():
    tensors = {"mask": record((0, 9)), "stat": record((1, 2)), "weight": record((0, 3), (4, 0)), "bias": record((0, 0))}
    share = summary(frozenset({"weight", "bias"}), tensors)
    assert share == Health(1 + 3 + 4, {"stat": (1, 0), "weight": (4, 3)})
    assert str(share) == "stat (1 NaN), weight (4 NaN, 3 infinite)"


def test_shares_add_up_and_name_the_first_of_all_with_their_whole_counts():
    one = summary(frozenset(), {f"t{i}": record((1, 0)) for i in range(20)})
    other = summary(frozenset(), {f"t{i}": record((2, 0)) for i in range(3, 20, 2)})
    whole = together([one, other])
    assert whole.non_finite == 20 + 2 * 9 and whole.more
    assert dict(whole.named) == {"t0": (1, 0), "t1": (1, 0), "t10": (1, 0), "t11": (3, 0), "t12": (1, 0)}
    assert str(whole).endswith("t12 (1 NaN) and others")
    assert together([other, one]) == whole
    assert together([one, NOT_COUNTED]).non_finite is None
    assert together([Health(0), Health(0)]) == Health(0)
