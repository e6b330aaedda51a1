"""Each invariant can be broken: a state in which it is, and only what must hold of a good one holds."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import pytest

from resilio.clock import FakeClock
from resilio.drill.crash.invariants import INVARIANTS, Judge
from resilio.drill.crash.log import Known, Log
from resilio.drill.crash.objects import ObjectStates
from resilio.drill.crash.recorder import RecordingStorage
from resilio.drill.crash.scenarios import SCENARIOS, Stage
from resilio.drill.crash.states import Found, ModelStorage, State
from resilio.records.holds import pin
from resilio.types import CheckpointRef

NEWEST = CheckpointRef(1, 3)
PINNED = CheckpointRef(1, 1)


@dataclass
class End:
    """The end of a scenario: two checkpoints, the first of which is pinned."""

    state: State
    known: Known
    truth: dict[str, dict[str, bytes]]

    def judge(self) -> dict[str, str]:
        clock = FakeClock()
        broken = Judge(self.truth)(ModelStorage(self.state, clock), self.known, clock)
        return dict(broken)

    def folder(self, ref: CheckpointRef) -> str:
        name = f"step-{ref.step:09d}-g{ref.generation:06d}"
        return next(key for key in self.state.objects if key.startswith(name)).partition("/")[0]

    def without(self, *keys: str) -> None:
        objects = {key: data for key, data in self.state.objects.items() if key not in keys}
        assert len(objects) == len(self.state.objects) - len(keys)
        self.state = replace(self.state, objects=objects)

    def having(self, key: str, data: bytes) -> None:
        self.state = replace(self.state, objects={**self.state.objects, key: data})


@pytest.fixture
def end() -> End:
    log = Log()
    storage = RecordingStorage(ModelStorage(State({}), FakeClock()), log)

    life = Stage(storage, storage, log).job(2)
    for step in (1, 2, 3):
        ref = life.save(step)
        if step == 1:
            pin(storage, ref, "test")
            log.pinned(ref)
    states: list[Found] = [*ObjectStates(log.entries, 0, 2)]
    return End(states[-1].state, states[-1].known, log.truth)


def test_a_good_state_is_good(end: End) -> None:
    assert end.judge() == {}
    assert end.known.newest == NEWEST
    assert end.known.pinned == {PINNED}


def lose_the_record(end: End) -> None:
    end.without("commits/000000002-g000001.json")


def lose_the_newest_record(end: End) -> None:
    end.without("commits/000000003-g000001.json")


def lose_the_manifest(end: End) -> None:
    end.without(f"{end.folder(NEWEST)}/manifest.json")


def lose_data(end: End) -> None:
    end.without(f"{end.folder(CheckpointRef(1, 2))}/__1_0.distcp")


def flip_data(end: End) -> None:
    end.having(f"{end.folder(NEWEST)}/__1_0.distcp", bytes(80))


def mean_something_else(end: End) -> None:
    end.truth[end.folder(NEWEST)]["__0_0.distcp"] = b"what rank 0 meant"


def lose_the_pinned_manifest(end: End) -> None:
    end.without(f"{end.folder(PINNED)}/manifest.json", "commits/000000001-g000001.json")


def lose_the_generation(end: End) -> None:
    end.without("generations/000001.json")


def tear_the_run_record(end: End) -> None:
    end.having("resilio.json", b"")


def a_leftover_that_no_sweep_removes(end: End) -> None:
    end.having("step-000000009-g000077-7f3a/__0_0.distcp", b"of a generation that is yet to come")


@pytest.mark.parametrize(
    ("harm", "invariants"),
    [
        (lose_the_record, {"acknowledged"}),
        (lose_the_newest_record, {"acknowledged", "chosen"}),
        (lose_the_manifest, {"order", "acknowledged", "chosen"}),
        (lose_data, {"whole", "acknowledged"}),
        (flip_data, {"whole"}),
        (mean_something_else, {"bytes"}),
        (lose_the_pinned_manifest, {"pinned"}),
        (lose_the_generation, {"known-state"}),
        (tear_the_run_record, {"repair"}),
        (a_leftover_that_no_sweep_removes, {"repair"}),
    ],
)
def test_harm_is_found(end: End, harm: Callable[[End], None], invariants: set[str]) -> None:
    harm(end)
    assert invariants <= end.judge().keys()


def test_a_fresh_start_over_checkpoints_is_not_good(end: End) -> None:
    end.state = State({})
    assert {"chosen", "acknowledged", "pinned"} <= end.judge().keys()


def test_one_nobody_reported_must_not_be_chosen(end: End) -> None:
    end.known = end.known._replace(newest=CheckpointRef(1, 2))
    assert "chosen" in end.judge()
    end.known = end.known._replace(flying=frozenset({NEWEST}))
    assert end.judge() == {}


def test_every_scenario_ends_and_says_what_may_be_deleted() -> None:
    for play in SCENARIOS.values():
        log = Log()
        storage = RecordingStorage(ModelStorage(State({}), FakeClock()), log)
        play(Stage(storage, storage, log))
        assert log.broken == []
        assert log.known.newest in log.known.acknowledged
        assert not log.known.flying
        assert play.__doc__
    assert all(INVARIANTS.values())
