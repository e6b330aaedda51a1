"""Whether training goes on when a save fails: only past what may pass, only so often, and never past the last one."""

from __future__ import annotations

import logging
from typing import Any

import pytest

from resilio import CheckpointManager, failpoints, save_every
from resilio.errors import CaptureError, ConfigError, FencedError, RanksLostError, SaveError
from resilio.manager.tolerance import Tolerance
from resilio.testing.worlds import run_world


@pytest.fixture(autouse=True)
def _disarmed():
    yield
    failpoints.disarm()


def test_only_what_may_pass_is_tolerated_and_only_so_often_in_a_row():
    tolerance = Tolerance("warn", 2)
    for error in (SaveError("full"), RanksLostError("late")):
        tolerance.failed(error)
    with pytest.raises(SaveError, match="still full"):
        tolerance.failed(SaveError("still full"))
    tolerance.succeeded()
    tolerance.failed(SaveError("full again"))
    for error in (FencedError("another"), CaptureError("odd"), ConfigError("back")):
        with pytest.raises(type(error)):
            Tolerance("warn", 2).failed(error)
    with pytest.raises(SaveError):
        Tolerance("warn", 2).failed(SaveError("the last one"), final=True)
    with pytest.raises(SaveError):
        Tolerance().failed(SaveError("the default"))


@pytest.mark.parametrize(
    ("arguments", "match"),
    [
        ({"on_save_error": "ignore"}, "on_save_error='ignore': there are 'raise' and 'warn'"),
        ({"save_errors_max": 0}, "save_errors_max=0: give how many"),
    ],
)
def test_what_is_neither_is_refused(tmp_path, arguments: dict[str, Any], match):
    with pytest.raises(ConfigError, match=match):
        CheckpointManager(f"file://{tmp_path}", {"n": {"x": 1}}, **arguments)


def trains_on(rank: int, world: int, url: str, mode: Any) -> list[Any]:
    live = {"x": 0}
    save = save_every(1)
    with CheckpointManager(url, {"n": live}, save=save, mode=mode, on_save_error="warn") as ckpt:
        ckpt.restore()
        failed = []
        for step in range(1, 8):
            live["x"] = step
            failpoints.disarm()
            if rank == 1 and step in (2, 3):
                failpoints.arm("save.data_open=enospc")
            handle = ckpt.step(step)
            assert handle is not None
            if handle.exception(60) is not None:
                failed.append(step)
    return [failed, [info.step for info in ckpt.checkpoints()]]


@pytest.mark.parametrize("mode", ["sync", "async"])
def test_a_disk_that_is_full_for_two_saves_costs_two_checkpoints_and_no_training(tmp_path, mode):
    first, second = run_world(trains_on, 2, f"file://{tmp_path}", mode)
    assert first == second == [[2, 3], [1, 4, 5, 6, 7]]


@pytest.mark.parametrize("mode", ["sync", "async"])
def test_the_last_save_is_never_passed_over(tmp_path, caplog, mode):
    url, state = f"file://{tmp_path}", {"n": {"x": 1}}
    caplog.set_level(logging.ERROR, logger="resilio")
    with (
        pytest.raises(SaveError, match="No space left"),
        CheckpointManager(url, state, save=save_every(1), mode=mode, on_save_error="warn") as ckpt,
    ):
        ckpt.restore()
        failpoints.arm("save.data_open=enospc")
        ckpt.step(1)
        ckpt.step(2, last=True)
    assert "a save failed, going on in_a_row=1 of=3" in caplog.text
    assert not list(tmp_path.glob("commits/*"))
