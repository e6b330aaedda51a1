"""The path of a restore: one choice for all ranks, a plan, exactly the bytes needed, then live state, all or
nothing.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from ..engine import Engine, ForeignCheckpoint, fill_foreign, saved_state
from ..errors import ConfigError, NoCheckpointError, RestoreError
from ..ranks import Ranks
from ..records.catalog import Catalog, discover
from ..records.keys import METADATA, attempt_key
from ..records.manifest import LoadedManifest, load_manifest
from ..state.restore import plan_restore
from ..state.training_state import TrainingState
from ..storage.base import Storage
from ..types import CheckpointInfo, CheckpointRef
from .foreign import outcomes_of_foreign, pick_foreign, without_ours
from .report import RestoreReport

__all__ = ["Which", "choose", "restore_into"]

Which = int | str
Rename = Mapping[str, str] | Callable[[str], str]

_log = logging.getLogger("resilio")


def choose(catalog: Catalog, which: Which) -> CheckpointRef | None:
    """The checkpoint meant by `which`; None if the run has none at all and the newest was asked for.

    Args:
        catalog: what the run holds.
        which: ``"newest"`` of the lineage, or a step. A step that the lineage has is taken there; one that only an
            abandoned branch has is taken from the newest such branch, because it was asked for by number.

    Raises:
        NoCheckpointError: no checkpoint of that step. Never falls back to another one.
        ConfigError: `which` is neither.
    """
    if which == "newest":
        if catalog.newest is None and catalog.off_lineage:
            listed = ", ".join(str(ref) for ref in catalog.off_lineage[-20:])
            raise NoCheckpointError(
                f"{catalog.storage.url} has checkpoints, but none on the lineage: {listed}. Restore one of them by its "
                f"step, or begin anew with fresh=True.",
                url=catalog.storage.url,
            )
        return catalog.newest
    if not isinstance(which, int) or isinstance(which, bool):
        raise ConfigError(f"restore(which={which!r}): which is 'newest' or the number of a step", which=which)
    return catalog.find(which)


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
) -> tuple[RestoreReport, Catalog | None]:
    """Restore `state`; return the report and, on rank 0, what the run held when the choice was made.

    `foreign`: where there is no run, a checkpoint of plain DCP at the root of the storage will do.

    Ranks: all; collective on both groups.
    Blocks: until all ranks have applied, or all have raised.
    """
    started = time.monotonic()
    catalog: Catalog | None = None
    # Read more than once: neither a lone pattern nor a generator may get lost.
    only = _patterns(only)
    exclude = _patterns(exclude)

    def pick() -> tuple[CheckpointInfo, LoadedManifest | ForeignCheckpoint] | None:
        nonlocal catalog
        catalog = discover(storage)
        if foreign and not catalog.commits:
            found = pick_foreign(storage, which, only, exclude, rename)
            if found is not None:
                return found
        ref = choose(catalog, which)
        if ref is None:
            return None
        catalog.line_of(ref)  # what the next save needs to know: must not fail once live state is another
        manifest = load_manifest(storage, catalog.read(ref))
        manifest.check_objects(storage)
        # Not needed here; but what damaged this one may have damaged others, and readers by plain DCP need it.
        manifest.read_object(storage, attempt_key(manifest.attempt, METADATA))
        return catalog.info(ref), manifest

    # One rank looks and tells the others: two ranks that list a store may see two different newest checkpoints.
    picked = ranks.from_coordinator(pick, RestoreError)
    if picked is None:
        return RestoreReport(found=None), catalog
    info, source = picked
    is_foreign = isinstance(source, ForeignCheckpoint)
    error: BaseException | None = None
    plan: Any = None
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
    read: list[int] = []
    if isinstance(source, ForeignCheckpoint):
        fill_foreign(plan.scratch, source, storage, ranks, read.append)
    else:
        engine.fill(plan.scratch, source, read.append)
    outcomes = plan.apply(lambda failed: ranks.agree(failed, RestoreError))
    report = RestoreReport(
        found=info,
        outcomes=outcomes_of_foreign(outcomes) if is_foreign else tuple(outcomes),
        read_bytes=sum(read),
        seconds=time.monotonic() - started,
    )
    if ranks.coordinator:
        _log.info(
            "restored step=%d generation=%d saved_world=%d world=%d seconds=%.3f read_bytes=%d",
            *(info.step, info.ref.generation, info.world, ranks.world, report.seconds, report.read_bytes),
        )
    return report, catalog


def _patterns(given: Iterable[str] | None) -> tuple[str, ...] | None:
    if given is None:
        return None
    return (given,) if isinstance(given, str) else tuple(given)
