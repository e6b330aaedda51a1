"""What every rank must have been given alike."""

from __future__ import annotations

from ..errors import ConfigError
from ..ranks import Ranks
from ..storage.base import Storage

__all__ = ["check_alike"]


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
    told = ranks.gather(mine)
    for rank, theirs in enumerate(told):
        if theirs != told[0]:
            raise ConfigError(
                f"rank {rank} was given other arguments than rank 0: {theirs} against {told[0]}", rank=rank
            )
    if ranks.world > 1 and not storage.capabilities.shared:
        raise ConfigError(f"{storage.url} lives in one process; {ranks.world} ranks need a shared store")
