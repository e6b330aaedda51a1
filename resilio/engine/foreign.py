"""Restoring from a folder that plain `torch.distributed.checkpoint` wrote: no manifest, no digests, no records.

Whatever is in it is data from outside. `.metadata` is read as `foreign_metadata` says; tensors and values go through
`torch.load(weights_only=True)`, which makes nothing but tensors, plain values and registered types. Only a value that
the caller trusts may be more. Content cannot be checked: plain DCP saves no digests.
"""

from __future__ import annotations

import io
import logging
import pickle
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch.distributed.checkpoint.metadata import BytesStorageMetadata, Metadata, MetadataIndex, TensorStorageMetadata
from torch.distributed.checkpoint.planner import LoadPlan, LoadPlanner, ReadItem

from ..errors import FormatError, IntegrityError, RestoreError
from ..ranks import Ranks
from ..records.keys import METADATA
from ..state.flat import Ref, SavedState, TensorSpec
from ..storage.base import Storage
from . import dcp
from .foreign_metadata import LIMIT, read_foreign_metadata
from .foreign_values import VALUE_LIMIT, contents, load_saved
from .loading import Loader, ParallelReader

__all__ = ["ForeignCheckpoint", "ForeignReader", "fill_foreign", "foreign_state", "open_foreign"]

_AROUND = 1 << 24  # bytes that `torch.save` may put around a tensor's own, at most
_SPARE_HOLES = 64  # places of a list in nested state that may be empty, beyond one per place that is not

_log = logging.getLogger("resilio")


@dataclass(frozen=True)
class ForeignCheckpoint:
    """A plain DCP checkpoint, its metadata checked. Pickles, so that rank 0 can hand it on.

    Attributes:
        metadata: every tensor and value, and where it is stored.
        state: what it holds, the values left out.
        size_bytes: of all objects it uses.
        modified_s: when `.metadata` was stored, Unix seconds, None where the store does not tell.
    """

    metadata: Metadata
    state: SavedState
    size_bytes: int
    modified_s: float | None


def open_foreign(storage: Storage) -> ForeignCheckpoint:
    """The checkpoint whose folder is the root of `storage`.

    Ranks: any; local.

    Raises:
        NotFoundError: no `.metadata`.
        FormatError: `.metadata` is not what stock DCP writes.
        IntegrityError: an object is missing or too short.
    """
    where = f"{storage.url}: {METADATA}"
    info = storage.stat(METADATA)
    if info.size_bytes > LIMIT:  # before anything is allocated
        raise FormatError(f"{where}: {info.size_bytes} bytes are too many for a .metadata", where=where)
    metadata = read_foreign_metadata(storage.get(METADATA), where)
    sizes = {one.key: one.size_bytes for one in storage.list("")}
    used: set[str] = set()
    for index, place in metadata.storage_data.items():
        name, end = place.relative_path, place.offset + place.length
        if name not in sizes:
            raise IntegrityError(f"{storage.url}: {name}, which holds {index.fqn!r}, is missing", where=name)
        if end > sizes[name]:
            raise IntegrityError(
                f"{storage.url}: {name} has {sizes[name]} bytes, but {index.fqn!r} should end at {end}", where=name
            )
        used.add(name)
    state = SavedState(
        step=0,
        world=1,
        tensors={
            key: TensorSpec(entry.properties.dtype, tuple(entry.size))
            for key, entry in metadata.state_dict_metadata.items()
            if isinstance(entry, TensorStorageMetadata)
        },
        values={},
        ties={},
        tree=_tree(metadata.planner_data, where),
    )
    return ForeignCheckpoint(metadata, state, sum(sizes[name] for name in used), info.modified_s)


def foreign_state(
    checkpoint: ForeignCheckpoint, storage: Storage, wanted: Collection[str], trust: bool = False
) -> SavedState:
    """What the checkpoint holds, with the values of `wanted`; the others are None. The step is a value of that name.

    Args:
        checkpoint: as opened.
        storage: its folder.
        wanted: flat keys; those of tensors are passed over.
        trust: whether values that are refused otherwise are unpickled, which may run anything; a warning says which.

    Raises:
        RestoreError: a value is more than tensors, plain values and registered types. Names it and what is in it.
        IntegrityError: a value is damaged, or they hold more than there is: several stand for the same bytes.
    """
    values: dict[str, Any] = {}
    left = checkpoint.size_bytes
    for key, entry in checkpoint.metadata.state_dict_metadata.items():
        if isinstance(entry, BytesStorageMetadata):
            place = checkpoint.metadata.storage_data[MetadataIndex(key)]
            values[key] = None
            if key in wanted or key == "step":
                left -= place.length
                if left < 0:
                    raise _damaged(storage, key, place, "other values lie in the same bytes")
                values[key] = _value(storage, key, place, trust)
    step = values.get("step")
    return replace(checkpoint.state, values=values, step=step if type(step) is int and step >= 0 else 0)


def fill_foreign(
    scratch: dict[str, torch.Tensor],
    checkpoint: ForeignCheckpoint,
    storage: Storage,
    ranks: Ranks,
    progress: Callable[[int], None] | None = None,
) -> None:
    """Read every tensor of `scratch` from the checkpoint, in place. Nothing can tell whether its bytes are those saved.

    Raises:
        RestoreError: on all ranks, the same. `scratch` may hold anything.
        IntegrityError: a piece is damaged so that it cannot be read.

    Ranks: all; collective on the data group.
    Blocks: until all ranks have read.
    """
    dcp.load(scratch, ForeignReader(storage, checkpoint.metadata, ranks, progress), Loader(), ranks)


