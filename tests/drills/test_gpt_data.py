"""The corpus is the same every time; the order of samples is the job's, not the number of ranks'."""

from __future__ import annotations

import os
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from resilio_drills.data import GlobalSampler, _sources, corpus, share_of, windows

WORLDS = [1, 2, 3, 4]


def real_ids(batch: list[int], world: int, micro_batch: int) -> list[int]:
    """What all ranks of a world train on in one step."""
    passes = [p for rank in range(world) for p in share_of(batch, rank, world, micro_batch)]
    return [i for p in passes for i in p.ids[: p.n_real]]


def test_corpus_does_not_depend_on_the_order_in_which_folders_are_listed(monkeypatch: pytest.MonkeyPatch) -> None:
    walk = os.walk

    def backwards(root: Any) -> Any:
        for folder, folders, names in walk(root):
            folders.reverse()
            yield folder, folders, sorted(names, reverse=True)

    usual = corpus.__wrapped__(300_000)
    monkeypatch.setattr(os, "walk", backwards)
    assert torch.equal(corpus.__wrapped__(300_000), usual)


def test_corpus_is_bounded_and_a_smaller_one_is_the_beginning_of_a_bigger_one() -> None:
    small, big = corpus(10_000), corpus(200_000)
    assert len(small) == 10_000 and len(big) == 200_000
    assert small.dtype == torch.uint8
    assert torch.equal(small, big[:10_000])


def test_corpus_holds_no_tests_and_no_site_packages() -> None:
    root = Path(os.__file__).parent
    parts = {part for path in _sources(root) for part in path.relative_to(root).parts}
    assert "json" in parts
    assert not parts & {"test", "tests", "site-packages", "dist-packages", "idlelib"}


def test_windows_cover_the_text_and_neighbours_share_one_byte() -> None:
    text = torch.arange(41, dtype=torch.uint8)
    samples = windows(text, 10)
    assert samples.shape == (4, 11)
    assert torch.equal(samples[1:, 0], samples[:-1, -1])
    assert samples[0, 0] == 0 and samples[-1, -1] == 40
    with pytest.raises(ValueError, match="block-size"):
        windows(text, 41)


@pytest.mark.parametrize("world", WORLDS)
def test_every_sample_is_seen_exactly_once_in_an_epoch(world: int) -> None:
    sampler = GlobalSampler(120, seed=5)
    for epoch in range(2):
        assert sampler.epoch == epoch
        seen = [i for _ in range(10) for i in real_ids(sampler.next_batch(12), world, micro_batch=5)]
        assert sorted(seen) == list(range(120))


def test_epochs_have_different_orders_and_so_have_seeds() -> None:
    orders = []
    for seed in (0, 1):
        sampler = GlobalSampler(50, seed)
        orders += [sampler.next_batch(50), sampler.next_batch(50)]
    assert len({tuple(order) for order in orders}) == 4


def test_the_order_of_a_seed_never_changes() -> None:
    """A checkpoint holds a position only: an order that changes with a library would lose samples and repeat others."""
    assert GlobalSampler(1000, seed=1337).next_batch(8) == [428, 759, 613, 402, 345, 727, 926, 870]


@settings(max_examples=200, deadline=None)
@given(
    batch=st.lists(st.integers(0, 10**6), min_size=1, max_size=40, unique=True),
    world=st.integers(1, 9),
    micro_batch=st.integers(1, 16),
)
def test_a_global_batch_is_the_same_samples_in_every_world(batch: list[int], world: int, micro_batch: int) -> None:
    assert sorted(real_ids(batch, world, micro_batch)) == sorted(batch)
    shares = [share_of(batch, rank, world, micro_batch) for rank in range(world)]
    shapes = {tuple(len(p.ids) for p in share) for share in shares}
    assert len(shapes) == 1, "FSDP's ranks must run the same number of passes, a compiled model wants one shape"
    assert max(len(p.ids) for share in shares for p in share) <= micro_batch
    assert len({len(p.ids) for p in shares[0]}) == 1


@pytest.mark.parametrize("world", WORLDS)
def test_twelve_samples_need_no_padding_up_to_four_ranks(world: int) -> None:
    assert all(len(p.ids) == p.n_real for rank in range(world) for p in share_of(list(range(12)), rank, world, 6))


@settings(max_examples=50, deadline=None)
@given(n_samples=st.integers(1, 60), before=st.integers(0, 150), size=st.integers(1, 30))
def test_saved_and_loaded_it_goes_on_as_if_nothing_had_happened(n_samples: int, before: int, size: int) -> None:
    """In the middle of an epoch, at its end, and with a batch that lies across two."""
    whole = GlobalSampler(n_samples, seed=3)
    whole.next_batch(before)
    loaded = GlobalSampler(n_samples, seed=99)
    loaded.load_state_dict(whole.state_dict())
    assert [loaded.next_batch(size) for _ in range(3)] == [whole.next_batch(size) for _ in range(3)]


def test_across_epochs_each_sample_is_seen_once_per_epoch_even_if_batches_do_not_divide_it() -> None:
    sampler = GlobalSampler(10, seed=3)
    ids = [i for _ in range(10) for i in sampler.next_batch(7)]
    assert all(Counter(ids[start : start + 10]) == Counter(range(10)) for start in range(0, 70, 10))


def test_state_over_other_data_is_refused_and_changes_nothing() -> None:
    sampler = GlobalSampler(10, seed=3)
    with pytest.raises(ValueError, match="11 samples"):
        sampler.load_state_dict({"position": 5, "seed": 7, "n_samples": 11})
    assert sampler.state_dict() == {"position": 0, "seed": 3, "n_samples": 10}


def test_state_is_plain_values() -> None:
    sampler = GlobalSampler(10)
    sampler.next_batch(3)
    assert {type(value) for value in sampler.state_dict().values()} == {int}
