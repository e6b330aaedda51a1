"""What a manager has its ranks vote on at each step: time, signals, and how the save in flight stands."""

from __future__ import annotations

from dataclasses import dataclass

from ..clock import Clock
from ..errors import RanksLostError
from ..policies import SavePolicy
from ..ranks import Ranks, Vote
from .handle import SaveHandle
from .signals import SignalFlags

__all__ = ["Agreed", "Ballot"]


@dataclass(frozen=True)
class Agreed:
    """What all ranks know alike.

    Attributes:
        running: the save in flight is not done on some rank.
        failed: it failed on some rank.
        times_due: periods (seconds) of the policy that have passed on some rank's clock since the last save.
        signalled: signals that some rank received.
    """

    running: bool = True
    failed: bool = False
    times_due: frozenset[float] = frozenset()
    signalled: frozenset[str] = frozenset()


class Ballot:
    """Begins a vote at the end of a step, and reads it at the next, when its latency has passed under the step's work.

    Left out, on all ranks alike, where nothing could be decided: policies of steps only, and no save in flight.

    Args:
        ranks: who votes.
        policy: the save policy, the same on all ranks.
        clock: this rank's.
        signals: those the policy looks for; closed with the ballot.
    """

    def __init__(self, ranks: Ranks, policy: SavePolicy | None, clock: Clock, signals: SignalFlags) -> None:
        self._ranks = ranks
        self._clock = clock
        self._periods = policy.clocks() if policy else ()
        self._signals = signals
        self._vote: Vote | None = None
        self._told: frozenset[str] = frozenset()  # this rank's signals in the vote under way
        self._carried: frozenset[str] = frozenset()  # signals agreed on in a vote that no step read

    def begin(self, pending: SaveHandle | None, save_began_s: float) -> None:
        """Vote for the next step.

        Args:
            pending: the save in flight, None if there is none: on all ranks alike.
            save_began_s: this rank's monotonic clock when the last save began.

        Ranks: all; collective on the control group, does not block.
        """
        if not (pending or self._periods or self._signals.names):
            return
        done = pending is not None and pending.done()
        elapsed_s = self._clock.monotonic_s() - save_began_s
        seen = self._told = self._signals.take()
        self._vote = Vote(
            self._ranks,
            {
                "running": pending is not None and not done,
                "failed": pending is not None and done and pending.exception() is not None,
                **{f"time {period}": elapsed_s >= period for period in self._periods},
                **{f"signal {name}": name in seen for name in self._signals.names},
            },
        )

    def read(self) -> Agreed:
        """What the last vote came to.

        Blocks: until all ranks have voted.
        """
        signalled, self._carried = self._carried, frozenset()
        if self._vote is None:
            return Agreed(signalled=signalled)
        vote, self._vote = self._vote, None
        try:
            flags = vote.result()
        except RanksLostError:
            self._carried = signalled
            self._signals.give_back(self._told)  # for the next vote: what one rank knows alone must not be acted upon
            raise
        return Agreed(
            flags["running"],
            flags["failed"],
            frozenset(period for period in self._periods if flags[f"time {period}"]),
            signalled.union(name for name in self._signals.names if flags[f"signal {name}"]),
        )

    def drop(self) -> frozenset[str]:
        """Take a vote that no step will read off the group, so that the next collective finds its own kind.

        Returns:
            Signals agreed on that no step has acted upon; the next one will.

        Blocks: until all ranks have voted.
        """
        self._carried = self.read().signalled
        return self._carried

    def close(self) -> None:
        """Forget a vote that nobody will read, and put signal handlers back. Not collective."""
        if self._vote is not None:
            self._vote.forget()
        self._vote = None
        self._signals.close()
