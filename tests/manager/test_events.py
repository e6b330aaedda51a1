"""What a manager tells its plugins: of each thing that happened, once, in order, from rank 0."""

from __future__ import annotations

import gc
import logging
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch

import resilio
from resilio import CheckpointManager, TrainingState, failpoints, hookimpl, keep_last
from resilio.clock import FakeClock
from resilio.errors import CaptureError, ConfigError, FencedError, MismatchError, NoCheckpointError, SaveError
from resilio.events import Event, Restored, RestoreFailed, Saved, SaveFailed, SaveStarted, Swept, Verified
from resilio.storage import LocalStorage
from resilio.testing.worlds import run_world
from resilio.types import CheckpointRef

MODES = pytest.mark.parametrize("mode", ["sync", "async"])


@pytest.fixture(autouse=True)
def _disarmed():
    yield
    failpoints.disarm()


@dataclass
class Ears:
    """Keeps what it hears, and does what it was told to when it hears it."""

    heard: list[Any] = field(default_factory=list)
    then: Any = None

    @hookimpl
    def resilio_on_event(self, event: Event) -> None:
        self.heard.append(event)
        if self.then is not None:
            self.then(event)

    @property
    def kinds(self) -> list[str]:
        return [type(event).__name__ for event in self.heard]

    def only(self, kind: type[Event]) -> Any:
        (found,) = (event for event in self.heard if type(event) is kind)
        return found


def trains(rank: int, world: int, url: str, mode: Any) -> list[Any]:
    ears = Ears()
    state = TrainingState(n={"x": 0}, rng=False)
    clock = FakeClock(1_700_000_000.0)
    with CheckpointManager(url, state, mode=mode, keep=keep_last(1), plugins=[ears], clock=clock) as ckpt:
        ckpt.restore()
        for step in (1, 2, 3):
            ckpt.save(step)
        handle = ckpt.save(3)
        handle.result()
        ckpt.verify(3)
        sizes = [info.size_bytes for info in ckpt.checkpoints()]
        with pytest.raises(NoCheckpointError):
            ckpt.restore(99)
        ckpt.restore()
    return [ears.heard, sizes[-1]]


@pytest.mark.parametrize("world", [1, 2])
@MODES
def test_a_whole_run_is_told_in_order_and_by_rank_0_alone(tmp_path, mode, world):
    url = f"file://{tmp_path}"
    (heard, size_bytes), *others = run_world(trains, world, url, mode)
    assert [other[0] for other in others] == [[]] * (world - 1)

    def happened(kind: Any, **fields: Any) -> Any:
        return kind(url=url, time_s=1_700_000_000.0, **fields)

    def saved(step: int) -> Any:
        reference = CheckpointRef(1, step)
        size = next(event.size_bytes for event in heard if isinstance(event, Saved) and event.ref == reference)
        assert size > 0
        held = {"seconds": 0.0, "held_s": 0.0}  # the clock stands still
        return happened(Saved, ref=reference, world=world, size_bytes=size, reason="asked for", non_finite=0, **held)

    def restored(step: int | None) -> Any:
        ref = CheckpointRef(1, step) if step else None
        return happened(Restored, ref=ref, saved_world=world if step else None, world=world, read_bytes=0, seconds=0.0)

    started = {step: happened(SaveStarted, step=step, world=world, reason="asked for") for step in (1, 2, 3)}
    error = next(event for event in heard if isinstance(event, RestoreFailed))
    assert "no checkpoint of step 99" in error.message
    assert heard == [
        restored(None),
        *(started[1], saved(1)),
        *(started[2], saved(2), happened(Swept, deleted=(CheckpointRef(1, 1),), leftovers=0)),
        *(started[3], saved(3), happened(Swept, deleted=(CheckpointRef(1, 2),), leftovers=0)),
        happened(Verified, ref=CheckpointRef(1, 3)),
        happened(RestoreFailed, which="99", error="NoCheckpointError", message=error.message),
        restored(3),
    ]
    assert saved(3).size_bytes == size_bytes


