"""Stop and resume: exact at the same world; every logical tensor equal, no sample lost or repeated, at any other."""

from __future__ import annotations

import logging
from typing import Any

import pytest
import torch
from workload import GLOBAL_BATCH, assert_same, build, rng, snapshot

from resilio import CheckpointManager, save_every
from resilio.testing.worlds import run_world


def life(
    rank: int, world: int, url: str, strategy: str, until: int, seed: int, options: dict[str, Any] | None = None
) -> dict[str, Any]:
    """One life of a job: restore, train to step `until`, saving every second step and at the end."""
    options = dict(options or {})
    mode = options.pop("mode", "sync")
    job = build(strategy, rank, world, seed=seed, **options)
    with CheckpointManager(url, job.state(), save=save_every(2), mode=mode) as ckpt:
        report = ckpt.restore()
        found = {"start": ckpt.next_step, "how": {o.component: o.how for o in report.outcomes}, "losses": []}
        if report.found:
            found["restored"] = snapshot(job)
            found["restored_rng"] = rng()
        for step in range(ckpt.next_step, until + 1):
            loss = job.train_step()
            found["losses"].append(loss)
            ckpt.step(step, metrics={"loss": loss}, last=step == until)
    return {**found, "end": snapshot(job), "end_rng": rng()}


def run_life(world: int, *args: Any, **kwargs: Any) -> list[dict[str, Any]]:
    # One rank of FSDP2 needs a process group as well; a single process has none, as without torchrun.
    return run_world(life, world, *args, init=world > 1 or args[1] == "fsdp2", **kwargs)


@pytest.mark.parametrize(
    ("strategy", "world", "options"),
    [
        ("single", 1, {"dropout": 0.2}),
        ("single", 1, {"dropout": 0.2, "compile": True, "mode": "async"}),
        ("fsdp2", 2, {"dropout": 0.2}),
        ("fsdp2", 2, {"dropout": 0.2, "compile": True, "mode": "async"}),
        ("ddp", 2, {"mode": "async"}),
    ],
    ids=lambda value: str(value) if not isinstance(value, dict) else "-".join(map(str, value)),
)
def test_stop_and_resume_twice_at_the_same_world_is_exact(tmp_path, strategy, world, options):
    straight = run_life(world, f"file://{tmp_path}/straight", strategy, 8, 1, options)
    url = f"file://{tmp_path}/stopped"
    lives = [run_life(world, url, strategy, until, seed, options) for until, seed in ((4, 1), (6, 2), (8, 3))]
    for rank in range(world):
        assert [one[rank]["start"] for one in lives] == [1, 5, 7]
        assert_same([loss for one in lives for loss in one[rank]["losses"]], straight[rank]["losses"], "losses")
        assert_same(lives[2][rank]["end"], straight[rank]["end"])
        assert_same(lives[2][rank]["end_rng"], straight[rank]["end_rng"], "rng")
        assert set(lives[2][rank]["how"].values()) == {"exact"}


@pytest.mark.parametrize(
    "lives",
    [
        [("fsdp2", 2), ("single", 1), ("fsdp2", 2), ("fsdp2", 3)],
        [("ddp", 2), ("fsdp2", 2), ("single", 1), ("ddp", 2)],
        [("single", 1), ("fsdp2", 3), ("fsdp2", 1)],
    ],
    ids=lambda lives: "-".join(f"{strategy}{world}" for strategy, world in lives),
)
def test_another_world_gets_every_logical_tensor_and_goes_on_with_the_next_sample(tmp_path, lives):
    before = None
    until = 0
    for number, (strategy, world) in enumerate(lives):
        until += 3
        # compiled and eager take turns: names must not depend on it
        results = run_life(world, f"file://{tmp_path}", strategy, until, number, {"compile": number % 2 == 1})
        if before is not None:
            for result in results:
                assert result["start"] == until - 2
                assert_same(result["restored"], before)
        for result in results:
            assert result["end"]["loader"]["position"] == until * GLOBAL_BATCH
        before = results[0]["end"]


def save_after_eval(rank: int, world: int, url: str) -> None:
    job = build("fsdp2", rank, world)
    with CheckpointManager(url, job.state(), mode="sync") as ckpt:
        ckpt.restore()
        job.train_step()
        with torch.no_grad():
            job.model.eval()
            job.model(torch.zeros(2, 3, dtype=torch.int64))
        ckpt.save(1)  # the root's parameters are still gathered here


def test_a_save_right_after_an_evaluation_pass_under_fsdp2_is_whole(tmp_path):
    run_world(save_after_eval, 2, f"file://{tmp_path}")
    trained = run_life(2, f"file://{tmp_path}/twin", "fsdp2", 1, 0)
    restored = run_life(1, f"file://{tmp_path}", "single", 2, 5)
    assert_same(restored[0]["restored"], trained[0]["end"])


def test_a_new_run_starts_at_step_one_and_says_that_nothing_was_found(tmp_path, caplog):
    job = build("single")
    with caplog.at_level(logging.INFO, "resilio"), CheckpointManager(f"file://{tmp_path}/none", job.state()) as ckpt:
        report = ckpt.restore()
        assert report.found is None
        assert ckpt.next_step == 1
