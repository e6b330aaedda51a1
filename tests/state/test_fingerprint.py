"""fp1 against its description: ten lines of plain Python ints, over random shapes, dtypes, layouts and tilings."""

from __future__ import annotations

import itertools
import logging
import math
import struct
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from resilio.errors import FormatError
from resilio.records.fingerprints import combine, entry, from_text, to_text
from resilio.state import fingerprint, fingerprint_compiled
from resilio.state.fingerprint import fp1

M = (1 << 64) - 1

DTYPES = [
    *(torch.bool, torch.uint8, torch.int8, torch.float8_e4m3fn, torch.float8_e5m2, torch.float8_e8m0fnu),
    *(torch.int16, torch.uint16, torch.float16, torch.bfloat16, torch.int32, torch.uint32, torch.float32),
    *(torch.int64, torch.uint64, torch.float64, torch.complex32, torch.complex64, torch.complex128),
]


def mix(x: int) -> int:
    x = (x + 0x9E3779B97F4A7C15) & M
    x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & M
    x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & M
    return x ^ (x >> 31)


def reference(raw: bytes, shape: tuple[int, ...], dtype: torch.dtype, offsets: tuple[int, ...]) -> tuple[int, int]:
    """From row-major little-endian bytes, with nothing of ours and nothing of torch's."""
    real = dtype.itemsize // (2 if dtype.is_complex else 1)
    dims = [*(shape or (1,)), *([2] if dtype.is_complex else []), *([2] if real == 8 else [])]
    starts = [*(offsets if shape else (0,)), 0, 0]
    words = struct.unpack(f"<{math.prod(dims)}{ {1: 'B', 2: 'H', 4: 'I', 8: 'I'}[real] }", raw)
    lanes = []
    for lane in (0, 1):
        total = 0
        for word, index in zip(words, itertools.product(*map(range, dims)), strict=True):
            for k, j in enumerate(index):
                word = word * (mix((mix(2 * k + lane) + starts[k] + j) & M) | 1) & M
            total += word
        lanes.append(total & M)
    return lanes[0], lanes[1]


def random_bits(shape: tuple[int, ...], dtype: torch.dtype, seed: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    raw = torch.randint(0, 256, (math.prod(shape) * dtype.itemsize,), dtype=torch.uint8, generator=generator)
    return (raw & 1 if dtype is torch.bool else raw).view(dtype).reshape(shape)


def bytes_of(tensor: torch.Tensor) -> bytes:
    plain = tensor.resolve_conj().resolve_neg().contiguous().reshape(-1)
    return plain.view(torch.uint8).numpy().tobytes() if tensor.numel() else b""


def slow(tensor: torch.Tensor, offsets: tuple[int, ...] = ()) -> tuple[int, int]:
    return reference(bytes_of(tensor), tuple(tensor.shape), tensor.dtype, offsets or (0,) * tensor.dim())


@st.composite
def cases(draw: Any) -> tuple[torch.Tensor, tuple[int, ...], list[int]]:
    shape = tuple(draw(st.lists(st.integers(0, 5), max_size=4)))
    tensor = random_bits(shape, draw(st.sampled_from(DTYPES)), draw(st.integers(0, 1 << 20)))
    offsets = tuple(draw(st.sampled_from([0, 1, 7, 4095, 1 << 33])) for _ in shape)
    return tensor, offsets, draw(st.permutations(range(len(shape))))


@settings(max_examples=150, deadline=None)
@given(cases())
def test_it_is_what_the_description_says_at_any_dtype_shape_offset_and_memory_order(case):
    tensor, offsets, order = case
    expected = slow(tensor, offsets)
    assert fp1(tensor, offsets, compiled=False) == expected
    assert fp1(tensor, offsets, compiled=True) == expected
    back = sorted(range(len(order)), key=lambda position: order[position])
    turned = tensor.permute(order).contiguous().permute(back)  # the same values in another memory order
    assert fp1(turned, offsets) == expected


@settings(max_examples=60, deadline=None)
@given(st.sampled_from(DTYPES), st.lists(st.integers(1, 6), min_size=1, max_size=3), st.data())
def test_the_pieces_of_any_tiling_add_up_to_the_whole(dtype, shape, data):
    tensor = random_bits(tuple(shape), dtype, 1)
    cuts = [sorted({0, size, *data.draw(st.lists(st.integers(0, size), max_size=2))}) for size in shape]
    pieces = []
    for spans in itertools.product(*(list(itertools.pairwise(cut)) for cut in cuts)):
        part = tensor
        for dim, (start, end) in enumerate(spans):
            part = part.narrow(dim, start, end - start)
        pieces.append(fp1(part, [start for start, _ in spans]))
    assert combine(pieces) == fp1(tensor)


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64], ids=str)
def test_what_is_cut_into_chunks_and_long_rows_is_the_same(monkeypatch, dtype, compiled):
    tensor = random_bits((7, 5, 23), dtype, 3)
    strided = random_bits((7, 5, 46), dtype, 4)[:, :, ::2]
    expected = slow(tensor, (3, 0, 9)), slow(strided)
    for name, value in (("_INNER", 30), ("_LONGEST", 10), ("_CHUNK", 16), ("_CACHED", 4)):
        monkeypatch.setattr(fingerprint, name, value)
        assert (fp1(tensor, (3, 0, 9), compiled=compiled), fp1(strided, compiled=compiled)) == expected


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("dtype", [torch.uint8, torch.bfloat16, torch.float32, torch.int64, torch.complex128], ids=str)
def test_long_and_thin_ones_are_the_same(monkeypatch, dtype, compiled):
    """Rows whose weights are made where they are used: of one word and of several, of more and fewer than a block."""
    monkeypatch.setattr(fingerprint, "_LONGEST", 100)
    monkeypatch.setattr(fingerprint, "_INNER", 8)
    for shape in ((601,), (1, 256), (257, 1), (513, 3), (300, 2, 2), (2, 300), (101, 9)):
        tensor = random_bits(shape, dtype, 10)
        strided = random_bits((*shape[:-1], 2 * shape[-1]), dtype, 11)[..., ::2]
        offsets = tuple(range(1 << 33, (1 << 33) + len(shape)))
        assert fp1(tensor, offsets, compiled=compiled) == slow(tensor, offsets), shape
        assert fp1(strided, compiled=compiled) == slow(strided), shape


