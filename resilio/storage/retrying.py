"""The one place that retries. Backends must not: layers of retries multiply, and a call may then take any time."""

from __future__ import annotations

import logging
import random
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, TypeVar

from ..clock import Clock, SystemClock
from ..errors import AlreadyExistsError, AuthExpiredError, ConfigError, NotFoundError, ThrottledError, TransientError
from .base import Buffer, Capabilities, Incomplete, ObjectInfo, Storage, Writer, byte_view

if TYPE_CHECKING:
    import tenacity

__all__ = ["RetryingStorage", "retrying"]

_LOG = logging.getLogger("resilio.storage")
_T = TypeVar("_T")

_MAY_PASS = (TransientError, ThrottledError, AuthExpiredError)

# Not the global generator, which belongs to the training, and none with a state that forked ranks would share.
_JITTER = random.SystemRandom()


def retrying(
    storage: Storage,
    *,
    total_s: float = 300.0,
    first_wait_s: float = 0.5,
    longest_wait_s: float = 30.0,
    clock: Clock | None = None,
) -> Storage:
    """`storage`, with calls repeated that failed for a reason that may pass.

    Repeated are `TransientError`, `ThrottledError` and, after `close()` so that credentials are fetched anew,
    `AuthExpiredError`; everything else is raised at once. Waits double up to `longest_wait_s`, each cut by up to half
    at random so that a thousand ranks do not come back at the same moment. When `total_s` have passed since the call
    began, the last error is raised, with the number of tries. A single try is not interrupted: that is the backend's
    own timeout.

    A `writer` block is not repeated, because its bytes are gone by then: it fails, and the save is attempted anew.

    Args:
        storage: what to wrap; one that retries already is wrapped anew, never twice.
        total_s: no try begins later than this after the call.
        first_wait_s: about the wait before the second try.
        longest_wait_s: no wait is longer.
        clock: what to wait by; tests give a fake one.

    Raises:
        ConfigError: a time is negative, or the first wait is zero.

    Source: waits after "Exponential Backoff and Jitter", AWS Architecture Blog, 2015 (there "equal jitter").
    """
    if total_s < 0 or not 0 < first_wait_s <= longest_wait_s:
        raise ConfigError(
            "retrying needs total_s >= 0 and 0 < first_wait_s <= longest_wait_s, "
            f"not {total_s}, {first_wait_s}, {longest_wait_s}"
        )
    inner = storage.inner if isinstance(storage, RetryingStorage) else storage
    return RetryingStorage(inner, total_s, first_wait_s, longest_wait_s, clock or SystemClock())


