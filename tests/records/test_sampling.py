"""Units cover a checkpoint's data exactly once, whatever lies in it; parts of a sample never overlap."""

from __future__ import annotations

import random
import threading
from collections.abc import Iterator

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from records.fake_store import FakeStore, manager, save

from resilio.errors import ConfigError
from resilio.records import schema
from resilio.records.catalog import discover
from resilio.records.digests import BLOCK_SIZE
from resilio.records.manifest import PlacedPiece
from resilio.records.read_ahead import in_order
from resilio.records.sampling import Sample, Unit, parse_sample, units_of
from resilio.records.verify import examine_checkpoint
from resilio.types import CheckpointRef

REF = CheckpointRef(1, 1)


@settings(max_examples=200, deadline=None)
@given(
    st.lists(st.tuples(st.integers(0, 3 * BLOCK_SIZE), st.integers(1, 5 * BLOCK_SIZE)), max_size=8),
    st.integers(0, 3 * BLOCK_SIZE),
    st.integers(1, 3),
)
def test_units_are_side_by_side_and_hold_each_byte_of_each_piece_once(
    layout: list[tuple[int, int]], rest: int, blocks: int
) -> None:
    pieces, at = [], 0
    for gap, length in layout:
        at += gap
        piece = schema.Piece(offsets=[0], sizes=[length], object=0, at=at, size_bytes=length, block=0)
        pieces.append((f"t{at}", PlacedPiece(piece, 0, "data", "digests")))
        at += length
    units = list(units_of("data", at + rest, pieces, blocks * BLOCK_SIZE))
    assert [unit.start for unit in units] == [0, *(unit.end for unit in units)][: len(units)]
    assert (units[-1].end if units else 0) == at + rest
    assert all(0 < unit.end - unit.start <= blocks * BLOCK_SIZE for unit in units)
    held: dict[str, list[tuple[int, int]]] = {}
    for unit in units:
        for part in unit.parts:
            assert unit.start <= part.start and part.start + part.size_bytes <= unit.end
            assert part.start == part.placed.piece.at + part.block * BLOCK_SIZE  # a digest can be told to it
            held.setdefault(part.name, []).append((part.start, part.start + part.size_bytes))
    for name, placed in pieces:
        spans = held[name]
        assert spans[0][0] == placed.piece.at and spans[-1][1] == placed.piece.at + placed.piece.size_bytes
        assert [end for _, end in spans[:-1]] == [start for start, _ in spans[1:]]


@pytest.mark.parametrize(
    ("text", "sample"),
    [
        ("2/7", Sample(part=2, of=7)),
        ("1/1", Sample(part=1, of=1)),
        ("12.5%", Sample(fraction=0.125)),
        ("100%", Sample(fraction=1.0)),
        ("500", Sample(size_bytes=500)),
        ("3K", Sample(size_bytes=3072)),
        ("1GiB", Sample(size_bytes=1 << 30)),
    ],
)
def test_what_a_sample_means(text: str, sample: Sample) -> None:
    assert parse_sample(text) == sample


@pytest.mark.parametrize("text", ["3/2", "0/2", "1/99999", "0%", "0.0%", "5 %", "1.5G", "0K", "all", "1/2 "])
def test_what_means_nothing_is_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="is no sample"):
        parse_sample(text)


def test_a_share_reads_at_least_one_unit_and_chance_decides_which() -> None:
    store = FakeStore()
    save(store, manager(store), 1)
    assert discover(store).newest == REF
    found = examine_checkpoint(store, REF, Sample(fraction=0.000001), rng=random.Random(0))
    assert found.damage == []
    assert 0 < found.coverage.read_bytes <= found.coverage.total_bytes
    whole = examine_checkpoint(store, REF, Sample(fraction=1.0))
    assert whole.coverage.read_bytes == whole.coverage.total_bytes
    assert examine_checkpoint(store, REF, "inventory").coverage.read_bytes == 0


def test_what_is_read_ahead_comes_in_order_and_is_bounded() -> None:
    begun, peak, lock = set(), [], threading.Lock()

    def work(i: int) -> int:
        with lock:
            begun.add(i)
            peak.append(len(begun))
        return i

    got = []
    for i in in_order(range(50), work, 3):
        got.append(i)
        with lock:
            begun.discard(i)
    assert got == list(range(50))
    assert max(peak) <= 4


def test_an_error_while_reading_ahead_is_raised_and_ends_it() -> None:
    asked = []

    def tasks() -> Iterator[int]:
        for i in range(1000):
            asked.append(i)
            yield i

    def work(i: int) -> Unit:
        raise OSError(f"no {i}")

    with pytest.raises(OSError, match="no 0"):
        list(in_order(tasks(), work, 4))
    assert len(asked) <= 5
