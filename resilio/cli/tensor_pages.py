"""What is shown of tensors one by one. Keys of the JSON are for ever, as those of `pages`."""

from __future__ import annotations

from collections.abc import Sequence
from fnmatch import fnmatchcase
from typing import Any

from ..records.health import count_text
from ..records.manifest import LoadedManifest
from .output import clean, count, size
from .tables import Table

__all__ = ["dims", "listed", "listing", "matching"]


def listed(manifest: LoadedManifest, match: str | None = None) -> list[dict[str, Any]]:
    """Every tensor whose name fits the glob `match`, by name, tied ones under each of their names."""
    names = {**dict.fromkeys(manifest.tensors), **manifest.ties}
    found = []
    for name, twin in sorted(names.items()):
        if match is None or fnmatchcase(name, match):
            tensor = manifest.tensors[twin or name]
            nan, infinite = tensor.non_finite or (None, None)
            found.append(
                {
                    "name": name,
                    "dtype": tensor.dtype,
                    "shape": list(tensor.shape),
                    "size_bytes": tensor.size_bytes,
                    "pieces": len(tensor.pieces),
                    "tied_to": twin,
                    "nan": nan,
                    "inf": infinite,
                }
            )
    return found


def matching(rows: Sequence[dict[str, Any]], match: str | None) -> list[dict[str, Any]]:
    """Those whose name fits the glob."""
    return [one for one in rows if match is None or fnmatchcase(one["name"], match)]


def listing(rows: Sequence[dict[str, Any]], of: int) -> list[Table | str]:
    """The same for people; `of` is how many there are in all. "not finite" is left out where all are."""
    bad = any(one.get("nan") or one.get("inf") for one in rows)
    more = ["not finite"] if bad else []
    shown = Table("tensor", "dtype", "shape", "pieces", "size", *more, "", right=frozenset({"pieces"}))
    for one in rows:
        tied = f"tied to {one['tied_to']}" if one["tied_to"] else ""
        shown.add_row(
            clean(one["name"]),
            one["dtype"],
            dims(one["shape"]),
            str(one["pieces"]),
            size(one["size_bytes"]),
            *([count_text(one["nan"] or 0, one["inf"] or 0)] if bad else []),
            clean(tied),
        )
    stored = sum(one["size_bytes"] for one in rows if not one["tied_to"])
    some = "" if len(rows) == of else f" of {of:,}"
    return [shown, "", f"{count(len(rows), 'tensor')}{some}, {size(stored)}"]


def dims(shape: Sequence[int]) -> str:
    """A shape for people."""
    return "×".join(map(str, shape)) or "scalar"
