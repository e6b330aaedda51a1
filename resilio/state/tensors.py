"""What the state room needs to know of a single tensor: may it be saved, how does it lie, how is one made like it."""

from __future__ import annotations

import ctypes
import os
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor

import torch
from torch.distributed.tensor import DTensor, Partial

from .flat import TensorSpec
from .flat_shard import FlatShard

__all__ = [
    "SHARE",
    "allocate",
    "expanded",
    "fits",
    "is_plain_run",
    "local",
    "memory_order",
    "put",
    "put_all",
    "refusal",
    "same_bytes",
    "same_layout",
    "same_memory",
]

SHARE = "has elements that share memory (expand)"

_THREADS = 4  # memory is no faster with more
_WORTH_THREADS = 1 << 24  # bytes

_PLAIN = (torch.Tensor, torch.nn.Parameter)


def local(tensor: torch.Tensor) -> torch.Tensor:
    """The plain tensor with this rank's elements."""
    if isinstance(tensor, FlatShard):
        return tensor.run
    return tensor._local_tensor if isinstance(tensor, DTensor) else tensor


def refusal(tensor: torch.Tensor) -> str | None:
    """Why `tensor` cannot be saved exactly and what to do about it, or None if it can.

    Tensor subclasses keep data where a copy of the outer tensor does not reach: taken for plain ones they are saved as
    garbage, so all but `DTensor` are refused.
    """
    inner = local(tensor)
    if inner.is_nested:
        return "is a nested tensor; save the list of its parts, `unbind()`"
    for part in (tensor, inner):
        if type(part) not in (*_PLAIN, DTensor, FlatShard) or (part is inner and isinstance(part, DTensor)):
            return (
                f"is a {type(part).__module__}.{type(part).__qualname__}; only plain tensors and DTensor can be saved "
                "exactly. Convert it to plain tensors in state_dict()"
            )
    if inner.is_meta:
        return "is on the meta device and has no data; call `module.to_empty(device=…)` and initialise it first"
    if inner.layout is not torch.strided:
        return f"has the layout {inner.layout}; only strided tensors can be saved. Save its parts, or `to_dense()`"
    if inner.is_quantized:
        return "is a quantized tensor; save `int_repr()` and its scales instead"
    if isinstance(tensor, DTensor) and any(isinstance(placement, Partial) for placement in tensor.placements):
        return "is a DTensor with a pending reduction (Partial); redistribute it before saving"
    return None


def memory_order(tensor: torch.Tensor) -> tuple[int, ...] | None:
    """Dims from slowest to fastest in memory, or None if row-major or not dense. Of a DTensor: its local part."""
    if isinstance(tensor, FlatShard):
        return tensor.order
    inner = local(tensor)
    if inner.is_contiguous():
        return None
    strides = inner.stride()
    order = sorted(range(inner.dim()), key=lambda dim: (-strides[dim], dim))
    return tuple(order) if inner.permute(order).is_contiguous() else None


def expanded(tensor: torch.Tensor) -> bool:
    """Whether one element stands for several (`expand`), so that torch refuses to copy into it."""
    inner = local(tensor)
    return any(stride == 0 and size > 1 for stride, size in zip(inner.stride(), inner.shape, strict=True))


def put(live: torch.Tensor, saved: torch.Tensor) -> None:
    """Write this rank's elements of `saved` into `live`, in place; see `fits`."""
    x, y = local(live), local(saved)
    if is_plain_run(x) and is_plain_run(y) and x.dtype == y.dtype and x.shape == y.shape:
        _copy_bytes(x, y)
        return
    for dim, (stride, size) in enumerate(zip(x.stride(), x.shape, strict=True)):
        if stride == 0 and size > 1:
            x, y = x.narrow(dim, 0, 1), y.narrow(dim, 0, 1)
    with torch.no_grad():
        x.copy_(y)


def put_all(pairs: Iterable[tuple[torch.Tensor, torch.Tensor]]) -> None:
    """`put` each pair, several at a time; of two for one tensor the last. What is there already is left."""
    last = {id(live): (live, saved) for live, saved in pairs if not same_memory(live, saved)}
    todo = sorted(last.values(), key=lambda pair: -local(pair[0]).nbytes)
    threads = min(_THREADS, os.cpu_count() or 1)
    if threads == 1 or sum(local(live).nbytes for live, _ in todo) < _WORTH_THREADS:
        _put_each(todo)
        return
    with ThreadPoolExecutor(threads, thread_name_prefix="resilio-put") as pool:
        for done in [pool.submit(_put_each, todo[first::threads]) for first in range(threads)]:
            done.result()


def _put_each(pairs: Iterable[tuple[torch.Tensor, torch.Tensor]]) -> None:
    for live, saved in pairs:
        put(live, saved)


def is_plain_run(tensor: torch.Tensor) -> bool:
    """Whether its elements are bytes of host memory side by side, which anybody may write."""
    return (
        tensor.device.type == "cpu"
        and tensor.is_contiguous()
        and not (tensor.is_conj() or tensor.is_neg() or tensor.is_inference())
    )


