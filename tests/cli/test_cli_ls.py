"""`resilio ls`."""

from __future__ import annotations

import json
from collections import Counter
from typing import Any

import msgspec
import pytest
from records.fake_store import forged

from resilio.records import keys, schema
from resilio.storage import LocalStorage
from resilio.types import CheckpointRef


def test_newest_first_with_the_left_branch_marked(resilio: Any, branched: Any) -> None:
    code, out, err = resilio("ls", branched.url)
    assert (code, err) == (0, "")
    rows = [line.split() for line in out.splitlines()[1:]]
    assert [(row[0], row[1]) for row in rows] == [("400", "2"), ("300", "2"), ("300", "1"), ("200", "1"), ("100", "1")]
    assert ["off" in row for row in rows] == [False, False, True, False, False]
    assert "loss=nan" in out
    assert "every 100 steps" in out


def test_json_has_every_field(resilio: Any, branched: Any) -> None:
    code, out, _ = resilio("ls", branched.url, "--json")
    page = json.loads(out, parse_constant=pytest.fail)
    assert code == 0
    assert page["url"] == branched.url
    assert page["damaged"] == []
    assert page["checkpoints"][1] == {
        "about": {},
        "attempt": "step-000000300-g000002-7f3a",
        "committed_at": "2023-11-14T22:18:20Z",
        "generation": 2,
        "healthy": None,
        "metrics": {"loss": "nan"},
        "name": "000000300-g000002",
        "non_finite": None,
        "on_lineage": True,
        "quarantined": None,
        "reasons": ["every 100 steps"],
        "size_bytes": 200_008,
        "step": 300,
        "time_s": 1_700_000_300.0,
        "world": 1,
    }


@pytest.mark.parametrize("begun", [False, True])
def test_nothing_there_is_4_and_creates_nothing(resilio: Any, run: Any, begun: bool) -> None:
    if begun:
        run.begin(1)
    before = sorted(run.folder.rglob("*")) if run.folder.exists() else None
    code, out, err = resilio("ls", run.url)
    assert (code, out) == (4, "")
    assert err.count("\n") == 1
    assert ("without a checkpoint" in err) is begun
    assert (sorted(run.folder.rglob("*")) if run.folder.exists() else None) == before


def test_an_unreadable_record_is_named_and_the_others_are_listed(resilio: Any, branched: Any) -> None:
    path = branched.folder / keys.commit_key(CheckpointRef(1, 200))
    path.chmod(0o644)
    path.write_bytes(b'{"format": 1, "step":')
    code, out, _ = resilio("ls", branched.url)
    assert code == 1
    assert "DAMAGED  commits/000000200-g000001.json" in out
    assert "\n400 " in out.replace("\n ", "\n")
    code, out, _ = resilio("ls", branched.url, "--json")
    assert code == 1
    assert [one["where"] for one in json.loads(out)["damaged"]] == ["commits/000000200-g000001.json"]
    assert len(json.loads(out)["checkpoints"]) == 4


def test_a_newer_format_is_inconclusive(resilio: Any, branched: Any) -> None:
    path = branched.folder / keys.RUN
    path.chmod(0o644)
    path.write_bytes(forged({"format": 99, "run_id": "x"}))
    code, out, err = resilio("ls", branched.url)
    assert (code, out) == (3, "")
    assert "99" in err and "pgrade" in err


def test_a_thousand_checkpoints_are_one_small_read_each_and_four_listings(
    resilio: Any, run: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    run.begin(1)
    attempt = run.commit(1)
    one = schema.decode(run.storage.get(keys.commit_key(CheckpointRef(1, 1))), schema.CommitRecord, "x")
    for step in range(2, 1001):
        record = msgspec.structs.replace(one, step=step, attempt=keys.attempt_name(step, 1, "7f3a"))
        (run.folder / keys.commit_key(CheckpointRef(1, step))).write_bytes(schema.encode(record))
    calls: Counter[str] = Counter()
    for name in ("get", "read_into", "stat", "list", "incomplete"):
        real = getattr(LocalStorage, name)

        def counted(self: LocalStorage, key: str, *args: Any, real: Any = real, name: str = name) -> Any:
            calls[f"{name} {key}" if "1000" in key or not key.startswith("commits/0") else name] += 1
            assert not key.startswith("step-") and attempt not in key  # nothing of what a checkpoint holds
            return real(self, key, *args)

        monkeypatch.setattr(LocalStorage, name, counted)
    code, out, _ = resilio("ls", run.url)
    assert (code, len(out.splitlines())) == (0, 1001)
    reads = sum(count for call, count in calls.items() if call.split()[0] in ("get", "read_into"))
    assert reads == 1000 + 2  # and the run's record, and the generation's
    assert sum(count for call, count in calls.items() if call.startswith("list ")) == 4  # and what is in quarantine
    assert [call for call in calls if call.startswith(("stat", "incomplete"))] == [f"stat {keys.RUN}"]
