"""`check_fingerprints=True`: what all ranks read together is what was saved, at any world; else the tensor is named."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import nn
from workload import assert_same, build, snapshot

import resilio
from resilio import CheckpointManager
from resilio.errors import ConfigError, IntegrityError, ResilioError, RestoreError
from resilio.records.digests import digest_of
from resilio.records.schema import CommitRecord, decode, encode
from resilio.testing.worlds import run_world

UP = "model.blocks.0.up.weight", "model.blocks.1.up.weight"


def forge(run: Path, step: int, change: Callable[[dict[str, Any]], None]) -> None:
    """Change the tensors of each part of a manifest, and seal all with the right digests."""
    folder, commit_path = next(run.glob(f"step-{step:09d}-*")), next(run.glob(f"commits/{step:09d}-*"))

    def write(path: Path, data: bytes) -> tuple[int, str]:
        path.unlink()
        path.write_bytes(data)
        return len(data), digest_of(data)

    root = json.loads((folder / "manifest.json").read_bytes())
    for ref in root["parts"]:
        part = json.loads((folder / ref["name"]).read_bytes())
        change(part["tensors"])
        ref["size_bytes"], ref["digest"] = write(folder / ref["name"], json.dumps(part).encode())
    commit = decode(commit_path.read_bytes(), CommitRecord, commit_path.name)
    commit.manifest_size_bytes, commit.manifest_digest = write(folder / "manifest.json", json.dumps(root).encode())
    write(commit_path, encode(commit))


def another(tensors: dict[str, Any]) -> None:
    """One piece of one tensor was something else when it was saved."""
    for piece in tensors.get(UP[0], {"pieces": []})["pieces"]:
        if piece["offsets"] == [0, 0]:
            piece["fingerprint"] = piece["fingerprint"][:-1] + ("1" if piece["fingerprint"][-1] == "0" else "0")


def swapped(tensors: dict[str, Any]) -> None:
    """Two tensors of equal shape have each other's bytes, whose digests are right."""
    for one, two in zip(*(tensors.get(name, {"pieces": []})["pieces"] for name in UP), strict=True):
        for field in ("at", "block", "object"):
            one[field], two[field] = two[field], one[field]


def train(rank: int, world: int, url: str, strategy: str, steps: int) -> dict[str, Any]:
    job = build(strategy, rank, world)
    states = {}
    with CheckpointManager(url, {"model": job.model, "optimizer": job.optimizer}, mode="sync", timeout_s=60) as ckpt:
        for step in range(1, steps + 1):
            job.train_step()
            ckpt.save(step)
            states[step] = snapshot(job)
    return states


def kept(state: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in state.items() if key not in ("scheduler", "loader")}


def take(
    rank: int, world: int, url: str, strategy: str, which: Any = "newest", check: bool = True
) -> tuple[Any, dict[str, Any], list[str]]:
    """What came of it: the step or the error's text, the state then, what was passed over."""
    job = build(strategy, rank, world, seed=7)
    live = {"model": job.model, "optimizer": job.optimizer}
    try:
        report = resilio.restore(url, live, which, check_fingerprints=check, timeout_s=60)
    except ResilioError as error:
        return f"{type(error).__name__}: {error}", kept(snapshot(job)), []
    return report.step, kept(snapshot(job)), [str(one) for one in report.passed_over]


def takes(rank: int, world: int, url: str, strategies: list[str], *more: Any) -> list[Any]:
    return [take(rank, world, url, strategy, *more) for strategy in strategies]


def test_what_is_whole_passes_at_every_world_and_placement(tmp_path):
    urls = {"single": f"file://{tmp_path}/single", "fsdp2": f"file://{tmp_path}/fsdp2"}
    states = train(0, 1, urls["single"], "single", 1), run_world(train, 2, urls["fsdp2"], "fsdp2", 1)[0]
    for url, saved in zip(urls.values(), states, strict=True):
        found = [
            take(0, 1, url, "single"),
            *(one for rank in run_world(takes, 2, url, ["ddp", "fsdp2"]) for one in rank),
        ]
        for step, state, _ in found:
            assert step == 1, step
            assert_same(state, kept(saved[1]))


