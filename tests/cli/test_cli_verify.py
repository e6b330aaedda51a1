"""`resilio verify`: each kind of damage ends with 1 and a name."""

from __future__ import annotations

import json
import os
import pty
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from resilio.records.catalog import Catalog, discover
from resilio.storage import Storage

ATTEMPT = "step-000000400-g000002-7f3a"


def flip(path: Path, at: int) -> None:
    path.chmod(0o644)
    data = bytearray(path.read_bytes())
    data[at] ^= 1
    path.write_bytes(data)


def test_good_is_0(resilio: Any, branched: Any) -> None:
    assert resilio("verify", branched.url) == (0, "000000400-g000002  good\n", "")
    assert resilio("verify", branched.url, "000000300-g000001") == (0, "000000300-g000001  good\n", "")
    code, out, err = resilio("verify", branched.url, "--json")
    assert (code, err) == (0, "")
    assert json.loads(out) == {
        "url": branched.url,
        "good": True,
        "checkpoints": [
            {
                "name": "000000400-g000002",
                "step": 400,
                "generation": 2,
                "on_lineage": True,
                "quarantined": None,
                "good": True,
                "damage": [],
                "coverage": {"level": "all", "read_bytes": 200_008, "total_bytes": 200_008},
            }
        ],
    }


@pytest.mark.parametrize(
    ("name", "at", "says"),
    [
        ("__0_0.distcp", 70_000, "model.weight"),
        ("__0_0.distcp", 200_003, "optimizer.state.weight.step"),
        ("__0_0.digests", 5, "__0_0.digests"),
        (".metadata", 3, ".metadata"),
        ("manifest.json", 30, "manifest.json"),
        ("manifest-0.json", 30, "manifest-0.json"),
    ],
)
def test_a_flipped_bit_anywhere_is_1_and_named(resilio: Any, branched: Any, name: str, at: int, says: str) -> None:
    flip(branched.folder / ATTEMPT / name, at)
    code, out, _ = resilio("verify", branched.url)
    assert code == 1
    assert all(line.startswith("000000400-g000002  DAMAGED  ") for line in out.splitlines())
    assert says in out
    code, out, _ = resilio("verify", branched.url, "--json")
    assert code == 1
    page = json.loads(out)
    assert page["good"] is False
    assert any(says in one["where"] + one["what"] for one in page["checkpoints"][0]["damage"])


@pytest.mark.parametrize("how", ["missing", "cut", "grown"])
def test_a_missing_or_resized_object_is_1_and_named(resilio: Any, branched: Any, how: str) -> None:
    path = branched.folder / ATTEMPT / "__0_0.distcp"
    path.chmod(0o644)
    if how == "missing":
        path.unlink()
    else:
        os.truncate(path, 100 if how == "cut" else 300_000)
    code, out, _ = resilio("verify", branched.url)
    assert code == 1
    assert "__0_0.distcp" in out


def test_all_looks_at_every_one_and_one_bad_makes_it_1(resilio: Any, branched: Any) -> None:
    flip(branched.folder / "step-000000300-g000001-7f3a" / "__0_0.distcp", 0)
    assert resilio("verify", branched.url)[0] == 0
    code, out, _ = resilio("verify", branched.url, "--all")
    assert code == 1
    assert [line.split()[:2] for line in out.splitlines()] == [
        ["000000400-g000002", "good"],
        ["000000300-g000002", "good"],
        ["000000300-g000001", "DAMAGED"],
        ["000000200-g000001", "good"],
        ["000000100-g000001", "good"],
    ]
    page = json.loads(resilio("verify", branched.url, "--all", "--json")[1])
    assert [(one["good"], one["on_lineage"]) for one in page["checkpoints"]] == [
        (True, True),
        (True, True),
        (False, False),
        (True, True),
        (True, True),
    ]


