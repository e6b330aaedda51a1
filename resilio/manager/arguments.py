"""What every rank must have been given alike."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from ..errors import ConfigError
from ..ranks import Ranks
from ..records.digests import ALGORITHMS
from ..state.saved import Rename, patterns, prefixes
from ..storage.base import Storage

__all__ = ["check_alike", "check_constructor", "check_restore"]

Patterns = tuple[str, ...] | None


def check_constructor(mode: str, digest: str) -> None:
    """Refuse what would fail only at the first save, hours later.

    Raises:
        ConfigError: names what there is instead.
    """
    if mode not in ("sync", "async"):
        raise ConfigError(f"mode={mode!r}: there are 'sync' and 'async'")
    if digest not in ALGORITHMS:
        raise ConfigError(f"digest={digest!r}: there are {', '.join(map(repr, ALGORITHMS))}")


def check_alike(ranks: Ranks, storage: Storage, mine: str) -> None:
    """Refuse a job whose ranks were given different arguments, or a store that only one of them sees.

    Args:
        ranks: who takes part.
        storage: the run's store.
        mine: this rank's arguments, as text.

    Raises:
        ConfigError: names the first rank that differs from rank 0.

    Ranks: all; collective.
    """
    _compare(ranks, mine)
    if ranks.world > 1 and not storage.capabilities.shared:
        raise ConfigError(f"{storage.url} lives in one process; {ranks.world} ranks need a shared store")


def check_restore(
    ranks: Ranks,
    which: int | str,
    only: Iterable[str] | None,
    exclude: Iterable[str] | None,
    rename: Rename | None,
    strict: bool,
) -> tuple[Patterns, Patterns]:
    """`only` and `exclude` as they can be read more than once: neither a lone pattern nor a generator gets lost.

    Raises:
        ConfigError: an argument is of another type, or other than rank 0's.

    Ranks: all; collective.
    """
    error: Exception | None = None
    found: tuple[Patterns, Patterns] = (None, None)
    mine = ""
    try:
        found = patterns(only, "only"), patterns(exclude, "exclude")
        renamed = prefixes(rename)
        names = sorted(renamed.items()) if isinstance(renamed, Mapping) else callable(renamed)
        if not isinstance(strict, bool):
            raise ConfigError(f"strict={strict!r}: it is True or False")
        chosen = [None if one is None else sorted(one) for one in found]  # they may come from sets
        mine = f"which={which!r}, only={chosen[0]}, exclude={chosen[1]}, rename={names}, strict={strict}"
    except Exception as caught:  # noqa: BLE001  told to all ranks: the others wait in the next line
        error = caught
    ranks.agree(error)
    _compare(ranks, mine)
    return found


def _compare(ranks: Ranks, mine: str) -> None:
    told = ranks.gather(mine)
    for rank, theirs in enumerate(told):
        if theirs != told[0]:
            raise ConfigError(
                f"rank {rank} was given other arguments than rank 0: {theirs} against {told[0]}", rank=rank
            )
