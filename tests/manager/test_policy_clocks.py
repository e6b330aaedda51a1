"""The manager tells a save policy which of its times have run out, the same on every rank."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from resilio import CheckpointManager, save_every
from resilio.clock import FakeClock
from resilio.errors import ConfigError
from resilio.testing.worlds import run_world


def saved_because(rank: int, world: int, url: str) -> list[tuple[int, str]]:
    """Only the last rank's clock runs: 10 s a step."""
    clock = FakeClock()
    policy = save_every(seconds=60) & save_every(5) | save_every(seconds=35)
    with CheckpointManager(url, {"n": {"x": 1}}, save=policy, mode="sync", clock=clock) as ckpt:
        ckpt.restore()
        for step in range(1, 12):
            if rank == world - 1:
                clock.advance(40 if step == 9 else 10)
            ckpt.step(step)
        return [(info.step, info.reasons[0]) for info in ckpt.checkpoints()]


# A step hears of the clocks as they were at the end of the step before.
EXPECTED = [(5, "every 35 seconds"), (10, "every 1 minute and every 5 steps; every 35 seconds")]


def test_each_time_has_its_own_flag(tmp_path: Path) -> None:
    assert saved_because(0, 1, f"file://{tmp_path}") == EXPECTED


def test_a_time_is_due_when_one_ranks_clock_says_so(tmp_path: Path) -> None:
    assert run_world(saved_because, 2, f"file://{tmp_path}") == [EXPECTED, EXPECTED]


@pytest.mark.parametrize("wrong", [{"save": 500}, {"keep": 3}, {"keep": save_every(5)}, {"save": "save_every(500)"}])
def test_what_is_no_policy_is_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match="this is a policy, such as"):
        CheckpointManager("memory://wrong", {"n": {"x": 1}}, **wrong)
