"""What a save gives back while it may still be running."""

from __future__ import annotations

import asyncio
import concurrent.futures
import logging
from collections.abc import Callable, Generator
from concurrent.futures import Future

from ..types import CheckpointRef

__all__ = ["SaveHandle"]

_log = logging.getLogger("resilio")


class SaveHandle:
    """One attempt to save. Can be asked, waited for and awaited, on any rank; none of it is collective.

    A failure is raised by the manager as well, on all ranks in the same `step`, `save` or `close`, whether or not
    anybody looks here.

    Attributes:
        step: optimizer steps completed in the state that is being saved.
        reason: why it is saved.
    """

    def __init__(self, step: int, reason: str, future: Future[CheckpointRef]) -> None:
        self.step = step
        self.reason = reason
        self._future = future

    @classmethod
    def failed(cls, step: int, reason: str, error: BaseException) -> SaveHandle:
        """That of a save which failed before it could begin."""
        future: Future[CheckpointRef] = Future()
        future.set_exception(error)
        return cls(step, reason, future)

    def done(self) -> bool:
        """Whether this rank knows the outcome. Another rank may know it a little earlier or later."""
        return self._future.done()

    def result(self, timeout_s: float | None = None) -> CheckpointRef:
        """The committed checkpoint.

        Raises:
            SaveError: the attempt failed.
            TimeoutError: not done within `timeout_s`.

        Blocks: until done.
        """
        error = self.exception(timeout_s)
        if error is not None:
            raise error
        return self._future.result()

    def exception(self, timeout_s: float | None = None) -> BaseException | None:
        """The failure, None if it was committed. Blocks until done, or raises TimeoutError."""
        try:
            return self._future.exception(timeout_s)
        except concurrent.futures.TimeoutError:  # another class than TimeoutError before Python 3.11
            raise TimeoutError(f"the save of step {self.step} is not done after {timeout_s} s") from None

    def log_failure(self, tell: Callable[[BaseException], None] | None = None) -> None:
        """Log the failure, now or when it is known, for nobody is there any more who could raise it.

        Args:
            tell: called with it then.
        """

        def done(future: Future[CheckpointRef]) -> None:
            if (error := future.exception()) is not None:
                _log.error("the save in flight failed step=%d error=%s", self.step, error)
                if tell is not None:
                    tell(error)

        self._future.add_done_callback(done)

    def __await__(self) -> Generator[object, None, CheckpointRef]:
        return (yield from asyncio.wrap_future(self._future).__await__())

    def __repr__(self) -> str:
        if not self.done():
            how = "running"
        else:
            how = "failed" if self._future.exception() else "committed"
        return f"<SaveHandle step {self.step} {how}>"
