"""Other people's libraries, in their best setting on a CPU host. One that is not there is named, never left out."""

from __future__ import annotations

import contextlib
import importlib
import os
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path
from typing import Any

import torch

from .contenders import Contender, sync
from .state import Job

__all__ = ["PEERS", "Safetensors", "TorchCheckpointing", "TorchSnapshot", "absent", "versions"]

PEERS = {"safetensors": "safetensors", "torchsnapshot": "torchsnapshot", "torch_checkpointing": "torch-checkpointing"}


def absent() -> dict[str, str]:
    """Name -> why it cannot take part; those that can are left out. Imports them."""
    found: dict[str, str] = {}
    for name in PEERS:
        try:
            importlib.import_module(name)
        except Exception as error:  # noqa: BLE001  old libraries fail in all kinds of ways under a new torch
            found[name] = f"does not import: {type(error).__name__}: {error}".splitlines()[0][:200]
    return found


def versions(missing: dict[str, str]) -> dict[str, str]:
    """Name -> version, or why it is absent."""
    return {name: f"absent, {missing[name]}" if name in missing else metadata.version(PEERS[name]) for name in PEERS}


class Safetensors(Contender):
    """One file of all tensors, made durable by `fsync` of ours; values that are no tensors are left out."""

    name = "safetensors + fsync"

    def _flat(self) -> dict[str, torch.Tensor]:
        state: dict[str, torch.Tensor] = dict(self.job.model.state_dict())
        for index, moments in self.job.optimizer.state_dict()["state"].items():
            state |= {f"optimizer.{index}.{name}": value for name, value in moments.items()}
        return state

    def save(self, step: int) -> None:
        from safetensors.torch import save_file

        self.checkpoint = self.folder / f"step-{step}.safetensors"
        save_file(self._flat(), self.checkpoint)
        with self.checkpoint.open("rb") as file:
            os.fsync(file.fileno())

    def load(self) -> None:
        from safetensors import safe_open

        with safe_open(self.checkpoint, framework="pt") as file, torch.no_grad():
            for name, tensor in self._flat().items():
                tensor.copy_(file.get_tensor(name))


class TorchSnapshot(Contender):
    """`Snapshot.take` and `restore`."""

    name = "torchsnapshot"
    durable = False

    def _app(self) -> dict[str, Any]:
        return {"model": self.job.model, "optimizer": self.job.optimizer}

    def save(self, step: int) -> None:
        from torchsnapshot import Snapshot

        super().save(step)
        Snapshot.take(str(self.checkpoint), self._app())

    def load(self) -> None:
        from torchsnapshot import Snapshot

        Snapshot(str(self.checkpoint)).restore(self._app())


class TorchCheckpointing(Contender):
    """Its `CheckpointManager`, without `O_DIRECT`: the default fails on ext4 (EINVAL at an unaligned tail).

    Args:
        job: what is saved.
        folder: of all contenders.
        background: whether it saves asynchronously, from a process that it starts.
    """

    durable = False

    def __init__(self, job: Job, folder: Path, *, background: bool = False) -> None:
        super().__init__(job, folder)
        self.name = "torch_checkpointing async" if background else "torch_checkpointing"
        self.folder = folder / self.name.replace(" ", "-")
        self._background = background
        self._written: Any = None

    def open(self) -> None:
        from torch_checkpointing import CheckpointManager
        from torch_checkpointing.config import AsyncCheckpointSaverConfig, SyncCheckpointSaverConfig
        from torch_checkpointing.staging import CheckpointStagerConfig
        from torch_checkpointing.storage.filesystem import LocalFileSystemStorageConfig

        super().open()
        staging = CheckpointStagerConfig(use_pinned_memory=False, use_non_blocking_copy=False)
        saver = AsyncCheckpointSaverConfig(staging_config=staging) if self._background else SyncCheckpointSaverConfig()
        storage = LocalFileSystemStorageConfig(use_direct_io=False)
        self._manager = CheckpointManager(CheckpointManager.Config(save=saver, storage_config=storage))

    def _payload(self) -> dict[str, Any]:
        return {"model": self.job.model.state_dict(), "optimizer": self.job.optimizer.state_dict()}

    def save(self, step: int) -> None:
        super().save(step)
        self._written = self._manager.save(str(self.checkpoint), self._payload())

    @property
    def in_flight(self) -> bool:
        return self._written is not None and not self._written.done()

    def settle(self) -> None:
        if self._written is not None:
            self._written.result()

    @contextlib.contextmanager
    def guarded(self) -> Iterator[None]:
        with self._manager.lock():
            yield

    def load(self) -> None:
        loaded = self._manager.load(str(self.checkpoint), into=self._payload())
        self.job.model.load_state_dict(loaded["model"])
        self.job.optimizer.load_state_dict(loaded["optimizer"])

    def close(self) -> None:
        self._manager.close()


def make_durable(contender: Contender) -> None:
    """What a user would have to add, if anything."""
    if not contender.durable:
        sync(contender.checkpoint)
