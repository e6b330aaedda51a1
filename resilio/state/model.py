"""A module's part of the state: what `state_dict()` says, by canonical name, and the buffers it leaves out."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from ..errors import CaptureError, RestoreError
from .flat import Kind, Path, Ref
from .names import Slot, canonical_keys, slots
from .tensors import SHARE, expanded, put, same_bytes, same_memory
from .tree import Flattener, state_of

__all__ = ["ModuleView", "Ties", "capture_module", "is_torchs", "view_module"]

Ties = dict[int, str]
"""`id` of a live Parameter or buffer -> the flat key it is saved under; their modules keep the objects alive."""


@dataclass
class ModuleView:
    """A live module as `state_dict()` shows it now.

    Attributes:
        module: the module.
        entries: canonical name -> what `state_dict()` holds: a tensor, or extra state.
        raw: canonical name -> key in `state_dict()`.
        slots: canonical name -> where it is registered, for entries that show that very memory.
        hidden: canonical name -> non-persistent buffer.
        parameters: canonical name -> Parameter; a tied one under each of its names.
        stock: whether writing into the memory shown is all that loading would do.
    """

    module: nn.Module
    entries: dict[str, Any]
    raw: dict[str, str]
    slots: dict[str, Slot]
    hidden: dict[str, Slot]
    parameters: dict[str, torch.Tensor]
    stock: bool

    def loads_itself(self, name: str) -> bool:
        """Whether an entry goes through the module's own loading instead of into the memory shown."""
        return not self.stock

    def target(self, shown: torch.Tensor) -> torch.Tensor:
        """The live tensor that shows as `shown`."""
        return shown

    def written(self) -> None:
        """To be called after the memory shown was written."""

    def load(self, saved: dict[str, Any]) -> None:
        """Load through the module's own `load_state_dict`, then prove that it took the tensors as they are.

        Args:
            saved: canonical name -> tensor or extra state; what is not in it stays as it is.

        Raises:
            RestoreError: a tensor is not bit for bit the saved one afterwards.
        """
        state = {self.raw[name]: saved.get(name, value) for name, value in self.entries.items()}
        self.module.load_state_dict(state, strict=True)
        now = self.module.state_dict()
        for name, value in saved.items():
            if isinstance(value, torch.Tensor) and not same_bytes(value, now[self.raw[name]]):
                raise RestoreError(
                    f"{name}: load_state_dict() of {type(self.module).__qualname__} left other bytes than the saved "
                    "ones; its hooks convert or replace the tensor. Make them exact, or exclude it",
                    key=name,
                )

    def remember(self) -> Callable[[], None]:
        """Remember all that `load` may change; calling the result puts it back."""
        before = {
            name: value.clone() if isinstance(value, torch.Tensor) else copy.deepcopy(value)
            for name, value in self.entries.items()
        }

        def undo() -> None:
            # An expanded one is handed over as it is, for no load can write it, and written afterwards.
            kept = {name for name, slot in self.slots.items() if expanded(slot.tensor)}
            state = {name: self.entries[name] if name in kept else value for name, value in before.items()}
            self.module.load_state_dict({self.raw[name]: value for name, value in state.items()}, strict=True)
            for name, slot in self.slots.items():
                put(slot.tensor, before[name])

        return undo


def view_module(module: nn.Module, what: str) -> ModuleView:
    """Look at `module` without changing it. FSDP2 modules are resharded, as `state_dict()` does.

    Raises:
        CaptureError: two keys have one canonical name, or `state_dict()` raised.
    """
    state = state_of(module, what)
    raw = canonical_keys(module, list(state), what)
    entries = {name: state[key] for name, key in raw.items()}
    # Only now: before state_dict() a module gathered by FSDP2 shows other parameters than the optimizer's.
    found = list(slots(module))
    shown = {
        slot.name: slot
        for slot in found
        if slot.persistent
        and isinstance(entries.get(slot.name), torch.Tensor)
        and same_memory(entries[slot.name], slot.tensor)
    }
    return ModuleView(
        module=module,
        entries=entries,
        raw=raw,
        slots=shown,
        hidden={slot.name: slot for slot in found if not slot.persistent},
        parameters={slot.name: slot.tensor for slot in found if slot.is_parameter},
        stock=len(shown) == len(entries) and not _has_own_loading(module),
    )


def capture_module(
    flattener: Flattener, view: ModuleView, path: Path, ties: Ties, kind: Kind = "parameter"
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Add a module's state below `path`, and its non-persistent buffers below `buffers_np`.

    Args:
        flattener: receives it.
        view: the live module.
        path: `("model",)`, or with the name of one of several.
        ties: what was saved already, of all modules; added to.
        kind: of its parameters: those of a module that no optimizer owns may change at other times.

    Returns:
        the tree of the state and that of the non-persistent buffers.
    """
    hidden_path = ("buffers_np", *(path[1:] if path[0] == "model" else path))
    tree = {}
    for name, value in view.entries.items():
        slot = view.slots.get(name)
        if slot is not None and not view.stock and expanded(slot.tensor):
            key = ".".join(map(str, (*path, name)))
            raise CaptureError(
                f"{key} {SHARE}, which load_state_dict() of {type(view.module).__qualname__} could not write; register "
                "a `.clone()` of it",
                key=key,
            )
        if slot is None:
            tree[name] = flattener.add((*path, name), value)
        else:
            tree[name] = _add_slot(flattener, (*path, name), slot, value, ties, kind)
    hidden = {
        name: _add_slot(flattener, (*hidden_path, name), slot, slot.tensor, ties, kind)
        for name, slot in view.hidden.items()
    }
    return tree, hidden


def _add_slot(flattener: Flattener, path: Path, slot: Slot, tensor: torch.Tensor, ties: Ties, kind: Kind) -> Ref:
    if id(slot.tensor) in ties:
        return flattener.tie(path, ties[id(slot.tensor)])
    ref: Ref = flattener.add(path, tensor, kind if slot.is_parameter else "buffer")
    ties[id(slot.tensor)] = ref.key
    return ref


def is_torchs(function: Any) -> bool:
    """Whether torch itself defines a method or hook."""
    function = getattr(function, "hook", function)  # torch wraps some hooks
    home = getattr(function, "__module__", None) or type(function).__module__
    return home == "torch" or home.startswith("torch.")


def _has_own_loading(module: nn.Module) -> bool:
    """Whether somebody other than torch has a word in loading any part of `module`."""
    for part in module.modules():
        cls = type(part)
        hooks = (
            *part._state_dict_hooks.values(),
            *part._load_state_dict_pre_hooks.values(),
            *part._load_state_dict_post_hooks.values(),
            cls.state_dict,
            cls._save_to_state_dict,
            cls.load_state_dict,
            cls._load_from_state_dict,
        )
        if not all(map(is_torchs, hooks)):
            return True
    return False


def all_parameters(views: dict[str, ModuleView]) -> Iterator[tuple[str, torch.Tensor]]:
    """(name, Parameter) of several modules; names start with the key of `views` unless that is empty."""
    for prefix, view in views.items():
        for name, parameter in view.parameters.items():
            yield (f"{prefix}.{name}" if prefix else name), parameter
