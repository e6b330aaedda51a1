"""Tensors to bytes and back, through `torch.distributed.checkpoint` (DCP)."""

from .engine import Engine, saved_state
from .writer import Root

__all__ = ["Engine", "Root", "saved_state"]
