"""Whether two nested states are the same."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

import numpy as np
import torch

from ..records.values import canonical_bytes, encode_value
from .tensors import same_bytes
from .tree import Flattener

__all__ = ["first_difference", "same_nested"]


def same_nested(a: Any, b: Any) -> bool:
    """Whether two nested states are equal in containers, types and, of tensors, in bits."""
    if isinstance(a, torch.Tensor) and isinstance(b, torch.Tensor):
        return same_bytes(a, b)
    if isinstance(a, np.ndarray) and isinstance(b, np.ndarray):
        return a.dtype == b.dtype and np.array_equal(a, b)
    if isinstance(a, dict) and isinstance(b, dict):
        return a.keys() == b.keys() and all(same_nested(a[key], b[key]) for key in a)
    if isinstance(a, (list, tuple)) and isinstance(b, (list, tuple)):
        return len(a) == len(b) and all(map(same_nested, a, b))
    return type(a) is type(b) and bool(a == b)


def first_difference(wanted: Any, found: Any, name: str, ignored: Collection[str]) -> str | None:
    """The first flat key below `name` that differs in presence, type or bits; None if none does.

    Args:
        wanted: nested state.
        found: the other.
        name: what both are called.
        ignored: last parts of keys that do not count.
    """
    sides = []
    for nested in (wanted, found):
        flattener = Flattener()
        flattener.add((name,), nested)
        sides.append(flattener.flat)
    a, b = sides
    for key in (*a.paths, *(key for key in b.paths if key not in a.paths)):
        if key.rpartition(".")[2] in ignored:
            continue
        if key in a.tensors and key in b.tensors:
            if not same_bytes(a.tensors[key], b.tensors[key]):
                return key
        elif key in a.values and key in b.values:
            x, y = (canonical_bytes(encode_value(side.values[key], key)) for side in sides)
            if x != y:
                return key
        else:
            return key
    return None
