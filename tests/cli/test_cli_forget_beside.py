"""`resilio forget` beside a job, in a process of its own, that saves and sweeps by a policy of its own meanwhile."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from manager.race_jobs import beside, committed, go_on, run

from resilio import keep_every, keep_last

ROUNDS = 4  # of forget that found something to delete, while the job saves
SAVES = 25  # at the least


def job(rank: int, world: int, url: str, signs: Path) -> int:
    """Save until forget has come by often enough; the step of the last save that was acknowledged."""
    state = {"x": 0}
    with run(url, state, keep=keep_every(10) | keep_last(4)) as ckpt:
        ckpt.restore()
        while state["x"] < SAVES or len(list(signs.iterdir())) < ROUNDS:
            state["x"] += 1
            ckpt.save(state["x"])
            assert ckpt.checkpoints()[-1].step == state["x"]  # what was acknowledged is there
    return state["x"]


def test_what_both_policies_keep_and_the_newest_are_there_and_the_job_goes_on(resilio: Any, tmp_path: Path) -> None:
    folder, signs = tmp_path / "run", tmp_path / "signs"
    signs.mkdir()
    go_on(folder)  # so that there is something to forget
    rounds = 0
    with beside(job, 1, str(folder), signs) as ended:
        while not ended and rounds < 2000:
            code, out, err = resilio("forget", str(folder), "--keep", "keep_every(5) | keep_last(2)", "--yes")
            rounds += 1
            assert code in (0, 3), err
            assert "NOT DONE" not in out or "is newer" in out  # only before the job's own first commit
            if "\ndeleted 0 checkpoints" not in out:
                (signs / str(rounds)).touch()
    (last,) = ended
    assert len(list(signs.iterdir())) >= ROUNDS
    kept = committed(folder)
    assert set(range(10, last + 1, 10)) | {last - 1, last} <= set(kept) < set(range(1, last + 1))
    assert resilio("verify", str(folder), "--all")[0] == 0
    assert go_on(folder) == last + 1
