"""Pure decisions: when a save is due, which checkpoints have a reason to live. No torch, no I/O, no clock."""

from __future__ import annotations

from .keep import KeepDecision, KeepPolicy, decide, keep_all, keep_every, keep_last
from .save import SaveContext, SavePolicy, save_every

__all__ = [
    "KeepDecision",
    "KeepPolicy",
    "SaveContext",
    "SavePolicy",
    "decide",
    "keep_all",
    "keep_every",
    "keep_last",
    "save_every",
]
