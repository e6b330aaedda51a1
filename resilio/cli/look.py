"""From a URL and what somebody typed to the checkpoint they mean."""

from __future__ import annotations

import re

from ..errors import ConfigError, NoCheckpointError
from ..records import keys
from ..records.catalog import Catalog, discover
from ..records.run import read_run
from ..storage.base import Storage
from ..types import CheckpointRef

__all__ = ["catalog_of", "choose"]


def catalog_of(storage: Storage) -> Catalog:
    """What the run holds.

    Raises:
        NoCheckpointError: no commit at all.
        NewerFormatError: a newer resilio wrote this run.
    """
    run = read_run(storage)
    catalog = discover(storage)
    if not catalog.commits:
        what = "a run without a checkpoint yet" if run else "no run: there is neither a resilio.json nor a commit"
        raise NoCheckpointError(f"{storage.url} is {what}. Is it the URL that CheckpointManager was given?")
    return catalog


def choose(catalog: Catalog, which: str | None) -> CheckpointRef:
    """The checkpoint that `which` means: None the newest, a step the one of the lineage, a full name exactly that one.

    Raises:
        ConfigError: `which` is neither a step nor a name.
        NoCheckpointError: there is no such checkpoint.
    """
    url = catalog.storage.url
    if which is None:
        if catalog.newest is None:
            names = ", ".join(map(keys.stem, catalog.off_lineage[-10:]))
            raise NoCheckpointError(f"{url}: nothing is on the lineage; off it there are {names}. Say which one.")
        return catalog.newest
    exact = keys.parse_commit(f"{keys.COMMITS}{which}.json")
    if exact is not None:
        if exact not in catalog.commits:
            raise NoCheckpointError(f"{url}: no checkpoint {which}; `resilio ls` shows which there are.", name=which)
        return exact
    if not re.fullmatch("[0-9]{1,9}", which):
        raise ConfigError(f"{which!r} is neither a step (4000) nor a checkpoint's name (000004000-g000002).")
    step = int(which)
    on = [ref for ref in catalog.lineage if ref.step == step]
    if on:
        return on[-1]
    off = [keys.stem(ref) for ref in catalog.off_lineage if ref.step == step]
    if off:
        raise NoCheckpointError(
            f"{url}: step {step} is only off the lineage: a newer branch left it behind. To look at it, say "
            f"{' or '.join(off)}.",
            step=step,
        )
    newest = ", ".join(str(ref.step) for ref in catalog.lineage[-10:]) or "none"
    raise NoCheckpointError(f"{url}: no checkpoint of step {step}; newest steps: {newest}.", step=step)
