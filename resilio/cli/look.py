"""From a URL and what somebody typed to what they mean: a checkpoint, a policy."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from ..errors import ConfigError, NoCheckpointError
from ..hooks import host
from ..policies import KeepPolicy, SavePolicy
from ..records import keys
from ..records.catalog import Catalog, discover
from ..records.quarantine import quarantined
from ..records.run import read_run
from ..storage.base import Storage
from ..types import CheckpointInfo, CheckpointRef

if TYPE_CHECKING:
    from ..records.tensors import Reads
    from .plain import PlainFolder

__all__ = [
    "catalog_of",
    "catalog_or_plain",
    "choose",
    "exact",
    "in_quarantine",
    "keep_policy",
    "named",
    "reading",
    "save_policy",
]


def catalog_of(storage: Storage) -> Catalog:
    """What the run holds.

    Raises:
        NoCheckpointError: no commit at all, and no pin that stands in for one.
        NewerFormatError: a newer resilio wrote this run.
    """
    run = read_run(storage)
    catalog = discover(storage)
    if not catalog.commits and not catalog.pinned():
        what = "a run without a checkpoint yet" if run else "no run: there is neither a resilio.json nor a commit"
        raise NoCheckpointError(f"{storage.url} is {what}. Is it the URL that CheckpointManager was given?")
    return catalog


@contextmanager
def reading(
    url: str, which: str | None, wanted: Callable[[str], bool], trust: bool = False
) -> Iterator[tuple[Reads, dict[str, Any], CheckpointInfo | None]]:
    """What reads the tensors of a checkpoint, of a run or of plain DCP; how JSON says which; what is known of it.

    Args:
        url: the run, or the folder.
        which: as for `choose`.
        wanted: which values of a plain DCP checkpoint are to be read.
        trust: whether those of them that are refused otherwise are unpickled.

    Raises: as `catalog_of` and `choose`.
    """
    from ..hooks import open_storage
    from ..records.manifest import load_manifest
    from ..records.tensors import TensorReader

    with open_storage(url) as storage:
        catalog, found = catalog_or_plain(storage)
        if catalog is not None:
            ref = choose(catalog, which)
            reader = TensorReader(storage, load_manifest(storage, catalog.read(ref)))
            yield reader, {"url": storage.url, **named(ref)}, catalog.info(ref)
            return
        from . import plain
        from .plain_reader import PlainReader

        one = plain.choose(storage, found, which)
        below, checkpoint = plain.open_one(storage, one)
        try:
            said = {"url": storage.url, "name": one.name or ".", "step": one.step, "generation": None}
            yield PlainReader(below, checkpoint, wanted, trust), said, None
        finally:
            below.close()


def catalog_or_plain(storage: Storage) -> tuple[Catalog | None, list[PlainFolder]]:
    """What the run holds; or, where there is no run, the folders that plain DCP wrote there.

    Raises: as `catalog_of`, where there are none of those either.
    """
    try:
        return catalog_of(storage), []
    except NoCheckpointError:
        from .plain import folders

        found = folders(storage)
        if not found:
            raise
        return None, found


def choose(catalog: Catalog, which: str | None) -> CheckpointRef:
    """The checkpoint that `which` means: None the newest, a step the one of the lineage, a full name exactly that one.

    Raises:
        ConfigError: `which` is neither a step nor a name.
        NoCheckpointError: there is no such checkpoint.
    """
    url = catalog.storage.url
    if which is None:
        if catalog.newest is None:
            names = ", ".join(map(keys.stem, [*catalog.off_lineage, *catalog.pinned()][-10:]))
            raise NoCheckpointError(f"{url}: nothing is on the lineage; off it there are {names}. Say which one.")
        return catalog.newest
    ref = exact(which)
    if ref is not None:
        if ref not in catalog.commits and ref not in catalog.pinned():
            raise NoCheckpointError(f"{url}: no checkpoint {which}; `resilio ls` shows which there are.", name=which)
        return ref
    if not re.fullmatch("[0-9]{1,9}", which):
        raise ConfigError(f"{which!r} is neither a step (4000) nor a checkpoint's name (000004000-g000002).")
    step = int(which)
    on = [ref for ref in catalog.lineage if ref.step == step]
    if on:
        return on[-1]
    off = [keys.stem(ref) for ref in [*catalog.off_lineage, *catalog.pinned()] if ref.step == step]
    if off:
        raise NoCheckpointError(
            f"{url}: step {step} is only off the lineage: a newer branch left it behind. To look at it, say "
            f"{' or '.join(off)}.",
            step=step,
        )
    newest = ", ".join(str(ref.step) for ref in catalog.lineage[-10:]) or "none"
    raise NoCheckpointError(f"{url}: no checkpoint of step {step}; newest steps: {newest}.", step=step)


def exact(which: str) -> CheckpointRef | None:
    """The checkpoint that has this name, there or not; None if it is no such name."""
    return keys.parse_commit(f"{keys.COMMITS}{which}.json")


def in_quarantine(storage: Storage) -> dict[CheckpointRef, str]:
    """Which checkpoints must not be resumed from, and why."""
    return {ref: found.why for ref, found in quarantined(storage).items()}


def named(ref: CheckpointRef) -> dict[str, Any]:
    """How JSON says which checkpoint."""
    return {"name": keys.stem(ref), "step": ref.step, "generation": ref.generation}


def keep_policy(text: str) -> KeepPolicy:
    """The keep policy that `text` says; those of plugins can be said too.

    Raises:
        ConfigError: it says none.
    """
    return host().policies.parse_keep(text)


def save_policy(text: str) -> SavePolicy:
    """The save policy that `text` says; those of plugins can be said too.

    Raises:
        ConfigError: it says none.
    """
    return host().policies.parse_save(text)