@MODES
@pytest.mark.parametrize(
    "place", ["save.data_open", "save.before_metadata", "save.before_manifest", "save.before_commit"]
)
def test_a_save_that_fails_is_told_once_and_the_next_one_as_ever(tmp_path, mode, place):
    ears = Ears()
    with CheckpointManager(f"file://{tmp_path}", {"n": {"x": 1}}, mode=mode, plugins=[ears]) as ckpt:
        ckpt.restore()
        failpoints.arm(f"{place}=enospc")
        with pytest.raises(SaveError):
            ckpt.save(1)
            ckpt.save(2)
        failpoints.disarm()
        ckpt.save(3)
    assert ears.kinds == ["Restored", "SaveStarted", "SaveFailed", "SaveStarted", "Saved"]
    failed = ears.only(SaveFailed)
    assert (failed.step, failed.reason) == (1, "asked for")
    assert failed.error in ("OutOfSpaceError", "OSError") and "No space left" in failed.message


def fails_on_rank_1(rank: int, world: int, url: str, mode: Any) -> list[str]:
    ears = Ears()
    with CheckpointManager(url, {"n": {"x": 1}}, mode=mode, plugins=[ears]) as ckpt:
        ckpt.restore()
        failpoints.arm("save.data_open=enospc@1")
        with pytest.raises(SaveError):
            ckpt.save(1)
            ckpt.save(2)
        with pytest.raises(CaptureError):
            if rank == 1:
                ckpt._state.capture = _raises  # type: ignore[method-assign]
            ckpt.save(3)
    return ears.kinds


def _raises(*args: Any, **kwargs: Any) -> Any:
    raise CaptureError("cannot be saved")


@MODES
def test_rank_0_tells_of_what_failed_on_another_rank(tmp_path, mode):
    told, other = run_world(fails_on_rank_1, 2, f"file://{tmp_path}", mode)
    assert told == ["Restored", "SaveStarted", "SaveFailed", "SaveFailed"]
    assert other == []


class Full(LocalStorage):
    """Has no room."""

    def free_bytes(self) -> int:
        return 0


def test_what_fails_before_it_began_is_told_without_a_beginning(tmp_path):
    ears = Ears()
    with CheckpointManager(Full(tmp_path), {"n": {"x": 1}}, plugins=[ears]) as ckpt:
        ckpt.restore()
        with pytest.raises(SaveError, match="no room"):
            ckpt.save(1)
    assert ears.kinds == ["Restored", "SaveFailed"]
    assert (ears.only(SaveFailed).step, ears.only(SaveFailed).error) == (1, "OutOfSpaceError")
    ears = Ears()
    ckpt = CheckpointManager(f"file://{tmp_path}", {"n": {"x": object()}}, plugins=[ears])
    with ckpt, pytest.raises(CaptureError):
        ckpt.save(1)
    assert ears.only(SaveFailed).error == "CaptureError"


@MODES
def test_a_fenced_save_is_told_as_failed(tmp_path, mode):
    ears, url = Ears(), f"file://{tmp_path}"
    first = CheckpointManager(url, {"n": {"x": 1}}, mode=mode, plugins=[ears])
    first.restore()
    first.save(1).result()
    with CheckpointManager(url, {"n": {"x": 2}}, fresh=True) as second:
        second.save(1)
    with pytest.raises(FencedError):
        first.save(2)
        first.close()
    first.close()
    assert ears.kinds[-1] == "SaveFailed" and ears.heard[-1].error == "FencedError"
    assert ears.kinds.count("SaveFailed") == 1


def test_a_ctrl_c_in_a_save_ends_it_for_those_who_heard_it_begin(tmp_path):
    def interrupt(event: Event) -> None:
        if isinstance(event, SaveStarted):
            raise KeyboardInterrupt

    ears, url = Ears(), f"file://{tmp_path}"
    with CheckpointManager(url, {"n": {"x": 1}}, mode="sync", plugins=[ears, Ears(then=interrupt)]) as ckpt:
        ckpt.restore()
        with pytest.raises(KeyboardInterrupt):
            ckpt.save(1)
    assert ears.kinds == ["Restored", "SaveStarted", "SaveFailed"]
    assert ears.only(SaveFailed).error == "KeyboardInterrupt"


