"""The contenders: what a user of each would write to save and load the whole state, durably, in one process."""

from __future__ import annotations

import contextlib
import os
import warnings
from collections.abc import Iterator
from pathlib import Path
from time import process_time
from typing import Any

import torch
from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import AsyncSaveResponse, async_save, save

from resilio import CheckpointManager, TrainingState, keep_last
from resilio.clock import SystemClock

from .state import Job

__all__ = ["Contender", "Dcp", "DcpAsync", "Resilio", "ResilioAsync", "TorchSave", "quiet"]

_clock = SystemClock()


def quiet() -> None:
    """DCP says much that is no news here."""
    warnings.filterwarnings("ignore", module=r"torch\..*")
    warnings.filterwarnings("ignore", message="torch.distributed is disabled")


class Contender:
    """One way to save and load `job` in a new folder."""

    name = ""

    def __init__(self, job: Job) -> None:
        self.job = job

    @contextlib.contextmanager
    def opened(self, folder: Path) -> Iterator[None]:
        """Whatever a training job does once; not timed."""
        self.folder = folder
        yield

    def save(self, step: int) -> None:
        """Timed: until the checkpoint is complete, or for an asynchronous one until training may go on."""
        raise NotImplementedError

    def settle(self) -> None:
        """Not part of `save`'s time: what an asynchronous save does behind the loop."""

    def load(self) -> None:
        """Timed: from storage to live model and optimizer."""
        raise NotImplementedError


class Resilio(Contender):
    """`CheckpointManager` in a new run: the first save also makes the run's records; a restore checks every byte."""

    name = "resilio"

    @contextlib.contextmanager
    def opened(self, folder: Path) -> Iterator[None]:
        state = TrainingState(model=self.job.model, optimizer=self.job.optimizer)
        with CheckpointManager(folder, state, mode="sync") as self.manager:
            yield

    def save(self, step: int) -> None:
        self.manager.save(step)

    def load(self) -> None:
        self.manager.restore()


class ResilioAsync(Resilio):
    """The same in the background; one run for all rounds, so that its buffers are reused as in training."""

    name = "resilio async"

    @contextlib.contextmanager
    def opened(self, folder: Path) -> Iterator[None]:
        state = TrainingState(model=self.job.model, optimizer=self.job.optimizer)
        with CheckpointManager(folder, state, mode="async", keep=keep_last(1)) as self.manager:
            yield

    def save(self, step: int) -> None:
        self.handle = self.manager.save(step)

    def settle(self) -> None:
        self.handle.result()


class Dcp(Contender):
    """`dcp.save` and `dcp.load` with `get_state_dict` and `set_state_dict` around them.

    Args:
        job: what is saved.
        threads: of its writer, which is handed to it only if this is not 1, the default.
        dist: whether a process group takes part.
    """

    def __init__(self, job: Job, threads: int = 1, *, dist: bool = False) -> None:
        super().__init__(job)
        self.name = "dcp" if threads == 1 else f"dcp, {threads} threads"
        self._threads = threads
        self._no_dist = not dist
        self.call_s = 0.0, 0.0  # of the last load, dcp.load itself into live tensors: by the clock, and of CPU

    def state(self) -> dict[str, Any]:
        model, optimizer = get_state_dict(self.job.model, self.job.optimizer)
        return {"model": model, "optimizer": optimizer}

    def where(self, step: int) -> dict[str, Any]:
        self.checkpoint = self.folder / f"step-{step}"
        if self._threads == 1:
            return {"checkpoint_id": self.checkpoint, "no_dist": self._no_dist}
        writer = FileSystemWriter(self.checkpoint, thread_count=self._threads)
        return {"storage_writer": writer, "no_dist": self._no_dist}

    def save(self, step: int) -> None:
        save(self.state(), **self.where(step))

    def load(self) -> None:
        state = self.state()
        cpu_s, wall_s = process_time(), _clock.monotonic_s()
        load(state, checkpoint_id=self.checkpoint, no_dist=self._no_dist)
        self.call_s = _clock.monotonic_s() - wall_s, process_time() - cpu_s
        set_state_dict(
            self.job.model,
            self.job.optimizer,
            model_state_dict=state["model"],
            optim_state_dict=state["optimizer"],
        )


class DcpAsync(Dcp):
    """`dcp.async_save` with its default stager."""

    def __init__(self, job: Job) -> None:
        super().__init__(job)
        self.name = "dcp async"

    def save(self, step: int) -> None:
        self.response = async_save(self.state(), **self.where(step))

    def settle(self) -> None:
        done = self.response
        (done.upload_completion if isinstance(done, AsyncSaveResponse) else done).result()


class TorchSave(Contender):
    """`torch.save` of both state dicts into one file; not durable unless `fsync` is asked for."""

    def __init__(self, job: Job, *, fsync: bool) -> None:
        super().__init__(job)
        self.name = "torch.save + fsync" if fsync else "torch.save"
        self._fsync = fsync

    def save(self, step: int) -> None:
        state = {"model": self.job.model.state_dict(), "optimizer": self.job.optimizer.state_dict()}
        self.file = self.folder / f"step-{step}.pt"
        with self.file.open("wb") as file:
            torch.save(state, file)
            if self._fsync:
                file.flush()
                os.fsync(file.fileno())

    def settle(self) -> None:
        # What it left in memory would be written during the next contender's time.
        with self.file.open("rb") as file:
            os.fsync(file.fileno())

    def load(self) -> None:
        state = torch.load(self.file, map_location="cpu", weights_only=True)
        self.job.model.load_state_dict(state["model"])
        self.job.optimizer.load_state_dict(state["optimizer"])
