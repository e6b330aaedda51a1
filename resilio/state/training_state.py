"""`TrainingState`: everything a job must get back to go on as if nothing had happened."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import nn
from torch.optim import Optimizer

from ..errors import CaptureError, ConfigError
from .again import Seen
from .extras import PerRank, Replicated
from .flat import FlatState, Path
from .fsdp1 import FSDP1View, Original, view_fsdp1
from .fsdp1_optimizer import FlatOptimizer, Lent, borrow, lendable, lends
from .model import ModuleView, Ties, all_parameters, capture_module, view_module
from .names import uses_fsdp1
from .optimizer import OptimizerView, capture_optimizer, view_optimizer
from .rng import capture_rng
from .tree import Flattener, state_of

__all__ = ["Part", "TrainingState"]

Role = Literal["module", "optimizer", "stateful", "plain"]

_RESERVED = ("rank", "step", "buffers_np", "rng")
_KNOWN = ("model", "optimizer", "scheduler", "dataloader", "scaler", "ema")


@dataclass(frozen=True)
class Part:
    """One thing of the state.

    Attributes:
        path: its place: ``("model",)``, ``("optimizer", "gen")``.
        role: how it is captured and put back.
        value: the live object.
        rule: whether it belongs to a rank; None lets the states decide.
    """

    path: Path
    role: Role
    value: Any
    rule: Replicated | PerRank | None

    @property
    def name(self) -> str:
        """For people: the path with dots."""
        return ".".join(map(str, self.path))


class TrainingState:
    """The live objects of a training job, by name.

    Each may be anything with `state_dict` and `load_state_dict`; a plain dict or list, which a restore changes in
    place; a tensor or numpy array, likewise; or another plain value. A number or text cannot be changed in the caller's
    variable: after a restore read it from here, and set it here before a save::

        state = TrainingState(model=model, optimizer=optimizer, epoch=0)
        ...
        state["epoch"] += 1

    Modules count as models wherever they are passed. Several models, optimizers or schedulers go in as a dict:
    `model={"gen": g, "disc": d}`.

    Args:
        model: module, or dict of modules. May be wrapped by `torch.compile`, DDP, FSDP2, activation checkpointing.
        optimizer: optimizer, or dict of them. Their parameters must be in the modules.
        scheduler: learning-rate scheduler, or dict of them.
        dataloader: saved for each rank; goes on at another world only if all ranks saved the same state.
        scaler: gradient scaler.
        ema: averaged model, or anything with a `state_dict`.
        rng: whether python's, numpy's and torch's generators are part of it.
        **extras: more, each equal on all ranks unless wrapped in `per_rank`.

    Raises:
        ConfigError: a name is reserved, or a thing cannot be what it is passed as.
    """

    def __init__(
        self,
        *,
        model: Any = None,
        optimizer: Any = None,
        scheduler: Any = None,
        dataloader: Any = None,
        scaler: Any = None,
        ema: Any = None,
        rng: bool = True,
        **extras: Any,
    ) -> None:
        if not isinstance(rng, bool):
            raise ConfigError("rng is True or False: the generators themselves are global", name="rng")
        self.rng = rng
        self._values: dict[str, Any] = {}
        self._seen: Seen | None = None  # in the last capture
        known = (model, optimizer, scheduler, dataloader, scaler, ema)
        for name, value in (*zip(_KNOWN, known, strict=True), *extras.items()):
            if value is not None or name not in _KNOWN:
                self[name] = value

    @classmethod
    def of(cls, state: TrainingState | Mapping[str, Any]) -> TrainingState:
        """`state` itself, or one made of a plain mapping with the same names.

        Raises:
            ConfigError: it is neither, or has no part.
        """
        made = cls._of(state)
        if not made._values:
            raise ConfigError(
                "the state has no part, so there is nothing to save or restore: pass what training needs, such as "
                "model=…, optimizer=…; a known name that is None counts as not passed"
            )
        return made

    @classmethod
    def _of(cls, state: TrainingState | Mapping[str, Any]) -> TrainingState:
        if isinstance(state, cls):
            return state
        if not isinstance(state, Mapping):
            raise ConfigError(f"state must be a TrainingState or a mapping from names, not {type(state).__qualname__}")
        for name in state:
            if not isinstance(name, str):
                raise ConfigError(
                    f"state must be a TrainingState or a mapping from names, not {type(state).__qualname__} with the "
                    f"key {name!r}, of type {type(name).__qualname__}; names are text, such as 'model'"
                )
        return cls(**state)

    def __getitem__(self, name: str) -> Any:
        value = self._values[name]
        return value.value if isinstance(value, (Replicated, PerRank)) else value

    def __setitem__(self, name: str, value: Any) -> None:
        """Set what is saved under `name`; a declaration (`per_rank`) made before stays."""
        if name in _RESERVED or not name or "." in name or "~" in name:
            raise ConfigError(
                f"{name!r} cannot name a part of the state: {', '.join(_RESERVED)} are taken, and a name has no dots",
                name=name,
            )
        before = self._values.get(name)
        if isinstance(before, PerRank) and not isinstance(value, (Replicated, PerRank)):
            value = PerRank(value, before.on_resize)
        _check(name, value)
        self._values[name] = value

    def __getattr__(self, name: str) -> Any:
        try:
            return self[name] if name != "_values" else self.__dict__[name]
        except KeyError:
            raise AttributeError(f"the training state has no {name!r}", name=name, obj=self) from None

    def __contains__(self, name: object) -> bool:
        return name in self._values

    def __iter__(self) -> Iterator[str]:
        return iter(self._values)

    def __repr__(self) -> str:
        return f"<TrainingState {', '.join([*self._values, *(['rng'] if self.rng else [])])}>"

    def parts(self) -> list[Part]:
        """The parts in the order they are captured: modules first, for optimizers are named after them."""
        found: list[Part] = []
        for name, held in self._values.items():
            rule = held if isinstance(held, (Replicated, PerRank)) else None
            value = self[name]
            if rule is None and name != "dataloader":
                rule = Replicated(value)
            if _is_group(name, value):
                found += [Part((name, key), _role(below), below, rule) for key, below in value.items()]
            else:
                found.append(Part((name,), _role(value), value, rule))
        rank = {"module": 0, "optimizer": 1, "stateful": 2, "plain": 2}
        return sorted(found, key=lambda part: rank[part.role])

    def view_modules(self) -> dict[Path, ModuleView]:
        """A look at every live module, by path."""
        return {
            part.path: (view_fsdp1 if uses_fsdp1(part.value) else view_module)(part.value, part.name)
            for part in self.parts()
            if part.role == "module"
        }

    def view_optimizers(self, modules: dict[Path, ModuleView]) -> dict[Path, OptimizerView]:
        """A look at every live optimizer, by path."""
        named = list(all_parameters({module_prefix(path): view for path, view in modules.items()}))
        flattened = _originals(modules)
        holders = {id(one.holder) for one in flattened}
        found = {}
        for part in self.parts():
            if part.role == "optimizer":
                held = any(id(p) in holders for group in part.value.param_groups for p in group["params"])
                shown = FlatOptimizer(part.value, flattened, part.name) if held else None
                found[part.path] = view_optimizer(part.value, named, part.name, shown)
        return found

    def lend(self, gather: Callable[[Any, str], list[Any]]) -> Lent:
        """What ranks tell each other before a save: under FSDP1, the optimizer state of which one has no element.

        Args:
            gather: gives each rank the words of all.

        Ranks: all, and collective, if a model is sharded by FSDP1 with ``use_orig_params=True``; else local. Whatever
            is wrong with a rank's state is raised by `capture`, not here.
        """
        parts = self.parts()
        if not any(part.role == "optimizer" for part in parts):
            return {}
        if not any(part.role == "module" and uses_fsdp1(part.value) and lends(part.value) for part in parts):
            return {}
        try:
            modules = self.view_modules()
            views = {".".join(map(str, path)): view for path, view in self.view_optimizers(modules).items()}
            mine = lendable(views, _originals(modules))
        except Exception:  # noqa: BLE001 - told by `capture`; the others are waiting
            mine = {}
        lent: Lent = {}
        for told in gather(mine, "telling what FSDP1 keeps on other ranks"):
            for optimizer, alike in told.items():
                for entries, names in alike:
                    lent.setdefault(optimizer, {}).update(dict.fromkeys(names, entries))
        return lent

    def capture(self, step: int, *, rank: int = 0, world: int = 1, lent: Lent | None = None) -> FlatState:
        """The state now: references to live tensors, copies of everything else. Changes nothing.

        Args:
            step: optimizer steps completed.
            rank: this process.
            world: number of ranks.
            lent: what `lend` returned.

        Raises:
            CaptureError: a part cannot be saved exactly. Names it.

        Ranks: local.
        """
        parts = self.parts()
        about = rank, world, [(part.path, part.role, type(part.rule)) for part in parts]

        def others(flattener: Flattener) -> Iterator[tuple[bool, Path, Any]]:
            return self._others(flattener, parts, step, rank, world)

        again = self._seen.capture(parts, others, about) if self._seen is not None and not lent else None
        if again is not None:
            return again
        self._seen = None
        flattener, ties = Flattener(), Ties()
        flat = flattener.flat
        modules = self.view_modules()
        optimizers = self.view_optimizers(modules)
        for path, optimizer in optimizers.items():
            known = (lent or {}).get(".".join(map(str, path)))
            if known:
                borrow(optimizer, known, _originals(modules))
        tree, local_tree = flat.tree, flat.local_tree
        for part in parts:
            if part.role == "module":
                kind: Any = "parameter" if part.path[0] == "model" else "other"
                below, hidden = capture_module(flattener, modules[part.path], part.path, ties, kind)
                _place(tree, part.path, below)
                if hidden:
                    _place(tree, ("buffers_np", *module_path(part.path)), hidden)
            elif part.role == "optimizer":
                _place(tree, part.path, capture_optimizer(flattener, optimizers[part.path], part.path))
        for own, path, below in others(flattener):
            _place(local_tree if own else tree, path, below)
        self._seen = Seen.of(flat, parts, modules, optimizers, about)
        return flat

    def _others(
        self, flattener: Flattener, parts: list[Part], step: int, rank: int, world: int
    ) -> Iterator[tuple[bool, Path, Any]]:
        """Capture what is neither module nor optimizer: whether it is this rank's own, path and tree of each."""
        for part in parts:
            if part.role in ("module", "optimizer"):
                continue
            value = state_of(part.value, part.name) if part.role == "stateful" else part.value
            if _is_own(part, world):
                yield True, part.path, flattener.add(("rank", str(rank), *part.path), value)
            else:
                # Shared tensors come back shared. Ties are rank 0's, so a state of each rank's own has none.
                yield False, part.path, flattener.add(part.path, value, ties={})
        if self.rng:
            yield True, ("rng",), flattener.add(("rank", str(rank), "rng"), capture_rng())
        yield False, ("step",), flattener.add(("step",), step)


