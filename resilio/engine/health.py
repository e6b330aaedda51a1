"""How many values of what is saved are no finite numbers, and whether that makes the checkpoint unhealthy.

A NaN is a fault anywhere. An infinity is one where training goes on from it: in a parameter that an optimizer trains,
and in the optimizer's state. Elsewhere it may be meant: a mask of -inf is an ordinary buffer.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field

import torch

from ..records.health import SHOWN, faults_text
from ..records.schema import TensorRecord

__all__ = ["NOT_COUNTED", "Health", "non_finite", "summary", "together"]

_CHUNK = 1 << 16  # elements: what counting makes besides fits the cache

# The codes of one byte that are NaN, and those that are infinite. torch computes nothing with these dtypes.
_CODES: dict[torch.dtype, tuple[tuple[int, ...], tuple[int, ...]]] = {
    torch.float8_e4m3fn: ((0x7F, 0xFF), ()),
    torch.float8_e4m3fnuz: ((0x80,), ()),
    torch.float8_e5m2: ((0x7D, 0x7E, 0x7F, 0xFD, 0xFE, 0xFF), (0x7C, 0xFC)),
    torch.float8_e5m2fnuz: ((0x80,), ()),
    torch.float8_e8m0fnu: ((0xFF,), ()),
}
# The bits of plus infinity: as integers, those of all finite numbers of that sign are smaller.
_INFINITE: dict[torch.dtype, tuple[int, torch.dtype]] = {
    torch.float16: (0x7C00, torch.int16),
    torch.bfloat16: (0x7F80, torch.int16),
    torch.float32: (0x7F80_0000, torch.int32),
    torch.float64: (0x7FF0_0000_0000_0000, torch.int64),
}


@dataclass(frozen=True)
class Health:
    """What a save says of values that are no finite numbers.

    Attributes:
        non_finite: how many make the checkpoint unhealthy; None: they were not counted.
        named: the tensors that hold them, the first by name -> how many are NaN, and infinite.
        more: whether there are others.
    """

    non_finite: int | None = None
    named: Mapping[str, tuple[int, int]] = field(default_factory=dict)
    more: bool = False

    def __str__(self) -> str:
        return faults_text(self.named, self.more)


NOT_COUNTED = Health()


def non_finite(tensor: torch.Tensor) -> tuple[int, int]:
    """How many elements of a plain tensor are NaN, and how many others infinite; of a complex one either part counts.

    Where there are none, a look at the extremes says so without a copy. Only else they are counted.

    Blocks: on a device, until that is done.
    """
    tensor = tensor.detach()
    if tensor.numel() == 0:
        return 0, 0
    if tensor.dtype in _CODES:
        return _of_bytes(tensor)
    if tensor.is_complex():
        parts = torch.view_as_real(tensor.resolve_conj())
    elif tensor.dtype in _INFINITE:
        parts = tensor.unsqueeze(-1)
    else:
        return 0, 0
    if _all_finite(parts.resolve_neg()):
        return 0, 0
    nan = bad = 0
    for part in _chunks(parts.reshape(-1, parts.shape[-1])):
        nan += int(torch.isnan(part).any(1).sum())
        bad += int(torch.isfinite(part).logical_not().any(1).sum())
    return nan, bad - nan


def _all_finite(tensor: torch.Tensor) -> bool:
    if tensor.device.type != "cpu":
        return all(math.isfinite(one.item()) for one in torch.aminmax(tensor))  # a NaN is both of them
    # As integers, by numpy: torch would take all of its threads for it, which are the training loop's.
    infinite, integer = _INFINITE[tensor.dtype]
    bits = tensor.view(integer).numpy()
    sign = 1 << (8 * bits.itemsize - 1)
    return bool(bits.max() < infinite and bits.view(f"u{bits.itemsize}").max() < infinite + sign)


def _of_bytes(tensor: torch.Tensor) -> tuple[int, int]:
    nan, infinite = _CODES[tensor.dtype]
    codes = (*nan, *infinite)
    signed, unsigned = tensor.view(torch.int8), tensor.view(torch.uint8)
    if codes == (0x80,):
        clean = int(signed.amin()) > -128
    else:  # they are the largest of those with either sign
        clean = _most(signed) < min((code for code in codes if code < 0x80), default=0x80)
        clean = clean and _most(unsigned) < min(code for code in codes if code >= 0x80)
    if clean:
        return 0, 0
    counts = [0, 0]
    for part in _chunks(unsigned.reshape(-1)):
        for kind, wanted in enumerate((nan, infinite)):
            counts[kind] += sum(int((part == code).sum()) for code in wanted)
    return counts[0], counts[1]


def _most(tensor: torch.Tensor) -> int:
    return int(tensor.numpy().max() if tensor.device.type == "cpu" else tensor.amax())


def _chunks(flat: torch.Tensor) -> Iterator[torch.Tensor]:
    return (flat[at : at + _CHUNK] for at in range(0, len(flat), _CHUNK))


def summary(finite: frozenset[str], tensors: Mapping[str, TensorRecord]) -> Health:
    """This rank's share of it, from what it wrote.

    Args:
        finite: flat keys of the tensors in which an infinity is a fault too.
        tensors: by flat key, counted.
    """
    named: dict[str, tuple[int, int]] = {}
    for key in sorted(tensors):
        pieces = tensors[key].pieces
        nan, infinite = sum(one.nan for one in pieces), sum(one.inf for one in pieces)
        if nan or (infinite and key in finite):
            named[key] = nan, infinite if key in finite else 0
    return _first(sum(map(sum, named.values())), named)


def together(shares: Iterable[Health]) -> Health:
    """That of all ranks. A tensor that is among the first of all is among the first of each rank that has it."""
    shares = list(shares)
    counts = [one.non_finite for one in shares]
    named: dict[str, tuple[int, int]] = {}
    for share in shares:
        for key, (nan, infinite) in share.named.items():
            before = named.get(key, (0, 0))
            named[key] = before[0] + nan, before[1] + infinite
    known = None if not shares or None in counts else sum(filter(None, counts))
    return _first(known, named, more=any(one.more for one in shares))


def _first(known: int | None, named: Mapping[str, tuple[int, int]], more: bool = False) -> Health:
    return Health(known, {key: named[key] for key in sorted(named)[:SHOWN]}, more or len(named) > SHOWN)
