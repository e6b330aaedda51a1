"""What cannot be saved exactly is refused, by name and with a way out, before anything is written."""

from __future__ import annotations

import collections
import enum
from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
from state.state_helpers import Holder, bits, restore, save
from torch import nn
from torch.optim import lr_scheduler as lrs

from resilio import TrainingState
from resilio.errors import CaptureError, ConfigError


class Colour(enum.IntEnum):
    RED = 1


class Pair(NamedTuple):
    a: int
    b: int


def with_state(**entries: Any) -> dict[str, Any]:
    model = nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    optimizer.state[model.weight].update(entries)
    return {"model": model, "optimizer": optimizer}


def with_scheduler(**attributes: Any) -> dict[str, Any]:
    state = with_state()
    scheduler = lrs.StepLR(state["optimizer"], 3)
    vars(scheduler).update(attributes)
    return {**state, "scheduler": scheduler}


def with_extra(value: Any) -> dict[str, Any]:
    return {**with_state(), "mine": value}


REFUSED: dict[str, tuple[Callable[[], dict[str, Any]], str, str]] = {
    "function in a scheduler": (lambda: with_scheduler(fn=lambda n: n), "scheduler.fn", "function"),
    "deque of tensors": (
        lambda: with_state(past=collections.deque([torch.ones(1)], 3)),
        "optimizer.state.weight.past",
        "torch.Tensor",
    ),
    "defaultdict of tensors": (
        lambda: with_state(past=collections.defaultdict(list, a=torch.ones(1))),
        "optimizer.state.weight.past",
        "collections.defaultdict",
    ),
    "named tuple": (lambda: with_extra({"pair": Pair(1, 2)}), "mine.pair", "Pair"),
    "named tuple of tensors": (lambda: with_extra({"pair": Pair(torch.ones(1), 2)}), "mine.pair", "Pair"),
    "enum": (lambda: with_extra([Colour.RED]), r"mine\[0\]", "Colour"),
    "generator": (lambda: with_extra({"g": torch.Generator()}), "mine.g", "Generator"),
    "object": (lambda: with_extra({"deep": [{"er": object()}]}), "mine.deep", "object"),
    "sparse tensor": (lambda: with_state(m=torch.eye(2).to_sparse()), "optimizer.state.weight.m", "sparse"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_come_back_exactly_is_refused_by_name_and_kind(name):
    make, where, kind = REFUSED[name]
    with pytest.raises(CaptureError, match=f"{where}.*{kind}") as caught:
        TrainingState(**make()).capture(1)
    assert any(way in str(caught.value) for way in ("leave it out", "turn it into", "Save its parts"))


class Unequal:
    """Only half of the protocol."""

    def state_dict(self) -> dict[str, Any]:
        return {}


LOADER = torch.utils.data.DataLoader([1, 2, 3])


@pytest.mark.parametrize("name", ["optimizer", "scheduler", "dataloader", "scaler", "ema"])
@pytest.mark.parametrize("value", [Unequal(), {"a": 1}, 3], ids=["half", "dict", "number"])
def test_a_known_name_takes_only_what_can_be_saved_and_loaded(name, value):
    way = "under a name of their own" if isinstance(value, dict) else "Leave it out"
    with pytest.raises(ConfigError, match=f"{name} has no state_dict and load_state_dict.*{way}"):
        TrainingState(**{name: value})


def test_half_of_the_protocol_is_refused_under_any_name_when_it_is_saved():
    with pytest.raises(CaptureError, match=r"mine.*Unequal.*leave it out"):
        TrainingState(mine=Unequal()).capture(1)


def test_a_plain_data_loader_is_refused_with_a_word_on_its_sampler():
    with pytest.raises(ConfigError, match=r"dataloader.*DataLoader.*sampler"):
        TrainingState(dataloader=LOADER)


@pytest.mark.parametrize("value", [3, None, [1, [2.5]], (1, "x"), torch.ones(2), [torch.ones(2)], b"raw", {}, {1: 2}])
def test_a_state_that_is_no_mapping_comes_back_as_it_was(value):
    stored = save({"odd": Holder(value)})
    fresh = Holder({"other": 1} if isinstance(value, dict) else value)
    restore({"odd": fresh}, stored)
    assert bits(fresh.state) == bits(value)
