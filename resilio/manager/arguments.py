"""What every rank must have been given alike."""

from __future__ import annotations

import re

from ..errors import ConfigError
from ..hooks import Host
from ..policies import KeepPolicy, SavePolicy
from ..ranks import Ranks
from ..records.digests import ALGORITHMS
from ..storage.base import Storage

__all__ = ["check_alike", "check_constructor", "check_plugins", "check_timeout", "refuse_differing_arguments"]

_ADDRESS = re.compile(" at 0x[0-9a-fA-F]+")
_FOREVER_S = 365 * 86_400  # what a group can wait for is bounded; nobody waits longer


def check_constructor(
    save: SavePolicy | None,
    keep: KeepPolicy | None,
    mode: str,
    stage: str,
    fresh: bool,
    digest: str,
    fingerprints: bool,
    check_replicas: bool,
    progress: bool | None,
    timeout_s: float,
) -> None:
    """Refuse what would fail only at the first save, hours later, or would not do what it seems to say.

    Raises:
        ConfigError: names what there is instead.
    """
    for name, policy, kind in (("save", save, SavePolicy), ("keep", keep, KeepPolicy)):
        if policy is not None and not isinstance(policy, kind):
            like = "save_every(500)" if kind is SavePolicy else "keep_last(3)"
            text = f"; resilio.policies.parse_{name} reads one from text" if isinstance(policy, str) else ""
            raise ConfigError(f"{name}={policy!r}: this is a policy, such as {like}{text}")
    if mode not in ("sync", "async"):
        raise ConfigError(f"mode={mode!r}: there are 'sync' and 'async'")
    if stage not in ("overlap", "block"):
        raise ConfigError(f"stage={stage!r}: there are 'overlap' and 'block'")
    for name, flag in (("fresh", fresh), ("fingerprints", fingerprints), ("check_replicas", check_replicas)):
        if not isinstance(flag, bool):
            raise ConfigError(f"{name}={flag!r}: it is True or False")
    if digest not in ALGORITHMS:
        raise ConfigError(f"digest={digest!r}: there are {', '.join(map(repr, ALGORITHMS))}")
    if progress is not None and not isinstance(progress, bool):
        raise ConfigError(f"progress={progress!r}: it is True, False or None")
    check_timeout(timeout_s)


def check_timeout(timeout_s: float) -> None:
    """Refuse what no group can wait for.

    Raises:
        ConfigError: it is no positive number of seconds.
    """
    if isinstance(timeout_s, bool) or not isinstance(timeout_s, int | float) or not 0 < timeout_s <= _FOREVER_S:
        raise ConfigError(f"timeout_s={timeout_s!r}: give seconds, more than 0 and at most {_FOREVER_S}")


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
    refuse_differing_arguments(ranks, mine)
    if ranks.world > 1 and not storage.capabilities.shared:
        raise ConfigError(f"{storage.url} lives in one process; {ranks.world} ranks need a shared store")


def check_plugins(ranks: Ranks, host: Host) -> None:
    """Refuse a job whose ranks have different plugins: one would write what the other cannot read, or keep what the
    other's sweep deletes once it is rank 0.

    Raises:
        ConfigError: names the first rank that differs from rank 0, and what differs.

    Ranks: all; collective.
    """
    mine = {one.name: (one.distribution, one.version, one.hooks) for one in host.plugins() if one.active}
    told = ranks.gather(mine, "comparing plugins")
    for rank, theirs in enumerate(told):
        differ = [_difference(name, theirs.get(name), told[0].get(name)) for name in sorted({*theirs, *told[0]})]
        if any(differ):
            raise ConfigError(
                f"rank {rank} has other plugins than rank 0: {'; '.join(filter(None, differ))}. Install the same "
                "on all hosts, and set RESILIO_PLUGINS and RESILIO_DISABLE_PLUGINS alike.",
                rank=rank,
            )


_Known = tuple[str | None, str | None, tuple[str, ...]]


def _difference(name: str, theirs: _Known | None, first: _Known | None) -> str | None:
    if theirs == first:
        return None
    if theirs is None:
        return f"plugin {name!r} is missing here"
    if first is None:
        return f"plugin {name!r} is only here"
    for what, here, there in zip(("distribution", "version"), theirs, first, strict=False):
        if here != there:
            return f"plugin {name!r} has {what} {here}, on rank 0 {there}"
    return f"plugin {name!r} has hooks {', '.join(theirs[2])}, on rank 0 {', '.join(first[2])}"


def refuse_differing_arguments(ranks: Ranks, mine: str) -> None:
    """Raise if some rank's `mine` is another than rank 0's.

    Raises:
        ConfigError: names the first rank that differs.

    Ranks: all; collective.
    """
    told = ranks.gather(mine, "comparing arguments")
    # A policy of the user's own without a repr prints where it lies in memory, which says nothing.
    told = [_ADDRESS.sub("", one) for one in told]
    for rank, theirs in enumerate(told):
        if theirs != told[0]:
            raise ConfigError(
                f"rank {rank} was given other arguments than rank 0: {theirs} against {told[0]}", rank=rank
            )
