"""`resilio show`, and which checkpoint a STEP means."""

from __future__ import annotations

import json
from typing import Any

import pytest


@pytest.mark.parametrize(
    ("which", "name"),
    [
        (None, "000000400-g000002"),
        ("100", "000000100-g000001"),
        ("300", "000000300-g000002"),
        ("000000300", "000000300-g000002"),
        ("000000300-g000001", "000000300-g000001"),
    ],
)
def test_a_step_is_of_the_lineage_and_a_name_is_exact(
    resilio: Any, branched: Any, which: str | None, name: str
) -> None:
    code, out, _ = resilio("show", branched.url, *([which] if which else []), "--json")
    assert code == 0
    assert json.loads(out)["checkpoint"]["name"] == name
    assert resilio("show", branched.url, *([which] if which else []))[1].startswith(f"checkpoint     {name} ")


@pytest.mark.parametrize("command", ["show", "verify"])
@pytest.mark.parametrize(
    ("which", "code", "says"),
    [
        ("7", 4, "newest steps: 100, 200, 300, 400"),
        ("000000300-g000003", 4, "no checkpoint 000000300-g000003"),
        ("step-7", 2, "neither a step"),
        ("٣٠٠", 2, "neither a step"),
        ("1234567890", 2, "neither a step"),
    ],
)
def test_what_is_not_there_is_said(resilio: Any, branched: Any, command: str, which: str, code: int, says: str) -> None:
    found, out, err = resilio(command, branched.url, which)
    assert (found, out) == (code, "")
    assert says in err


def test_a_step_off_the_lineage_must_be_asked_for_by_name(resilio: Any, run: Any) -> None:
    run.begin(1)
    run.commit(100)
    run.commit(250)
    run.begin(2, (1, 100))
    run.commit(200)
    code, _, err = resilio("show", run.url, "250")
    assert code == 4
    assert "000000250-g000001" in err
    code, out, _ = resilio("show", run.url, "000000250-g000001")
    assert code == 0
    assert "off: a newer branch" in out


def test_json_has_every_field(resilio: Any, branched: Any) -> None:
    page = json.loads(resilio("show", branched.url, "--json")[1], parse_constant=pytest.fail)
    digests = [one.pop("digest") for one in page["objects"]]
    assert all(digest.startswith("xxh3_128:") for digest in digests)
    manifest_bytes, part_bytes = (page["objects"][i].pop("size_bytes") for i in (3, 4))
    assert min(manifest_bytes, part_bytes) > 100
    page["checkpoint"].clear()
    assert page == {
        "url": branched.url,
        "checkpoint": {},
        "versions": {"resilio": "0.1.0", "torch": "2.13.0"},
        "objects": [
            {"name": ".metadata", "size_bytes": 18},
            {"name": "__0_0.digests", "size_bytes": 40},
            {"name": "__0_0.distcp", "size_bytes": 200_008},
            {"name": "manifest-0.json"},
            {"name": "manifest.json"},
        ],
        "faults": [],
        "tensors": {
            "count": 2,
            "size_bytes": 200_008,
            "dtypes": {"int64": {"count": 1, "size_bytes": 8}, "uint8": {"count": 1, "size_bytes": 200_000}},
            "components": {
                "model": {"count": 1, "size_bytes": 200_000},
                "optimizer": {"count": 1, "size_bytes": 8},
            },
            "biggest": [
                {"name": "model.weight", "dtype": "uint8", "shape": [200_000], "size_bytes": 200_000, "pieces": 1},
                {
                    "name": "optimizer.state.weight.step",
                    "dtype": "int64",
                    "shape": [],
                    "size_bytes": 8,
                    "pieces": 1,
                },
            ],
        },
        "tied": 0,
        "values": {
            "count": 3,
            "components": {"optimizer": 1, "scheduler": 1, "step": 1},
            "plain": {"optimizer.param_groups.0.lr": 0.001, "scheduler.note": "\x1b[31mred", "step": 400},
        },
    }


def test_the_page_shows_it_and_sends_nothing_from_the_store_to_the_terminal(resilio: Any, branched: Any) -> None:
    code, out, err = resilio("show", branched.url)
    assert (code, err) == (0, "")
    for text in ("model.weight", "195.3 KiB", "torch 2.13.0", "every 100 steps", "__0_0.distcp", "0.001"):
        assert text in out
    assert "\x1b" not in out


def test_a_damaged_manifest_is_1_and_names_the_object(resilio: Any, branched: Any) -> None:
    path = branched.folder / "step-000000400-g000002-7f3a" / "manifest-0.json"
    path.chmod(0o644)
    path.write_bytes(path.read_bytes().replace(b"0.001", b"0.002"))
    code, out, err = resilio("show", branched.url)
    assert (code, out) == (1, "")
    assert "manifest-0.json" in err
    assert resilio("show", branched.url, "200")[0] == 0


def test_what_plugins_said_of_the_save_is_shown(resilio: Any, run: Any) -> None:
    run.begin(1)
    run.commit(100, about={"git\x1b": {"commit": "abc\x1b[31m", "dirty": False}})
    code, out, _ = resilio("show", run.url)
    assert code == 0
    assert "commit = abc\\x1b[31m  dirty = False" in out and "\x1b" not in out
    page = json.loads(resilio("show", run.url, "--json")[1])
    assert page["checkpoint"]["about"] == {"git\x1b": {"commit": "abc\x1b[31m", "dirty": False}}


def test_tensors_are_listed_and_chosen_by_a_glob(resilio: Any, branched: Any) -> None:
    code, out, _ = resilio("show", branched.url, "--tensors")
    assert code == 0
    assert [line.split() for line in out.splitlines()] == [
        ["tensor", "dtype", "shape", "pieces", "size"],
        ["model.weight", "uint8", "200000", "1", "195.3", "KiB"],
        ["optimizer.state.weight.step", "int64", "scalar", "1", "8", "B"],
        [],
        ["2", "tensors,", "195.3", "KiB"],
    ]
    code, out, _ = resilio("show", branched.url, "--tensors", "--match", "optimizer.*", "--json")
    assert json.loads(out)["tensors"]["listed"] == [
        {
            "name": "optimizer.state.weight.step",
            "dtype": "int64",
            "shape": [],
            "size_bytes": 8,
            "pieces": 1,
            "tied_to": None,
            "nan": None,
            "inf": None,
        }
    ]
    assert resilio("show", branched.url, "--tensors", "--match", "MODEL*")[1].endswith("0 tensors of 2, 0 B\n")
    assert resilio("show", branched.url, "--match", "model.*")[0] == 2
