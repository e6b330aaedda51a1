"""How ranks agree: two process groups of our own, errors that reach everybody, and the vote one step ahead."""

from .agreement import DEFAULT_TIMEOUT_S, Ranks, portable
from .vote import Vote

__all__ = ["DEFAULT_TIMEOUT_S", "Ranks", "Vote", "portable"]
