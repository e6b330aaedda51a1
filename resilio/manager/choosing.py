"""Which checkpoint a restore begins with, and which one it goes on to if that is damaged."""

from __future__ import annotations

from collections.abc import Iterator

from ..errors import (
    AccessDeniedError,
    AuthExpiredError,
    ConfigError,
    FormatError,
    IntegrityError,
    NewerFormatError,
    NoCheckpointError,
    OutOfSpaceError,
    ResilioError,
    StorageError,
    ThrottledError,
    TransientError,
)
from ..records.catalog import Catalog
from ..records.keys import METADATA, attempt_key
from ..records.manifest import LoadedManifest, load_manifest
from ..types import CheckpointInfo, CheckpointRef, Damage

__all__ = ["Which", "candidates", "is_damage", "nothing_left", "open_checkpoint", "passed_over"]

Which = int | str

# Faults of the way to the store, not of what lies there: the newest may well be whole, and an older one in its place
# would lose work that is not lost. `AccessDeniedError` is none of them: one unreadable object is one damaged
# checkpoint.
_PASSING = (TransientError, ThrottledError, AuthExpiredError, OutOfSpaceError)


def candidates(catalog: Catalog, which: Which) -> Iterator[CheckpointRef]:
    """The checkpoints that `which` may mean, best first.

    Args:
        catalog: what the run holds.
        which: ``"newest"``: the lineage from the newest back. A step: that one alone, on the lineage if it has it, else
            on the newest abandoned branch that has: it was asked for by number, and is never overridden.

    Raises:
        NoCheckpointError: no checkpoint of that step, or none on the lineage though there are others.
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
        return reversed(catalog.lineage)
    if not isinstance(which, int) or isinstance(which, bool):
        raise ConfigError(f"restore(which={which!r}): which is 'newest' or the number of a step", which=which)
    return iter([catalog.find(which)])


def open_checkpoint(catalog: Catalog, ref: CheckpointRef) -> tuple[CheckpointInfo, LoadedManifest]:
    """Everything of a checkpoint but its data, checked: records, manifest, presence and sizes of all objects.

    Raises:
        ResilioError: it cannot be restored; see `is_damage`.
    """
    storage = catalog.storage
    catalog.line_of(ref)  # what the next save needs to know: must not fail once live state is another
    manifest = load_manifest(storage, catalog.read(ref))
    manifest.check_objects(storage)
    # Not needed here; but what damaged this one may have damaged others, and readers by plain DCP need it.
    manifest.read_object(storage, attempt_key(manifest.attempt, METADATA))
    return catalog.info(ref), manifest


def is_damage(error: BaseException) -> bool:
    """Whether `error` says that a checkpoint is damaged, so that an older one may take its place.

    Not so a fault of the way to the store, a record of a newer resilio, or state that does not fit.
    """
    if isinstance(error, (*_PASSING, NewerFormatError)):
        return False
    return isinstance(error, (IntegrityError, FormatError, StorageError, AccessDeniedError))


def passed_over(ref: CheckpointRef, error: ResilioError) -> Damage:
    """A line of the report: which checkpoint was not taken, and why."""
    return Damage(str(ref), f"{type(error).__name__}: {error}", {"ref": ref, **error.facts})


def nothing_left(url: str, passed: list[Damage]) -> IntegrityError:
    """What to raise when no checkpoint of the lineage can be restored: never a reason for a fresh start."""
    listed = "".join(f"\n  {damage}" for damage in passed)
    return IntegrityError(
        f"{url}: none of the {len(passed)} checkpoint(s) of the lineage can be restored; live state is as it was."
        f"{listed}\nMend the store, restore an abandoned one by its step, or begin anew beside them with fresh=True.",
        url=url,
        passed_over=passed,
    )
