"""The check at the end of every small record: nothing in it is believed before its bytes are known to be the saved."""

from __future__ import annotations

import json

import msgspec
import pytest
import xxhash
from records.fake_store import forged

from resilio.errors import ConfigError, FormatError, NewerFormatError
from resilio.records import schema
from resilio.records.digests import digest_of

COMMIT = schema.CommitRecord(
    format=1,
    step=4000,
    generation=7,
    attempt="step-000004000-g000007-7f3a7f3a",
    manifest_size_bytes=1234,
    manifest_digest=digest_of(b"manifest"),
    nonce="0123456789abcdef",
    time_s=1_700_000_000.25,
    world=2,
    size_bytes=99_999,
    metrics={"loss": 0.5, "acc": "nan"},
    reasons=["every 500 steps"],
    versions={"resilio": "0.1.0"},
)
RECORDS = [
    COMMIT,
    schema.GenerationRecord(
        format=1,
        generation=7,
        nonce="n",
        parent=schema.ParentRef(generation=6, step=20),
        ancestors=[schema.ParentRef(generation=5, step=10), schema.ParentRef(generation=6, step=20)],
        host="node-1",
    ),
    schema.RunRecord(format=1, run_id="r"),
    schema.PinRecord(
        format=1, step=4000, generation=7, because="the paper", commit=schema.encode(COMMIT).decode(), host="h"
    ),
    schema.LeaseRecord(format=1, step=4000, generation=7, ttl_s=7200.0, owner="restore"),
]
EACH = pytest.mark.parametrize("record", RECORDS, ids=lambda record: type(record).__name__)


def refused(data: bytes, record: msgspec.Struct) -> str:
    with pytest.raises(FormatError) as caught:
        schema.decode(data, type(record), "the record")
    assert type(caught.value) is FormatError, "its format is not to be believed either"
    return str(caught.value)


@EACH
def test_no_flipped_bit_goes_unseen(record):
    """A flip in a field's name would make it its default, and one in the format a newer resilio's."""
    data = schema.encode(record)
    for at in range(len(data)):
        for bit in range(8):
            refused(data[:at] + bytes([data[at] ^ 1 << bit]) + data[at + 1 :], record)


@EACH
def test_nor_is_a_record_that_was_cut_or_grew(record):
    data = schema.encode(record)
    for length in range(len(data)):
        refused(data[:length], record)
    for more in (b"\n", b" ", b"\0" * 512, data):
        refused(data + more, record)


@EACH
def test_one_without_a_check_is_refused_and_it_says_so(record):
    """Whatever is in it: to take it would be to take one whose check's name was hit."""
    bare = msgspec.json.encode(record)
    said = refused(bare, record)
    assert "check" in said and said.startswith("the record") and record.way_out in said
    assert "check" in refused(bare[:-1] + b',"check":"' + b"0" * 32 + b'"}', record)


@EACH
def test_the_check_is_what_the_format_says(record):
    data = schema.encode(record)
    body, name, value = data.partition(b',"check":"')
    assert (name + value).decode() == f',"check":"{xxhash.xxh3_128_hexdigest(body)}"}}'
    assert list(json.loads(data))[-1] == "check"
    assert schema.decode(data, type(record), "the record") == record
    assert schema.seal(msgspec.json.encode(record)) == data


def test_a_newer_format_is_told_by_a_record_that_is_whole():
    with pytest.raises(NewerFormatError, match="format 2"):
        schema.decode(forged({"format": 2, "what": [], "check": "old"}), schema.RunRecord, "the record")


def test_fields_of_tomorrow_are_passed_over_and_checked_all_the_same():
    later = {**json.loads(schema.encode(COMMIT)), "field_of_tomorrow": [1, 2]}
    assert schema.decode(forged(later), schema.CommitRecord, "the record") == COMMIT
    refused(forged(later).replace(b"tomorrow", b"yesterda"), COMMIT)


def test_what_a_parent_has_the_digest_of_has_no_check():
    part = schema.ManifestPart(format=1, rank=0, objects=[], tensors={}, values={})
    assert schema.encode(part) == msgspec.json.encode(part)
    assert schema.decode(msgspec.json.encode(part), schema.ManifestPart, "the part") == part


def test_what_would_take_more_memory_than_a_reader_grants_is_refused_when_saved_and_when_read(monkeypatch) -> None:
    part = schema.ManifestPart(format=1, rank=0, objects=[], tensors={}, values={"x": [[]] * 100})
    data = schema.encode(part)
    assert schema.decode(data, schema.ManifestPart, "here") == part
    monkeypatch.setattr(schema, "_PARTS_LIMIT", 150)
    with pytest.raises(ConfigError, match=r"2\d\d parts could not be read again"):
        schema.encode(part)
    with pytest.raises(FormatError, match=r"here: 2\d\d parts are too many for a ManifestPart"):
        schema.decode(data, schema.ManifestPart, "here")


def test_a_piece_tells_no_zeros_and_what_is_not_told_is_zero():
    """A manifest holds hundreds of thousands of them."""
    piece = schema.Piece(offsets=[0], sizes=[9], object=0, at=0, size_bytes=36, block=0, nan=int("0"), inf=2)
    text = schema.encode(piece)
    assert b"fingerprint" not in text and b"nan" not in text and b'"inf":2' in text
    assert msgspec.json.decode(text, type=schema.Piece) == piece
    part = schema.ManifestPart(format=1, rank=0, objects=[], tensors={}, values={}, counted=True)
    before = schema.encode(part).replace(b',"counted":true', b"")
    assert not schema.decode(before, schema.ManifestPart, "x").counted