def test_the_compiled_loop_gives_what_plain_torch_gives_on_large_tensors():
    if fingerprint_compiled.kernel() is None:
        pytest.skip("no C compiler here")
    for shape, dtype in (
        ((700, 1100), torch.float32),
        ((300_001,), torch.bfloat16),
        ((3, 9, 20_011), torch.int64),
        ((70_001, 3), torch.uint8),
    ):
        tensor = random_bits(shape, dtype, 5)
        assert fp1(tensor, compiled=True) == fp1(tensor, compiled=False), shape


def test_without_a_compiler_the_plain_way_is_taken(monkeypatch, caplog, tmp_path):
    tensor = random_bits((40, 30), torch.float32, 6)
    expected = fp1(tensor, compiled=False)
    monkeypatch.setenv("PATH", "/nowhere")
    monkeypatch.setenv("CC", "no-such-compiler")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))  # where none is kept
    monkeypatch.setattr(fingerprint, "kernel", fingerprint_compiled.kernel.__wrapped__)
    with caplog.at_level(logging.DEBUG, "resilio"):
        assert fp1(tensor, compiled=True) == expected
    assert "no C compiler" in caplog.text


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_what_is_fingerprinted_stays_as_it_was(dtype, compiled):
    tensor = random_bits((9, 4), dtype, 7)
    before = bytes_of(tensor)
    fp1(tensor, compiled=compiled)
    assert bytes_of(tensor) == before


def test_lazily_conjugated_and_negated_tensors_count_as_what_they_show():
    tensor = torch.randn(4, 3, dtype=torch.complex64)
    for view in (tensor.conj(), tensor.imag, tensor.conj().imag, tensor.mT.conj()):
        assert view.is_conj() or view.is_neg() or not view.is_contiguous()
        assert fp1(view) == slow(view)


def test_expanded_elements_count_each_by_itself():
    assert fp1(torch.tensor([3.0, 4.0])[:, None].expand(2, 5)) == slow(torch.tensor([[3.0] * 5, [4.0] * 5]))


