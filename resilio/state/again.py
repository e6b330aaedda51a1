"""A capture of state that has the structure of the one before: looked through for changes, instead of found anew.

To name every tensor and to prove that it may be saved takes most of the time that a save holds training for, and comes
to the same each time. So what it hangs on is remembered by identity and layout: modules, their tensors and hooks, what
optimizers hold. Where all of it is the same, so are names and trees; tensors and values are taken anew.

What is remembered keeps no tensor alive. That another object may have got an `id` since is no harm: of all that is live
now, the same ids in the same places are tied and named in the same way.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from operator import attrgetter, eq
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from .flat import FlatState, Path
from .flat_shard import FlatShard
from .model import ModuleView
from .optimizer import OptimizerView, capture_groups
from .tensors import local
from .tree import Flattener, alike, refs

if TYPE_CHECKING:
    from .training_state import Part

__all__ = ["Seen", "layout"]

_log = logging.getLogger("resilio")

Others = Callable[[Flattener], Iterable[tuple[bool, Path, Any]]]
"""Whether it is this rank's own, path and tree of each."""

_TENSORS = (torch.Tensor, nn.Parameter, DTensor)
_NUMBERS = (bool, int, float, type(None))
_HOOKS = (
    "_state_dict_pre_hooks",
    "_state_dict_hooks",
    "_load_state_dict_pre_hooks",
    "_load_state_dict_post_hooks",
)
_METHODS = ("state_dict", "_save_to_state_dict", "load_state_dict", "_load_from_state_dict", "get_extra_state")
_OWN = ("state_dict", "_save_to_state_dict", "get_extra_state")  # set on an object, they stand in for its class's


_facts = attrgetter("dtype", "shape", "device")


class _Changed(ValueError):
    """It is not as it was, or of a kind that is not looked at here."""


def layout(tensor: torch.Tensor) -> tuple[Any, ...]:
    """How it lies in memory and on ranks: all but its content and its place."""
    kind = type(tensor)
    if kind is torch.Tensor or kind is nn.Parameter:
        return torch.Tensor, tensor.dtype, tensor.shape, tensor.stride(), tensor.device
    if isinstance(tensor, FlatShard):
        return FlatShard, tensor.dtype, tensor.shape, tensor.start, tensor.run.shape, tensor.order
    if kind is DTensor:
        inner, spec = tensor._local_tensor, tensor._spec  # type: ignore[attr-defined]
        place = spec.placements, spec.mesh, type(inner), inner.shape, inner.stride(), inner.device
        return DTensor, tensor.dtype, tensor.shape, *place
    return kind, tensor.dtype, tensor.shape, tensor.device


def _layouts(tensors: Collection[torch.Tensor]) -> Iterator[Any]:
    """`layout` of each, without a call of Python's for plain ones, of which there are many."""
    if set(map(type, tensors)) <= {torch.Tensor}:
        return zip(map(_facts, tensors), map(torch.Tensor.stride, tensors), strict=True)
    return map(layout, tensors)


def _detached(tensor: torch.Tensor) -> torch.Tensor:
    """The same memory, with no gradient and no name."""
    kind = type(tensor)
    if kind is DTensor and tensor.requires_grad:
        # Its own `detach` goes through the dispatcher of DTensors, which takes several times as long.
        return DTensor(local(tensor).detach(), tensor._spec, requires_grad=False)  # type: ignore[attr-defined,no-untyped-call]
    return tensor.detach() if tensor.requires_grad or kind is nn.Parameter else tensor


class _Look:
    """What modules and optimizers hold now, where torch alone has a word in their `state_dict`.

    Attributes:
        sign: what their names and trees follow from; equal for equal structure.
        tensors: in the order in which they are captured.
        numbers: what else an optimizer holds for a parameter, likewise.
    """

    def __init__(self, parts: Sequence[Part]) -> None:
        self.sign: list[Any] = []
        self.tensors: list[torch.Tensor] = []
        self.numbers: list[Any] = []
        self._classes: set[type] = set()
        for part in parts:
            if part.role == "module":
                self._module(part.value)
            elif part.role == "optimizer":
                self._optimizer(part.value)

    def _module(self, module: nn.Module) -> None:
        hidden: list[torch.Tensor] = []
        self._part(module, "", hidden)
        self.tensors += hidden

    def _optimizer(self, optimizer: Optimizer) -> None:
        cls = type(optimizer)
        hooks = optimizer._optimizer_state_dict_pre_hooks or optimizer._optimizer_state_dict_post_hooks
        if cls.state_dict is not Optimizer.state_dict or hooks:
            raise _Changed
        self.sign += cls, [list(map(id, group["params"])) for group in optimizer.param_groups]
        begin = len(self.tensors)
        for parameter, entries in optimizer.state.items():
            if type(entries) is not dict or not isinstance(parameter, torch.Tensor):
                raise _Changed
            self.sign.append((id(parameter), *entries, *map(type, entries.values())))
            for value in entries.values():
                if type(value) in _TENSORS:
                    self.tensors.append(value)
                elif type(value) in _NUMBERS:
                    self.numbers.append(value)
                else:
                    raise _Changed
        if len(set(map(id, self.tensors[begin:]))) < len(self.tensors) - begin:  # tied
            raise _Changed

    def _part(self, part: nn.Module, prefix: str, hidden: list[torch.Tensor]) -> None:
        own, cls = part.__dict__, type(part)
        for hook in own["_state_dict_pre_hooks"].values():  # FSDP2 reshards in one
            hook(part, prefix, False)
        if not own.keys().isdisjoint(_OWN):
            raise _Changed
        if cls not in self._classes:
            self._classes.add(cls)
            self.sign.append([getattr(cls, name, None) for name in _METHODS])
        parameters, buffers, children = own["_parameters"], own["_buffers"], own["_modules"]
        left_out = own["_non_persistent_buffers_set"]
        self.sign.append((cls, *parameters, *map(id, parameters.values()), *children, *map(id, children.values())))
        for name in _HOOKS:
            if own[name]:
                self.sign.append((name, *own[name], *map(id, own[name].values())))
        self.tensors += [tensor for tensor in parameters.values() if tensor is not None]
        if buffers:
            self.sign.append((*buffers, *map(id, buffers.values()), *sorted(left_out)))
            for name, tensor in buffers.items():
                if tensor is not None:
                    (hidden if name in left_out else self.tensors).append(tensor)
        for name, child in children.items():
            if child is not None:
                self._part(child, f"{prefix}{name}.", hidden)


