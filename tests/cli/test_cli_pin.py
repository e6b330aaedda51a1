"""`resilio pin` and `resilio unpin`."""

from __future__ import annotations

import json
from typing import Any

import pytest

from resilio.records import keys
from resilio.records.holds import pins
from resilio.types import CheckpointRef


@pytest.mark.parametrize(
    ("step", "name"),
    [("300", "000000300-g000002"), ("000000300-g000001", "000000300-g000001"), ("100", "000000100-g000001")],
)
def test_a_pin_is_there_with_its_reason_until_it_is_taken_off(
    resilio: Any, branched: Any, step: str, name: str
) -> None:
    assert resilio("pin", branched.url, step, "--because", "the\x1b paper") == (
        0,
        f"pinned {name}: the\\x1b paper\n",
        "",
    )
    (pin,) = pins(branched.storage)
    assert (keys.stem(CheckpointRef(pin.generation, pin.step)), pin.because) == (name, "the\x1b paper")
    assert resilio("unpin", branched.url, step) == (0, f"unpinned {name}: 1 pin removed\n", "")
    assert pins(branched.storage) == []


def test_json_has_every_field(resilio: Any, branched: Any) -> None:
    code, out, err = resilio("pin", branched.url, "400", "--because", "x", "--json")
    assert (code, err) == (0, "")
    page = json.loads(out)
    assert page.pop("time_s") > 1_700_000_000
    assert page.pop("pinned_at").endswith("Z")
    assert page.pop("host")
    which = {"url": branched.url, "name": "000000400-g000002", "step": 400, "generation": 2}
    assert page == {**which, "because": "x"}
    resilio("pin", branched.url, "400", "--because", "y")
    page = json.loads(resilio("unpin", branched.url, "400", "--json")[1])
    assert page == {**which, "pins": 2, "has_record": True}


@pytest.mark.parametrize(
    ("args", "code", "says"),
    [
        (("pin", "400"), 2, "--because"),
        (("pin", "400", "--because", "  "), 2, "a pin says why"),
        (("pin", "--because", "x"), 2, "STEP"),
        (("pin", "7", "--because", "x"), 4, "newest steps"),
        (("pin", "000000100-g000002", "--because", "x"), 4, "no checkpoint"),
        (("pin", "newest", "--because", "x"), 2, "neither a step"),
        (("unpin", "400"), 4, "is not pinned"),
        (("unpin", "7"), 4, "no checkpoint of step 7"),
        (("unpin", "000000100-g000009"), 4, "is not pinned"),
    ],
)
def test_what_cannot_be_is_said_and_changes_nothing(
    resilio: Any, branched: Any, args: tuple[str, ...], code: int, says: str
) -> None:
    before = sorted(branched.folder.rglob("*"))
    found, out, err = resilio(args[0], branched.url, *args[1:])
    assert (found, out) == (code, "")
    assert says in err
    assert sorted(branched.folder.rglob("*")) == before


def test_a_pin_that_stands_in_for_a_commit_record_can_be_looked_at_and_taken_off(resilio: Any, branched: Any) -> None:
    resilio("pin", branched.url, "100", "--because", "x")
    branched.storage.delete([keys.commit_key(CheckpointRef(1, 100))])
    assert resilio("show", branched.url, "000000100-g000001")[0] == 0
    code, _, err = resilio("show", branched.url, "100")
    assert (code, "000000100-g000001" in err) == (4, True)
    code, out, _ = resilio("unpin", branched.url, "000000100-g000001")
    assert (code, "removed by the next sweep" in out) == (0, True)
    assert resilio("show", branched.url, "000000100-g000001")[0] == 4


def test_a_run_of_pins_alone_is_no_empty_run(resilio: Any, run: Any) -> None:
    run.begin(1)
    run.commit(100)
    resilio("pin", run.url, "100", "--because", "x")
    run.storage.delete([keys.commit_key(CheckpointRef(1, 100))])
    assert resilio("ls", run.url)[0] == 0
    assert resilio("verify", run.url, "000000100-g000001")[0] == 0
    code, _, err = resilio("verify", run.url)
    assert (code, "000000100-g000001" in err) == (4, True)
    assert resilio("forget", run.url, "--keep", "keep_last(1)")[0] == 2
    assert resilio("unpin", run.url, "000000100-g000001")[0] == 0
    assert resilio("ls", run.url)[0] == 4
