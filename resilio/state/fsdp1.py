"""FSDP1 (`FullyShardedDataParallel`): the user's parameters inside its flat ones, taken where they lie.

FSDP1 lays the parameters of a unit end to end and gives each rank a run of the whole, cut anywhere. Its own
`state_dict()` gathers everything and copies it; here each parameter is a `FlatShard` over the rank's own memory: no
collective, no copy, nothing of the module touched.

The names below with an underscore are FSDP1's own, as of torch 2.13; FSDP1 is frozen. Read: handles and their layout.
Called: `reshard` after a restore.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from ..errors import CaptureError, RestoreError
from .compare import same_nested
from .flat_shard import FlatShard
from .model import ModuleView, is_torchs
from .names import Slot, places
from .tree import text_of

__all__ = ["FSDP1View", "Original", "handles_of", "view_fsdp1"]


@dataclass(eq=False)
class Original:
    """A parameter as the user wrote it, inside a flat one.

    Attributes:
        name: its first.
        holder: what optimizers have for it: the parameter, or with ``use_orig_params=False`` the flat one.
        flat: whether that is the flat one.
        sharded: whether ranks hold runs; else (``NO_SHARD``) each holds all.
        offset: of its elements in the rank's flat memory.
        count: of its elements there.
        flat_count: size of that memory, padding included.
        start: number of the first of them, in memory order.
        shape: of the whole.
        stride: of the whole.
        order: memory order, None if row-major.
        tensor: stands for it: as an entry of the model, and as a parameter of an optimizer.
    """

    name: str
    holder: nn.Parameter
    flat: bool
    sharded: bool
    offset: int
    count: int
    flat_count: int
    start: int
    shape: torch.Size
    stride: tuple[int, ...]
    order: tuple[int, ...] | None
    tensor: torch.Tensor = field(init=False)

    @property
    def absent(self) -> bool:
        """Whether an optimizer here would step it, but for this rank's lack of any element of it."""
        return self.sharded and not self.flat and self.count == 0

    def cut(self, flat: torch.Tensor) -> torch.Tensor:
        """Its part of a tensor that lies like the flat parameter."""
        return self.of_run(flat[self.offset : self.offset + self.count])

    def of_run(self, run: torch.Tensor) -> torch.Tensor:
        """Elements of it, one dim, as a part of the whole."""
        if self.sharded:
            return FlatShard(run, self.start, self.shape, self.order)
        return run.as_strided(self.shape, self.stride)

    def entry(self, value: Any, where: str) -> Any:
        """What an optimizer keeps for `holder`, as it is for this parameter."""
        if not isinstance(value, torch.Tensor):
            return copy.deepcopy(value) if self.flat else value
        if value.dim() == 0:
            return value.detach().clone() if self.flat else value  # else all would be saved as one
        if self.flat and value.shape == (self.flat_count,):
            return self.cut(value)
        if not self.flat and not self.sharded:
            return value
        if not self.flat and value.shape == (self.count,):
            return self.of_run(value)
        raise CaptureError(
            f"{where} has the shape {[*value.shape]}, which is neither one number nor one for each element of the "
            "parameter that FSDP1 flattened; it cannot be saved. Shard the model with `fully_shard` (FSDP2)",
            key=where,
        )


@dataclass
class FSDP1View(ModuleView):
    """A module with FSDP1 units in it.

    Attributes:
        originals: the parameters that lie in flat ones, in the order of the modules.
        low: `id` of a buffer as it is saved -> the live one, which FSDP1 keeps in fewer bits (``buffer_dtype``).
        extras: name of an extra state -> its module.
        handles: FSDP1's, one for each unit.
    """

    originals: list[Original]
    low: dict[int, torch.Tensor]
    extras: dict[str, nn.Module]
    handles: list[Any]

    def loads_itself(self, name: str) -> bool:
        """Extra state alone."""
        return name in self.extras

    def target(self, shown: torch.Tensor) -> torch.Tensor:
        """The live tensor, maybe of fewer bits."""
        return self.low.get(id(shown), shown)

    def written(self) -> None:
        """Let go of parameters that a forward has gathered and left so: they are those of before."""
        for handle in self.handles:
            lazy = getattr(handle.flat_param, "_local_shard", None) is not None
            if lazy and handle.uses_sharded_strategy and not handle.needs_unshard():
                handle.reshard(True)
                handle.post_reshard()
                handle._prefetched = False

    def load(self, saved: dict[str, Any]) -> None:
        """Set extra states; the rest is written in place.

        Raises:
            RestoreError: a module does not show what it was given.
        """
        for name, value in saved.items():
            module = self.extras[name]
            module.set_extra_state(copy.deepcopy(value))
            if not same_nested(module.get_extra_state(), value):
                raise RestoreError(
                    f"{name}: set_extra_state() of {type(module).__qualname__} left something else than was saved",
                    key=name,
                )

    def remember(self) -> Callable[[], None]:
        """As above, of the extra states."""
        before = {name: copy.deepcopy(module.get_extra_state()) for name, module in self.extras.items()}

        def undo() -> None:
            for name, module in self.extras.items():
                module.set_extra_state(before[name])

        return undo


