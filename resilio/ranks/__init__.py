"""How ranks agree: meetings with a deadline, errors that reach everybody, and the vote one step ahead."""

from .agreement import Agreement, portable, raise_first
from .ranks import DEFAULT_TIMEOUT_S, Ranks
from .vote import Vote

__all__ = ["DEFAULT_TIMEOUT_S", "Agreement", "Ranks", "Vote", "portable", "raise_first"]
