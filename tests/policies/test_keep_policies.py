"""Which checkpoints live: tables of steps, policy and reasons."""

from __future__ import annotations

import pickle
import random
from collections.abc import Sequence
from dataclasses import dataclass, replace
from datetime import timedelta
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from resilio.errors import ConfigError
from resilio.policies import (
    KeepPolicy,
    decide,
    keep_all,
    keep_best,
    keep_every,
    keep_healthy,
    keep_last,
    keep_within,
    save_every,
)
from resilio.types import CheckpointInfo, CheckpointRef

NEWEST = "newest of the lineage"
FIT = "newest that is healthy"
NAN, INF = float("nan"), float("inf")
MIDNIGHT_S = 19_700 * 86_400.0  # UTC


def checkpoints(*steps: int, generation: int = 1, on_lineage: bool = True) -> list[CheckpointInfo]:
    return [
        CheckpointInfo(CheckpointRef(generation, step), f"step-{step}", float(step), 2, on_lineage=on_lineage)
        for step in steps
    ]


@pytest.mark.parametrize(
    ("policy", "steps", "kept", "dropped"),
    [
        (keep_last(3), [], {}, []),
        (keep_all(), [], {}, []),
        (keep_last(1), [5], {5: f"one of the last 1; {NEWEST}"}, []),
        (keep_last(2), [1, 2, 3], {2: "one of the last 2", 3: f"one of the last 2; {NEWEST}"}, [1]),
        (keep_last(9), [1, 2], {1: "one of the last 9", 2: f"one of the last 9; {NEWEST}"}, []),
        (keep_every(10), [10, 15, 20, 25], {10: "every 10 steps", 20: "every 10 steps", 25: NEWEST}, [15]),
        (keep_every(100), [10, 20], {20: NEWEST}, [10]),
        (keep_all(), [1, 2], {1: "all are kept", 2: f"all are kept; {NEWEST}"}, []),
        (
            keep_last(1) | keep_every(10),
            [10, 15, 20],
            {10: "every 10 steps", 20: f"one of the last 1; every 10 steps; {NEWEST}"},
            [15],
        ),
        (
            keep_last(2) & keep_every(10),
            [10, 15, 20, 25],
            {20: "one of the last 2 and every 10 steps", 25: NEWEST},
            [10, 15],
        ),
        (
            (keep_last(2) | keep_every(30)) & keep_every(15),
            [15, 30, 45, 50],
            {30: "every 30 steps and every 15 steps", 45: "one of the last 2 and every 15 steps", 50: NEWEST},
            [15],
        ),
        (
            (keep_last(2) | keep_every(10)) & keep_all(),
            [5, 10],
            {
                5: "one of the last 2 and all are kept",
                10: f"(one of the last 2; every 10 steps) and all are kept; {NEWEST}",
            },
            [],
        ),
    ],
)
def test_table(policy: KeepPolicy, steps: list[int], kept: dict[int, str], dropped: list[int]) -> None:
    decision = decide(policy, checkpoints(*steps), now_s=0.0)
    assert {ref.step: reason for ref, reason in decision.kept.items()} == kept
    assert [ref.step for ref in decision.dropped] == dropped


def measured(*values: float | None, metric: str = "loss") -> list[CheckpointInfo]:
    """Steps 1, 2, 3, … with these values; None: saved without the metric."""
    infos = checkpoints(*range(1, len(values) + 1))
    given = [{} if value is None else {metric: value} for value in values]
    return [replace(info, metrics=metrics) for info, metrics in zip(infos, given, strict=True)]


