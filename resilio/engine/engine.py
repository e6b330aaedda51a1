"""The engine: one run's saves and loads, on every rank."""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection
from concurrent.futures import Future
from typing import Any, TypeVar

import torch

from ..errors import ResilioError, SaveError, UnknownTypeError
from ..ranks import Ranks, portable
from ..records.manifest import LoadedManifest
from ..records.values import decode_value
from ..state.flat import FlatState, Ref, SavedState, TensorSpec, Unread
from ..storage.base import Storage
from . import checking, dcp
from .agreed import AgreedPlan, Stand, still_holds, tell_of_buffers
from .loading import Loader, as_dtype
from .plan import LocalPlan, Planner
from .reader import CheckpointReader
from .stage import Stager
from .writer import AttemptWriter, Root

__all__ = ["Engine", "saved_state"]

_T = TypeVar("_T")
_PHASES = ("staging", "writing", "committing")  # of an attempt, each with a meeting at its end
_log = logging.getLogger("resilio")


class Engine:
    """Writes attempts and reads checkpoints of one run.

    Args:
        storage: the run's store.
        ranks: who takes part.
        digest: algorithm of the whole-object digests: ``xxh3_128``, ``crc32`` or ``sha256``.
        fingerprints: whether to compute those of the tensors that are saved.
        overlap: whether a save in the background may copy what only an optimizer changes after it has returned.
    """

    def __init__(
        self,
        storage: Storage,
        ranks: Ranks,
        digest: str = "xxh3_128",
        *,
        fingerprints: bool = True,
        overlap: bool = False,
    ) -> None:
        self._storage = storage
        self._ranks = ranks
        self._digest = digest
        self._fingerprints = fingerprints
        self._stager = Stager(overlap=overlap)
        self._planned: LocalPlan | None = None  # of the save before
        self._agreed: AgreedPlan | None = None  # of a save that went well, if none has failed since
        self._met: set[str] = set()  # meetings of the newest attempt that this rank has come to

    def plan(self, flat: FlatState) -> LocalPlan:
        """What this rank would write of `flat`. Local; whatever it raises must be agreed on before `save`."""
        plan = self._planned = LocalPlan.of(flat, self._ranks.rank, self._planned)
        agreed = self._agreed
        if agreed is not None and agreed.structure is plan.structure:
            plan.agreed = agreed
        return plan

    def holds(self, stands: list[Stand | None]) -> bool:
        """Whether the next save needs no new plan, as all ranks find from what all of them said. Local.

        Args:
            stands: `LocalPlan.stand` of all ranks; None: it has none.
        """
        holds = still_holds(stands)
        if holds and self._ranks.coordinator and self._planned is not None:
            tell_of_buffers(self._planned.structure.buffers, [one.buffers for one in stands if one is not None])
        return holds

    def save(
        self,
        flat: FlatState,
        local: LocalPlan,
        attempt: str,
        commit: Callable[[Root], _T],
        after: Callable[[], None] | None = None,
        *,
        planned: bool = False,
        background: bool = False,
    ) -> Future[_T]:
        """Write `flat` as `attempt` and commit it. The save before must have ended on all ranks.

        Args:
            flat: this rank's captured state.
            local: what `plan` made of it.
            attempt: name of the attempt's folder, the same on all ranks.
            commit: runs on rank 0 when all ranks' bytes are durable; what it raises fails the save on all ranks, what
                it returns goes to all.
            planned: whether all ranks write by the plan that they hold, see `holds`; else DCP makes one.
            after: runs on this rank once the checkpoint is committed, before the future is done; its failure is logged.
            background: return when the state is copied, or, with `overlap`, all of it that something else than an
                optimizer's step may change.

        Returns:
            Done when this rank knows the outcome: what `commit` returned; its exception is a `SaveError` or another of
            ours, the same on all ranks.

        Ranks: all; collective on the data group if not `planned`, in the background if asked for.
        Blocks: until committed, or while the state is copied.
        """
        ranks, saving = self._ranks, self._ranks.saving
        if saving.exchange is not None:
            saving.exchange.lost = None
        self._met.clear()

        # A Ctrl-C belongs to the loop's thread; what else is no `Exception` would leave whoever waits without an end.
        stray: tuple[type[BaseException], ...] = (
            (BaseException,) if background else (Exception, dcp.CheckpointException)
        )

        agreed = local.agreed if planned else None
        whole = False  # all ranks' bytes are durable, and rank 0 knows where

        def arrive(failure: BaseException | None, phase: str, word: Any = None, take: Any = None) -> None:
            self._met.add(f"{attempt}/{phase}")
            if isinstance(failure, stray):
                failure = portable(failure, SaveError)
            # Named by the attempt: after one that broke off here and went on there, all meet again in the next.
            what, name = f"{phase} {attempt}", f"{attempt}/{phase}"
            ranks.arrive(failure, SaveError, what=what, name=name, via=saving, word=word, take=take)

        def staged(failure: BaseException | None) -> None:
            if agreed is None:
                arrive(failure, "staging")
            elif failure is not None:  # told where all meet who have written
                raise failure

        def wrote(failure: BaseException | None, results: Any) -> None:
            nonlocal whole
            if agreed is None:
                arrive(failure, "writing")
            else:
                arrive(failure, "writing", results, lambda all_results: writer.gather(agreed.metadata, all_results))
                whole = True

        writer = AttemptWriter(
            *(self._storage, attempt, local, ranks.rank, self._digest, self._fingerprints, wrote),
            alone=agreed is not None,
            background=background,
        )
        planner = Planner(local, ranks.rank, ranks.world, attempt, staged, agreed)
        state = {**flat.tensors, **flat.values}
        outcome: Future[_T] = Future()
        # Whoever gives up awaiting it must not cancel it: this rank would go on alone.
        outcome.set_running_or_notify_cancel()

        late: BaseException | None = None

        def make_it_one() -> _T:
            if late is not None:
                raise dcp.told(late, SaveError) from late
            assert writer.root is not None
            try:
                return commit(writer.root)
            except stray as error:
                raise portable(error, SaveError) from error

        def settle(error: BaseException | None) -> None:
            nonlocal late
            on_the_way = agreed is not None and f"{attempt}/writing" not in self._met
            self._met.update(f"{attempt}/{phase}" for phase in _PHASES)
            try:
                if error is not None and on_the_way:  # no collective of DCP's tells the others
                    arrive(dcp.told(error, SaveError), "writing")
                if error is not None and not whole:
                    raise self._told(error, attempt, alone=agreed is not None)
                late = error  # after all was written: of weight on rank 0, which others await in the last meeting
                committed = saving.from_coordinator(
                    make_it_one, SaveError, what=f"committing {attempt}", name=f"{attempt}/committing"
                )
            except stray as failure:  # handed to whoever waits
                self._agreed = None
                outcome.set_exception(portable(failure, SaveError))
                return
            try:
                if after is not None:
                    after()
            except stray:
                # The checkpoint is committed whatever comes after; and a future that is never done would hang all
                # ranks.
                _log.exception("after a save: attempt=%s", attempt)
            self._agreed = planner.made
            outcome.set_result(committed)

        alone = agreed is not None
        if background:
            self._stager.expect(local.structure.late)
            running = dcp.async_save(state, writer, planner, self._stager, self._ranks, alone=alone)
            running.add_done_callback(lambda done: settle(done.exception()))
        else:
            settle(dcp.save(state, writer, planner, self._ranks, alone=alone))
        return outcome

    def miss(self, attempt: str, error: BaseException) -> None:
        """Let nobody wait for this rank in the meetings of `attempt`: `error` took it out of the save. Local.

        A Ctrl-C between two of them, or before the first; or there was no thread to be had.
        """
        self._agreed = None
        if self._ranks.saving.exchange is None or self._ranks.groups is None:
            return
        for phase in _PHASES:
            name = f"{attempt}/{phase}"
            if name not in self._met:
                self._ranks.saving.exchange.miss(f"{phase} {attempt}", error, name=name)
        self._ranks.groups.broken = True  # out of step on one of them; a vote that comes before `renew` may end

    def _told(self, error: BaseException, attempt: str, *, alone: bool) -> ResilioError:
        """What ended an attempt, as all ranks should hear it."""
        saving = self._ranks.saving
        if saving.exchange is not None and saving.exchange.lost is not None:
            return saving.exchange.lost
        if saving.exchange is None or alone or isinstance(error, dcp.CheckpointException):
            return dcp.told(error, SaveError)
        # Errors of DCP's steps come as the other: one of its collectives failed.
        return self._ranks.collective_failed(f"saving {attempt}", attempt, error, via=saving)

    def fill(
        self,
        scratch: dict[str, torch.Tensor],
        manifest: LoadedManifest,
        progress: Callable[[int], None] | None = None,
        *,
        fingerprints: bool = False,
        check_only: Collection[str] = (),
    ) -> None:
        """Read every tensor of `scratch` from the checkpoint, in place, checked against its digests.

        Args:
            scratch: flat key -> tensor allocated like the live one; all ranks must ask for the same shared keys.
            manifest: of the checkpoint.
            progress: called with the bytes of each finished read, from reading threads.
            fingerprints: whether to compare what all ranks have read with the fingerprints taken at save.
            check_only: flat keys of tensors that are read and checked, and stay as they are.

        Raises:
            IntegrityError: bytes are not those that were saved; names object and tensor. `scratch` may hold anything.
            RestoreError: another failure, such as no fingerprints to compare with. On all ranks, the same.

        Ranks: all; collective on the data group.
        Blocks: until all ranks have read.
        """
        expected = checking.evidence(manifest) if fingerprints else None
        reader = CheckpointReader(self._storage, manifest, self._ranks, progress, check_only)
        dcp.load(scratch, reader, Loader(), self._ranks)
        if expected is not None:
            checking.compare(scratch, expected, manifest, self._ranks)

    def lend(self) -> dict[str, torch.Tensor]:
        """The staging buffers, for `plan_restore`; until `keep`, the next save makes new ones. Local."""
        return self._stager.lend()

    def keep(self, buffers: dict[str, torch.Tensor]) -> None:
        """Stage into these: what a restore read into, and nothing holds any more. Local."""
        self._stager.keep(buffers)

    def close(self) -> None:
        """Give the staging buffers back. Local."""
        self._stager.close()


def saved_state(manifest: LoadedManifest) -> SavedState:
    """What a checkpoint holds, for the state room to plan by."""
    return SavedState(
        step=manifest.step,
        world=manifest.world,
        tensors={
            key: TensorSpec(as_dtype(tensor.dtype), tensor.shape, tensor.order)
            for key, tensor in manifest.tensors.items()
        },
        values={key: _value(value, key) for key, value in manifest.values.items()},
        ties=dict(manifest.ties),
        tree=decode_value(manifest.tree, "tree", ref_type=Ref),
    )


def _value(data: Any, key: str) -> Any:
    try:
        return decode_value(data, key)
    except UnknownTypeError as error:  # whoever leaves it out can do without
        return Unread(error)
