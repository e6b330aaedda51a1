"""`resilio export`: the libraries that others use read back what was saved; what is damaged leaves nothing."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.numpy import load_file as load_numpy
from safetensors.torch import load_file

from resilio import CheckpointManager
from resilio.cli.landing import landing
from resilio.errors import ConfigError


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, dict[str, torch.Tensor], dict[str, Any]]:
    """A run with a small job's whole state: its URL, and what model and optimizer hold."""
    torch.manual_seed(1)
    model = torch.nn.Sequential(torch.nn.Embedding(40, 30), torch.nn.Linear(30, 40, bias=False), torch.nn.Linear(3, 3))
    model[1].weight = model[0].weight = torch.nn.Parameter(torch.randn(40, 30))
    model[2].to(torch.bfloat16)
    model.register_buffer("f8", torch.arange(-8, 7).to(torch.float8_e4m3fn))
    model.register_buffer("none", torch.zeros(0, 4, dtype=torch.bool))
    optimizer = torch.optim.Adam(model.parameters(), lr=0.25)
    sum(p.float().square().sum() for p in model.parameters()).backward()
    optimizer.step()
    url = str(tmp_path_factory.mktemp("trained") / "run")
    with CheckpointManager(url, {"model": model, "optimizer": optimizer}, mode="sync") as ckpt:
        ckpt.restore()
        ckpt.save(7)
    return url, model.state_dict(), optimizer.state_dict()


def same(a: torch.Tensor, b: torch.Tensor) -> bool:
    return (
        a.dtype == b.dtype
        and a.shape == b.shape
        and bool((a.contiguous().view(torch.uint8) == b.contiguous().view(torch.uint8)).all())
    )


def test_a_model_is_loaded_by_safetensors_bit_for_bit(resilio: Any, trained: Any, tmp_path: Path) -> None:
    url, model, _ = trained
    to = tmp_path / "new" / "out"
    code, out, _ = resilio("export", url, "--to", str(to), "--only", "model.*", "--strip-prefix", "model.")
    assert (code, sorted(path.name for path in to.iterdir())) == (0, ["model.safetensors", "values.json"])
    assert out.startswith(f"000000007-g000001  ->  {to}: {len(model)} tensors, ")
    got = load_file(to / "model.safetensors")
    assert got.keys() == model.keys()  # tied ones under each of their names
    assert all(same(got[name], model[name]) for name in model)
    assert sorted(path.name for path in to.parent.iterdir()) == ["out"]  # nothing half-written stays


def test_each_tensor_is_aligned_to_its_items(resilio: Any, trained: Any, tmp_path: Path) -> None:
    to = tmp_path / "x.safetensors"
    assert resilio("export", trained[0], "--to", str(to))[0] == 0
    raw = to.read_bytes()
    length = int.from_bytes(raw[:8], "little")
    header = json.loads(raw[8 : 8 + length])
    del header["__metadata__"]
    sizes = {"F32": 4, "BF16": 2, "F8_E4M3": 1, "BOOL": 1, "U8": 1}
    assert {entry["dtype"] for entry in header.values()} <= sizes.keys()
    assert all((8 + length + one["data_offsets"][0]) % sizes[one["dtype"]] == 0 for one in header.values())


def test_shards_are_small_and_the_index_names_each_tensor_once(resilio: Any, trained: Any, tmp_path: Path) -> None:
    url, _, _ = trained
    to = tmp_path / "out"
    code, out, _ = resilio("export", url, "--to", str(to), "--shard-size", "10K", "--json")
    assert code == 0
    index = json.loads((to / "model.safetensors.index.json").read_text())
    page = json.loads(out)
    assert sorted(page["files"]) == sorted(path.name for path in to.iterdir())
    seen: dict[str, str] = {}
    for path in sorted(to.glob("*.safetensors")):
        tensors = load_file(path)
        assert sum(t.nbytes for t in tensors.values()) <= 10_240
        assert not seen.keys() & tensors.keys()
        seen.update(dict.fromkeys(tensors, path.name))
    assert index["weight_map"] == seen and len(set(seen.values())) > 2
    assert index["metadata"]["total_size"] == page["size_bytes"]
    assert len(seen) == page["tensors"]
    assert json.loads((to / "values.json").read_text())["optimizer.param_groups.0.lr"] == 0.25


