"""The two gloo groups of a manager: made, cut off when somebody is missing, made anew, given back without hanging.

The only file of this room that touches names of c10d that are not public. Each use says what the public surface lacks.
"""

from __future__ import annotations

import ctypes
import logging
from datetime import timedelta
from typing import Any

import torch.distributed as dist
from torch.distributed.distributed_c10d import (
    PrefixStore,
    Store,
    _get_default_store,  # that of the job's own rendezvous: another would need a port that all ranks know
    _set_pg_timeout,  # a timeout is public only where a group is made
)

__all__ = ["Groups", "own_store"]

_log = logging.getLogger("resilio")


def own_store(place: str) -> Store:
    """A client of the job's store for what lies under `place`: one that is asked by two threads holds each up."""
    store: Any = _get_default_store()
    return PrefixStore(place, store.clone())


class Groups:
    """`control` is used by the main thread alone, `data` by the saving thread alone.

    Sharing one would let a save in the background meet the training loop's collectives in another order on another
    rank, which deadlocks both.

    Args:
        timeout_s: how long a collective waits for a rank.

    Ranks: all; collective, as the making of a process group is.
    """

    def __init__(self, timeout_s: float) -> None:
        self._timeout = timedelta(seconds=timeout_s)
        self.broken = False  # a rank was missing from a collective: not to be used before `renew`
        self.control, self.data = self._make()

    def cut(self) -> None:
        """Let no collective wait any more: somebody is missing, and it would fail only after the whole timeout."""
        self.broken = True
        for group in (self.control, self.data):
            try:
                _set_pg_timeout(timedelta(milliseconds=10), group)
            except (ValueError, RuntimeError) as error:  # the job tore its groups down before us
                _log.debug("cutting a process group off: %s", error)

    def renew(self) -> None:
        """Make both anew. Ranks: all; collective."""
        self.close()
        self.control, self.data = self._make()
        self.broken = False

    def close(self) -> None:
        """Give them back. Local: a group need not be left by all at once."""
        for group in (self.control, self.data):
            if self.broken:
                # Its destructor waits for operations that a missing rank never ends, and so would the process's exit.
                ctypes.pythonapi.Py_IncRef(ctypes.py_object(group))
            if dist.is_initialized():
                try:
                    dist.destroy_process_group(group)
                except (ValueError, RuntimeError) as error:  # the job tore its groups down before us
                    _log.debug("closing a process group: %s", error)

    def _make(self) -> tuple[dist.ProcessGroup, dist.ProcessGroup]:
        control = dist.new_group(backend="gloo", timeout=self._timeout, group_desc="resilio-control")
        data = dist.new_group(backend="gloo", timeout=self._timeout, group_desc="resilio-data")
        return control, data
