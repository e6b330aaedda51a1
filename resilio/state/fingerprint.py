"""The fingerprint (`fp1`) of a piece of a tensor: see `resilio.records.fingerprints` for what it is.

A weight belongs to a dimension and an index in it, and the sum does not care for the order of dims. So a piece is
turned to row-major by permuting dims, seen as a matrix of (outer, inner) words, and summed by rows, then by columns.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import lru_cache
from itertools import product

import torch

from ..records.fingerprints import Lanes, seed
from .fingerprint_compiled import Kernel, kernel

__all__ = ["fp1"]

_WORD = {1: torch.uint8, 2: torch.uint16, 4: torch.uint32}
_INNER = 1 << 13  # elements: rows of fewer are joined with the dim before
_LONGEST = 1 << 15  # elements: longer ones are cut, or their weights would leave the cache
_CHUNK = 1 << 16  # words that the plain way widens to 64 bits at a time: 512 KiB, twice
_COMPILED = 1 << 20  # bytes: for fewer a compiler is not worth its start
_CACHED = 1 << 12  # weights of dims up to this length are remembered
_MASK = (1 << 64) - 1
_STEP = 0x9E3779B97F4A7C15  # see `mix`


def fp1(tensor: torch.Tensor, offsets: Sequence[int] | None = None, *, compiled: bool | None = None) -> Lanes:
    """The fingerprint of a plain strided tensor, or of a piece of a larger one. Reads, changes nothing.

    Args:
        tensor: the elements; any dtype, strides and device.
        offsets: of the first one in the whole tensor, per dim; None: it is the whole.
        compiled: whether to use the loop in C; None: where that pays. The result is the same.

    Returns:
        Two numbers below 2^64; those of pieces that tile a tensor add up to its own.

    Blocks: on a device, until that is done.
    """
    tensor = tensor.detach()
    if tensor.numel() == 0:
        return 0, 0
    if tensor.dim() == 0:
        tensor, offsets = tensor.reshape(1), None
    starts = tuple(offsets) if offsets is not None else (0,) * tensor.dim()
    if compiled is None:
        # Once it is there it is faster for the smallest as well.
        compiled = tensor.nbytes >= _COMPILED or kernel.cache_info().currsize > 0
    loop = kernel() if compiled and tensor.device.type == "cpu" else None
    sums = torch.zeros(2, dtype=torch.int64, device=tensor.device)
    with torch.no_grad():
        if loop is not None and tensor.numel() <= _CACHED and _lies_plainly(tensor):
            loop.add(_words(tensor.unsqueeze(0)), _columns(starts, tensor.shape, tensor.dtype), _one(), sums)
        else:
            # Slowest dim first: any dense layout is contiguous then.
            strides = tensor.stride()
            dims = sorted(range(tensor.dim()), key=lambda dim: (-strides[dim], dim))
            _add(tensor.permute(dims), dims, [starts[dim] for dim in dims], sums, loop)
    first, second = sums.tolist()
    return first & _MASK, second & _MASK


def _add(tensor: torch.Tensor, dims: list[int], starts: list[int], sums: torch.Tensor, loop: Kernel | None) -> None:
    """Add the lanes of `tensor` to `sums`; `dims` and `starts` say where its dims and elements belong."""
    last = tensor.dim() - 1
    alone = tensor.shape[last] == tensor.numel()  # so each weight is used once: no table of them
    if tensor.shape[last] > _LONGEST and not alone:
        for at in range(0, tensor.shape[last], _LONGEST):
            part = tensor.narrow(last, at, min(_LONGEST, tensor.shape[last] - at))
            _add(part, dims, [*starts[:last], starts[last] + at], sums, loop)
        return
    cut = last if tensor.shape[last] <= _LONGEST else last + 1  # the dims from here on are the columns
    while 0 < cut <= last and math.prod(tensor.shape[cut - 1 :]) <= _INNER:
        cut -= 1
    extras = _extras(tensor.dtype)
    inner = [
        *((dim, start, size) for dim, start, size in zip(dims[cut:], starts[cut:], tensor.shape[cut:], strict=True)),
        *((len(dims) + i, 0, size) for i, size in enumerate(extras)),
    ]
    columns = _product(inner, tensor.device, loop)
    if cut == 0:
        _add_rows(_words(tensor.unsqueeze(0)), columns, _ones(tensor.device), sums, loop)
        return
    plain, top = _lies_plainly(tensor), cut - 1  # the dims from `top` to `cut` are the rows
    while plain and top > 0 and math.prod(tensor.shape[top - 1 : cut]) <= _LONGEST:
        top -= 1
    places = list(zip(dims, starts, tensor.shape, strict=True))
    tensor = tensor.flatten(top, cut - 1)
    # What does not lie plainly is copied; what does, the loop takes whole.
    step = max(1, _CHUNK // columns.shape[1]) if not plain else _LONGEST if loop is None else tensor.shape[top]
    for index in product(*map(range, tensor.shape[:top])):
        block = tensor[index]
        fixed = [(dim, start + i, 1) for (dim, start, _), i in zip(places, index, strict=False)]
        for at in range(0, block.shape[0], step):
            words = _words(block[at : at + step])
            if top < cut - 1:  # all of them at once
                rows = _product([*fixed, *places[top:cut]], tensor.device, loop)
                _add_rows(words, columns, rows, sums, loop)
                continue
            dim, start, _ = places[top]
            if loop is not None:
                first = [_signed(seed(lane, dim) + start + at + _STEP) for lane in (0, 1)]
                loop.add_long(words, columns * _product(fixed, tensor.device, loop), torch.tensor(first), sums)
            else:
                rows = _product([*fixed, (dim, start + at, len(words))], tensor.device, loop)
                _add_rows(words, columns, rows, sums, loop)


def _words(part: torch.Tensor) -> torch.Tensor:
    """The words of its elements, by its first dim."""
    if not _lies_plainly(part):
        part = part.resolve_conj().resolve_neg().contiguous()
    width = min(4, part.element_size() // (2 if part.is_complex() else 1))
    return part.reshape(-1).view(_WORD[width]).view(part.shape[0], -1)


def _add_rows(
    words: torch.Tensor, columns: torch.Tensor, rows: torch.Tensor, sums: torch.Tensor, loop: Kernel | None
) -> None:
    if loop is not None:
        loop.add(words, columns, rows, sums)
        return
    if words.shape[1] == 1:
        words, columns, rows = words.view(1, -1), rows * columns, _ones(words.device)
    step = max(1, _CHUNK // words.shape[1])
    for at in range(0, words.shape[0], step):
        wide = words[at : at + step].to(torch.int64)  # of another dtype, so never the memory of `words`
        for lane in (0, 1):
            sums[lane] += ((wide * columns[lane]).sum(1) * rows[lane, at : at + step]).sum()


def _lies_plainly(tensor: torch.Tensor) -> bool:
    return tensor.is_contiguous() and not tensor.is_conj() and not tensor.is_neg()


def _extras(dtype: torch.dtype) -> tuple[int, ...]:
    """The dims of the words of one element: real and imaginary part, low and high half of 8 bytes."""
    pair = (2,) if dtype.is_complex else ()
    return (*pair, 2) if dtype.itemsize // (len(pair) + 1) == 8 else pair


def _product(dims: Sequence[tuple[int, int, int]], device: torch.device, loop: Kernel | None) -> torch.Tensor:
    """(2, n): the products of the weights of (dim, start, size), the last one fastest."""
    found = _ones(device)
    for dim, start, size in dims:
        found = (found[:, :, None] * _weights(dim, start, size, device, loop)[:, None, :]).reshape(2, -1)
    return found.contiguous()


@lru_cache(maxsize=256)
def _columns(starts: tuple[int, ...], shape: torch.Size, dtype: torch.dtype) -> torch.Tensor:
    """The weights of all words of a small tensor: many of a model have one shape."""
    dims = [*zip(range(len(shape)), starts, shape, strict=True)]
    dims += [(len(shape) + i, 0, size) for i, size in enumerate(_extras(dtype))]
    with torch.inference_mode(False):
        return _product(dims, torch.device("cpu"), None)


@lru_cache(maxsize=1)
def _one() -> torch.Tensor:
    with torch.inference_mode(False):
        return _ones(torch.device("cpu"))


def _ones(device: torch.device) -> torch.Tensor:
    return torch.ones(2, 1, dtype=torch.int64, device=device)


def _weights(dim: int, start: int, size: int, device: torch.device, loop: Kernel | None) -> torch.Tensor:
    """(2, size): W of both lanes, as the int64 with the same bits."""
    if size <= _CACHED:
        return _remembered(dim, start, size, device)
    if loop is not None:
        return torch.stack([loop.weights(seed(lane, dim) + start + _STEP & _MASK, size) for lane in (0, 1)])
    return _made(dim, start, size, device)


def _made(dim: int, start: int, size: int, device: torch.device) -> torch.Tensor:
    with torch.inference_mode(False):
        x = torch.arange(start, start + size, device=device).repeat(2, 1)
        x += torch.tensor([[_signed(seed(lane, dim) + _STEP)] for lane in (0, 1)], device=device)
        for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB)):
            x = (x ^ ((x >> shift) & ((1 << (64 - shift)) - 1))) * _signed(factor)  # >> keeps the sign: mask it off
        return (x ^ ((x >> 31) & ((1 << 33) - 1))) | 1


_remembered = lru_cache(maxsize=256)(_made)  # 64 KiB each at most: most tensors of a model are like another one


def _signed(x: int) -> int:
    x &= _MASK
    return x - (1 << 64) if x >> 63 else x
