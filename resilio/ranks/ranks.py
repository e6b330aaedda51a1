"""This process among the ranks of the job: how they agree, and the groups that DCP and votes go through."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import count
from typing import Any

import torch.distributed as dist

from ..errors import RanksLostError, ResilioError
from .agreement import Agreement, Judge
from .exchange import Exchange, names
from .groups import Groups, own_store

__all__ = ["DEFAULT_TIMEOUT_S", "Ranks"]

DEFAULT_TIMEOUT_S = 1800.0  # torch.distributed's own, for gloo
_GRACE_S = 10.0  # for the others to notice as well that a collective has failed

# Each manager meets in a place of its own. All ranks make the same managers in the same order, as they do with groups.
_made = count()


class Ranks(Agreement):
    """This process among the ranks of the job. Its own methods are for the main thread.

    Args:
        timeout_s: how long a rank is waited for.

    Attributes:
        rank: this process; 0 is the coordinator.
        world: number of ranks.
        saving: the same agreement for the saving thread.
        groups: of gloo, for DCP and for votes; None in a world of one.
        timeout_s: as given.
        votes: number of votes begun.
        interrupt: the Ctrl-C or exit that came to this rank before a collective of somebody else's, who makes an
            ordinary failure of it. To be raised, and set to None, when that has ended.

    Raises:
        RanksLostError: some rank of the default process group did not make this call.

    Ranks: all of the default process group; alone if there is none.
    Blocks: until every rank is here.
    """

    def __init__(self, timeout_s: float = DEFAULT_TIMEOUT_S) -> None:
        super().__init__()
        self.rank, self.world = 0, 1
        self.saving = Agreement()
        self.groups: Groups | None = None
        self.timeout_s = timeout_s
        self.votes = 0  # begun
        self.interrupt: BaseException | None = None
        if not (dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1):
            return
        self.rank, self.world = dist.get_rank(), dist.get_world_size()
        place = f"resilio/{next(_made)}"
        exchanges = [
            Exchange(own_store(f"{place}/{thread}"), self.rank, self.world, timeout_s) for thread in ("main", "saving")
        ]
        exchanges[0].meet("making a CheckpointManager, or restoring", None, len)
        self.groups = Groups(timeout_s)
        super().__init__(exchanges[0], self._spread)
        self.saving = Agreement(exchanges[1])

    @property
    def coordinator(self) -> bool:
        """Whether this is rank 0."""
        return self.rank == 0

    @property
    def broken(self) -> bool:
        """Whether this rank knows that one was missing from a collective: the groups need `renew`."""
        return self.groups is not None and self.groups.broken

    def renew(self, what: str) -> None:
        """Make the groups anew if some rank knows that one was missing from a collective.

        Args:
            what: all ranks begin now.

        Raises:
            RanksLostError: it is missing still.

        Ranks: all.
        """
        self.renew_if(any(self.gather(self.broken, what)))

    def renew_if(self, broken: bool) -> None:
        """The same, where all ranks have told each other already whether one of them is `broken`."""
        if broken and self.groups is not None:
            self.groups.renew()

    def arrive(
        self,
        error: BaseException | None,
        kind: type[ResilioError],
        *,
        what: str,
        name: str | None = None,
        via: Agreement | None = None,
        judge: Judge | None = None,
        word: Any = None,
        take: Callable[[list[Any]], None] | None = None,
    ) -> None:
        """Agree, right before a collective of somebody else's, that all ranks are there to take part in it.

        Args:
            error: of this rank; all raise it, and whose collective it is carries on with errors.
            kind: what a foreign exception becomes.
            what: the ranks have been doing.
            name: of the meeting.
            via: the agreement of the thread; None: the main thread's.
            judge: see `Agreement.agree`.
            word: see there.
            take: see there.
        """
        if error is not None and not isinstance(error, Exception):
            self.interrupt = error
        try:
            (via or self).agree(error, kind, what=what, name=name, judge=judge, word=word, take=take)
        except BaseException as ended:
            if not isinstance(ended, Exception):
                self.interrupt = ended
            if self.groups is not None and (self.interrupt is ended or isinstance(ended, RanksLostError)):
                self.groups.cut()
            raise

    @contextmanager
    def coming_to(self, what: str) -> Iterator[None]:
        """On the way to the next meeting, and in it: a Ctrl-C in this block is told to those who wait there.

        Args:
            what: the meeting is about.

        Ranks: all; the block has one meeting, its last act.
        """
        met = self.exchange.met if self.exchange is not None else 0
        try:
            yield
        except BaseException as error:
            # In the meeting, that has told them; an `Exception` on the way is to be agreed on there.
            if not isinstance(error, Exception) and self.exchange is not None and self.exchange.met == met:
                self.exchange.miss(what, error)
            raise

    def collective_failed(
        self, what: str, name: str, error: BaseException | None, via: Agreement | None = None
    ) -> RanksLostError:
        """Who is missing, after a collective has failed or was not done in time. The groups need `renew` then.

        Args:
            what: it was for.
            name: of that collective, the same on all ranks.
            error: of the collective; None: it was not done in time.
            via: the agreement of the thread; None: the main thread's.
        """
        exchange = (via or self).exchange
        assert exchange is not None and self.groups is not None
        self.groups.cut()
        absent = exchange.absent(name, min(_GRACE_S, self.timeout_s))
        who = f"rank(s) {names(absent)} did not answer" if absent else "no rank is missing"
        why = f"not done within {self.timeout_s:g} s" if error is None else f"{type(error).__name__}: {error}"
        return RanksLostError(f"{what}: {who} ({why})", ranks=absent, phase=what)

    def close(self) -> None:
        """Give the groups back. Local."""
        if self.groups is not None:
            self.groups.close()
        self.groups = None

    def _spread(self, data: bytes) -> bytes:
        """Rank 0's `data`, on all ranks."""
        assert self.groups is not None and self.exchange is not None
        box = [data]
        try:
            dist.broadcast_object_list(box, group_src=0, group=self.groups.control)
        except RuntimeError as error:
            what = "passing on what rank 0 found"
            raise self.collective_failed(what, f"{what} {self.exchange.met}", error) from error
        return box[0]
