"""Saves that were begun after a checkpoint and never became one: who looks for the newest would ask about them."""

from __future__ import annotations

from ..types import CheckpointRef, Damage
from . import keys
from .catalog import Catalog, list_attempts

__all__ = ["unfinished"]


def unfinished(catalog: Catalog, after: CheckpointRef | None) -> list[Damage]:
    """Attempts newer than `after` that have no commit record, newest first, and what each lacks.

    Args:
        catalog: what the run held.
        after: the checkpoint that was chosen; None: all attempts.

    Raises:
        StorageError: the store could not be listed.

    Blocks: for one listing of all attempts.
    """
    committed = set(catalog.commits)
    findings = []
    for attempt, held in list_attempts(catalog.storage).items():
        ref = keys.parse_attempt(attempt)
        if ref is not None and ref not in committed and (after is None or ref > after):
            # A manifest is written when all ranks have ended, and last: with one, only the record is wanting.
            what = (
                "has no commit record: the save died just before it, or the record was deleted"
                if keys.attempt_key(attempt, keys.MANIFEST) in held
                else "has no commit record: the save did not end, or has yet to"
            )
            findings.append(Damage(attempt, what, {"ref": ref}))
    return sorted(findings, key=lambda finding: (finding.facts["ref"], finding.where), reverse=True)
