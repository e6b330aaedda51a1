"""The benchmarks run, and say what they should. What they measure is judged by people."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
TINY = [
    *("--mb", "2", "--rounds", "1", "--layers", "1", "--threads", "1", "--sim-ranks", "4", "--sim-tensors", "10"),
    *("--saves", "2", "--checkpoints", "3", "--loop-steps", "5"),
]
FIELDS = {"figure", "ratio", "target", "reached", "about", "seconds", "parts", "absent", "note"}


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "benchmarks.run", *arguments]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True)


@pytest.mark.full  # two minutes beside other tests, which would be the last thing that CI waits for
def test_each_figure_has_a_line_with_its_ratio_and_what_is_behind_it(tmp_path: Path):
    done = run(*TINY, "--dir", str(tmp_path), "--json")
    assert done.returncode == 0, done.stderr
    about, *lines = map(json.loads, done.stdout.splitlines())
    assert set(about["about"]["peers"]) == {"safetensors", "torchsnapshot", "torch_checkpointing"}
    assert [line["figure"] for line in lines] == EVERY
    for line in lines:
        assert line.keys() >= FIELDS, line
        if line["ratio"] is None:
            assert line["absent"], f"{line['figure']} has no ratio and does not say why"
            continue
        assert line["ratio"] > 0
        assert (line["target"] is None) == (line["reached"] is None)
        assert line["seconds"]
        assert all(line["seconds"].values()), line
        assert f"{line['figure']}: " in done.stderr
    assert not list(tmp_path.iterdir())


def test_an_unknown_figure_is_refused_and_the_known_ones_are_named():
    done = run("--only", "hold_overlap,speed")
    assert done.returncode == 2
    assert "no figure is called speed" in done.stderr
    assert "hold_overlap" in done.stderr


@pytest.mark.parametrize("figure", ["manifest"])
def test_the_table_shows_the_figure_and_the_machine(figure: str, tmp_path: Path):
    done = run(*TINY, "--dir", str(tmp_path), "--only", figure)
    assert done.returncode == 0, done.stderr
    assert figure in done.stdout
    assert "cores" in done.stdout


EVERY = [
    "hold_overlap",
    "hold_block",
    "hold_block_vs_memcpy",
    "hold_vs_torch_checkpointing",
    "step_during_save",
    "step_during_dcp_save",
    "first_hold",
    "save_vs_dcp_default",
    "save_vs_dcp_best",
    "save_vs_limit",
    "save_vs_torch_checkpointing",
    "integrity_cost",
    "restore_warm_vs_dcp",
    "restore_vs_preadv",
    "restore_vs_torch_checkpointing",
    "restore_cold_vs_dcp",
    "restore_1to4_vs_dcp",
    "restore_4to1_vs_dcp",
    "read_amplification",
    "replan",
    "manifest",
    "loop_overhead",
    "memory",
    "ls",
]
