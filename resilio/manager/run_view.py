"""Looking at a run, and holding its checkpoints: the part of a manager that takes no part in training."""

from __future__ import annotations

import logging
from contextlib import suppress

from ..clock import Clock
from ..errors import ConfigError, FormatError, IntegrityError
from ..events import Verified
from ..records import holds
from ..records.catalog import discover
from ..records.fates import Explanation
from ..records.schema import PinRecord
from ..records.verify import verify_checkpoint
from ..storage.base import Storage
from ..types import CheckpointInfo, CheckpointRef, Damage
from .saving import Committer

__all__ = ["RunView"]

_log = logging.getLogger("resilio")


class RunView:
    """What can be asked of a run at any time, by any rank, without the others."""

    _storage: Storage
    _clock: Clock
    _committer: Committer

    def checkpoints(self) -> list[CheckpointInfo]:
        """All checkpoints of the run, by generation and step, those off the lineage included.

        One whose commit record cannot be read is left out with a warning; `resilio ls` shows it.

        Ranks: any; not collective.
        """
        infos, damaged = discover(self._storage).checkpoints()
        for damage in damaged:
            _log.warning("a commit record cannot be read %s", damage)
        return sorted(infos, key=lambda info: info.ref)

    def explain(self) -> Explanation:
        """Why each checkpoint lives, and what goes at the next sweep: what the sweep itself would decide now.

        Ranks: rank 0, which knows what it began; not collective. Another rank may take what rank 0 is saving for a
            leftover.
        """
        return self._committer.explain()

    def pin(self, step: int | CheckpointRef, *, because: str) -> PinRecord:
        """Keep the checkpoint of `step` whatever the policy says, until `unpin`; on an abandoned branch too.

        Args:
            step: on the lineage, or else on the newest branch that has it; or a `CheckpointInfo.ref`, for exactly that.
            because: a person's reason, shown by `explain`.

        Raises:
            NoCheckpointError: there is none, or it was just being deleted.

        Ranks: any one; not collective.
        """
        if not isinstance(because, str):
            raise ConfigError(f"because={because!r}: a pin says why, in words")
        return holds.pin(self._storage, discover(self._storage).find(step), because, self._clock)

    def unpin(self, step: int | CheckpointRef) -> int:
        """Take all pins off the checkpoint of `step`; the policy decides about it again. Returns how many there were.

        Ranks: any one; not collective.
        """
        ref = discover(self._storage).find(step)
        count = holds.unpin(self._storage, ref)
        _log.info("unpinned step=%d generation=%d pins=%d", ref.step, ref.generation, count)
        return count

    def verify(self, step: int | CheckpointRef) -> list[Damage]:
        """Read the whole checkpoint of `step` and compare every byte with its digests; empty if it is intact.

        Plugins may find more (`resilio_verify`). One that could not look is a finding with the fact ``inconclusive``.

        Ranks: any; not collective.
        Blocks: while it reads.
        """
        catalog = discover(self._storage)
        ref = catalog.find(step)
        damage = verify_checkpoint(self._storage, ref)
        with suppress(FormatError, IntegrityError):  # a record that cannot be read is among the damage
            damage += self._committer.teller.calls.verify(catalog.info(ref), self._storage)
        self._committer.teller.tell(Verified, ref=ref, damage=tuple(damage))
        return damage
