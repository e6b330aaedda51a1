"""What every restore has under `dcp.load`: the planner, and a reader that runs several reads at a time."""

from __future__ import annotations

import io
from abc import abstractmethod
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex, TensorStorageMetadata
from torch.distributed.checkpoint.planner import LoadPlan, LoadPlanner, ReadItem
from torch.distributed.checkpoint.storage import StorageReader
from torch.distributed.tensor import DTensor
from torch.futures import Future

from ..errors import IntegrityError, InternalError, ResilioError, RestoreError, StorageError
from ..ranks import Ranks, portable, raise_first
from ..records.problems import PROBLEMS_MAX, joined
from ..state.flat_shard import FlatShard
from ..state.tensors import local
from ..storage.base import Storage
from . import dcp

__all__ = ["Loader", "ParallelReader", "as_dtype"]


def as_dtype(name: str) -> torch.dtype:
    """The torch dtype of this name, or an error that says what is missing."""
    dtype = getattr(torch, name, None)
    if not isinstance(dtype, torch.dtype):
        raise RestoreError(
            f"the checkpoint has tensors of dtype {name!r}, which torch {torch.__version__} does not know"
        )
    return dtype


class Loader(LoadPlanner):
    """Plans the reads for tensors that are allocated like the live ones, sharded as they are.

    `dcp.load` gets these scratch tensors as its state; every one must be in the checkpoint with this shape and dtype
    (the state room compared them already).
    """

    def set_up_planner(
        self, state_dict: dict[str, Any], metadata: Metadata | None = None, is_coordinator: bool = False
    ) -> None:
        """Take the scratch tensors."""
        assert metadata is not None
        self._state: dict[str, torch.Tensor] = state_dict[dcp.ALL]
        self._metadata = metadata

    def create_local_plan(self) -> LoadPlan:
        """One read item per overlap of a saved piece and this rank's part."""
        items: list[ReadItem] = []
        known: dict[Any, list[ReadItem]] = {}  # finding them takes long, and layers and moments are alike
        for key, tensor in self._state.items():
            saved = self._metadata.state_dict_metadata[key]
            assert isinstance(saved, TensorStorageMetadata)
            kind = _kind(tensor, saved)
            if kind not in known:
                known[kind] = dcp.read_items(key, saved, tensor)
            items += [_of(key, item) for item in known[kind]]
        return LoadPlan(items)

    def create_global_plan(self, global_plan: list[LoadPlan]) -> list[LoadPlan]:
        """Each rank reads for itself."""
        return global_plan

    def finish_plan(self, central_plan: LoadPlan) -> LoadPlan:
        """As planned."""
        return central_plan

    def load_bytes(self, read_item: ReadItem, value: io.BytesIO) -> None:
        """Never called: values come from the manifest."""
        raise InternalError(f"a value was asked for as bytes: {read_item.dest_index.fqn}")

    def resolve_tensor(self, read_item: ReadItem) -> torch.Tensor:
        """The view of the scratch tensor that this item fills."""
        whole = self._state[read_item.dest_index.fqn]
        if isinstance(whole, FlatShard):
            tensor = whole.box_at(read_item.dest_index.offset or ())
        else:
            tensor = local(whole)
        for dim, (start, length) in enumerate(zip(read_item.dest_offsets, read_item.lengths, strict=True)):
            if length != tensor.shape[dim]:
                tensor = tensor.narrow(dim, start, length)
        return tensor

    def commit_tensor(self, read_item: ReadItem, tensor: torch.Tensor) -> None:
        """Filled in place already."""


def _kind(tensor: torch.Tensor, saved: TensorStorageMetadata) -> Any:
    """All that the reads of a tensor depend on, but for its name."""
    pieces = tuple((chunk.offsets, chunk.sizes) for chunk in saved.chunks)
    if isinstance(tensor, FlatShard):
        return tensor.shape, tensor.start, tensor.run.shape, tensor.order, pieces
    if isinstance(tensor, DTensor):
        return tensor.shape, tensor.placements, id(tensor.device_mesh), pieces
    return tensor.shape, pieces


def _of(key: str, item: ReadItem) -> ReadItem:
    """The same read of another tensor."""
    there, here = item.dest_index, item.storage_index
    return ReadItem(
        item.type,
        MetadataIndex(key, there.offset, there.index),
        item.dest_offsets,
        MetadataIndex(key, here.offset, here.index),
        item.storage_offsets,
        item.lengths,
    )


class ParallelReader(StorageReader):
    """A reader that knows its checkpoint from the start and splits a plan into tasks for threads.

    Args:
        storage: where the checkpoint lies.
        ranks: that read together.
        progress: called with the number of bytes of each finished read.
    """

    def __init__(self, storage: Storage, ranks: Ranks, progress: Callable[[int], None] | None = None) -> None:
        super().__init__()
        self._storage = storage
        self._ranks = ranks
        self._progress = progress or (lambda size_bytes: None)

    @abstractmethod
    def tasks(self, plan: LoadPlan, planner: LoadPlanner) -> Iterable[Callable[[], None]]:
        """The reads that fill every item of `plan`, in the order of the bytes; each may run in any thread."""

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        """Fill every item, several reads at a time, and wait for the other ranks: DCP's collective comes next.

        Damage does not end it: all that there is in what this plan reads is found, on all ranks, and raised at once.
        """
        workers = max(1, self._storage.capabilities.concurrency)
        failure: BaseException | None = None
        found: list[ResilioError] = []

        def run(task: Callable[[], None]) -> None:
            try:
                task()
            except IntegrityError as error:
                found.append(error)

        try:
            with ThreadPoolExecutor(workers, thread_name_prefix="resilio-read") as pool:
                try:
                    for _ in pool.map(run, self.tasks(plan, planner)):
                        pass
                except BaseException:
                    pool.shutdown(wait=True, cancel_futures=True)
                    raise
        except dcp.CheckpointException as error:  # of a storage's own
            failure = portable(error, RestoreError)
        except BaseException as error:  # noqa: BLE001  told to all ranks, which raise it together; a Ctrl-C as well
            failure = error
        if found and (failure is None or isinstance(failure, StorageError)):
            failure = joined(found, self._storage.url, max(10, PROBLEMS_MAX // self._ranks.world))
        self._ranks.arrive(failure, RestoreError, what=dcp.READING, judge=self._judge)
        future: Future[None] = Future()
        future.set_result(None)
        return future

    def _judge(self, errors: list[ResilioError | None], what: str) -> None:
        """What all ranks raise: the problems of all of them, which say more than that one of them could not look."""
        found = {rank: error for rank, error in enumerate(errors) if isinstance(error, IntegrityError)}
        if found and all(error is None or isinstance(error, IntegrityError | StorageError) for error in errors):
            error = joined([*found.values()], self._storage.url)
            errors = [error if rank in found else None for rank in range(len(errors))]
        raise_first(errors, what)

    def reset(self, checkpoint_id: Any = None) -> None:
        """A reader is for one checkpoint; there is nothing to reset."""

    def set_up_storage_reader(self, metadata: Metadata, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        """Nothing: all is known from the start."""

    def prepare_local_plan(self, plan: LoadPlan) -> LoadPlan:
        """As planned."""
        return plan

    def prepare_global_plan(self, plans: list[LoadPlan]) -> list[LoadPlan]:
        """As planned."""
        return plans

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: Any) -> bool:
        """Never chosen by DCP itself."""
        return False
