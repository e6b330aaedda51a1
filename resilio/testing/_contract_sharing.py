"""The part of the contract that is about who uses a storage: threads, processes, copies, and after `close`."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

import pytest

from ..storage import Capabilities, Storage
from ..storage.registry import without_credentials
from ._contract_tools import Contract, check_bytes, copy_of, fork_barrier, in_children, keys_of, needs_shared, promised

__all__ = ["ShareContract"]


class ShareContract(Contract):
    """What a storage promises to those who share it."""

    @promised(Storage, "Synchronous and thread-safe.")
    def test_threads_may_share_one_storage(self, storage: Storage) -> None:
        """Eight threads, each writing, all at once, reading, listing and deleting its own."""
        together = threading.Barrier(8, timeout=60)

        def work(number: int) -> None:
            body = bytes([number]) * 100_000
            for turn in range(3):
                key = f"t/{number}/{turn}"
                with storage.writer(key) as out:
                    out.write(body)
                    together.wait()
                    out.write(body)
                check_bytes(storage.get(key), body + body)
                assert key in keys_of(storage, f"t/{number}/")
            storage.delete([f"t/{number}/0"])

        def work_or_stop_all(number: int) -> None:
            try:
                work(number)
            except BaseException:
                together.abort()  # the others are not to wait for this one
                raise

        with ThreadPoolExecutor(8) as pool:
            working = [pool.submit(work_or_stop_all, number) for number in range(8)]
        errors = [error for error in (one.exception() for one in working) if error is not None]
        for error in sorted(errors, key=lambda error: isinstance(error, threading.BrokenBarrierError)):
            raise error
        assert keys_of(storage) == [f"t/{number}/{turn}" for number in range(8) for turn in (1, 2)]

    @promised(Storage, "Picklable as configuration: a copy in another process connects anew")
    def test_a_pickled_copy_is_the_same_store(self, storage: Storage) -> None:
        """Also of one that has been used: connections do not travel."""
        storage.put("before", b"1")
        copy = copy_of(storage)
        assert (copy.url, copy.capabilities) == (storage.url, storage.capabilities)
        if storage.capabilities.shared:
            copy.put("after", b"2")
            assert keys_of(storage) == keys_of(copy) == ["after", "before"]
        copy.close()

    @promised(Capabilities, "other processes that open the same URL see the same objects")
    def test_a_change_by_one_is_seen_by_the_other_at_once(self, storage: Storage) -> None:
        """Two storages of one URL: what the first has put, written or deleted is so for the second, and back."""
        needs_shared(storage)
        other = copy_of(storage)
        for here, there in ((storage, other), (other, storage)):
            assert keys_of(there) == []
            here.put("put", b"1")
            with here.writer("written") as out:
                out.write(b"22")
            assert [(info.key, info.size_bytes) for info in there.list("")] == [("put", 1), ("written", 2)]
            assert (there.get("put"), there.get("written")) == (b"1", b"22")
            here.put("put", b"333")
            assert there.get("put") == b"333"
            here.delete(["put", "written"])
            assert not there.exists("put")
        other.close()

    @promised(Storage, "connections are made lazily, per process, and never cross a fork")
    def test_a_storage_works_on_both_sides_of_a_fork(self, storage: Storage) -> None:
        """Used before, used and closed by the child, used by the parent again."""
        needs_shared(storage)
        storage.put("parent", b"1")

        def child() -> None:
            check_bytes(storage.get("parent"), b"1")
            with storage.writer("child") as out:
                out.write(b"2")
            storage.close()

        in_children(child)
        check_bytes(storage.get("child"), b"2")
        assert keys_of(storage) == ["child", "parent"]

    @promised(Storage, "connections are made lazily, per process, and never cross a fork")
    def test_processes_may_use_one_storage_at_once(self, storage: Storage) -> None:
        """Three forked processes, each writing, reading and listing its own, as ranks and loaders do."""
        needs_shared(storage)
        storage.put("used before the fork", b"x")
        start = fork_barrier(3)

        def work(number: int) -> bool:
            start.wait(60)
            body = bytes([number]) * 100_000
            for turn in range(5):
                with storage.writer(f"p/{number}/{turn}") as out:
                    out.write(body)
                if storage.get(f"p/{number}/{turn}") != body or len(keys_of(storage, f"p/{number}/")) != turn + 1:
                    return False
            return True

        assert in_children(*(partial(work, number) for number in range(3))) == [True] * 3
        assert keys_of(storage, "p/") == [f"p/{number}/{turn}" for number in range(3) for turn in range(5)]

    @promised(Storage.close, "Idempotent; the storage may be used again.")
    def test_close_is_idempotent_and_not_the_end(self, storage: Storage) -> None:
        """Before the first use, twice, at the end of a block; then every verb works as before."""
        storage.close()
        storage.put("key", b"x")
        storage.close()
        storage.close()
        check_bytes(storage.get("key"), b"x")
        with storage as same:
            assert same is storage
        with storage.writer("written") as out:
            out.write(b"y")
        storage.close()
        assert keys_of(storage) == ["key", "written"]
        storage.close()
        storage.delete(["key"])
        storage.close()
        assert not storage.exists("key")

    @promised(Storage.close, "Nothing to other copies of it.")
    def test_close_of_a_copy_is_nothing_to_the_other(self, storage: Storage) -> None:
        """Not even while that one writes."""
        storage.put("key", b"x")
        copy = copy_of(storage)
        assert len(keys_of(copy)) == storage.capabilities.shared or not storage.capabilities.shared
        with storage.writer("written") as out:
            out.write(b"y")
            copy.close()
            out.write(b"z")
        assert (storage.get("key"), storage.get("written")) == (b"x", b"yz")

    # ---- what it says of itself

    @promised(Storage, "what it was opened with, without credentials. Shown to people.")
    def test_the_url_shows_no_credentials(self, storage: Storage) -> None:
        """It is printed in logs and errors."""
        assert "://" in storage.url
        assert storage.url == without_credentials(storage.url)
        assert storage.url in repr(storage)

    @promised(Storage, "what it can do")
    def test_capabilities_make_sense(self, storage: Storage) -> None:
        """A number of transfers to work with, and the same answer before and after the first use."""
        told = storage.capabilities
        assert isinstance(told, Capabilities)
        assert isinstance(told.concurrency, int)
        assert told.concurrency >= 1
        storage.put("key", b"x")
        assert storage.capabilities == told

    @promised(Storage.free_bytes, "None where the store does not tell. Never raises.")
    def test_free_bytes_is_a_number_or_not_told(self, storage: Storage) -> None:
        """Before anything is stored, after, and after close: a save is refused by it."""
        for turn in range(3):
            free = storage.free_bytes()
            assert free is None or (isinstance(free, int) and free >= 0)
            storage.put(f"key{turn}", b"x")
            storage.close()

    @promised(Capabilities, "the folder that holds the objects as plain files at their keys, where there is one")
    def test_local_path_holds_the_objects_as_files(self, storage: Storage) -> None:
        """Where it is promised: plain `dcp.load` reads there."""
        if storage.capabilities.local_path is None:
            pytest.skip("promises no local path")
        storage.put("folder/object", b"bytes")
        assert (Path(storage.capabilities.local_path) / "folder" / "object").read_bytes() == b"bytes"
