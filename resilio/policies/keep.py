"""Which checkpoints have a reason to live. A pure decision; deleting the others is the sweep's deed.

Policies give reasons, not booleans, so that a deletion can be explained: dropped is what nobody had a reason for.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass

from ..types import CheckpointInfo, CheckpointRef
from .checks import positive_int

__all__ = ["KeepDecision", "KeepPolicy", "decide", "keep_all", "keep_every", "keep_last"]


class KeepPolicy(ABC):
    """Gives checkpoints reasons to live. Frozen; prints as its source; `a | b` keeps what either keeps."""

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
        return _AnyKeep(_parts(self) + _parts(other))


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
    """Ask `policy` about `checkpoints`, in any order, and add the two reasons no policy can take away.

    The newest of the lineage always lives. What is off the lineage is not the policy's to drop and not shown to it, so
    an abandoned branch never counts as one of the last three.
    """
    ordered = sorted(checkpoints, key=lambda info: info.ref)
    lineage = [info for info in ordered if info.on_lineage]
    given = policy.reasons(lineage, now_s)
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


def keep_every(steps: int) -> KeepPolicy:
    """Keep those whose step is a multiple of `steps`.

    It keeps what was saved, and does not save: unless the save policy saves at these steps, there is nothing to keep.

    Raises:
        ConfigError: `steps` is not a whole number of at least 1.
    """
    return _KeepEvery(positive_int(steps, "keep_every(steps)"))


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
class _KeepEvery(KeepPolicy):
    steps: int

    def reasons(self, checkpoints: Sequence[CheckpointInfo], now_s: float) -> dict[CheckpointRef, str]:
        return {info.ref: f"every {self.steps} steps" for info in checkpoints if info.step % self.steps == 0}

    def __repr__(self) -> str:
        return f"keep_every({self.steps})"


@dataclass(frozen=True, repr=False)
class _AnyKeep(KeepPolicy):
    policies: tuple[KeepPolicy, ...]

    def reasons(self, checkpoints: Sequence[CheckpointInfo], now_s: float) -> dict[CheckpointRef, str]:
        found: dict[CheckpointRef, list[str]] = {}
        for policy in self.policies:
            for ref, reason in policy.reasons(checkpoints, now_s).items():
                found.setdefault(ref, []).append(reason)
        return {ref: "; ".join(dict.fromkeys(reasons)) for ref, reasons in found.items()}

    def __repr__(self) -> str:
        return " | ".join(map(repr, self.policies))


def _parts(policy: KeepPolicy) -> tuple[KeepPolicy, ...]:
    return policy.policies if isinstance(policy, _AnyKeep) else (policy,)
