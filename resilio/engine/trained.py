"""Whether training changed anything between two checkpoints: one number per save for all that the optimizer trains."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field

import xxhash

from ..records.fingerprints import ZERO, Lanes, combine, from_text
from ..records.schema import TensorRecord

__all__ = ["UNKNOWN", "Trained", "summary", "together"]

_LR = re.compile(r".+\.param_groups\.\d+\.lr")
_COUNTER = ".step"
_SCALE, _GROWTH = ".scale", "._growth_tracker"  # what `torch.amp.GradScaler.state_dict()` calls them


@dataclass(frozen=True)
class Trained:
    """What a save says of the progress of training.

    Attributes:
        parameters: of all parameters that an optimizer owns; zero where nothing is known.
        counters: of the optimizer's step counters; zero where it has none.
        moving: whether a learning rate is not zero.
        scalers: name of each gradient scaler -> its scale, and the number of steps since that was changed.
    """

    parameters: Lanes = ZERO
    counters: Lanes = ZERO
    moving: bool = False
    scalers: Mapping[str, tuple[float, int]] = field(default_factory=dict)

    def stale_after(self, before: Trained) -> bool:
        """Whether the parameters are bit for bit those of `before`, though steps were taken."""
        skipped = (self.counters != ZERO and self.counters == before.counters) or self._backed_off(before)
        known = self.parameters != ZERO
        return known and self.parameters == before.parameters and self.moving and not skipped

    def _backed_off(self, before: Trained) -> bool:
        """Whether a scaler has skipped the last step. An optimizer without counters tells nothing of that."""
        return any(
            steps == 0 and name in before.scalers and scale < before.scalers[name][0]
            for name, (scale, steps) in self.scalers.items()
        )


UNKNOWN = Trained()


def summary(
    trained: frozenset[str],
    optimizers: frozenset[str],
    tensors: Mapping[str, TensorRecord],
    values: Mapping[str, object],
) -> Trained:
    """This rank's share of it, from what it wrote; what was not fingerprinted counts as zero.

    Args:
        trained: flat keys of the parameters that an optimizer owns.
        optimizers: flat keys of optimizer state.
        tensors: by flat key, with fingerprints.
        values: by flat key.
    """
    rates = [value for key, value in values.items() if _LR.fullmatch(key)]
    rates += [any(_of(record)) for key, record in tensors.items() if _LR.fullmatch(key)]
    return Trained(
        combine(_under(key, record) for key, record in tensors.items() if key in trained),
        combine(_under(key, record) for key, record in tensors.items() if key in optimizers and key.endswith(_COUNTER)),
        any(rate != 0 for rate in rates),
        dict(_scalers(values)),
    )


def together(shares: Iterable[Trained]) -> Trained:
    """That of all ranks."""
    shares = list(shares)
    return Trained(
        combine(one.parameters for one in shares),
        combine(one.counters for one in shares),
        any(one.moving for one in shares),
        {name: held for one in shares for name, held in one.scalers.items()},
    )


def _scalers(values: Mapping[str, object]) -> Iterator[tuple[str, tuple[float, int]]]:
    for key, steps in values.items():
        scale = values.get(key.removesuffix(_GROWTH) + _SCALE) if key.endswith(_GROWTH) else None
        if isinstance(scale, int | float) and isinstance(steps, int):
            yield key.removesuffix(_GROWTH), (scale, steps)


def _of(record: TensorRecord) -> Lanes:
    return combine(from_text(piece.fingerprint, "") for piece in record.pieces if piece.fingerprint is not None)


def _under(key: str, record: TensorRecord) -> Lanes:
    """Times an odd number of its name, so that it still adds up over ranks."""
    factor = xxhash.xxh3_64_intdigest(key.encode()) | 1
    first, second = _of(record)
    return first * factor % 2**64, second * factor % 2**64
