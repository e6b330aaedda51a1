"""How ranks agree: two process groups of our own, errors that reach everybody, and the vote one step ahead."""

from .agreement import Ranks, portable
from .vote import Vote

__all__ = ["Ranks", "Vote", "portable"]
