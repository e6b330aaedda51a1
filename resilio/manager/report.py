"""What a restore tells."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from ..state.flat import Outcome
from ..types import CheckpointInfo, Damage

__all__ = ["RestoreReport"]

_SHOWN = 3  # of thousands of keys; the fields have all of them


@dataclass(frozen=True)
class RestoreReport:
    """What was restored, from where, and how each part came back. The same on every rank but for `outcomes`.

    Attributes:
        found: the checkpoint, None if the run has none (and the job starts at step 0). Its `healthy` says whether
            training can go on from its values.
        outcomes: one per component: exact, re-derived for another world, or stayed live.
        passed_over: newer checkpoints of the lineage that are damaged, newest first, and why each was not taken.
        renamed: saved flat key -> live one, of all that came back under another name.
        stayed: live flat keys that stayed as they were; of an optimizer or other part that stayed whole, its name.
        unused: flat keys of the checkpoint that went nowhere, but for what is a rank's own.
        unfinished: saves begun after it that never became a checkpoint, newest first, and what each lacks. Only looked
            for where the newest was asked for.
        read_bytes: bytes of tensors this rank read.
        seconds: from the choice to the last applied value, on this rank.
    """

    found: CheckpointInfo | None
    outcomes: tuple[Outcome, ...] = ()
    renamed: Mapping[str, str] = field(default_factory=dict)
    stayed: tuple[str, ...] = ()
    unused: tuple[str, ...] = ()
    passed_over: tuple[Damage, ...] = ()
    unfinished: tuple[Damage, ...] = ()
    read_bytes: int = 0
    seconds: float = 0.0

    @property
    def step(self) -> int:
        """Optimizer steps completed; 0 for a new run."""
        return self.found.step if self.found else 0

    def __repr__(self) -> str:
        parts = ["no checkpoint: a new run"]
        if self.found is not None:
            bad = ["NOT HEALTHY"] if self.found.healthy is False else []
            parts = [str(self.found.ref), *bad, *(f"{one.component} {one.how}" for one in self.outcomes)]
        passed = [f"{len(self.passed_over)} passed over"] if self.passed_over else []
        return f"<RestoreReport {', '.join([*parts, *passed])}>"

    def __str__(self) -> str:
        lines = ["no checkpoint: a new run"]
        if self.found is not None:
            lines = [f"restored {self.found.ref} of {self.found.world} rank(s) in {self.seconds:.2f} s"]
            if self.found.non_finite:
                lines.append(f"  NOT HEALTHY: {self.found.non_finite:,} value(s) of it are not finite")
        lines += [f"  {o.component}: {o.how}{f' ({o.note})' if o.note else ''}" for o in self.outcomes]
        renamed = [f"{old} -> {new}" for old, new in self.renamed.items()]
        lines += _shown("renamed", renamed) + _shown("stayed live", self.stayed) + _shown("not used", self.unused)
        lines += [f"  passed over {damage}" for damage in (*self.passed_over, *self.unfinished)]
        return "\n".join(lines)


def _shown(what: str, keys: Sequence[str]) -> list[str]:
    if not keys:
        return []
    more = f", and {len(keys) - _SHOWN} more" if len(keys) > _SHOWN else ""
    return [f"  {what}: {len(keys)} key{'s' * (len(keys) > 1)}: {', '.join(keys[:_SHOWN])}{more}"]
