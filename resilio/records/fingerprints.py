"""Fingerprints (`fp1`): a hash of a logical tensor that is the same at every sharding. Their arithmetic, without torch.

For words b(i) of a tensor (see docs/format.md for what the words of each dtype are)::

    F_lane = sum over i of b(i) * W_0[i_0] * ... * W_{d-1}[i_{d-1}]   mod 2^64,   lanes 0 and 1

So a fingerprint is a sum: those of pieces that tile a tensor add up to its own. One changed element always shows, since
the weights are odd. Against accident, not against an attacker.

Source: `mix` is the output function of SplitMix64 (Steele, Lea, Flood 2014).
"""

from __future__ import annotations

from collections.abc import Iterable

from ..errors import FormatError

__all__ = ["ZERO", "Lanes", "combine", "entry", "from_text", "mix", "seed", "to_text"]

Lanes = tuple[int, int]  # two numbers below 2^64

ZERO: Lanes = (0, 0)
_MASK = (1 << 64) - 1
_PREFIX = "fp1:"


def mix(x: int) -> int:
    """64 bits to 64 bits, one to one, each bit of the result from all bits of `x`."""
    x = (x + 0x9E3779B97F4A7C15) & _MASK
    x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9 & _MASK
    x = (x ^ (x >> 27)) * 0x94D049BB133111EB & _MASK
    return x ^ (x >> 31)


def seed(lane: int, dim: int) -> int:
    """What the weights of a dimension begin from: `W[j] = mix(seed + j mod 2^64) | 1`."""
    return mix(2 * dim + lane)


def combine(parts: Iterable[Lanes]) -> Lanes:
    """The fingerprint of what `parts` tile."""
    first = second = 0
    for one, two in parts:
        first, second = (first + one) & _MASK, (second + two) & _MASK
    return first, second


def entry(name: str, content: Lanes) -> Lanes:
    """The fingerprint of "these values under this name": `content` with the flat key mixed in."""
    data = name.encode()
    first, second = content
    for at in range(0, len(data), 8):
        word = int.from_bytes(data[at : at + 8], "little")
        first, second = mix(first ^ word), mix(second ^ word)
    return mix(first ^ len(data)), mix(second ^ len(data))


def to_text(lanes: Lanes) -> str:
    """As it is written: `fp1:` and 32 hex digits, lane 0 first."""
    return f"{_PREFIX}{lanes[0]:016x}{lanes[1]:016x}"


def from_text(text: str, where: str) -> Lanes:
    """The lanes in `text`.

    Raises:
        FormatError: it is no fingerprint that this resilio knows; names `where`.
    """
    digits = text.removeprefix(_PREFIX)
    if len(text) != len(_PREFIX) + 32 or len(digits) != 32 or not set(digits) <= set("0123456789abcdef"):
        raise FormatError(
            f"{where}: {text!r} is no fingerprint of a kind that this resilio knows (fp1)", where=where, newer=True
        )
    return int(digits[:16], 16), int(digits[16:], 16)
