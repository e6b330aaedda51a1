"""Staging: the copy that lets training go on while the old values are written."""

from __future__ import annotations

import os
import threading
import weakref
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

import torch
from torch.distributed.checkpoint.staging import AsyncStager
from torch.optim.optimizer import register_optimizer_step_pre_hook

from ..errors import SaveError
from ..ranks import portable
from ..state.flat_shard import FlatShard
from . import dcp, host_memory
from .plan import FAILED
from .structure import local_tensor

__all__ = ["Stager"]

_SAMPLE = 8  # elements at either end of a tensor


_all: weakref.WeakSet[Stager] = weakref.WeakSet()


def _in_child() -> None:
    """After a fork: the threads that copy are the parent's, so an optimizer of the child waits for nothing."""
    for stager in _all:
        stager._copying = None


os.register_at_fork(after_in_child=_in_child)


class Stager(AsyncStager):
    """Copies every tensor into host buffers that the next save uses again.

    Memory that was touched before takes a copy at ten times the speed of fresh pages (measured: 15 against 1.3 GB/s),
    so the buffers live as long as the manager. They belong to one save at a time: the engine settles a save before it
    stages the next, or a later step would show in an earlier checkpoint.

    What only an optimizer's step changes is copied by a thread while the next forward and backward run, and every
    optimizer of the process waits for that before it steps, whether it is known here or not. Should anything else write
    into such a tensor meanwhile, samples that were taken before show it, and the save fails.

    Args:
        overlap: whether any copy may end after `stage` has returned.

    Blocks: `stage` returns when every value is copied that something else than an optimizer may change.
    """

    _synchronize_after_execute = False

    def __init__(self, *, overlap: bool = False) -> None:
        self._buffers: dict[str, torch.Tensor] = {}
        self._late: frozenset[str] = frozenset()
        self._copying: threading.Event | None = None  # set when the copy under way has ended
        self._hook: Any = None
        if overlap:
            _all.add(self)
            # From the start, not with the first save: an optimizer compiled before that would have to be compiled anew.
            self._hook = register_optimizer_step_pre_hook(_waiter(self))
            weakref.finalize(self, self._hook.remove)

    def expect(self, late: frozenset[str]) -> None:
        """Say which flat keys of what is staged next may be copied late, see `Structure.late`."""
        self._late = late if self._hook is not None else frozenset()

    def stage(self, state_dict: dict[str, Any]) -> dict[str, Any] | Future[dict[str, Any]]:
        """Flat key -> host copy of this rank's part, row-major; values as they are, capture copied them."""
        try:
            late = _Late()
            staged = self._copies(state_dict[dcp.ALL], late)
            late.sample()
        except Exception as error:  # noqa: BLE001  told to all ranks by the planner
            # Raised here, it would end this rank's save alone and leave the others waiting inside DCP for its plan.
            return _failed(error)
        if not late:
            return {dcp.ALL: staged}
        done: Future[dict[str, Any]] = Future()

        # Not the thread itself: `join` takes one for ended that a Ctrl-C kept it from waiting for.
        ended = self._copying = threading.Event()

        def copy() -> None:
            result = {dcp.ALL: staged}
            try:
                late.copy()
            except BaseException as error:  # noqa: BLE001  as above
                result = _failed(error)
            ended.set()
            done.set_result(result)

        try:
            # Not a daemon: at the end of the process the save in flight is waited for, and it waits for this.
            threading.Thread(target=copy, name="resilio-stage").start()
        except RuntimeError:  # no thread to be had
            copy()
        except BaseException:  # a Ctrl-C: the save is off, and whether the thread runs is not known
            self._buffers = {}  # it may write to these
            ended.set()  # no optimizer may wait for ever
            raise
        return done

    def wait(self) -> None:
        """Wait until everything is copied, and state may change in any way."""
        copying = self._copying
        if copying is not None:
            copying.wait()

    def _copies(self, state_dict: dict[str, Any], late: _Late) -> dict[str, Any]:
        staged: dict[str, Any] = {}
        buffers: dict[str, torch.Tensor] = {}
        parts = {key: local_tensor(value) for key, value in state_dict.items() if isinstance(value, torch.Tensor)}
        missing = {key for key, local in parts.items() if self._lacks(key, local)}
        _refuse_without_memory(sum(parts[key].nbytes for key in missing))
        now: tuple[list[torch.Tensor], list[torch.Tensor]] = [], []
        for key, value in state_dict.items():
            local = parts.get(key)
            if local is None:
                staged[key] = value
                continue
            if key in missing:
                with torch.inference_mode(False):  # a buffer made in inference mode cannot be written outside of it
                    buffer = torch.empty(local.shape, dtype=local.dtype, device="cpu")
            else:
                buffer = self._buffers[key]
            buffers[key] = buffer
            if key in self._late:
                late.add(key, local, buffer)
            else:
                now[0].append(buffer)
                now[1].append(local)
            staged[key] = value.like(buffer) if isinstance(value, FlatShard) else buffer
        if now[0]:
            torch._foreach_copy_(*now)  # in one call: most are small
        self._buffers = buffers  # what the state no longer has is given back
        return staged

    def _lacks(self, key: str, local: torch.Tensor) -> bool:
        """Whether there is no buffer for it yet."""
        buffer = self._buffers.get(key)
        return buffer is None or buffer.shape != local.shape or buffer.dtype != local.dtype

    def lend(self) -> dict[str, torch.Tensor]:
        """Flat key -> buffer, given away for a restore to read into. No save may be in flight."""
        self.wait()
        buffers, self._buffers = self._buffers, {}
        return buffers

    def keep(self, buffers: dict[str, torch.Tensor]) -> None:
        """Take host memory that a restore has touched, so that the next save need not. Nobody else may hold it."""
        self._buffers = {key: buffer for key, buffer in buffers.items() if not buffer.is_inference()}

    def synchronize_staging(self) -> None:
        """Nothing to wait for: DCP takes the future of `stage`."""

    def close(self) -> None:
        """Give the buffers back, and let optimizers be. Waits for a copy under way."""
        self.wait()
        self._buffers = {}
        if self._hook is not None:
            self._hook.remove()
            self._hook = None


