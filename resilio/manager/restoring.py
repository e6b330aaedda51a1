"""The path of a restore: one choice for all ranks, a plan, the bytes it needs, then live state, all or nothing."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable, Iterator, Mapping

from ..engine import Engine, ForeignCheckpoint, fill_foreign, saved_state
from ..errors import ResilioError, RestoreError
from ..ranks import Ranks
from ..records.catalog import Catalog, discover
from ..records.manifest import LoadedManifest
from ..state.plan import RestorePlan
from ..state.restore import plan_restore
from ..state.tensors import local as local_tensor
from ..state.training_state import TrainingState
from ..storage.base import Storage
from ..types import CheckpointInfo, CheckpointRef, Damage
from .choosing import Which, candidates, is_damage, nothing_left, open_checkpoint, passed_over
from .foreign import outcomes_of_foreign, pick_foreign, without_ours
from .progress import ReadProgress
from .report import RestoreReport

__all__ = ["Rename", "Which", "restore_into"]

Rename = Mapping[str, str] | Callable[[str], str]
Source = LoadedManifest | ForeignCheckpoint

_log = logging.getLogger("resilio")


def restore_into(
    state: TrainingState,
    storage: Storage,
    ranks: Ranks,
    engine: Engine,
    which: Which,
    *,
    only: Iterable[str] | None,
    exclude: Iterable[str] | None,
    rename: Rename | None,
    strict: bool,
    foreign: bool = False,
    progress: bool | None = None,
) -> tuple[RestoreReport, Catalog | None]:
    """Restore `state`; return the report and, on rank 0, what the run held when the choice was made.

    `foreign`: where there is no run, a checkpoint of plain DCP at the root of the storage will do. `progress`: whether
    rank 0 may draw a bar; None: if stderr is a terminal.

    Ranks: all; collective on both groups.
    Blocks: until all ranks have applied, or all have raised.
    """
    started = time.monotonic()
    catalog: Catalog | None = None
    # Read more than once: neither a lone pattern nor a generator may get lost.
    only = _patterns(only)
    exclude = _patterns(exclude)

    refs: Iterator[CheckpointRef] | None = None

    def pick() -> tuple[tuple[CheckpointInfo, Source] | None, list[Damage]]:
        """The next one whose records are whole, and those that were not."""
        nonlocal catalog, refs
        if catalog is None or refs is None:
            catalog = discover(storage)
            if foreign and not catalog.commits:
                found = pick_foreign(storage, which, only, exclude, rename)
                if found is not None:
                    return found, []
            refs = candidates(catalog, which)
        bad: list[Damage] = []
        for ref in refs:
            try:
                return open_checkpoint(catalog, ref), bad
            except ResilioError as error:
                if which != "newest" or not is_damage(error):
                    raise
                bad.append(passed_over(ref, error))
        return None, bad

    passed: list[Damage] = []
    while True:
        # One rank looks and tells the others: two ranks that list a store may see two different newest checkpoints.
        picked, bad = ranks.from_coordinator(pick, RestoreError)
        _warn(bad, ranks)
        passed += bad
        if picked is None:
            if passed:
                raise nothing_left(storage.url, passed)
            return RestoreReport(found=None), catalog
        info, source = picked
        plan = _plan(state, source, ranks, only, exclude, rename, strict)
        needed_bytes = sum(local_tensor(tensor).nbytes for tensor in plan.scratch.values())
        bar = ReadProgress(f"restoring step {info.step}", needed_bytes, progress if ranks.coordinator else False)
        try:
            with bar as read:
                if isinstance(source, ForeignCheckpoint):
                    fill_foreign(plan.scratch, source, storage, ranks, read)
                else:
                    engine.fill(plan.scratch, source, read)
            break
        except ResilioError as error:
            # The same error on all ranks, so all of them go on to the same next one.
            if which != "newest" or isinstance(source, ForeignCheckpoint) or not is_damage(error):
                raise
            bad = [passed_over(info.ref, error)]
            _warn(bad, ranks)
            passed += bad
        del plan  # its scratch memory, before the next one's
    outcomes = plan.apply(lambda failed: ranks.agree(failed, RestoreError))
    report = RestoreReport(
        found=info,
        outcomes=outcomes_of_foreign(outcomes) if isinstance(source, ForeignCheckpoint) else tuple(outcomes),
        passed_over=tuple(passed),
        read_bytes=bar.done_bytes,
        seconds=time.monotonic() - started,
    )
    if ranks.coordinator:
        _log.info(
            "restored step=%d generation=%d saved_world=%d world=%d seconds=%.3f read_bytes=%d passed_over=%d",
            *(info.step, info.ref.generation, info.world, ranks.world, report.seconds, report.read_bytes, len(passed)),
        )
    return report, catalog


def _plan(
    state: TrainingState,
    source: Source,
    ranks: Ranks,
    only: tuple[str, ...] | None,
    exclude: tuple[str, ...] | None,
    rename: Rename | None,
    strict: bool,
) -> RestorePlan:
    """The plan of this rank; an error of any rank on all."""
    error: BaseException | None = None
    plan = RestorePlan()
    is_foreign = isinstance(source, ForeignCheckpoint)
    try:
        plan = plan_restore(
            state,
            source.state if isinstance(source, ForeignCheckpoint) else saved_state(source),
            rank=ranks.rank,
            world=ranks.world,
            only=only,
            exclude=without_ours(exclude) if is_foreign else exclude,
            rename=rename,
            strict=strict,
        )
    except Exception as caught:  # noqa: BLE001  told to all ranks, which raise it together
        error = caught
    ranks.agree(error, RestoreError)
    return plan


def _warn(bad: list[Damage], ranks: Ranks) -> None:
    for damage in bad if ranks.coordinator else ():
        _log.warning("passed over a damaged checkpoint %s", damage)


def _patterns(given: Iterable[str] | None) -> tuple[str, ...] | None:
    if given is None:
        return None
    return (given,) if isinstance(given, str) else tuple(given)
