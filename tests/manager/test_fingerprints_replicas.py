"""`check_replicas=True`: copies that have drifted apart are refused before one of them is saved for all."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from workload import build

from resilio import CheckpointManager
from resilio.engine.replicas import own_copies, refuse_differing
from resilio.errors import ConfigError, RanksDisagreeError, ResilioError
from resilio.state.flat import FlatState
from resilio.testing.worlds import run_world


def drifts(rank: int, world: int, url: str, what: str) -> list[Any]:
    """Save step 1; let the last rank drift; try step 2, then repair it and save step 3."""
    job = build("ddp", rank, world)
    live = {"model": job.model, "optimizer": job.optimizer}
    job.train_step()
    said = []
    with CheckpointManager(url, live, mode="sync", check_replicas=True, on_save_error="warn", timeout_s=60) as ckpt:
        ckpt.save(1)
        job.train_step()
        first = next(p for name, p in job.model.named_parameters() if name.endswith("emb.weight"))
        tensor = first.data if what == "parameter" else job.optimizer.state[first]["exp_avg"]
        kept = tensor.clone()
        if rank == world - 1:
            tensor.view(torch.int32)[3, 1] ^= 1  # the lowest bit of one element
        try:
            ckpt.save(2)
        except ResilioError as error:
            said.append((type(error).__name__, str(error)))
        tensor.copy_(kept)
        ckpt.save(3)
        said.append([info.step for info in ckpt.checkpoints()])
    return said


@pytest.mark.parametrize(
    ("what", "key", "ranks"),
    [
        ("parameter", "model.emb.weight", "on rank(s) 2 differs from that on rank(s) 0, 1 at step 2"),
        ("moment", "optimizer.state.emb.weight.exp_avg", "on rank(s) 2 differs from that on rank(s) 0, 1 at step 2"),
    ],
)
def test_one_bit_on_one_rank_names_tensor_and_rank_and_nothing_is_committed(tmp_path, what, key, ranks):
    found = run_world(drifts, 3, f"file://{tmp_path}", what)
    assert found[0] == found[1] == found[2]
    (kind, text), steps = found[0]
    assert kind == "RanksDisagreeError" and text.startswith(f"{key!r} {ranks}") and "Nothing was written" in text
    assert steps == [1, 3]


def looks(rank: int, world: int) -> list[Any]:
    mesh = init_device_mesh("cpu", (2, 2))
    local = torch.full((2, 3), float(rank % 2))
    hybrid = DTensor.from_local(local, mesh, [Replicate(), Shard(0)], run_check=False)
    sharded = DTensor.from_local(torch.full((2, 3), float(rank)), mesh, [Shard(0), Shard(1)], run_check=False)
    own = torch.full((2,), float(rank))
    flat = FlatState(
        tensors={"h": hybrid, "s": sharded, "b": own, f"rank.{rank}.x": own, "p": torch.ones(2)},
        kinds={"h": "parameter", "s": "parameter", "b": "buffer", f"rank.{rank}.x": "other", "p": "other"},
    )
    copies: list[Any] = [None] * world
    torch.distributed.all_gather_object(copies, own_copies(flat, rank))
    refuse_differing(copies, 1)
    if rank == 3:
        local += 1
    torch.distributed.all_gather_object(copies, own_copies(flat, rank))
    with pytest.raises(RanksDisagreeError) as caught:
        refuse_differing(copies, 1)
    return [sorted(copies[rank]), str(caught.value), caught.value.facts["ranks"]]


def test_only_copies_are_compared_each_with_its_own_group():
    for keys, text, ranks in run_world(looks, 4):
        assert keys == ["h", "p"]
        assert text.startswith("'h' on rank(s) 3 differs from that on rank(s) 1 at step 1:") and ranks == [3]


def test_it_is_true_or_false(tmp_path):
    with pytest.raises(ConfigError, match="check_replicas=3: it is True or False"):
        CheckpointManager(tmp_path, {}, check_replicas=3)  # type: ignore[arg-type]
