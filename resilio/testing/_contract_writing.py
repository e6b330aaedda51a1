"""The part of the contract that is about writing: whole objects, one winner, nothing half-done."""

from __future__ import annotations

import array
import os
import signal
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, suppress
from functools import partial
from typing import Any

import pytest

from ..errors import AlreadyExistsError
from ..storage import Capabilities, Storage, Writer
from ._contract_tools import (
    Contract,
    check_bytes,
    check_facts,
    copy_of,
    fork_barrier,
    in_children,
    keys_of,
    needs_create,
    needs_shared,
    promised,
    unfinished,
)

__all__ = ["WriteContract"]


class Boom(Exception):
    """What a block may raise."""


class BaseBoom(BaseException):
    """What a block may raise as well: DCP's `CheckpointException` and Ctrl-C are no `Exception` either."""


class WriteContract(Contract):
    """What writing promises."""

    # ---- whole objects

    @promised(Storage.put, "Store a small object whole; durable on return.")
    def test_put_then_get_gives_the_same_bytes(self, storage: Storage) -> None:
        """What was put comes back, and is told about truthfully."""
        body = bytes(range(256)) * 40
        info = storage.put("a/b/object", body)
        assert (info.key, info.size_bytes) == ("a/b/object", len(body))
        check_bytes(storage.get("a/b/object"), body)
        assert storage.stat("a/b/object").size_bytes == len(body)
        assert storage.exists("a/b/object")

    @promised(Storage, "An object may have no bytes")
    def test_an_object_without_bytes_is_an_object(self, storage: Storage) -> None:
        """Zero bytes, by both ways: stored, listed, read."""
        storage.put("empty/put", b"")
        with storage.writer("empty/writer"):
            pass
        with storage.writer("empty/written") as out:
            assert out.write(b"") == 0
        assert keys_of(storage) == ["empty/put", "empty/writer", "empty/written"]
        for key in keys_of(storage):
            check_bytes(storage.get(key), b"")
            assert storage.stat(key).size_bytes == 0
            storage.read_into(key, [(0, memoryview(bytearray()))])
        storage.delete(["empty/put", "empty/writer", "empty/written"])
        assert keys_of(storage) == []

    @promised(Storage.put, "An object that is there is replaced, in one step")
    def test_put_without_if_absent_replaces(self, storage: Storage) -> None:
        """Longer by shorter, so that no old end shows."""
        storage.put("key", b"old and long")
        assert storage.put("key", b"new").size_bytes == 3
        check_bytes(storage.get("key"), b"new")
        assert storage.stat("key").size_bytes == 3
        assert keys_of(storage) == ["key"]

    @promised(Storage.writer, "it becomes visible, whole and durable, when the block ends cleanly")
    def test_a_large_object_written_in_odd_pieces_is_whole(self, storage: Storage) -> None:
        """Pieces of all sizes, across every part boundary (see `large_size_bytes`); read whole and in ranges."""
        body = memoryview(os.urandom(self.large_size_bytes))
        sizes, at = [1, 7_000_001, 65_536, 3, 1_048_576], 0
        with storage.writer("large", size_hint=len(body)) as out:
            while at < len(body):
                piece = body[at : at + sizes[0]]
                assert out.write(piece) == len(piece)
                at += len(piece)
                sizes.append(sizes.pop(0))
        assert storage.stat("large").size_bytes == len(body)
        assert [info.size_bytes for info in storage.list("large")] == [len(body)]
        check_bytes(storage.get("large"), body)
        half = len(body) // 2
        ranges = [(at, memoryview(bytearray(size))) for at, size in [(half - 1, 3), (len(body) - 1, 1), (1, half)]]
        storage.read_into("large", ranges)
        assert all(buffer == body[at : at + len(buffer)] for at, buffer in ranges)

    @promised(Storage.writer, "is the expected length in bytes; it may be wrong")
    def test_a_size_hint_may_be_wrong(self, storage: Storage) -> None:
        """None, too small, too large."""
        for hint in (None, 0, 3, 1_000_000):
            with storage.writer(f"hint/{hint}", size_hint=hint) as out:
                out.write(b"0123456789")
            check_bytes(storage.get(f"hint/{hint}"), b"0123456789")

    # ---- what is written

    @pytest.mark.parametrize("kind", [bytes, bytearray, memoryview])
    @promised(Writer.write, "Append `data`, whole.")
    def test_every_kind_of_buffer_is_taken(self, storage: Storage, kind: Callable[[bytes], Any]) -> None:
        """Bytes, bytearray and memoryview, by both ways."""
        storage.put("put", kind(b"some bytes"))
        with storage.writer("writer") as out:
            assert out.write(kind(b"some ")) == 5
            assert out.write(kind(b"")) == 0
            assert out.write(kind(b"bytes")) == 5
        check_bytes(storage.get("put"), b"some bytes")
        check_bytes(storage.get("writer"), b"some bytes")

    @promised(Writer.write, "Returns its length in bytes.")
    def test_lengths_are_in_bytes_whatever_the_items_are(self, storage: Storage) -> None:
        """`len` of a view of doubles is not its size: see `byte_view`."""
        items = memoryview(array.array("d", [1.0, 2.0, 3.0]))
        assert storage.put("put", items).size_bytes == 24
        with storage.writer("writer") as out:
            assert out.write(items) == 24
        check_bytes(storage.get("put"), items.tobytes())
        check_bytes(storage.get("writer"), items.tobytes())

    @promised(Writer.write, "May keep no reference to it after it returned.")
    def test_buffers_may_be_reused_at_once(self, storage: Storage) -> None:
        """Staging buffers are overwritten by the next save."""
        buffer = bytearray(b"x" * 100_000)
        storage.put("put", memoryview(buffer))
        with storage.writer("writer") as out:
            for fill in b"xyz":
                buffer[:] = bytes([fill]) * len(buffer)
                out.write(memoryview(buffer))
            buffer[:] = b"!" * len(buffer)
        check_bytes(storage.get("put"), b"x" * 100_000)
        check_bytes(storage.get("writer"), b"x" * 100_000 + b"y" * 100_000 + b"z" * 100_000)

    # ---- create if absent

    @promised(Storage.put, "`if_absent` and there is such an object, even one with these very bytes.")
    def test_create_if_absent_refuses_what_is_there(self, storage: Storage) -> None:
        """Even the very same bytes; and what is there stays."""
        needs_create(storage)
        for first in (b"first", b""):
            storage.put("key", first, if_absent=True)
            for body in (first, b"second"):
                with pytest.raises(AlreadyExistsError) as caught:
                    storage.put("key", body, if_absent=True)
                check_facts(caught.value, "key", storage)
            check_bytes(storage.get("key"), first)
            storage.delete(["key"])
        storage.put("key", b"again", if_absent=True)
        check_bytes(storage.get("key"), b"again")

    @promised(Storage.put, "of several racing creates exactly one wins")
    def test_create_if_absent_has_exactly_one_winner(self, storage: Storage) -> None:
        """Sixteen threads, several rounds: one is told yes, and its bytes are what is there."""
        needs_create(storage)
        racers = 16
        for round_ in range(4):
            key, start = f"race/{round_}", threading.Barrier(racers)

            def create(racer: int, key: str = key, start: threading.Barrier = start) -> bool:
                start.wait()
                return _created(lambda: storage.put(key, b"%04d" % racer * 1000, if_absent=True))

            with ThreadPoolExecutor(racers) as pool:
                won = [*pool.map(create, range(racers))]
            assert won.count(True) == 1
            check_bytes(storage.get(key), b"%04d" % won.index(True) * 1000)

    @promised(Capabilities, "`put(if_absent=True)` has exactly one winner.")
    def test_one_process_of_many_wins_a_create(self, storage: Storage) -> None:
        """Four processes, several rounds: a lock of one process holds off no other."""
        needs_create(storage)
        needs_shared(storage)
        storage.put("used before the fork", b"x")
        start, rounds = fork_barrier(4), range(6)

        def race(racer: int) -> list[bool]:
            won = []
            for round_ in rounds:
                start.wait(60)
                won.append(_created(partial(storage.put, f"race/{round_}", b"%d" % racer, if_absent=True)))
            return won

        won = in_children(*(partial(race, racer) for racer in range(4)))
        for round_ in rounds:
            winners = [racer for racer in range(4) if won[racer][round_]]
            assert len(winners) == 1
            check_bytes(storage.get(f"race/{round_}"), b"%d" % winners[0])

    @promised(Storage.writer, "there is such an object; found at the latest when the block ends")
    def test_a_writer_does_not_replace_an_object(self, storage: Storage) -> None:
        """It fails, at the beginning or at the end, and what is there stays."""
        needs_create(storage)
        storage.put("key", b"first")
        with pytest.raises(AlreadyExistsError) as caught, storage.writer("key") as out:
            out.write(b"second")
        check_facts(caught.value, "key", storage)
        check_bytes(storage.get("key"), b"first")
        assert unfinished(storage) == []

    @promised(Storage.writer, "there is such an object; found at the latest when the block ends")
    def test_of_two_writers_of_one_key_one_wins(self, storage: Storage) -> None:
        """Both begin before there is such an object; the first to end has it, and none of the other's bytes."""
        needs_create(storage)
        first, second = storage.writer("key"), storage.writer("key")
        with pytest.raises(AlreadyExistsError), second as late:
            late.write(b"second")
            with first as early:
                early.write(b"first")
            check_bytes(storage.get("key"), b"first")
            late.write(b", and more")
        check_bytes(storage.get("key"), b"first")
        assert unfinished(storage) == []

    # ---- whole or not at all

    @promised(Storage.writer, "it becomes visible, whole and durable, when the block ends cleanly")
    def test_an_object_is_not_visible_before_the_block_ends(self, storage: Storage) -> None:
        """Neither by name nor in a listing; right after the block by both."""
        with storage.writer("step/data") as out:
            assert keys_of(storage) == []
            out.write(b"x" * self.large_size_bytes)
            assert not storage.exists("step/data")
            assert keys_of(storage) == []
            assert {item.key for item in unfinished(storage)} <= {"step/data"}
        assert keys_of(storage) == ["step/data"]
        assert storage.stat("step/data").size_bytes == self.large_size_bytes

    @pytest.mark.parametrize("boom", [Boom, BaseBoom])
    @pytest.mark.parametrize("size", [0, 10, None], ids=["0", "10", "large"])
    @promised(
        Storage.writer,
        "An exception inside the block aborts: nothing is published, and nothing that was there is touched.",
    )
    def test_an_exception_in_the_block_publishes_nothing(
        self, storage: Storage, boom: type[BaseException], size: int | None
    ) -> None:
        """No object, nothing dangling, the exception itself comes out, and the key is still free."""
        storage.put("step/other", b"untouched")
        with pytest.raises(boom), storage.writer("step/data") as out:
            out.write(b"x" * (self.large_size_bytes if size is None else size))
            raise boom
        assert not storage.exists("step/data")
        assert keys_of(storage) == ["step/other"]
        assert unfinished(storage) == []
        with storage.writer("step/data") as out:
            out.write(b"second try")
        check_bytes(storage.get("step/data"), b"second try")
        check_bytes(storage.get("step/other"), b"untouched")

    @promised(Storage.put, "Readers see all of it or nothing.")
    def test_readers_see_all_of_an_object_or_nothing(self, storage: Storage) -> None:
        """While another thread puts new objects: whatever a listing shows has its full length and its bytes."""
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
                if infos:
                    check_bytes(storage.get(infos[-1].key), body)
            writing.result()

    @promised(Storage.put, "An object that is there is replaced, in one step")
    def test_readers_see_the_old_or_the_new(self, storage: Storage) -> None:
        """While another thread replaces an object: never none, never some of each."""
        size, done = 300_000, threading.Event()
        storage.put("key", b"0" * size)

        def replace_often() -> None:
            try:
                for fill in b"123456789":
                    storage.put("key", bytes([fill]) * size)
            finally:
                done.set()

        with ThreadPoolExecutor(1) as pool:
            writing = pool.submit(replace_often)
            buffer = bytearray(size)
            while not done.is_set():
                storage.read_into("key", [(0, memoryview(buffer))])
                assert buffer.count(buffer[0]) == size
            writing.result()
        check_bytes(storage.get("key"), b"9" * size)

    # ---- several at once, and what dangles

    @promised(Storage, "Synchronous and thread-safe.")
    def test_writers_side_by_side_keep_apart(self, storage: Storage) -> None:
        """Three objects written in turns; one is given up, which is nothing to the others."""
        with ExitStack() as stack:
            a, b = (stack.enter_context(storage.writer(f"step/{name}")) for name in "ab")
            with suppress(Boom), storage.writer("step/c") as c:
                for number in range(5):
                    for name, out in (("a", a), ("b", b), ("c", c)):
                        out.write(f"{name}{number} ".encode() * 10_000)
                raise Boom
            a.write(b"end of a")
            b.write(b"end of b")
        assert keys_of(storage) == ["step/a", "step/b"]
        for name in "ab":
            whole = b"".join(f"{name}{number} ".encode() * 10_000 for number in range(5))
            check_bytes(storage.get(f"step/{name}"), whole + f"end of {name}".encode())
        assert unfinished(storage) == []

    @promised(Storage.writer, "it becomes visible, whole and durable, when the block ends cleanly")
    def test_a_killed_writer_leaves_no_object(self, storage: Storage) -> None:
        """SIGKILL in the middle of a block: nothing is published; what dangles can be found and removed."""
        needs_shared(storage)
        storage.put("other", b"untouched")
        self._killed_writer(storage, "step/data")
        assert keys_of(storage) == ["other"]
        for item in unfinished(storage):
            assert item.key == "step/data"
            storage.abort(item)
            storage.abort(item)  # missing is no error
        assert unfinished(storage) == []
        assert keys_of(storage) == ["other"]

    @promised(Storage.abort, "Touches no other upload, not even of the same key.")
    def test_abort_removes_what_it_is_given_and_nothing_else(self, storage: Storage) -> None:
        """What a killed process left goes; a writer of the same key, and another dangling one, go on."""
        needs_shared(storage)
        self._killed_writer(storage, "step/data")
        self._killed_writer(storage, "step/data2")
        dangling = unfinished(storage, "step/data")
        if not dangling:
            pytest.skip("a killed writer leaves nothing that could be found")
        assert {item.key for item in dangling} == {"step/data", "step/data2"}
        assert unfinished(storage, "step/data2") == [item for item in dangling if item.key == "step/data2"]
        assert unfinished(storage, "step/d?ta") == unfinished(storage, "other") == []
        with storage.writer("step/data") as out:
            out.write(b"x" * self.large_size_bytes)
            for item in dangling:
                if item.key == "step/data":
                    copy_of(storage).abort(item)
        assert storage.stat("step/data").size_bytes == self.large_size_bytes
        assert unfinished(storage) == [item for item in dangling if item.key == "step/data2"]
        assert keys_of(storage) == ["step/data"]

    def _killed_writer(self, storage: Storage, key: str) -> None:
        def write_and_die() -> None:
            with storage.writer(key) as out:
                out.write(b"x" * self.large_size_bytes)
                os.kill(os.getpid(), signal.SIGKILL)

        assert in_children(write_and_die) == [-signal.SIGKILL]


def _created(create: Callable[[], object]) -> bool:
    try:
        create()
    except AlreadyExistsError:
        return False
    return True
