"""`resilio forget`: tells exactly what it then does, and does nothing unasked."""

from __future__ import annotations

import json
from collections.abc import Iterable
from typing import Any

import pytest

from resilio.errors import AccessDeniedError
from resilio.records import fates, keys, sweep
from resilio.records.catalog import discover
from resilio.records.holds import lease
from resilio.storage import LocalStorage
from resilio.types import CheckpointRef

LAST = ("--keep", "keep_last(1)")
LEFTOVER = "step-000000050-g000001-aaaa"


def files(run: Any) -> list[str]:
    return sorted(path.relative_to(run.folder).as_posix() for path in run.folder.rglob("*") if path.is_file())


def steps(run: Any) -> list[tuple[int, int]]:
    return [(ref.generation, ref.step) for ref in discover(run.storage).commits]


@pytest.fixture
def littered(branched: Any) -> Any:
    branched.storage.put(f"{LEFTOVER}/__0_0.distcp", b"x" * 5000)
    branched.storage.put("step-000000500-g000002-bbbb/__0_0.distcp", b"may be under way")
    branched.storage.put("step-7.bak/mine", b"a stranger's")
    return branched


def test_the_plan_says_of_each_why_and_changes_nothing(resilio: Any, littered: Any) -> None:
    before = files(littered)
    code, out, err = resilio("forget", littered.url, *LAST)
    assert (code, err) == (0, "")
    assert files(littered) == before
    rows = {tuple(line.split()[:2]): line for line in out.splitlines()}
    for step, goes, why in [
        (("400", "2"), "lives", "one of the last 1; newest of the lineage"),
        (("300", "2"), "goes", "no policy"),
        (("300", "1"), "lives", "off the lineage for less than 7 days"),
        (("200", "1"), "goes", "no policy"),
        (("100", "1"), "goes", "no policy"),
    ]:
        assert f" {goes} " in rows[step] and why in rows[step]
    assert "goes" in next(line for line in out.splitlines() if line.startswith(LEFTOVER))
    assert "may be under way" in next(line for line in out.splitlines() if line.startswith("step-000000500"))
    assert f"resilio forget {littered.url} --keep 'keep_last(1)' --yes" in out


def test_yes_does_what_the_plan_said(resilio: Any, littered: Any) -> None:
    plan = json.loads(resilio("forget", littered.url, *LAST, "--json")[1])
    assert plan["done"] is None
    going = [one["name"] for one in plan["checkpoints"] if one["goes"]]
    before = sum(path.stat().st_size for path in littered.folder.rglob("step-*/*"))
    code, out, err = resilio("forget", littered.url, *LAST, "--yes", "--json")
    assert (code, err) == (0, "")
    page = json.loads(out)
    assert page.pop("done") == {
        "deleted": going,
        "attempts": [LEFTOVER],
        "records": [],
        "leases": 0,
        "freed_bytes": plan["frees_bytes"],
        "left": [],
        "fenced_by": None,
    }
    del plan["done"]
    assert page == plan
    assert steps(littered) == [(1, 300), (2, 400)]
    after = sum(path.stat().st_size for path in littered.folder.rglob("step-*/*"))
    assert before - after == plan["frees_bytes"] > 600_000
    assert {"step-7.bak/mine", "step-000000500-g000002-bbbb/__0_0.distcp"} <= set(files(littered))
    assert resilio("verify", littered.url, "--all")[0] == 0
    assert resilio("forget", littered.url, *LAST, "--yes")[1].endswith("deleted 0 checkpoints and 0 leftovers, 0 B\n")


def test_pins_and_readers_are_spared_and_told(resilio: Any, branched: Any) -> None:
    resilio("pin", branched.url, "100", "--because", "the paper")
    with lease(branched.storage, CheckpointRef(1, 200)):
        code, out, _ = resilio("forget", branched.url, *LAST, "--yes")
    assert code == 0
    assert "pinned: the paper" in out
    assert "leased" in out
    assert steps(branched) == [(1, 100), (1, 200), (1, 300), (2, 400)]


@pytest.mark.parametrize("yes", [(), ("--yes",)])
@pytest.mark.parametrize(
    ("keep", "says"),
    [
        ((), "keep_last(3) | keep_every(1000)"),
        (("--keep", "keep_best(1, 'accuracy')"), "keeps something"),
        (("--keep", "keep_lats(1)"), "column 1"),
        (("--keep", "save_every(1)"), "when to save"),
        (("--keep", ""), "column 1"),
    ],
)
def test_a_policy_that_is_none_or_keeps_nothing_is_refused(
    resilio: Any, littered: Any, yes: tuple[str, ...], keep: tuple[str, ...], says: str
) -> None:
    before = files(littered)
    code, out, err = resilio("forget", littered.url, *keep, *yes)
    assert (code, out) == (2, "")
    assert says in err
    assert files(littered) == before


