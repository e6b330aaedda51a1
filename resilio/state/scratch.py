"""The memory that a restore reads into: who has it, and whose it is afterwards."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping

import torch

from .flat import TensorSpec
from .flat_shard import FlatShard
from .tensors import allocate, is_plain_run, local, same_layout

__all__ = ["Scratch"]

_SMALL = 1 << 16  # bytes; a tensor below is never what memory lacks


class Scratch:
    """Tensors to be filled from a checkpoint.

    Args:
        lent: live-side flat key -> row-major memory to be used where it fits.

    Attributes:
        tensors: saved flat key -> tensor.
        fresh_bytes: of host memory that was made for them.
    """

    def __init__(self, lent: Mapping[str, torch.Tensor] | None = None) -> None:
        self.tensors: dict[str, torch.Tensor] = {}
        self.fresh_bytes = 0
        self._lent = dict(lent or {})
        self._live_keys: dict[str, str] = {}
        self._asked: Counter[str] = Counter()  # how often each was asked for
        self._handed: Counter[int] = Counter()  # to what may have kept it, by `id`
        self._into: dict[str, torch.Tensor] = {}

    def make(
        self,
        key: str,
        live_key: str,
        spec: TensorSpec,
        like: torch.Tensor | None,
        order: tuple[int, ...] | None,
        device: torch.device | None,
    ) -> torch.Tensor:
        """One more tensor for `key`, which is kept if it is the first; see `allocate`."""
        self._asked[key] += 1
        lent = None if key in self.tensors else self._lent.pop(live_key, None)
        new = allocate(spec, like, order=order, device=device, lent=lent)
        if key not in self.tensors:
            self.tensors[key], self._live_keys[key] = new, live_key
            inner = local(new)
            self.fresh_bytes += inner.nbytes if inner is not lent and inner.device.type == "cpu" else 0
        return new

    def hand(self, key: str) -> torch.Tensor:
        """That of `key`, to what may keep it."""
        tensor = self.tensors[key]
        self._handed[id(tensor)] += 1
        return tensor

    def copied(self, tensor: torch.Tensor) -> None:
        """Note that `tensor`, handed out before, was only copied from."""
        self._handed[id(tensor)] -= 1

    def goes_into(self, key: str, live: torch.Tensor) -> None:
        """Note that what was asked for under `key` is there to be copied into `live`."""
        self._into[key] = live

    def in_place(self) -> dict[str, torch.Tensor]:
        """Give up each tensor that is only copied into a live one of the same layout; that one stands for it.

        Returns: saved flat key -> live tensor. Nothing may look at them as what was saved until they are filled.
        """
        places = Counter(local(live).data_ptr() for live in self._into.values())
        found = {
            key: live.detach()
            for key, live in self._into.items()
            if self._asked[key] == 1
            and places[local(live).data_ptr()] == 1
            and same_layout(live, self.tensors[key])
            and is_plain_run(local(live))
            and not isinstance(live, FlatShard)
            and local(live).nbytes >= _SMALL
        }
        self.tensors.update(found)
        for key in found:
            self._live_keys.pop(key)
        return found

    def spare(self) -> dict[str, torch.Tensor]:
        """Live-side key -> row-major host memory that nothing else has: it was only copied from, or not used yet."""
        free = {
            live_key: local(self.tensors[key])
            for key, live_key in self._live_keys.items()
            if not self._handed[id(self.tensors[key])]
        }
        return {key: one for key, one in free.items() if one.device.type == "cpu" and one.is_contiguous()}
