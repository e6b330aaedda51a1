"""Garbage that need not wait for a sweep: what an attempt of one's own has left that failed before its commit."""

from __future__ import annotations

from ..storage.base import Storage
from . import keys

__all__ = ["discard"]


def discard(storage: Storage, attempt: str) -> None:
    """Delete all of an attempt, its manifest first. Nobody can hold it, or miss it: it was never a checkpoint.

    A sweep comes only after a save that went well, and on a full disk none does until this is gone.

    Ranks: rank 0, of the manager whose attempt it is, once no rank writes to it.

    Args:
        storage: the run's.
        attempt: of the caller, failed, and its commit was never sent: one of `RunWriter.failed`.

    Raises:
        StorageError: some of it is there still.
    """
    manifest = keys.attempt_key(attempt, keys.MANIFEST)
    prefix = f"{attempt}/"
    storage.delete([manifest])
    storage.delete([info.key for info in storage.list(prefix) if keys.split_attempt_key(info.key)])
    for item in [*storage.incomplete(prefix)]:
        storage.abort(item)
