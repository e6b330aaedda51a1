"""What a user of each would write to save and load the whole state: resilio, plain DCP, `torch.save`."""

from __future__ import annotations

import contextlib
import os
import warnings
from collections.abc import Iterator
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import AsyncSaveResponse, async_save, save

from resilio import CheckpointManager, TrainingState, keep_last
from resilio.clock import SystemClock
from resilio.manager.handle import SaveHandle

from .state import Job

__all__ = ["Contender", "Dcp", "DcpAsync", "Resilio", "ResilioAsync", "TorchSave", "files_of", "quiet", "sync"]

_clock = SystemClock()


def quiet() -> None:
    """DCP and the others say much that is no news here."""
    warnings.filterwarnings("ignore", module=r"torch\..*")
    warnings.filterwarnings("ignore", module=r"torch_checkpointing\..*")
    warnings.filterwarnings("ignore", message="torch.distributed is disabled")


def files_of(folder: Path) -> list[Path]:
    """All files below it."""
    return [path for path in folder.rglob("*") if path.is_file()]


def sync(folder: Path) -> None:
    """Make all of it durable, for those that do not."""
    for path in files_of(folder):
        with path.open("rb") as file:
            os.fsync(file.fileno())


class Contender:
    """One way to save and load `job` below a folder of its own.

    Attributes:
        name: in what is printed.
        durable: whether what is saved would outlive the machine when `save` returns.
    """

    name = ""
    durable = True

    def __init__(self, job: Job, folder: Path) -> None:
        self.job = job
        self.folder = folder / type(self).__name__.lower()
        self.checkpoint = self.folder

    def open(self) -> None:
        """What a training job does once, before its first save."""
        self.folder.mkdir(parents=True, exist_ok=True)

    def save(self, step: int) -> None:
        """Until the checkpoint is complete; of an asynchronous one until training may go on."""
        self.checkpoint = self.folder / f"step-{step}"

    @property
    def in_flight(self) -> bool:
        """Whether an asynchronous save is not complete yet."""
        return False

    def settle(self) -> None:
        """Wait for what an asynchronous save does behind the loop."""

    @contextlib.contextmanager
    def guarded(self) -> Iterator[None]:
        """Held by the loop around the optimizer's step."""
        yield

    def load(self) -> None:
        """From storage to live model and optimizer."""
        raise NotImplementedError

    def close(self) -> None:
        """The end of the job."""


class Resilio(Contender):
    """`CheckpointManager`; a restore checks every byte, and changes nothing live until everything is read.

    Args:
        job: what is saved.
        folder: of all contenders.
        name: in what is printed.
        arguments: further ones of the manager.
    """

    def __init__(self, job: Job, folder: Path, name: str = "resilio", **arguments: Any) -> None:
        super().__init__(job, folder)
        self.name = name
        self.folder = self.checkpoint = folder / name.replace(" ", "-")
        self._arguments = {"mode": "sync", "keep": keep_last(1), **arguments}

    def open(self) -> None:
        state = TrainingState(model=self.job.model, optimizer=self.job.optimizer)
        self.manager = CheckpointManager(self.folder, state, progress=False, **self._arguments)

    def save(self, step: int) -> None:
        self.manager.save(step)

    def load(self) -> None:
        self.manager.restore()

    def close(self) -> None:
        self.manager.close()


class ResilioAsync(Resilio):
    """The same in the background."""

    def __init__(self, job: Job, folder: Path, stage: str) -> None:
        super().__init__(job, folder, f"resilio {stage}", mode="async", stage=stage)
        self._handle: SaveHandle | None = None

    def save(self, step: int) -> None:
        self._handle = self.manager.save(step)

    @property
    def in_flight(self) -> bool:
        return self._handle is not None and not self._handle.done()

    def settle(self) -> None:
        if self._handle is not None:
            self._handle.result()


class Dcp(Contender):
    """`dcp.save` and `dcp.load` with `get_state_dict` and `set_state_dict` around them.

    Args:
        job: what is saved.
        folder: of all contenders.
        threads: of its writer, which is handed to it only if this is not 1, the default.
        dist: whether a process group takes part.
    """

    def __init__(self, job: Job, folder: Path, threads: int = 1, *, dist: bool = False) -> None:
        super().__init__(job, folder)
        self.name = "dcp" if threads == 1 else f"dcp, {threads} threads"
        self.folder = folder / f"{type(self).__name__.lower()}-{threads}"
        self._threads = threads
        self._no_dist = not dist
        self.call_s = 0.0  # of the last load, dcp.load itself into live tensors

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
        start_s = _clock.monotonic_s()
        load(state, checkpoint_id=self.checkpoint, no_dist=self._no_dist)
        self.call_s = _clock.monotonic_s() - start_s
        set_state_dict(
            self.job.model,
            self.job.optimizer,
            model_state_dict=state["model"],
            optim_state_dict=state["optimizer"],
        )


class DcpAsync(Dcp):
    """`dcp.async_save`, with its default stager or with one that is used again and so keeps its memory."""

    def __init__(self, job: Job, folder: Path, threads: int = 1, *, reused: bool = False) -> None:
        super().__init__(job, folder, threads)
        self.name = (
            "dcp async" + (f", {threads} threads" if threads > 1 else "") + (", reused stager" if reused else "")
        )
        self.folder = folder / self.name.replace(", ", "-").replace(" ", "-")
        # As DCP makes one for each save where there is no accelerator.
        options = StagingOptions(
            use_pinned_memory=False, use_shared_memory=False, use_async_staging=False, use_non_blocking_copy=False
        )
        self._stager: dict[str, Any] = {"async_stager": DefaultStager(options)} if reused else {}
        self._response: AsyncSaveResponse | Future[Any] | None = None

    def save(self, step: int) -> None:
        self._response = async_save(self.state(), **self.where(step), **self._stager)

    def _future(self) -> Future[Any] | None:
        done = self._response
        return done.upload_completion if isinstance(done, AsyncSaveResponse) else done

    @property
    def in_flight(self) -> bool:
        future = self._future()
        return future is not None and not future.done()

    def settle(self) -> None:
        future = self._future()
        if future is not None:
            future.result()


class TorchSave(Contender):
    """`torch.save` of both state dicts into one file, made durable by `fsync` of ours.

    Args:
        job: what is saved.
        folder: of all contenders.
        mmap: whether `torch.load` maps the file, its best setting, rather than reading it.
    """

    def __init__(self, job: Job, folder: Path, *, mmap: bool = False) -> None:
        super().__init__(job, folder)
        self.name = "torch.save + fsync"
        self._mmap = mmap

    def save(self, step: int) -> None:
        state = {"model": self.job.model.state_dict(), "optimizer": self.job.optimizer.state_dict()}
        self.checkpoint = self.folder / f"step-{step}.pt"
        with self.checkpoint.open("wb") as file:
            torch.save(state, file)
            file.flush()
            os.fsync(file.fileno())

    def load(self, *, mmap: bool = False) -> None:
        state = torch.load(self.checkpoint, map_location="cpu", weights_only=True, mmap=mmap or self._mmap)
        self.job.model.load_state_dict(state["model"])
        self.job.optimizer.load_state_dict(state["optimizer"])
