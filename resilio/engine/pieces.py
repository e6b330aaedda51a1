"""What a manifest says of the content of a piece, found out when its bytes are about to be written."""

from __future__ import annotations

import torch

from ..records.fingerprints import to_text
from ..records.schema import Piece
from ..state.fingerprint import fp1
from .health import non_finite

__all__ = ["look_at"]


def look_at(piece: Piece, tensor: torch.Tensor, *, fingerprints: bool) -> None:
    """Fill in how many elements of `piece` are not finite, and its fingerprint.

    Args:
        piece: the manifest's line.
        tensor: its elements, on the CPU.
        fingerprints: whether to compute that.
    """
    piece.nan, piece.inf = non_finite(tensor)
    if fingerprints:
        piece.fingerprint = to_text(fp1(tensor, piece.offsets))
