"""What a manager tells its plugins: one frozen value for each thing that happened, from rank 0.

`SaveStarted` is followed by one `Saved` or `SaveFailed`, unless the process dies; after `Saved` comes the sweep, which
is told of in `Swept`. In ``async`` mode `Saved` comes from the saving thread, and `SaveFailed` when the manager hears
of the failure: in a later `step` or `save`, or at the end. `resilio.restore`, which is no manager, tells nothing.

An event is for machines: metrics, dashboards, alerts. Its fields are numbers, strings and refs, so that
`dataclasses.asdict` of it is nearly JSON. Later releases add kinds and fields, with defaults, and change none.
"""

from __future__ import annotations

from dataclasses import dataclass

from .types import CheckpointRef, Damage

__all__ = [
    "Event",
    "Quarantined",
    "RestoreFailed",
    "Restored",
    "SaveFailed",
    "SaveStarted",
    "Saved",
    "Swept",
    "Verified",
]


@dataclass(frozen=True, kw_only=True)
class Event:
    """Something happened to a run.

    Attributes:
        url: the run's store, without credentials.
        time_s: when, Unix seconds by the clock of the process that says so.
    """

    url: str
    time_s: float


@dataclass(frozen=True, kw_only=True)
class SaveStarted(Event):
    """All ranks have agreed to save `step`; nothing is written yet.

    Attributes:
        step: optimizer steps completed.
        world: number of ranks.
        reason: why, as the policy said it.
    """

    step: int
    world: int
    reason: str


@dataclass(frozen=True, kw_only=True)
class Saved(Event):
    """A checkpoint was committed and acknowledged.

    Attributes:
        ref: which.
        world: number of ranks.
        size_bytes: of the whole attempt.
        seconds: from `SaveStarted` to the acknowledged commit.
        held_s: of these, how long rank 0's training loop was held: while state was copied or written, and while it
            waited for this save to end.
        reason: why it was saved.
        non_finite: how many values make it unhealthy, see `CheckpointInfo`; alert where it is above 0.
    """

    ref: CheckpointRef
    world: int
    size_bytes: int
    seconds: float
    held_s: float
    reason: str
    non_finite: int | None = None


@dataclass(frozen=True, kw_only=True)
class SaveFailed(Event):
    """A save did not become a checkpoint, or was fenced. The checkpoints before it are untouched.

    One that failed while it was prepared (no room, a state that cannot be saved) was not begun: no `SaveStarted` came
    before it.

    Attributes:
        step: that was to be saved.
        reason: why it was to be saved.
        error: class of the error that was the cause, for example ``OutOfSpaceError``.
        message: what it says.
    """

    step: int
    reason: str
    error: str
    message: str


@dataclass(frozen=True, kw_only=True)
class Restored(Event):
    """State was brought back, or a new run was found.

    Attributes:
        ref: from which checkpoint; None on a new run.
        saved_world: number of ranks that saved it; None on a new run.
        world: number of ranks now.
        read_bytes: that rank 0 read.
        seconds: from the call to live state.
        passed_over: what was damaged and newer.
    """

    ref: CheckpointRef | None
    saved_world: int | None
    world: int
    read_bytes: int
    seconds: float
    passed_over: tuple[Damage, ...] = ()


@dataclass(frozen=True, kw_only=True)
class RestoreFailed(Event):
    """A restore raised.

    Attributes:
        which: what was asked for.
        error: class of the error.
        message: what it says.
    """

    which: str
    error: str
    message: str


@dataclass(frozen=True, kw_only=True)
class Swept(Event):
    """A sweep deleted something, or could not. One that had nothing to do is not told.

    Attributes:
        deleted: checkpoints that are gone.
        leftovers: number of folders of failed attempts that are gone.
        failed: what could not be deleted or looked at, or which plugin could not say what it keeps, and why.
    """

    deleted: tuple[CheckpointRef, ...]
    leftovers: int
    failed: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True)
class Verified(Event):
    """A checkpoint was read whole and compared with its digests, by a manager's `verify` on rank 0.

    Attributes:
        ref: which.
        damage: what was found, by plugins too; empty if it is intact.
    """

    ref: CheckpointRef
    damage: tuple[Damage, ...] = ()


@dataclass(frozen=True, kw_only=True)
class Quarantined(Event):
    """A checkpoint was put in quarantine: a restore passed over it, and found the damage to be its own.

    It comes before the `Restored` of the same restore.

    Attributes:
        ref: which.
        because: why, as it is written down.
        problems: what was found.
    """

    ref: CheckpointRef
    because: str
    problems: tuple[Damage, ...] = ()
