"""Digests of many blocks in C are those of xxHash itself, and stay away where they cannot be had."""

from __future__ import annotations

import random
import threading
from typing import Any

import pytest
import xxhash

from resilio.records import block_loop, digests
from resilio.records.digests import BLOCK_SIZE, append_block_digests, bad_blocks


@pytest.fixture
def loop(monkeypatch: Any) -> block_loop._Loop:
    monkeypatch.setattr(block_loop, "_WORTH", 0)
    monkeypatch.setattr(block_loop, "_loop", block_loop._Loop())
    if block_loop._load() is None:
        pytest.skip("no C compiler here")
    return block_loop._loop


def noise(size: int) -> bytearray:
    return bytearray(random.Random(size).randbytes(size))


def plainly(data: bytes | bytearray) -> bytes:
    spans = (data[at : at + BLOCK_SIZE] for at in range(0, len(data), BLOCK_SIZE))
    return b"".join(xxhash.xxh3_64_intdigest(one).to_bytes(8, "little") for one in spans)


def test_each_length_gives_what_xxhash_gives(loop: block_loop._Loop) -> None:
    """All that differ in how many stripes and rounds there are, and where the last one lies."""
    for size in [*range(241, 1200), 2047, 2048, 2049, 4096, 65535, 65536, 65537, 1_000_003]:
        data = noise(2 * size)
        expected = b"".join(xxhash.xxh3_64_intdigest(one).to_bytes(8, "little") for one in (data[:size], data[size:]))
        assert block_loop.digest_blocks(memoryview(data), size) == expected, size


def test_the_way_for_processors_without_wide_registers_is_the_same(loop: block_loop._Loop, monkeypatch: Any) -> None:
    monkeypatch.setattr(block_loop, "_SOURCE", block_loop._SOURCE.replace("__AVX2__", "__NO_SUCH_PROCESSOR__"))
    function = block_loop._load()
    assert function is not None, "it is wrong, or does not compile"
    data = noise(3 * BLOCK_SIZE)
    assert block_loop._call(function, memoryview(data), BLOCK_SIZE) == plainly(data)


@pytest.mark.parametrize("size", [0, 1, 65535, 65536, 65537, 5 * 65536, 5 * 65536 + 100])
def test_pieces_have_the_same_digests_with_it_and_without(loop: block_loop._Loop, size: int) -> None:
    data = noise(size)
    out = bytearray(b"before")
    assert append_block_digests(out, data) == -(-size // BLOCK_SIZE)
    assert out == b"before" + plainly(data)
    out = bytearray()
    append_block_digests(out, bytes(data))  # read-only: in Python
    assert out == plainly(data)


def test_a_flipped_bit_is_found_in_its_block(loop: block_loop._Loop) -> None:
    data = noise(4 * BLOCK_SIZE + 7)
    expected = plainly(data)
    for at in (0, BLOCK_SIZE, 3 * BLOCK_SIZE - 1, 4 * BLOCK_SIZE + 6):
        data[at] ^= 4
        assert bad_blocks(data, expected) == [at // BLOCK_SIZE]
        data[at] ^= 4
    assert bad_blocks(data, expected) == []


def test_a_library_that_is_wrong_is_not_used(loop: block_loop._Loop, monkeypatch: Any) -> None:
    monkeypatch.setattr(block_loop, "_SOURCE", block_loop._SOURCE.replace("hash >> 32", "hash >> 31"))
    assert block_loop._load() is None
    data = noise(2 * BLOCK_SIZE)
    assert block_loop.digest_blocks(memoryview(data), BLOCK_SIZE) is None
    out = bytearray()
    append_block_digests(out, data)
    assert out == plainly(data)


def test_it_is_looked_for_once_and_only_when_there_is_much_to_digest(monkeypatch: Any) -> None:
    looked: list[int] = []

    def load() -> None:
        looked.append(1)

    monkeypatch.setattr(block_loop, "_WORTH", 10 * BLOCK_SIZE)
    monkeypatch.setattr(block_loop, "_loop", block_loop._Loop())
    monkeypatch.setattr(block_loop, "_load", load)
    data = noise(BLOCK_SIZE)
    for count in range(1, 20):
        append_block_digests(bytearray(), data)
        assert len(looked) == (count >= 10)


def test_while_one_thread_looks_for_it_the_others_go_on(monkeypatch: Any) -> None:
    begun, end = threading.Event(), threading.Event()

    def load() -> None:
        begun.set()
        assert end.wait(60)

    monkeypatch.setattr(block_loop, "_WORTH", 0)
    monkeypatch.setattr(block_loop, "_loop", block_loop._Loop())
    monkeypatch.setattr(block_loop, "_load", load)
    first = threading.Thread(target=digests.append_block_digests, args=(bytearray(), noise(BLOCK_SIZE)))
    first.start()
    assert begun.wait(60)
    out = bytearray()
    append_block_digests(out, noise(BLOCK_SIZE))
    assert out == plainly(noise(BLOCK_SIZE))
    end.set()
    first.join()
