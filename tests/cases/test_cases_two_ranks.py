"""Public bug reports about damage and choice, at two ranks of one world: BR-33, 38, 53, 59, 62. At one: elsewhere."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

import resilio
from resilio import CheckpointManager
from resilio.errors import ResilioError
from resilio.testing.worlds import run_world

Facts = dict[str, Any]
LACKS = ("commit", ".metadata", "manifest.json", "manifest-1.json", "__1_0.distcp")


class Live:
    """Two sharded tensors and a value that all ranks share, filled with one number."""

    def __init__(self, rank: int, world: int, value: float) -> None:
        mesh = init_device_mesh("cpu", (world,))
        self.a, self.z = (distribute_tensor(torch.zeros(60_000), mesh, [Shard(0)]) for _ in range(2))
        self.n: dict[str, float] = {}
        self.fill(value)

    def fill(self, value: float) -> None:
        self.a.to_local().fill_(value)
        self.z.to_local().fill_(value)
        self.n["x"] = value

    def holds(self) -> list[float]:
        return sorted({*self.a.to_local().tolist(), *self.z.to_local().tolist(), self.n["x"]})

    def state(self, rng: bool = False) -> dict[str, Any]:
        return {"a": self.a, "z": self.z, "n": self.n, "rng": rng}


def saved(rank: int, world: int, root: Path, steps: tuple[int, ...] = (1, 2), *, rng: bool = False) -> str:
    live = Live(rank, world, 0.0)
    with CheckpointManager(f"file://{root}", live.state(rng), mode="sync") as ckpt:
        ckpt.restore()
        for step in steps:
            live.fill(step)
            ckpt.save(step)
    return f"file://{root}"


def on_rank_0(rank: int, change: Callable[[], Any]) -> None:
    dist.barrier()
    if rank == 0:
        change()
    dist.barrier()


def flip(root: Path, step: int, rank: int, tensor: str) -> None:
    folder = next(root.glob(f"step-{step:09d}-*"))
    (piece,) = json.loads((folder / f"manifest-{rank}.json").read_bytes())["tensors"][tensor]["pieces"]
    path = folder / f"__{rank}_0.distcp"
    data = bytearray(path.read_bytes())
    data[piece["at"] + 1000] ^= 4
    path.unlink()
    path.write_bytes(data)


def error_of(restore: Callable[[], Any]) -> str:
    try:
        return f"no error: {restore()!r}"
    except ResilioError as error:
        return f"{type(error).__name__}: {error}"


def br_53_and_62(rank: int, world: int, root: Path) -> Facts:
    url = saved(rank, world, root, rng=True)
    on_rank_0(rank, lambda: flip(root, 2, 1, "z"))  # the second tensor, of rank 1's alone
    live = Live(rank, world, -1.0)
    torch.manual_seed(3 + rank)
    random.seed(3 + rank)
    draws = torch.get_rng_state(), random.getstate()
    with CheckpointManager(url, live.state(rng=True)) as ckpt:
        asked = error_of(lambda: ckpt.restore(2)), error_of(lambda: resilio.restore(url, live.state(rng=True), 2))
    untouched = (
        live.holds() == [-1.0] and torch.equal(torch.get_rng_state(), draws[0]) and random.getstate() == draws[1]
    )
    report = resilio.restore(url, live.state(rng=True))
    return {"asked": asked, "untouched": untouched, "took": report.step, "holds": live.holds(), "said": str(report)}


def br_33(rank: int, world: int, root: Path) -> Facts:
    facts: Facts = {}
    for lacks in LACKS:
        run = root / lacks.strip(".")
        url = saved(rank, world, run, (100, 200))
        where = "commits/000000200-*" if lacks == "commit" else f"step-000000200-*/{lacks}"
        on_rank_0(rank, lambda run=run, where=where: next(run.glob(where)).unlink())
        live = Live(rank, world, -1.0)
        with CheckpointManager(url, live.state(), mode="sync") as ckpt:
            report = ckpt.restore()
            facts[lacks] = (report.step, live.holds(), str(report), ckpt.next_step)
            ckpt.save(300)
        facts[lacks] += (resilio.restore(url, live.state()).step,)
    return facts


def br_59(rank: int, world: int, root: Path) -> Facts:
    url = saved(rank, world, root, (1, 2, 3))
    facts: Facts = {}
    live = Live(rank, world, -1.0)
    for step in (1, 3, 2):
        facts[f"step {step}"] = resilio.restore(url, live.state(), step).step, live.holds()
    on_rank_0(rank, lambda: flip(root, 1, rank, "a"))
    facts["damaged"] = error_of(lambda: resilio.restore(url, live.state(), 1)), live.holds()
    return facts


def br_38(rank: int, world: int, root: Path) -> Facts:
    def draw() -> list[float]:
        return [random.gauss(0, 1), float(np.random.randn()), *torch.randn(3).tolist()]

    for seed in (random.seed, np.random.seed, torch.manual_seed):
        seed(10 + rank)
    draw()  # half of a pair is held back
    live = Live(rank, world, 1.0)
    with CheckpointManager(f"file://{root}", live.state(rng=True), mode="sync") as ckpt:
        ckpt.restore()
        ckpt.save(1)
        want = draw()
        ckpt.restore()
        same = draw() == want

        def refuse(state: Any) -> None:
            raise ValueError("not a state of this version")

        if rank == 1:
            with mock.patch("random.setstate", refuse):
                broken = error_of(ckpt.restore)
        else:
            broken = error_of(ckpt.restore)
        save = error_of(lambda: ckpt.save(2))
    return {"want": want, "same": same, "broken": broken, "save": save}


def all_of_them(rank: int, world: int, root: str) -> dict[str, Facts]:
    cases = (br_53_and_62, br_33, br_59, br_38)
    return {case.__name__: case(rank, world, Path(root) / case.__name__) for case in cases}


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Facts]]:
    """What the two ranks of one world saw of all cases."""
    return run_world(all_of_them, 2, str(tmp_path_factory.mktemp("cases")))


def test_br_53_damage_of_one_rank_s_piece_is_found_named_and_passed_over_on_both(ranks: list[dict[str, Facts]]) -> None:
    one, other = (rank["br_53_and_62"] for rank in ranks)
    assert one["asked"] == other["asked"]
    assert all("IntegrityError" in said and "'z'" in said and "__1_0.distcp" in said for said in one["asked"])
    for facts in (one, other):
        assert (facts["took"], facts["holds"]) == (1, [1.0])
        assert "passed over step 2" in facts["said"] and "__1_0.distcp" in facts["said"]


def test_br_62_a_restore_that_fails_at_one_rank_s_second_tensor_changes_nothing_on_either(
    ranks: list[dict[str, Facts]],
) -> None:
    assert [rank["br_53_and_62"]["untouched"] for rank in ranks] == [True, True]


@pytest.mark.parametrize("lacks", LACKS)
def test_br_33_an_incomplete_newest_gives_way_to_the_complete_one_on_both(
    ranks: list[dict[str, Facts]], lacks: str
) -> None:
    for rank in ranks:
        step, holds, said, following, after = rank["br_33"][lacks]
        assert (step, holds, following, after) == (100, [100], 101, 300)
        assert "200" in said and lacks in said


def test_br_59_the_step_asked_for_is_the_one_that_both_get_or_an_error(ranks: list[dict[str, Facts]]) -> None:
    for rank in ranks:
        facts = rank["br_59"]
        assert [facts[f"step {step}"] for step in (1, 3, 2)] == [(1, [1]), (3, [3]), (2, [2])]
        said, holds = facts["damaged"]
        assert said == ranks[0]["br_59"]["damaged"][0] and said.startswith("IntegrityError") and holds == [2]


def test_br_38_each_rank_s_generators_come_back_and_one_that_does_not_fails_the_restore_on_both(
    ranks: list[dict[str, Facts]],
) -> None:
    one, other = (rank["br_38"] for rank in ranks)
    assert one["same"] and other["same"] and one["want"] != other["want"]
    for facts in (one, other):
        assert "not a state of this version" in facts["broken"] and "no error" not in facts["broken"]
        assert "no error" not in facts["save"]  # nor is what came of it saved
