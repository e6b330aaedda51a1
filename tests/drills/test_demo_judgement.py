"""The demo's closing judgement: it passes what was promised, and each broken promise fails it."""

from __future__ import annotations

import copy
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from resilio_drills.data import GlobalSampler, corpus, share_of, windows
from resilio_drills.demo import SIZES, DemoError, empty, judge

Lines = list[dict[str, Any]]


def life(first: int, last: int, world: int, skip: int = 0) -> Lines:
    """What a life would write down."""
    sampler = GlobalSampler(len(windows(corpus(SIZES.corpus_bytes), SIZES.block_size)), SIZES.seed)
    sampler.next_batch((first - 1) * SIZES.global_batch + skip)
    lines = []
    for step in range(first, last + 1):
        batch = sampler.next_batch(SIZES.global_batch)
        for rank in range(world):
            ids = [i for p in share_of(batch, rank, world, 6) for i in p.ids[: p.n_real]]
            lines.append({"rank": rank, "step": step, "ids": ids, "loss": 5.0 - step / 40})
    return lines


FIRST, SECOND = life(1, 43, 2), life(31, SIZES.steps, 1)


def judged(first: Lines = FIRST, second: Lines = SECOND, killed_at: int = 43, committed: int = 30) -> str:
    return judge(first, second, killed_at, committed)


def test_two_lives_that_make_one_whole_run_pass() -> None:
    line = judged()
    assert "killed at step 43 · resumed from step 30 · ranks 2 → 1" in line
    assert line.endswith("samples lost 0, repeated 0")


def changed(lines: Lines, change: Callable[[Lines], None]) -> Lines:
    lines = copy.deepcopy(lines)
    change(lines)
    return lines


@pytest.mark.parametrize(
    ("broken", "says"),
    [
        ({"second": life(31, SIZES.steps, 1, skip=1)}, "no sample lost"),  # a loader that is off by one
        ({"second": life(32, SIZES.steps, 1)}, "resumed from step 30"),  # a step left out
        ({"second": changed(SECOND, lambda lines: lines[9]["ids"].pop())}, "no sample lost"),
        ({"second": changed(SECOND, lambda lines: lines[9]["ids"].append(0))}, "no sample repeated"),
        ({"first": changed(FIRST, lambda lines: lines[9]["ids"].append(7))}, "no sample repeated"),
        ({"second": life(41, SIZES.steps, 1)}, "resumed from step 30"),  # from a save that was never committed
        ({"second": life(1, SIZES.steps, 1)}, "resumed from step 30"),  # a silent fresh start
        ({"second": life(31, SIZES.steps, 2)}, "1 after"),
        ({"killed_at": 30}, "later step"),
        ({"second": changed(SECOND, lambda lines: lines[2].update(loss=4.0))}, "losses of both lives agree"),
        ({"second": changed(SECOND, lambda lines: lines[-1].update(loss=5.0))}, "the loss fell"),
        ({"second": []}, "trained on nothing"),
    ],
)
def test_each_broken_promise_fails_it(broken: dict[str, Any], says: str) -> None:
    with pytest.raises(DemoError, match=says):
        judged(**broken)


def test_it_empties_only_its_own_folder(tmp_path: Path) -> None:
    mine, theirs = tmp_path / "mine", tmp_path / "theirs"
    empty(mine)
    (mine / "old").touch()
    empty(mine)
    assert not (mine / "old").exists()
    theirs.mkdir()
    (theirs / "thesis.tex").touch()
    with pytest.raises(DemoError, match="did not make"):
        empty(theirs)
    assert (theirs / "thesis.tex").exists()


@pytest.mark.full
def test_the_demo_keeps_its_promises(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "resilio_drills.demo", "--dir", str(tmp_path / "demo")],
        capture_output=True,
        text=True,
        timeout=290,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "resumed from step 30 · ranks 2 → 1" in done.stdout
