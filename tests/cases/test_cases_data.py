"""Public bug reports about the order of data, random numbers and counters. BR-34 to 40."""

from __future__ import annotations

import random
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader, Dataset, IterableDataset
from torchdata.stateful_dataloader import StatefulDataLoader
from torchdata.stateful_dataloader.sampler import StatefulDistributedSampler
from workload import assert_same, build

import resilio
from resilio import CheckpointManager, replicated, save_every
from resilio.errors import ConfigError, LiveStateError, RestoreError
from resilio.testing.worlds import run_world
from resilio_drills.data import GlobalSampler, share_of

pytestmark = pytest.mark.filterwarnings("ignore:'set_vital' is deprecated")


def loader(n: int, workers: int = 0, shuffle: bool = True, dataset: Any = None) -> StatefulDataLoader[Any]:
    return StatefulDataLoader(dataset or list(range(n)), batch_size=2, shuffle=shuffle or None, num_workers=workers)


class Life:
    """One life of a job whose only state is its loader and the generators: what it saw, and what training drew."""

    def __init__(self, url: str | Path, data: Any, seed: int) -> None:
        torch.manual_seed(seed)  # another one in each life: only a restore brings the streams back
        self.loader = data()
        self.ckpt = CheckpointManager(url, {"dataloader": self.loader}, mode="sync")
        self.report = self.ckpt.restore()
        self.step = self.report.step
        self.seen: list[Any] = []
        self.batches: Iterator[Any] | None = None

    def train(self, n: int) -> Life:
        """`n` steps, over ends of epochs."""
        while n:
            if self.batches is None:
                self.batches = iter(self.loader)
            batch = next(self.batches, None)
            if batch is None:
                self.batches = None
                continue
            self.seen.append((batch.tolist(), torch.rand(1).item()))  # training draws, dropout for instance
            self.step, n = self.step + 1, n - 1
        return self

    def save(self) -> list[Any]:
        """A checkpoint; what this life has seen."""
        self.ckpt.save(self.step)
        self.ckpt.close()
        # Workers end at once with the last reference to their iterator; if the garbage collector finds it, each is
        # waited for.
        self.batches = self.loader._iterator = None
        return self.seen


# ------------------------------------------------------------------------------------------- BR-36: the shuffled order


def test_br_36_a_resume_in_the_middle_of_a_shuffled_epoch_trains_on_every_sample_once(tmp_path: Any) -> None:
    straight = Life(tmp_path / "straight", lambda: loader(32), 0).train(24).save()
    stopped = Life(tmp_path / "run", lambda: loader(32), 0).train(6).save()
    stopped += Life(tmp_path / "run", lambda: loader(32), 1).train(18).save()
    assert sorted(sample for batch, _ in stopped[:16] for sample in batch) == list(range(32))
    assert stopped == straight  # the order of the epoch after it, and what training draws, as well


def test_br_36_a_loader_that_cannot_say_where_it_stands_is_refused(tmp_path: Any) -> None:
    plain = DataLoader(torch.arange(16), batch_size=1, shuffle=True)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match=r"dataloader.*state_dict"):
        CheckpointManager(tmp_path, {"dataloader": plain})


# --------------------------------------------------------------------------------------------- BR-37: the epoch's seed


def take_share(rank: int, world: int, url: str, until: int) -> list[list[int]]:
    sampler = GlobalSampler(10, seed=5)  # built anew: nobody tells it which epoch it is
    seen = []
    with CheckpointManager(url, {"dataloader": replicated(sampler)}, mode="sync") as ckpt:
        ckpt.restore()
        for step in range(ckpt.next_step, until + 1):
            seen.append([i for one in share_of(sampler.next_batch(4), rank, world, 4) for i in one.ids[: one.n_real]])
            ckpt.step(step, last=step == until)
    return seen


