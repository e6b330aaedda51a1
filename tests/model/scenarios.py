"""Small worlds that together hold every race the protocol is to stand: who runs, and what may go wrong."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

from model.explorer import Explored, System, explore
from model.processes import Pinner, Process, Reader, broken_among, broken_to
from model.protocol_model import Manager
from model.rules import Rules
from model.run_store import Attempt, Commit, Generation, Ref, RunStore, apply, broken_promise, happen, show

__all__ = ["GAPS", "SCENARIOS", "Scenario", "check"]

NEWEST = ("restore", "newest")
OLD = Ref(1, 1)


@dataclass(frozen=True)
class Scenario:
    """A store at first, with its bounds on faults, and each process, made anew for each search."""

    store: RunStore
    processes: tuple[Callable[[Rules], Process], ...]


def check(scenario: Scenario, without: frozenset[str] = frozenset(), limit: int = 1_000_000) -> Explored:
    """Explore `scenario` by a protocol without these rules."""
    rules = Rules(without)
    return explore(
        System(
            store=scenario.store,
            actors=tuple(partial(make, rules) for make in scenario.processes),
            apply=apply,
            happen=happen,
            check_store=broken_promise,
            check_view=broken_to,
            check_together=broken_among,
            show=show,
        ),
        limit,
    )


def _manager(
    name: str, *script: tuple[str, object], keep: str = "newest", sweeps: bool = True
) -> Callable[[Rules], Process]:
    return lambda rules: Manager(name, rules, *script, keep=keep, sweeps=sweeps)


def _reader(name: str, which: Ref | str = "newest") -> Callable[[Rules], Process]:
    return lambda rules: Reader(name, rules, which)


def _pinner(name: str, ref: Ref) -> Callable[[Rules], Process]:
    return lambda rules: Pinner(name, rules, ref)


def _run(*steps: int, **bounds: int) -> RunStore:
    """A run with these checkpoints, all of generation 1, whose manager has ended; bounds are fields of `RunStore`."""
    attempts = [Attempt(Ref(1, step), "past", number) for number, step in enumerate(steps)]
    refs = frozenset(one.ref for one in attempts)
    return RunStore(
        generations=frozenset([Generation(1, "past", None, (), frozenset())] if steps else []),
        commits=frozenset(Commit(one.ref, one, ("past", 1)) for one in attempts),
        manifests=frozenset(attempts),
        data=frozenset(attempts),
        acknowledged=refs,
        landed=refs,
        **bounds,  # type: ignore[arg-type]
    )


SCENARIOS = {
    "three starts at once on an empty run": Scenario(
        _run(),
        tuple(_manager(name, NEWEST, ("save", 1), sweeps=False) for name in "ABC"),
    ),
    "two jobs started on one run, an answer lost": Scenario(
        _run(1, unanswered=1),
        (
            _manager("A", NEWEST, ("save", 2), ("save", 3), sweeps=False),
            _manager("B", NEWEST, ("save", 2), sweeps=False),
        ),
    ),
    "a paused manager and its replacement, both sweep": Scenario(
        _run(1),
        (_manager("A", NEWEST, ("save", 2), ("save", 3)), _manager("B", NEWEST, ("save", 4))),
    ),
    "one goes back while another goes on": Scenario(
        _run(1, 2),
        (
            _manager("A", NEWEST, ("save", 3), sweeps=False),
            _manager("B", ("restore", OLD), ("save", 1), ("save", 2), sweeps=False),
            _reader("R"),
        ),
    ),
    "one goes back, then the newest is asked for": Scenario(
        _run(1, 2, 3),
        (_manager("B", ("restore", OLD), ("save", 2), keep="all"), _manager("C", NEWEST, ("save", 4), keep="all")),
    ),
    "a branch grows old": Scenario(
        _run(1, 2, weeks=1),
        (_manager("B", ("restore", OLD), ("save", 2), ("save", 3), keep="all"), _reader("R", Ref(1, 2))),
    ),
    "readers and a sweep": Scenario(
        _run(1, 2),
        (_manager("A", NEWEST, ("save", 3)), _reader("R"), _reader("S", OLD)),
    ),
    "a policy that keeps only the oldest": Scenario(
        _run(1, 2),
        (_manager("A", NEWEST, ("save", 3), ("save", 4), keep="oldest"), _reader("R")),
    ),
    "a pin and a sweep": Scenario(
        _run(1, 2),
        (_manager("A", NEWEST, ("save", 3), ("save", 4)), _pinner("P", OLD)),
    ),
    "a pin without an answer and a sweep": Scenario(
        _run(1, 2, unanswered_pins=1),
        (_manager("A", NEWEST, ("save", 3), ("save", 4)), _pinner("P", OLD)),
    ),
    "two pins and a sweep": Scenario(
        _run(1, 2),
        (_manager("A", NEWEST, ("save", 3)), _pinner("P", OLD), _pinner("Q", OLD)),
    ),
    "a replacement goes back while a job sweeps": Scenario(
        _run(1, 2),
        (_manager("A", NEWEST, ("save", 3)), _manager("B", ("restore", OLD), ("save", 2), keep="all")),
    ),
    "answers are lost, writes fail": Scenario(
        _run(unanswered=2, failures=1),
        (_manager("A", ("save", 1), ("save", 2), ("save", 3)),),
    ),
    "answers are lost while another starts": Scenario(
        _run(unanswered=1),
        (_manager("A", ("save", 1), ("save", 2)), _manager("B", NEWEST, ("save", 4))),
    ),
    "a restore behind an unanswered commit": Scenario(
        _run(unanswered=1),
        (_manager("A", ("save", 1), ("save", 2), NEWEST, ("save", 3)), _reader("R")),
    ),
    "a job goes back in its own process": Scenario(
        _run(unanswered=1),
        (_manager("A", ("save", 1), ("save", 2), ("restore", OLD), ("save", 3), keep="all"), _reader("R")),
    ),
    "a job goes back behind an unanswered generation": Scenario(
        _run(1, 2, unanswered=1),
        (_manager("A", NEWEST, ("save", 3), ("restore", OLD), ("save", 2), keep="all"), _reader("R")),
    ),
    "begun anew beside what is there": Scenario(
        _run(1),
        (_manager("A", ("fresh", None), ("save", 1), ("save", 2)), _manager("B", NEWEST, ("save", 2))),
    ),
    "a job that never restores": Scenario(
        _run(1),
        (_manager("A", ("save", 1), ("save", 2), sweeps=False), _manager("B", NEWEST, ("save", 2), sweeps=False)),
    ),
}

# Bounds beyond which the protocol, as it is, breaks a promise. Here, and only here, the model says what the code does
# not do: whoever closes one moves its scenario up.
GAPS = {
    # A create that was repeated, answered, and whose record a sweep has deleted, comes through once more while the
    # manifest is not deleted yet: who leases just then is granted what the sweep goes on to delete.
    "a create comes through again behind the deletion of its record": Scenario(
        _run(unanswered=1, echoes=True),
        (_manager("A", ("save", 1), ("save", 2)), _reader("R", OLD)),
    ),
    # A manager that was replaced sends its record while its attempt, which had none, is being collected. Between the
    # one look before that and the deletion, who asks for just this step is granted it.
    "a record lands while its attempt is collected": Scenario(
        _run(1),
        (_manager("A", NEWEST, ("save", 2), sweeps=False), _manager("B", NEWEST, ("save", 3)), _reader("R", Ref(2, 2))),
    ),
}
