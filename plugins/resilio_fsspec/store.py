"""What `FsspecStorage` asks of one kind of store, and how it calls clients that run on an event loop."""

from __future__ import annotations

import asyncio
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Coroutine, Iterable, Iterator, Sequence
from typing import Any, NamedTuple, TypeVar

from resilio.errors import IntegrityError
from resilio.storage import Capabilities

from .place import Place

__all__ = ["AsyncCalls", "Begun", "Listed", "Range", "Store", "Upload", "concurrently", "copy_into", "pieces"]

_T = TypeVar("_T")
Range = tuple[int, memoryview]

PIECE_BYTES = 16 * 2**20  # a longer range is fetched in several requests, side by side
_SLOWEST_BYTES_S = 256 * 2**10  # a request may take as long as this slow a line needs for it …
_CALL_S = 300.0  # … and as long as this besides; stalls are found much sooner, by the clients' own timeouts


class Listed(NamedTuple):
    """An object in a listing, under its full name."""

    name: str
    size_bytes: int
    modified_s: float | None


class Begun(NamedTuple):
    """An upload that was begun, under the full name of the object."""

    name: str
    token: str
    started_s: float | None


class Upload(ABC):
    """One large object on its way. Nothing of it is visible before `publish`."""

    @abstractmethod
    def part(self, data: bytearray) -> None:
        """Send what comes next."""

    @abstractmethod
    def publish(self, data: bytearray) -> None:
        """Send the last bytes, perhaps none, and make the object visible; FileExistsError or alike if there is one."""

    @abstractmethod
    def abort(self) -> None:
        """Remove what was sent. Called after any failure, `publish`'s too."""


class Store(ABC):
    """One kind of store, in one process. Names are full; errors are the client's own, or already translated.

    Made cheaply, connects when used, and is used by many threads at once.

    Attributes:
        part_bytes: of the first parts of a large object, a multiple of 256 KiB; whatever is smaller is put whole.
    """

    part_bytes = 8 * 2**20

    def __init__(self, place: Place) -> None:
        self.place = place

    @classmethod
    @abstractmethod
    def capabilities(cls, place: Place) -> Capabilities:
        """What this kind of store promises; without asking it."""

    @classmethod  # noqa: B027
    def check(cls, place: Place) -> None:
        """Import the client library, and refuse what cannot work; without connecting.

        Raises:
            ImportError: the library is missing.
            ConfigError: the URL cannot be right.
        """

    def root(self) -> str:
        """The full name of the place, without slashes at its ends."""
        return self.place.folder

    @abstractmethod
    def put(self, name: str, data: bytes, *, if_absent: bool) -> float | None:
        """See `Storage.put`. Returns Unix seconds by the store's clock, None where it does not tell."""

    @abstractmethod
    def upload(self, name: str) -> Upload:
        """Begin a large object."""

    @abstractmethod
    def read(self, name: str, ranges: Sequence[Range]) -> None:
        """See `Storage.read_into`; no range is empty."""

    @abstractmethod
    def get(self, name: str) -> bytes:
        """See `Storage.get`."""

    @abstractmethod
    def stat(self, name: str) -> Listed | None:
        """One object; None if there is none."""

    @abstractmethod
    def list(self, prefix: str) -> Iterable[Listed]:
        """All whose name starts with `prefix`, in any order."""

    @abstractmethod
    def delete(self, names: Sequence[str]) -> None:
        """See `Storage.delete`."""

    def incomplete(self, prefix: str) -> Iterable[Begun]:
        """See `Storage.incomplete`."""
        return ()

    def abort(self, name: str, token: str) -> None:  # noqa: B027
        """See `Storage.abort`."""

    def free_bytes(self) -> int | None:
        """See `Storage.free_bytes`; may raise."""
        return None

    def close(self) -> None:  # noqa: B027
        """Give back connections."""


class AsyncCalls:
    """Runs coroutines on an event loop that another thread turns.

    fsspec's own `sync` leaves a coroutine running when the caller is interrupted: a part would still be sent after the
    upload was aborted, a buffer still be filled after its owner took it back.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self.loop = loop

    def __call__(self, call: Coroutine[Any, Any, _T], size_bytes: int = 0) -> _T:
        """Wait for `call`, which moves `size_bytes`; if the wait ends otherwise, it is cancelled first."""
        ended = threading.Event()

        async def watched() -> _T:
            try:
                return await asyncio.wait_for(call, _CALL_S + size_bytes / _SLOWEST_BYTES_S)
            finally:
                ended.set()

        future = asyncio.run_coroutine_threadsafe(watched(), self.loop)
        try:
            return future.result()
        except BaseException:
            if not future.done():
                future.cancel()
                ended.wait(5)
            raise


async def concurrently(jobs: Iterable[Callable[[], Coroutine[Any, Any, None]]], limit: int) -> None:
    """Do all jobs, at most `limit` at a time; after a failure none goes on."""
    todo = iter(jobs)

    async def work() -> None:
        for job in todo:
            await job()

    workers = [asyncio.ensure_future(work()) for _ in range(limit)]
    try:
        await asyncio.gather(*workers)
    finally:
        for worker in workers:
            worker.cancel()
        await asyncio.gather(*workers, return_exceptions=True)


def pieces(ranges: Sequence[Range]) -> Iterator[Range]:
    """The ranges, long ones in several."""
    for offset, buffer in ranges:
        for at in range(0, len(buffer), PIECE_BYTES):
            yield offset + at, buffer[at : at + PIECE_BYTES]


def copy_into(buffer: memoryview, data: bytes, offset: int) -> None:
    """Fill `buffer` with `data`, the answer for the bytes from `offset` on.

    Raises:
        IntegrityError: they differ in length.
    """
    if len(data) != len(buffer):
        raise IntegrityError(
            f"the object ends before byte {offset + len(buffer)}: of {len(buffer)} bytes from {offset} on, "
            f"{len(data)} came"
        )
    buffer[:] = data