class Seen:
    """What a capture found, and from what.

    Args:
        flat: what it found.
        parts: of what.
        modules: as it saw them.
        optimizers: likewise.
        about: what else it depended on.

    Raises:
        ValueError: the next one cannot do with a look: something in it is captured by other ways than torch's.
    """

    def __init__(
        self,
        flat: FlatState,
        parts: Sequence[Part],
        modules: Mapping[Path, ModuleView],
        optimizers: Mapping[Path, OptimizerView],
        about: Any,
    ) -> None:
        stock = all(type(view) is ModuleView and view.stock for view in modules.values())
        if not stock or not all(view.stock_capture and view.shown is view.optimizer for view in optimizers.values()):
            raise _Changed
        keys: list[str] = []
        numbers: list[str] = []
        for part in parts:
            if part.role == "module":
                view = modules[part.path]
                hidden = ("buffers_np", *(part.path[1:] if part.path[0] == "model" else part.path))
                keys += [_at(flat.tree, part.path)[name].key for name in view.slots]
                keys += [_at(flat.tree, hidden)[name].key for name in view.hidden]
            elif part.role == "optimizer":
                leaves = list(refs(_at(flat.tree, (*part.path, "state"))))
                keys += [key for key in leaves if key not in flat.values]
                numbers += [key for key in leaves if key in flat.values]
        look = _Look(parts)
        if len(keys) != len(look.tensors) or len(numbers) != len(look.numbers):
            raise _Changed
        self._sign, self._about = look.sign, about
        self._keys = [key if key in flat.tensors else None for key in keys]
        self._numbers = numbers
        self._names = {
            path: [group["params"] for group in view.nested["param_groups"]] for path, view in optimizers.items()
        }
        self._layouts = list(_layouts(flat.tensors.values()))
        self._tensor_keys, self._value_keys = list(flat.tensors), list(flat.values)
        self._trained = _trained(flat)
        self._flat = replace(flat, tensors={}, values={})

    @classmethod
    def of(cls, *args: Any) -> Seen | None:
        """The same; None where a look would not do."""
        try:
            return cls(*args)
        except Exception as error:  # noqa: BLE001  then all is found anew each time
            _log.debug("remembering a capture: %s: %s", type(error).__name__, error)
            return None

    def capture(self, parts: Sequence[Part], others: Others, about: Any) -> FlatState | None:
        """The state now; None if its structure may be another, and all must be found anew.

        Args:
            parts: of the state.
            others: captures those that are neither module nor optimizer.
            about: what else the capture depends on.

        Raises:
            CaptureError: one of the others cannot be saved.
        """
        kept = self._flat
        tensors: dict[str, Any] = dict.fromkeys(self._tensor_keys)
        values: dict[str, Any] = dict.fromkeys(self._value_keys)
        found = 0
        try:
            look = _Look(parts)
            if about != self._about or look.sign != self._sign:
                return None
            for key, tensor in zip(self._keys, look.tensors, strict=True):
                if key is not None:
                    found += 1
                    tensors[key] = _detached(tensor)
            values.update(zip(self._numbers, look.numbers, strict=True))
        except Exception as error:  # noqa: BLE001  the other way tells what is wrong
            _log.debug("looking for changes: %s: %s", type(error).__name__, error)
            return None
        flattener = Flattener()
        for part in parts:
            if part.role == "optimizer":
                groups = (*part.path, "param_groups")
                if not alike(
                    capture_groups(flattener, part.value, groups, self._names[part.path]), _at(kept.tree, groups)
                ):
                    return None
        for own, path, tree in others(flattener):
            if not alike(tree, _at(kept.local_tree if own else kept.tree, path)):
                return None
        rest = flattener.flat
        tensors.update(rest.tensors)
        values.update(rest.values)
        same = (
            found + len(rest.tensors) == len(tensors) == len(self._tensor_keys)
            and len(self._numbers) + len(rest.values) == len(values) == len(self._value_keys)
            and len(rest.ties) + self._keys.count(None) == len(kept.ties)
            and all(kept.ties.get(key) == twin for key, twin in rest.ties.items())
        )
        flat = replace(kept, tensors=tensors, values=values)
        return flat if same and self._lies(flat) and _trained(flat) == self._trained else None

    def _lies(self, flat: FlatState) -> bool:
        try:
            # One by one: all together would be many objects at a time, which sets the garbage collector off.
            return all(map(eq, _layouts(flat.tensors.values()), self._layouts))
        except RuntimeError:  # of a sparse tensor, which cannot be saved
            return False


def _at(tree: Any, path: Path) -> Any:
    """What stands at `path` in a tree; None if nothing does."""
    for name in path:
        tree = tree.get(name) if isinstance(tree, dict) else None
    return tree


def _trained(flat: FlatState) -> list[tuple[str, Any]]:
    """What optimizers train, by name; and whatever else goes by such a key."""
    return [(key, value) for key, value in flat.values.items() if key.endswith(".params")]
