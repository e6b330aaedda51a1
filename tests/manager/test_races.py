"""Several managers at one run: one goes on, the others are told by whom, and nothing acknowledged is lost.

Going back to an older step and on again is in `test_branches`; pauses at every operation, and answers lost at each, in
`records/test_protocol`; readers in `test_races_readers`.
"""

from __future__ import annotations

import os
import re
import signal
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from manager.race_jobs import beside, committed, folders, go_on, meet, run
from records.fake_store import manager, save

import resilio
from resilio import failpoints, keep_last
from resilio.errors import FencedError, NotFoundError, SaveError, TransientError
from resilio.records.catalog import discover
from resilio.records.protocol import RunWriter
from resilio.storage import LocalStorage
from resilio.testing.worlds import Killed, WorldError, run_world
from resilio.types import CheckpointRef

TIME = r"since \d{4}-\d\d-\d\d \d\d:\d\d:\d\d UTC"


def generations(path: Path) -> list[str]:
    return sorted(one.stem for one in path.glob("generations/*"))


# --- starts at once -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("saved_before", [0, 1])
@pytest.mark.parametrize("round_", range(5))
def test_of_16_starts_at_once_one_makes_the_generation_and_15_are_fenced(tmp_path, saved_before, round_):
    if saved_before:
        save(LocalStorage(tmp_path), manager(LocalStorage(tmp_path)), 1)
    writers = [manager(LocalStorage(tmp_path)) for _ in range(16)]
    start = threading.Barrier(len(writers))
    outcomes: list[Any] = []

    def first_save(writer: RunWriter) -> None:
        start.wait()
        try:
            outcomes.append(save(writer.storage, writer, 2))
        except Exception as error:
            outcomes.append(error)

    threads = [threading.Thread(target=first_save, args=(writer,)) for writer in writers]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    won = [ref for ref in outcomes if isinstance(ref, CheckpointRef)]
    fenced = [error for error in outcomes if isinstance(error, FencedError)]
    assert (len(won), len(fenced)) == (1, 15), outcomes
    assert len(generations(tmp_path)) == 1 + saved_before
    assert committed(tmp_path) == [1, 2][1 - saved_before :]
    assert discover(LocalStorage(tmp_path)).newest == won[0]
    told = rf"generation {won[0].generation} \(host {re.escape(socket.gethostname())}, process {os.getpid()}, {TIME}\)"
    for error in fenced:
        assert re.search(told, str(error)) and error.stored is False


STARTS = 10


def start_and_save(rank: int, world: int, path: Path) -> list[tuple[bool, str]]:
    """So many runs, at each of which all jobs start and save at once; whether this one was told that it is saved."""
    told = []
    for i in range(STARTS):
        state = {"x": 0}
        with run(f"file://{path}/{i}", state) as ckpt:
            ckpt.restore()
            state["x"] = 2
            meet(path / f"meet-{i}", rank, world)
            try:
                ckpt.save(2)
                told.append((True, ""))
            except FencedError as error:
                told.append((False, str(error)))
    return told


def test_of_4_jobs_started_at_once_one_saves_and_3_are_fenced_by_name(tmp_path):
    for i in range(0, STARTS, 2):
        go_on(f"file://{tmp_path}/{i}")
    results = run_world(start_and_save, 4, tmp_path, init=False)
    for i in range(STARTS):
        outcomes = [told[i] for told in results]
        assert sorted(won for won, _ in outcomes) == [False, False, False, True]
        for won, why in outcomes:
            assert won or re.search(
                rf"generation \d \(host {re.escape(socket.gethostname())}, process \d+, {TIME}\)", why
            )
        assert committed(tmp_path / str(i))[-1] == 2
        assert len(committed(tmp_path / str(i))) == len(generations(tmp_path / str(i))) == (1 if i % 2 else 2)
        assert go_on(f"file://{tmp_path}/{i}") == 3


def train(rank: int, world: int, path: Path, rounds: int) -> list[list[str]]:
    """Jobs started on one run by mistake, each of which saves until it is told to stop; what it was told is saved."""
    acknowledged = []
    for i in range(rounds):
        saved: list[str] = []
        meet(path / f"meet-{i}", rank, world)
        state = {"x": 0}
        with run(f"file://{path}/{i}", state) as ckpt:
            try:
                ckpt.restore()
                for state["x"] in range(ckpt.next_step, ckpt.next_step + 6):
                    saved.append(str(ckpt.save(state["x"]).result()))
            except FencedError:
                pass
        acknowledged.append(saved)
    return acknowledged


