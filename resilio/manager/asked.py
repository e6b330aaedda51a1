"""What a caller asks of a restore, the same on all ranks."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace

from ..errors import ConfigError
from ..ranks import Ranks
from ..state.saved import Rename, patterns, prefixes
from .arguments import refuse_differing_arguments
from .choosing import Which

__all__ = ["Asked"]


@dataclass(frozen=True)
class Asked:
    """The arguments of `CheckpointManager.restore` and `resilio.restore`; see there.

    Attributes:
        which: checkpoint.
        only: components or patterns.
        exclude: the same.
        rename: saved names -> live ones.
        strict: whether keys that only one side has are an error.
        check_fingerprints: whether to prove each tensor by its fingerprint.
        trust: whether to unpickle what would be refused in a plain DCP checkpoint.
    """

    which: Which
    only: Iterable[str] | None = None
    exclude: Iterable[str] | None = None
    rename: Rename | None = None
    strict: bool = True
    check_fingerprints: bool = False
    trust: bool = False

    def checked(self, ranks: Ranks) -> Asked:
        """The same, with patterns that can be read more than once: neither a lone one nor a generator gets lost.

        Raises:
            ConfigError: an argument is of another type, or other than rank 0's.

        Ranks: all; collective.
        """
        error: Exception | None = None
        found, mine = self, ""
        try:
            found = replace(self, only=patterns(self.only, "only"), exclude=patterns(self.exclude, "exclude"))
            renamed = prefixes(self.rename)
            names = sorted(renamed.items()) if isinstance(renamed, Mapping) else callable(renamed)
            for name in ("strict", "check_fingerprints", "trust"):
                if not isinstance(getattr(self, name), bool):
                    raise ConfigError(f"{name}={getattr(self, name)!r}: it is True or False")
            chosen = [None if one is None else sorted(one) for one in (found.only, found.exclude)]  # perhaps from sets
            mine = f"which={self.which!r}, only={chosen[0]}, exclude={chosen[1]}, rename={names}, strict={self.strict}"
            mine += f", check_fingerprints={self.check_fingerprints}, trust={self.trust}"
        except Exception as caught:  # noqa: BLE001  told to all ranks: the others wait in the next line
            error = caught
        ranks.agree(error, what="restoring")
        refuse_differing_arguments(ranks, mine)
        return found
