"""What all ranks must see alike: one rank's choice, everybody's errors."""

from __future__ import annotations

import pickle
import traceback
from collections.abc import Callable
from typing import Any, TypeVar

from ..errors import ResilioError, SaveError, StorageError
from .exchange import Exchange

__all__ = ["Agreement", "portable"]

_T = TypeVar("_T")

Judge = Callable[[list[ResilioError | None], str], None]

_SMALL = 1 << 20  # bytes; what is larger goes through a group, which passes it on in a tree


def portable(error: BaseException, kind: type[ResilioError] = ResilioError) -> ResilioError:
    """`error` as one that every rank can receive: our own as it is, anything else as text in a `kind`.

    A foreign exception may not pickle, or only come apart when it is unpickled on another rank, which would replace the
    cause by a riddle; so nothing foreign is ever sent. A storage error that ends a save becomes a `SaveError`, which is
    what those who go on without that checkpoint catch.
    """
    try:
        said = str(error)
    except Exception:  # noqa: BLE001  raised here, it would leave the other ranks waiting
        said = "(it has no text)"
    name = type(error).__name__
    if not isinstance(error, ResilioError):
        text = "".join(traceback.format_exception(error))
        return kind(f"{name}: {said}", cause=name, trace=text)
    if isinstance(error, StorageError) and kind is SaveError:
        error = SaveError(said, **{**_facts(error), "cause": name})
    if not _travels(error):
        # A class of a plugin's or a user's own may be unknown elsewhere, or take other arguments than ours do.
        ours = next(
            one
            for one in type(error).__mro__
            if issubclass(one, ResilioError) and one.__module__ == ResilioError.__module__
        )
        known = ours(said, **{**_facts(error), "cause": name})
        return known if _travels(known) else ours(said, cause=name)
    return error


def _facts(error: ResilioError) -> dict[str, Any]:
    return getattr(error, "facts", {})  # a class with an `__init__` of its own may never have set them


def _travels(error: ResilioError) -> bool:
    """Whether `error` reaches another rank, and can be made anew there with more facts, as `raise_first` does."""
    try:
        pickle.loads(pickle.dumps(type(error)(str(error), **{**error.facts, "rank": 0, "ranks": [0], "phase": ""})))  # noqa: S301  (our own bytes)
    except Exception:  # noqa: BLE001  whatever its class does
        return False
    return True


class Agreement:
    """How the ranks agree, in one thread of each.

    Args:
        exchange: where they meet; None: this process is alone.
        pass_on: takes what is too large to leave in a store from rank 0 to all ranks; None: nothing ever is.
    """

    def __init__(self, exchange: Exchange | None = None, pass_on: Callable[[bytes], bytes] | None = None) -> None:
        self.exchange = exchange
        self._pass_on = pass_on

    def leave(self, why: str) -> None:
        """Tell the others, without waiting for them, that this rank comes to no more meetings here."""
        if self.exchange is not None:
            self.exchange.leave(why)

    def gather(self, value: _T, what: str) -> list[_T]:
        """The values of all ranks, in order.

        Args:
            value: small.
            what: the ranks are doing, for messages.

        Raises:
            RanksLostError: some rank did not come.
            RanksDisagreeError: some rank is doing something else.

        Ranks: all. Blocks: until all are here, or the deadline has passed. So do all methods here.
        """
        return [value] if self.exchange is None else self.exchange.meet(what, value, list)

    def agree(
        self,
        error: BaseException | None,
        kind: type[ResilioError] = ResilioError,
        *,
        what: str,
        name: str | None = None,
        judge: Judge | None = None,
        word: Any = None,
        take: Callable[[list[Any]], None] | None = None,
    ) -> None:
        """Return if no rank has an error; else raise the same one on all ranks.

        Args:
            error: this rank's, or None.
            kind: what a foreign exception becomes.
            what: the ranks have been doing.
            name: of the meeting, see `Exchange.meet`.
            judge: raises what all ranks are to raise, of the errors of all; None: `raise_first`. On rank 0, and not in
                a world of one.
            word: of this rank besides, for `take`; must pickle.
            take: rank 0 calls it with the words of all if none has an error; what it raises goes to all.

        Raises:
            ResilioError: the error of the lowest rank that has one, with `rank`, `ranks` (all that failed) and `phase`
                as facts.
        """
        told = None if error is None else portable(error, kind)
        if self.exchange is None:
            if told is error and told is not None:
                raise told  # with the cause it has
            if told is not None:
                raise told from error
            if take is not None:
                take([word])
            return

        def hear(said: list[tuple[ResilioError | None, Any]]) -> None:
            (judge or raise_first)([one for one, _ in said], what)
            if take is not None:
                try:
                    take([one for _, one in said])
                except Exception as failure:
                    raise portable(failure, kind) from failure

        try:
            self.exchange.meet(what, (told, word), hear, name=name)
        except ResilioError as agreed:
            raise agreed from error

    def from_coordinator(
        self,
        make: Callable[[], _T],
        kind: type[ResilioError] = ResilioError,
        *,
        what: str,
        name: str | None = None,
    ) -> _T:
        """What `make` returns on rank 0, on all ranks; its error too. It runs on rank 0 alone, once all are here."""
        if self.exchange is None:
            return make()
        own: list[BaseException] = []

        def judge(values: list[None]) -> bytes | None:
            try:
                large[0] = pickle.dumps(make())
            except Exception as error:
                own.append(error)
                raise portable(error, kind) from error
            return large[0] if self._pass_on is None or len(large[0]) <= _SMALL else None

        large = [b""]
        try:
            data = self.exchange.meet(what, None, judge, name=name)
        except ResilioError as error:
            raise error from (own[0] if own else None)
        if data is None:
            assert self._pass_on is not None
            data = self._pass_on(large[0])
        value: _T = pickle.loads(data)  # noqa: S301  (our own bytes)
        return value


def raise_first(errors: list[ResilioError | None], what: str) -> None:
    """Raise the first of `errors` (by rank), if any, with the ranks that failed as facts. Not collective."""
    failed = [rank for rank, error in enumerate(errors) if error is not None]
    if not failed:
        return
    error = errors[failed[0]]
    assert error is not None
    if len(errors) > 1 and not hasattr(error, "rank"):
        where = f"rank {failed[0]}" + (f" (and {len(failed) - 1} more)" if len(failed) > 1 else "")
        error = type(error)(f"{where}: {error}", **{**error.facts, "rank": failed[0], "ranks": failed, "phase": what})
    raise error