@pytest.mark.parametrize("saved_by", ["single", "fsdp2"])
def test_what_is_not_what_was_saved_is_named_and_live_state_stays(tmp_path, saved_by):
    for fault, said in ((another, "its fingerprint differs"), (swapped, f"it holds the values of {UP[1]!r}")):
        run = tmp_path / fault.__name__
        url = f"file://{run}"
        if saved_by == "single":
            train(0, 1, url, "single", 2)
        else:
            run_world(train, 2, url, "fsdp2", 2)
        forge(run, 2, fault)
        untouched = kept(snapshot(build("single", seed=7)))
        assert take(0, 1, url, "single", 2, False)[0] == 2  # digests are right: nothing else tells
        found = [
            take(0, 1, url, "single", 2),
            *(two for one in run_world(takes, 2, url, ["ddp", "fsdp2"], 2) for two in one),
        ]
        for text, state, _ in found:
            assert f"{UP[0]!r} of step 2 is not what was saved" in text and said in text
            assert text.startswith(f"IntegrityError: {'step 2: 2 problems' if fault is swapped else repr(UP[0])}")
            assert_same(state, untouched)
        step, _, passed = take(0, 1, url, "single")  # the newest whole one
        assert step == 1 and "is not what was saved" in passed[0]


def one_rank_reads_something_else(rank: int, world: int, url: str) -> str:
    if rank == 1:
        from resilio.engine import checking

        real = checking.fp1
        checking.fp1 = lambda tensor, offsets: real(tensor + 1, offsets)  # type: ignore[assignment]
    return str(take(rank, world, url, "ddp", 1)[0])


def test_a_rank_whose_copy_is_another_is_named(tmp_path):
    train(0, 1, f"file://{tmp_path}", "single", 1)
    found = run_world(one_rank_reads_something_else, 2, f"file://{tmp_path}")
    assert found[0] == found[1]
    assert "was read as one thing by rank 0 and as another by rank 1" in found[0]


def test_where_none_were_taken_there_is_no_pass(tmp_path):
    live = {"a": torch.ones(3)}
    with CheckpointManager(tmp_path / "run", {"x": live}, mode="sync", fingerprints=False) as ckpt:
        ckpt.save(1)
        ckpt.restore(1)
        with pytest.raises(RestoreError, match="has no fingerprint of"):
            ckpt.restore(check_fingerprints=True)
        with pytest.raises(ConfigError, match="check_fingerprints='no': it is True or False"):
            ckpt.restore(check_fingerprints="no")  # type: ignore[arg-type]
    dcp.save({"x": live}, checkpoint_id=tmp_path / "plain")
    with pytest.raises(RestoreError, match="plain DCP, which takes no fingerprints"):
        resilio.restore(tmp_path / "plain", {"x": live}, check_fingerprints=True)


def test_a_part_of_the_state_renamed_is_checked_under_its_saved_name(tmp_path):
    model = nn.Linear(3, 2)
    with CheckpointManager(tmp_path, {"model": model}, mode="sync") as ckpt:
        ckpt.save(1)
    live = nn.ModuleDict({"inner": nn.Linear(3, 2)})

    def restore() -> None:
        names = {"model.": "model.inner."}
        resilio.restore(tmp_path, {"model": live}, only=["model"], rename=names, check_fingerprints=True)

    restore()
    assert torch.equal(live["inner"].weight, model.weight)
    forge(tmp_path, 1, lambda tensors: tensors["model.weight"]["pieces"][0].update(fingerprint="fp1:" + "1" * 32))
    with pytest.raises(IntegrityError, match=r"'model\.weight' of step 1 is not what was saved"):
        restore()
