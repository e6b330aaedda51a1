"""The part of the contract that is about reading, listing and deleting: exactly what was asked for."""

from __future__ import annotations

import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress

import pytest

from ..errors import ConfigError, IntegrityError, NotFoundError, StorageError
from ..storage import ObjectInfo, Storage, check_key, check_prefix
from ._contract_tools import Contract, check_bytes, check_facts, keys_of, promised

__all__ = ["ReadContract"]

_ODD = [
    "with space/and more ",
    "unicode/grüße/☃/日本",
    "unicode/\u00e9",  # one letter, in both forms that unicode has for it
    "unicode/e\u0301",
    "Case/Key",
    "case/key",
    "run[1]/lr=1e-4?a*",
    "percent%20+&=#;:@!$'\"()~^`{}|<>,",
    "percent +&",
    "-rf",
    "~",
    "...",
    ".metadata",
    "deep/" * 12 + "end",
    "long/" + "x" * 200 + "/" + "y" * 100,
]

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

# What one of them would stand for, were it a pattern of a shell, of SQL, of a regular expression, or a folder.
_LITERALLY = [
    ("run[1]/x", "run1/x"),
    ("lr=1e-4?a", "lr=1e-4xa"),
    ("exp*", "exp-good"),
    ("a/**", "a/b"),
    ("50%", "50 percent"),
    ("step_1", "step-1"),
    ("a.b", "a-b"),
    ("Run", "run"),
    ("\u00e9", "e\u0301"),
]


