"""FSDP1 in its kinds: a save changes nothing, a restore is all or nothing, training goes on exactly; refusals."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint import FileSystemReader
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, MixedPrecision, ShardingStrategy
from torch.distributed.fsdp.wrap import ModuleWrapPolicy
from workload import assert_same

import resilio
from resilio import CheckpointManager
from resilio.errors import CaptureError, MismatchError, ResilioError, RestoreError
from resilio.testing.worlds import run_world

warnings.filterwarnings("ignore", category=FutureWarning, module=r"torch\.distributed")

CPU = torch.device("cpu")
LOW = MixedPrecision(param_dtype=torch.bfloat16, reduce_dtype=torch.float32, buffer_dtype=torch.bfloat16)


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(5, 7), nn.Linear(7, 5, bias=False)
        self.register_buffer("scale", torch.full((5,), 1.1))
        self.register_buffer("hidden", torch.full((5,), 0.3), persistent=False)
        self.seen = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.relu(self.up(x))) * self.scale + self.hidden

    def get_extra_state(self) -> Any:
        return {"seen": self.seen}

    def set_extra_state(self, state: Any) -> None:
        if state["seen"] == "broken":
            raise ValueError("this block is broken")
        self.seen = state["seen"]


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.emb, self.blocks, self.gain = nn.Embedding(11, 5), nn.ModuleList([Block(), Block()]), nn.Linear(5, 5)
        self.head = nn.Linear(5, 11, bias=False)
        self.head.weight = self.emb.weight

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.emb(ids)
        for block in self.blocks:
            x = block(x)
        return self.head(self.gain(x))


Job = tuple[nn.Module, torch.optim.Optimizer]


def build(kind: str, seed: int) -> Job:
    torch.manual_seed(seed)
    net = Net()
    for block in net.blocks:
        block.seen, block.scale = seed, block.scale + seed  # type: ignore[assignment, operator]
    if kind == "plain":
        return net, torch.optim.AdamW(net.parameters(), lr=0.01 * (seed + 1))
    how: dict[str, Any] = {
        "mixed": {"mixed_precision": LOW},
        "ignored": {"ignored_states": [net.gain.weight]},
        "grad_op": {"sharding_strategy": ShardingStrategy.SHARD_GRAD_OP},
        "flat": {"use_orig_params": False},
    }.get(kind, {})
    if kind == "hybrid":
        how = {
            "sharding_strategy": ShardingStrategy.HYBRID_SHARD,
            "device_mesh": init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard")),
        }
    if kind == "frozen":
        net.emb.weight.requires_grad_(False)
    model: nn.Module = FullyShardedDataParallel(
        net, device_id=CPU, auto_wrap_policy=ModuleWrapPolicy({Block}), **{"use_orig_params": True, **how}
    )
    if kind in ("compile", "inductor"):
        model = torch.compile(model, backend="eager" if kind == "compile" else "inductor")
    optimizer: torch.optim.Optimizer = torch.optim.AdamW(model.parameters(), lr=0.01 * (seed + 1))
    if kind == "momentum":
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    if kind == "adagrad":
        optimizer = torch.optim.Adagrad(model.parameters(), lr=0.1)
    return model, optimizer


def loss_of(model: nn.Module) -> torch.Tensor:
    ids = torch.arange(11)
    return nn.functional.cross_entropy(model(ids).float(), (ids + 1) % 11)


def train(model: nn.Module, optimizer: torch.optim.Optimizer, steps: int = 2) -> None:
    for _ in range(steps):
        loss_of(model).backward()
        optimizer.step()
        optimizer.zero_grad()


def parts(job: Job, **more: Any) -> dict[str, Any]:
    return {"model": job[0], "optimizer": job[1], "rng": False, **more}


def held(job: Job) -> dict[str, Any]:
    """Everything this rank holds, as it lies: parameters, buffers, gradients, state, groups."""
    model, optimizer = job
    found: dict[str, Any] = {f"p.{name}": p.detach().clone() for name, p in model.named_parameters()}
    found |= {f"b.{name}": b.clone() for name, b in model.named_buffers()}
    found |= {f"g.{name}": p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    found |= {f"x.{i}": part.seen for i, part in enumerate(model.modules()) if isinstance(part, Block)}
    for i, p in enumerate(one for group in optimizer.param_groups for one in group["params"]):
        entries = optimizer.state.get(p, {}) if p.numel() else {}  # of nothing, Adagrad counts no steps
        found |= {f"s.{i}.{k}": v.clone() if v is not None else None for k, v in entries.items()}
    found["groups"] = [{k: v for k, v in group.items() if k != "params"} for group in optimizer.param_groups]
    return found


def goes_on(rank: int, world: int, url: str, kind: str) -> None:
    stopped = build(kind, 0)
    if kind != "fresh":
        train(*stopped)
    with CheckpointManager(url, parts(stopped), mode="async") as ckpt:
        ckpt.restore()
        handle = ckpt.save(1)
        train(*stopped)  # while it is being written
        handle.result()
    resumed = build(kind, 1)
    if kind in ("mixed", "grad_op"):
        train(*resumed, steps=1)  # low buffers, and memory that a forward has gathered
        with torch.set_grad_enabled(kind == "grad_op"):
            loss_of(resumed[0])
    resilio.restore(url, parts(resumed))
    train(*resumed)
    assert_same(held(resumed), held(stopped))
    if kind == "adagrad":
        plain = build("plain", 1)
        plain = plain[0], torch.optim.Adagrad(plain[0].parameters(), lr=0.1)
        resilio.restore(url, parts(plain))
        assert {int(entries["step"]) for entries in plain[1].state.values()} == {2}


def all_go_on(rank: int, world: int, url: str, kinds: list[str]) -> None:
    for kind in kinds:
        try:
            goes_on(rank, world, f"{url}/{kind}", kind)
        except Exception as error:
            raise AssertionError(kind) from error


@pytest.mark.parametrize(
    "kinds",
    [
        ["mixed", "flat", "adagrad"],
        pytest.param(["frozen", "ignored", "grad_op", "momentum", "fresh", "compile"], marks=pytest.mark.full),
    ],
    ids=["cut", "rest"],
)
def test_training_goes_on_bit_for_bit(tmp_path: Path, kinds: list[str]) -> None:
    run_world(all_go_on, 2, f"file://{tmp_path}", kinds)


@pytest.mark.full
@pytest.mark.parametrize(("kind", "world"), [("hybrid", 4), ("inductor", 2)])
def test_training_goes_on_bit_for_bit_too(tmp_path: Path, kind: str, world: int) -> None:
    run_world(goes_on, world, f"file://{tmp_path}", kind)


def pure(rank: int, world: int, url: str) -> None:
    for kind in ("orig", "flat", "grad_op", "mixed"):
        job = build(kind, 0)
        train(*job)
        loss_of(job[0]).backward()  # gradients are there
        with torch.no_grad():
            loss_of(job[0])  # the root stays gathered
        before, kinds = held(job), FullyShardedDataParallel.get_state_dict_type(job[0])
        hooks = [[*m._state_dict_hooks, *m._load_state_dict_post_hooks] for m in job[0].modules()]
        with CheckpointManager(f"{url}/{kind}", parts(job), mode="sync") as ckpt:
            ckpt.restore()
            ckpt.save(1)
        assert_same(held(job), before)
        assert FullyShardedDataParallel.get_state_dict_type(job[0]) == kinds
        assert [[*m._state_dict_hooks, *m._load_state_dict_post_hooks] for m in job[0].modules()] == hooks


def test_a_save_changes_nothing(tmp_path: Path) -> None:
    run_world(pure, 2, f"file://{tmp_path}")


def low_buffers(rank: int, world: int, url: str) -> str:
    job, plain = build("mixed", 0), build("plain", 3)
    train(*job)
    for name, one in (("mixed", job), ("plain", plain)):
        with CheckpointManager(f"{url}/{name}", parts(one), mode="sync") as ckpt:
            ckpt.restore()
            ckpt.save(1)
    names = ("scale", "hidden")
    low = [getattr(job[0].module.blocks[0].module, name) for name in names]  # type: ignore[union-attr, index]
    for twin in (build("plain", 1), build("mixed", 1)):  # before the first forward FSDP1 keeps them as they are
        resilio.restore(f"{url}/mixed", parts(twin))
        block = getattr(twin[0], "module", twin[0]).blocks[0]
        found = [getattr(getattr(block, "module", block), name) for name in names]
        assert [one.dtype for one in (*low, *found)] == [torch.bfloat16] * 2 + [torch.float32] * 2
        assert_same([one.bfloat16() for one in found], low)
    before = held(job)
    with pytest.raises(MismatchError) as caught:
        resilio.restore(f"{url}/plain", parts(job))
    assert_same(held(job), before)
    return str(caught.value)


def test_buffers_of_fewer_bits_are_saved_as_built_and_refuse_values_they_cannot_hold(tmp_path: Path) -> None:
    first, *_ = run_world(low_buffers, 2, f"file://{tmp_path}")
    assert "scale" in first and "before the first forward" in first


def save_two(rank: int, world: int, url: str) -> None:
    job = build("orig", 0)
    train(*job)
    with CheckpointManager(f"{url}/fsdp1", parts(job), mode="sync") as ckpt:
        ckpt.restore()
        ckpt.save(1)
    twin = build("plain", 1)
    resilio.restore(f"{url}/fsdp1", parts(twin))
    with CheckpointManager(f"{url}/plain", parts(twin), mode="sync") as ckpt:
        ckpt.restore()
        ckpt.save(1)


def test_the_checkpoint_is_that_of_a_plain_job_and_plain_dcp_reads_it(tmp_path: Path) -> None:
    run_world(save_two, 3, f"file://{tmp_path}")
    content = []
    for name in ("fsdp1", "plain"):
        (folder,) = (tmp_path / name).glob("step-*")
        entries = FileSystemReader(folder).read_metadata().state_dict_metadata
        state = {
            k: torch.zeros(e.size, dtype=e.properties.dtype) if hasattr(e, "size") else None for k, e in entries.items()
        }
        dcp.load(state, checkpoint_id=folder, no_dist=True)
        content.append({key: state[key] for key in sorted(state)})
    assert any(key.endswith("exp_avg_sq") for key in content[0])
    assert "_fsdp_wrapped" not in " ".join(content[0])
    assert_same(*content)


# --------------------------------------------------------------------------------------------------- what goes wrong


class Scheduler:
    """Whose first load fails, after the model's own."""

    def __init__(self) -> None:
        self.loads = 0

    def state_dict(self) -> dict[str, int]:
        return {"n": 1}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.loads += 1
        if self.loads == 1:
            raise ValueError("no")


