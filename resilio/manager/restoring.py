"""The path of a restore: one choice for all ranks, a plan, the bytes it needs, then live state, all or nothing."""

from __future__ import annotations

import logging
import time
from functools import partial

import torch

from ..clock import Clock
from ..engine import Engine, ForeignCheckpoint, fill_foreign, host_memory, saved_state
from ..errors import ResilioError, RestoreError
from ..ranks import Ranks
from ..records.health import faults, faults_text
from ..records.manifest import LoadedManifest
from ..state.plan import RestorePlan
from ..state.restore import plan_restore
from ..state.saved import refuse_loose_ends
from ..state.tensors import local as local_tensor
from ..state.training_state import TrainingState
from ..storage.base import Storage
from ..types import Damage
from .asked import Asked
from .choosing import Picked, Picker, Source, nothing_left, passed_over
from .foreign import ABSENT, outcomes_of_foreign, pick_foreign
from .progress import ReadProgress
from .report import RestoreReport

__all__ = ["restore_into"]

_log = logging.getLogger("resilio")

_DAMAGED = "a damaged checkpoint"
_UNFINISHED = "a save that never became a checkpoint"


def restore_into(
    state: TrainingState,
    storage: Storage,
    ranks: Ranks,
    engine: Engine,
    asked: Asked,
    *,
    clock: Clock,
    foreign: bool = False,
    progress: bool | None = None,
    staged: bool = False,
) -> tuple[RestoreReport, Picker]:
    """Restore `state`; return the report, and the picker: on rank 0 it knows what the run held, and holds the lease.

    `clock`: of the lease. `foreign`: where there is no run, a checkpoint of plain DCP at the root of the storage will
    do. `progress`: whether rank 0 may draw a bar; None: if stderr is a terminal. `staged`: whether saves of `engine`
    will copy the state first: the memory for that is read into, or is that which was read into.

    Ranks: all; collective on both groups.
    Blocks: until all ranks have applied, or all have raised; then nothing is held.
    """
    asked = asked.checked(ranks)
    picker = Picker(storage, asked.which, clock, (lambda: pick_foreign(storage, asked)) if foreign else None)
    try:
        report = _restore(state, storage, ranks, engine, picker, asked, progress, staged)
    except BaseException:
        picker.let_go()
        raise
    return report, picker


def _restore(
    state: TrainingState,
    storage: Storage,
    ranks: Ranks,
    engine: Engine,
    picker: Picker,
    asked: Asked,
    progress: bool | None,
    staged: bool,
) -> RestoreReport:
    started = time.monotonic()
    lent = engine.lend() if staged else {}
    passed: list[Damage] = []
    while True:
        # One rank looks and tells the others: two ranks that list a store may see two different newest checkpoints.
        picked, bad, never = ranks.from_coordinator(lambda: _choose(picker), RestoreError, what="choosing a checkpoint")
        _warn(_DAMAGED, bad, ranks)
        passed += bad
        if picked is None:
            if passed:
                raise nothing_left(storage.url, passed, healthy=picker.which == "healthy")
            _warn(_UNFINISHED, never, ranks)
            return RestoreReport(found=None, unfinished=tuple(never))
        info, source = picked
        plan = RestorePlan()
        try:
            if asked.check_fingerprints and isinstance(source, ForeignCheckpoint):
                raise RestoreError(
                    f"{storage.url} is a checkpoint of plain DCP, which takes no fingerprints: there is nothing to "
                    "check by. Leave check_fingerprints out."
                )
            plan = _plan(state, source, ranks, asked, lent)
            needed_bytes = sum(local_tensor(tensor).nbytes for tensor in plan.scratch.values())
            direct = _in_place(plan, source, ranks, asked)
            bar = ReadProgress(f"restoring step {info.step}", needed_bytes, progress if ranks.coordinator else False)
            with bar as read:
                if isinstance(source, ForeignCheckpoint):
                    fill_foreign(plan.scratch, source, storage, ranks, read)
                else:
                    engine.fill(
                        plan.scratch, source, read, fingerprints=asked.check_fingerprints, check_only=direct or ()
                    )
                    if direct is not None:
                        plan.stock.insert(0, ("what is read in place", partial(_fill, direct, engine, source, read)))
            break
        except ResilioError as error:
            # The same error on all ranks, so all of them go on to the same next one.
            if isinstance(source, ForeignCheckpoint) or not picker.may_pass_over(error):
                raise
            bad = [passed_over(info.ref, error)]
            picker.found(bad[0], error)
            _warn(_DAMAGED, bad, ranks)
            passed += bad
        lent = plan.memory.spare()
        del plan
    _warn(_UNFINISHED, never, ranks)
    outcomes = plan.apply(lambda failed: ranks.agree(failed, RestoreError, what="putting state back"))
    if staged:
        engine.keep(plan.memory.spare())
    report = RestoreReport(
        found=info,
        outcomes=outcomes_of_foreign(outcomes) if isinstance(source, ForeignCheckpoint) else tuple(outcomes),
        renamed=plan.renamed,
        stayed=tuple(plan.stayed),
        unused=tuple(plan.unused),
        passed_over=tuple(passed),
        unfinished=tuple(never),
        read_bytes=bar.done_bytes,
        seconds=time.monotonic() - started,
    )
    if ranks.coordinator:
        if info.non_finite and not isinstance(source, ForeignCheckpoint):
            _log.warning(
                "the checkpoint of step %d, now restored, is NOT HEALTHY: %d value(s) of it are not finite: %s. "
                'restore("healthy") goes back to the newest that is',
                *(info.step, info.non_finite, faults_text(faults(source))),
            )
        _log.info(
            "restored step=%d generation=%d saved_world=%d world=%d seconds=%.3f read_bytes=%d passed_over=%d",
            *(info.step, info.ref.generation, info.world, ranks.world, report.seconds, report.read_bytes, len(passed)),
        )
    return report