def test_of_two_jobs_started_by_mistake_what_either_was_told_is_saved_stays_on_the_lineage(tmp_path):
    """Nobody waits for anybody: they may restore, begin and save in any order. Both may end fenced; none is lost."""
    rounds = 6
    results = run_world(train, 2, tmp_path, rounds, init=False)
    for i in range(rounds):
        with run(f"file://{tmp_path}/{i}", {"x": 0}) as ckpt:
            lineage = [str(info.ref) for info in ckpt.checkpoints() if info.on_lineage]
            acknowledged = [ref for told in results for ref in told[i]]
            assert set(acknowledged) <= set(lineage), (i, acknowledged, lineage)
            report = ckpt.restore()
            assert report.passed_over == () and str(report.found.ref) == lineage[-1]


# --- between restore and first save ---------------------------------------------------------------------------------


@pytest.mark.parametrize("by", ["a job that still runs", "another start"])
def test_a_commit_between_restore_and_first_save_fences_before_anything_counts(tmp_path, by):
    url, state = f"file://{tmp_path}", {"x": 0}
    with run(url, {"x": 3}) as running, run(url, state) as late:
        running.restore()
        for step in (1, 2):
            running.save(step)
        late.restore()
        if by == "another start":
            with run(url, {"x": 0}) as other:
                other.restore()
                other.save(3)
        else:
            running.save(3)
        before = committed(tmp_path), generations(tmp_path)
        told = rf"generation {len(before[1])} \(host .*, process {os.getpid()}, {TIME}\)"
        with pytest.raises(FencedError, match=told) as caught:
            late.save(3)
        assert caught.value.stored is False
        assert (committed(tmp_path), generations(tmp_path)) == before
        assert before[0] == [1, 2, 3]
        assert late.restore().step == 3
        state["x"] = 4
        late.save(4)
    assert go_on(url) == 5


def dies(rank: int, world: int, path: Path, place: str) -> None:
    failpoints.arm(f"{place}=kill")
    go_on(f"file://{path}")


@pytest.mark.parametrize("place", ["generation.before_create", "generation.created", "save.before_commit"])
def test_after_a_crash_around_the_generation_the_next_start_goes_on(tmp_path, place):
    url = f"file://{tmp_path}"
    go_on(url, 2)
    with pytest.raises(WorldError) as died:
        run_world(dies, 1, tmp_path, place, init=False)
    assert isinstance(died.value.outcomes[0], Killed)
    made = 0 if place == "generation.before_create" else 1
    assert len(generations(tmp_path)) == 1 + made
    assert go_on(url, 2, keep=keep_last(3)) == 4
    branch = [f"00000000{step}-g00000{2 + made}" for step in (3, 4)]
    assert folders(tmp_path) == ["000000002-g000001", *branch]  # what they left is swept


def test_who_only_restores_fences_nobody(tmp_path):
    url = f"file://{tmp_path}"
    state = {"x": 1}
    with run(url, state, keep=keep_last(1)) as job:
        job.restore()
        job.save(1)
        for step in range(2, 6):
            debug = {"x": 0}
            with run(url, debug, keep=keep_last(1)) as other:
                other.restore()
                assert other.next_step == step and debug == {"x": step - 1}
                assert [info.step for info in other.checkpoints()] == [step - 1]
                other.explain()
            resilio.restore(url, {"state": debug})
            state["x"] = step
            job.save(step)
        assert generations(tmp_path) == ["000001"]
        assert committed(tmp_path) == [5]


# --- stopped in the middle of a save --------------------------------------------------------------------------------


def saves_twice(rank: int, world: int, path: Path, place: str, held: Path) -> tuple[list[int], str, dict[str, Any]]:
    failpoints.arm(f"{place}=hold:{held}#1")
    state, saved = {"x": 0}, []
    with run(f"file://{path}", state, keep=keep_last(1)) as ckpt:
        ckpt.restore()
        try:
            for state["x"] in (2, 3):
                ckpt.save(state["x"])
                saved.append(state["x"])
        except FencedError as error:
            return saved, str(error), error.facts
    raise AssertionError("nobody told it that it was replaced")


def stopped(pid: int) -> bool:
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "T"


# Where it is stopped -> the step that its replacement finds, and whether the stopped one's own step was stored, or None
# if it was even told that it is.
PLACES = {
    "save.data_open": (1, False),
    "save.before_manifest": (1, False),
    "generation.before_create": (1, False),
    "save.before_commit": (1, False),
    "save.committed": (2, True),
    "sweep.record_deleted": (2, None),
}


