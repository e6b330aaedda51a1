"""Tensors to bytes and back, through `torch.distributed.checkpoint` (DCP)."""

from .engine import Engine, saved_state
from .foreign import ForeignCheckpoint, fill_foreign, foreign_state, open_foreign
from .foreign_values import check_directory, contents, load_saved
from .writer import Root

__all__ = [
    "Engine",
    "ForeignCheckpoint",
    "Root",
    "check_directory",
    "contents",
    "fill_foreign",
    "foreign_state",
    "load_saved",
    "open_foreign",
    "saved_state",
]