def _copy_bytes(x: torch.Tensor, y: torch.Tensor) -> None:
    """`x.copy_(y)` by one thread: torch's own meet after each tensor, and wait where cores are busy (10 times as long
    on two cores shared with other jobs).
    """
    ctypes.memmove(x.data_ptr(), y.data_ptr(), x.nbytes)
    torch.autograd.graph.increment_version(x)  # a backward that is due must notice


def fits(live: torch.Tensor, saved: torch.Tensor) -> bool:
    """Whether `live` can show all of `saved`: elements of it that share memory must have been saved alike."""
    x = local(live)
    reach = 0
    for stride, size in sorted(zip(x.stride(), x.shape, strict=True)):
        if size > 1 and stride <= reach:
            twin = torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device=x.device)
            put(twin, saved)
            return same_bytes(twin, saved)
        reach += stride * (size - 1)
    return True


def _empty(
    shape: Sequence[int],
    dtype: torch.dtype,
    device: torch.device,
    order: tuple[int, ...] | None,
    lent: torch.Tensor | None,
) -> torch.Tensor:
    if order is None:
        if lent is not None and lent.shape == tuple(shape) and lent.dtype == dtype and lent.device == device:
            return lent
        return torch.empty(tuple(shape), dtype=dtype, device=device)
    back = sorted(range(len(order)), key=lambda position: order[position])
    return torch.empty([shape[dim] for dim in order], dtype=dtype, device=device).permute(back)


def allocate(
    spec: TensorSpec,
    like: torch.Tensor | None,
    *,
    order: tuple[int, ...] | None = None,
    device: torch.device | None = None,
    lent: torch.Tensor | None = None,
) -> torch.Tensor:
    """An uninitialised tensor for the saved tensor `spec`.

    Args:
        spec: dtype and shape.
        like: lies on ranks as this one does if both have the same logical shape.
        order: memory order, as in `TensorSpec.order`.
        device: if there is no `like`; CPU by default.
        lent: row-major memory, taken for this rank's elements if they lie so in it.
    """
    if isinstance(like, FlatShard) and tuple(like.shape) == spec.shape:
        return like.like(_empty(like.run.shape, spec.dtype, like.run.device, None, lent))
    if isinstance(like, DTensor) and tuple(like.shape) == spec.shape:
        # The live local part already has the right size: uneven and empty shards need no arithmetic of ours.
        inner = _empty(like._local_tensor.shape, spec.dtype, like._local_tensor.device, order, lent)
        if spec.dtype == like.dtype:
            # `from_local` takes twenty times as long to say it.
            return DTensor(inner, like._spec, requires_grad=False)  # type: ignore[no-untyped-call]
        return DTensor.from_local(
            inner, like.device_mesh, like.placements, run_check=False, shape=like.shape, stride=like.stride()
        )
    if device is None:
        device = torch.device("cpu") if like is None else local(like).device
    return _empty(spec.shape, spec.dtype, device, order, lent)


def same_memory(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Whether both show the same elements at the same place, so that writing one writes the other."""
    if (type(a) is DTensor) != (type(b) is DTensor):
        return False
    x, y = local(a), local(b)
    if type(x) not in _PLAIN or type(y) not in _PLAIN:  # of a subclass there may be neither shape nor address
        return False
    return (
        x.dtype == y.dtype
        and x.device == y.device
        and x.shape == y.shape
        and x.stride() == y.stride()
        and (x.numel() == 0 or (not x.is_meta and x.data_ptr() == y.data_ptr()))
    )


def same_layout(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Whether a copy of `b` into `a` leaves nothing of `b` behind: dtype, shape, strides, device, placement."""
    if isinstance(a, FlatShard) or isinstance(b, FlatShard):
        alike = isinstance(a, FlatShard) and isinstance(b, FlatShard) and a.lies_like(b)
        return alike and a.dtype == b.dtype and a.device == b.device
    if isinstance(a, DTensor) != isinstance(b, DTensor):
        return False
    if (
        isinstance(a, DTensor)
        and isinstance(b, DTensor)
        and (a.device_mesh != b.device_mesh or a.placements != b.placements or a.shape != b.shape)
    ):
        return False
    x, y = local(a), local(b)
    return (
        x.dtype == y.dtype
        and x.shape == y.shape
        and x.device == y.device
        and (x.stride() == y.stride() or x.numel() <= 1)
    )


def same_bytes(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Whether this rank's elements of both are equal bit for bit; NaN equals NaN of the same payload, -0 is not 0."""
    x, y = local(a).detach(), local(b).detach()
    if x.dtype != y.dtype or x.shape != y.shape:
        return False
    x, y = (t.resolve_conj().resolve_neg().contiguous().reshape(-1).view(torch.uint8) for t in (x, y.to(x.device)))
    return torch.equal(x, y)