@pytest.mark.parametrize("how", ["exception", "gone"])
def test_a_failure_that_nobody_settles_is_told_all_the_same(tmp_path, how):
    ears = Ears()
    failpoints.arm("save.before_commit=raise")
    ckpt = CheckpointManager(f"file://{tmp_path}", {"n": {"x": 1}}, mode="async", plugins=[ears])
    ckpt.restore()
    handle = ckpt.save(1)
    if how == "exception":
        with pytest.raises(ZeroDivisionError), ckpt:
            raise ZeroDivisionError
    else:
        assert handle.exception() is not None
        del ckpt
        gc.collect()
    assert ears.kinds == ["Restored", "SaveStarted", "SaveFailed"]


def test_a_save_ends_once(tmp_path):
    """As where another rank is lost after the commit: this one is a checkpoint, whatever comes then."""
    ears = Ears()
    with CheckpointManager(f"file://{tmp_path}", {"n": {"x": 1}}, mode="sync", plugins=[ears]) as ckpt:
        ckpt.restore()
        ckpt.save(1)
        job = ckpt._saves._job
        assert job is not None
        job.tell_failed(SaveError("late"))
    assert ears.kinds == ["Restored", "SaveStarted", "Saved"]


def test_how_long_the_loop_was_held_is_not_how_long_the_save_took(tmp_path):
    """2 s while it began; 30 s in the background; 4 s while the end waited for it."""
    clock, hold = FakeClock(), tmp_path / "hold"

    def begin(event: Event) -> None:
        if isinstance(event, SaveStarted):
            clock.advance(2)

    ears = Ears(then=begin)
    failpoints.arm(f"save.data_open=hold:{hold}")
    state = {"n": {"x": 1}}
    with CheckpointManager(f"file://{tmp_path}/run", state, mode="async", plugins=[ears], clock=clock) as ckpt:
        ckpt.restore()
        handle = ckpt.save(1)
        while not hold.exists():
            pass
        clock.advance(30)
        wait = handle.exception

        def waits(timeout_s: float | None = None) -> BaseException | None:
            if hold.exists():
                clock.advance(4)
                hold.unlink()
            return wait(timeout_s)

        handle.exception = waits  # type: ignore[method-assign]
    assert (ears.only(Saved).seconds, ears.only(Saved).held_s) == (36.0, 6.0)
    failpoints.disarm()
    ears = Ears(then=begin)
    with CheckpointManager(f"file://{tmp_path}/run", state, mode="sync", plugins=[ears], clock=clock) as ckpt:
        ckpt.restore()
        ckpt.save(2)
    assert (ears.only(Saved).seconds, ears.only(Saved).held_s) == (2.0, 2.0)


def test_a_restore_tells_what_it_passed_over_read_and_could_not(tmp_path):
    url, ears = f"file://{tmp_path}", Ears()

    def of(size: int, name: str = "n") -> TrainingState:
        return TrainingState(rng=False, **{name: torch.ones(size)})

    with CheckpointManager(url, of(100), mode="sync") as ckpt:
        ckpt.restore()
        ckpt.save(1)
        ckpt.save(2)
    for path in tmp_path.glob("step-000000002-*/manifest.json"):
        path.unlink()
    with CheckpointManager(url, of(100), plugins=[ears]) as ckpt:
        report = ckpt.restore()
        assert ears.only(Restored).ref.step == 1
        assert ears.only(Restored).passed_over == report.passed_over != ()
        assert ears.only(Restored).read_bytes == report.read_bytes == 400
    ears = Ears()
    with CheckpointManager(url, of(100, "other"), plugins=[ears]) as ckpt:
        with pytest.raises(MismatchError):
            ckpt.restore()
        assert ears.kinds == ["RestoreFailed"]
        assert (ears.heard[0].which, ears.heard[0].error) == ("newest", "MismatchError")
    ears = Ears()
    with CheckpointManager(url, of(100), fresh=True, plugins=[ears]) as ckpt:
        ckpt.restore()
        assert ears.kinds == ["Restored"] and ears.heard[0].ref is None
    assert resilio.restore(url, of(100)).step == 1
    assert len(ears.heard) == 1


