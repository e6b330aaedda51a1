"""What save and keep policies would do over the next steps, on paper: no clock, no storage, no training."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from ..errors import ConfigError
from ..policies import KeepPolicy, SaveContext, SavePolicy, keep_all
from ..records.quarantine import asked_twice
from ..types import CheckpointInfo, CheckpointRef

__all__ = ["SAVES_MAX", "STEPS_MAX", "Outcome", "Save", "Start", "simulate"]

STEPS_MAX = 10_000_000
SAVES_MAX = 100_000  # more than anybody reads
LOOKS_MAX = 5_000_000  # of a keep policy at a checkpoint
_TICK = 100_000  # steps between two calls of `progress`
_APART_S = 100_000.0  # a step's time that no run has, to find out whether time matters


@dataclass(frozen=True)
class Start:
    """What a simulation begins with.

    Attributes:
        lineage: the checkpoints that are there, oldest first.
        step: the last step that is done; the first one simulated follows it.
        now_s: Unix seconds.
        held: those that live whatever the policy says.
        size_bytes: of one checkpoint; None if there is none to go by.
        quarantined: those that must not be resumed from.
    """

    lineage: Sequence[CheckpointInfo] = ()
    step: int = 0
    now_s: float = 0.0
    held: Collection[CheckpointRef] = ()
    size_bytes: int | None = None
    quarantined: Collection[CheckpointRef] = ()

    @property
    def generation(self) -> int:
        """Of what is saved from here on."""
        return max((info.ref.generation for info in self.lineage), default=0) + 1


@dataclass(frozen=True)
class Save:
    """One save, and what goes after it.

    Attributes:
        step: of it.
        reason: as the save policy says it.
        deletes: checkpoints that go once it is committed.
        there: how many there are after that.
    """

    step: int
    reason: str
    deletes: tuple[CheckpointRef, ...]
    there: int


@dataclass
class Outcome:
    """What it came to.

    Attributes:
        saves: in their order.
        end: the checkpoints of the lineage that are there at the end, oldest first.
        most: how many there were at once, at the most: with a new one, before others go for it.
        refused: after how many saves nothing went because the policy would have kept none.
        metrics: names of metrics that the keep policy looked for in checkpoints that are yet to be.
        stopped_at: the step after which it gave up, since there was too much to look at; None if it came to the end.
    """

    saves: list[Save] = field(default_factory=list)
    end: list[CheckpointInfo] = field(default_factory=list)
    most: int = 0
    refused: int = 0
    metrics: set[str] = field(default_factory=set)
    stopped_at: int | None = None


def simulate(
    save: SavePolicy,
    keep: KeepPolicy,
    steps: int,
    start: Start,
    *,
    step_s: float | None = None,
    progress: Callable[[int, int], None] | None = None,
) -> Outcome:
    """What the policies would save and delete in the next `steps` steps.

    Args:
        save: when to save.
        keep: what to keep.
        steps: how many.
        start: what there is.
        step_s: seconds that a step takes; only policies that look at time need it.
        progress: called with steps done and steps in all, from time to time.

    Raises:
        ConfigError: a number is out of range, or a policy looks at time and `step_s` is not given.
    """
    if not 1 <= steps <= STEPS_MAX:
        raise ConfigError(f"a plan is of 1 to {STEPS_MAX:,} steps, not {steps:,}")
    if step_s is not None and not 0 < step_s < 1e9:
        raise ConfigError(f"a step takes more than 0 seconds, and less than a billion, not {step_s}")
    if step_s is None and save.clocks():
        raise ConfigError(f"{save!r} looks at time: say how long a step takes, as in --step-seconds 0.8")
    due = _Due(save, start, steps, step_s, progress)
    saves: list[tuple[int, str]] = []

    def noted() -> Iterator[tuple[int, str]]:
        for one in due:
            saves.append(one)
            yield one

    outcome = _replay(noted(), keep, start, step_s or 1.0)
    if step_s is None and outcome.saves != _replay(saves, keep, start, _APART_S).saves:
        raise ConfigError(f"{keep!r} looks at time: say how long a step takes, as in --step-seconds 0.8")
    if outcome.stopped_at is None:
        outcome.stopped_at = due.stopped_at
    return outcome


class _Due:
    """The steps at which a save is due, and why."""

    def __init__(
        self,
        policy: SavePolicy,
        start: Start,
        steps: int,
        step_s: float | None,
        progress: Callable[[int, int], None] | None,
    ) -> None:
        self.policy, self.start, self.steps = policy, start, steps
        self.step_s, self.progress = step_s or 0.0, progress
        self.stopped_at: int | None = None

    def __iter__(self) -> Iterator[tuple[int, str]]:
        first, clocks, reason_of = self.start.step + 1, self.policy.clocks(), self.policy.reason
        newest = self.start.lineage[-1].step if self.start.lineage else None
        began, found = self.start.step, 0
        context = SaveContext(first, newest)
        for step in range(first, first + self.steps):
            if clocks:
                # The time that ran out by the end of the step before: the ranks' vote takes one step.
                passed_s = (step - 1 - began) * self.step_s
                times = frozenset(each for each in clocks if passed_s >= each)
                if times != context.times_due:
                    context = SaveContext(step, newest, times)
            # Ten million new ones would take half a minute; no policy may hold on to one.
            object.__setattr__(context, "step", step)
            reason = reason_of(context)
            if reason is not None:
                yield step, reason
                newest, began, found = step, step, found + 1
                context = SaveContext(step, newest)
                if found == SAVES_MAX and step < self.start.step + self.steps:
                    self.stopped_at = step
                    return
            if self.progress is not None and step % _TICK == 0:
                self.progress(step - first, self.steps)


def _replay(saves: Iterable[tuple[int, str]], keep: KeepPolicy, start: Start, step_s: float) -> Outcome:
    """What a sweep after each save would delete: by the same rules, less what only a store can know."""
    outcome = Outcome(end=list(start.lineage), most=len(start.lineage))
    held, looks = set(start.held), 0
    all_live = keep == keep_all()  # the default; there is nothing to look at
    for step, reason in saves:
        if looks > LOOKS_MAX:
            outcome.stopped_at = outcome.saves[-1].step
            break
        now_s = start.now_s + (step - start.step) * step_s
        ref = CheckpointRef(start.generation, step)
        metrics = _Unknown(outcome.metrics)
        outcome.end.append(
            CheckpointInfo(ref, "", now_s, 1, metrics, (reason,), size_bytes=start.size_bytes, non_finite=0)
        )
        outcome.most = max(outcome.most, len(outcome.end))
        if all_live:
            outcome.saves.append(Save(step, reason, (), len(outcome.end)))
            continue
        usable = [info.ref for info in outcome.end if info.ref not in start.quarantined]
        kept = asked_twice(partial(_asked, keep, now_s), outcome.end, usable)
        goes = [info.ref for info in outcome.end if not kept.get(info.ref) and info.ref != ref and info.ref not in held]
        if goes and not any(kept.values()):
            outcome.refused += 1
            goes = []
        if goes:
            gone = set(goes)
            outcome.end = [info for info in outcome.end if info.ref not in gone]
        outcome.saves.append(Save(step, reason, tuple(goes), len(outcome.end)))
        looks += len(outcome.end)
    return outcome


def _asked(keep: KeepPolicy, now_s: float, infos: list[CheckpointInfo]) -> dict[CheckpointRef, str]:
    return keep.reasons(infos, now_s)


class _Unknown(dict[str, float]):
    """Metrics of a checkpoint that is yet to be: there are none, and who looks for one is noted."""

    def __init__(self, asked: set[str]) -> None:
        super().__init__()
        self.asked = asked

    def get(self, key: Any, default: Any = None) -> Any:
        self.asked.add(str(key))
        return default

    def __contains__(self, key: object) -> bool:
        self.asked.add(str(key))
        return False

    def __missing__(self, key: str) -> float:
        self.asked.add(key)
        raise KeyError(key)
