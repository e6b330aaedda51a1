"""Which checkpoints have a reason to live. A pure decision; deleting the others is the sweep's deed.

Policies give reasons, not booleans, so that a deletion can be explained: dropped is what nobody had a reason for.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Literal

from ..errors import ConfigError
from ..types import CheckpointInfo, CheckpointRef
from .checks import positive_int
from .periods import all_reasons, any_reason, in_units, in_words, period_s, steps_or_period_s

__all__ = [
    "KeepDecision",
    "KeepPolicy",
    "decide",
    "keep_all",
    "keep_best",
    "keep_every",
    "keep_healthy",
    "keep_last",
    "keep_within",
]


class KeepPolicy(ABC):
    """Gives checkpoints reasons to live. Frozen, equal by value, prints as its source.

    `a | b` keeps what either keeps, `a & b` what both keep, each asked about the whole lineage.
    """

    @abstractmethod
    def reasons(self, checkpoints: Sequence[CheckpointInfo], now_s: float) -> dict[CheckpointRef, str]:
        """Why each one it keeps must live, in a few words for people.

        Args:
            checkpoints: those of the lineage, oldest first.
            now_s: Unix seconds.

        Returns:
            A reason for each that it keeps; it has nothing to say of the others.
        """

    def __or__(self, other: KeepPolicy) -> KeepPolicy:
        if not isinstance(other, KeepPolicy):
            return NotImplemented
        return _AnyKeep(_parts(self, _AnyKeep) + _parts(other, _AnyKeep))

    def __and__(self, other: KeepPolicy) -> KeepPolicy:
        if not isinstance(other, KeepPolicy):
            return NotImplemented
        return _AllKeep(_parts(self, _AllKeep) + _parts(other, _AllKeep))


@dataclass(frozen=True)
class KeepDecision:
    """What a policy came to.

    Attributes:
        kept: each that lives, oldest first, with all its reasons.
        dropped: each that nobody had a reason for, oldest first.
    """

    kept: dict[CheckpointRef, str]
    dropped: tuple[CheckpointRef, ...]


def decide(policy: KeepPolicy, checkpoints: Sequence[CheckpointInfo], now_s: float) -> KeepDecision:
    """Ask `policy` about `checkpoints`, in any order, and add the reasons no policy can take away.

    The newest of the lineage always lives, and the newest healthy one where that is not. What is off the lineage is not
    the policy's to drop and not shown to it, so an abandoned branch never counts as one of the last three.
    """
    ordered = sorted(checkpoints, key=lambda info: info.ref)
    lineage = [info for info in ordered if info.on_lineage]
    given = policy.reasons(lineage, now_s)
    healthy = [info.ref for info in lineage if info.healthy is not False]
    kept: dict[CheckpointRef, str] = {}
    dropped: list[CheckpointRef] = []
    for info in ordered:
        reasons = []
        if not info.on_lineage:
            reasons.append("off the lineage")
        elif info.ref in given:
            reasons.append(given[info.ref])
        if lineage and info.ref == lineage[-1].ref:
            reasons.append("newest of the lineage")
        elif healthy and info.ref == healthy[-1]:
            reasons.append("newest that is healthy")
        if reasons:
            kept[info.ref] = "; ".join(reasons)
        else:
            dropped.append(info.ref)
    return KeepDecision(kept, tuple(dropped))


def keep_all() -> KeepPolicy:
    """Keep every checkpoint. The default: nobody loses one they did not know would go."""
    return _KeepAll()


def keep_last(n: int) -> KeepPolicy:
    """Keep the newest `n` of the lineage.

    Raises:
        ConfigError: `n` is not a whole number of at least 1.
    """
    return _KeepLast(positive_int(n, "keep_last(n)"))


def keep_every(
    steps: int | timedelta | None = None,
    *,
    days: float | None = None,
    hours: float | None = None,
    minutes: float | None = None,
    seconds: float | None = None,
) -> KeepPolicy:
    """Keep those whose step is a multiple of `steps`, or the first one of each period of so much time.

    Say either steps or time (`days`, `hours`, `minutes` and `seconds` add up; a `timedelta` is time). Periods count
    from the Unix epoch, so ``days=1`` changes at midnight UTC, and a checkpoint is in the one in which it was
    committed. The first of a period is kept, as it stays the first: one that has this reason never loses it.

    It keeps what was saved, and does not save: unless the save policy saves then, there is nothing to keep.

    Raises:
        ConfigError: nothing, both, or a number that is not above 0.
    """
    units = {"days": days, "hours": hours, "minutes": minutes, "seconds": seconds}
    whole, seconds_each = steps_or_period_s("keep_every", steps, units)
    return _KeepEvery(whole) if whole else _KeepEveryTime(seconds_each)


def keep_within(
    time: timedelta | None = None,
    *,
    days: float | None = None,
    hours: float | None = None,
    minutes: float | None = None,
    seconds: float | None = None,
) -> KeepPolicy:
    """Keep those that are younger than this (the units add up), by the time they were committed.

    Ages are looked at when a sweep is, after a save: a run that saves no more deletes nothing. One committed in the
    future, by a clock that was set back since, counts as young.

    Raises:
        ConfigError: no time, both kinds, or a number that is not above 0.
    """
    units = {"days": days, "hours": hours, "minutes": minutes, "seconds": seconds}
    return _KeepWithin(period_s("keep_within", time, units))


def keep_healthy(n: int) -> KeepPolicy:
    """Keep the newest `n` that are healthy: no NaN in any tensor, no infinity in what is trained.

    One that was saved before such values were counted counts as healthy. Join it with another policy, which keeps what
    else there is to keep: ``keep_last(3) | keep_healthy(2)``.

    Raises:
        ConfigError: `n` is not a whole number of at least 1.
    """
    return _KeepHealthy(positive_int(n, "keep_healthy(n)"))


def keep_best(n: int, metric: str, *, mode: Literal["min", "max"] = "min") -> KeepPolicy:
    """Keep the `n` with the lowest (or highest) value of a metric.

    Of equal ones the newer is better. One without the metric, or where it is not a number, is never kept; an infinite
    one, of either sign, is worse than every finite one.

    Args:
        n: how many.
        metric: its name in the ``metrics`` of `CheckpointManager.step`.
        mode: whether low is good, as for a loss, or high, as for an accuracy.

    Raises:
        ConfigError: `n` is not a whole number of at least 1, `metric` no name, or `mode` neither.
    """
    if not isinstance(metric, str) or not metric:
        raise ConfigError(f'keep_best takes the name of a metric: keep_best(2, "loss"), not {metric!r}.', value=metric)
    if mode not in ("min", "max"):
        raise ConfigError(f"keep_best(mode={mode!r}): there are 'min' and 'max'.", value=mode)
    return _KeepBest(positive_int(n, "keep_best(n)"), metric, mode)


@dataclass(frozen=True, repr=False)
class _KeepAll(KeepPolicy):
    def reasons(self, checkpoints: Sequence[CheckpointInfo], now_s: float) -> dict[CheckpointRef, str]:
        return {info.ref: "all are kept" for info in checkpoints}

    def __repr__(self) -> str:
        return "keep_all()"


@dataclass(frozen=True, repr=False)
class _KeepLast(KeepPolicy):
    n: int

    def reasons(self, checkpoints: Sequence[CheckpointInfo], now_s: float) -> dict[CheckpointRef, str]:
        return {info.ref: f"one of the last {self.n}" for info in checkpoints[-self.n :]}

    def __repr__(self) -> str:
        return f"keep_last({self.n})"


@dataclass(frozen=True, repr=False)
class _KeepHealthy(KeepPolicy):
    n: int

    def reasons(self, checkpoints: Sequence[CheckpointInfo], now_s: float) -> dict[CheckpointRef, str]:
        healthy = [info for info in checkpoints if info.healthy is not False]
        return {
            info.ref: f"one of the last {self.n} healthy{'' if info.healthy else ', as far as known'}"
            for info in healthy[-self.n :]
        }

    def __repr__(self) -> str:
        return f"keep_healthy({self.n})"


@dataclass(frozen=True, repr=False)
class _KeepEvery(KeepPolicy):
    steps: int

    def reasons(self, checkpoints: Sequence[CheckpointInfo], now_s: float) -> dict[CheckpointRef, str]:
        reason = f"every {in_words(self.steps, 'steps')}"
        return {info.ref: reason for info in checkpoints if info.step % self.steps == 0}

    def __repr__(self) -> str:
        return f"keep_every({self.steps})"


@dataclass(frozen=True, repr=False)
class _KeepEveryTime(KeepPolicy):
    seconds: float

    def reasons(self, checkpoints: Sequence[CheckpointInfo], now_s: float) -> dict[CheckpointRef, str]:
        unit, amount = in_units(self.seconds)
        first: dict[float, CheckpointRef] = {}
        for info in checkpoints:  # oldest first on the lineage: commit times may go backwards
            first.setdefault(info.time_s // self.seconds, info.ref)
        return {ref: f"every {in_words(amount, unit)}" for ref in first.values()}

    def __repr__(self) -> str:
        unit, amount = in_units(self.seconds)
        return f"keep_every({unit}={amount})"


@dataclass(frozen=True, repr=False)
class _KeepWithin(KeepPolicy):
    seconds: float

    def reasons(self, checkpoints: Sequence[CheckpointInfo], now_s: float) -> dict[CheckpointRef, str]:
        unit, amount = in_units(self.seconds)
        reason = f"younger than {in_words(amount, unit)}"
        return {info.ref: reason for info in checkpoints if now_s - info.time_s < self.seconds}

    def __repr__(self) -> str:
        unit, amount = in_units(self.seconds)
        return f"keep_within({unit}={amount})"


@dataclass(frozen=True, repr=False)
class _KeepBest(KeepPolicy):
    n: int
    metric: str
    mode: Literal["min", "max"]

    def reasons(self, checkpoints: Sequence[CheckpointInfo], now_s: float) -> dict[CheckpointRef, str]:
        sign = 1 if self.mode == "min" else -1
        ranked = []
        for age, info in enumerate(reversed(checkpoints)):
            value = info.metrics.get(self.metric, math.nan)
            if not math.isnan(value):
                finite = math.isfinite(value)
                ranked.append(((not finite, sign * value if finite else 0.0, age), value, info.ref))
        ranked.sort(key=lambda entry: entry[0])
        return {ref: f"one of the best {self.n} by {self.metric} ({value:.6g})" for _, value, ref in ranked[: self.n]}

    def __repr__(self) -> str:
        mode = "" if self.mode == "min" else f", mode={self.mode!r}"
        return f"keep_best({self.n}, {self.metric!r}{mode})"


@dataclass(frozen=True, repr=False)
class _Joined(KeepPolicy):
    policies: tuple[KeepPolicy, ...]

    def _reasons(self, checkpoints: Sequence[CheckpointInfo], now_s: float) -> dict[CheckpointRef, list[str]]:
        found: dict[CheckpointRef, list[str]] = {}
        for policy in self.policies:
            for ref, reason in policy.reasons(checkpoints, now_s).items():
                found.setdefault(ref, []).append(reason)
        return found


@dataclass(frozen=True, repr=False)
class _AnyKeep(_Joined):
    def reasons(self, checkpoints: Sequence[CheckpointInfo], now_s: float) -> dict[CheckpointRef, str]:
        return {ref: any_reason(reasons) for ref, reasons in self._reasons(checkpoints, now_s).items()}

    def __repr__(self) -> str:
        return " | ".join(map(repr, self.policies))


@dataclass(frozen=True, repr=False)
class _AllKeep(_Joined):
    def reasons(self, checkpoints: Sequence[CheckpointInfo], now_s: float) -> dict[CheckpointRef, str]:
        found = self._reasons(checkpoints, now_s)
        return {ref: all_reasons(reasons) for ref, reasons in found.items() if len(reasons) == len(self.policies)}

    def __repr__(self) -> str:
        return " & ".join(f"({p!r})" if isinstance(p, _AnyKeep) else repr(p) for p in self.policies)


def _parts(policy: KeepPolicy, kind: type[_Joined]) -> tuple[KeepPolicy, ...]:
    return policy.policies if isinstance(policy, kind) else (policy,)
