"""When a save is due: tables of context and reason."""

from __future__ import annotations

import dataclasses
import pickle
import signal
from datetime import timedelta
from typing import Any

import pytest

from resilio.errors import ConfigError
from resilio.policies import SaveContext, SavePolicy, keep_last, save_at, save_every, save_on_signal

MINUTES_20, HOUR = frozenset({1200.0}), frozenset({3600.0})
TERM, USR1 = frozenset({"SIGTERM"}), frozenset({"SIGUSR1"})


@pytest.mark.parametrize(
    ("policy", "context", "reason"),
    [
        (save_every(500), SaveContext(500), "every 500 steps"),
        (save_every(500), SaveContext(499), None),
        (save_every(500), SaveContext(501, last_saved_step=0), None),
        (save_every(500), SaveContext(1000, last_saved_step=999), "every 500 steps"),
        (save_every(1), SaveContext(7), "every 1 step"),
        (save_every(500), SaveContext(7, times_due=MINUTES_20), None),
        (save_every(500), SaveContext(7, last=True), None),
        (save_every(minutes=20), SaveContext(7), None),
        (save_every(minutes=20), SaveContext(7, times_due=MINUTES_20), "every 20 minutes"),
        (save_every(minutes=20), SaveContext(7, times_due=HOUR), None),
        (save_every(hours=1), SaveContext(7, times_due=HOUR), "every 1 hour"),
        (save_every(500) | save_every(minutes=20), SaveContext(7), None),
        (save_every(500) | save_every(minutes=20), SaveContext(500), "every 500 steps"),
        (save_every(500) | save_every(minutes=20), SaveContext(7, times_due=MINUTES_20), "every 20 minutes"),
        (
            save_every(500) | save_every(minutes=20),
            SaveContext(500, times_due=MINUTES_20),
            "every 500 steps; every 20 minutes",
        ),
        (save_every(hours=1) | save_every(minutes=20), SaveContext(7, times_due=MINUTES_20), "every 20 minutes"),
        (
            save_every(hours=1) | save_every(minutes=20),
            SaveContext(7, times_due=MINUTES_20 | HOUR),
            "every 1 hour; every 20 minutes",
        ),
        (save_every(5) | save_every(5), SaveContext(5), "every 5 steps"),
        (save_at(10, 30), SaveContext(10), "at step 10"),
        (save_at(10, 30), SaveContext(30, last_saved_step=30), "at step 30"),
        (save_at(10, 30), SaveContext(20), None),
        (save_at(10, 30), SaveContext(31, last_saved_step=10), None),
        (save_at(0), SaveContext(0), "at step 0"),
        (save_on_signal("SIGTERM"), SaveContext(7), None),
        (save_on_signal("SIGTERM"), SaveContext(7, signalled=TERM), "signal SIGTERM"),
        (save_on_signal("SIGTERM"), SaveContext(7, signalled=USR1), None),
        (save_on_signal("SIGUSR1", "SIGTERM"), SaveContext(7, signalled=TERM | USR1), "signal SIGTERM, SIGUSR1"),
        (save_every(500) & save_every(minutes=20), SaveContext(500), None),
        (save_every(500) & save_every(minutes=20), SaveContext(7, times_due=MINUTES_20), None),
        (
            save_every(500) & save_every(minutes=20),
            SaveContext(500, times_due=MINUTES_20),
            "every 500 steps and every 20 minutes",
        ),
        # Each clock has its own flag: the hour that has not run out must not be taken for the 20 minutes that have.
        (save_every(hours=1) & save_every(minutes=20), SaveContext(7, times_due=MINUTES_20), None),
        (
            (save_every(hours=1) & save_every(2)) | save_every(minutes=20),
            SaveContext(2, times_due=HOUR),
            "every 1 hour and every 2 steps",
        ),
        (
            (save_every(hours=1) & save_every(2)) | save_every(minutes=20),
            SaveContext(2, times_due=MINUTES_20),
            "every 20 minutes",
        ),
        (save_every(2) & save_every(2), SaveContext(4), "every 2 steps"),
        (
            (save_every(2) | save_every(3)) & save_on_signal("SIGTERM"),
            SaveContext(6, signalled=TERM),
            "(every 2 steps; every 3 steps) and signal SIGTERM",
        ),
        (
            (save_every(2) | save_every(4)) & save_on_signal("SIGTERM"),
            SaveContext(6, signalled=TERM),
            "every 2 steps and signal SIGTERM",
        ),
    ],
)
def test_a_save_is_due_for_a_reason(policy: SavePolicy, context: SaveContext, reason: str | None) -> None:
    assert policy.reason(context) == reason


@pytest.mark.parametrize(
    ("policy", "clocks", "signals"),
    [
        (save_every(500), (), set()),
        (save_at(5) | save_every(700), (), set()),
        (save_every(minutes=20), (1200.0,), set()),
        (save_every(timedelta(seconds=90)), (90.0,), set()),
        (save_every(hours=1, minutes=30), (5400.0,), set()),
        (save_every(500) | save_every(minutes=20), (1200.0,), set()),
        (save_every(hours=1) | save_every(minutes=20) & save_every(minutes=60), (1200.0, 3600.0), set()),
        (save_on_signal("SIGTERM", "SIGUSR1"), (), {"SIGTERM", "SIGUSR1"}),
        (save_on_signal("SIGABRT"), (), {"SIGABRT"}),
        (
            save_on_signal("SIGTERM") | (save_on_signal("SIGINT") & save_every(seconds=5)),
            (5.0,),
            {"SIGTERM", "SIGINT"},
        ),
    ],
)
def test_a_policy_says_what_it_must_be_told(policy: SavePolicy, clocks: tuple[float, ...], signals: set[str]) -> None:
    """Each clock once, in one order on all ranks."""
    assert policy.clocks() == clocks
    assert policy.signals == signals


