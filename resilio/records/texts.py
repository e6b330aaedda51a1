"""Texts that come from a store, on their way to a log or a terminal."""

from __future__ import annotations

__all__ = ["clean"]


def clean(text: str) -> str:
    """`text` with everything that is not printable written as an escape: it adds no line, and moves no cursor."""
    if text.isprintable():
        return text
    return "".join(char if char.isprintable() else char.encode("unicode_escape").decode("ascii") for char in text)