def _originals(modules: dict[Path, ModuleView]) -> list[Original]:
    return [one for view in modules.values() if isinstance(view, FSDP1View) for one in view.originals]


def module_path(path: Path) -> Path:
    """A module's path without ``model``, which goes without saying in names of parameters and hidden buffers."""
    return path[1:] if path[0] == "model" else path


def module_prefix(path: Path) -> str:
    """The same as text: names of a lone model have no prefix."""
    return ".".join(map(str, module_path(path)))


def _place(tree: dict[Any, Any], path: Path, below: Any) -> None:
    for name in path[:-1]:
        tree = tree.setdefault(name, {})
    if not path:
        tree.update(below)
        return
    if path[-1] in tree and isinstance(tree[path[-1]], dict) and isinstance(below, dict):
        clash = set(tree[path[-1]]) & set(below)
        if clash:
            raise CaptureError(
                f"{'.'.join(map(str, path))}: {sorted(clash)[0]!r} is there twice; rename one of the parts"
            )
        tree[path[-1]].update(below)
        return
    tree[path[-1]] = below


def _has_state(value: Any) -> bool:
    return callable(getattr(value, "state_dict", None)) and callable(getattr(value, "load_state_dict", None))


def _is_group(name: str, value: Any) -> bool:
    """Whether a dict holds several parts rather than being state itself."""
    return (
        isinstance(value, dict)
        and bool(value)
        and all(_has_state(below) for below in value.values())
        and not _has_state(value)
    )


