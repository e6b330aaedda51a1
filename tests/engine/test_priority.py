"""What is written beside training gives way to it; what training waits for does not."""

from __future__ import annotations

import os
import sys
import threading
from pathlib import Path
from typing import Any

import pytest
import torch

from resilio import CheckpointManager
from resilio.engine import data_object, writer

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="threads have no priority of their own here")


def nice() -> int:
    return os.getpriority(os.PRIO_PROCESS, threading.get_native_id())


@pytest.mark.parametrize(
    ("mode", "large", "gives_way"), [("async", True, True), ("async", False, False), ("sync", True, False)]
)
def test_a_large_save_beside_training_gives_way_and_nothing_else_does(
    tmp_path: Path, monkeypatch: Any, mode: Any, large: bool, gives_way: bool
) -> None:
    monkeypatch.setattr(writer, "_IN_THE_WAY", 1000 if large else 1 << 30)
    monkeypatch.setattr(writer, "_WORTH_ONE", 100)  # several threads
    seen: list[int] = []
    write = data_object.write_object

    def watched(*args: Any) -> Any:
        seen.append(nice())
        return write(*args)

    monkeypatch.setattr(writer, "write_object", watched)
    before = nice()
    state = {"mine": {name: torch.ones(300) for name in "abcd"}}
    with CheckpointManager(tmp_path, state, mode=mode) as ckpt:
        for step in (1, 2):
            ckpt.save(step).result()
    assert len(seen) >= 2
    assert {value > before for value in seen} == {gives_way}
    assert nice() == before
