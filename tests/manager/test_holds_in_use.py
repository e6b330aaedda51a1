"""Pins, leases and the reasons of a sweep, as a user of the manager meets them."""

from __future__ import annotations

import logging
from typing import Any

import pytest

import resilio
from resilio import CheckpointManager, keep_best, keep_last
from resilio.errors import AccessDeniedError, IntegrityError
from resilio.storage import LocalStorage


def run(url: Any, state: dict[str, Any], **options: Any) -> CheckpointManager:
    ckpt = CheckpointManager(url, {"state": state}, mode="sync", **options)
    ckpt.restore()
    return ckpt


def steps(ckpt: CheckpointManager) -> list[int]:
    return [info.step for info in ckpt.checkpoints()]


def test_a_pin_keeps_what_the_policy_would_not_and_explain_says_so(tmp_path):
    state = {"x": 0}
    with run(f"file://{tmp_path}", state, keep=keep_last(1)) as ckpt:
        for step in (1, 2):
            state["x"] = step
            ckpt.save(step)
            ckpt.pin(1, because="the one in the paper") if step == 1 else None
        assert steps(ckpt) == [1, 2]
        told = {fate.ref.step: fate for fate in ckpt.explain().checkpoints}
        assert not told[1].goes and "the one in the paper" in told[1].why
        assert not told[2].goes
        assert "lives" in str(ckpt.explain())
        assert ckpt.restore(1).step == 1 and state["x"] == 1
        ckpt.restore()
        assert ckpt.unpin(1) == 1
        told = {fate.ref.step: fate for fate in ckpt.explain().checkpoints}
        assert told[1].goes
        ckpt.save(3)
        assert steps(ckpt) == [3]
        with pytest.raises(LookupError):
            ckpt.pin(1, because="too late")


def leases(path: Any) -> list[str]:
    return sorted(one.name[:17] for one in path.glob("leases/*"))


def test_what_was_restored_is_held_until_the_first_save_and_by_a_reader_while_it_reads(tmp_path):
    url, state = f"file://{tmp_path}", {"x": 1}
    with run(url, state) as ckpt:
        ckpt.save(1)
        ckpt.save(2)
        assert leases(tmp_path) == []
    with run(url, state) as ckpt:
        assert leases(tmp_path) == ["000000002-g000001"]
        ckpt.restore(1)
        assert leases(tmp_path) == ["000000001-g000001"]
        ckpt.save(2)
        assert leases(tmp_path) == []
    with run(url, state):
        assert leases(tmp_path) == ["000000002-g000002"]
    assert leases(tmp_path) == []
    resilio.restore(url, {"state": state})
    assert leases(tmp_path) == []
    next(tmp_path.glob("step-000000002-g000002-*/__0_0.distcp")).unlink()
    with pytest.raises(IntegrityError):
        resilio.restore(url, {"state": state}, which=2)
    assert leases(tmp_path) == []


class ReadOnly(LocalStorage):
    """A store to whose objects this user may only listen."""

    def put(self, key: str, data: Any, *, if_absent: bool = False) -> Any:
        raise AccessDeniedError(f"{key}: read-only")

    def delete(self, keys: Any) -> None:
        raise AccessDeniedError("read-only")


def test_a_store_that_may_only_be_read_can_be_restored_from(tmp_path, caplog):
    state = {"x": 5}
    with run(f"file://{tmp_path}", state) as ckpt:
        ckpt.save(1)
    state["x"] = 0
    with caplog.at_level(logging.WARNING, "resilio"):
        assert resilio.restore(ReadOnly(tmp_path), {"state": state}).step == 1
    assert state["x"] == 5
    assert "without a lease" in caplog.text


def test_a_policy_that_keeps_nothing_at_all_deletes_nothing_and_is_told(tmp_path, caplog):
    with (
        caplog.at_level(logging.WARNING, "resilio"),
        run(f"file://{tmp_path}", {"x": 1}, keep=keep_best(1, "los")) as ckpt,  # a typo: the metric is "loss"
    ):
        for step in (1, 2, 3):
            ckpt.save(step, metrics={"loss": 1.0 / step})
        assert steps(ckpt) == [1, 2, 3]
        assert ckpt.explain().refused
    assert "swept nothing of the lineage" in caplog.text


def test_the_best_and_the_newest_live_whatever_the_order(tmp_path):
    with run(f"file://{tmp_path}", {"x": 1}, keep=keep_best(1, "loss") | keep_last(1)) as ckpt:
        for step, loss in enumerate((3.0, 1.0, float("nan"), 2.0), 1):
            ckpt.save(step, metrics={"loss": loss})
        assert steps(ckpt) == [2, 4]
        assert {fate.ref.step: fate.goes for fate in ckpt.explain().checkpoints} == {2: False, 4: False}
