"""Partial restore and warm start as a user meets them: new names, a new head, another layout, plain DCP folders."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import get_model_state_dict, get_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from workload import assert_same, full, rng

import resilio
from resilio import CheckpointManager, RestoreReport
from resilio.errors import ConfigError, MismatchError
from resilio.testing.worlds import run_world

warnings.filterwarnings("ignore", category=FutureWarning, module=r"torch\.distributed")


class Body(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(4, 6), nn.Linear(6, 4)
        self.register_buffer("mask", torch.rand(4), persistent=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(self.up(x)) * self.mask


class Net(nn.Module):
    """The same network under two sets of names, with a head of any size."""

    def __init__(self, body: str, head: str, classes: int) -> None:
        super().__init__()
        self.names = body, head
        self.add_module(body, Body())
        self.add_module(head, nn.Linear(4, classes))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        body, head = (self.get_submodule(name) for name in self.names)
        return head(body(x))


def job(seed: int, body: str = "body", head: str = "head", classes: int = 3, layout: str = "") -> dict[str, Any]:
    torch.manual_seed(seed)
    model: nn.Module = Net(body, head, classes)
    if layout == "fsdp2":
        fully_shard(model, mesh=init_device_mesh("cpu", (torch.distributed.get_world_size(),)))
    if layout == "fsdp1":
        model = FullyShardedDataParallel(model, device_id=torch.device("cpu"), use_orig_params=True)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01 * (seed + 1))
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2)
    for _ in range(seed + 1):
        model(torch.ones(2, 4)).square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        scheduler.step()
    return {"model": model, "optimizer": optimizer, "scheduler": scheduler}


def held(state: dict[str, Any]) -> dict[str, Any]:
    """Tensors of the model and moments, in the order of its parameters, whatever they are called."""
    model, optimizer = state["model"], state["optimizer"]
    moments = [[full(value) for _, value in sorted(optimizer.state.get(p, {}).items())] for p in model.parameters()]
    buffers = [full(b) for b in model.buffers()]
    return {
        "p": [full(p) for p in model.parameters()],
        "b": buffers,
        "m": moments,
        "lr": optimizer.param_groups[0]["lr"],
    }


def save(url: str, state: dict[str, Any]) -> None:
    with CheckpointManager(url, state, mode="sync") as ckpt:
        ckpt.restore()
        ckpt.save(1)


@pytest.fixture
def url(tmp_path: Path) -> str:
    return f"file://{tmp_path}/run"


def old_to_new(key: str) -> str:
    return key.replace("model.body.", "model.trunk.").replace("model.head.", "model.out.")


RENAMES: list[Any] = [
    {"model.body": "model.trunk", "model.head": "model.out"},
    {"model.body.": "model.trunk.", "model.head.": "model.out."},
    old_to_new,
]


@pytest.mark.parametrize("rename", RENAMES, ids=["names", "dots", "function"])
def test_optimizer_and_hidden_buffers_follow_the_new_names_of_the_model(url: str, rename: Any) -> None:
    saved, live = job(0), job(1, "trunk", "out")
    save(url, saved)
    report = resilio.restore(url, live, rename=rename)
    assert_same(held(live), held(saved))
    assert report.renamed["model.body.up.weight"] == "model.trunk.up.weight"
    assert report.renamed["buffers_np.body.mask"] == "buffers_np.trunk.mask"
    assert report.renamed["optimizer.state.head.bias.exp_avg"] == "optimizer.state.out.bias.exp_avg"
    assert len(report.renamed) == 6 + 1 + 6 * 3
    assert (report.stayed, report.unused) == ((), ())


def test_only_and_exclude_are_in_the_names_of_the_live_side(url: str) -> None:
    saved, live = job(0), job(1, "trunk", "out")
    before = held(live)
    save(url, saved)
    rename = RENAMES[0]
    report = resilio.restore(url, live, rename=rename, only=["model.trunk.*", "optimizer.state.out.*"])
    now, want = held(live), held(saved)
    assert_same(now["p"], [*want["p"][:4], *before["p"][4:]])
    assert_same(now["m"], [*before["m"][:4], *want["m"][4:]])
    assert "model.out.weight" in report.stayed and "optimizer.state.trunk.up.bias.step" in report.stayed
    assert "model.head.weight" in report.unused and "optimizer.state.body.up.bias.step" in report.unused
    for wrong in ({"only": ["model.body.*"]}, {"exclude": ["optimizer.state.head.*"]}):
        with pytest.raises(ConfigError, match="matches nothing"):
            resilio.restore(url, live, rename=rename, **wrong)


@pytest.mark.parametrize(
    ("rename", "words"),
    [
        ({"model.body": "model.head"}, ()),  # nothing in the one is in the other
        ({"model.body.up": "model.head"}, ("model.body.up.weight", "model.head.weight")),
        (
            {"model.body.up": "model.x", "model.body.down": "model.x"},
            ("model.body.up.", "model.body.down.", "model.x."),
        ),
        (lambda key: "model.all", ("to 'model.all'",)),
        ({"model.boody": "model.trunk"}, ("'model.boody'", "matches nothing", "model")),
        ({"model.bod": "model.trunk"}, ("'model.bod'", "matches nothing")),  # no part of a name
        ({"model.body": "model.trunk", "modle": "m"}, ("'modle'",)),
    ],
)
def test_a_rename_that_cannot_be_meant_is_refused_by_name(url: str, rename: Any, words: tuple[str, ...]) -> None:
    saved, live = job(0), job(1)
    before = held(live)
    save(url, saved)
    with pytest.raises(ConfigError if words else MismatchError) as caught:
        resilio.restore(url, live, rename=rename)
    assert all(word in str(caught.value) for word in words), str(caught.value)
    assert_same(held(live), before)


def test_a_prefix_ends_where_a_name_ends(url: str) -> None:
    saved = {"model": nn.Sequential(*(nn.Linear(1, 1) for _ in range(11)))}
    save(url, saved)
    live = {"model": nn.ModuleDict({"one": nn.Linear(1, 1), **{str(i): nn.Linear(1, 1) for i in range(11) if i != 1}})}
    resilio.restore(url, live, rename={"model.1": "model.one"})
    assert_same(live["model"]["one"].weight.detach(), saved["model"][1].weight.detach())
    assert_same(live["model"]["10"].weight.detach(), saved["model"][10].weight.detach())


def test_one_part_can_take_the_place_of_another(url: str) -> None:
    """Averaged weights for evaluation: what was saved as the model has to go somewhere else."""
    saved = {"model": nn.Linear(2, 2), "ema": nn.Linear(2, 2)}
    save(url, saved)
    live = {"model": nn.Linear(2, 2)}
    with pytest.raises(ConfigError, match=r"maps both 'model\.weight' and 'ema\.weight'.*that nothing has"):
        resilio.restore(url, live, rename={"ema": "model"}, only=["model"])
    report = resilio.restore(url, live, rename={"ema": "model", "model": "raw"}, only=["model"])
    assert_same(live["model"].weight.detach(), saved["ema"].weight.detach())
    assert report.renamed == {"ema.weight": "model.weight", "ema.bias": "model.bias"}
    assert report.unused == ("model.weight", "model.bias")


# ------------------------------------------------------------------------------------------------------- fine-tuning


def pretrain(rank: int, world: int, url: str, layout: str) -> dict[str, Any]:
    state = job(0, layout=layout)
    save(f"{url}/run", state)
    model, optimizer = get_state_dict(state["model"], state["optimizer"])
    dcp.save({"model": model, "optimizer": optimizer}, checkpoint_id=f"{url}/plain".removeprefix("file://"))
    dcp.save(get_model_state_dict(state["model"]), checkpoint_id=f"{url}/bare".removeprefix("file://"))
    if layout == "fsdp1":
        with FullyShardedDataParallel.summon_full_params(state["model"]):
            return {"p": [p.detach().clone() for p in state["model"].parameters()]}
    return held(state)


def adopt(rank: int, world: int, url: str, **more: Any) -> tuple[Any, Any, RestoreReport]:
    tuned = job(1, classes=7, layout="fsdp2" if world > 1 else "")
    before, generators = held(tuned), rng()
    report = resilio.restore(url, tuned, only=["model"], exclude=["model.head"], **more)
    assert_same(rng(), generators)
    assert tuned["scheduler"].last_epoch == 2
    return before, held(tuned), report


@pytest.mark.parametrize("layout", ["fsdp1", "fsdp2"])
def test_a_model_under_a_new_head_starts_from_a_checkpoint_of_any_layout_all_else_fresh(
    tmp_path: Path, layout: str
) -> None:
    url = f"file://{tmp_path}"
    saved = run_world(pretrain, 2, url, layout)[0]
    for name, more in (("run", {}), ("plain", {}), ("bare", {"rename": {"": "model."}})):
        found = [adopt(0, 1, f"{url}/{name}", **more)]
        if name == "plain":
            found += run_world(adopt, 3, f"{url}/{name}")
        for before, now, report in found:
            assert_same(now["p"][:4], saved["p"][:4])
            assert_same(now["p"][4:], before["p"][4:])
            assert_same([now["m"], now["lr"]], [before["m"], before["lr"]])
            assert {"model.head.weight", "model.head.bias", "optimizer", "scheduler", "rng"} <= set(report.stayed)
            assert ("head.bias" if name == "bare" else "model.head.bias") in report.unused
    whole = job(1)
    resilio.restore(f"{url}/plain", {"model": whole["model"], "optimizer": whole["optimizer"]})
    assert_same(held(whole)["p"], saved["p"])
    if layout == "fsdp2":
        assert_same(held(whole)["m"], saved["m"])


def test_a_plain_folder_takes_new_names_and_parts_of_it(tmp_path: Path) -> None:
    saved = job(0)
    model, optimizer = get_state_dict(saved["model"], saved["optimizer"])
    dcp.save({"model": model, "optimizer": optimizer}, checkpoint_id=tmp_path, no_dist=True)
    live = job(1, "trunk", "out")
    before, want = held(live), held(saved)
    resilio.restore(
        f"file://{tmp_path}",
        {"model": live["model"], "optimizer": live["optimizer"]},
        rename=RENAMES[0],
        exclude=["model.out", "optimizer.state.trunk"],
    )
    now = held(live)
    assert_same(now["p"], [*want["p"][:4], *before["p"][4:]])
    assert_same(now["m"], [*before["m"][:4], *want["m"][4:]])
    with pytest.raises(ConfigError, match=r"'model\.boody'.*matches nothing"):
        resilio.restore(f"file://{tmp_path}", live, rename={"model.boody": "model.trunk"})


# ------------------------------------------------------------------------------------------------------------ report


def test_the_report_says_what_came_from_where_and_stays_short(url: str) -> None:
    save(url, {"model": nn.ModuleList(nn.Linear(1, 1) for _ in range(2000)), "notes": {"a": 1}})
    live = {
        "model": nn.ModuleDict({"blocks": nn.ModuleList(nn.Linear(1, 1) for _ in range(1500)), "new": nn.Linear(1, 1)})
    }
    report = resilio.restore(url, live, rename={"model": "model.blocks"}, only=["model"], strict=False)
    assert (len(report.renamed), len(report.stayed), len(report.unused)) == (3000, 3, 1001)
    text = str(report)
    assert "renamed: 3000 keys: model.0.weight -> model.blocks.0.weight, " in text and "and 2997 more" in text
    assert "stayed live: 3 keys: model.new.weight, model.new.bias, rng" in text
    assert "not used: 1001 keys: model.1500.weight, " in text and "and 998 more" in text
    assert len(text.splitlines()) < 10 and len(text) < 1000
    whole = resilio.restore(url, {"model": nn.ModuleList(nn.Linear(1, 1) for _ in range(2000)), "notes": {}})
    assert (dict(whole.renamed), whole.stayed, whole.unused) == ({}, (), ())
    assert not any(word in str(whole) for word in ("renamed", "stayed", "not used"))