def fail_late(rank: int, world: int, url: str) -> None:
    for kind in ("orig", "flat"):
        job = build(kind, 0)
        train(*job)
        with CheckpointManager(f"{url}/{kind}", parts(job, scheduler=Scheduler()), mode="sync") as ckpt:
            ckpt.restore()
            ckpt.save(1)
            other = build(kind, 1)
            train(*other)
            before = held(other)
            with pytest.raises(RestoreError, match="everything is as it was"):
                resilio.restore(f"{url}/{kind}", parts(other, scheduler=Scheduler()))
            assert_same(held(other), before)


def test_a_restore_that_fails_late_leaves_all_as_it_was(tmp_path: Path) -> None:
    run_world(fail_late, 2, f"file://{tmp_path}")


class Breaking(Block):
    broken = False

    def get_extra_state(self) -> Any:
        if self.broken:
            raise ValueError("this rank has no extra state")
        return super().get_extra_state()


def fail_on_one(rank: int, world: int, url: str) -> str:
    model = FullyShardedDataParallel(Breaking(), device_id=CPU, use_orig_params=True)
    job = model, torch.optim.AdamW(model.parameters())
    model(torch.ones(2, 5)).sum().backward()
    job[1].step()
    with CheckpointManager(url, parts(job), mode="sync", timeout_s=60) as ckpt:
        ckpt.restore()
        model.module.broken = rank == 1
        with pytest.raises(CaptureError) as caught:
            ckpt.save(1)
        model.module.broken = False
        ckpt.save(1)
        assert [info.step for info in ckpt.checkpoints()] == [1]
    return str(caught.value)


