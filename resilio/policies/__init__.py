"""Pure decisions: when a save is due, which checkpoints have a reason to live. No torch, no I/O, no clock."""

from __future__ import annotations

from .keep import (
    KeepDecision,
    KeepPolicy,
    decide,
    keep_all,
    keep_best,
    keep_every,
    keep_healthy,
    keep_last,
    keep_within,
)
from .parse import PolicyFactory, PolicyRegistry, parse, parse_keep, parse_save
from .save import SaveContext, SavePolicy, save_at, save_every, save_on_signal

__all__ = [
    "KeepDecision",
    "KeepPolicy",
    "PolicyFactory",
    "PolicyRegistry",
    "SaveContext",
    "SavePolicy",
    "decide",
    "keep_all",
    "keep_best",
    "keep_every",
    "keep_healthy",
    "keep_last",
    "keep_within",
    "parse",
    "parse_keep",
    "parse_save",
    "save_at",
    "save_every",
    "save_on_signal",
]