def _role(value: Any) -> Role:
    if isinstance(value, nn.Module):
        return "module"
    if isinstance(value, Optimizer):
        return "optimizer"
    return "stateful" if _has_state(value) else "plain"


def _check(name: str, held: Any) -> None:
    value = held.value if isinstance(held, (Replicated, PerRank)) else held
    inner: Iterable[Any] = value.values() if _is_group(name, value) else (value,)
    if _is_group(name, value):
        for key in value:
            if not isinstance(key, str) or not key or "." in key or "~" in key:
                raise ConfigError(f"{name}: {key!r} cannot name one of several; use text without dots", name=name)
    for below in inner:
        role = _role(below)
        if name == "model" and role != "module":
            raise ConfigError(
                f"model must be a torch module or a dict of them, not {type(below).__qualname__}", name=name
            )
        if name == "optimizer" and role == "module":
            raise ConfigError(
                f"optimizer is a torch module: {type(below).__qualname__}. Pass it as model=, or under its own name",
                name=name,
            )
        if name in _KNOWN and role == "plain":
            where, below, way = _way_out(name, below)
            raise ConfigError(
                f"{where} has no state_dict and load_state_dict: {type(below).__qualname__}. {way}", name=name
            )
        if isinstance(held, PerRank) and role in ("module", "optimizer"):
            raise ConfigError(
                f"{name}: modules and optimizers cannot be per rank; their shards are DTensors", name=name
            )


def _way_out(name: str, value: Any) -> tuple[str, Any, str]:
    """Where there is a thing without `state_dict`, the thing, and what to do."""
    several = value.values() if isinstance(value, dict) else value if isinstance(value, (list, tuple)) else ()
    way = "Leave it out if it has no state"
    if any(map(_has_state, several)):
        if not isinstance(value, dict):
            return name, value, f"Pass several as a dict: {name}={{'a': …, 'b': …}}"
        key = next(key for key, below in value.items() if not _has_state(below))
        return f"{name}[{key!r}]", value[key], way
    if isinstance(value, (dict, list, tuple, torch.Tensor)):
        return name, value, f"Plain values and tensors go under a name of their own, such as {name}_state=…"
    if name == "dataloader" and hasattr(value, "sampler"):
        way += "; if its sampler has one, pass the sampler"
    return name, value, way


def _is_own(part: Part, world: int) -> bool:
    # A loader's state (rule None) is saved for every rank, and a restore at another world finds out whether all were
    # equal: to ask that here would take a collective in every save.
    return isinstance(part.rule, PerRank) or (part.rule is None and world > 1)
