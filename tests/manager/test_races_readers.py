"""Restores while another job saves and sweeps: the newest is taken, and what is being read stays whole."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from manager.race_jobs import beside, committed, folders, go_on, meet, run

import resilio
from resilio import keep_last
from resilio.errors import AccessDeniedError, FencedError, IntegrityError
from resilio.storage import LocalStorage


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
    with pytest.raises(FencedError):
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


# --- real processes -------------------------------------------------------------------------------------------------


def reads_slowly(rank: int, world: int, path: Path, place: Path) -> tuple[int | None, dict[str, int]]:
    """A reader that stands before the first byte of data, its lease in hand, until the other has swept."""
    state = {"x": 0}
    todo = [lambda: meet(place / "reading", "reader", 2), lambda: meet(place / "swept", "reader", 2)]

    def once() -> None:
        while todo:
            todo.pop(0)()

    return resilio.restore(Overtaken(path, "__0_0.distcp", once), {"state": state}).step, state


def test_what_a_reader_in_another_process_holds_is_not_swept_and_goes_when_it_is_done(tmp_path):
    path, place = tmp_path / "run", tmp_path / "place"
    assert go_on(f"file://{path}", 3, keep=keep_last(1)) == 3
    with run(f"file://{path}", {"x": 0}, keep=keep_last(1)) as ckpt:
        ckpt.restore()
        with beside(reads_slowly, 1, path, place) as results:
            meet(place / "reading", "writer", 2)
            ckpt.save(4)
            ckpt.save(5)
            assert committed(path) == [3, 5]
            (fate,) = [fate for fate in ckpt.explain().checkpoints if fate.ref.step == 3]
            assert (fate.goes, "leased" in fate.why) == (False, True)
            meet(place / "swept", "writer", 2)
        assert results == [(3, {"x": 3})]
        ckpt.save(6)
    assert committed(path) == [6]
    assert folders(path) == ["000000006-g000002"]


SAVES, READERS = 25, 2


def save_or_read(rank: int, world: int, path: Path, place: Path) -> list[tuple[int, int | None, int]]:
    """Rank 0 saves and keeps the last one; the others restore the newest again and again, for as long as it does."""
    url, done = f"file://{path}", place / "done"
    meet(place, rank, world)
    if rank == 0:
        state = {"x": 0}
        with run(url, state, keep=keep_last(1)) as ckpt:
            ckpt.restore()
            for state["x"] in range(2, 2 + SAVES):
                ckpt.save(state["x"])
        done.touch()
        return []
    seen = []
    while not done.exists():
        before, state = max(committed(path)), {"x": 0}
        seen.append((before, resilio.restore(url, {"state": state}).step, state["x"]))
    return seen


def test_readers_that_race_with_saves_and_sweeps_always_get_the_newest_whole(tmp_path):
    path, place = tmp_path / "run", tmp_path / "place"
    go_on(f"file://{path}", 1)
    with beside(save_or_read, 1 + READERS, path, place) as results:
        pass
    reads = [read for seen in results for read in seen]
    assert len(reads) > 2 * READERS
    for before, step, x in reads:
        assert step is not None and step >= before
        assert x == step
    assert go_on(f"file://{path}", keep=keep_last(1)) == 2 + SAVES
    assert committed(path) == [2 + SAVES]