class _Late:
    """Tensors that are copied later, and what samples of them were at first."""

    def __init__(self) -> None:
        self._keys: list[str] = []
        self._live: list[torch.Tensor] = []
        self._buffers: list[torch.Tensor] = []
        self._samples: list[torch.Tensor] = []

    def __bool__(self) -> bool:
        return bool(self._keys)

    def add(self, key: str, live: torch.Tensor, buffer: torch.Tensor) -> None:
        self._keys.append(key)
        self._live.append(live)
        self._buffers.append(buffer)

    def sample(self) -> None:
        """Take them. In one call: each costs more than what it copies."""
        ends = [end for tensor in self._live for end in _ends(tensor)]
        self._samples = [torch.empty_like(end, memory_format=torch.contiguous_format) for end in ends]
        if ends:
            torch._foreach_copy_(self._samples, ends)

    def copy(self) -> None:
        """Copy all.

        Raises:
            SaveError: a tensor is another than when it was sampled. Names it.
        """
        with torch.inference_mode(False), torch.no_grad():
            for live, buffer in zip(self._live, self._buffers, strict=True):
                buffer.copy_(live)
        ends = [end for buffer in self._buffers for end in _ends(buffer)]
        for index, (copied, sampled) in enumerate(zip(ends, self._samples, strict=True)):
            if not torch.equal(_bits(copied), _bits(sampled)):
                raise SaveError(
                    f"{self._keys[index // 2]!r} was changed while it was copied, and not by an optimizer's step, "
                    "which waits for the copy: what was saved would be a mixture. Change it before the save or after "
                    "the next step of the optimizer, or pass stage='block' to the CheckpointManager",
                    key=self._keys[index // 2],
                )


def _refuse_without_memory(needed_bytes: int) -> None:
    """Raise rather than be killed, where the kernel says how much memory is left."""
    available = host_memory.available_bytes() if needed_bytes >= host_memory.WORTH_ASKING else None
    if available is not None and needed_bytes > available:
        raise SaveError(
            f"no host memory to copy the state: it takes {needed_bytes:,} bytes, and {available:,} are available. "
            "Use mode='sync', which writes without a copy, or let other processes use less. Nothing was written",
            needed_bytes=needed_bytes,
            available_bytes=available,
            cause="MemoryError",
        )


def _ends(tensor: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Views of the first and the last few elements."""
    if tensor.is_contiguous():
        count = min(_SAMPLE, tensor.numel())
        begin = tensor.storage_offset()
        return (
            tensor.as_strided((count,), (1,), begin),
            tensor.as_strided((count,), (1,), begin + tensor.numel() - count),
        )
    first = last = tensor
    while first.dim() > 1:
        first, last = first[0], last[-1]
    return first[:_SAMPLE], last[-_SAMPLE:]


def _bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.contiguous().view(torch.uint8)  # NaN is equal to itself


def _failed(error: BaseException) -> dict[str, Any]:
    return {dcp.ALL: {FAILED: portable(error, SaveError)}}


def _waiter(stager: Stager) -> Callable[..., None]:
    """The hook of optimizers, which must not keep a stager alive."""
    known = weakref.ref(stager)

    def wait(*_: Any) -> None:
        found = known()
        if found is not None:
            found.wait()

    return wait
