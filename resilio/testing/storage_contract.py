"""The promises of `resilio.storage.Storage`, as tests. A storage that passes them can hold checkpoints.

For a plugin, all of its test file may be::

    from resilio.testing import StorageContract

    class TestMyStorage(StorageContract):
        def make_storage(self, tmp_path):
            return MyStorage("mystore://bucket/" + tmp_path.name)     # empty at each test
"""

from __future__ import annotations

import os
import pickle
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path

import pytest

from ..errors import ConfigError, IntegrityError, NotFoundError, StorageError
from ..storage import Storage
from ..storage.registry import without_credentials
from ._contract_tools import check_facts, in_child, keys_of, needs_shared
from ._contract_writing import WriteContract

__all__ = ["StorageContract"]

_ILLEGAL = [
    "",
    "/",
    "/abs",
    "a/",
    "a//b",
    ".",
    "..",
    "../up",
    "a/../b",
    "a/./b",
    "a/..",
    "a\0b",
    "a\nb",
    "a\\b",
    "x" * 1025,
]


class StorageContract(WriteContract):
    """All the promises. Subclass it, and say in `make_storage` how to make an empty storage."""

    # ---- reading

    def test_every_range_is_filled_exactly(self, storage: Storage) -> None:
        """Many, unsorted, overlapping, empty, to the last byte; and not one byte beside them."""
        body = os.urandom(1_000_003)
        storage.put("key", body)
        wanted = [(999_990, 13), (0, 1), (5, 0), (1_000_003, 0), (500_000, 400_000), (0, 1_000_003), (65_535, 2)]
        wanted += [(at, 4096) for at in range(0, 400_000, 3_777)]
        memory = bytearray(b"." * (sum(size for _, size in wanted) + len(wanted)))
        ranges, at = [], 0
        for offset, size in wanted:
            ranges.append((offset, memoryview(memory)[at : at + size]))
            at += size + 1  # one byte between two buffers, which must stay
        storage.read_into("key", ranges)
        assert all(buffer == body[offset : offset + len(buffer)] for offset, buffer in ranges)
        at = -1
        for _, size in wanted:
            at += size + 1
            assert memory[at : at + 1] == b"."

    @pytest.mark.parametrize(("offset", "size"), [(0, 11), (9, 2), (10, 1), (500, 1)])
    def test_a_range_beyond_the_end_is_refused(self, storage: Storage, offset: int, size: int) -> None:
        """A short read is damage, never a short answer."""
        storage.put("key", b"0123456789")
        good, short = bytearray(2), bytearray(size)
        with pytest.raises(IntegrityError) as caught:
            storage.read_into("key", [(0, memoryview(good)), (offset, memoryview(short))])
        check_facts(caught.value, "key", storage)

    def test_a_missing_object_is_not_found(self, storage: Storage) -> None:
        """By every verb that reads, also where the key is a folder to the eye, or lies below an object."""
        storage.put("folder/object", b"x")
        for key in ("missing", "folder", "folder/objec", "folder/object2", "folder/object/below"):
            for verb in (storage.get, storage.stat, _read_one_byte(storage)):
                with pytest.raises(NotFoundError) as caught:
                    verb(key)
                check_facts(caught.value, key, storage)
            assert not storage.exists(key)

    def test_a_large_object_written_in_odd_pieces_is_whole(self, storage: Storage) -> None:
        """Pieces of all sizes, across every part boundary."""
        body = memoryview(os.urandom(self.large_size_bytes))
        sizes, at = [1, 7_000_001, 65_536, 3, 1_048_576], 0
        with storage.writer("large", size_hint=len(body)) as out:
            while at < len(body):
                piece = body[at : at + sizes[0]]
                assert out.write(piece) == len(piece)
                at += len(piece)
                sizes.append(sizes.pop(0))
        assert storage.stat("large").size_bytes == len(body)
        assert storage.get("large") == body

    def test_a_size_hint_may_be_wrong(self, storage: Storage) -> None:
        """It is a hint."""
        for hint in (0, 3, 1_000_000):
            with storage.writer(f"hint/{hint}", size_hint=hint) as out:
                out.write(b"0123456789")
            assert storage.get(f"hint/{hint}") == b"0123456789"

    # ---- listing and deleting

    def test_listing_is_complete_and_sorted_by_key(self, storage: Storage) -> None:
        """Sorted as strings, not folder by folder, with true sizes."""
        keys = ["b", "a-b/c", "a/b", "a.b", "a/b.c", "a/c/d", "B", "é", "z/0", "a0"] + [f"n/{i:04}" for i in range(120)]
        for length, key in enumerate(keys):
            storage.put(key, b"x" * length)
        found = [*storage.list("")]
        assert [info.key for info in found] == sorted(keys)
        assert {info.key: info.size_bytes for info in found} == {key: length for length, key in enumerate(keys)}

    def test_a_prefix_is_a_string(self, storage: Storage) -> None:
        """`step-1` also finds `step-10`; `step-1/` does not.

        Below an object is nothing; a storage of files and folders may say so by a StorageError.
        """
        keys = ["step-1/a", "step-1/b/c", "step-10/a", "step-2/a", "step-1.json", "other"]
        for key in keys:
            storage.put(key, b"x")
        expected = {
            "": sorted(keys),
            "s": sorted(keys)[1:],
            "step-1": ["step-1.json", "step-1/a", "step-1/b/c", "step-10/a"],
            "step-1/": ["step-1/a", "step-1/b/c"],
            "step-1/b": ["step-1/b/c"],
            "step-1/b/c": ["step-1/b/c"],
            "step-3": [],
            "nowhere/at/all": [],
        }
        assert {prefix: keys_of(storage, prefix) for prefix in expected} == expected
        with suppress(StorageError):
            assert keys_of(storage, "step-1/b/c/") == []

    def test_listing_shows_every_change_at_once(self, storage: Storage) -> None:
        """No cache: new objects are there right after put, deleted ones are gone right after delete."""
        for number in range(5):
            assert keys_of(storage, "c/") == [f"c/{i}" for i in range(number)]
            storage.put(f"c/{number}", b"x")
        for number in range(5):
            assert storage.exists(f"c/{number}")
            storage.delete([f"c/{number}"])
            assert not storage.exists(f"c/{number}")
            assert keys_of(storage, "c/") == [f"c/{i}" for i in range(number + 1, 5)]

    @pytest.mark.parametrize(
        ("doomed", "sibling"),
        [
            ("run[1]/x", "run1/x"),
            ("lr=1e-4?a", "lr=1e-4xa"),
            ("exp*", "exp-good"),
            ("a/**", "a/b"),
            ("step-1", "step-10"),
        ],
    )
    def test_delete_takes_keys_to_the_letter(self, storage: Storage, doomed: str, sibling: str) -> None:
        """No patterns, no prefixes: a sibling run must survive (BR-49)."""
        storage.put(sibling, b"sibling")
        storage.delete([doomed])  # not there: must delete nothing
        assert keys_of(storage) == [sibling]
        storage.put(doomed, b"doomed")
        storage.delete([doomed])
        assert keys_of(storage) == [sibling]

    def test_delete_does_not_go_into_what_looks_like_a_folder(self, storage: Storage) -> None:
        """A key is an object, and nothing lies in it."""
        storage.put("folder/a", b"a")
        storage.delete(["folder"])
        assert keys_of(storage) == ["folder/a"]

    def test_delete_takes_many_and_missing_ones(self, storage: Storage) -> None:
        """From any iterable, twice over; the others stay."""
        for number in range(40):
            storage.put(f"d/{number:02}", b"x")
        doomed = [f"d/{number:02}" for number in range(0, 60, 2)]
        storage.delete(iter(doomed))
        storage.delete(doomed)
        storage.delete([])
        assert keys_of(storage) == [f"d/{number:02}" for number in range(1, 40, 2)]

    # ---- borders

    @pytest.mark.parametrize("key", _ILLEGAL)
    def test_illegal_keys_are_refused_by_every_verb(self, storage: Storage, key: str) -> None:
        """Before anything is done: also when a delete has good keys too."""
        storage.put("good", b"x")
        verbs: list[Callable[[], object]] = [
            lambda: storage.put(key, b"x"),
            lambda: storage.put(key, b"x", if_absent=True),
            lambda: storage.writer(key).__enter__(),
            lambda: storage.read_into(key, [(0, memoryview(bytearray(1)))]),
            lambda: storage.get(key),
            lambda: storage.stat(key),
            lambda: storage.exists(key),
            lambda: storage.delete(["good", key]),
        ]
        for verb in verbs:
            with pytest.raises(ConfigError):
                verb()
        assert keys_of(storage) == ["good"]

    @pytest.mark.parametrize("prefix", ["/", "/abs", "../", "../up", "a/../b", "a//b", "./a"])
    def test_prefixes_that_no_key_has_are_refused(self, storage: Storage, prefix: str) -> None:
        """A listing cannot be led out of the store."""
        for verb in (storage.list, storage.incomplete):
            if verb == storage.incomplete and [*storage.incomplete("")] == [] and _knows_of_none(storage):
                continue
            with pytest.raises(ConfigError):
                [*verb(prefix)]

    def test_the_url_shows_no_credentials(self, storage: Storage) -> None:
        """It is printed in logs and errors."""
        assert storage.url == without_credentials(storage.url)
        assert storage.url in repr(storage)

    def test_close_is_idempotent_and_not_the_end(self, storage: Storage) -> None:
        """It gives back connections, no more."""
        storage.put("key", b"x")
        storage.close()
        storage.close()
        assert storage.get("key") == b"x"

    def test_threads_may_share_one_storage(self, storage: Storage) -> None:
        """Eight threads, each writing, reading, listing and deleting its own."""

        def work(number: int) -> None:
            body = bytes([number]) * 200_000
            for turn in range(3):
                key = f"t/{number}/{turn}"
                with storage.writer(key) as out:
                    out.write(body)
                assert storage.get(key) == body
                assert key in keys_of(storage, f"t/{number}/")
            storage.delete([f"t/{number}/0"])

        with ThreadPoolExecutor(8) as pool:
            [*pool.map(work, range(8))]
        assert keys_of(storage) == [f"t/{number}/{turn}" for number in range(8) for turn in (1, 2)]

    def test_a_pickled_copy_is_the_same_store(self, storage: Storage) -> None:
        """Also of one that has been used: connections do not travel."""
        storage.put("before", b"1")
        copy = pickle.loads(pickle.dumps(storage))  # noqa: S301  our own
        assert (copy.url, copy.capabilities) == (storage.url, storage.capabilities)
        if storage.capabilities.shared:
            copy.put("after", b"2")
            assert keys_of(storage) == keys_of(copy) == ["after", "before"]
        copy.close()

    def test_a_storage_works_on_both_sides_of_a_fork(self, storage: Storage) -> None:
        """Used before, used by the child, used by the parent again."""
        needs_shared(storage)
        storage.put("parent", b"1")

        def child() -> None:
            assert storage.get("parent") == b"1"
            with storage.writer("child") as out:
                out.write(b"2")

        assert in_child(child) == 0
        assert storage.get("child") == b"2"
        assert keys_of(storage) == ["child", "parent"]

    def test_local_path_holds_the_objects_as_files(self, storage: Storage) -> None:
        """Where it is promised: plain `dcp.load` reads there."""
        if storage.capabilities.local_path is None:
            pytest.skip("promises no local path")
        storage.put("folder/object", b"bytes")
        assert (Path(storage.capabilities.local_path) / "folder" / "object").read_bytes() == b"bytes"


def _knows_of_none(storage: Storage) -> bool:
    inner = getattr(storage, "inner", storage)
    return type(inner).incomplete is Storage.incomplete


def _read_one_byte(storage: Storage) -> Callable[[str], object]:
    return lambda key: storage.read_into(key, [(0, memoryview(bytearray(1)))])
