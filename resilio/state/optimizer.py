"""An optimizer's part of the state: by parameter name instead of by number, taken without touching anything.

The canonical form is `{"state": {name: {entry: tensor or value}}, "param_groups": [{"params": [name, …], "lr": …, …},
…]}`.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch.optim import Optimizer

from ..errors import CaptureError
from .flat import Path
from .tree import Flattener, state_of

__all__ = ["PREFERENCES", "OptimizerView", "capture_optimizer", "view_optimizer"]

PREFERENCES = ("foreach", "fused", "capturable", "differentiable")
"""How a step is computed on this machine, not what it computes: these stay as the live optimizer has them."""

# Names as the user once passed them, wrappers and all; `params` says it canonically, and the live ones are right.
_LEFT_OUT = ("params", "param_names")


@dataclass
class OptimizerView:
    """A live optimizer by parameter name.

    Attributes:
        optimizer: the optimizer.
        nested: canonical form; tensors are the live ones if the optimizer's `state_dict` is torch's own.
        names: `id` of a parameter of it -> its first name.
        parameters: every name, those of ties included -> parameter of it.
        stock_capture: torch's own `state_dict`.
        stock_load: torch's own `load_state_dict`.
        shown: holds `state` and `param_groups` by the parameters of the models: the optimizer itself, or a stand-in.
    """

    optimizer: Optimizer
    nested: dict[str, Any]
    names: dict[int, str]
    parameters: dict[str, torch.Tensor]
    stock_capture: bool
    stock_load: bool
    shown: Any

    def group_names(self) -> list[list[str]]:
        """The names of the parameters of each live group."""
        return [[self.names[id(p)] for p in group["params"]] for group in self.shown.param_groups]


def view_optimizer(
    optimizer: Optimizer, named: Iterable[tuple[str, torch.Tensor]], what: str, shown: Any = None
) -> OptimizerView:
    """Look at `optimizer`: no step, no hook of its own, no gradient touched.

    Args:
        optimizer: the optimizer.
        named: names and parameters of all models, after their `state_dict()`.
        what: the optimizer's name in the state, for errors.
        shown: stands in for it, if its parameters are not those of the models (FSDP1).

    Raises:
        CaptureError: it holds a parameter that is in no model, or `state_dict()` raised.
    """
    stands_in, shown = shown is not None, shown or optimizer
    owned = {id(p) for group in shown.param_groups for p in group["params"]}
    names: dict[int, str] = {}
    parameters: dict[str, torch.Tensor] = {}
    all_names: dict[int, str] = {}
    for name, parameter in named:
        all_names.setdefault(id(parameter), name)
        if id(parameter) in owned:
            if name in parameters and parameters[name] is not parameter:
                raise CaptureError(f"{what}: two parameters are named {name!r}; rename one of the modules", key=name)
            names.setdefault(id(parameter), name)
            parameters[name] = parameter
    for index, group in enumerate(shown.param_groups):
        for position, parameter in enumerate(group["params"]):
            if id(parameter) not in names:
                raise CaptureError(
                    f"{what}: parameter {position} of group {index}, of shape {tuple(parameter.shape)}, is in none of "
                    "the models, so it has no name. Pass the model it belongs to, and build the optimizer after the "
                    "model was wrapped, sharded or moved",
                    group=index,
                    position=position,
                )
    cls = type(optimizer)
    stock_capture = cls.state_dict is Optimizer.state_dict and not (
        optimizer._optimizer_state_dict_pre_hooks or optimizer._optimizer_state_dict_post_hooks
    )
    stock_load = cls.load_state_dict is Optimizer.load_state_dict and not (
        optimizer._optimizer_load_state_dict_pre_hooks or optimizer._optimizer_load_state_dict_post_hooks
    )
    if stands_in and not (stock_capture and stock_load):
        raise CaptureError(
            f"{what}: {cls.__qualname__} has a state_dict, a load_state_dict or hooks of its own, and under FSDP1 its "
            "parameters are not those of the model. Shard the model with `fully_shard` (FSDP2)",
            key=what,
        )
    if stock_capture:
        nested = _of_live(shown, names, all_names, what)
    else:
        nested = named_form(optimizer, state_of(optimizer, what), names)
    return OptimizerView(optimizer, nested, names, parameters, stock_capture, stock_load, shown)


def _of_live(optimizer: Any, names: dict[int, str], all_names: dict[int, str], what: str) -> dict[str, Any]:
    state: dict[Any, Any] = {}
    for key, entries in optimizer.state.items():
        name: Any = key
        if isinstance(key, torch.Tensor):
            name = names.get(id(key)) or all_names.get(id(key))
            if name is None:
                raise CaptureError(
                    f"{what} holds state for a tensor of shape {tuple(key.shape)} that is in none of the models; "
                    "delete it from `optimizer.state`, or pass the model it belongs to"
                )
        if name in state:
            raise CaptureError(f"{what} holds two states under the name {name!r}", key=str(name))
        # A copy of the containers that hold tensors: the canonical form must not be the live dict itself.
        state[name] = dict(entries) if isinstance(entries, dict) else entries
    groups = [{"params": [names[id(p)] for p in group["params"]], **_hyper(group)} for group in optimizer.param_groups]
    return {"state": state, "param_groups": groups}


def _hyper(group: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in group.items() if key not in _LEFT_OUT}


def named_form(optimizer: Optimizer, state_dict: dict[str, Any], names: dict[int, str]) -> dict[str, Any]:
    """The canonical form of what an optimizer's own `state_dict` returned, numbers turned into names.

    A dict of another shape is taken as it is.
    """
    groups = state_dict.get("param_groups")
    if not isinstance(groups, list) or "state" not in state_dict or len(groups) != len(optimizer.param_groups):
        return dict(state_dict)
    numbers: dict[Any, str] = {}
    for group, live in zip(groups, optimizer.param_groups, strict=True):
        numbers.update(zip(group["params"], (names[id(p)] for p in live["params"]), strict=True))
    named = [{"params": [numbers[i] for i in group["params"]], **_hyper(group)} for group in groups]
    state = {numbers.get(key, key): entries for key, entries in state_dict["state"].items()}
    return {**state_dict, "state": state, "param_groups": named}


def numbered_form(view: OptimizerView, nested: dict[str, Any]) -> dict[str, Any]:
    """The other way: a `state_dict` for the live optimizer's own `load_state_dict`, groups in its order."""
    numbers: dict[str, int] = {}
    for names in view.group_names():
        for name in names:
            numbers.setdefault(name, len(numbers))
    groups = [{**group, "params": [numbers[name] for name in group["params"]]} for group in nested["param_groups"]]
    for group, live in zip(groups, view.optimizer.param_groups, strict=True):
        if "param_names" in live:
            group["param_names"] = list(live["param_names"])
    state = {numbers.get(name, name): entries for name, entries in nested["state"].items()}
    return {**nested, "state": state, "param_groups": groups}


def capture_groups(flattener: Flattener, optimizer: Optimizer, path: Path, names: list[list[str]]) -> Any:
    """Add the groups of an optimizer, whose parameters have these names, at `path`; returns their tree."""
    groups = zip(optimizer.param_groups, names, strict=True)
    return flattener.add(path, [{"params": list(known), **_hyper(group)} for group, known in groups])


def capture_optimizer(flattener: Flattener, view: OptimizerView, path: Path) -> dict[str, Any]:
    """Add an optimizer's state below `path`; returns its tree."""
    ties: dict[int, str] = {}  # parameters may share a tensor, such as a counter that is advanced in place
    # Only what nothing but step() writes may be copied late; a scheduler writes into tensors of the groups.
    return {
        key: flattener.add(
            (*path, key),
            value,
            "optimizer" if key == "state" and view.stock_capture else "other",
            ties if key == "state" else None,
        )
        for key, value in view.nested.items()
    }
