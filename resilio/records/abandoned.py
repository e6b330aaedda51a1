"""How long a checkpoint lives after the lineage left it: until nobody would miss it who has looked within a week."""

from __future__ import annotations

from collections.abc import Collection

from ..errors import FormatError, IntegrityError, StorageError
from ..types import CheckpointRef
from . import keys, schema
from .catalog import Catalog

__all__ = ["Abandonment"]

_BRANCH = 2  # commits that the new branch must have


class Abandonment:
    """Judges checkpoints off the lineage. Reads generation records only where a checkpoint may have to go.

    Both moments are of the store's clock, on two objects of the store; where it does not tell, nothing goes.

    Args:
        catalog: the run.
        after_s: seconds between the generation record that left a checkpoint and the newest commit.
    """

    def __init__(self, catalog: Catalog, after_s: float) -> None:
        self._catalog = catalog
        self._after_s = after_s
        self._records: dict[int, schema.GenerationRecord] = {}

    def judge(self, ref: CheckpointRef, sound: Collection[CheckpointRef]) -> tuple[bool, str]:
        """Whether the time of `ref` has come, and why, or why not.

        Args:
            ref: a checkpoint off the lineage.
            sound: those of the lineage that are whole, not quarantined, and not known to be unhealthy: what the new
                branch has to show.
        """
        if self._catalog.now_s is None:
            return False, "off the lineage; this store does not tell when, so it stays"
        if not any(self._old(generation) for generation in self._catalog.generations if generation > ref.generation):
            return False, f"off the lineage for less than {_days(self._after_s)} days"
        try:
            left = self._left_by(ref)
        except (StorageError, IntegrityError, FormatError) as error:
            return False, f"off the lineage; since when cannot be told: {error}"
        if left is None:
            return False, "off the lineage; a generation that has yet to commit went back to it"
        if not self._old(left):
            return False, f"off the lineage since generation {left}, for less than {_days(self._after_s)} days"
        branch = sum(one.generation >= left for one in sound)
        if branch < _BRANCH:
            return (
                False,
                f"off the lineage since generation {left}; the branch since has {branch} sound checkpoints, not 2",
            )
        return True, f"off the lineage since generation {left}, for {_days(self._age_s(left) or 0)} days"

    def _left_by(self, ref: CheckpointRef) -> int | None:
        """The generation whose first commit took `ref` off the lineage, the last time that happened.

        One that never committed took nothing off. It counts if it has a commit now, or had one that a later generation
        of the lineage went on from. Where others that counted are missed, a later one is found, which errs on the side
        of keeping.
        """
        newer = [generation for generation in self._catalog.generations if generation > ref.generation]
        counted = {one.generation for one in self._catalog.commits}
        # The chain of parents, from the newest generation that has a commit back to `ref`.
        at: int | None = max(counted)
        while at is not None and at > ref.generation:
            counted.add(at)
            parent = self._read(at).parent
            at = parent.generation if parent else None
        # Whoever went back to `ref` put it on the lineage again. Ancestors are those that had a commit; it still has.
        itself = schema.ParentRef(generation=ref.generation, step=ref.step)
        last = max([ref.generation, *(n for n in newer if itself in self._read(n).ancestors)])
        return min((generation for generation in counted if generation > last), default=None)

    def _read(self, generation: int) -> schema.GenerationRecord:
        if generation not in self._records:
            self._records[generation] = self._catalog.read_generation(generation)
        return self._records[generation]

    def _age_s(self, generation: int) -> float | None:
        written_s, now_s = self._catalog.stored_s.get(keys.generation_key(generation)), self._catalog.now_s
        return None if written_s is None or now_s is None else now_s - written_s

    def _old(self, generation: int) -> bool:
        age_s = self._age_s(generation)
        return age_s is not None and age_s >= self._after_s


def _days(seconds: float) -> str:
    return f"{seconds / 86_400:.1f}".removesuffix(".0")
