"""Staging: the copy that lets training go on while the old values are written."""

from __future__ import annotations

from typing import Any

import torch
from torch.distributed.checkpoint.staging import AsyncStager

from ..errors import SaveError
from ..ranks import portable
from ..state.flat_shard import FlatShard
from . import dcp
from .plan import FAILED, local_tensor

__all__ = ["Stager"]


class Stager(AsyncStager):
    """Copies every tensor into host buffers that the next save uses again.

    Memory that was touched before takes a copy at ten times the speed of fresh pages (measured: 15 against 1.3 GB/s),
    so the buffers live as long as the manager. They belong to one save at a time: the engine settles a save before it
    stages the next, or a later step would show in an earlier checkpoint.

    Blocks: `stage` returns when every value is copied.
    """

    _synchronize_after_execute = False

    def __init__(self) -> None:
        self._buffers: dict[str, torch.Tensor] = {}

    def stage(self, state_dict: dict[str, Any]) -> dict[str, Any]:
        """Flat key -> host copy of this rank's part, row-major; values as they are, capture copied them."""
        try:
            return {dcp.ALL: self._copies(state_dict[dcp.ALL])}
        except Exception as error:  # noqa: BLE001  told to all ranks by the planner
            # Raised here, it would end this rank's save alone and leave the others waiting inside DCP for its plan.
            return {dcp.ALL: {FAILED: portable(error, SaveError)}}

    def _copies(self, state_dict: dict[str, Any]) -> dict[str, Any]:
        staged: dict[str, Any] = {}
        buffers: dict[str, torch.Tensor] = {}
        for key, value in state_dict.items():
            if not isinstance(value, torch.Tensor):
                staged[key] = value
                continue
            local = local_tensor(value)
            buffer = self._buffers.get(key)
            if buffer is None or buffer.shape != local.shape or buffer.dtype != local.dtype:
                with torch.inference_mode(False):  # a buffer made in inference mode cannot be written outside of it
                    buffer = torch.empty(local.shape, dtype=local.dtype, device="cpu")
            buffers[key] = buffer.copy_(local)
            staged[key] = value.like(buffer) if isinstance(value, FlatShard) else buffer
        self._buffers = buffers  # what the state no longer has is given back
        return staged

    def synchronize_staging(self) -> None:
        """Nothing to wait for: `stage` blocks."""

    def close(self) -> None:
        """Give the buffers back."""
        self._buffers = {}
