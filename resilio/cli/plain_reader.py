"""Tensors and values of a plain DCP folder, as `diff` and `export` take them from a checkpoint of ours.

A tensor is read whole, since torch.save has no smaller part, and its bytes are taken as they are.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

from ..records.manifest import ITEMSIZE, PlacedPiece, SavedTensor
from ..records.tensors import WORDS, Slab, slabs
from ..records.values import encode_value
from ..storage.base import Storage

if TYPE_CHECKING:
    from ..engine import ForeignCheckpoint

__all__ = ["PlainManifest", "PlainReader"]


@dataclass(frozen=True)
class PlainManifest:
    """What it holds; see `Held`."""

    tensors: dict[str, SavedTensor]
    values: dict[str, Any]
    tree: Any
    ties: dict[str, str] = field(default_factory=dict)


class PlainReader:
    """Reads one plain DCP checkpoint.

    Args:
        storage: its folder.
        checkpoint: as opened.
        wanted: which values to read: one that is more than tensors and plain values is refused, so leave it out.
        trust: whether to unpickle it instead, which may run anything.

    Raises:
        RestoreError: there is such a value among them.
    """

    def __init__(
        self, storage: Storage, checkpoint: ForeignCheckpoint, wanted: Callable[[str], bool], trust: bool = False
    ) -> None:
        from ..engine import foreign_state
        from ..state.flat import Ref

        self.storage = storage
        self._checkpoint = checkpoint
        self._lock = threading.Lock()
        self._last: tuple[str, np.ndarray[Any, Any]] | None = None
        tensors = {
            key: SavedTensor(str(spec.dtype).removeprefix("torch."), tuple(spec.shape), None, ())
            for key, spec in checkpoint.state.tensors.items()
        }
        others = {key for key in checkpoint.metadata.state_dict_metadata if key not in tensors and wanted(key)}
        values = foreign_state(checkpoint, storage, others, trust).values
        self.manifest = PlainManifest(
            tensors,
            {key: encode_value(values[key], key) for key in sorted(others)},
            encode_value(checkpoint.state.tree, "tree", Ref),
        )

    def stream(self, name: str) -> Iterator[np.ndarray[Any, Any]]:
        """The slabs of a tensor, in order, as words of its item size.

        Raises:
            IntegrityError: it cannot be read.
        """
        tensor = self.manifest.tensors[name]
        return (self.slab(name, slab) for slab in slabs(tensor.shape, ITEMSIZE[tensor.dtype]))

    def slab(self, name: str, slab: Slab) -> np.ndarray[Any, Any]:
        """One box of a tensor. Raises as `stream` does."""
        with self._lock:  # one tensor in memory, however many ask
            if self._last is None or self._last[0] != name:
                self._last = None
                self._last = name, self._whole(name)
            whole = self._last[1]
        place: Any = (*(slice(o, o + n) for o, n in zip(*slab, strict=True)), ...)
        return np.ascontiguousarray(whole[place]).reshape(slab[1])

    def blocks(self, placed: PlacedPiece, first: int, last: int, name: str) -> np.ndarray[Any, Any]:
        """There are none."""
        raise NotImplementedError

    def digests(self, placed: PlacedPiece) -> memoryview:
        """There are none."""
        raise NotImplementedError

    def _whole(self, name: str) -> np.ndarray[Any, Any]:
        import torch

        from ..engine import fill_foreign
        from ..ranks import DEFAULT_TIMEOUT_S, Ranks

        saved = self.manifest.tensors[name]
        tensor = torch.empty(saved.shape, dtype=getattr(torch, saved.dtype))
        ranks = Ranks(DEFAULT_TIMEOUT_S)
        try:
            fill_foreign({name: tensor}, self._checkpoint, self.storage, ranks)
        finally:
            ranks.close()
        raw: np.ndarray[Any, Any] = tensor.reshape(-1).view(torch.uint8).numpy()
        words: np.ndarray[Any, Any] = raw.view(WORDS[ITEMSIZE[saved.dtype]]).reshape(saved.shape)
        return words
