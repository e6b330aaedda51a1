"""The reference part of docs/hooks.md, made from the docstrings: ``python tests/hooks/hooks_page.py`` writes it."""

from __future__ import annotations

import dataclasses
import inspect
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from resilio import events
from resilio.hooks import specs
from resilio.storage import RegisterStorage

PAGE = Path(__file__).resolve().parents[2] / "docs/hooks.md"
BEGIN, END = "<!-- from the docstrings -->\n", "<!-- to here -->\n"
GIVEN = {
    "resilio_register_storage": RegisterStorage,
    "resilio_register_policies": specs.RegisterPolicy,
    "resilio_register_drills": specs.RegisterDrill,
    "resilio_add_commands": specs.Commands,
}


def reference() -> str:
    """All of it: the hooks in their order, then the events."""
    parts: list[str] = []
    for spec in specs.HOOKS:
        parts += [f"## `{spec.__name__}`", f"`{spec.__name__}{_signature(spec)}`", *_text(spec)]
        if spec.__name__ in GIVEN:
            call: Any = GIVEN[spec.__name__].__call__
            (name,) = inspect.signature(spec).parameters
            parts += [f"`{name}{_signature(call)}`", *_text(call)]
        if spec is specs.resilio_describe:
            parts += ["The `context`:", *_items(inspect.getdoc(specs.SaveFacts) or "")]
    parts += ["## Events", *(inspect.getdoc(events) or "").replace("``", "`").split("\n\n"), "\n".join(_table())]
    return "\n\n".join(part for part in parts if part) + "\n"


def _signature(of: Any) -> str:
    """Without `self`, and types without the quotes that a deferred annotation shows."""
    return re.sub(r"'([A-Za-z][^']*)'", r"\1", str(inspect.signature(of)).replace("(self, ", "("))


def _text(of: Any) -> Iterator[str]:
    text = (inspect.getdoc(of) or "").replace("``", "`")
    for paragraph in re.split(r"\n\n(?! )", text):
        head, _, rest = paragraph.partition("\n")
        if head in ("Args:", "Returns:"):
            yield head
            yield from _items(paragraph) if head == "Args:" else [inspect.cleandoc(rest)]
        elif "::\n\n" in paragraph:
            said, _, code = paragraph.partition("::\n\n")
            yield f"{said}:"
            yield f"<!-- fragment -->\n```python\n{inspect.cleandoc(code)}\n```"
        else:
            yield paragraph


def _items(text: str) -> Iterator[str]:
    """The list below ``Args:`` or ``Attributes:``."""
    listed = re.split(r"(?:Args|Attributes):\n", text.replace("``", "`"))[1]
    yield re.sub(r"^(\w+): ", r"- `\1`: ", re.sub(r"\n {4}(?= )", "\n", inspect.cleandoc(listed)), flags=re.M)


def _table() -> Iterator[str]:
    own = {field.name for field in dataclasses.fields(events.Event)}
    yield "| event | when | its fields, besides `url` and `time_s` |"
    yield "|---|---|---|"
    for name in events.__all__:
        kind = getattr(events, name)
        if kind is not events.Event:
            fields = ", ".join(f"`{field.name}`" for field in dataclasses.fields(kind) if field.name not in own)
            yield f"| `{name}` | {(inspect.getdoc(kind) or '').partition(chr(10))[0]} | {fields} |"


if __name__ == "__main__":
    before, _, rest = PAGE.read_text("utf-8").partition(BEGIN)
    PAGE.write_text(before + BEGIN + "\n" + reference() + "\n" + END + rest.partition(END)[2], "utf-8")