# ------------------------------------------------------------------------------------------------------------- modules


def view_fsdp1(module: nn.Module, what: str) -> FSDP1View:
    """Look at `module` without changing it, and without a collective.

    Raises:
        CaptureError: state of it has no exact form outside of FSDP1. Names it.
    """
    found = list(places(module))
    prefixes: dict[int, list[str]] = {}
    for prefix, part in found:
        prefixes.setdefault(id(part), []).append(prefix)
        _refuse_own_state(part, f"{what}.{prefix}".rstrip("."))
    handles = handles_of(module)
    managed: dict[int, dict[str, Original]] = {}
    for handle in handles:
        _add_originals(handle, prefixes, managed, what)
    dtypes = {id(buffer): dtype for part in _units(module) for buffer, dtype in _buffers_as_built(part)}
    entries: dict[str, Any] = {}
    slots: dict[str, Slot] = {}
    hidden: dict[str, Slot] = {}
    low: dict[int, torch.Tensor] = {}
    as_saved: dict[int, torch.Tensor] = {}
    extras: dict[str, nn.Module] = {}
    in_order: dict[int, Original] = {}
    for prefix, part in found:
        originals = managed.get(id(part), {})
        for name in dict.fromkeys([*part._parameters, *originals]):
            if name in originals:
                in_order[id(originals[name])] = originals[name]
            tensor = originals[name].tensor if name in originals else part._parameters[name]
            if tensor is not None and not hasattr(tensor, "_is_flat_param"):
                slots[prefix + name] = Slot(prefix + name, tensor, True, True)
                entries[prefix + name] = tensor
        for name, buffer in part._buffers.items():
            if buffer is None:
                continue
            if id(buffer) not in as_saved:
                as_saved[id(buffer)] = buffer.to(dtypes.get(id(buffer), buffer.dtype))
                low[id(as_saved[id(buffer)])] = buffer
            shown = as_saved[id(buffer)]
            slot = Slot(prefix + name, shown, False, name not in part._non_persistent_buffers_set)
            (slots if slot.persistent else hidden)[slot.name] = slot
            if slot.persistent:
                entries[slot.name] = shown
        if type(part).get_extra_state is not nn.Module.get_extra_state:
            extras[f"{prefix}_extra_state"] = part
            entries[f"{prefix}_extra_state"] = _extra_state(part, f"{what}.{prefix}_extra_state")
    return FSDP1View(
        module=module,
        entries=entries,
        raw={},
        slots=slots,
        hidden=hidden,
        parameters={slot.name: slot.tensor for slot in slots.values() if slot.is_parameter},
        stock=True,
        originals=list(in_order.values()),
        low=low,
        extras=extras,
        handles=handles,
    )


def _units(module: nn.Module) -> list[Any]:
    from torch.distributed.fsdp import FullyShardedDataParallel

    return [part for part in module.modules() if issubclass(type(part), FullyShardedDataParallel)]


def handles_of(module: nn.Module) -> list[Any]:
    """FSDP1's handle of each unit in `module`."""
    return [unit._handle for unit in _units(module) if unit._handle is not None]


def _buffers_as_built(unit: Any) -> Iterator[tuple[torch.Tensor, torch.dtype]]:
    from torch.distributed.fsdp._common_utils import clean_tensor_name

    low = unit.mixed_precision.buffer_dtype
    for name, buffer in unit.module.named_buffers() if low is not None else ():
        dtype = unit._buffer_name_to_orig_dtype.get(clean_tensor_name(name))
        if dtype is not None and buffer.dtype == low:
            yield buffer, dtype


