"""Optimizers over parameters that FSDP1 manages, by the user's parameters.

What an optimizer keeps lies like the flat parameter, so moments are cut like it. With ``use_orig_params=True`` a rank
without any element of a parameter has no state for it either; what there is of it is told by the rank that holds the
first element, in one small meeting for each save.
"""

from __future__ import annotations

import pickle
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from ..errors import CaptureError
from .compare import same_nested
from .flat_shard import FlatShard
from .fsdp1 import Original, handles_of
from .optimizer import OptimizerView
from .saved import mismatch
from .tensors import local, put, same_layout

__all__ = ["FlatOptimizer", "Lent", "borrow", "lendable", "lends"]

Lent = dict[str, dict[str, dict[str, Any]]]
"""Optimizer -> parameter -> entry -> `_Run` or value: state of which a rank has no element."""


@dataclass(frozen=True)
class _Run:
    """An entry with an element for each of its parameter."""

    dtype: torch.dtype


class FlatOptimizer:
    """State and groups of an optimizer by the user's parameters; what is not FSDP1's as it is.

    Args:
        optimizer: over parameters that FSDP1 manages, or over flat ones.
        originals: of all models.
        what: its name in the state, for errors.

    Attributes:
        state: `Original.tensor` or other key -> entries; runs are views of the live ones.
        param_groups: with `Original.tensor` as parameters.

    Raises:
        CaptureError: it keeps something that has no form outside of FSDP1.
    """

    def __init__(self, optimizer: Optimizer, originals: Iterable[Original], what: str) -> None:
        self.optimizer = optimizer
        self.state: dict[Any, Any] = {}
        self._held: dict[int, list[Original]] = {}
        for one in originals:
            self._held.setdefault(id(one.holder), []).append(one)
        position = {id(one): i for i, one in enumerate(originals)}
        for key, entries in optimizer.state.items():
            held = self._held.get(id(key), [])
            if held and not isinstance(entries, dict):
                raise CaptureError(f"{what}: the state of {held[0].name} is no dict; it cannot be saved", key=what)
            for one in held:
                if one.absent:
                    continue  # what some optimizers keep for it from the start on is never stepped
                self.state[one.tensor] = {
                    name: one.entry(value, f"{what}.state.{one.name}.{name}") for name, value in entries.items()
                }
            if not held:
                self.state[key] = entries
        self.param_groups = []
        for group in optimizer.param_groups:
            found = [self._held.get(id(parameter), [parameter]) for parameter in group["params"]]
            flat = [one for held in found for one in held]
            if any(isinstance(one, Original) and one.flat for one in flat):  # which has them in an order of its own
                flat.sort(key=lambda one: position.get(id(one), len(position)))
            parameters = [one.tensor if isinstance(one, Original) else one for one in flat]
            self.param_groups.append({**group, "params": parameters})

    def refusal(self, parameter: torch.Tensor, shape: tuple[int, ...]) -> str | None:
        """Why saved state of this shape cannot be kept for `parameter`, or None."""
        flattened = any(one.tensor is parameter and (one.flat or one.sharded) for one in self._all())
        if not shape or shape == tuple(parameter.shape) or not flattened:
            return None
        return f"has the shape {[*shape]}; under FSDP1 there are one number, or one for each element of the parameter"

    def check(self, new: dict[torch.Tensor, Any], name: str) -> None:
        """Whether a flat parameter, which has one state, can have that of all the parameters in it.

        Args:
            new: parameter -> entries that it will have; None for no state.
            name: of the optimizer.

        Raises:
            MismatchError: two parameters of one flat one would need different states.
        """
        for held in self._held.values():
            if not held[0].flat:
                continue
            first, *others = [(one, new.get(one.tensor, self.state.get(one.tensor))) for one in held]
            for one, entries in others:
                if _common(entries) != _common(first[1]) or not same_nested(_numbers(entries), _numbers(first[1])):
                    raise mismatch(
                        f"{name}: {first[0].name} and {one.name} lie in one flat parameter here, which has one state "
                        "(step count and the like) for all of it, but were saved with different ones; build the model "
                        "with use_orig_params=True"
                    )

    def put_back(self) -> None:
        """Give the optimizer what `state` and `param_groups` hold now. What fits keeps its identity."""
        for shown, group in zip(self.param_groups, self.optimizer.param_groups, strict=True):
            group.update({key: value for key, value in shown.items() if key != "params"})
        for held in self._held.values():
            shown_by = [(one, self.state[one.tensor]) for one in held if one.tensor in self.state]
            key: Any = held[0].holder
            if held[0].absent and key not in self.optimizer.state:
                continue  # no step will ever look for its state here
            if shown_by:
                self._put_entries(key, shown_by)
            elif not held[0].absent:
                self.optimizer.state.pop(key, None)
        stand_ins = {id(one.tensor) for one in self._all()}
        own = {key: entries for key, entries in self.state.items() if id(key) not in stand_ins}
        for key in [key for key in self.optimizer.state if id(key) not in self._held and key not in own]:
            del self.optimizer.state[key]
        self.optimizer.state.update(own)

    def _put_entries(self, key: nn.Parameter, shown: list[tuple[Original, dict[str, Any]]]) -> None:
        live = self.optimizer.state[key]
        entries = shown[0][1]
        for name in [name for name in live if name not in entries]:
            del live[name]
        for name, value in entries.items():
            if not isinstance(value, torch.Tensor) or value.dim() == 0:
                before = live.get(name)
                if isinstance(value, torch.Tensor) and isinstance(before, torch.Tensor) and same_layout(before, value):
                    put(before, value)
                else:
                    live[name] = value
            elif not shown[0][0].flat:
                live[name] = local(value)
            else:
                whole = live.get(name)
                if whole is None or whole.dtype != value.dtype:
                    whole = torch.zeros(shown[0][0].flat_count, dtype=value.dtype, device=value.device)
                for one, of_one in shown:
                    put(one.cut(whole), of_one[name])
                live[name] = whole

    def _all(self) -> Iterator[Original]:
        for held in self._held.values():
            yield from held


