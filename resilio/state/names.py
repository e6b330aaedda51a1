"""Canonical names: what a parameter is called whatever wraps its module.

`torch.compile`, DDP, activation checkpointing and FSDP1 each put a module of their own around the user's, and with it a
component into every name below. Whether a component is such a wrapper's or a name the user chose is decided by the
class of the module that holds it, never by the string: a user's module may well be called `module`.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import nn

from ..errors import CaptureError

__all__ = ["Slot", "canonical_key", "places", "slots", "uses_fsdp1", "wrapper_component"]

# Where the class lives, its name, and the attribute that holds the wrapped module.
_WRAPPERS = (
    ("torch._dynamo.eval_frame", "OptimizedModule", "_orig_mod"),
    ("torch.nn.parallel.distributed", "DistributedDataParallel", "module"),
    ("torch.nn.parallel.data_parallel", "DataParallel", "module"),
    ("torch.distributed.algorithms._checkpoint.checkpoint_wrapper", "ActivationWrapper", "_checkpoint_wrapped_module"),
    ("torch.distributed.fsdp.fully_sharded_data_parallel", "FullyShardedDataParallel", "_fsdp_wrapped_module"),
)


@lru_cache(maxsize=4096)
def _wrappers_of(cls: type) -> tuple[str, ...]:
    """The attributes in which a module of this type may hold what it wraps.

    By the names of its bases: importing all of the wrappers to ask for them would take seconds. Of the type, not of the
    module, for wrappers pass attribute lookups (`__class__` too) on to what they wrap.
    """
    bases = {(base.__module__, base.__name__) for base in cls.__mro__}
    return tuple(component for home, name, component in _WRAPPERS if (home, name) in bases)


def wrapper_component(module: nn.Module) -> str | None:
    """The attribute in which `module` holds what it wraps, or None if it is no wrapper known to leave no trace."""
    for component in _wrappers_of(type(module)):  # type: ignore[arg-type]  # a class is hashable
        if component in module._modules:
            return component
    return None


def uses_fsdp1(module: nn.Module) -> bool:
    """Whether an FSDP1 wrapper is anywhere in `module`."""
    component = _WRAPPERS[-1][-1]
    classes: set[type] = set()
    seen = {id(module)}
    left = [module]
    while left:  # `module.modules()` spells the name of each
        one = left.pop()
        classes.add(type(one))
        for child in one._modules.values():
            if child is not None and id(child) not in seen:
                seen.add(id(child))
                left.append(child)
    return any(component in _wrappers_of(cls) for cls in classes)


@dataclass(frozen=True)
class Slot:
    """A place in a module where a parameter or buffer is registered."""

    name: str
    tensor: torch.Tensor
    is_parameter: bool
    persistent: bool


def places(module: nn.Module, prefix: str = "") -> Iterator[tuple[str, nn.Module]]:
    """What the names of each module's own tensors begin with; a shared module once for each of its places."""
    yield prefix, module
    component = wrapper_component(module)
    for name, child in module._modules.items():
        if child is not None:
            yield from places(child, prefix if name == component else f"{prefix}{name}.")


def slots(module: nn.Module) -> Iterator[Slot]:
    """Every registered parameter and buffer by canonical name; a shared one once for each of its places."""
    for prefix, part in places(module):
        for name, parameter in part._parameters.items():
            if parameter is not None:
                yield Slot(prefix + name, parameter, True, True)
        for name, buffer in part._buffers.items():
            if buffer is not None:
                yield Slot(prefix + name, buffer, False, name not in part._non_persistent_buffers_set)


def canonical_key(module: nn.Module, key: str) -> str:
    """The canonical name of a key of `module.state_dict()`.

    Some wrappers remove their component from the keys in a hook, others leave it: both are read.

    Args:
        module: the module `state_dict()` was called on.
        key: the key as found there.
    """
    parts: list[str] = []
    while True:
        component = wrapper_component(module)
        if component is not None:
            child = module._modules[component]
            assert child is not None
            module, key = child, key.removeprefix(component + ".")
            continue
        head, dot, rest = key.partition(".")
        below = module._modules.get(head) if dot else None
        if below is None:
            return ".".join([*parts, key])
        parts.append(head)
        module, key = below, rest


def canonical_keys(module: nn.Module, keys: Iterator[str] | list[str], what: str) -> dict[str, str]:
    """Canonical name -> key, for all `keys` of the `state_dict()` of `module`.

    Raises:
        CaptureError: two keys would get one name.
    """
    found: dict[str, str] = {}
    for key in keys:
        name = canonical_key(module, key)
        if name in found:
            raise CaptureError(
                f"{what}: the keys {found[name]!r} and {key!r} of state_dict() both mean {name!r} once wrappers are "
                "taken off; rename one of the modules",
                key=name,
            )
        found[name] = key
    return found