def test_what_cannot_be_deleted_is_3_and_named(resilio: Any, branched: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    real = LocalStorage.delete

    def denied(self: LocalStorage, which: Iterable[str]) -> None:
        which = list(which)
        if any("200-g" in key for key in which):
            raise AccessDeniedError(f"{which[0]}: not with these\x1b credentials")
        real(self, which)

    monkeypatch.setattr(LocalStorage, "delete", denied)
    code, out, _ = resilio("forget", branched.url, *LAST, "--yes")
    assert code == 3
    assert "NOT DONE  commits/000000200-g000001.json: " in out
    assert "\x1b" not in out
    assert steps(branched) == [(1, 200), (1, 300), (2, 400)]


def test_a_job_that_takes_over_ends_it_with_3(resilio: Any, branched: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    real = sweep.look

    def then_a_newer_one(*args: Any, **named: Any) -> fates.Looked:
        looked = real(*args, **named)
        branched.begin(3, (1, 100), (1, 200), (2, 300), (2, 400))
        return looked

    monkeypatch.setattr(sweep, "look", then_a_newer_one)
    code, out, _ = resilio("forget", branched.url, *LAST, "--yes")
    assert code == 3
    assert "NOT DONE  generation 3 is newer" in out
    assert len(steps(branched)) == 5
    monkeypatch.undo()
    code, out, _ = resilio("forget", branched.url, *LAST)
    assert (code, "Nothing goes now: generation 3 is newer" in out) == (0, True)
    assert resilio("forget", branched.url, *LAST, "--yes")[0] == 3
    assert len(steps(branched)) == 5


def test_saves_that_land_in_the_midst_of_it_stay(resilio: Any, branched: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """A job commits twice between the listing of attempts and that of commits: the older looks like a lost record."""
    real = fates.discover

    def after_two_saves(*args: Any) -> Any:
        newest = discover(branched.storage).newest
        assert newest is not None
        branched.commit(newest.step + 50)
        branched.commit(newest.step + 100)
        return real(*args)

    monkeypatch.setattr(fates, "discover", after_two_saves)
    code, _, _ = resilio("forget", branched.url, *LAST, "--yes")
    monkeypatch.undo()
    assert code == 0
    # 450 and 500 came with the plan; 550 and 600 amid the sweep, to which 500 was the newest whole one.
    assert steps(branched) == [(1, 300), (2, 500), (2, 550), (2, 600)]
    assert resilio("verify", branched.url, "--all")[0] == 0


def test_a_damaged_record_is_shown_and_left_alone(resilio: Any, branched: Any) -> None:
    path = branched.folder / keys.commit_key(CheckpointRef(1, 200))
    path.chmod(0o644)
    path.write_bytes(b'{"format": 1, "step":')
    code, out, _ = resilio("forget", branched.url, *LAST)
    assert code == 0
    assert "its commit record cannot be read" in out
    code, out, _ = resilio("forget", branched.url, *LAST, "--yes")
    assert (code, "NOT DONE  commits/000000200-g000001.json" in out) == (3, True)
    assert path.exists()
    assert (branched.folder / "step-000000200-g000001-7f3a" / "manifest.json").exists()


CLAIMS = """
    import resilio

    @resilio.hookimpl
    def resilio_pins(checkpoints):
        if FAILS:
            raise ValueError("no answer")
        return {info.ref: "in use" for info in checkpoints if info.step == 200}
"""


@pytest.mark.parametrize("fails", [False, True])
def test_what_plugins_keep_lives_and_if_that_is_not_known_all_does(
    resilio: Any, installed: Any, branched: Any, fails: bool
) -> None:
    installed.add("claims", CLAIMS.replace("FAILS", str(fails)))
    code, out, _ = resilio("forget", branched.url, *LAST)
    assert code == 0
    assert ("no answer" if fails else "in use (plugin claims)") in out
    code, out, _ = resilio("forget", branched.url, *LAST, "--yes")
    assert code == (3 if fails else 0)
    assert out.count("NOT DONE") == (1 if fails else 0)
    assert steps(branched) == (
        [(1, 100), (1, 200), (1, 300), (2, 300), (2, 400)] if fails else [(1, 200), (1, 300), (2, 400)]
    )
    code, out, _ = resilio("plan", branched.url, "--save", "save_every(100)", *LAST, "--steps", "100", "--json")
    told = json.loads(out)
    assert (code, any("no answer" in note for note in told["notes"])) == (0, fails)
    assert "000000200-g000001" in told["saves"][0]["deletes"] or not fails


def test_a_policy_of_a_plugin_can_be_said(resilio: Any, installed: Any, branched: Any) -> None:
    installed.add(
        "mine",
        """
        import resilio
        from resilio.policies import keep_last

        @resilio.hookimpl
        def resilio_register_policies(register):
            register("keep_newest", lambda: keep_last(1))
        """,
    )
    code, out, _ = resilio("forget", branched.url, "--keep", "keep_newest()", "--json")
    assert (code, json.loads(out)["keep"]) == (0, "keep_last(1)")
