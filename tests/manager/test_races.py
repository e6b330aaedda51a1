"""Several processes at one run: one goes on, the others are told, and nothing acknowledged is lost."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import resilio
from resilio import CheckpointManager, keep_last
from resilio.errors import AccessDeniedError, IntegrityError
from resilio.storage import LocalStorage


def run(url: Any, state: dict[str, Any], **options: Any) -> CheckpointManager:
    return CheckpointManager(url, {"state": state}, mode="sync", **options)


def go_on(url: Any, saves: int = 1, **options: Any) -> int:
    """A job that restores, saves so many times, and ends; the step of the last one."""
    state = {"x": 0}
    with run(url, state, **options) as ckpt:
        ckpt.restore()
        for state["x"] in range(ckpt.next_step, ckpt.next_step + saves):
            ckpt.save(state["x"])
        return state["x"]


def committed(path: Path) -> list[int]:
    return sorted(int(one.name[:9]) for one in path.glob("commits/*"))


# --- a sweep overtakes a restore ------------------------------------------------------------------------------------


class Overtaken(LocalStorage):
    """A store where something happens each time before an object with `part` in its key is written or read.

    Without `may_write` no lease can be taken, as by a reader who may only read.
    """

    def __init__(self, path: Path, part: str, meanwhile: Callable[[], Any], may_write: bool = True) -> None:
        super().__init__(path)
        self.part, self.meanwhile, self.may_write, self.times = part, meanwhile, may_write, 0

    def _pass(self, key: str) -> None:
        if self.part in key:
            self.times += 1
            self.meanwhile()

    def put(self, key: str, data: Any, *, if_absent: bool = False) -> Any:
        if not self.may_write:
            raise AccessDeniedError("read-only")
        self._pass(key)
        return super().put(key, data, if_absent=if_absent)

    def get(self, key: str) -> bytes:
        self._pass(key)
        return super().get(key)

    def read_into(self, key: str, ranges: Any) -> None:
        self._pass(key)
        super().read_into(key, ranges)


def with_an_old_pin(path: Path) -> None:
    """Steps 1 and 2; the first is kept whatever the policy."""
    go_on(f"file://{path}", 2)
    with run(f"file://{path}", {"x": 0}) as ckpt:
        ckpt.pin(1, because="an old one that outlives sweeps")


@pytest.mark.parametrize(
    ("part", "may_write"),
    [("leases/", True), ("manifest.json", False), ("manifest-0.json", False), (".metadata", False), ("__0_0.d", False)],
)
def test_a_restore_that_a_sweep_overtakes_takes_the_newest_not_an_older_one(tmp_path, part, may_write):
    with_an_old_pin(tmp_path)
    saved = []

    def once() -> None:
        if not saved:
            saved.append(None)
            saved[0] = go_on(f"file://{tmp_path}", keep=keep_last(1))

    state = {"x": 0}
    report = resilio.restore(Overtaken(tmp_path, part, once, may_write), {"state": state})
    assert (saved, committed(tmp_path)) == ([3], [1, 3])
    assert (report.step, state) == (3, {"x": 3})


def test_a_manager_goes_on_from_what_overtook_its_restore_and_fences_who_saved_it(tmp_path):
    with_an_old_pin(tmp_path)
    other_state = {"x": 3}
    other = run(f"file://{tmp_path}", other_state, keep=keep_last(1))
    other.restore()
    todo = [lambda: other.save(3)]
    with run(Overtaken(tmp_path, "leases/", lambda: todo.pop()() if todo else None), {"x": 0}) as ckpt:
        assert ckpt.restore().step == 3
        ckpt.save(4)  # it has seen step 3, so nothing is left behind
    with pytest.raises(resilio.errors.FencedError):
        other.save(4)
    other.close()


def test_a_restore_that_is_overtaken_again_and_again_ends(tmp_path):
    with_an_old_pin(tmp_path)
    store = Overtaken(tmp_path, "leases/", lambda: go_on(f"file://{tmp_path}", keep=keep_last(1)))
    state = {"x": 0}
    report = resilio.restore(store, {"state": state})
    assert 3 < store.times < 12
    assert report.step == 1 and len(report.passed_over) == 1, "an older one is taken only with a word"


def test_a_damaged_newest_is_passed_over_once_and_the_listing_is_not_begun_anew(tmp_path):
    go_on(f"file://{tmp_path}", 3)
    for step in (2, 3):
        next(tmp_path.glob(f"step-{step:09d}-*/manifest.json")).unlink()
    report = resilio.restore(f"file://{tmp_path}", {"state": {"x": 0}})
    assert report.step == 1
    assert ["step 3" in str(report.passed_over[0]), "step 2" in str(report.passed_over[1])] == [True, True]
    assert len(report.passed_over) == 2
    with pytest.raises(IntegrityError, match="was just deleted"):
        resilio.restore(f"file://{tmp_path}", {"state": {"x": 0}}, which=2)
