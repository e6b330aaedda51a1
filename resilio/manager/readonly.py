"""`resilio.restore`: the state of a run without the right to write to it."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from typing import Any

from ..clock import SystemClock
from ..engine import Engine
from ..errors import ConfigError, NoCheckpointError
from ..hooks import host
from ..ranks import DEFAULT_TIMEOUT_S, Ranks
from ..state.saved import Rename
from ..state.training_state import TrainingState
from ..storage.base import Storage
from .arguments import check_plugins, check_timeout
from .asked import Asked
from .choosing import Which
from .report import RestoreReport
from .restoring import restore_into

__all__ = ["restore"]


def restore(
    url: str | os.PathLike[str] | Storage,
    state: TrainingState | Mapping[str, Any],
    which: Which = "newest",
    *,
    only: Iterable[str] | None = None,
    exclude: Iterable[str] | None = None,
    rename: Rename | None = None,
    strict: bool = True,
    check_fingerprints: bool = False,
    trust: bool = False,
    progress: bool | None = None,
    timeout_s: float = DEFAULT_TIMEOUT_S,
) -> RestoreReport:
    """Restore `state` from a run that this process does not write to: for evaluation, fine-tuning, export.

    Fences nobody: the job that trains the run goes on. For fine-tuning from a model alone, say ``only=["model"]``.

    A folder that plain ``dcp.save`` wrote is taken too, with a warning that nothing can tell whether its content is
    whole. It is read without running anything in it: a value that is more than tensors, plain values and types of
    `resilio.safe_types` is refused by name, unless `trust` says otherwise. Its keys must be nested as `state` is
    (``dcp.save({"model": …, "optimizer": …})``); a bare model's state fits with ``rename={"": "model."}``. Generators
    stay as they are.

    Args:
        url: the run's store, or the folder of a plain DCP checkpoint.
        state: the live objects, as for `CheckpointManager`.
        which: ``"newest"`` of the lineage, ``"healthy"``: the newest without values that are not finite; a step, or a
            checkpoint's `ref`.
        only: see `CheckpointManager.restore`.
        exclude: the same.
        rename: the same.
        strict: the same.
        check_fingerprints: the same.
        trust: whether to unpickle what would be refused in the values of a plain DCP checkpoint, which runs whatever
            its author put there; a warning names what. Makes no difference to a checkpoint of resilio, whose values are
            no pickles.
        progress: whether rank 0 draws a bar on stderr if the read takes long; None: if that is a terminal.
        timeout_s: how long a rank waits for the others.

    Raises:
        NoCheckpointError: the run has no such checkpoint, or none at all.
        FormatError: the metadata of a plain DCP checkpoint is not what stock DCP writes.
        MismatchError: checkpoint and live state differ.
        IntegrityError: the checkpoint is damaged.

    Ranks: all; collective.
    Blocks: until all ranks have restored, or all have raised the same error.
    """
    known: Any = None
    storage: Any = None
    live: Any = None
    error: Exception | None = None
    try:
        check_timeout(timeout_s)
    except ConfigError as caught:
        error, timeout_s = caught, DEFAULT_TIMEOUT_S
    ranks = Ranks(timeout_s)
    try:
        try:
            known = host()
            storage, live = known.open_storage(url), TrainingState.of(state)
        except Exception as caught:  # noqa: BLE001  told to all ranks, which raise it together
            error = error or caught
        ranks.agree(error, what="restoring")
        check_plugins(ranks, known)
        report, picker = restore_into(
            live,
            storage,
            ranks,
            Engine(storage, ranks),
            Asked(which, only, exclude, rename, strict, check_fingerprints, trust),
            clock=SystemClock(),
            foreign=True,
            progress=progress,
        )
        picker.let_go()
        if report.found is None:
            raise NoCheckpointError(f"{storage.url} has no checkpoint to restore from", url=storage.url)
        return report
    finally:
        ranks.close()
        if storage is not None:
            storage.close()
