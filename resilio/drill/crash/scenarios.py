"""What is crashed: short lives of runs that between them use everything that changes a store."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass

from ...clock import SystemClock
from ...errors import FencedError
from ...policies import keep_last
from ...records import keys
from ...records.holds import pin, unpin
from ...records.sweep import sweep
from ...storage.base import Storage
from ...types import CheckpointRef
from .job import Attempt, Job
from .log import Log
from .recorder import RecordingStorage

__all__ = ["SCENARIOS", "Stage"]

_CLOCK = SystemClock()


@dataclass
class Stage:
    """Where a scenario plays.

    Attributes:
        storage: what the jobs are given: the recorder, perhaps under a storage with a planted bug.
        recorder: what is asked of the store.
        log: what is noted.
        reuse: planted: whether a retry goes into the folder of the attempt that failed.
    """

    storage: Storage
    recorder: RecordingStorage
    log: Log
    reuse: bool = False

    def job(self, keep: int, which: int | str | None = "newest") -> Life:
        """A new life of the job: keeps the last `keep`, restores `which`."""
        life = Life(self, keep)
        if which is not None:
            life.job.restore(which)
        return life


class Life:
    """A job whose every promise is noted; and that counts by itself what may be deleted."""

    def __init__(self, stage: Stage, keep: int) -> None:
        self.stage, self.keep = stage, keep
        self.job = Job(stage.storage, keep_last(keep), _CLOCK)
        self.line: list[CheckpointRef] = []  # of the lineage, and not doomed
        self._failed: dict[int, str] = {}

    def save(self, step: int) -> CheckpointRef:
        """A save and the sweep after it."""
        name = self.begin(step)
        ref = self.commit(self.write(name, salt=len(self._failed)))
        self.sweep(name)
        return ref

    def begin(self, step: int) -> str:
        """The name of the attempt."""
        name = self.job.begin(step)
        if self.stage.reuse:
            name = self._failed.get(step, name)
        return name

    def write(self, name: str, salt: int) -> Attempt:
        """The ranks' part."""
        attempt = Attempt.of(name, salt)
        self.stage.log.truth[name] = attempt.objects
        if name in self._failed.values():
            attempt.overwrite(self.stage.storage)
        else:
            attempt.write(self.stage.storage, self.stage.log.rank)
        return attempt

    def fail(self, name: str) -> None:
        """The save failed on some rank."""
        ref = keys.parse_attempt(name)
        assert ref is not None
        self._failed[ref.step] = name
        self.job.failed(name)

    def commit(self, attempt: Attempt) -> CheckpointRef:
        """Rank 0's part."""
        log, ref = self.stage.log, keys.parse_attempt(attempt.name)
        assert ref is not None
        log.begun(ref)
        try:
            self.job.commit(attempt)
        except FencedError as error:
            if error.facts.get("stored") is False:
                log.over(ref)
            raise
        log.acknowledged(ref)
        self.line.append(ref)
        return ref

    def sweep(self, name: str) -> None:
        """What is older than the last `keep` may go, unless it is pinned."""
        pinned = self.stage.log.known.pinned
        going = {ref for ref in self.line[: -self.keep] if ref not in pinned}
        self.line = [ref for ref in self.line if ref not in going]
        self.stage.log.doomed(going)
        self.job.sweep(name)


def saves(stage: Stage) -> None:
    """A new run that saves, and keeps the last two."""
    life = stage.job(2)
    for step in (1, 2, 3):
        life.save(step)


def restarts(stage: Stage) -> None:
    """A job that is restarted twice: it goes on from its newest checkpoint, and what the life before left is swept."""
    life = stage.job(1)
    life.save(1)
    life.write(life.begin(2), salt=1)  # and dies
    again = stage.job(1)
    again.line = list(life.line)
    again.save(2)
    last = stage.job(1)
    last.line = list(again.line)
    last.save(3)


def pins(stage: Stage) -> None:
    """A checkpoint that is pinned, outlives its time, and is let go; and one that is pinned while it is being swept."""
    life = stage.job(1)
    first = life.save(1)
    pin(stage.storage, first, "selftest")
    stage.log.pinned(first)
    second = life.save(2)

    def between(verb: str, key: str) -> None:
        if verb == "delete" and key == keys.commit_key(second):
            stage.recorder.before = lambda verb, key: None
            pin(stage.storage, second, "just in time")
            stage.log.pinned(second)

    stage.recorder.before = between
    life.save(3)
    stage.log.unpinned(first)
    unpin(stage.storage, first)
    life.save(4)


def branches(stage: Stage) -> None:
    """A job that goes back to its first checkpoint and saves again; at last the branch it left is deleted."""
    life = stage.job(9)
    for step in (1, 2):
        life.save(step)
    back = stage.job(9, which=1)
    back.save(2)
    back.save(3)
    left = {ref for ref in life.line if ref.step > 1}
    stage.log.doomed(left)
    generation = back.job.committer.writer.generation
    assert generation is not None
    keep = keep_last(9)
    sweep(stage.storage, lambda infos: keep.reasons(infos, 0.0), generation=generation, abandoned_after_s=0.0)


def retries(stage: Stage) -> None:
    """A save of which one rank's request is never answered; it is tried again, and the request may still arrive."""
    life = stage.job(2)
    life.save(1)
    name = life.begin(2)
    stage.recorder.late = lambda key: key == keys.attempt_key(name, keys.part_name(1))
    with suppress(TimeoutError):
        life.write(name, salt=0)
    life.fail(name)
    stage.recorder.late = lambda key: False
    life.save(2)
    life.save(3)


def races(stage: Stage) -> None:
    """Two jobs that restored different checkpoints and begin the same generation: one of them saves, one is refused."""
    life = stage.job(9)
    for step in (1, 2):
        life.save(step)
    one, other = stage.job(9), stage.job(9, which=1)
    other.line = life.line[:1]

    def between(verb: str, key: str) -> None:
        if verb == "put" and key == keys.generation_key(2):
            stage.recorder.before = lambda verb, key: None
            one.save(3)

    attempt = other.write(other.begin(2), salt=5)
    stage.recorder.before = between
    with suppress(FencedError):
        other.commit(attempt)


SCENARIOS: dict[str, Callable[[Stage], None]] = {
    "saves": saves,
    "restarts": restarts,
    "pins": pins,
    "branches": branches,
    "retries": retries,
    "races": races,
}
