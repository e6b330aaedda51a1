"""The only file that touches names of DCP that are not public. What breaks with a new torch breaks here.

Written against torch 2.13. Each use says what the public surface lacks.
"""

from __future__ import annotations

import pickle
import warnings
from collections.abc import Iterable
from concurrent.futures import Future
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import (
    _validate_global_plan,  # coverage and overlap of the pieces: no public way to ask
    create_default_global_save_plan,
)
from torch.distributed.checkpoint.filesystem import (
    CURRENT_DCP_VERSION,
    _StorageInfo,  # plain DCP's reader finds an item by exactly this class; a subclass of it breaks plain dcp.load
)
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import (
    LoadPlanner,
    ReadItem,
    SavePlan,
    SavePlanner,
    TensorWriteData,
    WriteItem,
    WriteItemType,
)
from torch.distributed.checkpoint.planner_helpers import (
    _create_read_items,  # the overlap of saved pieces and live shards: the resharding itself
    _create_write_items,  # the same for DTensor placements at save
    create_read_items_for_chunk_list,
)
from torch.distributed.checkpoint.staging import AsyncStager
from torch.distributed.checkpoint.state_dict_loader import load as dcp_load
from torch.distributed.checkpoint.state_dict_saver import AsyncSaveResponse
from torch.distributed.checkpoint.state_dict_saver import async_save as dcp_async_save
from torch.distributed.checkpoint.state_dict_saver import save as dcp_save
from torch.distributed.checkpoint.storage import StorageReader, StorageWriter

from ..errors import ResilioError, RestoreError, SaveError
from ..ranks import Ranks, portable
from ..state.flat_shard import FlatShard

__all__ = [
    "ALL",
    "READING",
    "CheckpointException",
    "async_save",
    "finish_metadata",
    "global_plan",
    "load",
    "read_items",
    "save",
    "storage_info",
    "tensor_metadata",
    "told",
    "write_items",
]

READING = "reading the checkpoint"

# DCP wraps and logs a call for every top-level key, three times a save; so it is shown one key that holds all of ours.
ALL = "all"

# DCP says on every call that it works in a single process. That is what a job without a process group asked for.
warnings.filterwarnings("ignore", message="torch.distributed is disabled, unavailable or uninitialized")


def write_items(key: str, value: Any) -> list[WriteItem]:
    """What this rank has to write of `value`: its shard of a DTensor, all of anything else."""
    if not isinstance(value, FlatShard):
        return list(_create_write_items(key, value))
    size, properties = value.size(), TensorProperties(dtype=value.dtype)
    return [
        WriteItem(
            MetadataIndex(key, chunk.offsets), WriteItemType.SHARD, tensor_data=TensorWriteData(chunk, properties, size)
        )
        for chunk in _chunks(value)
    ]


def read_items(key: str, metadata: TensorStorageMetadata, tensor: torch.Tensor) -> list[ReadItem]:
    """What must be read of a saved tensor to fill this rank's part of `tensor`."""
    if isinstance(tensor, FlatShard):
        return create_read_items_for_chunk_list(key, metadata, _chunks(tensor))
    return list(_create_read_items(key, metadata, tensor))


def _chunks(tensor: FlatShard) -> list[ChunkStorageMetadata]:
    return [ChunkStorageMetadata(torch.Size(box.offsets), torch.Size(box.sizes)) for box in tensor.boxes()]


def tensor_metadata(
    dtype: torch.dtype, shape: Iterable[int], pieces: Iterable[tuple[list[int], list[int]]]
) -> TensorStorageMetadata:
    """A saved tensor as DCP's planners know it; `pieces` are (offsets, sizes)."""
    return TensorStorageMetadata(
        properties=TensorProperties(dtype=dtype),
        size=torch.Size(shape),
        chunks=[ChunkStorageMetadata(torch.Size(offsets), torch.Size(sizes)) for offsets, sizes in pieces],
    )


def storage_info(name: str, offset: int, length: int) -> Any:
    """Where plain DCP finds an item: a file of the checkpoint's folder, and the bytes in it."""
    return _StorageInfo(name, offset, length)


def global_plan(plans: list[SavePlan]) -> tuple[list[SavePlan], Metadata]:
    """The metadata of all ranks' (already deduplicated) plans.

    Raises:
        SaveError: pieces overlap, leave a hole or stick out.
    """
    plans, metadata = create_default_global_save_plan(plans)
    problems = _validate_global_plan(plans, metadata)
    if problems:
        raise SaveError(f"the ranks' pieces do not tile the tensors: {'; '.join(problems[:3])}", problems=problems)
    return plans, metadata


