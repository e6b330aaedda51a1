"""`resilio import`: what came from elsewhere can be restored bit for bit; what is damaged makes no run."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

import resilio as lib
from resilio.records import catalog


class Net(torch.nn.Module):
    def __init__(self, seed: int) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.up, self.type_ = torch.nn.Linear(3, 5), torch.nn.Linear(5, 2).to(torch.bfloat16)
        self.register_buffer("seen", torch.tensor(seed))
        self.register_buffer("mask", torch.tensor([True, False, True]))


def restored(url: Path) -> dict[str, torch.Tensor]:
    net = Net(9)
    lib.restore(url, {"model": net}, only=["model"])
    return net.state_dict()


def write(path: Path, net: Net, how: str) -> Path:
    state = net.state_dict()
    if how == "file":
        save_file(state, path)
    elif how == "index":
        path.mkdir()
        names = sorted(state)
        parts = {"a.safetensors": names[:3], "b.safetensors": names[3:]}
        for name, ones in parts.items():
            save_file({one: state[one] for one in ones}, path / name)
        index = {"weight_map": {one: name for name, ones in parts.items() for one in ones}}
        (path / "model.safetensors.index.json").write_text(json.dumps(index))
    else:
        torch.save(state if how == "torch" else {"model": state, "epoch": 3}, path)
    return path


@pytest.mark.parametrize("how", ["file", "index", "torch", "nested"])
def test_a_model_comes_back_bit_for_bit(resilio: Any, tmp_path: Path, how: str) -> None:
    net = Net(1)
    source = write(tmp_path / "source", net, how)
    code, out, err = resilio("import", str(source), "--to", str(tmp_path / "run"), "--step", "70")
    assert (code, err) == (0, "")
    assert "step 70: 6 tensors" in out
    got = restored(tmp_path / "run")
    assert all(torch.equal(got[name], tensor) for name, tensor in net.state_dict().items())
    assert resilio("verify", str(tmp_path / "run"))[0] == 0


def test_what_export_wrote_is_imported_again(resilio: Any, tmp_path: Path) -> None:
    source = write(tmp_path / "source", Net(1), "file")
    assert resilio("import", str(source), "--to", str(tmp_path / "one"))[0] == 0
    assert resilio("export", str(tmp_path / "one"), "--to", str(tmp_path / "out"), "--only", "model.*")[0] == 0
    args = ("--to", str(tmp_path / "two"), "--strip-prefix", "model.")
    assert resilio("import", str(tmp_path / "out"), *args)[0] == 0
    assert resilio("diff", str(tmp_path / "one"), "0", "0", "--other", str(tmp_path / "two"))[0] == 0


def test_a_run_with_checkpoints_is_refused_unless_asked_for(resilio: Any, tmp_path: Path) -> None:
    source = write(tmp_path / "source", Net(1), "file")
    args = ("import", str(source), "--to", str(tmp_path / "run"))
    assert resilio(*args)[0] == 0
    write(source, Net(2), "file")
    code, _, err = resilio(*args)
    assert code == 2 and "--fresh" in err
    assert restored(tmp_path / "run")["seen"] == 1
    assert resilio(*args, "--fresh")[0] == 0
    assert restored(tmp_path / "run")["seen"] == 2


def test_a_run_that_was_begun_while_the_source_was_read_is_not_imported_into_its_own_state(
    resilio: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = write(tmp_path / "source", Net(1), "file")
    args = ("import", str(source), "--to", str(tmp_path / "run"))
    assert resilio(*args)[0] == 0
    write(source, Net(2), "file")
    monkeypatch.setattr(catalog, "discover", catalog.Catalog)  # the first look finds nothing yet
    code, _, err = resilio(*args, "--step", "5")
    assert code == 2 and "has checkpoints already" in err
    monkeypatch.undo()
    assert [one.name for one in sorted((tmp_path / "run/commits").iterdir())] == ["000000000-g000001.json"]


class Runs:
    def __init__(self, marker: Path) -> None:
        self.marker = marker

    def __reduce__(self) -> Any:
        return open, (str(self.marker), "w")


def test_what_is_no_model_makes_no_run(resilio: Any, tmp_path: Path) -> None:
    whole = write(tmp_path / "x", Net(1), "file").read_bytes()
    length = int.from_bytes(whole[:8], "little")
    header = json.loads(whole[8 : 8 + length])
    bad = {
        "cut": (1, whole[:-1]),
        "long": (1, (1 << 60).to_bytes(8, "little") + whole[8:]),
        "json": (1, whole[:8] + b"{" * length + whole[8 + length :]),
        "empty": (1, b""),
    }
    for name, change in {
        "offsets": {"data_offsets": [0, 1 << 62]},
        "negative": {"data_offsets": [-60, 0]},
        "shape": {"shape": [-3, -5]},
        "dtype": {"dtype": "F31"},
        "kind": {"shape": "35"},
    }.items():
        text = json.dumps({**header, "up.weight": {**header["up.weight"], **change}}).encode()
        bad[name] = (1, len(text).to_bytes(8, "little") + text + whole[8 + length :])
    for name, (expected, data) in bad.items():
        (tmp_path / name).write_bytes(data)
        code, out, err = resilio("import", str(tmp_path / name), "--to", str(tmp_path / "run"))
        assert (code, out) == (expected, ""), (name, err)
        assert str(tmp_path / name) in err
    torch.save({"model": Runs(tmp_path / "ran")}, tmp_path / "code.pt")
    assert resilio("import", str(tmp_path / "code.pt"), "--to", str(tmp_path / "run"))[0] == 1
    torch.save({"epoch": 3}, tmp_path / "none.pt")
    assert resilio("import", str(tmp_path / "none.pt"), "--to", str(tmp_path / "run"))[0] == 2
    assert resilio("import", str(tmp_path / "nowhere"), "--to", str(tmp_path / "run"))[0] == 4
    assert not (tmp_path / "ran").exists()
    assert not (tmp_path / "run" / "commits").exists()


def test_what_is_trusted_is_run_and_a_warning_names_it(
    resilio: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    torch.save({"model": Net(1).state_dict(), "args": Runs(tmp_path / "ran")}, tmp_path / "code.pt")
    torch.save(Net(2).state_dict(), tmp_path / "old.pt", _use_new_zipfile_serialization=False)
    for name, word in (("code.pt", "open"), ("old.pt", "before torch 1.6")):
        args = ("import", str(tmp_path / name), "--to", str(tmp_path / f"run {name}"))
        code, _, err = resilio(*args)
        assert code == 1 and word in err and "--trust" in err
        assert not (tmp_path / "ran").exists() and not (tmp_path / f"run {name}").exists()
    for seed, name in ((1, "code.pt"), (2, "old.pt")):
        url = tmp_path / f"run {name}"
        assert resilio("import", str(tmp_path / name), "--to", str(url), "--trust")[0] == 0
        assert f"--trust: {'io.open' if seed == 1 else 'of an unknown kind'} in {tmp_path / name}" in caplog.text
        for key, value in restored(url).items():
            assert torch.equal(value, Net(seed).state_dict()[key])
    assert (tmp_path / "ran").exists()


def test_a_file_that_is_safe_is_not_unpickled_though_it_is_trusted(
    resilio: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    write(tmp_path / "x.pt", Net(1), "torch")
    assert resilio("import", str(tmp_path / "x.pt"), "--to", str(tmp_path / "run"), "--trust")[0] == 0
    assert "unpickling" not in caplog.text