@pytest.mark.parametrize(
    ("policy", "values", "kept"),
    [
        (keep_best(1, "loss"), [3, 1, 2], [2]),
        (keep_best(2, "loss"), [3, 1, 2], [2, 3]),
        (keep_best(2, "loss", mode="max"), [3, 1, 2], [1, 3]),
        (keep_best(9, "loss"), [3, 1], [1, 2]),
        (keep_best(2, "loss"), [], []),
        # of equal ones the newer
        (keep_best(1, "loss"), [1, 1, 1], [3]),
        (keep_best(2, "loss", mode="max"), [5, 1, 5, 5, 2], [3, 4]),
        (keep_best(1, "loss"), [-0.0, 0.0], [2]),
        (keep_best(1, "loss"), [0.0, -0.0], [2]),
        # not there, or not a number: never, even if places are left
        (keep_best(2, "loss"), [NAN, 4, None], [2]),
        (keep_best(1, "loss", mode="max"), [NAN, 4, NAN], [2]),
        (keep_best(3, "loss"), [NAN, None], []),
        # infinities of both signs come after all finite ones
        (keep_best(2, "loss"), [-INF, 9, 8, INF], [2, 3]),
        (keep_best(2, "loss", mode="max"), [-INF, 9, 8, INF], [2, 3]),
        (keep_best(2, "loss"), [INF, 9, -INF], [2, 3]),
        (keep_best(2, "loss"), [-INF, 9, INF], [2, 3]),
        (keep_best(2, "acc"), [1, 2], []),
    ],
)
def test_the_best(policy: KeepPolicy, values: list[float | None], kept: list[int]) -> None:
    assert sorted(ref.step for ref in policy.reasons(measured(*values), 0.0)) == kept


def test_a_reason_says_the_value() -> None:
    reasons = keep_best(2, "val/loss").reasons(measured(0.123456789, 1e9, metric="val/loss"), 0.0)
    assert list(reasons.values()) == [
        "one of the best 2 by val/loss (0.123457)",
        "one of the best 2 by val/loss (1e+09)",
    ]


def committed(*hours: float) -> list[CheckpointInfo]:
    """Steps 1, 2, 3, … committed at these hours of a day."""
    infos = checkpoints(*range(1, len(hours) + 1))
    return [replace(info, time_s=MIDNIGHT_S + 3600 * at) for info, at in zip(infos, hours, strict=True)]


@pytest.mark.parametrize(
    ("policy", "hours", "kept"),
    [
        (keep_every(hours=6), [], []),
        (keep_every(hours=6), [0, 1, 5.99, 6, 7, 13], [1, 4, 6]),
        (keep_every(days=1), [-0.1, 0, 23.9, 24, 25], [1, 2, 4]),
        (keep_every(timedelta(hours=6)), [1, 2, 20], [1, 3]),
        # the clock went back: the first of a period is the one first committed, whatever its time says
        (keep_every(hours=1), [5.5, 5.2, 4.9, 5.7, 6.1], [1, 3, 5]),
        (keep_within(hours=3), [0, 8, 9, 9.1, 12], [4, 5]),
        (keep_within(hours=3), [12.5, 99, 1], [1, 2]),  # the future is young
        (keep_within(timedelta(minutes=30)), [11.4, 11.6], [2]),
        (keep_within(days=1, hours=1), [-13, -12.9], [2]),
        (keep_within(days=1) & keep_every(hours=6), [-20, -2, 1, 2, 7], [2, 3, 5]),
    ],
)
def test_by_time(policy: KeepPolicy, hours: list[float], kept: list[int]) -> None:
    """It is noon."""
    reasons = policy.reasons(committed(*hours), MIDNIGHT_S + 12 * 3600)
    assert sorted(ref.step for ref in reasons) == kept


def test_reasons_of_time_are_readable() -> None:
    (info,) = committed(12)
    for policy, reason in (
        (keep_every(hours=6), "every 6 hours"),
        (keep_every(hours=24), "every 1 day"),
        (keep_within(minutes=90), "younger than 90 minutes"),
        (keep_within(days=7) & keep_every(days=1), "younger than 7 days and every 1 day"),
    ):
        assert policy.reasons([info], info.time_s) == {info.ref: reason}


