"""Which values that are no finite numbers make a checkpoint unhealthy, as its manifest tells it."""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from typing import Any

from .manifest import LoadedManifest
from .texts import clean

__all__ = ["SHOWN", "count_text", "faults", "faults_text", "trained_keys"]

_PARAMS = re.compile(r"(.+\.)param_groups\.\d+\.params")

SHOWN = 5  # tensors named in one line


def trained_keys(values: Mapping[str, Any], ties: Mapping[str, str], tensors: Collection[str]) -> frozenset[str]:
    """Flat keys of the parameters that an optimizer owns, whatever it and its model are called.

    Args:
        values: by flat key, among them the names that each group of parameters has.
        ties: flat key -> the flat key whose bytes it shares.
        tensors: the flat keys of those that are no ties.
    """
    named = {
        name
        for key, names in values.items()
        if _PARAMS.fullmatch(key) and isinstance(names, list)
        for name in names
        if isinstance(name, str)
    }
    found = set()
    for name in named:
        key = f"model.{name}"  # those of a model that is called otherwise bear its name
        key = key if key in tensors or key in ties else name
        found.add(ties.get(key, key))
    return frozenset(found)


def faults(manifest: LoadedManifest) -> dict[str, tuple[int, int]]:
    """The tensors that make a checkpoint unhealthy, by name -> how many values are NaN, and infinite.

    A NaN is a fault anywhere; an infinity in what an optimizer trains, and in its state.
    """
    trained = trained_keys(manifest.values, manifest.ties, manifest.tensors)
    optimizers = tuple({place[1] for key in manifest.values if (place := _PARAMS.fullmatch(key))})
    found = {}
    for key in sorted(manifest.tensors):
        nan, infinite = manifest.tensors[key].non_finite or (0, 0)
        at_fault = infinite if key in trained or key.startswith(optimizers) else 0
        if nan or at_fault:
            found[key] = nan, at_fault
    return found


def count_text(nan: int, infinite: int) -> str:
    """Those of both that are not zero, for people."""
    said = [f"{number:,} {what}" for number, what in ((nan, "NaN"), (infinite, "infinite")) if number]
    return ", ".join(said)


def faults_text(found: Mapping[str, tuple[int, int]], more: bool = False) -> str:
    """The first of them for people, each with both numbers.

    Args:
        found: as `faults` has them.
        more: whether there are others besides.
    """
    named = [f"{clean(name)} ({count_text(*counts)})" for name, counts in list(found.items())[:SHOWN]]
    return ", ".join(named) + (" and others" if more or len(found) > SHOWN else "")
