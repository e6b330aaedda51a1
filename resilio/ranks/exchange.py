"""All ranks meet, with a deadline and by name: each leaves a word in the c10d store, rank 0 reads them and answers.

A collective cannot do this. One that times out names nobody and leaves its group unusable; one that is open while a
rank writes for minutes cannot tell slow from dead. Measured on loopback at 2 ranks: 0.4 ms for one meeting.
"""

from __future__ import annotations

import logging
import pickle
from collections.abc import Callable
from typing import Any, TypeVar

from torch.distributed.distributed_c10d import Store

from ..errors import RanksDisagreeError, RanksLostError, ResilioError
from .waiting import wait_until

__all__ = ["Exchange", "names"]

_T = TypeVar("_T")

_log = logging.getLogger("resilio")

_GAVE_UP = "gave up"  # in place of what a rank was doing; its word is then the reason
_LEFT = "left"
_PATIENT_S = 0.1  # before it is asked whether somebody left


class Exchange:
    """The meetings of one thread of each rank, in the same order on all of them.

    Args:
        store: a client of its own: one that waits would hold up whoever shares it.
        rank: this process; 0 reads and answers.
        world: number of ranks.
        timeout_s: how long a rank is waited for, counted from when rank 0 came.
    """

    def __init__(self, store: Store, rank: int, world: int, timeout_s: float) -> None:
        self.rank = rank
        self.world = world
        self.timeout_s = timeout_s
        self.lost: RanksLostError | None = None  # of the last meeting, if not all came to it
        self.met = 0  # meetings without a name that this rank has come to, or missed
        self._store = store
        self._behind: list[str] = []  # meetings whose words rank 0 may take away once all came to a later one

    def meet(
        self,
        what: str,
        value: object,
        judge: Callable[[list[Any]], _T],
        *,
        name: str | None = None,
    ) -> _T:
        """Leave `value`, wait for all ranks, and return what rank 0 made of all values.

        Args:
            what: what all ranks must be doing here, for messages: ranks that meet over different things are told so.
            value: this rank's word; must pickle.
            judge: rank 0 calls it with the values by rank. What it returns, or a `ResilioError` it raises, goes to all.
            name: of the meeting, if ranks may have missed the one before; else it is the next one of its kind.

        Raises:
            RanksLostError: some rank did not come in time, or the store is gone; `ranks` names the silent. A rank that
                comes later gets the same error, and meets the others again in the next one.
            RanksDisagreeError: ranks are doing different things.

        Ranks: all, unless a test says otherwise.
        Blocks: until all ranks are here, or the deadline has passed.
        """
        if name is None:
            self.met += 1
            name = str(self.met)
        self.lost = None
        try:
            self._store.set(f"{name}/{self.rank}", _packed((what, value)))
            if self.rank == 0:
                answer = self._answer(name, what, value, judge)
            else:
                answer = self._await(name, what)
        except RanksLostError as error:
            answer = error
        except RuntimeError as error:  # c10d's own are; ours are not
            answer = RanksLostError(
                f"{what}: the store through which ranks agree cannot be reached ({type(error).__name__}: "
                f"{str(error)[:200]}); the process that holds it, rank 0 or the launcher's agent, is gone",
                ranks=[0],
                phase=what,
            )
        except BaseException as error:
            self._break_off(name, what, _why(error))
            raise
        if isinstance(answer, RanksLostError):
            self.lost = answer
        if isinstance(answer, ResilioError):
            raise answer
        return answer

    def leave(self, why: str) -> None:
        """Tell whoever waits for this rank, now or later, that it will not come. Never fails."""
        try:
            self._store.set(_LEFT, _packed((self.rank, why)))
        except RuntimeError as error:
            _log.debug("leaving: %s", error)

    def refuse_left(self, what: str) -> None:
        """Pass if no rank has said that it left.

        Raises:
            RanksLostError: one has.
        """
        if self._store.check([_LEFT]):
            rank, why = pickle.loads(self._store.get(_LEFT))  # noqa: S301  (our own bytes)
            raise RanksLostError(f"{what}: rank {rank} left ({why})", ranks=[rank], phase=what)

    def absent(self, name: str, grace_s: float) -> list[int]:
        """The ranks that have not called this within `grace_s`: who is missing, after a collective has failed.

        Ranks: any; each finds out for itself, since rank 0 may be the one.
        """
        keys = [f"absent/{name}/{rank}" for rank in range(self.world)]
        try:
            self._store.set(keys[self.rank], "")
            try:
                self._poll("", keys, grace_s)
            except RanksLostError as error:
                _log.debug("%s", error)
            return self._silent(keys)
        except RuntimeError:
            return [0]

    def miss(self, what: str, error: BaseException, *, name: str | None = None) -> None:
        """Let nobody wait for this rank in the next meeting, or that of `name`: `error` took it out of the way there.

        Never fails. Ranks: any; local.
        """
        if name is None:
            self.met += 1
        self._break_off(name or str(self.met), what, _why(error))

    def _break_off(self, name: str, what: str, why: str) -> None:
        """Let nobody wait for this rank: a Ctrl-C takes it out of a meeting, or a word that cannot be sent or read."""
        try:
            if self.rank == 0:
                lost = RanksLostError(f"{what}: rank 0 {why}", ranks=[0], phase=what)
                self._behind.append(name)
                self._store.set(f"{name}/answer", _packed(lost))
            else:
                self._store.set(f"{name}/{self.rank}", _packed((_GAVE_UP, why)))
        except RuntimeError as error:
            _log.debug("breaking off: %s", error)

    def _answer(self, name: str, what: str, value: object, judge: Callable[[list[Any]], _T]) -> _T | ResilioError:
        keys = [f"{name}/{rank}" for rank in range(self.world)]
        answer: Any
        if self._poll(what, keys, self.timeout_s):
            told = [(what, value), *(pickle.loads(self._store.get(key)) for key in keys[1:])]  # noqa: S301  (our own)
            answer = self._judge(what, told, judge)
            self._forget()
        else:
            answer = _lost(what, self._silent(keys), self.timeout_s)
        self._behind.append(name)
        self._store.set(f"{name}/answer", _packed(answer))
        return answer  # type: ignore[no-any-return]

    def _judge(self, what: str, told: list[tuple[str, Any]], judge: Callable[[list[Any]], _T]) -> _T | ResilioError:
        gone = {rank: why for rank, (theirs, why) in enumerate(told) if theirs == _GAVE_UP}
        if gone:
            why = next(iter(gone.values()))
            return RanksLostError(f"{what}: rank(s) {names(list(gone))} {why}", ranks=list(gone), phase=what)
        other = [(rank, theirs) for rank, (theirs, _) in enumerate(told) if theirs != what]
        if other:
            rank, theirs = other[0]
            return RanksDisagreeError(
                f"rank 0 is at {what!r}, rank {rank} at {theirs!r}: all ranks must make the same calls in the same "
                "order",
                ranks=[rank for rank, _ in other],
            )
        try:
            return judge([value for _, value in told])
        except ResilioError as error:
            return error

    def _silent(self, keys: list[str]) -> list[int]:
        return [rank for rank, key in enumerate(keys) if not self._store.check([key])]

    def _await(self, name: str, what: str) -> Any:
        answer = f"{name}/answer"
        # Rank 0 waits as long from when it came itself, so once it is here it gets that time as well.
        if not self._poll(what, [answer], self.timeout_s) and not (
            self._store.check([f"{name}/0"]) and self._poll(what, [answer], self.timeout_s)
        ):
            self._store.set(f"{name}/{self.rank}", _packed((_GAVE_UP, "gave up waiting for rank 0")))
            return _lost(what, [0], self.timeout_s)
        return pickle.loads(self._store.get(answer))  # noqa: S301  (our own bytes)

    def _poll(self, what: str, keys: list[str], timeout_s: float) -> bool:
        # `wait` would print two lines of C++ for each slice of it, and a Ctrl-C would have to wait for the slice.
        def here(waited_s: float) -> bool:
            if self._store.check(keys):
                return True
            if waited_s > _PATIENT_S:
                self.refuse_left(what)
            return False

        return wait_until(here, timeout_s, shortest_s=0.0005, longest_s=1.0)

    def _forget(self) -> None:
        # All came here, so all have read what was answered before.
        behind, self._behind = self._behind, []
        for name in behind:
            for key in (*map(str, range(self.world)), "answer"):
                self._store.delete_key(f"{name}/{key}")


def _why(error: BaseException) -> str:
    return f"{'failed' if isinstance(error, Exception) else 'was interrupted'} ({type(error).__name__})"


def _packed(value: object) -> Any:
    return pickle.dumps(value)  # the store's annotations say text; it takes bytes


def _lost(what: str, silent: list[int], timeout_s: float) -> RanksLostError:
    return RanksLostError(
        f"{what}: rank(s) {names(silent)} did not come within {timeout_s:g} s: dead, hung, or not making this call. "
        "Look at their logs and stacks; raise timeout_s if they are only slow",
        ranks=silent,
        phase=what,
    )


def names(ranks: list[int]) -> str:
    """Ranks for people: the first few, and how many more."""
    shown = ", ".join(map(str, ranks[:8]))
    return f"{shown} and {len(ranks) - 8} more" if len(ranks) > 8 else shown