def test_a_rank_whose_state_cannot_be_taken_fails_the_save_on_all_and_the_next_one_works(tmp_path: Path) -> None:
    first, *others = run_world(fail_on_one, 3, f"file://{tmp_path}")
    assert "rank 1" in first and "this rank has no extra state" in first
    assert others == [first, first]


def hooked(job: Job) -> None:
    job[0].module.gain.register_state_dict_post_hook(lambda module, state, prefix, metadata: None)


def replaced(job: Job) -> None:
    job[0].module.gain.weight.data = job[0].module.gain.weight.data + 1
    job[0].module.gain.bias.data = job[0].module.gain.bias.data + 1


def odd_state(job: Job) -> None:
    for p in job[1].state:
        job[1].state[p]["odd"] = torch.zeros(3, 2)


class Own(torch.optim.AdamW):
    def state_dict(self) -> dict[str, Any]:
        return super().state_dict()


def refused(rank: int, world: int, url: str) -> dict[str, str]:
    told = {}
    for spoil in (hooked, replaced, odd_state, None):
        job = build("orig", 0)
        train(*job)
        if spoil is None:
            job = job[0], Own(job[0].parameters())
        else:
            spoil(job)
        with CheckpointManager(f"{url}/x", parts(job), mode="sync") as ckpt:
            ckpt.restore()
            with pytest.raises(ResilioError) as caught:
                ckpt.save(1)
        told[getattr(spoil, "__name__", "own")] = f"{type(caught.value).__name__}: {caught.value}"
    return told


