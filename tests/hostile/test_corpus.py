"""Whatever lies in a store, reading it ends with an error of ours or with an older checkpoint: nothing is run, nothing
is changed, and neither time nor memory run out.

`corpus.py` has the stores; `hostile_child.py` reads each by `resilio ls`, `show` and `verify`, by a manager and by
`resilio.restore`, in a process of its own whose memory is bounded.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from hostile.corpus import VARIANTS
from hostile.hostile_store import Run, copy, make_plain, make_run

CHILD = Path(__file__).with_name("hostile_child.py")
TIME_S = 900.0  # for all of them; they take one to two minutes on a quiet machine
PEAK_BYTES = 3 << 30
WANTED = {
    "older": r"step 1 filled \[1.0\] passed over: .*(?:{word})",
    "held": r"step 1 filled \[1.0\] passed over: .*in quarantine: .*(?:{word})",
    "refused": r"refused .*(?:{word})",
    "whole": r"step [02] filled \[2.0\] passed over: $",
}

Found = dict[str, dict[str, Any]]


@pytest.fixture(scope="module")
def good(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A run and a folder of plain DCP, as they were saved."""
    root = tmp_path_factory.mktemp("good")
    make_run(root / "run")
    make_plain(root / "plain")
    return root / "run", root / "plain"


def read_all(good: tuple[Path, Path], scratch: Path, *names: str) -> Found:
    """What came of each variant, by name. Those of which nothing came are missing."""
    scratch.mkdir(parents=True, exist_ok=True)
    results = scratch / "results.jsonl"
    args = [sys.executable, str(CHILD), str(good[0]), str(good[1]), str(scratch), str(results), *names]
    env = {**os.environ, "PYTHONHASHSEED": "0"}
    done = subprocess.run(args, env=env, stderr=subprocess.PIPE, text=True, timeout=TIME_S, check=False)
    found = {line["name"]: line for line in map(json.loads, results.read_text().splitlines())}
    missing = [name for name in names or VARIANTS if name not in found]
    assert not missing, f"ended with {done.returncode} in {missing[0]!r}: {done.stderr[-3000:]}"
    return found


@pytest.fixture(scope="module")
def found(good: tuple[Path, Path], tmp_path_factory: pytest.TempPathFactory) -> Found:
    return read_all(good, tmp_path_factory.mktemp("hostile") / "scratch")


def problems(line: dict[str, Any]) -> list[str]:
    """What is not as it should be."""
    variant, outcomes = VARIANTS[line["name"]], line["found"]
    wanted = WANTED[variant.expects].format(word=variant.word)
    says = [f"{what}: {line[what]}" for what in ("seen", "changed", "canary") if line[what]]
    for way, said in outcomes.items():
        if way in ("restore", "manager") and not re.match(wanted, said, re.DOTALL):
            says.append(f"{way} was to be {variant.expects} with {variant.word!r}: {said[:500]}")
        if said.startswith(("broken", "touched")) or any(
            word in said for word in ("MemoryError", "[raw", "[unforeseen")
        ):
            says.append(f"{way}: {said[:500]}")
    if variant.expects == "older" and not outcomes["restore 2"].startswith("refused"):
        says.append(f"asked for by its number: {outcomes['restore 2'][:500]}")
    if variant.expects == "held" and not outcomes["restore 2"].startswith("step 2 filled [2.0]"):
        says.append(f"asked for by its number, in spite of its quarantine: {outcomes['restore 2'][:500]}")
    return says


@pytest.mark.timeout(320)
def test_the_corpus_is_read_to_its_end_in_bounded_memory(found: Found) -> None:
    assert len(found) == len(VARIANTS) >= 60
    assert max(line["peak_bytes"] for line in found.values()) < PEAK_BYTES


@pytest.mark.timeout(320)
@pytest.mark.parametrize("name", VARIANTS)
def test_it_ends_with_an_error_of_ours_and_nothing_is_run_or_changed(name: str, found: Found) -> None:
    assert not problems(found[name])


def test_a_payload_of_the_corpus_would_run_and_would_be_seen(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The control: plain pickle on the same bytes makes the canary."""
    import pickle

    from hostile.hostile_store import PlainDcp

    monkeypatch.setenv("CANARY", str(tmp_path / "canary"))
    make_plain(tmp_path / "plain")
    for name in ("plain: metadata that is a call of os.system", "plain: metadata that is a call of builtins.eval"):
        store = PlainDcp(copy(tmp_path / "plain", tmp_path / "store"))
        VARIANTS[name].make(store)
        pickle.loads(store.metadata.read_bytes())
        assert (tmp_path / "canary").exists()
        (tmp_path / "canary").unlink()
        shutil.rmtree(store.root)


def test_the_command_itself_refuses_one(good: tuple[Path, Path], tmp_path: Path) -> None:
    """One of them, as people do it."""
    store = Run(copy(good[0], tmp_path / "store"))
    VARIANTS["run: a value nested 65 deep"].make(store)
    VARIANTS["run: a generation after itself"].make(store)
    for args in (["ls"], ["show"], ["verify"]):
        command = [sys.executable, "-m", "resilio", *args, str(store.root)]
        done = subprocess.run(command, capture_output=True, text=True, timeout=100, check=False)
        assert done.returncode == 1
        assert "later generations" in done.stderr and "Traceback" not in done.stderr
