"""Whatever `resilio import` is given, it ends with an error of ours that names the file, runs nothing, makes no run,
and takes neither much more memory nor much more time than the file is large.

`sources.py` has the files; `source_child.py` imports each, in a process whose memory is bounded.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from hostile.sources import SOURCES, WHOLE

CHILD = Path(__file__).with_name("source_child.py")
TIME_S = 600.0  # for all of them; they take about half a minute


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    scratch = tmp_path_factory.mktemp("sources") / "scratch"
    scratch.mkdir()
    results = scratch.with_name("results.jsonl")
    args = [sys.executable, str(CHILD), str(scratch), str(results)]
    env = {**os.environ, "PYTHONHASHSEED": "0"}
    done = subprocess.run(args, env=env, stderr=subprocess.PIPE, text=True, timeout=TIME_S, check=False)
    lines = {line["name"]: line for line in map(json.loads, results.read_text().splitlines())}
    missing = [name for name in SOURCES if name not in lines]
    assert not missing, f"ended with {done.returncode} in {missing[0]!r}: {done.stderr[-3000:]}"
    return lines


@pytest.mark.timeout(240)
@pytest.mark.parametrize("name", SOURCES)
def test_it_is_imported_or_refused_and_nothing_is_run(name: str, found: dict[str, Any]) -> None:
    line, word = found[name], SOURCES[name][1]
    assert not line["seen"] and not line["canary"], line
    assert set(line["outside"]) <= {"source", "run", "first", "good.pt"}, line
    for bad in ("MemoryError", "[raw", "[unforeseen"):
        assert bad not in line["said"], line
    if word == WHOLE:
        assert line["said"].startswith("exit 0") and line["made"], line
    else:
        assert re.match("exit [12]:", line["said"]) and re.search(word, line["said"]), line
        assert not line["made"], line
