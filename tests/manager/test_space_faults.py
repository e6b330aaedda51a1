"""Every write of a save may fail: that costs the save, and nothing else."""

from __future__ import annotations

import errno
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from manager.space_tools import Faulty, committed, litter, state, value_of

from resilio import CheckpointManager, keep_last
from resilio.errors import AccessDeniedError, OutOfSpaceError, SaveError
from resilio.storage.local import LocalStorage
from resilio.testing.worlds import run_world

pytestmark = pytest.mark.usefixtures("calm")


@pytest.fixture
def in_memory(tmp_path: Path) -> Iterator[Path]:
    """A folder where fsync costs nothing, if this machine has one: there are thousands of them here."""
    shm = Path("/dev/shm")
    if not os.access(shm, os.W_OK):
        yield tmp_path
        return
    with tempfile.TemporaryDirectory(dir=shm) as name:
        yield Path(name)


KINDS: list[Any] = [
    pytest.param(errno.ENOSPC, True, id="full"),
    pytest.param(errno.EDQUOT, False, id="over quota for a moment"),
    pytest.param(errno.EROFS, True, id="read-only"),
]


@pytest.mark.parametrize(("number", "lasts"), KINDS)
def test_a_save_that_fails_at_any_of_its_writes_leaves_the_old_one_and_the_next_works(in_memory, number, lasts):
    """Every operation of a save, and of the sweep after it, of one that is not the first."""
    root, disk, live = in_memory / "run", Faulty(), torch.zeros(1)
    kind = OutOfSpaceError if number in (errno.ENOSPC, errno.EDQUOT) else AccessDeniedError
    failures = 0
    refused: set[str] = set()  # attempts whose commit was sent: never called failed, and left to the next generation

    def save(ckpt: CheckpointManager, step: int) -> None:
        live.fill_(step)
        ckpt.save(step)

    with CheckpointManager(LocalStorage(root, disk), state(live), keep=keep_last(1), mode="sync") as ckpt:
        ckpt.restore()
        save(ckpt, 1)
        old, nth = 1, 0
        while True:
            nth += 1
            failed = False
            disk.arm(nth, number, lasts=lasts)
            try:
                save(ckpt, old + 1)
            except SaveError as error:
                failed = True
                assert error.cause == kind.__name__ and error.errno == number, error
            place = disk.disarm()
            assert failed or old + 1 in committed(root)
            newest = committed(root)[-1]
            assert value_of(root, newest) == newest >= old
            if place is None:
                break
            if failed:
                failures += 1
                assert newest == old or value_of(root, old) == old
            save(ckpt, newest + 1)
            old = newest + 1
            if failed and "commits" in (place.name, place.parent.name):
                assert len(litter(root) - refused) <= 1
                refused |= litter(root)
            assert litter(root) == refused, (nth, place)
        assert committed(root) == [old + 1]
    with CheckpointManager(root, state(live), keep=keep_last(1), mode="sync") as ckpt:
        ckpt.restore()
        save(ckpt, old + 2)
    assert not litter(root)
    assert failures > 20
    print(f"errno {number} lasts={lasts}: {nth - 1} operations, {failures} saves failed, {len(refused)} at the commit")


def test_a_first_save_that_fails_at_any_of_its_writes_is_followed_by_one_that_works(in_memory):
    """With the run's record, its generation, and the folders of all."""
    live, nth, failures = torch.ones(1), 0, 0
    while True:
        nth += 1
        root, disk = in_memory / str(nth) / "run", Faulty()
        with CheckpointManager(LocalStorage(root, disk), state(live), mode="sync") as ckpt:
            disk.arm(nth, errno.ENOSPC, lasts=True)
            try:
                ckpt.save(1)
                failed = False
            except SaveError:
                failed = True
            place = disk.disarm()
            if place is None:
                break
            failures += failed
            done = committed(root)
            step = 2 if done else 1  # what failed after the record was there is a checkpoint, only not acknowledged
            ckpt.save(step)
            assert committed(root) == [*done, step]
            assert value_of(root, step) == 1
            if place.parent.name != "commits":
                assert not litter(root), (nth, place)
    assert failures > 40
    print(f"first save: {nth - 1} operations, {failures} saves failed")


def fails_on_one(rank: int, world: int, root: str) -> list[Any]:
    """Rank 1's disk fails at each of its operations in turn; rank 0's is well."""
    disk, live = Faulty(), torch.zeros(1)
    told = []
    with CheckpointManager(LocalStorage(root, disk), state(live), keep=keep_last(2), mode="async") as ckpt:
        ckpt.restore()
        ckpt.save(1).result()
        step = 1
        for nth in range(1, 100):
            disk.arm(nth, errno.ENOSPC if rank else 0, lasts=True)
            live.fill_(step + 1)
            handle, error = None, None
            try:
                handle = ckpt.save(step + 1)
                error = handle.exception()
            except SaveError as caught:
                error = caught
            disk.disarm()
            told.append(None if error is None else (type(error).__name__, error.rank, error.cause))
            step += 1
            if error is None:
                break
            with pytest.raises(SaveError):
                ckpt.save(step)  # raised on all ranks together
            ckpt.save(step).result()  # the same step, a new attempt
    return [told, step]


def test_a_disk_that_is_full_on_one_rank_fails_the_save_on_all_and_only_that_one(in_memory):
    root = in_memory / "run"
    first, second = run_world(fails_on_one, 2, str(root))
    told, step = first
    assert first == second
    assert told == [("SaveError", 1, "OutOfSpaceError")] * (len(told) - 1) + [None]
    assert len(told) > 15
    assert committed(root) == [step - 1, step] and not litter(root)
    assert value_of(root, step) == step
    print(f"one rank of two: {len(told) - 1} operations")
