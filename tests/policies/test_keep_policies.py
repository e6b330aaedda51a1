"""Which checkpoints live: tables of steps, policy and reasons."""

from __future__ import annotations

import pickle
import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import pytest

from resilio.errors import ConfigError
from resilio.policies import KeepPolicy, decide, keep_all, keep_every, keep_last, save_every
from resilio.types import CheckpointInfo, CheckpointRef

NEWEST = "newest of the lineage"


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
    ],
)
def test_table(policy: KeepPolicy, steps: list[int], kept: dict[int, str], dropped: list[int]) -> None:
    decision = decide(policy, checkpoints(*steps), now_s=0.0)
    assert {ref.step: reason for ref, reason in decision.kept.items()} == kept
    assert [ref.step for ref in decision.dropped] == dropped


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


@pytest.mark.parametrize("make", [keep_last, keep_every])
@pytest.mark.parametrize("number", [0, -1, True, 2.0, "3", None])
def test_what_can_not_work_is_refused_at_construction(make: Any, number: Any) -> None:
    with pytest.raises(ConfigError, match=make.__name__):
        make(number)


@pytest.mark.parametrize(
    ("policy", "source"),
    [
        (keep_last(3) | keep_every(10_000), "keep_last(3) | keep_every(10000)"),
        (keep_all(), "keep_all()"),
        (keep_all() | (keep_last(1) | keep_every(2)), "keep_all() | keep_last(1) | keep_every(2)"),
    ],
)
def test_a_policy_prints_as_source_that_makes_its_equal(policy: KeepPolicy, source: str) -> None:
    assert repr(policy) == source
    assert eval(source) == policy
    assert pickle.loads(pickle.dumps(policy)) == policy


def test_families_do_not_mix() -> None:
    with pytest.raises(TypeError):
        keep_last(3) | save_every(5)  # type: ignore[operator]
