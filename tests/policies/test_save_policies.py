"""When a save is due: tables of context and reason."""

from __future__ import annotations

import dataclasses
import pickle
from datetime import timedelta
from typing import Any

import pytest

from resilio.errors import ConfigError
from resilio.policies import SaveContext, SavePolicy, keep_last, save_every


@pytest.mark.parametrize(
    ("policy", "context", "reason"),
    [
        (save_every(500), SaveContext(500), "every 500 steps"),
        (save_every(500), SaveContext(499), None),
        (save_every(500), SaveContext(501, last_saved_step=0), None),
        (save_every(500), SaveContext(1000, last_saved_step=999), "every 500 steps"),
        (save_every(1), SaveContext(7), "every 1 steps"),
        (save_every(500), SaveContext(7, time_due=True), None),
        (save_every(500), SaveContext(7, last=True), None),
        (save_every(minutes=20), SaveContext(7), None),
        (save_every(minutes=20), SaveContext(7, time_due=True), "every 20 minutes"),
        (save_every(500) | save_every(minutes=20), SaveContext(7), None),
        (save_every(500) | save_every(minutes=20), SaveContext(500), "every 500 steps"),
        (save_every(500) | save_every(minutes=20), SaveContext(7, time_due=True), "every 20 minutes"),
        (
            save_every(500) | save_every(minutes=20),
            SaveContext(500, time_due=True),
            "every 500 steps; every 20 minutes",
        ),
        (save_every(hours=1) | save_every(minutes=20), SaveContext(7, time_due=True), "every 20 minutes"),
        (save_every(5) | save_every(5), SaveContext(5), "every 5 steps"),
    ],
)
def test_a_save_is_due_for_a_reason(policy: SavePolicy, context: SaveContext, reason: str | None) -> None:
    assert policy.reason(context) == reason


@pytest.mark.parametrize(
    ("policy", "elapsed_s", "due"),
    [
        (save_every(500), 1e9, False),
        (save_every(minutes=20), 1199.9, False),
        (save_every(minutes=20), 1200.0, True),
        (save_every(hours=1) | save_every(minutes=20), 1200.0, True),
        (save_every(hours=1, minutes=30), 5399.0, False),
        (save_every(hours=1, minutes=30), 5400.0, True),
        (save_every(timedelta(seconds=90)), 90.0, True),
        (save_every(500) | save_every(seconds=2), 1.0, False),
    ],
)
def test_time_counts_from_the_last_save(policy: SavePolicy, elapsed_s: float, due: bool) -> None:
    assert policy.time_due(now_s=100.0 + elapsed_s, last_save_s=100.0) is due


def test_only_time_policies_need_a_clock() -> None:
    assert not save_every(500).needs_clock
    assert save_every(minutes=20).needs_clock
    assert (save_every(500) | save_every(minutes=20)).needs_clock
    assert not (save_every(500) | save_every(700)).needs_clock


@pytest.mark.parametrize(
    ("policy", "source"),
    [
        (save_every(500), "save_every(500)"),
        (save_every(500) | save_every(minutes=20), "save_every(500) | save_every(minutes=20)"),
        (save_every(1) | (save_every(2) | save_every(3)), "save_every(1) | save_every(2) | save_every(3)"),
        (save_every(seconds=120), "save_every(minutes=2)"),
        (save_every(hours=1.5), "save_every(minutes=90)"),
        (save_every(hours=24), "save_every(hours=24)"),
        (save_every(seconds=0.25), "save_every(seconds=0.25)"),
        (save_every(timedelta(minutes=20)), "save_every(minutes=20)"),
    ],
)
def test_a_policy_prints_as_source_that_makes_its_equal(policy: SavePolicy, source: str) -> None:
    assert repr(policy) == source
    assert eval(source) == policy
    assert hash(eval(source)) == hash(policy)
    assert pickle.loads(pickle.dumps(policy)) == policy


def test_policies_are_frozen() -> None:
    with pytest.raises(dataclasses.FrozenInstanceError):
        save_every(500).steps = 1  # type: ignore[attr-defined]
    with pytest.raises(dataclasses.FrozenInstanceError):
        SaveContext(5).step = 6  # type: ignore[misc]


@pytest.mark.parametrize(
    ("args", "kwargs"),
    [
        ((), {}),
        ((0,), {}),
        ((-5,), {}),
        ((True,), {}),
        ((500.0,), {}),
        (("500",), {}),
        ((500,), {"minutes": 20}),
        ((timedelta(minutes=1),), {"minutes": 20}),
        ((timedelta(0),), {}),
        ((timedelta(seconds=-1),), {}),
        ((), {"minutes": 0}),
        ((), {"minutes": -1}),
        ((), {"minutes": True}),
        ((), {"hours": float("nan")}),
        ((), {"seconds": float("inf")}),
        ((), {"seconds": "5"}),
        ((), {"hours": 1, "minutes": -30}),
    ],
)
def test_what_can_not_work_is_refused_at_construction(args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match="save_every"):
        save_every(*args, **kwargs)


def test_families_do_not_mix() -> None:
    with pytest.raises(TypeError):
        save_every(5) | keep_last(3)  # type: ignore[operator]
    with pytest.raises(TypeError):
        save_every(5) | 7  # type: ignore[operator]


def test_a_policy_of_ones_own_joins_in() -> None:
    @dataclasses.dataclass(frozen=True)
    class OnSignal(SavePolicy):
        def reason(self, context: SaveContext) -> str | None:
            return f"signal {min(context.signalled)}" if context.signalled else None

    policy = save_every(500) | OnSignal()
    assert policy.reason(SaveContext(7)) is None
    assert policy.reason(SaveContext(7, signalled=frozenset({"SIGTERM"}))) == "signal SIGTERM"
    assert not policy.needs_clock
