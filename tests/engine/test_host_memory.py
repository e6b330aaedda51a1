"""How much memory there is for the copy of a state, and what happens where there is too little."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from resilio import CheckpointManager, TrainingState
from resilio.engine import host_memory
from resilio.engine.host_memory import available_bytes
from resilio.errors import SaveError

GIB = 1 << 30


def machine(root: Path, **files: str) -> Path:
    for name, text in files.items():
        path = root / name.replace("__", "/")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return root


MEMINFO = f"MemTotal: {8 * 1024 * 1024} kB\nMemFree: 1 kB\nMemAvailable: {4 * 1024 * 1024} kB\nHugePages_Total: 0\n"


def test_a_machine_says_how_much_is_available(tmp_path: Path) -> None:
    assert available_bytes(machine(tmp_path, proc__meminfo=MEMINFO)) == 4 * GIB


def test_a_container_counts_by_its_own_limit_without_the_page_cache(tmp_path: Path) -> None:
    root = machine(tmp_path, proc__meminfo=MEMINFO)
    for name, text in {
        "memory.max": str(2 * GIB),
        "memory.current": str(GIB + 5),
        "memory.stat": f"anon 7\ninactive_file {GIB // 2}\n",
    }.items():
        (root / "sys/fs/cgroup").mkdir(parents=True, exist_ok=True)
        (root / "sys/fs/cgroup" / name).write_text(text)
    assert available_bytes(root) == GIB + GIB // 2 - 5
    (root / "sys/fs/cgroup/memory.max").write_text("max\n")
    assert available_bytes(root) == 4 * GIB


def test_of_a_system_that_says_nothing_nothing_is_known(tmp_path: Path) -> None:
    assert available_bytes(tmp_path) is None


@pytest.mark.parametrize("stage", ["overlap", "block"])
def test_a_save_without_memory_for_its_copy_is_refused_with_the_numbers(
    tmp_path: Path, monkeypatch: Any, stage: Any
) -> None:
    state = TrainingState(table=torch.zeros(5 << 20), rng=False)
    monkeypatch.setattr(host_memory, "available_bytes", lambda: 7)
    with CheckpointManager(tmp_path, state, stage=stage) as ckpt:
        with pytest.raises(SaveError, match=r"it takes 20,971,520 bytes, and 7 are available.*mode='sync'"):
            ckpt.save(1).result()
        monkeypatch.setattr(host_memory, "available_bytes", lambda: GIB)
        with pytest.raises(SaveError, match="no host memory"):  # the one before
            ckpt.save(2)
        ckpt.save(2).result()
        monkeypatch.setattr(host_memory, "available_bytes", lambda: 7)
        ckpt.save(3).result()  # into the buffers that are there
    assert [info.step for info in ckpt.checkpoints()] == [2, 3]


def test_a_synchronous_save_needs_none(tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.setattr(host_memory, "available_bytes", lambda: 7)
    with CheckpointManager(tmp_path, {"table": torch.zeros(5 << 20)}, mode="sync") as ckpt:
        ckpt.save(1)


def test_a_number_of_processes_that_is_none_keeps_no_rank_from_the_others(monkeypatch):
    """What is raised here is raised on one rank, while the others wait for it."""
    for said in ("²", "", "two", "-1"):
        monkeypatch.setenv("LOCAL_WORLD_SIZE", said)
        assert host_memory.lacks(host_memory.WORTH_ASKING) in (True, False)
