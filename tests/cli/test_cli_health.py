"""What the command says of checkpoints whose values are not finite, and that it says nothing where all are."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import pytest

from resilio.cli.simulate import Start, simulate
from resilio.policies import KeepPolicy, save_every
from resilio.types import CheckpointInfo, CheckpointRef


@pytest.fixture
def diverged(run: Any) -> Any:
    """Steps 100 (never counted), 200 (healthy), 300 and 400 (not)."""
    run.begin(1)
    run.commit(100)
    run.commit(200, non_finite=0, inf=7)
    run.commit(300, non_finite=1)
    run.commit(400, non_finite=1200)
    return run


def test_ls_has_a_column_for_it_only_where_one_is_not_healthy(resilio: Any, diverged: Any) -> None:
    head, *rows = resilio("ls", diverged.url)[1].splitlines()
    assert "health" in head
    at = head.index("health")
    said = [row[at:].partition("  ")[0] for row in rows]
    assert said[:4] == ["BAD: 1,200 not finite", "BAD: 1 not finite", "good", "not known"]


def test_ls_is_as_ever_where_all_are_healthy_or_not_known(resilio: Any, run: Any) -> None:
    run.begin(1)
    run.commit(100)
    run.commit(200, non_finite=0, inf=7)
    assert "health" not in resilio("ls", run.url)[1]


def test_json_has_the_count_and_what_it_means(resilio: Any, diverged: Any) -> None:
    page = json.loads(resilio("ls", diverged.url, "--json")[1])
    assert [(one["non_finite"], one["healthy"]) for one in page["checkpoints"]] == [
        (1200, False),
        (1, False),
        (0, True),
        (None, None),
    ]


def test_show_names_the_tensors_that_are_at_fault_and_lists_the_counts_of_all(resilio: Any, diverged: Any) -> None:
    assert (
        "health         BAD: 1,200 not finite: optimizer.state.weight.step (1,200 NaN)\n"
        in resilio("show", diverged.url)[1]
    )
    assert "health         good\n" in resilio("show", diverged.url, "200")[1]
    assert "health         not known\n" in resilio("show", diverged.url, "100")[1]
    page = json.loads(resilio("show", diverged.url, "--json")[1])
    assert page["faults"] == [{"name": "optimizer.state.weight.step", "nan": 1200, "inf": 0}]
    assert json.loads(resilio("show", diverged.url, "200", "--json")[1])["faults"] == []
    for which, expected in (("200", [(0, 7), (0, 0)]), ("100", [(None, None)] * 2), ("300", [(0, 0), (1, 0)])):
        listed = json.loads(resilio("show", diverged.url, which, "--tensors", "--json")[1])["tensors"]["listed"]
        assert [(one["nan"], one["inf"]) for one in listed] == expected
    lines = resilio("show", diverged.url, "200", "--tensors")[1].splitlines()
    assert "not finite" in lines[0] and lines[1].endswith("7 infinite") and "infinite" not in lines[2]
    assert "not finite" not in resilio("show", diverged.url, "100", "--tensors")[1]


def test_forget_says_which_lives_as_the_newest_healthy_one(resilio: Any, diverged: Any) -> None:
    code, out, _ = resilio("forget", diverged.url, "--keep", "keep_last(1)", "--json")
    said = {one["step"]: (one["goes"], one["because"]) for one in json.loads(out)["checkpoints"]}
    assert code == 0
    assert said == {
        100: (True, ["no policy has a reason to keep it"]),
        200: (False, ["newest that is healthy"]),
        300: (True, ["no policy has a reason to keep it"]),
        400: (False, ["one of the last 1", "newest of the lineage"]),
    }
    out = resilio("forget", diverged.url, "--keep", "keep_healthy(2)")[1]
    assert "one of the last 2 healthy, as far as known" in out and "one of the last 2 healthy; newest that" in out


class KeepKnown(KeepPolicy):
    def reasons(self, checkpoints: Sequence[CheckpointInfo], now_s: float) -> dict[CheckpointRef, str]:
        return {info.ref: "known to be healthy" for info in checkpoints[-2:] if info.healthy}


def test_a_policy_of_somebody_elses_sees_them_as_healthy_too() -> None:
    assert len(simulate(save_every(5), KeepKnown(), 20, Start()).end) == 2


def test_plan_takes_checkpoints_to_come_for_healthy_and_says_so(resilio: Any, diverged: Any) -> None:
    args = ("--save", "save_every(100)", "--keep", "keep_healthy(2)", "--steps", "200", "--json")
    page = json.loads(resilio("plan", diverged.url, *args)[1])
    assert [one["step"] for one in page["end"]] == [500, 600]
    assert page["saves"][0]["deletes"] == [f"000000{step}-g000001" for step in (100, 300, 400)]
    assert any("health is not simulated" in note for note in page["notes"])
