"""The half of the contract that is about writing: whole objects, one winner, nothing half-done."""

from __future__ import annotations

import array
import os
import signal
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from ..errors import AlreadyExistsError
from ..storage import Storage
from ._contract_tools import Contract, check_facts, in_child, keys_of, needs_create, needs_shared, unfinished

__all__ = ["WriteContract"]

_ODD = [
    "with space/and more ",
    "unicode/grüße/☃/日本",
    "run[1]/lr=1e-4?a*",
    "percent%20+&=#;:@!$'\"()~^`{}|<>,",
    "-rf",
    "~",
    "...",
    ".metadata",
    "deep/" * 12 + "end",
]


class Boom(Exception):
    """What a block may raise."""


class BaseBoom(BaseException):
    """What a block may raise as well: DCP's `CheckpointException` and Ctrl-C are no `Exception` either."""


class WriteContract(Contract):
    """What writing promises."""

    # ---- whole objects

    def test_put_then_get_gives_the_same_bytes(self, storage: Storage) -> None:
        """What was put comes back, and is told about truthfully."""
        body = bytes(range(256)) * 40
        info = storage.put("a/b/object", body)
        assert (info.key, info.size_bytes) == ("a/b/object", len(body))
        assert storage.get("a/b/object") == body
        assert storage.stat("a/b/object").size_bytes == len(body)
        assert storage.exists("a/b/object")

    def test_an_object_without_bytes_is_an_object(self, storage: Storage) -> None:
        """Zero bytes, by both ways."""
        storage.put("empty/put", b"")
        with storage.writer("empty/writer"):
            pass
        assert keys_of(storage) == ["empty/put", "empty/writer"]
        for key in keys_of(storage):
            assert storage.get(key) == b""
            assert storage.stat(key).size_bytes == 0
            storage.read_into(key, [(0, memoryview(bytearray()))])

    def test_put_without_if_absent_replaces(self, storage: Storage) -> None:
        """Longer by shorter, so that no old end shows."""
        storage.put("key", b"old and long")
        assert storage.put("key", b"new").size_bytes == 3
        assert storage.get("key") == b"new"
        assert keys_of(storage) == ["key"]

    def test_any_legal_key_works(self, storage: Storage) -> None:
        """Spaces, unicode, glob and URL characters, leading dots and dashes."""
        for key in _ODD:
            storage.put(key, key.encode())
        assert keys_of(storage) == sorted(_ODD)
        for key in _ODD:
            assert storage.get(key) == key.encode()
            assert keys_of(storage, key) == [key]
        storage.delete(_ODD)
        assert keys_of(storage) == []

    @pytest.mark.parametrize("kind", [bytes, bytearray, memoryview])
    def test_every_kind_of_buffer_is_taken(self, storage: Storage, kind: Callable[[bytes], Any]) -> None:
        """Bytes, bytearray and memoryview, by both ways."""
        storage.put("put", kind(b"some bytes"))
        with storage.writer("writer") as out:
            assert out.write(kind(b"some ")) == 5
            assert out.write(kind(b"")) == 0
            assert out.write(kind(b"bytes")) == 5
        assert storage.get("put") == storage.get("writer") == b"some bytes"

    def test_lengths_are_in_bytes_whatever_the_items_are(self, storage: Storage) -> None:
        """`len` of a view of doubles is not its size."""
        items = memoryview(array.array("d", [1.0, 2.0, 3.0]))
        assert storage.put("put", items).size_bytes == 24
        with storage.writer("writer") as out:
            assert out.write(items) == 24
        assert storage.get("put") == storage.get("writer") == items.tobytes()

    def test_buffers_may_be_reused_at_once(self, storage: Storage) -> None:
        """Nothing keeps a reference to what it was given: staging buffers are overwritten by the next save."""
        buffer = bytearray(b"x" * 100_000)
        storage.put("put", memoryview(buffer))
        with storage.writer("writer") as out:
            for fill in b"xyz":
                buffer[:] = bytes([fill]) * len(buffer)
                out.write(memoryview(buffer))
            buffer[:] = b"!" * len(buffer)
        assert storage.get("put") == b"x" * 100_000
        assert storage.get("writer") == b"x" * 100_000 + b"y" * 100_000 + b"z" * 100_000

    # ---- create if absent

    def test_create_if_absent_refuses_what_is_there(self, storage: Storage) -> None:
        """Even the very same bytes; and what is there stays."""
        needs_create(storage)
        storage.put("key", b"first", if_absent=True)
        for body in (b"first", b"second"):
            with pytest.raises(AlreadyExistsError) as caught:
                storage.put("key", body, if_absent=True)
            check_facts(caught.value, "key", storage)
        assert storage.get("key") == b"first"
        storage.delete(["key"])
        storage.put("key", b"again", if_absent=True)
        assert storage.get("key") == b"again"

    def test_create_if_absent_has_exactly_one_winner(self, storage: Storage) -> None:
        """Sixteen threads, several rounds: one is told yes, and its bytes are what is there."""
        needs_create(storage)
        racers = 16
        for round_ in range(4):
            key, start = f"race/{round_}", threading.Barrier(racers)

            def create(racer: int, key: str = key, start: threading.Barrier = start) -> bool:
                start.wait()
                try:
                    storage.put(key, b"%04d" % racer * 1000, if_absent=True)
                except AlreadyExistsError:
                    return False
                return True

            with ThreadPoolExecutor(racers) as pool:
                won = [*pool.map(create, range(racers))]
            assert won.count(True) == 1
            assert storage.get(key) == b"%04d" % won.index(True) * 1000

    def test_a_writer_does_not_replace_an_object(self, storage: Storage) -> None:
        """It fails, at the beginning or at the end, and what is there stays."""
        needs_create(storage)
        storage.put("key", b"first")
        with pytest.raises(AlreadyExistsError), storage.writer("key") as out:
            out.write(b"second")
        assert storage.get("key") == b"first"
        assert unfinished(storage) == []

    # ---- whole or not at all

    def test_an_object_is_not_visible_before_the_block_ends(self, storage: Storage) -> None:
        """Neither by name nor in a listing; right after the block by both."""
        with storage.writer("step/data") as out:
            assert keys_of(storage) == []
            out.write(b"x" * 3_000_000)
            assert not storage.exists("step/data")
            assert keys_of(storage) == []
            assert {item.key for item in unfinished(storage)} <= {"step/data"}
        assert keys_of(storage) == ["step/data"]
        assert storage.stat("step/data").size_bytes == 3_000_000

    @pytest.mark.parametrize("boom", [Boom, BaseBoom])
    @pytest.mark.parametrize("size", [0, 10, 9_000_000])
    def test_an_exception_in_the_block_publishes_nothing(
        self, storage: Storage, boom: type[BaseException], size: int
    ) -> None:
        """No object, nothing dangling, the exception itself comes out, and the key is still free."""
        with pytest.raises(boom), storage.writer("step/data") as out:
            out.write(b"x" * size)
            raise boom
        assert not storage.exists("step/data")
        assert keys_of(storage) == []
        assert unfinished(storage) == []
        with storage.writer("step/data") as out:
            out.write(b"second try")
        assert storage.get("step/data") == b"second try"

    def test_readers_see_all_of_an_object_or_nothing(self, storage: Storage) -> None:
        """While another thread puts: whatever a listing shows has its full length and its bytes."""
        body, done = os.urandom(300_000), threading.Event()

        def put_many() -> None:
            try:
                for number in range(30):
                    storage.put(f"many/{number:03}", body)
            finally:
                done.set()

        with ThreadPoolExecutor(1) as pool:
            writing = pool.submit(put_many)
            while not done.is_set():
                infos = [*storage.list("many/")]
                assert all(info.size_bytes == len(body) for info in infos)
                assert not infos or storage.get(infos[-1].key) == body
            writing.result()

    def test_a_killed_writer_leaves_no_object(self, storage: Storage) -> None:
        """SIGKILL in the middle of a block: nothing is published; what dangles can be found and removed."""
        needs_shared(storage)

        def write_and_die() -> None:
            with storage.writer("step/data") as out:
                out.write(b"x" * 9_000_000)
                os.kill(os.getpid(), signal.SIGKILL)

        storage.put("other", b"untouched")
        assert in_child(write_and_die) == -signal.SIGKILL
        assert keys_of(storage) == ["other"]
        for item in unfinished(storage):
            assert item.key == "step/data"
            storage.abort(item)
            storage.abort(item)  # missing is no error
        assert unfinished(storage) == []
        assert keys_of(storage) == ["other"]
