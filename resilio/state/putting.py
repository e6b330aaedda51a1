"""Values where live ones stand: written in place where that is exact, so that what holds on to a tensor sees it."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch

from .tensors import put, same_layout

__all__ = ["Pairs", "in_kind", "into_live", "put_entry", "remembered", "saved_copy"]


Pairs = list[tuple[torch.Tensor, torch.Tensor]]


def into_live(live: Any, saved: Any, later: Pairs | None = None) -> Any:
    """What to put where `live` stands so that it holds `saved`: a live tensor is written in place if that is exact.

    Or noted in `later`, for `put_all`.
    """
    if isinstance(live, torch.Tensor) and isinstance(saved, torch.Tensor) and same_layout(live, saved):
        if later is None:
            put(live, saved)
        else:
            later.append((live, saved))
        return live
    if type(live) is dict and isinstance(saved, dict):
        return type(saved)((k, into_live(live.get(k), v, later)) for k, v in saved.items())
    if type(live) in (list, tuple) and type(saved) is type(live) and len(live) == len(saved):
        return type(saved)(into_live(a, b, later) for a, b in zip(live, saved, strict=True))
    return saved


def saved_copy(value: Any) -> Any:
    """A deep copy in which tensors are plain clones with the same strides."""
    if isinstance(value, torch.Tensor):
        return value.detach().clone(memory_format=torch.preserve_format)
    if type(value) is dict:
        return {key: saved_copy(below) for key, below in value.items()}
    if type(value) in (list, tuple):
        return type(value)(saved_copy(below) for below in value)
    return copy.deepcopy(value)


def put_entry(state: Any, key: Any, new: Any, later: Pairs) -> None:
    """Put `new` into `state[key]`; a dict there keeps its identity, and its tensors where that is exact: see `later`
    of `into_live`.
    """
    live = state.get(key)
    if isinstance(live, dict) and isinstance(new, dict):
        merged = into_live(dict(live), new, later)
        live.clear()
        live.update(merged)
    else:
        state[key] = new


def in_kind(live: Any, saved: Any) -> Any:
    """`saved` as a number or as a tensor, as `live` is."""
    if isinstance(live, torch.Tensor) and isinstance(saved, (int, float)):
        return torch.full_like(live, saved)
    if isinstance(live, (int, float)) and isinstance(saved, torch.Tensor) and saved.numel() == 1:
        return saved.item()
    return saved


def remembered(optimizer: torch.optim.Optimizer) -> Callable[[], None]:
    """Remember what an optimizer's own load may change; calling the result puts it back."""
    before = copy.deepcopy(optimizer.state_dict())
    # Its own load may be what cannot be trusted: state and groups are put back by hand after it.
    state, entries = optimizer.state, [(key, entry, saved_copy(entry)) for key, entry in optimizer.state.items()]
    groups = [(group, dict(group), saved_copy(_without_params(group))) for group in optimizer.param_groups]

    def undo() -> None:
        optimizer.load_state_dict(before)
        state.clear()
        for key, entry, copied in entries:
            state[key] = into_live(entry, copied)
        for group, shallow, copied in groups:
            group.clear()
            group.update({**shallow, **into_live(_without_params(shallow), copied)})
        optimizer.state = state
        optimizer.param_groups[:] = [group for group, _, _ in groups]

    return undo


def _without_params(group: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in group.items() if key != "params"}