def _common(entries: Any) -> set[str] | None:
    return None if entries is None else set(entries)


def _numbers(entries: Any) -> dict[str, Any]:
    return {
        name: value
        for name, value in (entries or {}).items()
        if not isinstance(value, torch.Tensor) or value.dim() == 0
    }


# ------------------------------------------------------------------------------------ what ranks without elements lack


def lends(module: nn.Module) -> bool:
    """Whether ranks hold optimizer state of those parameters alone of which they have elements."""
    return any(handle.uses_sharded_strategy and handle.flat_param._params is not None for handle in handles_of(module))


def lendable(views: dict[str, OptimizerView], originals: Iterable[Original]) -> dict[str, list[tuple[Any, list[str]]]]:
    """What this rank tells the others: by optimizer, entries and the parameters that have just these."""
    first = {id(one.tensor) for one in originals if one.sharded and not one.flat and one.count and one.start == 0}
    told: dict[str, list[tuple[Any, list[str]]]] = {}
    for optimizer, view in views.items():
        alike: dict[bytes, tuple[Any, list[str]]] = {}
        for name, entries in view.nested.get("state", {}).items():
            if id(view.parameters.get(name)) in first:
                of_one = {key: _described(value) for key, value in entries.items()}
                alike.setdefault(pickle.dumps(of_one), (of_one, []))[1].append(name)
        told[optimizer] = list(alike.values())
    return told


def _described(value: Any) -> Any:
    if isinstance(value, FlatShard):
        return _Run(value.dtype)
    return value.detach().cpu().clone() if isinstance(value, torch.Tensor) else value


def borrow(view: OptimizerView, lent: dict[str, dict[str, Any]], originals: Iterable[Original]) -> None:
    """Add to the form of `view` the state of parameters of which this rank has no element; they have none of it."""
    by_tensor = {id(one.tensor): one for one in originals}
    state = view.nested.get("state", {})
    for name, entries in lent.items():
        one = by_tensor.get(id(view.parameters.get(name)))
        if one is not None and one.absent:
            state[name] = {key: _nothing_of(one, value) for key, value in entries.items()}
    known = [name for name in view.parameters if name in state]
    view.nested["state"] = {name: state[name] for name in [*known, *(key for key in state if key not in known)]}


def _nothing_of(one: Original, value: Any) -> Any:
    if isinstance(value, _Run):
        return one.of_run(torch.empty(0, dtype=value.dtype))
    return value
