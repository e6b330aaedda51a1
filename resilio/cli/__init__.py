"""The command `resilio`: parse, call, print, exit code. Answers about records come without importing torch."""

from __future__ import annotations

from .app import main

__all__ = ["main"]
