"""Tables for people: columns side by side, a row one line whatever the terminal's width, so it can be cut and searched.

Our own, since a thousand rows should be there at once.
"""

from __future__ import annotations

import unicodedata
from collections.abc import Iterator
from itertools import chain

__all__ = ["Table", "width"]

_RIGHT = frozenset({"step", "gen", "ranks", "size", "tensors", "there"})
_GAP = "  "
_STYLES = {"bold": "\x1b[1m", "dim": "\x1b[2m"}
_PLAIN = "\x1b[0m"


class Table:
    """Rows of texts, aligned.

    Args:
        *columns: their heads; none for a table without a head.
        right: columns that hold numbers, besides those that always do.
    """

    def __init__(self, *columns: str, right: frozenset[str] = frozenset()) -> None:
        self._columns = columns
        self._right = [column in _RIGHT | right for column in columns]
        self._rows: list[tuple[str, ...]] = []
        self._styles: list[str | None] = []

    def add_row(self, *cells: str, style: str | None = None) -> None:
        """Add one; `style` is ``bold`` or ``dim``, for a terminal that can show it."""
        self._rows.append(cells)
        self._styles.append(style)

    def lines(self, *, styled: bool = False) -> Iterator[str]:
        """The lines, without blanks at their ends."""
        head = [self._columns] if any(self._columns) else []
        widths = [max(map(width, cells)) for cells in zip(*chain(head, self._rows), strict=True)]
        right = self._right or [False] * len(widths)
        for cells, style in chain(((cells, "bold") for cells in head), zip(self._rows, self._styles, strict=True)):
            line = _GAP.join(
                _fill(cell, wide, to_right) for cell, wide, to_right in zip(cells, widths, right, strict=True)
            ).rstrip()
            yield f"{_STYLES[style]}{line}{_PLAIN}" if styled and style else line


def _fill(cell: str, wide: int, to_right: bool) -> str:
    blanks = " " * (wide - width(cell))
    return blanks + cell if to_right else cell + blanks


def width(text: str) -> int:
    """How many places `text` takes on a terminal."""
    if text.isascii():
        return len(text)
    return sum(
        0 if unicodedata.combining(char) else 2 if unicodedata.east_asian_width(char) in "WF" else 1 for char in text
    )