@settings(deadline=None)
@given(st.lists(st.floats(-30, 30), max_size=20))
def test_the_first_of_a_period_stays_it_when_the_others_go_one_by_one(hours: list[float]) -> None:
    """Sweeping after each save keeps what one sweep at the end keeps, wherever the clock jumps."""
    policy, living = keep_every(hours=6), []
    for info in (infos := committed(*hours)):
        living.append(info)
        kept = policy.reasons(living, 0.0)
        living = [info for info in living if info.ref in kept]
    assert {info.ref for info in living} == set(policy.reasons(infos, 0.0))


def test_what_is_off_the_lineage_is_never_dropped_and_never_counted() -> None:
    """An abandoned branch with higher steps must not push the live branch out of the last two, nor be dropped."""
    abandoned = checkpoints(300, 400, 500, on_lineage=False)
    live = checkpoints(100, 200) + checkpoints(300, 400, generation=2)
    decision = decide(keep_last(2), abandoned + live, now_s=0.0)
    assert decision.kept == {
        **{info.ref: "off the lineage" for info in abandoned},
        CheckpointRef(2, 300): "one of the last 2",
        CheckpointRef(2, 400): f"one of the last 2; {NEWEST}",
    }
    assert decision.dropped == (CheckpointRef(1, 100), CheckpointRef(1, 200))


def test_an_abandoned_branch_takes_no_place_among_the_last() -> None:
    """Generation 2 went on from 100 and was left; 3 went on from 200: the last three are 100, 200 and 300."""
    infos = checkpoints(100, 200) + checkpoints(150, generation=2, on_lineage=False) + checkpoints(300, generation=3)
    decision = decide(keep_last(3), infos, now_s=0.0)
    assert decision.dropped == ()
    assert decision.kept[CheckpointRef(2, 150)] == "off the lineage"


def test_a_store_with_nothing_on_the_lineage_loses_nothing() -> None:
    decision = decide(keep_last(1), checkpoints(1, 2, on_lineage=False), now_s=0.0)
    assert decision.dropped == ()
    assert len(decision.kept) == 2


@pytest.mark.parametrize("policy", [keep_last(3), keep_every(7), keep_all(), keep_last(2) | keep_every(5)])
def test_each_is_kept_or_dropped_whatever_the_order(policy: KeepPolicy) -> None:
    infos = checkpoints(*range(0, 60, 3)) + checkpoints(*range(70, 90), generation=2)
    expected = decide(policy, infos, now_s=0.0)
    assert {*expected.kept, *expected.dropped} == {info.ref for info in infos}
    assert not set(expected.kept) & set(expected.dropped)
    assert CheckpointRef(2, 89) in expected.kept
    for seed in range(5):
        shuffled = random.Random(seed).sample(infos, len(infos))
        assert decide(policy, shuffled, now_s=0.0) == expected


def test_the_newest_lives_even_against_a_policy_that_wants_nothing() -> None:
    @dataclass(frozen=True)
    class KeepNone(KeepPolicy):
        def reasons(self, checkpoints: Sequence[CheckpointInfo], now_s: float) -> dict[CheckpointRef, str]:
            return {CheckpointRef(9, 9): "not even there"}

    decision = decide(KeepNone(), checkpoints(1, 2, 3), now_s=0.0)
    assert decision.kept == {CheckpointRef(1, 3): NEWEST}
    assert decision.dropped == (CheckpointRef(1, 1), CheckpointRef(1, 2))


@pytest.mark.parametrize("make", [keep_last, keep_every, keep_within, keep_healthy, lambda n: keep_best(n, "loss")])
@pytest.mark.parametrize("number", [0, -1, True, 2.0, "3", None])
def test_what_can_not_work_is_refused_at_construction(make: Any, number: Any) -> None:
    with pytest.raises(ConfigError, match="keep_"):
        make(number)


