"""Folders of plain DCP: listed, shown and looked at, never called good, never run, never written to."""

from __future__ import annotations

import fractions
import json
import pickle
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import load_file

from resilio import CheckpointManager, open_storage
from resilio.cli import plain
from resilio.errors import NoCheckpointError


def write(folder: Path, seed: int = 0) -> None:
    torch.manual_seed(seed)
    state = {"model": {"w": torch.randn(300, 300), "b": torch.zeros(3, dtype=torch.bfloat16)}, "lr": 0.1}
    dcp.save(state, checkpoint_id=str(folder))


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    for step in (100, 200, 1000):
        write(tmp_path / "tree" / f"step-{step}", step)
    (tmp_path / "tree" / "notes").mkdir()
    (tmp_path / "tree" / "notes" / "7").write_text("no checkpoint")
    return tmp_path / "tree"


def everything(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def test_a_tree_is_listed_by_step_without_torch(tree: Path) -> None:
    code = (
        "import sys; from resilio.cli import main\n"
        "try: main(sys.argv[1:])\n"
        "except SystemExit as end: assert 'torch' not in sys.modules; raise"
    )
    done = subprocess.run([sys.executable, "-c", code, "ls", str(tree)], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert [line.split()[:2] for line in lines[1:4]] == [
        ["1000", "step-1000"],
        ["200", "step-200"],
        ["100", "step-100"],
    ]
    assert "no digests" in lines[-1]


def test_one_is_shown_by_step_by_name_and_by_itself(resilio: Any, tree: Path) -> None:
    for args in ((str(tree), "200"), (str(tree), "step-200"), (str(tree / "step-200"),)):
        page = json.loads(resilio("show", *args, "--tensors", "--json")[1])
        assert [(one["name"], one["dtype"], one["shape"]) for one in page["tensors"]["listed"]] == [
            ("model.b", "bfloat16", [3]),
            ("model.w", "float32", [300, 300]),
        ]
        assert page["values"] == {"count": 1, "components": {"lr": 1}}
    assert json.loads(resilio("show", str(tree), "--json")[1])["plain"]["step"] == 1000
    code, out, _ = resilio("show", str(tree), "100")
    assert code == 0 and "351.6 KiB" in out and "no digests" in out
    assert resilio("show", str(tree), "--tensors", "--match", "*.b")[1].endswith("1 tensor of 2, 6 B\n")
    code, _, err = resilio("show", str(tree), "300")
    assert code == 4 and "step-1000" in err


def test_a_whole_one_is_inconclusive_and_nothing_is_written(resilio: Any, tree: Path) -> None:
    before = everything(tree)
    code, out, _ = resilio("verify", str(tree), "--all")
    assert code == 3
    assert out.count("NOT PROVEN  can be read, CRC-32 fit; no digests") == 3
    code, out, _ = resilio("verify", str(tree / "step-100"), "--quick", "--json")
    page = json.loads(out)
    assert (code, page["good"], page["plain"][0]["looked"]) == (3, False, "files are there, no data was read")
    assert everything(tree) == before
    assert resilio("verify", str(tree), "--sample", "1/2")[0] == 2


@pytest.mark.parametrize("how", ["flipped", "cut", "missing"])
def test_damage_that_can_be_seen_is_1_and_named(resilio: Any, tree: Path, how: str) -> None:
    data = tree / "step-200" / "__0_0.distcp"
    raw = bytearray(data.read_bytes())
    if how == "missing":
        data.unlink()
    else:
        raw[len(raw) // 2] ^= 1
        data.write_bytes(raw if how == "flipped" else raw[:-1000])
    code, out, _ = resilio("verify", str(tree), "200")
    assert code == 1
    assert out.startswith("step-200  DAMAGED  step-200/__0_0.distcp: ")
    assert resilio("verify", str(tree), "100")[0] == 3
    assert resilio("verify", str(tree), "200", "--quick")[0] == (3 if how == "flipped" else 1)


def test_two_are_compared_and_one_with_a_run(resilio: Any, tree: Path, tmp_path: Path) -> None:
    code, out, _ = resilio("diff", str(tree), "100", "200", "--json")
    page = json.loads(out)
    assert (code, page["a"]["name"], page["b"]["step"], page["a"]["generation"]) == (1, "step-100", 200, None)
    (one,) = page["tensors"]["different"]
    ours, theirs = (load(tree / f"step-{step}")["model.w"] for step in (100, 200))
    assert (one["name"], one["elements"]) == ("model.w", int((ours != theirs).sum()))
    assert one["largest"] == pytest.approx(float((ours - theirs).abs().max()))
    assert page["values"] == []
    model = torch.nn.Module()
    model.register_parameter("w", torch.nn.Parameter(ours))
    model.register_buffer("b", torch.zeros(3, dtype=torch.bfloat16))
    with CheckpointManager(tmp_path / "run", {"model": model}, mode="sync") as ckpt:
        ckpt.restore()
        ckpt.save(5)
    args = ("--other", str(tmp_path / "run"), "--match", "model.*")
    assert resilio("diff", str(tree), "100", "5", *args)[0] == 0
    assert resilio("diff", str(tree), "200", "5", *args)[0] == 1


def load(folder: Path) -> dict[str, torch.Tensor]:
    state = {"model": {"w": torch.empty(300, 300), "b": torch.empty(3, dtype=torch.bfloat16)}}
    dcp.load(state, checkpoint_id=str(folder))
    return {f"model.{name}": tensor for name, tensor in state["model"].items()}


def test_one_is_exported_to_both_formats(resilio: Any, tree: Path, tmp_path: Path) -> None:
    before = everything(tree)
    code, out, _ = resilio("export", str(tree), "100", "--to", str(tmp_path / "out"))
    assert code == 0 and out.startswith("step-100  ->  ")
    got, expected = load_file(tmp_path / "out" / "model.safetensors"), load(tree / "step-100")
    assert got.keys() == expected.keys() and all(torch.equal(got[name], expected[name]) for name in got)
    assert json.loads((tmp_path / "out" / "values.json").read_text()) == {"lr": 0.1}
    assert resilio("export", str(tree), "100", "--to", str(tmp_path / "x.pt"), "--format", "torch")[0] == 0
    state = torch.load(tmp_path / "x.pt", weights_only=True)
    assert state.keys() == {"model", "lr"} and torch.equal(state["model"]["w"], expected["model.w"])
    assert everything(tree) == before


def test_a_value_that_would_run_something_is_left_out_or_refused(resilio: Any, tmp_path: Path) -> None:
    dcp.save({"model": {"w": torch.ones(2)}, "bad": Runs(tmp_path / "ran")}, checkpoint_id=str(tmp_path / "step-1"))
    to = ("--to", str(tmp_path / "out"))
    code, _, err = resilio("export", str(tmp_path / "step-1"), *to)
    assert code == 1 and "'bad'" in err and "--only" in err
    assert not (tmp_path / "out").exists() and not (tmp_path / "ran").exists()
    assert resilio("export", str(tmp_path / "step-1"), *to, "--only", "model.*")[0] == 0


def test_a_value_that_is_trusted_and_is_no_plain_one_is_refused_by_name(resilio: Any, tmp_path: Path) -> None:
    dcp.save({"w": torch.ones(2), "odd": fractions.Fraction(1, 2)}, checkpoint_id=str(tmp_path / "step-1"))
    code, _, err = resilio("export", str(tmp_path / "step-1"), "--to", str(tmp_path / "out"), "--trust")
    assert code == 1 and "odd: a value of type fractions.Fraction" in err and not (tmp_path / "out").exists()


def test_a_value_that_is_trusted_is_run_and_what_comes_is_exported(
    resilio: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    for step in (1, 2):
        dcp.save({"w": torch.ones(2), "rng": numpy.arange(step)}, checkpoint_id=str(tmp_path / f"step-{step}"))
    code, _, err = resilio("diff", str(tmp_path), "1", "2")
    assert code == 1 and "--trust" in err and "unpickling" not in caplog.text
    code, out, _ = resilio("diff", str(tmp_path), "1", "2", "--trust", "--json")
    assert code == 1 and [one["name"] for one in json.loads(out)["values"]] == ["rng"]
    assert "_reconstruct" in caplog.text and "in rng" in caplog.text
    to = str(tmp_path / "out")
    assert resilio("export", str(tmp_path), "2", "--to", to)[0] != 0
    assert resilio("export", str(tmp_path), "2", "--to", to, "--trust")[0] == 0
    assert json.loads((tmp_path / "out" / "values.json").read_text())["rng"]["$ndarray"]["shape"] == [2]


class Runs:
    def __init__(self, marker: Path) -> None:
        self.marker = marker

    def __reduce__(self) -> Any:
        return open, (str(self.marker), "w")


def test_metadata_that_would_run_something_is_named_and_not_run(resilio: Any, tree: Path, tmp_path: Path) -> None:
    (tree / "step-100" / ".metadata").write_bytes(pickle.dumps(Runs(tmp_path / "ran")))
    assert resilio("show", str(tree), "100")[0] == 1
    code, out, _ = resilio("verify", str(tree), "100")
    assert code == 1 and ".metadata" in out and "io.open" in out
    assert not (tmp_path / "ran").exists()


def test_attempts_of_a_run_are_not_taken_for_plain_folders(resilio: Any, run: Any) -> None:
    run.begin(1)
    run.storage.put("step-000000100-g000001-7f3a/.metadata", b"an attempt that was never committed")
    code, _, err = resilio("ls", run.url)
    assert code == 4 and "without a checkpoint yet" in err


def test_a_url_that_is_a_whole_bucket_is_not_listed_to_its_end(tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.setattr(plain, "_OBJECTS", 3)
    for i in range(4):
        (tmp_path / str(i)).write_text("x")
    with pytest.raises(NoCheckpointError, match="Give the URL of one checkpoint"):
        plain.folders(open_storage(str(tmp_path)))
