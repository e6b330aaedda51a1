"""`CheckpointManager`: the one class most users touch."""

from __future__ import annotations

import logging
import os
import weakref
from collections.abc import Iterable, Mapping
from types import TracebackType
from typing import Any, Literal

from ..clock import Clock, SystemClock
from ..engine import Engine
from ..errors import ConfigError, LiveStateError, RestoreError
from ..events import Restored, RestoreFailed
from ..hooks import Calls, host
from ..policies import KeepPolicy, SaveContext, SavePolicy, keep_all
from ..ranks import DEFAULT_TIMEOUT_S, Ranks
from ..state.saved import Rename
from ..state.training_state import TrainingState
from ..storage.base import Storage
from ..types import Mode, Stage
from .arguments import check_alike, check_constructor, check_plugins
from .asked import Asked
from .ballot import Ballot
from .choosing import Which
from .handle import SaveHandle
from .report import RestoreReport
from .restoring import restore_into
from .run_view import RunView
from .saves import Saves
from .saving import Committer
from .signals import SignalFlags
from .space import unwritable
from .telling import Teller
from .tolerance import Tolerance

__all__ = ["CheckpointManager"]

_log = logging.getLogger("resilio")

_MAKING = "making a CheckpointManager"


class CheckpointManager(RunView):
    """Saves the full training state of a job as policies say, keeps the right checkpoints, and brings them back.

    ::

        state = {"model": model, "optimizer": optimizer, "scheduler": scheduler}
        with CheckpointManager("file:///data/run-17", state, save=save_every(500)) as ckpt:
            ckpt.restore()
            for step in range(ckpt.next_step, total + 1):
                loss = train_step()
                ckpt.step(step, metrics={"loss": loss}, last=step == total)

    Args:
        url: the run's store, for example ``file:///data/run-17``, or an open `Storage`.
        state: what to save: a `TrainingState`, or a mapping with its keywords.
        save: when `step` saves; None: only at the last step and by `save`.
        keep: which checkpoints have a reason to live; the others are deleted after a commit. Default: all live.
        mode: ``async`` holds the loop while the state is copied and writes in the background; ``sync`` holds it until
            the checkpoint is committed.
        stage: in ``async`` mode, ``overlap`` copies what only an optimizer's step changes (parameters, moments) while
            the next forward and backward run, and every optimizer waits for that before it steps; ``block`` copies all
            before a save returns. Choose that if anything else writes into them in place: clipped weights,
            assignments.
        fresh: begin anew over whatever the run holds; its checkpoints stay, off the new lineage.
        on_save_error: ``raise`` the failure of a save, or ``warn`` and train on; the last save, and errors that will
            not pass by themselves, are raised all the same.
        save_errors_max: how many failed saves in a row are only warned of.
        digest: of whole objects: ``xxh3_128``, ``crc32``, or ``sha256`` where tampering must be evident.
        fingerprints: whether saves compute a hash of each tensor that is the same at any number of ranks, in the
            background where the mode is ``async``; `restore` can check by it. Costs about half a CPU-second per GB.
        check_replicas: whether a save compares, before it begins, what several ranks hold copies of (DDP's parameters,
            moments), and is refused with tensor and rank where they differ. Reads all of it while the loop waits.
        plugins: objects with functions marked by `resilio.hookimpl`, for this manager alone, besides those that are
            installed: ``plugins=[MyDashboard()]``. On all ranks, though most hooks are called on rank 0.
        progress: whether rank 0 draws a bar on stderr when a restore takes long; None: if that is a terminal.
        timeout_s: how long a rank waits for the others in a collective of ours.
        clock: the machine's, unless a test says otherwise.

    Raises:
        ConfigError: it cannot work this way, or ranks were given different arguments or have other plugins; nothing was
            done.

    Ranks: all; the constructor, `step`, `save`, `restore` and `close` are collective, with the same arguments
        everywhere (metrics are rank 0's).
    """

    def __init__(
        self,
        url: str | os.PathLike[str] | Storage,
        state: TrainingState | Mapping[str, Any],
        *,
        save: SavePolicy | None = None,
        keep: KeepPolicy | None = None,
        mode: Mode = "async",
        stage: Stage = "overlap",
        fresh: bool = False,
        on_save_error: Literal["raise", "warn"] = "raise",
        save_errors_max: int = 3,
        digest: str = "xxh3_128",
        fingerprints: bool = True,
        check_replicas: bool = False,
        plugins: Iterable[object] = (),
        progress: bool | None = None,
        timeout_s: float = DEFAULT_TIMEOUT_S,
        clock: Clock | None = None,
    ) -> None:
        self._clock = clock or SystemClock()
        self._save_policy = save
        self._mode = mode
        self._fresh = fresh
        self._progress = progress
        error: Exception | None = None
        tolerance = Tolerance()
        signals = SignalFlags(())
        try:
            tolerance = Tolerance(on_save_error, save_errors_max)
            check_constructor(save, keep, mode, stage, fresh, digest, fingerprints, check_replicas, progress, timeout_s)
            self._state = TrainingState.of(state)
            known = host().with_plugins(plugins)
            self._storage = known.open_storage(url)
            signals = SignalFlags(save.signals if save else ())
        except Exception as caught:  # noqa: BLE001  told to all ranks: the others wait in the next line
            error = caught
        try:
            self._ranks = Ranks(timeout_s if error is None else DEFAULT_TIMEOUT_S)
        except BaseException:
            signals.close()
            raise
        try:
            self._ranks.agree(error, what=_MAKING)
            given = [self._storage.url, save, keep, mode, fresh, digest, on_save_error, save_errors_max]
            check_alike(self._ranks, self._storage, repr([*given, fingerprints, check_replicas, stage]))
            check_plugins(self._ranks, known)
            self._teller = Teller(Calls(known), self._storage.url, self._clock, self._ranks.coordinator)
            # Rank 0 alone talks to the commit protocol; the others learn of it through what it tells them.
            self._committer = Committer(self._storage, keep or keep_all(), self._clock, digest, self._teller)
            if fresh:
                self._ranks.from_coordinator(self._committer.begin_fresh, what=_MAKING)
        except BaseException:
            self._ranks.close()
            signals.close()
            raise
        self._ballot = Ballot(self._ranks, save, self._clock, signals)
        self._staged = mode == "async"
        overlap = mode == "async" and stage == "overlap"
        self._engine = Engine(self._storage, self._ranks, digest, fingerprints=fingerprints, overlap=overlap)
        if self._ranks.coordinator and not self._storage.capabilities.create_if_absent:
            _log.warning("store cannot create if absent: never run two managers on it url=%s", self._storage.url)
        folder = self._storage.capabilities.local_path
        if self._ranks.coordinator and folder and (why := unwritable(folder)):
            _log.warning("restoring works, but saves will fail url=%s error=%s", self._storage.url, why)
        self._saves = Saves(
            *(self._state, self._ranks, self._engine, self._committer, self._ballot, tolerance, self._clock, mode),
            check_replicas=check_replicas,
        )
        self._stop = False
        self._mixture: LiveStateError | None = None
        self._closed = False
        self._forgotten = weakref.finalize(self, _forgotten, self._saves, self._ranks, os.getpid())

    # ------------------------------------------------------------------------------------------------- the loop's side

    @property
    def next_step(self) -> int:
        """The first step to train: 1 on a new run, N + 1 after a restore of step N.

        For the head of the loop. Behind it, N is the newest step that all ranks know to be on storage: in ``async``
        mode they come to know it in a later `step` or `save`, not when a handle says done.
        """
        return (self._saves.stored_step or 0) + 1

    @property
    def stop_requested(self) -> bool:
        """Whether a signal of `save_on_signal` reached any rank: the same on all ranks at the same step.

        That step is saved, unless the policy joined the signal to something else by `&`. Leave the loop when it is set;
        leaving the `with` waits for the save.
        """
        return self._stop

    def restore(
        self,
        which: Which = "newest",
        *,
        only: Iterable[str] | None = None,
        exclude: Iterable[str] | None = None,
        rename: Rename | None = None,
        strict: bool = True,
        check_fingerprints: bool = False,
    ) -> RestoreReport:
        """Bring the state back from a checkpoint, exactly, at this number of ranks.

        Args:
            which: ``"newest"`` of the lineage, ``"healthy"``: the newest without values that are not finite; a step, or
                a checkpoint's `ref` where a step is there more than once. Going back to an older step begins a new
                branch at the next save.
            only: components (``"model"``) or patterns over flat keys (``"model.encoder.*"``) to restore; the rest stays
                live.
            exclude: the same, to leave out.
            rename: saved name prefix -> live name prefix, or a function from saved to live flat keys.
            strict: whether keys that only one side has are an error. Shapes and dtypes always are.
            check_fingerprints: whether to prove that each tensor, over all ranks, has the values that were saved,
                before live state is touched. Bytes are checked against their digests in any case.

        The newest is the newest whole one: damaged ones are passed over, and quarantined if their content is to blame.

        Returns:
            What was found (`found` is None on a new run) and how each component came back.

        Raises:
            NoCheckpointError: the run has no such checkpoint.
            MismatchError: checkpoint and live state differ; names what.
            IntegrityError: the checkpoint is damaged; names object and tensor.
            RestoreError: another failure. In all these cases live state is as it was.
            LiveStateError: it is not: some of it could not be put back. The manager saves no more until a restore goes
                well.
            ConfigError: a step was asked for of a manager that begins anew (`fresh`).

        Ranks: all; collective.
        Blocks: until all ranks have restored, or all have raised the same error.
        """
        self._open()
        began_s = self._clock.monotonic_s()
        try:
            report = self._restore(Asked(which, only, exclude, rename, strict, check_fingerprints))
        except BaseException as error:
            self._teller.tell(RestoreFailed, which=str(which), error=type(error).__name__, message=str(error))
            raise
        found = report.found
        self._teller.tell(
            Restored,
            ref=found.ref if found else None,
            saved_world=found.world if found else None,
            world=self._ranks.world,
            read_bytes=report.read_bytes,
            seconds=self._clock.monotonic_s() - began_s,
            passed_over=report.passed_over,
        )
        return report

    def _restore(self, asked: Asked) -> RestoreReport:
        self._saves.settle()
        self._ranks.renew("restoring")
        if self._fresh and not self._saves.acknowledged:  # from then on the run is this manager's own
            if asked.which != "newest":
                raise ConfigError(
                    f"restore(which={asked.which!r}) of a run begun anew with fresh=True: leave out one of them"
                )
            return RestoreReport(found=None)
        try:
            report, picker = restore_into(
                *(self._state, self._storage, self._ranks, self._engine, asked),
                clock=self._clock,
                progress=self._progress,
                staged=self._staged,
            )
        except LiveStateError as error:
            self._mixture = error
            raise
        self._mixture = None
        chosen = report.found.ref if report.found else None
        self._ranks.from_coordinator(
            lambda: self._committer.restored(picker, chosen), RestoreError, what="noting what was restored"
        )
        self._saves.went_to(report.step if report.found else None)
        return report

    def step(self, step: int, *, metrics: Mapping[str, Any] | None = None, last: bool = False) -> SaveHandle | None:
        """Say that optimizer step `step` is done; save if a policy finds it due, or at the end.

        Args:
            step: number of optimizer steps completed.
            metrics: of this step; numbers or tensors of one element, read only if a save needs them. Rank 0's are kept.
            last: whether training ends here; always saved.

        Returns:
            The handle of the save that began here, None if none did.

        Raises:
            SaveError: a save in the background failed; the checkpoints before it are untouched, and the next save may
                work.

        Ranks: all; collective, at the same step.
        Blocks: for a save that is due, as `mode` says; otherwise for next to nothing.
        """
        self._may_save()
        self._saves.check_step(step)
        agreed = self._saves.vote()
        if self._saves.pending and (agreed.failed or not agreed.running):
            self._saves.settle()
        if self._ranks.broken:  # not before: who is lost in a save is told by all in the same step, without a meeting
            self._ranks.renew("a step after a rank was lost")  # a rank that does not know yet hears it from its vote
        self._stop = self._stop or bool(agreed.signalled)
        context = SaveContext(
            step=step,
            last_saved_step=self._saves.newest_step,
            times_due=agreed.times_due,
            last=last,
            signalled=agreed.signalled,
        )
        reason = "last step" if last else self._save_policy.reason(context) if self._save_policy else None
        handle = self._save(step, metrics, reason, final=last) if reason else None
        self._ballot.begin(self._saves.pending, self._saves.began_s)
        return handle

    def save(self, step: int, *, metrics: Mapping[str, Any] | None = None) -> SaveHandle:
        """Save now, whatever the policy says. The same step twice gives the same handle.

        Ranks: all; collective.
        Blocks: as `mode` says, after the save before has ended.

        Raises:
            SaveError: this save failed (``sync``), or the one before did.
        """
        self._may_save()
        handle = self._save(step, metrics, "asked for")
        self._stop = bool(self._ballot.drop()) or self._stop
        self._ballot.begin(self._saves.pending, self._saves.began_s)
        return handle

    def close(self) -> None:
        """Wait for the save in flight, then give everything back. Idempotent.

        Raises:
            SaveError: the save in flight failed.

        Ranks: all; collective.
        Blocks: until the save in flight has ended.
        """
        if self._closed:
            return
        self._teller.refuse_inside()
        try:
            self._saves.settle(final=True)
        finally:
            self._release()

    def __repr__(self) -> str:
        now = "closed" if self._closed else self._saves.latest or f"next step {self.next_step}"
        rank = f"rank {self._ranks.rank} of {self._ranks.world}"
        return f"<CheckpointManager {self._storage.url} {self._mode}, {rank}, {now}>"

    def __enter__(self) -> CheckpointManager:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if kind is None:
            self.close()
            return
        # The other ranks may be anywhere: no collective of ours begins here. A save in flight has its own group and
        # thread, so it can still end well.
        if self._closed:
            return
        why = f"{kind.__name__}: {error}"
        self._ranks.leave(why)
        if self._saves.pending:
            self._saves.pending.exception()
            self._saves.left_behind()
        self._ranks.saving.leave(why)
        self._release()

    # ------------------------------------------------------------------------------------------------------- internals

    def _save(self, step: int, metrics: Mapping[str, Any] | None, reason: str, *, final: bool = False) -> SaveHandle:
        before = self._saves.pending
        try:
            return self._saves.save(step, metrics, reason, final=final)
        except BaseException:
            # Taken out of a save that the others have in flight: they vote on it at the end of this call.
            if self._mode == "async" and self._saves.pending not in (None, before):
                self._ballot.begin(self._saves.pending, self._saves.began_s)
            raise

    def _may_save(self) -> None:
        self._open()
        if self._mixture is not None:
            raise LiveStateError(f"nothing is saved: {self._mixture}", **self._mixture.facts)

    def _open(self) -> None:
        if self._closed:
            raise ConfigError("this CheckpointManager is closed; make a new one")
        self._teller.refuse_inside()

    def _release(self) -> None:
        self._closed = True
        self._forgotten.detach()
        self._ballot.close()
        self._committer.let_go()
        self._engine.close()
        self._ranks.close()
        self._storage.close()


def _forgotten(saves: Saves, ranks: Ranks, pid: int) -> None:
    """Say what nobody will hear from a manager any more that is gone, or whose process ends, before it was closed.

    Python has waited for the saving thread when a process ends; a manager that is only gone leaves it running.
    """
    if os.getpid() != pid:  # a fork of the job: the job itself goes on
        return
    ranks.leave("it, or its manager, ended without a close")
    saves.left_behind()