def _extra_state(module: nn.Module, where: str) -> Any:
    try:
        return module.get_extra_state()
    except Exception as error:
        raise CaptureError(f"{where}: get_extra_state() raised {text_of(error)}", key=where) from error


def _refuse_own_state(module: nn.Module, where: str) -> None:
    """Refuse what has a word in saving or loading: it expects whole parameters in its modules."""
    cls = type(module)
    methods = (cls.state_dict, cls._save_to_state_dict, cls.load_state_dict, cls._load_from_state_dict)
    hooks = (
        *module._state_dict_pre_hooks.values(),
        *module._state_dict_hooks.values(),
        *module._load_state_dict_pre_hooks.values(),
        *module._load_state_dict_post_hooks.values(),
    )
    for one in (*methods, *hooks):
        if not is_torchs(one):
            name = getattr(getattr(one, "hook", one), "__qualname__", type(one).__qualname__)
            raise CaptureError(
                f"{where}: {cls.__qualname__} has a say in its state_dict ({name}), and under FSDP1 there are no whole "
                "parameters for it to see. Keep it in get_extra_state(), or shard the model with `fully_shard` (FSDP2)",
                key=where,
            )


def _add_originals(
    handle: Any, prefixes: dict[int, list[str]], managed: dict[int, dict[str, Original]], what: str
) -> None:
    flat = handle.flat_param
    memory = getattr(flat, "_local_shard", None)
    memory = (flat if memory is None else memory).detach()
    for index, info in enumerate(flat._param_infos):
        name = prefixes[id(info.module)][0] + info.param_name
        where = f"{what}.{name}"
        if flat._param_extensions[index] is not None:
            raise CaptureError(
                f"{where} is a DTensor inside FSDP1, which cannot be saved; use `fully_shard` (FSDP2) with tensor "
                "parallelism",
                key=where,
            )
        shape, stride = flat._shapes[index], tuple(flat._strides[index])
        part = flat._shard_param_infos[index]
        one = Original(
            name=name,
            holder=flat if flat._params is None else flat._params[index],
            flat=flat._params is None,
            sharded=handle.uses_sharded_strategy,
            offset=part.offset_in_shard if part.in_shard else 0,
            count=part.numel_in_shard if part.in_shard else 0,
            flat_count=memory.numel(),
            start=part.intra_param_start_idx if part.in_shard else 0,
            shape=shape,
            stride=stride,
            order=None if flat._contiguities[index] else _order(shape, stride, where),
        )
        one.tensor = one.cut(memory)
        if not one.flat and part.in_shard:
            _refuse_replaced(handle, one, info, memory, where)
        managed.setdefault(id(info.module), {})[info.param_name] = one
    for shared in flat._shared_param_infos:
        first = managed[id(shared.prim_module)][shared.prim_param_name]
        managed.setdefault(id(shared.module), {})[shared.param_name] = first


def _order(shape: torch.Size, stride: tuple[int, ...], where: str) -> tuple[int, ...]:
    order = tuple(sorted(range(len(shape)), key=lambda dim: (-stride[dim], dim)))
    reach = math.prod(shape)
    for dim in order:
        reach //= shape[dim]
        if shape[dim] > 1 and stride[dim] != reach:
            raise CaptureError(f"{where} has gaps in its memory (strides {[*stride]}), which FSDP1 loses", key=where)
    return order


def _refuse_replaced(handle: Any, one: Original, info: Any, memory: torch.Tensor, where: str) -> None:
    """FSDP1 takes a parameter whose memory was replaced back at the next forward; until then it holds another value."""
    if handle._skipped_use_sharded_views or not handle.is_sharded(handle.flat_param):
        return  # after a forward without a backward other views are shown
    live = info.module._parameters.get(info.param_name)
    if live is not None and live.untyped_storage().data_ptr() != memory.untyped_storage().data_ptr():
        raise CaptureError(
            f"{where} was replaced since FSDP1 last looked (`.data =`, or a new Parameter); write into it with "
            "copy_(), or run a forward first",
            key=where,
        )