def test_bits_count_not_values():
    nan, other = torch.tensor([0x7FC00000, 0x7FC00001], dtype=torch.int32).view(torch.float32)
    assert fp1(nan) == fp1(nan.clone())
    assert len({fp1(nan), fp1(other), fp1(torch.tensor(0.0)), fp1(torch.tensor(-0.0))}) == 4


@settings(max_examples=60, deadline=None)
@given(st.sampled_from([d for d in DTYPES if d is not torch.bool]), st.integers(0, 10_000), st.integers(0, 7))
def test_a_single_flipped_bit_shows_in_both_lanes(dtype, at, bit):
    tensor = random_bits((4, 6), dtype, 8)
    before = fp1(tensor)
    raw = tensor.view(-1).view(torch.uint8)
    raw[at % len(raw)] ^= 1 << bit
    after = fp1(tensor)
    assert before[0] != after[0] and before[1] != after[1]


def test_swapped_rows_columns_and_the_transposed_are_others():
    tensor = random_bits((6, 6), torch.float32, 9)
    others = [tensor, tensor[[1, 0, 2, 3, 4, 5]], tensor[:, [1, 0, 2, 3, 4, 5]], tensor.T, tensor.reshape(36)]
    assert len({fp1(one) for one in others}) == len(others)


def test_an_entry_is_the_content_under_a_name():
    one, two = fp1(torch.ones(3)), fp1(torch.zeros(3))
    names = ["", "a", "a\0", "model.weight", "model.weighs", "ä", "12345678", "123456789"]
    assert len({entry(name, content) for name in names for content in (one, two)}) == 2 * len(names)


def test_text_goes_there_and_back_and_nothing_else_is_taken():
    assert from_text(to_text((1, M)), "here") == (1, M)
    assert to_text((1, M)) == "fp1:0000000000000001ffffffffffffffff"
    for text in ("fp2:" + "0" * 32, "fp1:" + "0" * 31, "fp1:" + "G" * 32, "0" * 36, "fp1:fp1:" + "0" * 28):
        with pytest.raises(FormatError, match=r"here: .* is no fingerprint"):
            from_text(text, "here")


def test_inference_mode_and_grad_do_not_matter():
    weight = torch.nn.Parameter(torch.randn(5, 5))
    fingerprint._remembered.cache_clear()
    with torch.inference_mode():
        inside = fp1(weight)
    assert inside == fp1(weight) == slow(weight.detach())


def test_the_vectors_of_the_format_page():
    vectors = [
        (torch.tensor([0, 1, 2, 255], dtype=torch.uint8), "f4f9de575319df1e9363bd24eb922502"),
        (torch.tensor([True, False]), "a706dd2f4d197e6f5e41ab087439611f"),
        (torch.tensor([1.0, -2.0]).to(torch.float8_e4m3fn), "7c38239c4782c788bf9b99befe4fc108"),
        (torch.tensor([[1.0, -2.0], [0.5, -0.0]], dtype=torch.bfloat16), "4fd6dc85caac3780a86565cfe188d680"),
        (torch.arange(6.0).view(2, 3), "e7fa73ff72a000001f3f270cd9e00000"),
        (torch.tensor(1.0), "3b9fd2dc8880000098d43b9730800000"),
        (torch.tensor([1, -1]), "3470bcdd9b4e90b5369b1ab18c9f3ddd"),
        (torch.tensor([1.0], dtype=torch.float64), "bc89ebbee55000004ad94719ded00000"),
        (torch.tensor([1 - 2j], dtype=torch.complex64), "ec9bfe0ec2800000a80cfaffdb800000"),
        (torch.tensor([1 - 2j], dtype=torch.complex128), "c0cb6001f4300000934e6466c8d00000"),
    ]
    page = (Path(__file__).parents[2] / "docs" / "format.md").read_text()
    for tensor, digits in vectors:
        assert to_text(fp1(tensor)) == f"fp1:{digits}" and f'"fp1:{digits}"' in page, tensor
    assert to_text(fp1(torch.tensor([[4.0, 5.0]]), (1, 1))) == "fp1:c8e5a1d355600000b9e833f5b2200000"
    assert to_text(entry("model.weight", fp1(torch.arange(6.0).view(2, 3)))) == "fp1:6db249ecbe7beaab4f681b0c92013082"
