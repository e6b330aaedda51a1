"""A run's URL that is one: a single checkpoint of plain `torch.distributed.checkpoint`, read once to go on from."""

from __future__ import annotations

import logging
from collections.abc import Iterable
from dataclasses import replace

from ..engine import ForeignCheckpoint, foreign_state, open_foreign
from ..errors import NoCheckpointError
from ..records.keys import METADATA
from ..state.flat import Outcome
from ..state.saved import Problems, SavedView, Selection
from ..storage.base import Storage
from ..types import CheckpointInfo, CheckpointRef
from .asked import Asked

__all__ = ["ABSENT", "outcomes_of_foreign", "pick_foreign"]

# What only resilio saves: a checkpoint of somebody else cannot lack it.
ABSENT = ("rng", "buffers_np")

_log = logging.getLogger("resilio")


def pick_foreign(storage: Storage, asked: Asked) -> tuple[CheckpointInfo, ForeignCheckpoint] | None:
    """The plain DCP checkpoint at the root of `storage`, with the values that are asked for; None if there is none.

    Ranks: rank 0; it hands the choice on.

    Raises:
        NoCheckpointError: a step was asked for.
        FormatError: its metadata is not what stock DCP writes.
        RestoreError: a value asked for would have to be unpickled, and that was not said to be safe (`trust`).
        IntegrityError: an object is missing or damaged.
    """
    if not storage.exists(METADATA):
        return None
    if asked.which != "newest":
        raise NoCheckpointError(
            f"{storage.url} is a single checkpoint of plain torch.distributed.checkpoint, without steps to choose "
            f"from; leave out which={asked.which!r}",
            url=storage.url,
            which=asked.which,
        )
    found = open_foreign(storage)
    leaves = SavedView(found.state, asked.rename, Problems()).leaves
    select = Selection(asked.only, asked.exclude)
    # Parts are planned as a whole: of one that is wanted in part every value may be looked at, of others none.
    parts = {new.partition(".")[0] for new in leaves if select(new, new.partition(".")[0])}
    wanted = {key for new, key in leaves.items() if new.partition(".")[0] in parts}
    state = foreign_state(found, storage, wanted, asked.trust)
    _log.warning(
        "a checkpoint of plain torch.distributed.checkpoint carries no digests: its content is unchecked url=%s",
        storage.url,
    )
    ref = CheckpointRef(generation=0, step=state.step)
    info = CheckpointInfo(ref, attempt="", time_s=found.modified_s or 0.0, world=1, size_bytes=found.size_bytes)
    return info, replace(found, state=state)


def outcomes_of_foreign(outcomes: Iterable[Outcome]) -> tuple[Outcome, ...]:
    """`outcomes` with the reason why the generators stayed as they are."""
    return tuple(replace(one, note="not in the checkpoint") if one.component == "rng" else one for one in outcomes)