def test_what_has_no_exact_form_is_refused_by_name_and_nothing_is_written(tmp_path: Path) -> None:
    first, second = run_world(refused, 2, f"file://{tmp_path}")
    assert first == second
    for kind, words in {
        "hooked": ("model.gain", "hooked.<locals>.<lambda>"),
        "replaced": ("model.gain.", "copy_()"),
        "odd_state": ("optimizer.state.", "odd", "[3, 2]"),
        "own": ("optimizer", "Own"),
    }.items():
        assert first[kind].startswith("CaptureError"), first[kind]
        assert all(word in first[kind] for word in words), first[kind]
    assert not list(tmp_path.rglob("commits/*"))


def into_flat(rank: int, world: int, url: str) -> str:
    plain = build("plain", 0)
    for p in plain[0].gain.parameters():
        p.requires_grad_(False)  # never stepped
    train(*plain)
    for p in plain[0].gain.parameters():
        p.requires_grad_(True)
    with CheckpointManager(url, parts(plain), mode="sync") as ckpt:
        ckpt.restore()
        ckpt.save(1)
    flat = build("flat", 1)
    train(*flat)
    before = held(flat)
    with pytest.raises(MismatchError) as caught:
        resilio.restore(url, parts(flat))
    assert_same(held(flat), before)
    orig = build("orig", 1)
    train(*orig)
    resilio.restore(url, parts(orig))
    names = {p: name for name, p in orig[0].named_parameters()}
    assert not [names[p] for p in orig[1].state if "gain" in names[p]]
    return str(caught.value)


def test_states_that_a_flat_parameter_cannot_have_together_are_refused_by_name(tmp_path: Path) -> None:
    told = run_world(into_flat, 2, f"file://{tmp_path}")
    assert "gain.weight" in told[0] and "use_orig_params=True" in told[0]
