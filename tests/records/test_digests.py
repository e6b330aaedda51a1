from __future__ import annotations

import hashlib
import zlib

import numpy as np
import pytest
import xxhash

from resilio.errors import ConfigError, FormatError, IntegrityError
from resilio.records.digests import (
    ALGORITHMS,
    BLOCK_SIZE,
    DIGEST_SIZE,
    Digester,
    append_block_digests,
    block_count,
    check_digest,
    digest_of,
    digester_for,
    verify_blocks,
)

DATA = np.random.default_rng(1).integers(0, 256, 2 * BLOCK_SIZE + 77, dtype=np.uint8).tobytes()


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_a_digest_does_not_depend_on_how_the_bytes_were_cut(algorithm: str):
    digester = Digester(algorithm)
    for at in range(0, len(DATA), 1000):
        digester.update(memoryview(DATA)[at : at + 1000])
    assert digester.text() == digest_of(DATA, algorithm)
    assert digester.size_bytes == len(DATA)


def test_digests_are_the_standard_ones():
    assert digest_of(DATA) == "xxh3_128:" + xxhash.xxh3_128_hexdigest(DATA)
    assert digest_of(DATA, "crc32") == f"crc32:{zlib.crc32(DATA):08x}"
    assert digest_of(DATA, "sha256") == "sha256:" + hashlib.sha256(DATA).hexdigest()
    assert digest_of(b"", "crc32") == "crc32:00000000"


def test_arrays_of_any_shape_and_type_are_their_bytes():
    array = np.arange(24, dtype=np.float64).reshape(2, 3, 4)
    assert digest_of(memoryview(array)) == digest_of(array.tobytes())
    assert digest_of(memoryview(np.zeros((0, 3)))) == digest_of(b"")
    out = bytearray()
    assert append_block_digests(out, memoryview(np.zeros((3, 0)))) == 0


def test_an_unknown_algorithm_is_refused_by_name():
    with pytest.raises(ConfigError, match="md5"):
        Digester("md5")
    with pytest.raises(FormatError, match="md5"):
        digester_for("md5:00", "manifest.json")


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_a_flipped_bit_changes_the_whole_digest(algorithm: str):
    digest = digest_of(DATA, algorithm)
    check_digest(DATA, digest, "x")
    bad = bytearray(DATA)
    bad[1234] ^= 1
    with pytest.raises(IntegrityError, match="object-7"):
        check_digest(bad, digest, "object-7")


def test_block_digests_are_xxh3_64_little_endian_per_64_kib_with_a_short_last_one():
    out = bytearray(b"before")
    assert append_block_digests(out, DATA) == 3 == block_count(len(DATA))
    blocks = [DATA[:BLOCK_SIZE], DATA[BLOCK_SIZE : 2 * BLOCK_SIZE], DATA[2 * BLOCK_SIZE :]]
    assert out == b"before" + b"".join(xxhash.xxh3_64_intdigest(b).to_bytes(8, "little") for b in blocks)
    assert (block_count(0), block_count(1), block_count(BLOCK_SIZE), block_count(BLOCK_SIZE + 1)) == (0, 1, 1, 2)


@pytest.mark.parametrize("at", [0, BLOCK_SIZE - 1, BLOCK_SIZE, 2 * BLOCK_SIZE, len(DATA) - 1])
def test_a_flipped_bit_is_found_in_its_block(at: int):
    digests = bytearray()
    append_block_digests(digests, DATA)
    verify_blocks(DATA, digests, "x")
    bad = bytearray(DATA)
    bad[at] ^= 0x80
    with pytest.raises(IntegrityError, match="part of w") as caught:
        verify_blocks(bad, digests, "part of w", first_block=10)
    assert caught.value.block == 10 + at // BLOCK_SIZE


def test_a_range_is_verified_by_itself():
    digests = bytearray()
    append_block_digests(digests, DATA)
    verify_blocks(memoryview(DATA)[BLOCK_SIZE:], memoryview(digests)[DIGEST_SIZE:], "x", first_block=1)
    with pytest.raises(IntegrityError):
        verify_blocks(memoryview(DATA)[BLOCK_SIZE:], digests, "x")  # another number of digests
    with pytest.raises(IntegrityError):
        verify_blocks(DATA[:-1], digests, "x")  # cut short