def finish_metadata(metadata: Metadata, where: dict[MetadataIndex, Any], ties: dict[str, str], attempt: str) -> bytes:
    """`.metadata` as plain DCP reads it: only stock classes, a tied key pointing to the bytes of its twin."""
    data = dict(where)
    for key, twin in ties.items():
        for index, info in where.items():
            if index.fqn == twin:
                data[MetadataIndex(key, index.offset, index.index)] = info
    storage_meta = StorageMeta(checkpoint_id=attempt)
    # Another one: what all ranks agreed on is used again.
    return pickle.dumps(replace(metadata, storage_data=data, storage_meta=storage_meta, version=CURRENT_DCP_VERSION))


def save(
    state: dict[str, Any], writer: StorageWriter, planner: SavePlanner, ranks: Ranks, *, alone: bool = False
) -> BaseException | None:
    """`dcp.save`; returns its failure, see `told`.

    Args:
        state: flat key -> tensor or value.
        writer: of the attempt.
        planner: of the attempt.
        ranks: who takes part.
        alone: whether this rank does all that DCP has to do by itself.

    Ranks: all; collective on the data group, but for `alone`.
    Blocks: until all ranks have written.
    """
    try:
        dcp_save({ALL: state}, storage_writer=writer, planner=planner, **_where(ranks, alone))
    except (Exception, CheckpointException) as error:  # noqa: BLE001  handed to the caller whole
        _let_through(error, ranks, alone)
        return error
    return None


def async_save(
    state: dict[str, Any],
    writer: StorageWriter,
    planner: SavePlanner,
    stager: AsyncStager,
    ranks: Ranks,
    *,
    alone: bool = False,
) -> Future[Any]:
    """`dcp.async_save` in a thread; the future raises what DCP raises, see `told`. Arguments as for `save`.

    Ranks: all; collective on the data group, in the background, but for `alone`.
    Blocks: until `stager` returns.
    """
    future = dcp_async_save(
        {ALL: state},
        storage_writer=writer,
        planner=planner,
        async_stager=stager,
        **_where(ranks, alone),
    )
    # What it says of staging is of no use: it reports success where that had failed. We tell that in what was staged.
    return future.upload_completion if isinstance(future, AsyncSaveResponse) else future


def load(state: dict[str, torch.Tensor], reader: StorageReader, planner: LoadPlanner, ranks: Ranks) -> None:
    """`dcp.load`; errors of any rank reach all ranks as ours.

    Ranks: all; collective on the data group.
    """
    met = ranks.exchange.met if ranks.exchange is not None else 0
    try:
        dcp_load(
            {ALL: state},
            storage_reader=reader,
            planner=planner,
            **_where(ranks),
        )
    except CheckpointException as error:
        _let_through(error, ranks)
        raise told(error, RestoreError) from error
    except Exception as error:  # one of DCP's collectives failed: what goes wrong in a step comes as the other
        _let_through(error, ranks)
        if ranks.groups is None or ranks.exchange is None:
            raise
        raise (ranks.exchange.lost or ranks.collective_failed(READING, f"{READING} {ranks.votes}", error)) from error
    except (KeyboardInterrupt, SystemExit) as error:  # in one of DCP's collectives, where nobody makes a failure of it
        if ranks.groups is not None and ranks.exchange is not None:
            ranks.groups.cut()
            if ranks.exchange.met == met:  # the others will wait where they have read
                ranks.exchange.miss(READING, error)
        raise


def _where(ranks: Ranks, alone: bool = False) -> dict[str, Any]:
    groups = ranks.groups
    # DCP looks at the group even where it has no use for it: at the job's own if it is given none.
    return {"no_dist": alone or groups is None, "process_group": None if groups is None else groups.data}


def _let_through(error: BaseException, ranks: Ranks, alone: bool = False) -> None:
    """Raise the Ctrl-C or `sys.exit` that came to this rank inside DCP: DCP makes an ordinary failure of it."""
    interrupt, ranks.interrupt = ranks.interrupt, None
    here = 0 if alone else ranks.rank  # as DCP calls this rank
    if isinstance(error, CheckpointException) and here in error.failures:
        own = error.failures[here][0]
        if not isinstance(own, (Exception, CheckpointException)):
            interrupt = own
    if interrupt is not None:
        raise interrupt from error


def told(error: BaseException, kind: type[ResilioError]) -> ResilioError:
    """DCP's exception as ours: the first failing rank's own error, named by rank.

    `CheckpointException` is a `BaseException`, which `except Exception` misses; nobody outside this file has to know.
    """
    if not isinstance(error, CheckpointException):
        return portable(error, kind)
    ranks = sorted(error.failures)
    first = portable(error.failures[ranks[0]][0], kind)
    facts = {**first.facts, "rank": ranks[0], "ranks": ranks}
    if hasattr(first, "rank"):  # agreed on before DCP heard of it
        return first
    where = f"rank {ranks[0]}: " if dist.is_available() and dist.is_initialized() else ""
    return type(first)(f"{where}{first}", **facts)
