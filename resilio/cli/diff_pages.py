"""What is shown of two checkpoints side by side. Keys of the JSON are for ever, as those of `pages`."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from ..records.compare import TensorDifference, ValueDifference
from .output import clean, count, size
from .tables import Table
from .tensor_pages import dims

__all__ = ["diff_json", "diff_page"]

_ROWS = 40
_VALUE_WIDTH = 40


def diff_json(
    sides: Sequence[Mapping[str, Any]],
    tensors: Sequence[TensorDifference],
    values: Sequence[ValueDifference],
) -> dict[str, Any]:
    """All of `diff`: the two checkpoints, and what is not the same."""
    kinds = Counter(one.kind for one in tensors)
    return {
        **dict(zip("ab", sides, strict=True)),
        "same": not values and set(kinds) <= {"same"},
        "tensors": {
            "counts": {kind: kinds[kind] for kind in ("same", "changed", "reshaped", "added", "removed")},
            "read_bytes": sum(one.read_bytes for one in tensors),
            "different": [
                {
                    "name": one.name,
                    "kind": one.kind,
                    "elements": one.elements,
                    "of": one.of,
                    "largest": one.largest,
                    "before": _head(one.before),
                    "after": _head(one.after),
                }
                for one in tensors
                if one.kind != "same"
            ],
        },
        "values": [
            {"name": one.name, "in_a": "a" in one.there, "in_b": "b" in one.there, "a": one.before, "b": one.after}
            for one in values
        ],
    }


def diff_page(page: Mapping[str, Any]) -> list[Table | str]:
    """The same for people, from what `diff_json` returned; the largest differences first."""
    a, b, tensors = page["a"], page["b"], page["tensors"]
    head = f"{a['name']}  ->  {b['name']}" + ("" if a["url"] == b["url"] else f"  of {b['url']}")
    parts: list[Table | str] = [clean(head)]
    if tensors["different"]:
        shown = Table("tensor", "", "elements", "largest change", right=frozenset({"elements", "largest change"}))
        rows = sorted(tensors["different"], key=lambda one: (_rank(one), one["name"]))
        for one in rows[:_ROWS]:
            largest = "" if one["largest"] is None else f"{one['largest']:.4g}"
            elements = f"{one['elements']:,} of {one['of']:,}" if one["kind"] == "changed" else f"{one['of']:,}"
            shown.add_row(clean(one["name"]), _said(one), elements, largest)
        parts += ["", shown, *_more(len(rows))]
    if page["values"]:
        shown = Table("value", "a", "b")
        for one in page["values"][:_ROWS]:
            shown.add_row(
                clean(one["name"]),
                clean(_cut(one["a"])) if one["in_a"] else "(not there)",
                clean(_cut(one["b"])) if one["in_b"] else "(not there)",
            )
        parts += ["", shown, *_more(len(page["values"]))]
    counts = ", ".join(f"{number:,} {kind}" for kind, number in tensors["counts"].items() if number)
    read = f"{size(tensors['read_bytes'])} of data read"
    parts += ["", f"tensors: {counts or 'none'}; {count(len(page['values']), 'value')} different; {read}"]
    return parts


def _head(head: tuple[str, tuple[int, ...]] | None) -> dict[str, Any] | None:
    return None if head is None else {"dtype": head[0], "shape": list(head[1])}


def _rank(one: Mapping[str, Any]) -> float:
    """What is of another shape, or there in one alone, first; then by size of the change, nan before all numbers."""
    largest = one["largest"]
    if one["kind"] != "changed":
        return float("-inf")
    return 0.0 if largest is None else -1e308 if largest != largest else -largest


def _said(one: Mapping[str, Any]) -> str:
    if one["kind"] != "reshaped":
        return str(one["kind"])
    before, after = (f"{head['dtype']} {dims(head['shape'])}" for head in (one["before"], one["after"]))
    return f"{before} -> {after}"


def _more(rows: int) -> list[str]:
    return [f" … and {rows - _ROWS} more; --json has all"] if rows > _ROWS else []


def _cut(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= _VALUE_WIDTH else text[: _VALUE_WIDTH - 1] + "…"