class ReadContract(Contract):
    """What reading, listing and deleting promise."""

    # ---- reading

    @promised(Storage.read_into, "Fill each `(offset, buffer)` with exactly `len(buffer)` bytes from `offset` on.")
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
    @promised(Storage.read_into, "the object ends before a range does")
    def test_a_range_beyond_the_end_is_refused(self, storage: Storage, offset: int, size: int) -> None:
        """A short read is damage, an IntegrityError, never a short answer."""
        storage.put("key", b"0123456789")
        good, short = bytearray(2), bytearray(size)
        with pytest.raises(IntegrityError) as caught:
            storage.read_into("key", [(0, memoryview(good)), (offset, memoryview(short))])
        check_facts(caught.value, "key", storage)

    @promised(Storage.read_into, "no such object")
    def test_a_missing_object_is_not_found(self, storage: Storage) -> None:
        """A NotFoundError by every verb that reads, also where the key is a folder to the eye, or below an object."""
        storage.put("folder/object", b"x")
        for key in ("missing", "folder", "folder/objec", "folder/object2", "folder/object/below"):
            for verb in (storage.get, storage.stat, _read_one_byte(storage)):
                with pytest.raises(NotFoundError) as caught:
                    verb(key)
                check_facts(caught.value, key, storage)
            assert not storage.exists(key)

    @promised(Storage, "Synchronous and thread-safe.")
    def test_threads_may_read_one_object_at_once(self, storage: Storage) -> None:
        """Eight threads, other ranges each: no position that they share."""
        body = os.urandom(800_000)
        storage.put("key", body)

        def read(number: int) -> bool:
            for turn in range(8):
                at = (number * 8 + turn) * 12_345 % 700_000
                buffer = bytearray(100_000)
                storage.read_into("key", [(at, memoryview(buffer))])
                if buffer != body[at : at + len(buffer)]:
                    return False
            return True

        with ThreadPoolExecutor(8) as pool:
            assert all(pool.map(read, range(8)))

    # ---- listing

    @promised(Storage.list, "All objects whose key starts with the string `prefix`, sorted by key.")
    def test_listing_is_complete_and_sorted_by_key(self, storage: Storage) -> None:
        """Sorted as strings, not folder by folder, with true sizes."""
        keys = ["b", "a-b/c", "a/b", "a.b", "a/b.c", "a/c/d", "B", "é", "z/0", "a0", "n/9", "n/10"]
        for length, key in enumerate(keys):
            storage.put(key, b"x" * length)
        found = [*storage.list("")]
        assert [info.key for info in found] == sorted(keys)
        assert {info.key: info.size_bytes for info in found} == {key: length for length, key in enumerate(keys)}

    @promised(Storage.list, "Complete: an object is listed from the moment `put` or `writer` returned")
    def test_more_objects_than_a_page_holds(self, storage: Storage) -> None:
        """Many listed, and deleted in one call (see `many_objects`): no limit shows."""
        keys = [f"many/{number:06}" for number in range(self.many_objects)]
        with ThreadPoolExecutor(max(1, min(16, storage.capabilities.concurrency))) as pool:
            [*pool.map(lambda key: storage.put(key, b"x"), keys)]
        assert len(keys_of(storage)) == len(keys)
        assert keys_of(storage, "many/") == keys
        storage.delete(keys[:-1])
        assert keys_of(storage) == keys[-1:]

    @promised(Storage.list, "All objects whose key starts with the string `prefix`, sorted by key.")
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

    @pytest.mark.parametrize(("prefix", "sibling"), _LITERALLY)
    @promised(Storage.list, "All objects whose key starts with the string `prefix`, sorted by key.")
    def test_list_takes_prefixes_to_the_letter(self, storage: Storage, prefix: str, sibling: str) -> None:
        """No patterns of any kind, and no folding of case or unicode."""
        storage.put(sibling, b"sibling")
        assert keys_of(storage, prefix) == []
        storage.put(prefix, b"x")
        assert keys_of(storage, prefix) == [prefix]

    @promised(Storage.list, "a deleted one never after `delete` did")
    def test_listing_shows_every_change_at_once(self, storage: Storage) -> None:
        """No cache: new objects are there right after put, deleted ones are gone right after delete."""
        for number in range(5):
            assert keys_of(storage, "c/") == [f"c/{i}" for i in range(number)]
            assert not storage.exists(f"c/{number}")
            storage.put(f"c/{number}", b"x")
        for number in range(5):
            assert storage.exists(f"c/{number}")
            storage.delete([f"c/{number}"])
            assert not storage.exists(f"c/{number}")
            assert keys_of(storage, "c/") == [f"c/{i}" for i in range(number + 1, 5)]

    @promised(ObjectInfo, "Unix seconds by the store's own clock, None where it does not tell.")
    def test_times_are_unix_seconds_or_not_told(self, storage: Storage) -> None:
        """Of put, stat and list alike: no milliseconds, no date; how long a left branch lives depends on it."""
        infos = [storage.put("key", b"x"), storage.stat("key"), *storage.list("key")]
        assert len(infos) == 3
        assert all(isinstance(info, ObjectInfo) for info in infos)
        for info in infos:
            # From 2001 to 2286 by any clock that is about right.
            assert info.modified_s is None or 1e9 < info.modified_s < 1e10
            assert (info.key, info.size_bytes) == ("key", 1)

    # ---- deleting

    @pytest.mark.parametrize(("doomed", "sibling"), [*_LITERALLY, ("step-1", "step-10")])
    @promised(Storage.delete, "Keys are literal, never patterns; a missing object is no error.")
    def test_delete_takes_keys_to_the_letter(self, storage: Storage, doomed: str, sibling: str) -> None:
        """No patterns, no prefixes: a sibling run must survive."""
        storage.put(sibling, b"sibling")
        storage.delete([doomed])  # not there: must delete nothing
        assert keys_of(storage) == [sibling]
        storage.put(doomed, b"doomed")
        storage.delete([doomed])
        assert keys_of(storage) == [sibling]

    @promised(Storage.delete, "Delete these objects.")
    def test_delete_does_not_go_into_what_looks_like_a_folder(self, storage: Storage) -> None:
        """A key is an object, and nothing lies in it."""
        storage.put("folder/a", b"a")
        storage.delete(["folder"])
        assert keys_of(storage) == ["folder/a"]

    @promised(Storage.delete, "a missing object is no error")
    def test_delete_takes_many_and_missing_ones(self, storage: Storage) -> None:
        """From any iterable, a listing too, twice over; the others stay."""
        for number in range(40):
            storage.put(f"d/{number:02}", b"x")
        doomed = [f"d/{number:02}" for number in range(0, 60, 2)]
        storage.delete(iter(doomed))
        storage.delete(doomed)
        storage.delete([])
        assert keys_of(storage) == [f"d/{number:02}" for number in range(1, 40, 2)]
        storage.delete(info.key for info in storage.list("d/1"))
        assert keys_of(storage) == [f"d/{number:02}" for number in range(1, 40, 2) if not 10 <= number < 20]

    # ---- keys

    @promised(Storage, "Keys are taken to the letter: two that differ, in case or unicode form say, name two objects.")
    def test_any_legal_key_works(self, storage: Storage) -> None:
        """Spaces, unicode, glob and URL characters, leading dots and dashes, long ones."""
        for number, key in enumerate(_ODD):
            if number % 2:
                storage.put(key, key.encode())
            else:
                with storage.writer(key) as out:
                    out.write(key.encode())
        assert keys_of(storage) == sorted(_ODD)
        for key in _ODD:
            check_bytes(storage.get(key), key.encode())
            assert keys_of(storage, key) == [key]
            assert storage.stat(key) == next(storage.list(key))
        storage.delete(_ODD)
        assert keys_of(storage) == []

    @pytest.mark.parametrize("key", _ILLEGAL)
    @promised(check_key, "Return `key` if it is a legal key, else raise.")
    def test_illegal_keys_are_refused_by_every_verb(self, storage: Storage, key: str) -> None:
        """By a ConfigError, before anything is done: also when a delete has good keys too."""
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
    @promised(check_prefix, "Return `prefix` if legal keys can start with it, else raise.")
    def test_prefixes_that_no_key_has_are_refused(self, storage: Storage, prefix: str) -> None:
        """By a ConfigError: a listing cannot be led out of the store."""
        for verb in (storage.list, storage.incomplete):
            if verb == storage.incomplete and _knows_of_none(storage):
                continue
            with pytest.raises(ConfigError):
                [*verb(prefix)]


def _knows_of_none(storage: Storage) -> bool:
    inner = getattr(storage, "inner", storage)
    return type(inner).incomplete is Storage.incomplete


def _read_one_byte(storage: Storage) -> Callable[[str], object]:
    return lambda key: storage.read_into(key, [(0, memoryview(bytearray(1)))])
