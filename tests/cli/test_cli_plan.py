"""`resilio plan`: what it says is what a manager does."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from resilio import CheckpointManager
from resilio.cli.simulate import SAVES_MAX, STEPS_MAX, Start, simulate
from resilio.clock import FakeClock
from resilio.policies import SaveContext, keep_all, keep_last, parse_keep, parse_save, save_every
from resilio.records import keys


def played(url: Any, save: str, keep: str, steps: int, step_s: float) -> list[tuple[int, str, list[int]]]:
    """What a manager really does: each save, its reason, and what is there after it."""
    clock, found = FakeClock(), []
    with CheckpointManager(
        url, {"state": {"x": 0}}, save=parse_save(save), keep=parse_keep(keep), mode="sync", clock=clock
    ) as ckpt:
        ckpt.restore()
        for step in range(ckpt.next_step, ckpt.next_step + steps):
            clock.advance(step_s)
            if ckpt.step(step) is not None:
                there = ckpt.checkpoints()
                found.append((step, "; ".join(there[-1].reasons), [info.step for info in there]))
    return found


@pytest.mark.parametrize(
    ("save", "keep"),
    [
        ("save_every(3) | save_at(7)", "keep_last(2) | keep_every(6)"),
        ("save_every(seconds=20)", "keep_last(1) | keep_every(minutes=1)"),
        ("save_every(4) | save_every(seconds=10)", "keep_within(minutes=1)"),
        ("save_every(2) & save_every(seconds=25)", "keep_all()"),
        ("save_every(5)", "keep_every(7)"),
        ("save_every(5)", "keep_best(2, 'loss')"),
    ],
)
def test_it_is_what_a_manager_does(resilio: Any, tmp_path: Path, save: str, keep: str) -> None:
    """From nothing, and from the checkpoints that the first half left."""
    step_s, at = 3.5, FakeClock().now_s
    started = Start(step=0, now_s=at)
    for half in (20, 20):
        told = simulate(parse_save(save), parse_keep(keep), half, started, step_s=step_s)
        really = played(tmp_path, save, keep, half, step_s)
        assert [(one.step, one.reason) for one in told.saves] == [(step, reason) for step, reason, _ in really]
        there = {info.step for info in started.lineage}
        for one, (_, _, left) in zip(told.saves, really, strict=True):
            there = there - {ref.step for ref in one.deletes} | {one.step}
            assert (sorted(there), one.there) == (left, len(left))
        assert [info.step for info in told.end] == really[-1][2]
        # A job goes on from its newest checkpoint, and its clock begins there.
        started = Start(told.end, told.saves[-1].step, at)


def test_a_run_is_gone_on_from_and_nothing_is_touched(resilio: Any, branched: Any) -> None:
    resilio("pin", branched.url, "100", "--because", "x")
    before = sorted(branched.folder.rglob("*"))
    args = ("plan", branched.url, "--save", "save_every(150)", "--keep", "keep_last(2)", "--steps", "350")
    code, out, err = resilio(*args)
    assert (code, err) == (0, "")
    assert [line.split() for line in out.splitlines()[1:3]] == [
        ["450", "every", "150", "steps", "200,", "300", "3"],
        ["600", "every", "150", "steps", "400", "3"],
    ]
    assert "steps 401 to 750: 3 saves; at the end 3 checkpoints: 100, 600, 750" in out
    assert "at most 5 at once, 976.6 KiB" in out
    assert "note: 1 checkpoint off the lineage besides" in out
    page = json.loads(resilio(*args, "--json")[1])
    assert page["saves"][0] == {
        "step": 450,
        "after_s": None,
        "reason": "every 150 steps",
        "deletes": ["000000200-g000001", "000000300-g000002"],
        "there": 3,
    }
    assert page["end"][0] == {"name": "000000100-g000001", "step": 100, "generation": 1, "simulated": False}
    assert (page["end"][2]["simulated"], page["most"], page["most_bytes"]) == (True, 5, 5 * 200_008)
    page = json.loads(resilio(*args, "--from", "200", "--json")[1])
    assert [one["step"] for one in page["saves"]] == [300, 450]
    assert "3 checkpoints off the lineage" in page["notes"][0]
    assert sorted(branched.folder.rglob("*")) == before


@pytest.mark.parametrize(
    ("args", "code", "says"),
    [
        (("--steps", "10"), 2, "--save"),
        (("--save", "save_every(5)"), 2, "--steps"),
        (("--save", "save_every(5)", "--steps", "0"), 2, "1 to 10,000,000"),
        (("--save", "save_every(5)", "--steps", "10000001"), 2, "1 to 10,000,000"),
        (("--save", "save_every(5)", "--steps", "10", "--step-seconds", "0"), 2, "more than 0"),
        (("--save", "save_every(5)", "--steps", "10", "--step-seconds", "nan"), 2, "more than 0"),
        (("--save", "save_every(5)", "--steps", "10", "--from", "-1"), 2, "--from"),
        (("--save", "keep_last(1)", "--steps", "10"), 2, "which checkpoints to keep"),
        (("--save", "save_every(5)", "--keep", "keep_last(0)", "--steps", "10"), 2, "at least 1"),
        (("--save", "save_every(minutes=5)", "--steps", "10"), 2, "--step-seconds"),
        (("--save", "save_every(5)", "--keep", "keep_within(hours=1)", "--steps", "10"), 2, "--step-seconds"),
        (("--save", "save_every(5)", "--keep", "keep_every(days=1)", "--steps", "100"), 2, "--step-seconds"),
        (("memory://none", "--save", "save_every(5)", "--steps", "10"), 4, "no run"),
    ],
)
def test_what_cannot_be_planned_is_said(resilio: Any, args: tuple[str, ...], code: int, says: str) -> None:
    found, out, err = resilio("plan", *args)
    assert (found, out) == (code, "")
    assert says in err


def test_a_time_policy_that_changes_nothing_needs_no_time(resilio: Any) -> None:
    assert resilio("plan", "--save", "save_every(5)", "--keep", "keep_every(days=1)", "--steps", "9")[0] == 0


def test_what_is_not_simulated_is_said(resilio: Any) -> None:
    args = ("--save", "save_every(5) | save_on_signal('SIGTERM')", "--steps", "20", "--json")
    notes = json.loads(resilio("plan", *args, "--keep", "keep_best(2, 'loss') | keep_last(1)")[1])["notes"]
    assert [note.partition(":")[0] for note in notes] == ["signals are not simulated", "metrics are not simulated"]
    assert "SIGTERM" in notes[0] and " loss," in notes[1]
    notes = json.loads(resilio("plan", *args, "--keep", "keep_best(2, 'loss')")[1])["notes"]
    assert "after 3 saves the keep policy has no reason" in notes[2]


def test_it_is_bounded_and_says_where_it_stopped(resilio: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("resilio.cli.simulate.SAVES_MAX", 100)
    monkeypatch.setattr("resilio.cli.simulate.LOOKS_MAX", 1000)
    for keep, at in (("keep_all()", 100), ("keep_last(1)", 100), ("keep_every(1)", 45)):
        code, out, _ = resilio("plan", "--save", "save_every(1)", "--keep", keep, "--steps", "5000")
        assert code == 3
        assert f"steps 1 to {at}: {at} saves" in out
        assert f"note: stopped after step {at}" in out
    assert resilio("plan", "--save", "save_every(50)", "--keep", "keep_last(1)", "--steps", "5000")[0] == 0


def test_ten_million_steps_ask_the_policy_once_each_and_report_progress() -> None:
    asked, told = [0], []

    class Counted(type(save_every(1))):  # type: ignore[misc]
        def reason(self, context: SaveContext) -> str | None:
            asked[0] += 1
            return super().reason(context)

    outcome = simulate(Counted(100_000), keep_last(1), 300_000, Start(), progress=lambda *at: told.append(at))
    assert (asked[0], len(told), len(outcome.saves)) == (300_000, 3, 3)
    assert STEPS_MAX // 500 < SAVES_MAX  # what people do fits


def test_names_are_those_that_the_next_generation_would_give() -> None:
    outcome = simulate(save_every(5), keep_all(), 5, Start())
    assert keys.stem(outcome.end[0].ref) == "000000005-g000001"
