"""The saves of one manager, one at a time: begun by all ranks together, and settled by all together."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from contextlib import nullcontext
from typing import Any

from ..clock import Clock
from ..engine import Engine
from ..engine.agreed import Stand
from ..engine.plan import LocalPlan
from ..engine.replicas import Copies, own_copies, refuse_differing
from ..engine.structure import Structure
from ..errors import ConfigError, RanksDisagreeError, RanksLostError, ResilioError, SaveError
from ..events import SaveStarted
from ..ranks import Ranks, portable, raise_first
from ..state.flat import FlatState
from ..state.fsdp1_optimizer import Lent
from ..state.training_state import TrainingState
from ..types import Mode
from .ballot import Agreed, Ballot
from .handle import SaveHandle
from .saving import Committer, SaveJob, numbers
from .space import fixed_bytes, refuse_without_room, value_bytes
from .tolerance import Tolerance

__all__ = ["Saves"]

_log = logging.getLogger("resilio")

_BEGINNING = "beginning a save"


class Saves:
    """Begins saves, and knows how the newest one stands.

    Args:
        state: what is saved.
        ranks: who takes part.
        engine: writes it.
        committer: rank 0's side.
        ballot: whose open vote must be read before ranks meet over anything else.
        tolerance: whether training goes on after a failure.
        clock: for policies of time.
        mode: ``sync`` or ``async``.
        check_replicas: whether to compare what several ranks hold before it is saved.

    Attributes:
        pending: the save in flight, None if there is none: on all ranks alike.
        latest: the newest of this life that did not fail, for "saving the same step twice".
        stored_step: newest step that all ranks know to be on storage: restored, or acknowledged.
        began_s: this rank's monotonic clock when the newest save began.
        acknowledged: whether a save of this life was.

    Ranks: all methods are collective.
    """

    def __init__(
        self,
        state: TrainingState,
        ranks: Ranks,
        engine: Engine,
        committer: Committer,
        ballot: Ballot,
        tolerance: Tolerance,
        clock: Clock,
        mode: Mode,
        *,
        check_replicas: bool = False,
    ) -> None:
        self._state = state
        self._ranks = ranks
        self._engine = engine
        self._committer = committer
        self._ballot = ballot
        self._tolerance = tolerance
        self._clock = clock
        self._mode = mode
        self._check_replicas = check_replicas
        self._job: SaveJob | None = None  # that of `pending`
        self._fixed: tuple[Structure, int] | None = None  # bytes that a save of this structure takes beside values
        self.pending: SaveHandle | None = None
        self.latest: SaveHandle | None = None
        self.stored_step: int | None = None
        self.began_s = clock.monotonic_s()
        self.acknowledged = False

    @property
    def newest_step(self) -> int | None:
        """The newest step that is saved, or being saved."""
        return self.latest.step if self.latest else self.stored_step

    def went_to(self, step: int | None) -> None:
        """Note that live state is that of `step` on storage, or of none."""
        self.stored_step = step
        self.latest = None

    def check_step(self, step: int) -> None:
        """Refuse a step that cannot be saved after the newest one.

        Raises:
            ConfigError: it is no number of steps, or goes back.
        """
        if isinstance(step, bool) or not isinstance(step, int) or step < 0:
            raise ConfigError(f"step={step!r}: give the number of optimizer steps completed, an int from 0 on")
        if self.newest_step is not None and step < self.newest_step:
            raise ConfigError(
                f"step {step} after step {self.newest_step}: steps only grow. To go back, restore(which=…) an older "
                "step.",
                step=step,
            )

    def save(self, step: int, metrics: Mapping[str, Any] | None, reason: str, *, final: bool = False) -> SaveHandle:
        """Save `step`, once the save before is settled. One that is tolerated to fail gives a handle that says so.

        Args:
            step: optimizer steps completed.
            metrics: of it.
            reason: why it is saved.
            final: no save comes after it, so its failure is raised whatever is tolerated.

        Blocks: until state is copied, or in ``sync`` mode until the outcome is known.
        """
        if self.latest and self.latest.step == step and not self._failed():
            return self.latest
        self.settle()
        try:
            handle = self._begin(step, metrics, reason)
            if self._mode == "sync":
                self._settle()
        except ResilioError as error:
            self._tolerance.failed(error, final=final)
            return SaveHandle.failed(step, reason, error)
        return handle

    def settle(self, *, final: bool = False) -> None:
        """Wait for the save in flight; raise its failure on all ranks, unless it is tolerated and not `final`."""
        try:
            self._settle()
        except ResilioError as error:
            self._tolerance.failed(error, final=final)

    def vote(self) -> Agreed:
        """What the last vote came to. A rank that was lost in the save in flight takes the vote with it: it failed."""
        try:
            return self._ballot.read()
        except RanksLostError:
            if not self._lost():
                raise
            return Agreed(running=False, failed=True)

    def _lost(self) -> bool:
        """Whether the save in flight is known to have failed for want of a rank: each rank hears that by itself."""
        handle = self.pending
        return handle is not None and handle.done() and isinstance(handle.exception(), RanksLostError)

    def left_behind(self) -> None:
        """Nobody will settle the save in flight: log its failure, and tell plugins, now or when it is known. Local."""
        if self.pending is not None:
            self.pending.log_failure(self._job.tell_failed if self._job and self._ranks.coordinator else None)

    def _begin(self, step: int, metrics: Mapping[str, Any] | None, reason: str) -> SaveHandle:
        try:
            flat, local, attempt, kept, planned = self._prepare(step, metrics)
        except ResilioError as error:
            self._committer.teller.save_failed(step, reason, error)
            raise
        self.began_s = self._clock.monotonic_s()
        job: SaveJob | None = None
        try:
            job = self._committer.job(attempt, step, self._ranks.world, kept, reason)
            after = job.committed if self._ranks.coordinator else None
            with job.held:
                self._committer.teller.tell(SaveStarted, step=step, world=job.world, reason=reason)
                background = self._mode == "async"
                future = self._engine.save(
                    *(flat, local, attempt, job.commit, after), planned=planned, background=background
                )
        except BaseException as error:  # a Ctrl-C as well: whoever heard of the beginning hears of the end
            self._engine.miss(attempt, error)
            if self._ranks.exchange is not None:  # where the others meet who have heard of another error
                self._ranks.exchange.miss(f"saving step {step}", error, name=_ended(attempt))
            if self._ranks.coordinator and job is not None:
                job.tell_failed(error)
            if self._mode == "async" and self._ranks.world > 1:  # the others have it in flight, and hear later
                lost = RanksLostError(
                    f"saving step {step}: rank {self._ranks.rank} was taken out of it ({type(error).__name__})",
                    ranks=[self._ranks.rank],
                )
                self._job = job
                self.latest = self.pending = SaveHandle.failed(step, reason, lost)
            raise
        self._job = job
        self.latest = self.pending = SaveHandle(step, reason, future)
        return self.pending

    def _prepare(
        self, step: int, metrics: Mapping[str, Any] | None
    ) -> tuple[FlatState, LocalPlan, str, dict[str, float], bool]:
        """All before the first byte is written; an error of any rank on all. At last: whether no new plan is needed."""
        flat: Any = None
        local: Any = None
        attempt = ""
        error: ResilioError | None = None
        kept: dict[str, float] = {}
        needed_bytes = 0
        free_bytes: int | None = None
        lent: Lent = {}
        copies: Copies = {}
        stand: Stand | None = None
        with self._ranks.coming_to(_BEGINNING):
            try:  # it may be collective: before what one rank alone may fail in
                lent = self._state.lend(self._ranks.gather)
            except (RanksLostError, RanksDisagreeError):
                raise  # on all ranks
            except Exception:  # noqa: BLE001  state that cannot be looked at, which `capture` tells
                _log.debug("before capture", exc_info=True)
        with self._ranks.coming_to(_BEGINNING):
            try:
                self.check_step(step)
                flat = self._state.capture(step, rank=self._ranks.rank, world=self._ranks.world, lent=lent)
                local = self._engine.plan(flat)
                stand = local.stand
                copies = own_copies(flat, self._ranks.rank) if self._check_replicas else {}
                if self._fixed is None or self._fixed[0] is not local.structure:
                    self._fixed = local.structure, fixed_bytes(local.structure, self._ranks.rank)
                needed_bytes = self._fixed[1] + value_bytes(flat, local)
                if self._ranks.coordinator:
                    kept = numbers(metrics or {})
                    attempt = self._committer.begin(step)
                    free_bytes = self._committer.storage.free_bytes()
            except Exception as caught:  # noqa: BLE001  told to all ranks, which raise it together
                error = portable(caught, SaveError)
            mine = error, attempt, step, needed_bytes, free_bytes, self._ranks.broken, copies, stand
            answers = self._ranks.gather(mine, _BEGINNING)
        self._ranks.renew_if(any(answer[5] for answer in answers))
        raise_first([answer[0] for answer in answers], "planning a save")
        attempt, steps = answers[0][1], [answer[2] for answer in answers]
        if len(set(steps)) > 1:
            raise RanksDisagreeError(f"ranks save different steps: {steps} by rank. Nothing was written.", steps=steps)
        refuse_differing([answer[6] for answer in answers], step)
        refuse_without_room(self._committer.storage.url, step, sum(answer[3] for answer in answers), answers[0][4])
        return flat, local, attempt, kept, self._engine.holds([answer[7] for answer in answers])

    def _failed(self) -> bool:
        """Whether the save in flight is known to have failed on some rank."""
        self._ballot.drop()
        handle = self.pending
        failed = handle is not None and handle.done() and handle.exception() is not None
        return any(self._ranks.gather(failed, "asking after the save in flight"))

    def _settle(self) -> None:
        try:
            self._ballot.drop()
        except RanksLostError:
            if not self._lost():
                raise
        handle = self.pending
        if handle is None:
            return
        with self._job.held if self._job else nullcontext():
            error = handle.exception()
        self.pending = None  # not before: an interrupted wait must leave it to be waited for at the end
        try:
            if isinstance(error, RanksLostError):
                raise error  # who was missing would be waited for once more, and hears it as well when it comes
            if isinstance(error, Exception) and self._ranks.coordinator and self._job is not None:
                error = self._job.cause(error)
            # By name: a rank that was taken out of this save does not come, and is in step in the next one.
            name = _ended(self._job.attempt) if self._job is not None else None
            self._ranks.agree(error, SaveError, what=f"saving step {handle.step}", name=name)
        except BaseException as failure:
            self.latest = None  # that step is not saved: it may be tried again
            if self._ranks.coordinator and self._job is not None:
                self._job.tell_failed(failure)
                # A rank that is late may still write: what it leaves goes when the next save begins.
                self._job.failed(over=isinstance(failure, ResilioError) and not isinstance(failure, RanksLostError))
            raise
        self._tolerance.succeeded()
        self.stored_step = handle.step
        self.acknowledged = True


def _ended(attempt: str) -> str:
    """Name of the meeting in which all ranks say how an attempt ended."""
    return f"{attempt}/ended"
