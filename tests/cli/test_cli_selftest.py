"""`resilio selftest crash`: verdicts, exit codes, and what it leaves behind: nothing."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from resilio.drill.crash import PLANTS, Report, ScenarioReport, Violation

Resilio = Callable[..., tuple[int, str, str]]


@pytest.fixture
def outcome(monkeypatch: pytest.MonkeyPatch) -> Callable[[Report], dict[str, Any]]:
    """What the selftest is to come to; gives what it is asked for."""

    def become(report: Report) -> dict[str, Any]:
        asked: dict[str, Any] = {}

        def selftest(storage: object, **given: Any) -> Report:
            asked.update(given)
            return report

        monkeypatch.setattr("resilio.drill.crash.crash_selftest", selftest)
        return asked

    return become


def report(plant: str | None = None, *violated: str, left: str | None = None) -> Report:
    one = ScenarioReport("saves", "objects", operations=40, states=1500, distinct=1234, seconds=2.0)
    for invariant in violated:
        one.add(Violation(invariant, "saves", "objects", "step 1 is gone\x1b[31m", "after put commits/x"))
    return Report("memory://x", plant, [one], {"races": "no create-if-absent"}, left)


def test_it_tries_the_storage_of_a_run_and_leaves_it_as_it_was(resilio: Resilio, tmp_path: Path) -> None:
    (tmp_path / "commits").mkdir()
    (tmp_path / "commits" / "mine").write_text("x")
    code, out, _ = resilio("selftest", "crash", str(tmp_path), "--plant", "commit-first", "--json")
    assert code == 1
    told = json.loads(out)
    assert told["found"] is True
    assert told["violated"]["order"] > 0
    assert told["invariants"].keys() >= told["violated"].keys()
    assert told["distinct"] == sum(one["distinct"] for one in told["scenarios"]) > 50
    assert {one["level"] for one in told["scenarios"]} == {"objects", "posix"}
    first = told["scenarios"][0]["violations"][0]
    assert first.keys() == {"invariant", "scenario", "level", "what", "crash"}
    assert [path.relative_to(tmp_path).as_posix() for path in tmp_path.rglob("*")] == ["commits", "commits/mine"]


@pytest.mark.parametrize(
    ("came", "code", "says"),
    [
        (report(), 0, "1,234 crash states judged in 2.0 s: nothing is lost"),
        (report(None, "order", "order", "chosen"), 1, "VIOLATED: order 2, chosen 1"),
        (report("no-dir-fsync", "acknowledged"), 1, "FOUND no-dir-fsync, by acknowledged 1"),
        (report("no-dir-fsync"), 3, "NOT FOUND: no-dir-fsync"),
        (report(left="x could not be removed"), 5, "x could not be removed"),
    ],
)
def test_verdicts(
    resilio: Resilio, outcome: Callable[[Report], dict[str, Any]], came: Report, code: int, says: str
) -> None:
    outcome(came)
    args = ("--plant", came.plant) if came.plant else ()
    ended, out, err = resilio("selftest", "crash", "memory://x", *args)
    assert (ended, err) == (code, "")
    assert says in out
    assert "skipped races: no create-if-absent" in out
    assert "\x1b" not in out
    for name in came.violated:
        assert out.count(f"VIOLATED  {name}: ") == 1
    ended, out, _ = resilio("selftest", "crash", "memory://x", "--json", *args)
    assert ended == code
    told = json.loads(out)
    assert (told["good"], told["plant"], told["violated"]) == (came.good, came.plant, came.violated)
    assert told["found"] is (None if came.plant is None else bool(came.violated))


def test_thorough_tries_more(resilio: Resilio, outcome: Callable[[Report], dict[str, Any]]) -> None:
    asked = outcome(report())
    resilio("selftest", "crash", "memory://x")
    usual = dict(asked)
    resilio("selftest", "crash", "memory://x", "--thorough")
    assert asked["exhaustive"] > usual["exhaustive"]
    assert asked["on_storage"] > usual["on_storage"]


def test_the_bugs_are_listed_without_a_url(resilio: Resilio) -> None:
    code, out, _ = resilio("selftest", "crash", "--list-plants")
    assert code == 0
    assert all(name in out and bug.what in out for name, bug in PLANTS.items())
    code, out, _ = resilio("selftest", "crash", "--list-plants", "--json")
    assert json.loads(out)["plants"].keys() == PLANTS.keys()


@pytest.mark.parametrize(
    ("args", "says"),
    [
        ((), "needs a URL"),
        (("memory://x", "--plant", "no-such"), "commit-first"),
        (("memory://x", "--plant", "no-file-fsync"), "file://"),
    ],
)
def test_what_cannot_be_tried_is_usage(resilio: Resilio, args: tuple[str, ...], says: str) -> None:
    code, out, err = resilio("selftest", "crash", *args)
    assert (code, out) == (2, "")
    assert says in err


def test_no_traceback_where_nothing_can_be_written(resilio: Resilio, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("x")
    code, _, err = resilio("selftest", "crash", str(tmp_path / "file" / "run"))
    assert code == 5
    assert "is a file" in err
