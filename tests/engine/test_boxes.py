"""The reads that fetch a box: every element once, whole blocks only, nothing far outside what is needed."""

from __future__ import annotations

from math import prod

import numpy as np
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from resilio.records.boxes import Box, cut, split
from resilio.records.digests import BLOCK_SIZE


@st.composite
def boxes(draw):
    sizes = draw(st.lists(st.integers(1, 60), min_size=0, max_size=3))
    sizes = [s * draw(st.sampled_from([1, 1, 7, 300])) for s in sizes]
    while prod(sizes) > 400_000:
        sizes[sizes.index(max(sizes))] //= 2
    offsets = [draw(st.integers(0, s - 1)) for s in sizes]
    lengths = [draw(st.integers(1, s - o)) for s, o in zip(sizes, offsets, strict=True)]
    return Box(tuple(sizes), tuple(offsets), tuple(lengths), draw(st.sampled_from([1, 2, 4, 8])))


@settings(max_examples=150, deadline=None)
@given(boxes(), st.sampled_from([BLOCK_SIZE, 4 * BLOCK_SIZE, 1 << 23]))
def test_every_element_is_fetched_once_from_where_it_lies(box, limit):
    elements = np.arange(prod(box.sizes), dtype=np.int64).reshape(box.sizes)
    wanted = elements[tuple(slice(o, o + n) for o, n in zip(box.offsets, box.lengths, strict=True))]
    got = np.full(box.lengths, -1, dtype=np.int64)
    for span in split(box, limit):
        assert span.start % BLOCK_SIZE == 0
        assert span.end % BLOCK_SIZE == 0 or span.end == prod(box.sizes) * box.itemsize
        assert span.start <= span.box.first and span.box.end <= span.end
        assert span.end - span.start <= limit + 2 * BLOCK_SIZE or span.box.lengths.count(1) >= len(box.sizes) - 1
        base = (span.box.first - span.start) // box.itemsize + span.start // box.itemsize
        source = np.lib.stride_tricks.as_strided(
            elements.reshape(-1)[base:], span.box.lengths, [s * 8 for s in span.box.strides]
        )
        target = got[(*(slice(w, w + n) for w, n in zip(span.within, span.box.lengths, strict=True)), ...)]
        assert (target == -1).all(), "an element was fetched twice"
        target[...] = source
    np.testing.assert_array_equal(got, wanted)


def test_row_shards_read_what_they_need_and_at_most_two_blocks_more():
    # wte of GPT-2, rank 1 of 4: the reader of DCP fetches 4 times this
    box = Box((50257, 768), (12565, 0), (12565, 768), 4)
    spans = list(split(box))
    assert sum(span.end - span.start for span in spans) <= box.size_bytes + 2 * BLOCK_SIZE + len(spans) * BLOCK_SIZE
    assert all(span.box.one_run for span in spans)


def test_columns_of_long_rows_are_read_one_by_one_and_of_short_rows_together():
    long_rows = Box((8, 400_000), (0, 0), (8, 1000), 4)
    assert len(list(split(long_rows))) == 8
    assert sum(s.end - s.start for s in split(long_rows)) <= 8 * 2 * BLOCK_SIZE
    short_rows = Box((256, 1024), (0, 256), (256, 256), 4)
    assert len(list(split(short_rows))) == 1


@settings(max_examples=150, deadline=None)
@given(boxes(), st.sampled_from([BLOCK_SIZE, 4 * BLOCK_SIZE, 1 << 23]))
def test_bytes_side_by_side_are_cut_into_whole_blocks_without_a_gap(box, limit):
    assume(box.one_run)
    piece_bytes = prod(box.sizes) * box.itemsize
    at = box.first
    for run in cut(box, limit):
        assert run.first == at < run.stop
        assert run.start % BLOCK_SIZE == 0 and run.start <= run.first < run.start + BLOCK_SIZE
        assert run.end == min(-(-run.stop // BLOCK_SIZE) * BLOCK_SIZE, piece_bytes)
        assert run.end - run.start <= limit
        at = run.stop
    assert at == box.end