def test_a_sweep_tells_of_leftovers_and_of_what_failed(tmp_path):
    url, ears = f"file://{tmp_path}", Ears()
    with CheckpointManager(url, {"n": {"x": 1}}, mode="sync") as ckpt:
        ckpt.restore()
        ckpt.save(1)
    for path in tmp_path.glob("commits/*"):
        path.unlink()
    keep = keep_last(1)
    with CheckpointManager(url, {"n": {"x": 1}}, mode="sync", keep=keep, plugins=[ears]) as ckpt:
        ckpt.restore()
        ckpt.save(2)
        assert (ears.only(Swept).deleted, ears.only(Swept).leftovers, ears.only(Swept).failed) == ((), 1, ())
        ears.heard.clear()
        ckpt._committer.keep_reasons = _raises  # type: ignore[method-assign]
        ckpt.save(3)
        assert ears.only(Swept).failed == ("CaptureError: cannot be saved",)


@MODES
def test_a_hook_may_ask_the_manager_and_must_not_save(tmp_path, mode):
    asked: list[Any] = []

    def ask(event: Event) -> None:
        if not isinstance(event, Saved):
            return
        asked.append([info.step for info in ckpt.checkpoints()])
        asked.append([fate.ref.step for fate in ckpt.explain().checkpoints])
        asked.append(ckpt.verify(event.ref))
        ckpt.pin(event.ref.step, because="it is good")
        for forbidden in (lambda: ckpt.save(9), lambda: ckpt.step(9), ckpt.restore, ckpt.close):
            with pytest.raises(ConfigError, match=r"a plugin's hook called step, save, restore or close"):
                forbidden()  # type: ignore[operator]
        asked.append("refused")

    ears = Ears(then=ask)
    with CheckpointManager(f"file://{tmp_path}", {"n": {"x": 1}}, mode=mode, plugins=[ears]) as ckpt:
        ckpt.restore()
        ckpt.save(1)
        ckpt.save(2)
    assert asked == [[1], [1], [], "refused", [1, 2], [1, 2], [], "refused"]
    assert ears.kinds == ["Restored", "SaveStarted", "Saved", "Verified", "SaveStarted", "Saved", "Verified"]


@MODES
def test_an_observer_that_always_raises_changes_nothing(tmp_path, mode, caplog):
    def fail(event: Event) -> None:
        raise SystemExit("broken")

    caplog.set_level(logging.WARNING, "resilio")
    state = {"n": {"x": 1}}
    with CheckpointManager(
        f"file://{tmp_path}", state, mode=mode, keep=keep_last(1), plugins=[Ears(then=fail)]
    ) as ckpt:
        ckpt.restore()
        for step in range(1, 5):
            ckpt.save(step).result()
        ckpt.verify(4)
    assert [path.name for path in Path(tmp_path).glob("commits/*")] == ["000000004-g000001.json"]
    told = [record.getMessage().split("(")[1].split(")")[0] for record in caplog.records]
    assert told == ["Restored", "SaveStarted", "Saved", "Swept", "Verified"]


def test_two_managers_do_not_hear_each_other(tmp_path):
    one, two = Ears(), Ears()
    first = CheckpointManager(f"file://{tmp_path}/1", {"n": {"x": 1}}, plugins=[one])
    second = CheckpointManager(f"file://{tmp_path}/2", {"n": {"x": 1}}, plugins=[two])
    with first, second:
        first.restore()
        second.restore()
        second.save(1)
    assert one.kinds == ["Restored"] and two.kinds == ["Restored", "SaveStarted", "Saved"]
    assert {event.url for event in one.heard + two.heard} == {f"file://{tmp_path}/{n}" for n in (1, 2)}
