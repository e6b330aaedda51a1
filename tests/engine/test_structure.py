"""A rank's plan: what of it is used again in the next save, and who writes what all ranks have."""

from __future__ import annotations

import json
from collections import OrderedDict
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from resilio import CheckpointManager, TrainingState, keep_all
from resilio.engine.plan import LocalPlan
from resilio.state.flat import FlatState
from resilio.testing.worlds import run_world


def capture(**changes: Any) -> FlatState:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.Linear(5, 5))
    optimizer = torch.optim.AdamW(model[0].parameters())
    state: dict[str, Any] = {"model": model, "optimizer": optimizer, "table": {"a": [1, 2], "b": (1, torch.zeros(3))}}
    return TrainingState(rng=False, **{**state, **changes}).capture(1)


def as_seen(plan: LocalPlan) -> Any:
    """All that a save makes of it."""
    items = [(item.index, item.type, item.tensor_data) for item in plan.items]
    return items, plan.specs, plan.evidence, plan.values, json.dumps(plan.tree), plan.ties, plan.paths, plan.structure


def test_a_plan_of_equal_structure_is_used_again_and_its_values_are_new() -> None:
    first = LocalPlan.of(capture(), 0)
    flat = capture(table={"a": [7, 8], "b": (9, torch.ones(3))})
    again = LocalPlan.of(flat, 0, first)
    assert again.structure is first.structure
    anew = LocalPlan.of(flat, 0)
    assert as_seen(again)[:-1] == as_seen(anew)[:-1]
    assert again.values != first.values
    assert again.evidence.values != first.evidence.values


def test_buffers_are_looked_at_anew_each_time() -> None:
    first = LocalPlan.of(capture(), 0)
    flat = capture()
    flat.tensors["model.1.running_mean"].fill_(5)
    again = LocalPlan.of(flat, 0, first)
    assert again.structure is first.structure
    assert again.evidence.buffers != first.evidence.buffers


def other_order(flat: FlatState) -> None:
    flat.tensors["model.0.weight"] = flat.tensors["model.0.weight"].to(memory_format=torch.channels_last)


def other_dtype(flat: FlatState) -> None:
    flat.tensors["model.2.bias"] = flat.tensors["model.2.bias"].to(torch.bfloat16)


def other_shape(flat: FlatState) -> None:
    flat.tensors["model.2.bias"] = torch.zeros(6)


def other_kind(flat: FlatState) -> None:
    flat.kinds["model.2.bias"] = "buffer"


def another_tie(flat: FlatState) -> None:
    flat.ties["model.head"] = "model.2.bias"


def another_value(flat: FlatState) -> None:
    flat.values["more"] = 1


def other_groups(flat: FlatState) -> None:
    flat.values["optimizer.param_groups.0.params"] = ["2.weight"]


def other_container(flat: FlatState) -> None:
    flat.tree["table"] = OrderedDict(flat.tree["table"])


def other_sequence(flat: FlatState) -> None:
    flat.tree["table"]["b"] = list(flat.tree["table"]["b"])


def other_key_order(flat: FlatState) -> None:
    flat.tree["table"] = dict(reversed(flat.tree["table"].items()))


@pytest.mark.parametrize(
    "change",
    [
        *(other_order, other_dtype, other_shape, other_kind, another_tie, another_value, other_groups),
        *(other_container, other_sequence, other_key_order),
    ],
)
def test_any_change_of_structure_makes_a_new_one(change: Any) -> None:
    first = LocalPlan.of(capture(), 0)
    flat = capture()
    change(flat)
    again = LocalPlan.of(flat, 0, first)
    assert again.structure is not first.structure
    assert as_seen(again)[:-1] == as_seen(LocalPlan.of(flat, 0))[:-1]


class Wide(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(256, 256) for _ in range(6))
        self.register_buffer("own", torch.zeros(256, 256))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


def save_by_ddp(rank: int, world: int, url: str) -> dict[str, int]:
    torch.manual_seed(0)
    model = Wide()
    model.own.fill_(rank)  # what DDP does not keep equal stays rank 0's
    ddp = nn.parallel.DistributedDataParallel(model, broadcast_buffers=False)
    optimizer = torch.optim.AdamW(ddp.parameters())
    want: dict[str, Any] = {}
    with CheckpointManager(url, {"model": ddp, "optimizer": optimizer}, keep=keep_all()) as ckpt:
        for step in (1, 2):
            ddp(torch.full((2, 256), 0.01)).sum().backward()
            optimizer.step()
            ckpt.save(step)
        want = {name: value.clone() for name, value in model.state_dict().items()}
    twin = nn.parallel.DistributedDataParallel(Wide(), broadcast_buffers=False)
    with CheckpointManager(url, {"model": twin, "optimizer": torch.optim.AdamW(twin.parameters())}) as ckpt:
        ckpt.restore(check_fingerprints=True)
    found = twin.module.state_dict()
    assert not found["own"].any()
    assert all(torch.equal(found[name], value) for name, value in want.items() if name != "own")
    folder = next(Path(url).glob("step-000000002-*"))
    return {path.name: path.stat().st_size for path in folder.glob("*.distcp")}


def test_what_ddp_has_on_all_ranks_is_shared_out_among_them(tmp_path: Any) -> None:
    sizes, _ = run_world(save_by_ddp, 2, str(tmp_path))
    first, second = sizes.values()
    assert sum(sizes.values()) > 3 * 6 * 256 * 256 * 4
    assert 0.65 < first / second < 1.5, sizes  # each small thing counts as 64 KiB, and rank 0 has all values
