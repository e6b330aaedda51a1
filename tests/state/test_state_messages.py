"""A message names the part, says what is so, and gives a way that works."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from state.state_helpers import Holder, restore, save, store
from torch import nn

from resilio import TrainingState
from resilio.errors import CaptureError, ConfigError, LiveStateError, MismatchError, RestoreError
from resilio.state.extras import per_rank


class Counter:
    """Counts; `fails` of its loads raise `error`."""

    def __init__(self, at: int = 0, fails: int = 0, error: type[Exception] = RuntimeError) -> None:
        self.at, self.fails, self.error = at, fails, error

    def state_dict(self) -> dict[str, Any]:
        return {"at": self.at}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.at = state["at"]
        if self.fails:
            self.fails -= 1
            raise self.error()


# ------------------------------------------------------------------------------------------------- a load that raises


def test_a_loader_that_refuses_its_state_comes_with_a_word_on_workers():
    with pytest.raises(RestoreError) as caught:
        restore({"dataloader": Counter(1, 1, AssertionError)}, save({"dataloader": Counter(5)}))
    assert str(caught.value) == (
        "dataloader could not be restored, everything is as it was: AssertionError. Most loaders take a state back "
        "only with the number of workers it was saved with: build it with that num_workers, or exclude 'dataloader'"
    )
    with pytest.raises(RestoreError, match=r"RuntimeError$"):
        restore({"other": Counter(1, 1)}, save({"other": Counter(5)}))


def test_an_undo_that_failed_does_not_say_that_everything_is_as_it_was():
    with pytest.raises(
        LiveStateError, match=r"bad could not be restored: RuntimeError.*putting bad back.*mixture"
    ) as e:
        restore({"bad": Counter(1, 2)}, save({"bad": Counter(5)}))
    assert "as it was" not in str(e.value)


# ------------------------------------------------------------------------------------------------ a name that is none


def two_ranks() -> Any:
    states = [
        TrainingState(model=nn.Linear(1, 1), dataloader=Counter(at), seen=per_rank(at), epoch=3, scaler=Counter())
        for at in (4, 6)
    ]
    return store(*(state.capture(7, rank=rank, world=2) for rank, state in enumerate(states)))


@pytest.mark.parametrize("argument", ["only", "exclude"])
def test_what_may_be_named_is_listed_and_nothing_of_our_own(argument):
    live = {"model": nn.Linear(1, 1), "dataloader": Counter(), "seen": per_rank(0), "epoch": 0, "scaler": Counter()}
    for name in ("step", "modle"):
        with pytest.raises(ConfigError) as caught:
            restore(live, two_ranks(), world=2, **{argument: [name]})
        assert str(caught.value) == (
            f"{argument}={name!r} matches nothing; the checkpoint has model, scaler, epoch, dataloader, seen, rng"
        )


def test_it_is_listed_as_the_live_side_calls_it():
    class Hidden(nn.Linear):
        def __init__(self) -> None:
            super().__init__(1, 1)
            self.register_buffer("mask", torch.ones(1), persistent=False)

    stored = save({"model": Hidden(), "old": 3})
    with pytest.raises(ConfigError, match=r"matches nothing; the checkpoint has model, new, rng$"):
        restore({"model": Hidden(), "new": 3}, stored, rename={"old": "new"}, only=["old"])


# ----------------------------------------------------------------------------------------------- what cannot be saved


class Broken:
    """Its state cannot be had."""

    def state_dict(self) -> dict[str, Any]:
        return {}["k"]

    def load_state_dict(self, state: Any) -> None: ...


class BrokenModule(nn.Linear):
    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        return {}["k"]


class BrokenOptimizer(torch.optim.SGD):
    def state_dict(self) -> Any:
        return {}["k"]


def with_optimizer() -> dict[str, Any]:
    model = nn.Linear(1, 1)
    return {"model": model, "optimizer": {"a": BrokenOptimizer(model.parameters(), lr=0.1)}}


@pytest.mark.parametrize(
    ("state", "where"),
    [
        ({"mine": Broken()}, "mine"),
        ({"dataloader": Broken()}, "dataloader"),
        ({"scheduler": {"a": Broken(), "b": Counter()}}, r"scheduler\.a"),
        ({"model": {"gen": BrokenModule(1, 1)}}, r"model\.gen"),
        (with_optimizer(), r"optimizer\.a"),
    ],
    ids=["extra", "dataloader", "scheduler", "model", "optimizer"],
)
def test_a_state_dict_that_raises_is_named_and_the_cause_is_kept(state, where):
    with pytest.raises(CaptureError, match=rf"^{where}: state_dict\(\) raised KeyError: 'k'") as caught:
        TrainingState(**state).capture(0)
    assert isinstance(caught.value.__cause__, KeyError)


def test_a_live_state_dict_that_raises_is_named_at_a_restore_too():
    class Late(Counter):
        def state_dict(self) -> dict[str, Any]:
            return {"at": torch.ones(1)} if self.at else {}["k"]

    with pytest.raises(MismatchError, match=r"mine: state_dict\(\) raised KeyError: 'k'"):
        restore({"mine": Late(0)}, save({"mine": Late(1)}))


def holds_itself() -> dict[str, Any]:
    state: dict[str, Any] = {"fine": 1, "a": {"b": 2}}
    state["a"]["up"] = [state["a"]]
    return state


def lists() -> dict[str, Any]:
    items: list[Any] = [1, torch.ones(1)]
    items.append({"again": items})
    return {"items": items}


def deep() -> dict[str, Any]:
    value: Any = torch.ones(1)
    for _ in range(5000):
        value = {"d": value}
    return {"here": value}


@pytest.mark.parametrize(
    ("make", "key", "what"),
    [
        (holds_itself, r"mine\.a\.up\.0", "holds itself"),
        (lists, r"mine\.items\.2\.again", "holds itself"),
        (deep, r"mine\.here\.d\.d", "nested deeper than 64"),
        (lambda: {"t": torch.nested.nested_tensor([torch.ones(1), torch.ones(2)])}, r"mine\.t", "nested tensor"),
    ],
    ids=["dicts", "lists", "deep", "nested tensor"],
)
def test_what_has_no_end_or_no_one_shape_is_refused_by_key(make, key, what):
    value = make()
    for held in (value, Holder(value)):
        with pytest.raises(CaptureError, match=rf"^{key}.*{what}"):
            TrainingState(mine=held).capture(0)