class ForeignReader(ParallelReader):
    """Reads pieces that plain DCP saved. Holds one piece at a time per thread.

    Args:
        storage: the checkpoint's folder.
        metadata: checked.
        ranks: that read together.
        progress: called with the number of bytes of each finished read.
    """

    def __init__(
        self, storage: Storage, metadata: Metadata, ranks: Ranks, progress: Callable[[int], None] | None = None
    ) -> None:
        super().__init__(storage, ranks, progress)
        self._metadata = metadata

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        """What was read and checked before; nothing is unpickled here."""
        return self._metadata

    def tasks(self, plan: LoadPlan, planner: LoadPlanner) -> Iterator[Callable[[], None]]:
        """Pieces, each once however many items want a part of it."""
        pieces: dict[MetadataIndex, list[ReadItem]] = {}
        for item in plan.items:
            pieces.setdefault(item.storage_index, []).append(item)
        for items in pieces.values():
            yield partial(self._fetch, items, planner)

    def _fetch(self, items: list[ReadItem], planner: LoadPlanner) -> None:
        index = items[0].storage_index
        saved = self._metadata.state_dict_metadata[index.fqn]
        assert isinstance(saved, TensorStorageMetadata)
        assert index.index is not None
        chunk = saved.chunks[index.index]
        place = self._metadata.storage_data[index]
        size_bytes = chunk.sizes.numel() * saved.properties.dtype.itemsize
        piece = _load(self._storage, index.fqn, place, size_bytes + _AROUND, types=False)
        if type(piece) not in (torch.Tensor, torch.nn.Parameter) or piece.layout is not torch.strided:
            raise _damaged(self._storage, index.fqn, place, f"there is a {type(piece).__name__}, no plain tensor")
        if (piece.dtype, piece.shape) != (saved.properties.dtype, chunk.sizes):
            found, expected = f"{piece.dtype} {[*piece.shape]}", f"{saved.properties.dtype} {[*chunk.sizes]}"
            raise _damaged(self._storage, index.fqn, place, f"there is {found}, not {expected}")
        with torch.no_grad():
            for item in items:
                part = piece.detach()
                for dim, (start, length) in enumerate(zip(item.storage_offsets, item.lengths, strict=True)):
                    part = part.narrow(dim, start, length)
                planner.resolve_tensor(item).copy_(part)
        self._progress(place.length)


def _value(storage: Storage, key: str, place: Any, trust: bool) -> Any:
    def trusted(names: str) -> None:
        _log.warning(
            "unpickling a value that may run anything, because trust=True: %s in %s url=%s", names, key, storage.url
        )

    return _load(storage, key, place, trusted=trusted if trust else None)


def _load(
    storage: Storage,
    key: str,
    place: Any,
    limit: int = VALUE_LIMIT,
    *,
    types: bool = True,
    trusted: Callable[[str], None] | None = None,
) -> Any:
    """The tensor or value that `torch.save` wrote there, in no more than `limit` bytes; see `load_saved`."""
    if place.length > limit:  # before anything is allocated
        raise _damaged(storage, key, place, f"{place.length} bytes are too many for it, {limit} are the most")
    stream = io.BytesIO(bytes(place.length))
    with stream.getbuffer() as view:
        storage.read_into(place.relative_path, [(place.offset, view)])
    try:
        return load_saved(stream, types, trusted)
    except pickle.UnpicklingError as error:
        raise RestoreError(
            f"{storage.url}: {key!r} holds more than tensors and plain values ({contents(stream)}), and making that "
            f"would run code of whoever wrote it. It was not made. Leave it out (exclude=, --only, --match); or "
            f"register its type with resilio.safe_types.register; or say trust=True (--trust), which runs whatever is "
            f"in it",
            key=key,
        ) from error
    except (RestoreError, IntegrityError):
        raise
    except Exception as error:
        raise _damaged(storage, key, place, f"{type(error).__name__}: {str(error)[:300]}") from error


def _damaged(storage: Storage, key: str, place: Any, problem: str) -> IntegrityError:
    where = f"{place.relative_path} at byte {place.offset}"
    return IntegrityError(f"{storage.url}: {key!r} in {where} cannot be read: {problem}", key=key, where=where)


# ------------------------------------------------------------------------------------------------------- nested state


def _tree(paths: dict[str, tuple[str | int, ...]], where: str) -> dict[str, Any]:
    """Nested state with a `Ref` at each path; numbers are places in a list."""
    root: dict[Any, Any] = {}
    for key, path in paths.items():
        node: Any = root
        for part in path[:-1]:
            node = node.setdefault(part, {})
            if isinstance(node, Ref):
                raise FormatError(f"{where}: {key!r} lies below {node.key!r}, which is no container", where=where)
        if path[-1] in node:
            raise FormatError(f"{where}: {key!r} is a container and is none", where=where)
        node[path[-1]] = Ref(key)
    tree: dict[str, Any] = _with_lists(root, where)
    return tree


def _with_lists(node: Any, where: str) -> Any:
    if isinstance(node, Ref):
        return node
    below = {part: _with_lists(child, where) for part, child in node.items()}
    if not any(isinstance(part, int) for part in below):
        if isinstance(below.get("param_groups"), list):
            below.setdefault("state", {})  # DCP drops empty dicts: an optimizer without state is one still
        return below
    if not all(isinstance(part, int) for part in below):
        raise FormatError(f"{where}: a container has names and places", where=where)
    count = max(below) + 1
    if count > 2 * len(below) + _SPARE_HOLES:
        raise FormatError(f"{where}: a list of {count} has {len(below)} places filled", where=where)
    return [below.get(place, {}) for place in range(count)]  # what is missing was an empty dict
