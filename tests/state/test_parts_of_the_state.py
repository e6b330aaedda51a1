"""What may be a part of the state, and advice that fits what was passed instead."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from resilio import TrainingState
from resilio.errors import ConfigError


class Counter:
    """Has state."""

    def state_dict(self) -> dict[str, int]:
        return {"at": 1}

    def load_state_dict(self, state: dict[str, int]) -> None: ...


def sgd() -> torch.optim.Optimizer:
    return torch.optim.SGD(nn.Linear(1, 1).parameters(), lr=0.1)


@pytest.mark.parametrize(
    ("state", "match"),
    [
        ({"ema": {"w": torch.ones(1)}}, r"ema.*: dict\. .*under a name of their own, such as ema_state="),
        ({"scheduler": 3}, r"scheduler.*: int\. Leave it out if it has no state"),
        ({"optimizer": [sgd(), sgd()]}, r"optimizer.*: list\. Pass several as a dict: optimizer=\{'a': "),
        ({"scheduler": (Counter(), Counter())}, r"scheduler.*: tuple\. Pass several as a dict: scheduler=\{'a': "),
        ({"scheduler": {"a": Counter(), "b": 3}}, r"scheduler\['b'\] has no state_dict.*: int\. Leave it out"),
        ({"optimizer": nn.Linear(1, 1)}, "optimizer is a torch module: Linear. Pass it as model="),
        ({"optimizer": {"a": nn.Linear(1, 1)}}, "optimizer is a torch module: Linear"),
    ],
    ids=lambda value: "" if isinstance(value, str) else str(next(iter(value))),
)
def test_advice_fits_what_was_passed(state, match):
    with pytest.raises(ConfigError, match=match) as caught:
        TrainingState(**state)
    assert "Leave it out" in match or "Leave it out" not in str(caught.value)


@pytest.mark.parametrize(
    "state", [{}, {"model": None}, {"rng": True}, TrainingState(), TrainingState(ema=None)], ids=repr
)
def test_a_state_without_a_part_is_refused_where_it_is_to_be_used(state):
    with pytest.raises(ConfigError, match=r"nothing to save or restore.*model=.*optimizer="):
        TrainingState.of(state)


def test_a_part_may_be_given_after_a_state_was_made():
    state = TrainingState(model=None)
    state["epoch"] = 3
    assert TrainingState.of(state) is state


def test_a_name_that_is_no_text_is_named():
    with pytest.raises(
        ConfigError, match=r"mapping from names, not dict with the key 1, of type int; names are text, such as 'model'"
    ):
        TrainingState.of({"model": nn.Linear(1, 1), 1: 2})
