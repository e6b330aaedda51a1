"""A rank that writes several data objects side by side: they are one checkpoint, or none."""

from __future__ import annotations

import errno
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from workload import assert_same, build, snapshot

from resilio import CheckpointManager, TrainingState
from resilio.engine import writer
from resilio.errors import SaveError
from resilio.storage.base import Writer
from resilio.storage.local import LocalStorage
from resilio.testing.worlds import run_world


def many(patch: Any) -> None:
    """As on a host of many cores, with a state worth it."""
    patch.setattr(writer, "_WORTH_ONE", 1)
    patch.setattr(writer.os, "cpu_count", lambda: 3)


def attempt(root: Path) -> Path:
    (found,) = root.glob("step-*")
    return found


def test_the_state_is_cut_by_bytes_and_comes_back(tmp_path: Path, monkeypatch: Any) -> None:
    many(monkeypatch)
    want = {f"t{number}": torch.arange(1000.0 * number) for number in range(1, 12)}
    with CheckpointManager(tmp_path, TrainingState(rng=False, all=want), mode="sync") as ckpt:
        ckpt.save(1)
        assert ckpt.verify(1) == []
    sizes = [path.stat().st_size for path in attempt(tmp_path).glob("*.distcp")]
    assert len(sizes) == 3
    assert max(sizes) < 1.3 * min(sizes)
    found = {name: torch.zeros_like(tensor) for name, tensor in want.items()}
    with CheckpointManager(tmp_path, TrainingState(rng=False, all=found)) as ckpt:
        ckpt.restore(check_fingerprints=True)
    assert_same(found, want, "all")
    plain = {"all": {name: torch.zeros_like(tensor) for name, tensor in want.items()}}
    dcp.load(plain, checkpoint_id=attempt(tmp_path))
    assert_same(plain["all"], want, "all")


class OneFullDisk(LocalStorage):
    """One of its data objects does not fit."""

    ended = 0

    @contextmanager
    def writer(self, key: str, *, size_hint: int | None = None) -> Iterator[Writer]:
        with super().writer(key, size_hint=size_hint) as sink:
            yield Full(sink) if key.endswith("__0_1.distcp") else sink
        OneFullDisk.ended += 1


class Full(Writer):
    def __init__(self, sink: Writer) -> None:
        self._sink = sink

    def write(self, data: Any) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")


@pytest.mark.parametrize("mode", ["sync", "async"])
def test_one_that_cannot_be_written_fails_the_save_and_nothing_is_left(
    tmp_path: Path, monkeypatch: Any, mode: Any
) -> None:
    many(monkeypatch)
    state = TrainingState(rng=False, all={f"t{number}": torch.zeros(300_000) for number in range(9)})
    with CheckpointManager(OneFullDisk(tmp_path), state, mode=mode) as ckpt:
        with pytest.raises(SaveError, match="No space left"):
            ckpt.save(1).result()
        if mode == "async":
            with pytest.raises(SaveError, match="No space left"):
                ckpt.save(1)
        assert ckpt.checkpoints() == []
        assert list(tmp_path.glob("step-*")) == []


def save_and_restore(rank: int, world: int, url: str) -> int:
    with pytest.MonkeyPatch.context() as patch:
        many(patch)
        job = build("fsdp2", rank, world)
        job.train_step()
        want = snapshot(job)
        with CheckpointManager(url, job.state()) as ckpt:
            ckpt.save(1).result()
            job.train_step()
            ckpt.restore(check_fingerprints=True)
            assert_same(snapshot(job), want, "job")
            assert ckpt.verify(1) == []
    return len(list(attempt(Path(url)).glob(f"__{rank}_*.distcp")))


def test_so_it_is_at_two_ranks(tmp_path: Path) -> None:
    assert run_world(save_and_restore, 2, str(tmp_path)) == [3, 3]