def test_br_37_the_epoch_is_part_of_the_samplers_state_at_any_number_of_ranks(tmp_path: Any) -> None:
    (straight,) = run_world(take_share, 1, f"file://{tmp_path}/straight", 20, init=False)  # 8 epochs of 10 samples
    url, got = f"file://{tmp_path}/run", []
    for world, until in ((2, 9), (1, 14), (2, 20)):  # epochs 3 and 5 are both entered, left off and gone on with
        lives = run_world(take_share, world, url, until, init=world > 1)
        got += [sorted(i for share in shares for i in share) for shares in zip(*lives, strict=True)]
    assert got == [sorted(batch) for batch in straight]


def test_br_37_torch_s_own_sampler_goes_on_in_the_epoch_that_the_job_keeps(tmp_path: Any) -> None:
    def build_sampler() -> StatefulDistributedSampler:
        return StatefulDistributedSampler(range(8), num_replicas=1, rank=0, seed=0)  # type: ignore[arg-type]

    sampler, progress = build_sampler(), {"epoch": 3}
    sampler.set_epoch(3)
    batches = iter(sampler)
    seen = [next(batches) for _ in range(3)]
    state = {"dataloader": sampler, "progress": progress}
    with CheckpointManager(tmp_path, state, mode="sync") as ckpt:
        ckpt.restore()
        ckpt.save(3)
    straight = [*seen, *batches]
    sampler, progress = build_sampler(), {"epoch": 0}
    resilio.restore(tmp_path, {"dataloader": sampler, "progress": progress})
    sampler.set_epoch(progress["epoch"])
    assert [*seen, *sampler] == straight


# ----------------------------------------------------------------------------------- BR-34 and 35: over and over again


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("shuffle", [False, True], ids=["in_order", "shuffled"])
def test_br_35_a_second_and_a_third_resume_in_an_epoch_go_on_with_the_next_batch(
    tmp_path: Any, workers: int, shuffle: bool
) -> None:
    def data() -> Any:
        return loader(100, workers, shuffle)

    straight = Life(tmp_path / "straight", data, 0).train(46).save()
    seen = []
    for number, steps in enumerate((30, 10, 0, 6)):  # 0: saved right after a restore, at the same step
        life = Life(tmp_path / "run", data, number).train(steps)
        if steps == 0:
            life.step += 1
        seen += life.save()
    assert seen == straight
    if not shuffle:
        assert seen[40][0] == [80, 81]


@pytest.mark.parametrize("workers", [0, 2])
def test_br_34_a_checkpoint_at_the_end_of_an_epoch_goes_on_with_the_next_one(tmp_path: Any, workers: int) -> None:
    def data() -> Any:
        return loader(8, workers)

    straight = Life(tmp_path / "straight", data, 0).train(10).save()
    seen = []
    for number, steps in enumerate((4, 4, 2)):  # each life ends with its epoch
        seen += Life(tmp_path / "run", data, number).train(steps).save()
    assert sorted(sample for batch, _ in seen[:4] for sample in batch) == list(range(8))
    assert seen == straight


@pytest.mark.parametrize("workers", [0, 1])
def test_br_34_another_number_of_workers_is_refused_by_the_restore_itself(tmp_path: Any, workers: int) -> None:
    Life(tmp_path, lambda: loader(16, 2), 0).train(3).save()
    live = loader(16, workers)
    torch.manual_seed(9)
    draws = torch.get_rng_state()
    with pytest.raises(RestoreError, match="dataloader could not be restored, everything is as it was"):
        resilio.restore(tmp_path, {"dataloader": live})
    assert torch.equal(torch.get_rng_state(), draws)
    assert sorted(sample for batch in live for sample in batch.tolist()) == list(range(16))  # it is as it was


# ------------------------------------------------------------------------------ BR-38: generators that stay as they are


def draw() -> list[float]:
    return [random.gauss(0, 1), float(np.random.randn()), *torch.randn(3).tolist()]