@pytest.mark.parametrize("place", PLACES)
def test_a_manager_stopped_in_a_save_and_replaced_harms_nothing_when_it_is_woken(tmp_path, place):
    path, held = tmp_path / "run", tmp_path / "held"
    url, (found, stored) = f"file://{path}", PLACES[place]
    go_on(url, 1)
    with beside(saves_twice, 1, path, place, held) as results:
        while not (held.exists() and held.read_text()):
            os.sched_yield()
        pid = int(held.read_text())
        os.kill(pid, signal.SIGSTOP)
        try:
            while not stopped(pid):
                os.sched_yield()
            held.unlink()
            with run(url, {"x": 0}, keep=keep_last(1)) as ckpt:
                assert ckpt.restore().step == found
                last = ckpt.next_step + 1
            assert go_on(url, 2, keep=keep_last(1)) == last
            assert committed(path) == ([last] if stored is None else [1, last])  # it still holds what it restored
            before = {one: one.read_bytes() for one in path.rglob("*") if one.is_file() and one.parent.name != "leases"}
        finally:
            os.kill(pid, signal.SIGCONT)
    ((saved, why, facts),) = results
    # It is told who replaced it, and what of its own step; the replacement's checkpoint is as it was.
    assert re.search(rf"generation \d \(host {re.escape(socket.gethostname())}, process {os.getpid()}, {TIME}\)", why)
    assert (facts["host"], facts["pid"]) == (socket.gethostname(), os.getpid())
    assert saved == ([2] if stored is None else [])
    assert facts["stored"] is bool(stored)
    assert {one: one.read_bytes() for one in before if one.exists()} == before
    with run(url, {"x": 0}) as ckpt:
        assert ckpt.restore().step == last and ckpt.verify(last) == []
    # What it left is collected by the next one that saves.
    assert go_on(url, keep=keep_last(1)) == last + 1
    assert len(folders(path)) == len(committed(path)) == 1


class CollectedMeanwhile(LocalStorage):
    """A store that has lost what is being written when it is to be published: another job's sweep was there."""

    def __init__(self, path: Path, meanwhile: Callable[[], Any]) -> None:
        super().__init__(path)
        self.meanwhile = meanwhile

    @contextmanager
    def writer(self, key: str, *, size_hint: int | None = None) -> Iterator[Any]:
        with super().writer(key, size_hint=size_hint) as writing:
            yield writing
            self.meanwhile()
            raise NotFoundError(f"cannot publish {key!r}: no such object", key=key)


@pytest.mark.parametrize("replaced", [True, False])
def test_a_write_that_fails_because_the_attempt_was_collected_is_no_fault_of_the_store(tmp_path, replaced):
    url = f"file://{tmp_path}"
    go_on(url)
    with run(CollectedMeanwhile(tmp_path, lambda: go_on(url) if replaced else None), {"x": 0}) as ckpt:
        ckpt.restore()
        with pytest.raises(SaveError, match="owns the run now" if replaced else "no such object") as caught:
            ckpt.save(2)
        assert isinstance(caught.value, FencedError) == replaced


# --- lost answers ---------------------------------------------------------------------------------------------------


class Deaf(LocalStorage):
    """A store whose creates take effect, and whose answers to the first `times` below `prefix` are lost."""

    def __init__(self, path: Path, prefix: str, times: int) -> None:
        super().__init__(path)
        self.prefix, self.left = prefix, times

    def put(self, key: str, data: Any, *, if_absent: bool = False) -> Any:
        try:
            return super().put(key, data, if_absent=if_absent)
        finally:
            if key.startswith(self.prefix) and self.left:
                self.left -= 1
                raise TransientError(f"{key}: connection reset")


@pytest.mark.parametrize("prefix", ["generations/", "commits/"])
@pytest.mark.parametrize("times", [1, 2])
def test_a_lost_answer_gives_exactly_one_commit(tmp_path, prefix, times):
    state = {"x": 1}
    with run(Deaf(tmp_path, prefix, times), state) as ckpt:
        ckpt.restore()
        for state["x"] in (1, 2):
            assert ckpt.save(state["x"]).result().step == state["x"]
    assert committed(tmp_path) == [1, 2]
    assert folders(tmp_path) == ["000000001-g000001", "000000002-g000001"]
    assert generations(tmp_path) == ["000001"]
    assert go_on(f"file://{tmp_path}") == 3
