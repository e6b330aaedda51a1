"""A damaged checkpoint: every problem that the restore could see is told, the same to all ranks."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

import resilio
from resilio import CheckpointManager
from resilio.errors import IntegrityError, ResilioError
from resilio.records.catalog import discover
from resilio.records.digests import digest_of
from resilio.records.schema import seal
from resilio.records.verify import verify_checkpoint
from resilio.storage import LocalStorage
from resilio.testing.worlds import run_world
from resilio.types import CheckpointRef

ROWS, COLUMNS = 48, 8192  # two blocks of 64 KiB are four rows
Seen = tuple[str, list[tuple[str, str | None, list[int] | None]], bool]


def sharded(rank: int, world: int) -> dict[str, torch.Tensor]:
    mesh = init_device_mesh("cpu", (world,))
    return {
        name: distribute_tensor(torch.full((ROWS, COLUMNS), value), mesh, [Shard(0)])
        for name, value in (("a", 1.0), ("b", 2.0), ("c", 3.0))
    }


def save_two(rank: int, world: int, url: str) -> None:
    with CheckpointManager(url, {"n": sharded(rank, world), "rng": False}, mode="sync") as ckpt:
        ckpt.restore()
        ckpt.save(1)
        ckpt.save(2)


def look(rank: int, world: int, url: str, which: int | str) -> Seen:
    """What a restore says; and whether live state is as it was."""
    state = {name: tensor * 0 for name, tensor in sharded(rank, world).items()}
    text, problems = "", []
    try:
        report = resilio.restore(url, {"n": state, "rng": False}, which)
        (passed,) = report.passed_over
        text, problems = str(passed), passed.facts["problems"]
    except ResilioError as error:
        text, problems = str(error), error.facts["problems"]
    told = [(one.where.rpartition("/")[2], one.facts.get("tensor"), one.facts.get("blocks")) for one in problems]
    return text, told, all(not tensor.to_local().any() for tensor in state.values())


def both(rank: int, world: int, url: str) -> tuple[Seen, Seen]:
    return look(rank, world, url, 2), look(rank, world, url, "newest")


def flip(folder: Path, rank: int, tensor: str, blocks: list[int]) -> None:
    part = json.loads((folder / f"manifest-{rank}.json").read_bytes())
    (piece,) = part["tensors"][f"n.{tensor}"]["pieces"]
    path = folder / f"__{rank}_0.distcp"
    data = bytearray(path.read_bytes())
    for block in blocks:
        data[piece["at"] + block * 65536] ^= 1
    path.unlink()
    path.write_bytes(data)


@pytest.mark.parametrize("world", [1, 2])
def test_all_bad_blocks_of_all_ranks_are_told_to_all_ranks_and_live_state_stays(tmp_path: Path, world: int):
    url = f"file://{tmp_path}"
    run_world(save_two, 2, url)
    folder = next(tmp_path.glob("step-000000002-*"))
    flip(folder, 0, "a", [0, 5])
    flip(folder, 0, "c", [11])
    flip(folder, 1, "b", list(range(12)))
    (folder / "__1_0.digests").unlink()
    (folder / "__1_0.digests").write_bytes(bytes(8 * 36))
    ranks = run_world(both, world, url)
    told, newest = [rank[0] for rank in ranks], [rank[1] for rank in ranks]
    assert len({(text, str(problems)) for text, problems, _ in told}) == 1
    text, problems, untouched = told[0]
    assert untouched and all(one[2] for one in told)
    assert problems == [("__0_0.distcp", "n.a", [0, 5]), ("__0_0.distcp", "n.c", [11]), ("__1_0.digests", None, None)]
    assert "3 problems" in text and "blocks 0, 5" in text and "__1_0.digests" in text
    found = verify_checkpoint(LocalStorage(str(tmp_path)), CheckpointRef(1, 2))
    seen = {(one.where.rpartition("/")[2], one.facts.get("tensor")) for one in found}
    assert {(where, tensor) for where, tensor, _ in problems} <= seen  # as `resilio verify` sees them
    assert newest[0][1] == problems and len({text for text, _, _ in newest}) == 1
    assert not newest[0][2]  # the older one is live


def test_a_manifest_that_names_no_metadata_is_damage_and_no_pass(tmp_path: Path):
    url, live = f"file://{tmp_path}", {"n": {"x": 1}}
    with CheckpointManager(url, live, mode="sync") as ckpt:
        ckpt.restore()
        ckpt.save(1)
        ckpt.save(2)
    path = next(tmp_path.glob("step-000000002-*/manifest.json"))
    root = json.loads(path.read_bytes()) | {"objects": []}
    data = json.dumps(root).encode()
    path.unlink()
    path.write_bytes(data)
    commit = next(tmp_path.glob("commits/000000002-*"))
    record = json.loads(commit.read_bytes())
    del record["check"]
    record |= {"manifest_size_bytes": len(data), "manifest_digest": digest_of(data)}
    commit.unlink()
    commit.write_bytes(seal(json.dumps(record).encode()))
    report = resilio.restore(url, live)
    assert report.step == 1 and "does not name" in str(report.passed_over[0])


def test_all_that_is_missing_and_every_part_that_cannot_be_read_is_told(tmp_path: Path):
    url = f"file://{tmp_path}"
    run_world(save_two, 2, url)
    folder = next(tmp_path.glob("step-000000002-*"))
    for name in ("__0_0.digests", "__1_0.distcp", ".metadata"):
        (folder / name).rename(folder / f"{name}.away")
    (one,) = run_world(look, 1, url, "newest")
    assert [place[0] for place in one[1]] == [".metadata", "__0_0.digests", "__1_0.distcp"]
    for name in ("__0_0.digests", ".metadata"):
        (folder / f"{name}.away").rename(folder / name)
    (folder / "manifest-0.json").unlink()
    with CheckpointManager(url, {"n": {"a": torch.zeros(1)}}) as ckpt, pytest.raises(IntegrityError) as caught:
        ckpt.restore(2)
    # Of the part that is there, what it names is looked for as well.
    assert [one.where.rpartition("/")[2] for one in caught.value.problems] == ["__1_0.distcp", "manifest-0.json"]
    assert discover(LocalStorage(str(tmp_path))).newest == CheckpointRef(1, 2)
