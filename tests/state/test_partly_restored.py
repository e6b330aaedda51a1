"""A part that came back in part says so: never plain "exact" while something of it stayed as it was."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from state.state_helpers import bits, raw, restore, save
from torch import nn

from resilio.errors import MismatchError


def trained(seed: int, optimizer: Any = torch.optim.Adam) -> dict[str, Any]:
    torch.manual_seed(seed)
    model = nn.Linear(2, 2)
    made = optimizer(model.parameters(), lr=0.1 + seed)
    for parameter in model.parameters():
        parameter.grad = torch.rand_like(parameter)
    made.step()
    return {"model": model, "optimizer": made}


class Counting(torch.optim.Adam):
    """Saves a count beside what torch saves."""

    count = 0

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        self.count += 1
        super().step(closure)

    def state_dict(self) -> dict[str, Any]:
        return {**super().state_dict(), "count": self.count}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.count = state_dict.pop("count")
        super().load_state_dict(state_dict)


# Of Adam's: 2 parameters with 3 entries each; lr, betas, eps, weight_decay, amsgrad, maximize, decoupled_weight_decay.
def test_an_optimizer_of_which_only_the_lr_came_back_says_how_much_stayed_live() -> None:
    stored, live = save(trained(0)), trained(1)
    moments = bits(live["optimizer"].state_dict()["state"])
    outcome = restore(live, stored, only=["*.lr"])["optimizer"]
    assert (outcome.how, outcome.note) == ("exact", "12 of 13 keys stayed live")
    assert live["optimizer"].param_groups[0]["lr"] == 0.1
    assert bits(live["optimizer"].state_dict()["state"]) == moments


def test_moments_that_a_fresh_optimizer_was_not_given_count_as_well() -> None:
    live = trained(1)
    live["optimizer"] = torch.optim.Adam(live["model"].parameters())
    outcome = restore(live, save(trained(0)), exclude=["optimizer.state"])["optimizer"]
    assert outcome.note == "6 of 13 keys stayed live"
    assert not live["optimizer"].state


def test_the_whole_optimizer_has_no_note_and_none_of_it_is_not_exact() -> None:
    stored = save(trained(0))
    outcome = restore(trained(1), stored)["optimizer"]
    assert (outcome.how, outcome.note) == ("exact", "")
    live = trained(1)
    before = bits(live["optimizer"].state_dict())
    assert restore(live, stored, only=["model"])["optimizer"].how == "stayed live"
    assert bits(live["optimizer"].state_dict()) == before


def test_state_of_a_parameter_that_was_not_saved_counts() -> None:
    live = trained(1)
    live["model"].register_parameter("gain", nn.Parameter(torch.ones(1)))
    live["optimizer"] = torch.optim.Adam(live["model"].parameters())
    for parameter in live["model"].parameters():
        parameter.grad = torch.ones_like(parameter)
    live["optimizer"].step()
    assert restore(live, save(trained(0)), strict=False)["optimizer"].note == "3 of 16 keys stayed live"


def test_the_state_of_one_parameter_is_restored_whole_or_refused() -> None:
    """Half of a parameter's moments fit nothing that ever was."""
    stored = save(trained(0))
    for asked in ({"exclude": ["*.exp_avg"]}, {"only": ["*.exp_avg"]}):
        live = trained(1)
        before = bits(live["optimizer"].state_dict())
        with pytest.raises(MismatchError, match=r"optimizer\.state\.weight can only be restored whole"):
            restore(live, stored, **asked)
        assert bits(live["optimizer"].state_dict()) == before
    live = trained(1)
    outcome = restore(live, stored, only=["optimizer.state.weight"])["optimizer"]
    assert outcome.note == "10 of 13 keys stayed live"


def test_what_an_optimizer_of_somebody_s_own_saves_beside_follows_only_and_exclude() -> None:
    stored, live = save(trained(0, Counting)), trained(1, Counting)
    live["optimizer"].step()
    outcome = restore(live, stored, exclude=["optimizer.count"])["optimizer"]
    assert (outcome.how, outcome.note) == ("exact", "1 of 14 keys stayed live")
    assert live["optimizer"].count == 2
    assert raw(live["optimizer"].state[live["model"].weight]["exp_avg"]) == raw(
        stored.data["optimizer.state.weight.exp_avg"]
    )
    restore(live, stored, only=["optimizer.count"])
    assert live["optimizer"].count == 1