@pytest.mark.parametrize(
    ("make", "args", "kwargs"),
    [
        (keep_every, (5,), {"hours": 1}),
        (keep_every, (), {"hours": 0}),
        (keep_every, (timedelta(0),), {}),
        (keep_within, (), {}),
        (keep_within, (), {"days": -1}),
        (keep_within, (), {"days": float("nan")}),
        (keep_within, (timedelta(1),), {"days": 1}),
        (keep_best, (1, ""), {}),
        (keep_best, (1, 2), {}),
        (keep_best, (1, "loss"), {"mode": "lowest"}),
        (keep_best, (1, "loss"), {"mode": None}),
    ],
)
def test_what_does_not_go_together_is_refused(make: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=make.__name__):
        make(*args, **kwargs)


@pytest.mark.parametrize(
    ("policy", "source"),
    [
        (keep_last(3) | keep_every(10_000), "keep_last(3) | keep_every(10000)"),
        (keep_all(), "keep_all()"),
        (keep_last(3) | keep_healthy(2), "keep_last(3) | keep_healthy(2)"),
        (keep_best(2, "loss"), "keep_best(2, 'loss')"),
        (keep_best(2, "it's", mode="max"), "keep_best(2, \"it's\", mode='max')"),
        (keep_every(hours=48), "keep_every(days=2)"),
        (keep_within(hours=36), "keep_within(hours=36)"),
        (keep_within(days=2) & (keep_last(1) | keep_all()), "keep_within(days=2) & (keep_last(1) | keep_all())"),
        (keep_within(days=2) & keep_last(1) | keep_all(), "keep_within(days=2) & keep_last(1) | keep_all()"),
        (keep_all() | (keep_last(1) | keep_every(2)), "keep_all() | keep_last(1) | keep_every(2)"),
    ],
)
def test_a_policy_prints_as_source_that_makes_its_equal(policy: KeepPolicy, source: str) -> None:
    assert repr(policy) == source
    assert eval(source) == policy
    assert pickle.loads(pickle.dumps(policy)) == policy


def of_health(*counts: int | None) -> list[CheckpointInfo]:
    """Steps 1, 2, …, each with so many values that are not finite."""
    infos = checkpoints(*range(1, len(counts) + 1))
    return [replace(info, non_finite=count) for info, count in zip(infos, counts, strict=True)]


@pytest.mark.parametrize(
    ("policy", "counts", "kept"),
    [
        (
            keep_healthy(2),
            [0, 0, 0, 7, 7],
            {2: "one of the last 2 healthy", 3: f"one of the last 2 healthy; {FIT}", 5: NEWEST},
        ),
        (
            keep_healthy(2),
            [None, None, 3, 0],
            {2: "one of the last 2 healthy, as far as known", 4: f"one of the last 2 healthy; {NEWEST}"},
        ),
        (keep_healthy(3), [7, 7], {2: NEWEST}),
        (
            keep_last(2) | keep_healthy(1),
            [0, 0, 9, 9, 9],
            {2: f"one of the last 1 healthy; {FIT}", 4: "one of the last 2", 5: f"one of the last 2; {NEWEST}"},
        ),
        (
            keep_healthy(1) & keep_every(2),
            [0, 0, 9],
            {2: f"one of the last 1 healthy and every 2 steps; {FIT}", 3: NEWEST},
        ),
        (
            keep_last(1) & keep_healthy(1),
            [0, 0, 9],
            {2: FIT, 3: NEWEST},
        ),
        (
            keep_last(2),
            [0, 5, 5, 5],
            {1: FIT, 3: "one of the last 2", 4: f"one of the last 2; {NEWEST}"},
        ),
        (keep_last(1), [0, None, 5], {2: FIT, 3: f"one of the last 1; {NEWEST}"}),
    ],
)
def test_by_health(policy: KeepPolicy, counts: list[int | None], kept: dict[int, str]) -> None:
    decision = decide(policy, of_health(*counts), now_s=0.0)
    assert {ref.step: reason for ref, reason in decision.kept.items()} == kept


def test_families_do_not_mix() -> None:
    with pytest.raises(TypeError):
        keep_last(3) | save_every(5)  # type: ignore[operator]
    with pytest.raises(TypeError):
        keep_last(3) & save_every(5)  # type: ignore[operator]