def _plan(
    state: TrainingState, source: Source, ranks: Ranks, asked: Asked, lent: dict[str, torch.Tensor]
) -> RestorePlan:
    """The plan of this rank; an error of any rank on all."""
    error: BaseException | None = None
    plan = RestorePlan()
    try:
        plan = plan_restore(
            state,
            source.state if isinstance(source, ForeignCheckpoint) else refuse_loose_ends(saved_state(source)),
            rank=ranks.rank,
            world=ranks.world,
            only=asked.only,
            exclude=asked.exclude,
            absent=ABSENT if isinstance(source, ForeignCheckpoint) else (),
            rename=asked.rename,
            strict=asked.strict,
            lent=lent,
        )
    except Exception as caught:  # noqa: BLE001  told to all ranks, which raise it together
        error = caught
    ranks.agree(error, RestoreError, what="planning a restore")
    return plan


def _in_place(plan: RestorePlan, source: Source, ranks: Ranks, asked: Asked) -> dict[str, torch.Tensor] | None:
    """Where some rank's host has no memory for scratch beside the state: what shall be checked first and then read
    again, straight into live tensors, which stand for it in `plan.scratch`. On all ranks then, else on none.
    """
    if isinstance(source, ForeignCheckpoint) or asked.check_fingerprints:  # nothing to check by; or values are needed
        return None
    if not any(ranks.gather(host_memory.lacks(plan.memory.fresh_bytes), "looking for memory")):
        return None
    if ranks.coordinator:
        _log.warning(
            "no host memory to read the checkpoint beside the live state: it is read once to check it, and then once "
            "more in place. Damage leaves live state as it was; should the storage fail or change between the two, "
            "LiveStateError says that live state is a mixture"
        )
    return plan.memory.in_place()


def _fill(direct: dict[str, torch.Tensor], engine: Engine, source: LoadedManifest, read: ReadProgress) -> None:
    """Read in place what was found to be whole."""
    engine.fill(direct, source, read)
    for tensor in direct.values():
        torch.autograd.graph.increment_version(local_tensor(tensor))


def _choose(picker: Picker) -> tuple[Picked | None, list[Damage], list[Damage]]:
    """The next one to try, the damaged ones before it, and the saves since that never became a checkpoint."""
    picked, bad = picker.next()
    if picked is not None and isinstance(picked[1], ForeignCheckpoint):
        return picked, bad, []
    return picked, bad, picker.unfinished(picked[0].ref if picked else None)


def _warn(what: str, passed: list[Damage], ranks: Ranks) -> None:
    for damage in passed if ranks.coordinator else ():
        _log.warning("passed over %s %s", what, damage)
