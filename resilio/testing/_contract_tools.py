"""What the contract's tests are written with."""

from __future__ import annotations

import multiprocessing
import pickle
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import pytest

from ..storage import Incomplete, Storage

__all__ = ["Contract", "check_facts", "in_child", "keys_of", "needs_create", "needs_shared", "unfinished"]


class Contract:
    """Subclass it, and say how to make an empty storage.

    Attributes:
        large_size_bytes: length of the big object; above the store's part size, if it has parts.
    """

    large_size_bytes: int = 20 * 2**20 + 7

    def make_storage(self, tmp_path: Path) -> Storage:
        """An empty storage; `tmp_path` is a folder of its own for each test."""
        raise NotImplementedError("say how to make an empty storage")

    @pytest.fixture
    def storage(self, tmp_path: Path) -> Iterator[Storage]:
        """An empty storage."""
        with self.make_storage(tmp_path) as storage:
            yield storage


def keys_of(storage: Storage, prefix: str = "") -> Sequence[str]:
    return [info.key for info in storage.list(prefix)]


def unfinished(storage: Storage) -> Sequence[Incomplete]:
    return [*storage.incomplete("")]


def check_facts(error: Exception, key: str, storage: Storage) -> None:
    facts = vars(error)
    assert (facts.get("key"), facts.get("url")) == (key, storage.url)
    copy = pickle.loads(pickle.dumps(error))  # noqa: S301  our own
    assert (type(copy), str(copy)) == (type(error), str(error))


def needs_create(storage: Storage) -> None:
    if not storage.capabilities.create_if_absent:
        pytest.skip("promises no create-if-absent")


def needs_shared(storage: Storage) -> None:
    if not storage.capabilities.shared:
        pytest.skip("serves one process only")


def in_child(work: Callable[[], None], timeout_s: float = 60.0) -> int | None:
    """Exit code of a forked process that does `work`; None if it hangs, and then it is killed."""
    process = multiprocessing.get_context("fork").Process(target=work, daemon=True)
    process.start()
    process.join(timeout_s)
    if process.exitcode is None:
        process.kill()
    return process.exitcode
