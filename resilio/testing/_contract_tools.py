"""What the contract's tests are written with."""

from __future__ import annotations

import functools
import inspect
import multiprocessing
import os
import pickle
import traceback
import warnings
from collections.abc import Callable, Iterator, Sequence
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, TypeVar

import pytest

from ..storage import Incomplete, Storage

__all__ = [
    "BrokenPromise",
    "Contract",
    "check_facts",
    "copy_of",
    "fork_barrier",
    "in_children",
    "keys_of",
    "needs_create",
    "needs_shared",
    "promised",
    "unfinished",
]

_CHILD_S = 120.0
_SAID_MAX = 4000

_Test = TypeVar("_Test", bound=Callable[..., None])


class BrokenPromise(AssertionError):
    """A storage does not do what `resilio.storage` promises; says which promise, and where it is written."""

    __module__ = "resilio.testing"  # a report begins with the name in full


class Contract:
    """Subclass it, and say how to make an empty storage.

    Attributes:
        large_size_bytes: length of the large objects. For a store with parts: above two parts, and no multiple of one.
        many_objects: how many are listed and deleted at once. For a store that answers in pages: above one page.
    """

    large_size_bytes: int = 20 * 2**20 + 7
    many_objects: int = 1003

    def make_storage(self, tmp_path: Path) -> Storage:
        """An empty storage; `tmp_path` is a folder of its own for each test."""
        raise NotImplementedError("say how to make an empty storage")

    @pytest.fixture
    def storage(self, tmp_path: Path) -> Iterator[Storage]:
        """An empty storage."""
        with self.make_storage(tmp_path) as storage:
            yield storage


def promised(where: Any, words: str) -> Callable[[_Test], _Test]:
    """Say of a test which promise it is about, for the author whose storage breaks it.

    Args:
        where: whose docstring has the promise: something of `resilio.storage`.
        words: the promise, to the letter of that docstring.
    """

    def mark(test: _Test) -> _Test:
        @functools.wraps(test)
        def checked(self: Contract, storage: Storage, *args: Any, **kwargs: Any) -> None:
            __tracebackhide__ = True
            try:
                test(self, storage, *args, **kwargs)
            except (Exception, pytest.fail.Exception) as error:
                what = inspect.cleandoc(test.__doc__ or "").partition("\n\n")[0].replace("\n", " ")
                said = f"{type(error).__name__}: {error}".strip()[:_SAID_MAX]
                raise BrokenPromise(
                    f"{type(storage).__name__} breaks a promise of resilio.storage.{where.__qualname__}:\n"
                    f'    "{words}"\nTried: {what}\nSeen: {said}'
                ) from error

        checked.promise = (where, words)  # type: ignore[attr-defined]
        return checked  # type: ignore[return-value]

    return mark


def keys_of(storage: Storage, prefix: str = "") -> Sequence[str]:
    return [info.key for info in storage.list(prefix)]


def check_bytes(found: bytes | bytearray | memoryview, expected: bytes | bytearray | memoryview) -> None:
    """Pass if they are the same. Not by a plain `assert`: where pytest believes to run in CI it shows all of the
    difference, and for 100 KB looks for it for minutes, in the way of every other thread.
    """
    if found == expected:
        return
    at = next((at for at, (a, b) in enumerate(zip(found, expected, strict=False)) if a != b), None)
    where = f"they differ from byte {at} on" if at is not None else "one is the beginning of the other"
    raise AssertionError(f"{len(found)} bytes came back for {len(expected)} that were written; {where}")


def unfinished(storage: Storage, prefix: str = "") -> Sequence[Incomplete]:
    return [*storage.incomplete(prefix)]


def copy_of(storage: Storage) -> Storage:
    """What another process would make of it."""
    try:
        return pickle.loads(pickle.dumps(storage))  # type: ignore[no-any-return]  # noqa: S301  our own
    except Exception as error:
        raise AssertionError(f"the storage does not pickle: {type(error).__name__}: {error}") from error


def check_facts(error: Exception, key: str, storage: Storage) -> None:
    facts = vars(error)
    assert (facts.get("key"), facts.get("url")) == (key, storage.url), "raise it with key=key, url=self.url"
    try:
        copy = pickle.loads(pickle.dumps(error))  # noqa: S301  our own
    except Exception as unpickled:
        raise AssertionError(f"{type(error).__name__} does not pickle: {unpickled}") from unpickled
    assert (type(copy), str(copy)) == (type(error), str(error))
    assert (copy.key, copy.url) == (key, storage.url)


def needs_create(storage: Storage) -> None:
    if not storage.capabilities.create_if_absent:
        pytest.skip("promises no create-if-absent")


def needs_shared(storage: Storage) -> None:
    if not storage.capabilities.shared:
        pytest.skip("serves one process only")


def fork_barrier(parties: int) -> Any:
    """Where forked processes wait for each other."""
    return multiprocessing.get_context("fork").Barrier(parties)


def in_children(*works: Callable[[], object]) -> list[Any]:
    """What each returns in a forked process of its own, all at once; minus the signal where one ended it.

    Raises:
        AssertionError: one raised, or hangs.
    """
    fork = multiprocessing.get_context("fork")
    started = []
    for work in works:
        theirs, ours = fork.Pipe(duplex=False)
        process = fork.Process(target=_tell, args=(ours, work), daemon=True)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)  # of threads, from Python 3.12 on: we mean it
            process.start()
        started.append((process, theirs, ours))  # our end stays open, so that `poll` is not true of an end alone
    answers: list[Any] = []
    for process, theirs, _ in started:
        came = theirs.poll(0) or _wait(process, theirs)
        answers.append(theirs.recv() if came else None)
        process.join(_CHILD_S)
        if process.exitcode is None:
            process.kill()
            process.join()
            answers[-1] = ("a forked process hangs", None)
        elif not came:
            answers[-1] = (None, process.exitcode)
    for failed, _ in answers:
        assert not failed, failed
    return [answer for _, answer in answers]


def _wait(process: Any, answer: Connection) -> bool:
    multiprocessing.connection.wait([answer, process.sentinel], _CHILD_S)
    return answer.poll(0)


def _tell(ours: Connection, work: Callable[[], object]) -> None:
    try:
        ours.send((None, work()))
    except BaseException:  # noqa: BLE001  the parent is to know, whatever it was
        ours.send((f"in a forked process (pid {os.getpid()}):\n{traceback.format_exc()[-_SAID_MAX:]}", None))