def test_br_38_the_half_of_a_pair_that_a_generator_holds_back_comes_back_too(tmp_path: Any) -> None:
    draw()  # normal numbers are made in pairs: Python's and NumPy's generators keep the second one for the next call
    with CheckpointManager(tmp_path, {"n": {"x": 1}}, mode="sync") as ckpt:
        ckpt.restore()
        ckpt.save(1)
        want = [draw() for _ in range(3)]
        for number in range(2):
            for seed in (random.seed, np.random.seed, torch.manual_seed):
                seed(number)
            ckpt.restore()
            assert [draw() for _ in range(3)] == want


@pytest.mark.parametrize("broken", ["random.setstate", "numpy.random.set_state", "torch.set_rng_state"])
def test_br_38_a_generator_that_takes_no_state_fails_the_restore(tmp_path: Any, monkeypatch: Any, broken: str) -> None:
    def refuse(state: Any) -> None:
        raise ValueError("not a state of this version")

    with CheckpointManager(tmp_path, {"n": {"x": 1}}, mode="sync") as ckpt:
        ckpt.restore()
        ckpt.save(1)
        monkeypatch.setattr(broken, refuse)
        with pytest.raises(LiveStateError, match=r"rng.*not a state of this version"):
            ckpt.restore()
        with pytest.raises(LiveStateError):  # nor is what came of it saved
            ckpt.save(2)


# ----------------------------------------------------------------------------------- BR-39: what winding forward draws


class Noisy(Dataset[torch.Tensor]):
    """Augments with the global generator."""

    def __len__(self) -> int:
        return 16

    def __getitem__(self, i: int) -> torch.Tensor:
        return i + torch.rand(1)


class NoisyStream(IterableDataset[torch.Tensor]):
    """The same as a stream, which can only be wound forward by reading it."""

    def __iter__(self) -> Iterator[torch.Tensor]:
        for i in range(16):
            yield i + torch.rand(1)


# One resume only of a stream that keeps no place of its own: see the next test.
@pytest.mark.parametrize(("dataset", "lives"), [(Noisy, (3, 2, 3)), (NoisyStream, (3, 5))])
def test_br_39_augmentation_and_training_draw_what_they_would_have_drawn(
    tmp_path: Any, dataset: Any, lives: tuple[int, ...]
) -> None:
    def data() -> Any:
        return loader(0, shuffle=dataset is Noisy, dataset=dataset())

    straight = Life(tmp_path / "straight", data, 0).train(8).save()
    seen = []
    for number, steps in enumerate(lives):
        seen += Life(tmp_path / "run", data, number).train(steps).save()
    assert_same(seen, straight)


def test_br_35_a_loader_that_will_not_come_back_a_second_time_is_told_at_the_first(tmp_path: Any, caplog: Any) -> None:
    # torchdata 0.11 counts the steps of winding a stream forward twice: what it says of itself after a resume is wrong.
    for dataset in (Noisy, NoisyStream):
        caplog.clear()
        for number in range(2):
            with caplog.at_level("WARNING", "resilio"):
                Life(tmp_path / dataset.__name__, partial(loader, 0, 0, dataset is Noisy, dataset()), number).train(
                    3
                ).save()
            told = number == 1 and dataset is NoisyStream
            assert ("dataloader: right after the restore" in caplog.text) == told


# ------------------------------------------------------------------------------------- BR-40: a batch trained on twice


def test_br_40_a_step_is_one_that_is_complete_and_every_batch_is_trained_on_once(tmp_path: Any) -> None:
    log: list[tuple[int, int]] = []
    for number in range(1, 5):  # lives of 1, 2, 3 and 4 steps
        job = build("single", seed=number)
        with CheckpointManager(tmp_path, job.state(), save=save_every(2), mode="async") as ckpt:
            ckpt.restore()
            steps = range(ckpt.next_step, ckpt.next_step + number)
            for step in steps:
                batch = job.loader.position
                job.train_step()
                log.append((step, batch))
                ckpt.step(step, last=step == steps[-1])
        assert job.scheduler.last_epoch == log[-1][0]
        assert {int(state["step"]) for state in job.optimizer.state.values()} == {log[-1][0]}
    assert log == [(step, (step - 1) * 12) for step in range(1, 11)]
