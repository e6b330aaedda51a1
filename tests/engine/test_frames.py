"""What `torch.save` writes around the bytes of a tensor is kept: files are byte for byte what it would have written."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import pytest
import torch

from resilio import CheckpointManager, TrainingState
from resilio.engine import data_object


def by_torch(tensor: torch.Tensor) -> bytes:
    crc = torch.serialization.get_crc32_options()
    torch.serialization.set_crc32_options(False)
    try:
        stream = io.BytesIO()
        torch.save(tensor, stream)
        return stream.getvalue()
    finally:
        torch.serialization.set_crc32_options(crc)


def tensors(seed: int) -> dict[str, torch.Tensor]:
    torch.manual_seed(seed)
    return {
        "scalar": torch.rand(()),
        "one": torch.rand(1),
        "row": torch.rand(1, 7),
        "column": torch.rand(7, 1),
        "odd": torch.rand(3, 5, 2),
        "half": torch.rand(1000).bfloat16(),
        "complex": torch.rand(9, dtype=torch.complex64),
        "bool": torch.rand(11) > 0.5,
        "long": torch.randint(0, 1 << 40, (70, 70)),
        "none": torch.zeros(0, 3),
        "view": torch.rand(4, 8)[:, ::2],
        "transposed": torch.rand(4, 8).t(),
        "fp8": torch.rand(64).to(torch.float8_e4m3fn),
        "large": torch.rand(300, 300),
        "strange strides": torch.rand(8).as_strided((1, 8), (3, 1)),
    }


@pytest.mark.parametrize("known", [False, True])
def test_each_item_is_what_torch_save_writes(tmp_path: Path, monkeypatch: Any, known: bool) -> None:
    monkeypatch.setattr(data_object, "_frames", {})
    if known:
        with CheckpointManager(tmp_path / "first", TrainingState(rng=False, all=tensors(1)), mode="sync") as ckpt:
            ckpt.save(1)
        assert len(data_object._frames) > 10

        def refused(*args: Any) -> None:
            raise AssertionError("a kind that is known was saved by torch.save")

        monkeypatch.setattr(data_object._DataObject, "_frame", refused)
    want = tensors(2)
    with CheckpointManager(tmp_path / "run", TrainingState(rng=False, all=want), mode="sync") as ckpt:
        ckpt.save(1)
        assert ckpt.verify(1) == []
    (file,) = (tmp_path / "run").glob("step-*/__0_0.distcp")
    data = file.read_bytes()
    for name, tensor in want.items():
        expected = by_torch(data_object.row_major(tensor))
        assert expected in data, name


def test_no_more_kinds_are_kept_than_there_is_room_for(tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.setattr(data_object, "_frames", {})
    monkeypatch.setattr(data_object, "_FRAMES", 3)
    state = TrainingState(rng=False, all=[torch.rand(n) for n in range(1, 9)])
    with CheckpointManager(tmp_path, state, mode="sync") as ckpt:
        ckpt.save(1)
        ckpt.save(2)
        assert ckpt.verify(2) == []
    assert len(data_object._frames) == 3
