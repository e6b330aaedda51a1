"""What a manifest says of the content of pieces, found out while their bytes are written, beside the writing."""

from __future__ import annotations

from threading import Thread
from types import TracebackType

import torch

from ..records.fingerprints import to_text
from ..records.schema import Piece
from ..state.fingerprint import fp1
from .health import non_finite

__all__ = ["PieceFacts"]

_LARGE = 1 << 20  # bytes; for fewer a thread costs more than the work


class PieceFacts:
    """Fills in how many elements of pieces are not finite, and their fingerprints, while their bytes are written.

    Used as a context, which waits at its end. Not an executor: Python gives those no work any more when the process
    ends, and a save in flight is waited for then.

    Args:
        fingerprints: whether to compute those.
    """

    def __init__(self, *, fingerprints: bool) -> None:
        self._fingerprints = fingerprints
        self._thread: Thread | None = None
        self._error: BaseException | None = None

    def begin(self, piece: Piece, tensor: torch.Tensor) -> None:
        """Look at `piece`, whose bytes are those of `tensor`, in a thread of its own if it is large.

        Blocks: until the one before is done, so that no more than two tensors are held.
        """
        self._wait()
        if tensor.nbytes >= _LARGE:
            thread = Thread(target=self._look, args=(piece, tensor), name="resilio-piece", daemon=True)
            try:
                thread.start()
            except RuntimeError:  # no thread to be had
                pass
            else:
                self._thread = thread
                return
        self._look(piece, tensor)
        self._wait()

    def __enter__(self) -> PieceFacts:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._thread is not None:
            self._thread.join()
        if error is None:
            self._wait()

    def _look(self, piece: Piece, tensor: torch.Tensor) -> None:
        try:
            piece.nan, piece.inf = non_finite(tensor)
            if self._fingerprints:
                piece.fingerprint = to_text(fp1(tensor, piece.offsets))
        except Exception as error:  # noqa: BLE001  raised where it is waited for
            self._error = error

    def _wait(self) -> None:
        if self._thread is not None:
            self._thread.join()
            self._thread = None
        if self._error is not None:
            raise self._error