def test_a_signal_goes_by_the_name_it_is_reported_under() -> None:
    """SIGCLD is an old name of SIGCHLD; a handler learns the number, whose name is SIGCHLD."""
    assert save_on_signal("SIGCLD").signals == {signal.Signals(signal.SIGCLD).name}


def test_making_it_listens_to_nothing() -> None:
    before = signal.getsignal(signal.SIGUSR2)
    save_on_signal("SIGUSR2")
    assert signal.getsignal(signal.SIGUSR2) is before


@pytest.mark.parametrize(
    ("policy", "source"),
    [
        (save_every(500), "save_every(500)"),
        (save_every(500) | save_every(minutes=20), "save_every(500) | save_every(minutes=20)"),
        (save_every(1) | (save_every(2) | save_every(3)), "save_every(1) | save_every(2) | save_every(3)"),
        (save_every(seconds=120), "save_every(minutes=2)"),
        (save_every(hours=1.5), "save_every(minutes=90)"),
        (save_every(hours=24), "save_every(days=1)"),
        (save_at(30, 10, 30), "save_at(10, 30)"),
        (save_on_signal("SIGUSR1", "SIGTERM"), "save_on_signal('SIGTERM', 'SIGUSR1')"),
        (save_every(1) & save_every(2) | save_at(3), "save_every(1) & save_every(2) | save_at(3)"),
        (save_every(1) & (save_every(2) | save_at(3)), "save_every(1) & (save_every(2) | save_at(3))"),
        (save_every(1) & (save_every(2) & save_at(3)), "save_every(1) & save_every(2) & save_at(3)"),
        (save_every(seconds=0.25), "save_every(seconds=0.25)"),
        (save_every(timedelta(minutes=20)), "save_every(minutes=20)"),
    ],
)
def test_a_policy_prints_as_source_that_makes_its_equal(policy: SavePolicy, source: str) -> None:
    assert repr(policy) == source
    assert eval(source) == policy
    assert hash(eval(source)) == hash(policy)
    assert pickle.loads(pickle.dumps(policy)) == policy


def test_policies_are_frozen() -> None:
    with pytest.raises(dataclasses.FrozenInstanceError):
        save_every(500).steps = 1  # type: ignore[attr-defined]
    with pytest.raises(dataclasses.FrozenInstanceError):
        SaveContext(5).step = 6  # type: ignore[misc]


@pytest.mark.parametrize(
    ("args", "kwargs"),
    [
        ((), {}),
        ((0,), {}),
        ((-5,), {}),
        ((True,), {}),
        ((500.0,), {}),
        (("500",), {}),
        ((500,), {"minutes": 20}),
        ((timedelta(minutes=1),), {"minutes": 20}),
        ((timedelta(0),), {}),
        ((timedelta(seconds=-1),), {}),
        ((), {"minutes": 0}),
        ((), {"minutes": -1}),
        ((), {"minutes": True}),
        ((), {"hours": float("nan")}),
        ((), {"seconds": float("inf")}),
        ((), {"seconds": "5"}),
        ((), {"hours": 1, "minutes": -30}),
        ((), {"hours": 1e305, "days": 1e305}),
        ((), {"seconds": 10**400}),
    ],
)
def test_what_can_not_work_is_refused_at_construction(args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match="save_every"):
        save_every(*args, **kwargs)


@pytest.mark.parametrize("steps", [(), (-1,), (True,), (2.0,), ("3",), (None,), (1, 0.5), ([1, 2],)])
def test_save_at_wants_steps(steps: tuple[Any, ...]) -> None:
    with pytest.raises(ConfigError, match="save_at"):
        save_at(*steps)


@pytest.mark.parametrize(
    "names",
    [(), ("TERM",), ("sigterm",), ("SIGNOT",), (15,), (signal.SIGTERM,), (None,), ("SIGKILL",), ("SIGTERM", "SIGSEGV")],
)
def test_save_on_signal_wants_names_of_signals_that_can_be_heard(names: tuple[Any, ...]) -> None:
    with pytest.raises(ConfigError, match="save_on_signal"):
        save_on_signal(*names)


def test_families_do_not_mix() -> None:
    with pytest.raises(TypeError):
        save_every(5) | keep_last(3)  # type: ignore[operator]
    with pytest.raises(TypeError):
        save_every(5) | 7  # type: ignore[operator]
    with pytest.raises(TypeError):
        save_every(5) & keep_last(3)  # type: ignore[operator]


def test_a_policy_of_ones_own_joins_in() -> None:
    @dataclasses.dataclass(frozen=True)
    class Quiet(SavePolicy):
        """Due when nothing was saved for so long, but not before step 3."""

        seconds: float

        def clocks(self) -> tuple[float, ...]:
            return (self.seconds,)

        def reason(self, context: SaveContext) -> str | None:
            return "quiet" if self.seconds in context.times_due and context.step >= 3 else None

    policy = save_every(500) | Quiet(60.0) & save_every(minutes=20)
    assert policy.clocks() == (60.0, 1200.0)
    assert policy.reason(SaveContext(7, times_due=frozenset({60.0}))) is None
    assert policy.reason(SaveContext(7, times_due=frozenset(policy.clocks()))) == "quiet and every 20 minutes"
    assert not policy.signals
