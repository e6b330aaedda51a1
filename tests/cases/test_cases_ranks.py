"""Public bug reports about ranks that disagree, or are other ranks than before. BR-22, 29, 30, 55, 63."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from cases.case_tools import save_first
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.distributed.tensor import DTensor, Shard, distribute_tensor
from torch.distributed.tensor.placement_types import _StridedShard
from workload import assert_same, build, full, snapshot

import resilio
from resilio import CheckpointManager, per_rank, replicated
from resilio.errors import MismatchError, RanksDisagreeError, ResilioError
from resilio.storage import LocalStorage
from resilio.testing.worlds import run_world

# --------------------------------------------------------------------- BR-22: more ranks than a parameter has elements


def thin(rank: int, world: int, seed: int) -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(3, 1), nn.LayerNorm(1), nn.Linear(1, 5))
    if world > 1:
        for layer in (*model, model):
            fully_shard(layer, mesh=init_device_mesh("cpu", (world,)))
    return model, torch.optim.AdamW(model.parameters(), lr=0.1)


def step_thin(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    model(torch.ones(2, 3)).square().sum().backward()
    optimizer.step()
    optimizer.zero_grad()
    return whole_thin(model, optimizer)


def whole_thin(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name, p in model.named_parameters():
        found |= {name: full(p)} | {f"{name}.{key}": full(value) for key, value in optimizer.state[p].items()}
    return found


def save_thin(rank: int, world: int, url: str) -> dict[str, Any]:
    model, optimizer = thin(rank, world, 0)
    saved = step_thin(model, optimizer)
    save_first(url, {"model": model, "optimizer": optimizer, "rng": False})
    twin = thin(rank, world, 1)
    assert_same(load_thin(rank, world, url, twin), saved)
    assert_same(step_thin(*twin), step_thin(model, optimizer))
    return saved


def load_thin(rank: int, world: int, url: str, twin: Any = None) -> dict[str, Any]:
    model, optimizer = twin or thin(rank, world, 1)
    resilio.restore(url, {"model": model, "optimizer": optimizer, "rng": False})
    return whole_thin(model, optimizer)


def test_br_22_ranks_without_any_element_save_and_restore_at_every_number_of_ranks(tmp_path: Any) -> None:
    url = f"file://{tmp_path}"
    want, *others = run_world(save_thin, 4, url)  # three of them without a row of the first layer
    for again in (*others, *run_world(load_thin, 2, url), load_thin(0, 1, url)):
        assert_same(again, want)


def thin_fsdp1(seed: int) -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(seed)
    layers = nn.Sequential(nn.Linear(3, 1), nn.LayerNorm(1), nn.Linear(1, 5))
    model = FullyShardedDataParallel(layers, use_orig_params=True, device_id=torch.device("cpu"))
    return model, torch.optim.AdamW(model.parameters(), lr=0.1)


def step_fsdp1(model: nn.Module, optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    model(torch.ones(2, 3)).square().sum().backward()
    optimizer.step()
    optimizer.zero_grad()
    with FullyShardedDataParallel.summon_full_params(model):
        return [p.detach().clone() for p in model.parameters()]


def save_fsdp1(rank: int, world: int, url: str) -> list[torch.Tensor]:
    model, optimizer = thin_fsdp1(0)
    saved = step_fsdp1(model, optimizer)
    save_first(url, {"model": model, "optimizer": optimizer, "rng": False})
    twin = thin_fsdp1(1)
    resilio.restore(url, {"model": twin[0], "optimizer": twin[1], "rng": False})
    assert_same(step_fsdp1(*twin), step_fsdp1(model, optimizer))
    return saved


def test_br_22_ranks_without_any_element_under_fsdp1_go_on_exactly(tmp_path: Any) -> None:
    url = f"file://{tmp_path}"
    want, *_ = run_world(save_fsdp1, 4, url)
    model, optimizer = thin(0, 1, 1)
    resilio.restore(url, {"model": model, "optimizer": optimizer, "rng": False})
    assert_same([p.detach() for p in model.parameters()], want)


# ------------------------------------------------------------ BR-29: a sub-group whose first rank is not global rank 0


def save_on_a_part(rank: int, world: int, url: str) -> tuple[str, str]:
    mesh = DeviceMesh("cpu", [1, 2])
    weight = distribute_tensor(torch.arange(10.0), mesh, [Shard(0)])  # rank 0 has nothing of it, and commits it
    state: dict[str, Any] = {"weight": weight, "rng": False}
    with CheckpointManager(url, state, mode="async", timeout_s=30) as ckpt:
        ckpt.restore()
        ckpt.save(1).result(30)
        want = weight.to_local().clone()
        weight.to_local().zero_()
        ckpt.restore()
        assert_same(weight.to_local(), want)
    # A model that rank 0 does not have is refused at once, on all: there is no manager of two ranks out of three.
    part: dict[str, Any] = {"rng": False, "n": {"x": 1}}
    if rank:
        part["model"] = nn.Linear(4, 6)
        fully_shard(part["model"], mesh=mesh)
    with CheckpointManager(f"{url}/part", part, mode="sync", timeout_s=30) as ckpt:
        ckpt.restore()
        with pytest.raises(RanksDisagreeError) as caught:
            ckpt.save(1)
        steps = [info.step for info in ckpt.checkpoints()]
    return str(caught.value), str(steps)


def test_br_29_tensors_of_a_group_without_rank_0_come_back_and_a_state_rank_0_lacks_is_refused(tmp_path: Any) -> None:
    url = f"file://{tmp_path}"
    told = run_world(save_on_a_part, 3, url)
    assert told[0] == told[1] == told[2]
    assert "model." in told[0][0] and "missing on rank 0" in told[0][0]
    assert told[0][1] == "[]"
    alone = torch.zeros(10)
    resilio.restore(url, {"weight": alone, "rng": False})
    assert alone.tolist() == list(range(10))


# ------------------------------------------------------------------ BR-30: ranks that see different newest checkpoints


class Stale(LocalStorage):
    """A store of which this rank does not see yet what was written last, as behind a cache."""

    def list(self, prefix: str) -> Any:
        return (info for info in super().list(prefix) if "000000200" not in info.key)


def two_steps(url: str) -> None:
    job = {"weight": torch.zeros(7), "step_seen": {"n": 0}}
    with CheckpointManager(url, job, mode="sync") as ckpt:
        ckpt.restore()
        for step in (100, 200):
            job["weight"].fill_(step)
            job["step_seen"]["n"] = step
            ckpt.save(step)


def restore_stale(rank: int, world: int, root: str, stale_rank: int) -> tuple[int, list[float], int]:
    storage = Stale(root) if rank == stale_rank else LocalStorage(root)
    mesh = init_device_mesh("cpu", (world,))
    seen = {"n": 0}
    state = {"weight": distribute_tensor(torch.zeros(7), mesh, [Shard(0)]), "step_seen": seen}
    with CheckpointManager(storage, state) as ckpt:
        report = ckpt.restore(exclude=["rng"])
    return report.step, state["weight"].full_tensor().tolist(), seen["n"]


@pytest.mark.parametrize(("world", "stale_rank"), [(1, 0), (2, 0), (2, 1)])
def test_br_30_all_ranks_resume_from_the_one_checkpoint_that_rank_0_chose(
    tmp_path: Any, world: int, stale_rank: int
) -> None:
    two_steps(f"file://{tmp_path}")
    want = 100 if stale_rank == 0 else 200
    for step, weight, seen in run_world(restore_stale, world, str(tmp_path), stale_rank):
        assert (step, weight, seen) == (want, [want] * 7, want)


# --------------------------------------------------------------------------------- BR-55: fewer ranks, then more again


def elastic(rank: int, world: int, url: str) -> tuple[int, dict[str, Any] | None, dict[str, Any]]:
    job = build("fsdp2", rank, world, seed=world)
    state = {**job.state(), "dataloader": replicated(job.loader), "seen_world": (note := {"world": 0})}
    with CheckpointManager(url, state, mode="sync") as ckpt:
        found = ckpt.restore().found
        before = snapshot(job) if found else None
        assert note["world"] == (found.world if found else 0)
        job.train_step()
        note["world"] = world
        ckpt.save(ckpt.next_step)
    return found.step if found else 0, before, snapshot(job)


def test_br_55_ranks_that_come_back_resume_from_what_the_others_saved_without_them(tmp_path: Any) -> None:
    last = None
    for number, world in enumerate((4, 2, 4)):
        results = run_world(elastic, world, f"file://{tmp_path}")
        for step, before, _ in results:
            assert step == number
            assert number == 0 or assert_same(before, last) is None
        last = results[0][2]


# ------------------------------------------------------------------------ BR-63: gate and up, interleaved by the ranks

GATE_UP = torch.arange(24.0).view(12, 2)  # rows 0 to 5 are the gate, 6 to 11 the up projection


def fused(rank: int, world: int) -> torch.Tensor:
    """What a rank of a gated MLP holds: its rows of the gate, and under them its rows of the up projection."""
    gate, up = GATE_UP.chunk(2)
    return torch.cat([gate.chunk(world)[rank], up.chunk(world)[rank]])


def join(states: list[torch.Tensor], rank: int, world: int) -> torch.Tensor:
    """The rule for another number of ranks: whole gate and whole up first, then cut anew."""
    gates, ups = zip(*(state.chunk(2) for state in states), strict=True)
    return torch.cat([torch.cat(gates).chunk(world)[rank], torch.cat(ups).chunk(world)[rank]])


def save_fused(rank: int, world: int, url: str) -> list[str]:
    mesh = init_device_mesh("cpu", (world,))
    gate, up = GATE_UP.chunk(2)
    apart = {"gate": distribute_tensor(gate, mesh, [Shard(0)]), "up": distribute_tensor(up, mesh, [Shard(0)])}
    save_first(f"{url}/apart", {"mlp": apart, "rng": False})
    save_first(f"{url}/rule", {"mlp": per_rank({"fused": fused(rank, world)}), "rng": False})
    # The placement that tells the truth about the interleaving has two pieces on each rank: DCP would take it for one.
    placements = [_StridedShard(0, split_factor=2)]
    shape, stride = GATE_UP.shape, GATE_UP.stride()
    strided = DTensor.from_local(fused(rank, world), mesh, placements, run_check=False, shape=shape, stride=stride)
    with pytest.raises(ResilioError, match="fused") as caught:
        save_first(f"{url}/strided", {"fused": strided, "rng": False})
    return [str(caught.value)]


def load_fused(rank: int, world: int, url: str) -> tuple[torch.Tensor, torch.Tensor]:
    mesh = init_device_mesh("cpu", (world,))
    apart = {name: distribute_tensor(torch.zeros(6, 2), mesh, [Shard(0)]) for name in ("gate", "up")}
    resilio.restore(f"{url}/apart", {"mlp": apart, "rng": False})
    mlp = {"fused": torch.zeros(12 // world, 2)}
    with pytest.raises(MismatchError, match=r"mlp.*2 ranks.*on_resize"):
        resilio.restore(f"{url}/rule", {"mlp": per_rank(mlp), "rng": False})
    resilio.restore(f"{url}/rule", {"mlp": per_rank(mlp, on_resize=resize_fused), "rng": False})
    whole = torch.cat([apart["gate"].full_tensor(), apart["up"].full_tensor()])
    return whole, mlp["fused"]


def resize_fused(states: list[dict[str, torch.Tensor]], rank: int, world: int) -> dict[str, torch.Tensor]:
    return {"fused": join([state["fused"] for state in states], rank, world)}


def test_br_63_interleaved_weights_come_back_in_order_or_are_refused_never_in_another_order(tmp_path: Any) -> None:
    url = f"file://{tmp_path}"
    first, second = run_world(save_fused, 2, url)
    assert first == second
    assert not list((tmp_path / "strided").glob("commits/*"))
    for world in (1, 3):
        for rank, (whole, own) in enumerate(run_world(load_fused, world, url)):
            assert_same(whole, GATE_UP)
            assert_same(own, fused(rank, world))
