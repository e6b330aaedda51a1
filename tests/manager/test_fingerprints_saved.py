"""What a save writes down of each tensor: the fingerprint of what is in it, the same at every world and placement."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from workload import build

from resilio import CheckpointManager
from resilio.errors import ConfigError, ResilioError
from resilio.records.catalog import discover
from resilio.records.fingerprints import Lanes
from resilio.records.manifest import LoadedManifest, load_manifest
from resilio.state.fingerprint import fp1
from resilio.storage import LocalStorage
from resilio.testing.worlds import run_world


def manifest_of(folder: Path) -> LoadedManifest:
    store = LocalStorage(folder)
    catalog = discover(store)
    return load_manifest(store, catalog.read(next(iter(catalog.commits))))


def saves(rank: int, world: int, url: str, strategy: str) -> None:
    """One step with gradients that no world changes, so moments and counters are there as well."""
    job = build(strategy, rank, world)
    for p in job.model.parameters():
        p.grad = torch.ones_like(p)
    job.optimizer.step()
    with CheckpointManager(url, {"model": job.model, "optimizer": job.optimizer}, timeout_s=60) as ckpt:
        ckpt.save(1)


def test_each_tensor_has_the_fingerprint_of_its_content_at_every_world_and_placement(tmp_path):
    saves(0, 1, f"file://{tmp_path}/single", "single")
    for strategy in ("ddp", "fsdp2"):
        run_world(saves, 2, f"file://{tmp_path}/{strategy}", strategy)
    found: dict[str, dict[str, Any]] = {}
    for name in ("single", "ddp", "fsdp2"):
        tensors = manifest_of(tmp_path / name).tensors
        found[name] = {key: one.fingerprint() for key, one in tensors.items() if not key.startswith("rank.")}
    assert found["single"] == found["ddp"] == found["fsdp2"]
    job = build("single")
    for p in job.model.parameters():
        p.grad = torch.ones_like(p)
    job.optimizer.step()
    live = {f"model.{key}": value for key, value in job.model.state_dict().items() if key != "head.weight"}
    assert {key: fp1(value) for key, value in live.items()} == {key: found["single"][key] for key in live}
    assert any(key.endswith("exp_avg") for key in found["single"]) and None not in found["single"].values()


def test_a_large_tensor_computed_beside_the_writing_and_layouts_of_all_kinds(tmp_path):
    state = {
        "large": torch.randn(700, 900),
        "larger": torch.randn(900, 800, dtype=torch.float64),
        "channels_last": torch.randn(4, 3, 5, 5).contiguous(memory_format=torch.channels_last),
        "view": torch.randn(20, 30)[::2, 3:],
        "conj": torch.randn(3, 3, dtype=torch.complex64).conj(),
        "scalar": torch.tensor(7),
        "empty": torch.empty(0, 3),
        "flags": torch.tensor([True, False]),
    }
    expected = {f"x.{key}": fp1(value) for key, value in state.items()}
    with CheckpointManager(tmp_path, {"x": state, "rng": False}, mode="sync") as ckpt:
        ckpt.save(1)
    assert {key: one.fingerprint() for key, one in manifest_of(tmp_path).tensors.items()} == expected


def test_a_fingerprint_that_cannot_be_computed_fails_the_save(tmp_path, monkeypatch):
    def broken(*_: Any) -> Lanes:
        raise MemoryError("no room")

    monkeypatch.setattr("resilio.engine.pieces.fp1", broken)
    for size in (3, 1 << 19):  # in the writing thread, and beside it
        with (
            CheckpointManager(tmp_path, {"x": {"a": torch.zeros(size)}}, mode="sync") as ckpt,
            pytest.raises(ResilioError, match="no room"),
        ):
            ckpt.save(1)
    assert not discover(LocalStorage(tmp_path)).commits


def test_without_them_none_are_written(tmp_path):
    with CheckpointManager(tmp_path, {"x": {"a": torch.zeros(3)}}, mode="sync", fingerprints=False) as ckpt:
        ckpt.save(1)
    assert {one.fingerprint() for one in manifest_of(tmp_path).tensors.values()} == {None}
    with pytest.raises(ConfigError, match="fingerprints=1: it is True or False"):
        CheckpointManager(tmp_path, {"x": {}}, fingerprints=1)  # type: ignore[arg-type]