def test_what_a_sweep_took_since_the_listing_is_no_damage(
    resilio: Any, branched: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    def then_swept(storage: Storage) -> Catalog:
        catalog = discover(storage)
        (branched.folder / "commits" / "000000100-g000001.json").unlink(missing_ok=True)
        return catalog

    monkeypatch.setattr("resilio.cli.look.discover", then_swept)
    code, out, _ = resilio("verify", branched.url, "--all")
    assert (code, len(out.splitlines())) == (0, 4)


def test_the_bar_is_drawn_on_a_terminal_and_leaves_stdout_alone(branched: Any) -> None:
    leader, follower = pty.openpty()
    try:
        done = subprocess.run(
            [sys.executable, "-m", "resilio", "verify", branched.url],
            stdout=subprocess.PIPE,
            stderr=follower,
            timeout=120,
            env={**os.environ, "TERM": "xterm"},
        )
        seen = os.read(leader, 65536)
    finally:
        os.close(leader)
        os.close(follower)
    assert (done.returncode, done.stdout) == (0, b"000000400-g000002  good\n")
    assert b"000000400-g000002" in seen


FINDS = """
    import resilio
    from resilio.types import Damage

    @resilio.hookimpl
    def resilio_verify(checkpoint, storage):
        if checkpoint.step == 200:
            raise ValueError("no \\x1b answer")
        if checkpoint.step == 100:
            return [Damage("model.weight", "is all zeros")]
"""


def test_plugins_find_more_and_one_that_cannot_tell_is_inconclusive(
    resilio: Any, installed: Any, branched: Any
) -> None:
    installed.add("finds", FINDS)
    assert resilio("verify", branched.url)[0] == 0
    code, out, _ = resilio("verify", branched.url, "100")
    assert code == 1
    assert "000000100-g000001  DAMAGED  model.weight: is all zeros (plugin 'finds'" in out
    code, out, _ = resilio("verify", branched.url, "200")
    assert code == 3
    assert out.startswith("000000200-g000001  NOT JUDGED  ") and "\x1b" not in out
    code, out, _ = resilio("verify", branched.url, "200", "--json")
    (one,) = json.loads(out)["checkpoints"]
    assert (code, one["good"], [found["inconclusive"] for found in one["damage"]]) == (3, False, [True])
    assert resilio("verify", branched.url, "--all")[0] == 1  # damage outweighs what could not be judged
    flip(branched.folder / "commits" / "000000200-g000001.json", 5)
    assert resilio("verify", branched.url, "200")[0] == 1


def test_a_sampled_pass_says_how_much_it_read_and_n_runs_read_all_of_it(resilio: Any, branched: Any) -> None:
    read = 0
    for part in (1, 2, 3):
        code, out, _ = resilio("verify", branched.url, "--sample", f"{part}/3", "--json")
        assert code == 0
        coverage = json.loads(out)["checkpoints"][0]["coverage"]
        assert (coverage["level"], coverage["total_bytes"]) == ("sample", 200_008)
        read += coverage["read_bytes"]
    assert read == 200_008
    code, out, _ = resilio("verify", branched.url, "--sample", "1/3")
    assert (code, out) == (0, "000000400-g000002  good as far as read: 34.4 % of the tensor data (67.3 KiB)\n")


def test_damage_is_found_by_the_part_it_lies_in_and_by_no_other(resilio: Any, branched: Any) -> None:
    flip(branched.folder / ATTEMPT / "__0_0.distcp", 70_000)
    assert [resilio("verify", branched.url, "--sample", f"{part}/4")[0] for part in (1, 2, 3, 4)] == [0, 1, 0, 0]
    assert resilio("verify", branched.url, "--sample", "100%")[0] == 1


def test_a_quick_look_reads_no_data_and_says_so(resilio: Any, branched: Any) -> None:
    data = branched.folder / ATTEMPT / "__0_0.distcp"
    flip(data, 70_000)
    code, out, _ = resilio("verify", branched.url, "--quick")
    assert code == 0
    assert out == "000000400-g000002  good as far as looked: every object is there at its size; no data was read\n"
    flip(branched.folder / ATTEMPT / "manifest-0.json", 30)
    assert resilio("verify", branched.url, "--quick")[0] == 1
    os.truncate(branched.folder / "step-000000300-g000002-7f3a" / "__0_0.distcp", 5)
    assert resilio("verify", branched.url, "300", "--quick")[0] == 1


@pytest.mark.parametrize("sample", ["0/3", "4/3", "1/0", "0%", "101%", "x", "", "0", "1/3/5", "-1/3", "٣%", "1e9"])
def test_what_is_no_sample_is_2(resilio: Any, branched: Any, sample: str) -> None:
    code, out, err = resilio("verify", branched.url, f"--sample={sample}")
    assert (code, out) == (2, "")
    assert "is no sample" in err
    assert resilio("verify", branched.url, "--quick", "--read-all")[0] == 2
