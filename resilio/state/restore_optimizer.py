"""Restoring optimizers: by parameter name, every entry as saved, nothing cast."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from ..errors import RestoreError
from .compare import first_difference
from .flat import Ref, TensorSpec
from .flat_shard import FlatShard
from .fsdp1_optimizer import FlatOptimizer
from .optimizer import PREFERENCES, OptimizerView, named_form, numbered_form
from .putting import Pairs, in_kind, into_live, put_entry, remembered
from .saved import Problems, SavedView, mismatch
from .tensors import local, memory_order, put_all
from .tree import refs

__all__ = ["OptimizerPlan"]

Wanted = Callable[..., bool]


class OptimizerPlan:
    """What one optimizer gets.

    Args:
        name: of the optimizer in the state.
        view: the live optimizer.
        saved: the checkpoint.
        problems: what speaks against it is added here.
        wanted: whether a key is asked for; more keys are other names of the same thing.
        strict: whether parameters may be missing on one side.
    """

    def __init__(
        self, name: str, view: OptimizerView, saved: SavedView, problems: Problems, wanted: Wanted, strict: bool
    ) -> None:
        self.name = name
        self.view = view
        self.notes: list[str] = []
        self.reordered: list[int] | None = None
        self._saved, self._problems, self._wanted, self._strict = saved, problems, wanted, strict
        self._state: dict[Any, dict[Any, Any] | Any] = {}  # live name -> tree
        self._groups: list[dict[str, Any]] = [{} for _ in view.shown.param_groups]  # trees of hyper-parameters
        self._other: dict[str, Any] = {}
        self._absent: list[str] = []
        self._live: dict[str, torch.Tensor] = {}  # saved key -> tensor in whose place it comes
        self._left: set[tuple[Any, ...]] = set()  # what was saved and is not asked for
        self._said: list[Any] = []  # trees of what is only read: names of parameters, preferences
        self._plan(saved.nodes[name])

    # planning ---------------------------------------------------------------------------------------------------------

    def _plan(self, tree: Any) -> None:
        shaped = (
            isinstance(tree, dict)
            and isinstance(tree.get("param_groups"), list)
            and isinstance(tree.get("state"), dict)
        )
        self._saved.claim(tree)
        if not shaped or "param_groups" not in self.view.nested:
            if shaped or "param_groups" in self.view.nested:
                self._problems.others.append(
                    f"{self.name}: the checkpoint holds the state of another kind of optimizer"
                )
                return
            self._plan_other(tree)
            return
        self._match_groups(tree["param_groups"])
        self._plan_state(tree["state"])
        self._plan_other({key: node for key, node in tree.items() if key not in ("state", "param_groups")})

    def _plan_other(self, tree: dict[str, Any]) -> None:
        for key, node in tree.items():
            if not self._whole(f"{self.name}.{key}", node):
                self._left.add((key,))
                continue
            self._other[key] = node
            for leaf in refs(node):
                self._want(leaf, None, None)

    def _whole(self, key: str, tree: Any) -> bool:
        """Whether `tree`, which is restored whole or not at all, is asked for; asking for a part of it is noted."""
        chosen = [self._wanted(self._saved.rename(leaf), key) for leaf in refs(tree)] or [self._wanted(key)]
        if any(chosen) and not all(chosen):
            self._problems.others.append(f"{key} can only be restored whole; name it, not keys inside it")
        return all(chosen)

    def _match_groups(self, trees: list[Any]) -> None:
        live_names = self.view.group_names()
        saved_names = [[self._live_name(n) for n in self._saved.value(tree["params"])] for tree in trees]
        self._known = {name for names in saved_names for name in names}
        self._said = [node for tree in trees for key, node in tree.items() if key in ("params", *PREFERENCES)]
        common = frozenset(self._known & {name for names in live_names for name in names})
        groups_wanted = any(
            self._wanted(f"{self.name}.param_groups.{i}.{key}") for i, tree in enumerate(trees) for key in tree
        )
        if not groups_wanted:
            return
        if self._strict:
            self._missing_parameters(live_names, saved_names, common)
        by_members: dict[frozenset[str], list[int]] = {}
        for index, names in enumerate(saved_names):
            # A group of which nothing is left must not pass for an empty one: its hyper-parameters are not theirs.
            if not names or common.intersection(names):
                by_members.setdefault(common.intersection(names), []).append(index)
        match: list[int | None] = []
        for names in live_names:
            found = by_members.get(common.intersection(names)) if not names or common.intersection(names) else None
            match.append(found.pop(0) if found else None)
        left = [saved_index for indices in by_members.values() for saved_index in indices]
        unmatched = [
            i for i, names in enumerate(live_names) if match[i] is None and (not names or common.intersection(names))
        ]
        if unmatched or left:
            self._membership_changed(live_names, saved_names, unmatched, left)
            return
        order = [index for index in match if index is not None]
        if order != sorted(order):
            self.reordered = order
        for i, place in enumerate(match):
            if place is not None:
                self._plan_group(i, place, trees[place])

    def _live_name(self, saved_name: str) -> str:
        """The live optimizer's own name for a parameter: of the names of a tied one its first."""
        name = self._saved.rename_parameter(saved_name)
        parameter = self.view.parameters.get(name)
        return name if parameter is None else self.view.names[id(parameter)]

    def _missing_parameters(self, live: list[list[str]], saved: list[list[str]], common: frozenset[str]) -> None:
        for i, names in enumerate(live):
            self._problems.missing += [f"{self.name}.param_groups.{i}.params: {n}" for n in names if n not in common]
        for i, names in enumerate(saved):
            self._problems.unexpected += [f"{self.name}.param_groups.{i}.params: {n}" for n in names if n not in common]

    def _membership_changed(
        self, live: list[list[str]], saved: list[list[str]], unmatched: list[int], left: list[int]
    ) -> None:
        def text(groups: list[list[str]], indices: list[int]) -> str:
            return "; ".join(
                f"group {i}: {', '.join(groups[i][:6]) or 'empty'}{' …' * (len(groups[i]) > 6)}" for i in indices
            )

        self._problems.others.append(
            f"{self.name}: the parameter groups hold other parameters than when saved, so their hyper-parameters "
            f"cannot be assigned. Live without a twin: {text(live, unmatched) or 'none'}. Saved without a twin: "
            f"{text(saved, left) or 'none'}. Build the optimizer with the saved groups, or exclude {self.name!r}"
        )

    def _plan_group(self, live_index: int, saved_index: int, tree: dict[str, Any]) -> None:
        live = self.view.shown.param_groups[live_index]
        for key, node in tree.items():
            if key == "params" or not self._wanted(f"{self.name}.param_groups.{saved_index}.{key}"):
                continue
            if key in PREFERENCES:
                before = self._saved.value(node) if isinstance(node, Ref) else None
                if before != live.get(key):
                    self.notes.append(f"group {live_index}: {key} was {before}, stays {live.get(key)}")
                continue
            value = live.get(key)
            for leaf in refs(node):
                spec = self._saved.spec(leaf)
                if spec is None:
                    continue
                if isinstance(value, torch.Tensor) and isinstance(node, Ref):
                    self._saved.check(f"{self.name}.param_groups.{live_index}.{key}", leaf, value)
                self._want(leaf, value if isinstance(value, torch.Tensor) else None, None)
            self._groups[live_index][key] = node

    def _plan_state(self, trees: dict[Any, Any]) -> None:
        optimizer = self.view.shown
        owned = {self.view.names[id(p)]: (p, group) for group in optimizer.param_groups for p in group["params"]}
        for saved_name, tree in trees.items():
            if not isinstance(saved_name, str) or (
                saved_name not in self._known and self._live_name(saved_name) not in owned
            ):
                if self._whole(f"{self.name}.state.{saved_name}", tree):
                    self._state[saved_name] = tree  # of no parameter: some optimizers keep such
                    for key in refs(tree):
                        self._want(key, None, None)
                else:
                    self._left |= _entries(saved_name, tree)
                continue
            name = self._live_name(saved_name)
            if not self._whole(f"{self.name}.state.{name}", tree):
                if name in owned:
                    self._left |= _entries(name, tree)
                continue
            if name not in owned:
                if self._strict:
                    self._problems.unexpected += [self._saved.rename(key) for key in refs(tree)]
                continue
            if name in self._state:
                self._problems.others.append(
                    f"{self.name}: {name} was saved as two parameters with a state each, which are one now; untie them"
                )
                continue
            parameter, group = owned[name]
            self._state[name] = tree
            for key in refs(tree):
                self._want_moment(key, saved_name, name, parameter, group)
        self._absent = [
            name
            for name in owned
            if name not in self._state and name in self._known and self._wanted(f"{self.name}.state.{name}")
        ]

    def _want_moment(
        self, key: str, saved_name: str, name: str, parameter: torch.Tensor, group: dict[str, Any]
    ) -> None:
        spec = self._saved.spec(key)
        if spec is None:
            return
        if isinstance(self.view.shown, FlatOptimizer):
            reason = self.view.shown.refusal(parameter, spec.shape)
            if reason is not None:
                self._problems.others.append(f"{self._saved.rename(key)} {reason}")
                return
        entry = self.view.shown.state.get(parameter)
        live = entry.get(key.rpartition(".")[2]) if isinstance(entry, dict) else None
        live = live if isinstance(live, torch.Tensor) and tuple(live.shape) == spec.shape else None
        model_spec = self._parameter_spec(saved_name)
        if model_spec is not None and spec.shape == model_spec.shape and spec.shape != tuple(parameter.shape):
            self._problems.shapes[self._saved.rename(key)] = f"saved {list(spec.shape)}, live {list(parameter.shape)}"
            return
        like_parameter = spec.shape == tuple(parameter.shape)
        # Moments that lay like their parameter must lie like it now: a fused step reads both as raw memory.
        order = spec.order
        if like_parameter and model_spec is not None and spec.order == model_spec.order:
            order = memory_order(parameter)
        if live is not None and isinstance(live, (DTensor, FlatShard)):
            self._want(key, live, order)
        elif like_parameter and isinstance(parameter, (DTensor, FlatShard)) and live is None:
            self._want(key, parameter, order)
        else:
            self._saved.want(key, None, order=order, device=_device(spec, live, parameter, group))
        if live is not None and key.endswith(f".state.{saved_name}.{key.rpartition('.')[2]}"):
            self._live[self._saved.source(key)] = live

    def _parameter_spec(self, saved_name: str) -> TensorSpec | None:
        for key in (f"model.{saved_name}", saved_name):
            spec = self._saved.spec(key)
            if spec is not None:
                return spec
        return None

    def _want(self, key: str, like: torch.Tensor | None, order: tuple[int, ...] | None) -> None:
        if self._saved.spec(key) is not None:
            self._saved.want(key, like, order=order)

    def take(self) -> None:
        """Note which saved keys this restores, and what is only copied from."""
        self._saved.take([*self._state.values(), *self._groups, *self._other.values(), self._said])
        if self.stock and not isinstance(self.view.shown, FlatOptimizer):
            for key, live in self._live.items():
                self._saved.scratch.goes_into(key, live)

    @property
    def stayed(self) -> tuple[list[str], int]:
        """The keys that stay as they are, and how many there are, here or saved for what is here."""
        nested = self.view.nested
        put: set[tuple[Any, ...]] = {(key,) for key in self._other}
        live: set[tuple[Any, ...]] = {
            (key,) for key in nested if "param_groups" not in nested or key not in ("state", "param_groups")
        }
        if "param_groups" in nested:
            for name, entry in nested["state"].items():
                (put if name in self._absent else live).update(_entries(name, entry))
            for name, tree in self._state.items():
                put |= _entries(name, tree)
                live -= _entries(name, nested["state"].get(name, {}))  # replaced whole
            for i, (group, trees) in enumerate(zip(nested["param_groups"], self._groups, strict=True)):
                live.update(("group", i, key) for key in group if key != "params" and key not in PREFERENCES)
                put.update(("group", i, key) for key in trees)
        stay = (live | self._left) - put
        keys = [".".join(map(str, ("param_groups", *key[1:]) if key[0] == "group" else key)) for key in stay]
        return [f"{self.name}.{key}" for key in sorted(keys)], len(stay | put)

    # applying ---------------------------------------------------------------------------------------------------------

    def check(self) -> None:
        """What can be seen only once values are there.

        Raises:
            MismatchError: one live tensor stands in two groups that were saved with different values, or the parameters
                in a flat one of FSDP1 were saved with different states.
        """
        if isinstance(self.view.shown, FlatOptimizer):
            trees = {
                self.view.parameters[name]: tree for name, tree in self._state.items() if name in self.view.parameters
            }
            new: dict[torch.Tensor, Any] = {parameter: self._saved.value(tree) for parameter, tree in trees.items()}
            new.update((self.view.parameters[name], None) for name in self._absent)
            self.view.shown.check(new, self.name)
        seen: dict[int, Any] = {}
        for live, tree in zip(self.view.shown.param_groups, self._groups, strict=True):
            for key, node in tree.items():
                if isinstance(live.get(key), torch.Tensor):
                    value = self._saved.value(node)
                    number = value.item() if isinstance(value, torch.Tensor) and value.numel() == 1 else value
                    before = seen.setdefault(id(live[key]), number)
                    if isinstance(before, (int, float)) and before != number:
                        raise mismatch(
                            f"{self.name}: groups share one tensor as {key} but were saved with {before} and "
                            f"{number}; give each group a tensor of its own"
                        )

    @property
    def stock(self) -> bool:
        """Whether state and groups are assigned; else the optimizer's own `load_state_dict` is called."""
        return self.view.stock_load and self.view.stock_capture and not self._other

    def assign(self) -> None:
        """Put state and groups in place; dicts and tensors that fit keep their identity."""
        optimizer = self.view.shown
        pairs: Pairs = []
        for name, tree in self._state.items():
            key = self.view.parameters.get(name, name) if isinstance(name, str) else name
            put_entry(optimizer.state, key, self._saved.value(tree), pairs)
        put_all(pairs)
        for _, saved in pairs:
            self._saved.scratch.copied(saved)
        for name in self._absent:
            optimizer.state.pop(self.view.parameters[name], None)
        for live, tree in zip(optimizer.param_groups, self._groups, strict=True):
            for key, node in tree.items():
                live[key] = self._hyper(live.get(key), self._saved.value(node), key)
        if isinstance(optimizer, FlatOptimizer):
            optimizer.put_back()

    def _hyper(self, live: Any, saved: Any, key: str) -> Any:
        """`saved` in the live kind: a compiled step that holds on to a tensor must see it change."""
        if isinstance(live, torch.Tensor) and isinstance(saved, (int, float)):
            with torch.no_grad():
                live.fill_(saved)
            return live
        if isinstance(live, (int, float)) and isinstance(saved, torch.Tensor) and saved.numel() == 1:
            return saved.item()
        if isinstance(live, tuple) and isinstance(saved, tuple) and len(live) == len(saved):
            return tuple(self._hyper(a, b, key) for a, b in zip(live, saved, strict=True))
        return into_live(live, saved)

    def _target(self) -> dict[str, Any]:
        """The canonical form that the live optimizer should show after its own load."""
        nested = dict(self.view.nested)
        if "param_groups" in nested:
            state = dict(nested["state"])
            state.update({name: self._saved.value(tree) for name, tree in self._state.items()})
            for name in self._absent:
                state.pop(name, None)
            nested["state"] = state
            nested["param_groups"] = [
                {**live, **{key: in_kind(live.get(key), self._saved.value(node)) for key, node in tree.items()}}
                for live, tree in zip(nested["param_groups"], self._groups, strict=True)
            ]
        nested.update({key: self._saved.value(node) for key, node in self._other.items()})
        return nested

    def load_own(self) -> None:
        """Call the optimizer's own `load_state_dict`, then prove that everything arrived as saved.

        Raises:
            RestoreError: an entry is not what was saved.
        """
        target = self._target()
        # What is handed over is a copy: some optimizers keep the tensors they are given, and change them later.
        handed = copy.deepcopy(target)
        self.view.optimizer.load_state_dict(numbered_form(self.view, handed) if "param_groups" in handed else handed)
        now = named_form(self.view.optimizer, self.view.optimizer.state_dict(), self.view.names)
        difference = first_difference(target, now, self.name, PREFERENCES)
        if difference:
            raise RestoreError(
                f"{difference} is not what was saved after load_state_dict() of "
                f"{type(self.view.optimizer).__qualname__}: it converts or drops it. Make load_state_dict() exact, or "
                f"exclude it",
                key=difference,
            )

    def undo(self) -> Callable[[], None]:
        """Remember what `load_own` may change; calling the result puts it back."""
        return remembered(self.view.optimizer)


def _entries(name: Any, entry: Any) -> set[tuple[Any, ...]]:
    return {("state", name, key) for key in entry} if isinstance(entry, dict) else {("state", name)}


def _device(
    spec: TensorSpec, live: torch.Tensor | None, parameter: torch.Tensor, group: dict[str, Any]
) -> torch.device:
    if live is not None:
        return local(live).device
    # torch keeps counters on the CPU unless the step itself runs on the device.
    if not spec.shape and not (group.get("capturable") or group.get("fused")):
        return torch.device("cpu")
    return local(parameter).device
