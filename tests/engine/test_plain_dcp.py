"""Every attempt folder is a plain DCP checkpoint: read by a process that never imports resilio."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

from workload import build

from resilio import CheckpointManager
from resilio.testing.worlds import run_world

READ = """
import json, sys
import torch, torch.distributed.checkpoint as dcp
from torch import nn
folder = sys.argv[1]
sys.path.insert(0, sys.argv[2])
from workload import build
job = build("single", seed=9)
sd = {"model": job.model.state_dict()}
dcp.load(sd, checkpoint_id=folder)
names = {p: n for n, p in job.model.named_parameters(remove_duplicate=True)}
job.model.load_state_dict(sd["model"])
full = {}
from torch.distributed.checkpoint.default_planner import _EmptyStateDictLoadPlanner
from torch.distributed.checkpoint.state_dict_loader import _load_state_dict
_load_state_dict(full, storage_reader=dcp.FileSystemReader(folder), planner=_EmptyStateDictLoadPlanner(), no_dist=True)
assert not any(name.split(".")[0] == "resilio" for name in sys.modules), "resilio was imported"
print(json.dumps({
    "params": [p.double().sum().item() for p in job.model.parameters()],
    "tied": job.model.head.weight is job.model.emb.weight,
    "lr": full["optimizer"]["param_groups"][0]["lr"],
    "names": full["optimizer"]["param_groups"][1]["params"],
    "moments": full["optimizer"]["state"]["norm.weight"]["exp_avg"].double().sum().item(),
    "scheduler": full["scheduler"]["last_epoch"],
    "step": full["step"],
    "loader": sorted(k for k in full),
}))
"""


def train_and_save(rank: int, world: int, url: str) -> dict:
    job = build("fsdp2" if world > 1 else "single", rank, world)
    with CheckpointManager(url, job.state(), mode="sync") as ckpt:
        ckpt.restore()
        for _ in range(4):
            job.train_step()
        ckpt.save(4)
    job.model.state_dict()
    whole = [p.full_tensor() if hasattr(p, "full_tensor") else p for p in job.model.parameters()]
    norm = job.optimizer.state[job.model.norm.weight]["exp_avg"]
    norm = norm.full_tensor() if hasattr(norm, "full_tensor") else norm
    return {
        "params": [p.double().sum().item() for p in whole],
        "lr": job.optimizer.param_groups[0]["lr"],
        "moments": norm.double().sum().item(),
        "scheduler": job.scheduler.last_epoch,
    }


def test_plain_dcp_reads_the_same_tensors_and_values_without_resilio(tmp_path):
    for world in (1, 2):
        run = tmp_path / f"run{world}"
        wrote = run_world(train_and_save, world, f"file://{run}", init=world > 1)[0]
        folder = next(run.glob("step-*"))
        tests = Path(__file__).parents[1]
        out = subprocess.run(
            [sys.executable, "-c", READ, str(folder), str(tests)],
            capture_output=True,
            text=True,
            timeout=120,
            check=False,
        )
        assert out.returncode == 0, out.stderr
        read = json.loads(out.stdout.splitlines()[-1])
        assert read["params"] == wrote["params"]
        assert read["tied"]
        assert read["lr"] == wrote["lr"] != 0.01  # the scheduler has moved it
        assert read["moments"] == wrote["moments"]
        assert read["scheduler"] == wrote["scheduler"] == 4
        assert read["step"] == 4
        assert "norm.weight" in read["names"]