def test_one_file_without_torch(branched: Any, tmp_path: Path) -> None:
    to = tmp_path / "x.safetensors"
    code = (
        "import sys; from resilio.cli import main\n"
        "try: main(sys.argv[1:])\n"
        "except SystemExit as end: assert 'torch' not in sys.modules; raise"
    )
    subprocess.run([sys.executable, "-c", code, "export", branched.url, "--to", str(to)], check=True, timeout=120)
    got = load_numpy(to)
    assert got["model.weight"].tobytes() == bytes(i * 7 % 251 for i in range(200_000))
    assert got["optimizer.state.weight.step"] == np.array(400)
    assert json.loads((tmp_path / "x.values.json").read_text())["step"] == 400


def test_torch_loads_the_nested_state_and_a_bare_model(resilio: Any, trained: Any, tmp_path: Path) -> None:
    url, model, optimizer = trained
    to = tmp_path / "x.pt"
    args = ("--to", str(to), "--format", "torch")
    assert resilio("export", url, *args, "--only", "model.*", "--only", "optimizer.*")[0] == 0
    got = torch.load(to, weights_only=True)
    assert got.keys() == {"model", "optimizer"}
    assert got["model"].keys() == model.keys()
    assert all(same(got["model"][name], model[name]) for name in model)
    assert got["model"]["0.weight"].data_ptr() == got["model"]["1.weight"].data_ptr()
    assert got["optimizer"]["param_groups"][0]["lr"] == 0.25
    state = got["optimizer"]["state"]
    assert same(state["2.weight"]["exp_avg"], optimizer["state"][1]["exp_avg"])
    code, _, err = resilio("export", url, *args)
    assert code == 2 and "--force" in err
    assert resilio("export", url, *args, "--only", "model.*", "--strip-prefix", "model.", "--force")[0] == 0
    assert torch.load(to, weights_only=True).keys() == model.keys()
    assert [path.name for path in tmp_path.iterdir()] == ["x.pt"]


@pytest.mark.parametrize("form", ["safetensors", "torch"])
def test_a_damaged_checkpoint_leaves_nothing_and_what_was_there_stays(
    resilio: Any, branched: Any, tmp_path: Path, form: str
) -> None:
    to = tmp_path / "out.safetensors"
    args = ("export", branched.url, "--to", str(to), "--format", form, "--only", "model.*")
    assert resilio(*args)[0] == 0
    before = {path.name: path.read_bytes() for path in tmp_path.iterdir() if path.is_file()}
    data = branched.folder / "step-000000400-g000002-7f3a" / "__0_0.distcp"
    data.chmod(0o644)
    raw = bytearray(data.read_bytes())
    raw[150_000] ^= 1
    data.write_bytes(raw)
    code, out, err = resilio(*args, "--force")
    assert (code, out) == (1, "")
    assert "'model.weight'" in err and "is damaged" in err
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir() if path.is_file()} == before


def test_what_cannot_be_is_2_before_anything_is_written(resilio: Any, branched: Any, tmp_path: Path) -> None:
    to = str(tmp_path / "out")
    for args, says in [
        (("--only", "nothing.*"), "nothing is called nothing.*"),
        (("--strip-prefix", "model.weight"), "the same, or empty"),
        (("--shard-size", "0"), "is no size"),
    ]:
        code, _, err = resilio("export", branched.url, "--to", to, *args)
        assert code == 2 and says in err, err
    assert not (tmp_path / "out").exists()


def test_force_replaces_an_export_and_no_other_folder(resilio: Any, branched: Any, tmp_path: Path) -> None:
    to = tmp_path / "out"
    args = ("export", branched.url, "--to", str(to))
    assert resilio(*args, "--shard-size", "100K")[0] == 0
    assert resilio(*args)[0] == 2
    assert resilio(*args, "--force")[0] == 0
    assert sorted(path.name for path in to.iterdir()) == ["model.safetensors", "values.json"]
    (to / "thesis.tex").write_text("years of work")
    code, _, err = resilio(*args, "--force")
    assert code == 2 and "thesis.tex" in err
    assert (to / "thesis.tex").exists()


def test_a_link_is_not_replaced(tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to(tmp_path)
    with (
        pytest.raises(ConfigError, match="is not replaced"),
        landing(tmp_path / "link", folder=True, force=True, ours=lambda name: True),
    ):
        pass
