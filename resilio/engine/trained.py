"""Whether training changed anything between two checkpoints: one number per save for all that the optimizer trains."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import xxhash

from ..records.fingerprints import ZERO, Lanes, combine, from_text
from ..records.schema import TensorRecord

__all__ = ["UNKNOWN", "Trained", "summary", "together"]

_LR = re.compile(r"optimizer\.(.+\.)?param_groups\.\d+\.lr")
_COUNTER = re.compile(r"optimizer\.(.+\.)?state\..+\.step")


@dataclass(frozen=True)
class Trained:
    """What a save says of the progress of training.

    Attributes:
        parameters: of all parameters that an optimizer owns; zero where nothing is known.
        counters: of the optimizer's step counters; zero where it has none.
        moving: whether a learning rate is not zero.
    """

    parameters: Lanes = ZERO
    counters: Lanes = ZERO
    moving: bool = False

    def stale_after(self, before: Trained) -> bool:
        """Whether the parameters are bit for bit those of `before`, though steps were taken."""
        skipped = self.counters != ZERO and self.counters == before.counters
        known = self.parameters != ZERO
        return known and self.parameters == before.parameters and self.moving and not skipped


UNKNOWN = Trained()


def summary(trained: frozenset[str], tensors: Mapping[str, TensorRecord], values: Mapping[str, object]) -> Trained:
    """This rank's share of it, from what it wrote; what was not fingerprinted counts as zero."""
    rates = [value for key, value in values.items() if _LR.fullmatch(key)]
    rates += [any(_of(record)) for key, record in tensors.items() if _LR.fullmatch(key)]
    return Trained(
        combine(_under(key, record) for key, record in tensors.items() if key in trained),
        combine(_under(key, record) for key, record in tensors.items() if _COUNTER.fullmatch(key)),
        any(rate != 0 for rate in rates),
    )


def together(shares: Iterable[Trained]) -> Trained:
    """That of all ranks."""
    shares = list(shares)
    return Trained(
        combine(one.parameters for one in shares),
        combine(one.counters for one in shares),
        any(one.moving for one in shares),
    )


def _of(record: TensorRecord) -> Lanes:
    return combine(from_text(piece.fingerprint, "") for piece in record.pieces if piece.fingerprint is not None)


def _under(key: str, record: TensorRecord) -> Lanes:
    """Times an odd number of its name, so that it still adds up over ranks."""
    factor = xxhash.xxh3_64_intdigest(key.encode()) | 1
    first, second = _of(record)
    return first * factor % 2**64, second * factor % 2**64