class RetryingStorage(Storage):
    """What `retrying` returns.

    Attributes:
        inner: the storage that does the work.
    """

    def __init__(
        self, inner: Storage, total_s: float, first_wait_s: float, longest_wait_s: float, clock: Clock
    ) -> None:
        self.inner = inner
        self._total_s, self._first_wait_s, self._longest_wait_s = total_s, first_wait_s, longest_wait_s
        self._clock = clock

    @property
    def url(self) -> str:  # type: ignore[override]  # read-only here: it is the inner one's
        """The inner storage's URL."""
        return self.inner.url

    @property
    def capabilities(self) -> Capabilities:  # type: ignore[override]
        """The inner storage's capabilities."""
        return self.inner.capabilities

    def put(self, key: str, data: Buffer, *, if_absent: bool = False) -> ObjectInfo:
        """See `Storage.put`.

        If the answer to a create was lost, the next try finds the object there; it is ours if its bytes are. (Records
        carry a nonce, so nobody else's are equal.)
        """
        maybe_done = False

        def attempt() -> ObjectInfo:
            nonlocal maybe_done
            try:
                return self.inner.put(key, data, if_absent=if_absent)
            except TransientError:
                maybe_done = True
                raise
            except AlreadyExistsError:
                if maybe_done and self._holds(key, data):
                    return self.inner.stat(key)
                raise

        return self._call("put", key, attempt)

    def _holds(self, key: str, data: Buffer) -> bool:
        try:
            return self.inner.get(key) == byte_view(data)
        except NotFoundError:
            return False

    def writer(self, key: str, *, size_hint: int | None = None) -> AbstractContextManager[Writer]:
        """See `Storage.writer`. Passed through, not repeated."""
        return self.inner.writer(key, size_hint=size_hint)

    def read_into(self, key: str, ranges: Sequence[tuple[int, memoryview]]) -> None:
        """See `Storage.read_into`."""
        self._call("read_into", key, lambda: self.inner.read_into(key, ranges))

    def list(self, prefix: str) -> Iterator[ObjectInfo]:
        """See `Storage.list`. Fetched whole before the first is given out, so that it can be repeated."""
        return iter(self._call("list", prefix, lambda: [*self.inner.list(prefix)]))

    def delete(self, keys: Iterable[str]) -> None:
        """See `Storage.delete`."""
        doomed = [*keys]
        self._call("delete", doomed[0] if doomed else "", lambda: self.inner.delete(doomed))

    def incomplete(self, prefix: str) -> Iterator[Incomplete]:
        """See `Storage.incomplete`."""
        return iter(self._call("incomplete", prefix, lambda: [*self.inner.incomplete(prefix)]))

    def abort(self, item: Incomplete) -> None:
        """See `Storage.abort`."""
        self._call("abort", item.key, lambda: self.inner.abort(item))

    def get(self, key: str) -> bytes:
        """See `Storage.get`."""
        return self._call("get", key, lambda: self.inner.get(key))

    def stat(self, key: str) -> ObjectInfo:
        """See `Storage.stat`."""
        return self._call("stat", key, lambda: self.inner.stat(key))

    def exists(self, key: str) -> bool:
        """See `Storage.exists`."""
        return self._call("exists", key, lambda: self.inner.exists(key))

    def free_bytes(self) -> int | None:
        """See `Storage.free_bytes`."""
        return self.inner.free_bytes()

    def close(self) -> None:
        """See `Storage.close`."""
        self.inner.close()

    def _call(self, verb: str, key: str, attempt: Callable[[], _T]) -> _T:
        begin_s = self._clock.monotonic_s()

        def left_s() -> float:
            return begin_s + self._total_s - self._clock.monotonic_s()

        def wait_s(state: tenacity.RetryCallState) -> float:
            doublings = min(state.attempt_number - 1, 60)  # beyond it a float would overflow
            longest_s = min(self._longest_wait_s, self._first_wait_s * 2.0**doublings)
            return max(0.0, min(left_s(), longest_s * _JITTER.uniform(0.5, 1.0)))

        def before_wait(state: tenacity.RetryCallState) -> None:
            error = _error_of(state)
            _LOG.warning(
                "storage call failed, will be repeated: verb=%s url=%s key=%r try=%d wait_s=%.2f error=%s",
                verb,
                self.url,
                key,
                state.attempt_number,
                state.upcoming_sleep,
                error,
            )
            if isinstance(error, AuthExpiredError):
                self.inner.close()

        def give_up(state: tenacity.RetryCallState) -> _T:
            error = _error_of(state)
            spent_s = self._clock.monotonic_s() - begin_s
            facts = {**error.facts, "tries": state.attempt_number}
            raise type(error)(
                f"{error} (gave up after {state.attempt_number} tries in {spent_s:.0f} s)", **facts
            ) from error

        # What mostly goes well does so without the loop, which costs more than reading a small record does.
        failures: list[Exception] = []
        try:
            return attempt()
        except _MAY_PASS as error:
            failures.append(error)
        import tenacity  # not before: it brings asyncio along, which is a good part of a command's start

        def attempts() -> _T:
            if failures:
                raise failures.pop()
            return attempt()

        retry = tenacity.Retrying(
            retry=tenacity.retry_if_exception_type(_MAY_PASS),
            wait=wait_s,
            stop=lambda state: left_s() <= 0,
            sleep=self._clock.sleep,
            before_sleep=before_wait,
            retry_error_callback=give_up,
        )
        return retry(attempts)


def _error_of(state: tenacity.RetryCallState) -> TransientError | ThrottledError | AuthExpiredError:
    error = state.outcome.exception() if state.outcome else None
    assert isinstance(error, _MAY_PASS)
    return error
