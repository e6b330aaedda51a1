"""`CheckpointManager` and what it gives back."""

from .handle import SaveHandle
from .manager import CheckpointManager
from .readonly import restore
from .report import RestoreReport

__all__ = ["CheckpointManager", "RestoreReport", "SaveHandle", "restore"]
