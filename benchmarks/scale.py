"""What grows with ranks, tensors and checkpoints: planning, the manifest, listing. Simulated in one process."""

from __future__ import annotations

import gc
import os
import pickle
import re
import subprocess
import sys
from dataclasses import replace
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import msgspec
import torch
import torch.distributed as dist
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex
from torch.distributed.checkpoint.planner import SavePlan, TensorWriteData, WriteItem
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard

from resilio import CheckpointManager
from resilio.engine.agreed import still_holds
from resilio.engine.plan import LocalPlan, Planner
from resilio.records import keys, schema
from resilio.records.catalog import discover
from resilio.records.digests import digest_of
from resilio.records.manifest import load_manifest
from resilio.state.flat import FlatState, Ref
from resilio.storage.local import LocalStorage
from resilio.storage.memory import MemoryStorage
from resilio.types import CheckpointRef

from .contenders import quiet
from .figures import Figure
from .options import Options
from .timing import Times, by_turns

__all__ = ["ls", "planning"]

_LOCAL, _GLOBAL = ", local", ", global"
_COLUMNS = 64
_PLANNED = 128  # ranks that the global plan is made for, at most: a million items take minutes


def planning(_rank: int, _world: int, options: Options, _folder: Path) -> list[Figure]:
    """`replan` and `manifest`. In a fresh process, in which a group of as many ranks is faked."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    quiet()
    ranks = options.sim_ranks
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=ranks)
    flat = _state(options.sim_tensors, ranks)
    times = Times()
    first = LocalPlan.of(flat, 0)  # imports, caches
    for _ in range(options.rounds):
        plan = times.time(f"first{_LOCAL}", partial(LocalPlan.of, flat, 0))
        looked_at = replace(flat, form=object())  # compared in full, as if capture had not looked it through
        again = times.time(f"second{_LOCAL}", partial(LocalPlan.of, looked_at, 0, plan))
    some = min(ranks, _PLANNED)
    gc.disable()  # items that do not die: collecting them would measure the simulation
    plans = [_plan_of(first, rank, some) for rank in range(some)]
    planner = Planner(first, 0, some, "first", lambda failure: None)
    shares, metadata = times.time(f"first{_GLOBAL}", partial(planner.create_global_plan, plans))
    planner.finish_plan(shares[0])
    gc.enable()
    again.agreed = planner.made
    for _ in range(options.rounds):
        times.time(f"second{_GLOBAL}", partial(_agree, again, ranks))
    dcp_bytes = len(pickle.dumps(metadata.state_dict_metadata))
    del metadata, plans
    # Scaled as if linear in the ranks: loaded runs from 64 to 1,024 grew faster than that.
    before = median(times.wall[f"first{_LOCAL}"]) + times.wall[f"first{_GLOBAL}"][0] * ranks / some
    after = median(times.wall[f"second{_LOCAL}"]) + median(times.wall[f"second{_GLOBAL}"])
    about = {"ranks": ranks, "tensors": options.sim_tensors, "ranks made": some}
    replan = Figure(
        "replan",
        after / before,
        times.wall,
        {
            **about,
            "local": median(times.wall[f"second{_LOCAL}"]) / median(times.wall[f"first{_LOCAL}"]),
            "first s": before,
            "second s": after,
        },
        note="first: rank 0's own plan, and the global one over plans made from it, scaled to all ranks; without the "
        "collectives that carry the plans. second: rank 0's state compared with the plan, the words of all ranks read "
        "and judged, its share of the agreed plan; without the meeting that brings the words",
    )
    return [replan, _manifest(first, some, about, dcp_bytes)]


def _agree(plan: LocalPlan, ranks: int) -> None:
    """What rank 0 does before a later save: reads what each rank says of its plan, and uses the one they agreed on."""
    words = [pickle.dumps(plan.stand) for _ in range(ranks)]
    if not still_holds([pickle.loads(word) for word in words]):
        raise AssertionError("the plan does not hold: the second time means nothing")
    planner = Planner(plan, 0, ranks, "second", lambda failure: None, plan.agreed)
    shares, _ = planner.create_global_plan([planner.create_local_plan()])
    planner.finish_plan(shares[0])


def _state(tensors: int, ranks: int) -> FlatState:
    """Rank 0's: a row of each tensor."""
    mesh = init_device_mesh("cpu", (ranks,))
    names = [f"model.layers.{number}.weight" for number in range(tensors)]
    return FlatState(
        tensors={
            name: DTensor.from_local(torch.zeros(1, _COLUMNS), mesh, [Shard(0)], run_check=False) for name in names
        },
        kinds=dict.fromkeys(names, "parameter"),
        paths={name: ("model", name.removeprefix("model.")) for name in names},
        tree={"model": {name.removeprefix("model."): Ref(name) for name in names}},
    )


def _plan_of(first: LocalPlan, rank: int, ranks: int) -> SavePlan:
    """What `rank` of `ranks` would send, made from rank 0's: the next row of everything."""
    at, size = torch.Size((rank, 0)), torch.Size((ranks, _COLUMNS))
    items = []
    for item in first.items:
        data = item.tensor_data
        assert data is not None
        data = TensorWriteData(ChunkStorageMetadata(at, data.chunk.sizes), data.properties, size)
        items.append(WriteItem(MetadataIndex(item.index.fqn, at), item.type, tensor_data=data))
    return SavePlan(items, planner_data=first.evidence)


def _manifest(plan: LocalPlan, ranks: int, about: dict[str, Any], dcp_bytes: int) -> Figure:
    """Records as a save would write them, but for the data and with made-up digests."""
    store = MemoryStorage(f"bench-{os.getpid()}")
    attempt = keys.attempt_name(1, 1, "0" * 8)
    digest, size_bytes = digest_of(b"", "xxh3_128"), 4 * _COLUMNS
    parts, total = [], 0
    for rank in range(ranks):
        data_name = keys.data_name(rank, 0)
        tensors = {}
        for number, (name, (dtype, shape, _)) in enumerate(plan.specs.items()):
            piece = schema.Piece(
                offsets=[rank, 0],
                sizes=[1, _COLUMNS],
                object=0,
                at=number * size_bytes,
                size_bytes=size_bytes,
                block=number,
                fingerprint=digest_of(b"", "xxh3_128"),
            )
            tensors[name] = schema.TensorRecord(dtype=dtype, shape=[ranks, *shape[1:]], pieces=[piece])
        objects = [
            schema.ObjectRecord(name=name, size_bytes=len(tensors) * size_bytes, digest=digest, rest=digest)
            for name in (data_name, keys.digests_name(data_name))
        ]
        part = schema.ManifestPart(
            format=schema.FORMAT,
            rank=rank,
            objects=objects,
            tensors=tensors,
            values={},
            tree=plan.tree if rank == 0 else None,
            counted=True,
        )
        data = schema.encode(part)
        name = keys.part_name(rank)
        store.put(keys.attempt_key(attempt, name), data)
        parts.append(schema.PartRef(rank=rank, name=name, size_bytes=len(data), digest=digest_of(data, "xxh3_128")))
        total += len(data)
    root = schema.Manifest(
        format=schema.FORMAT, step=1, attempt=attempt, world=ranks, digest="xxh3_128", parts=parts, objects=[]
    )
    data = schema.encode(root)
    store.put(keys.attempt_key(attempt, keys.MANIFEST), data)
    commit = schema.CommitRecord(
        format=schema.FORMAT,
        step=1,
        generation=1,
        attempt=attempt,
        manifest_size_bytes=len(data),
        manifest_digest=digest_of(data, "xxh3_128"),
        nonce="bench",
        time_s=0.0,
        world=ranks,
    )
    total += len(data)
    times = Times()
    times.time("load_manifest", partial(load_manifest, store, commit))
    return Figure(
        "manifest",
        total / dcp_bytes,
        times.wall,
        {**about, "bytes": total, "bytes of .metadata": dcp_bytes, "bytes a piece": total / ranks / len(plan.specs)},
        note=".metadata without its storage_data; all of it for the ranks made, both grow with the ranks; loaded once",
    )


def ls(options: Options, folder: Path) -> list[Figure]:
    """How long the command takes. Called outside of any world."""
    one, many = folder / "one", folder / "many"
    for run, count in ((one, 1), (many, options.checkpoints)):
        with CheckpointManager(run, {"model": torch.nn.Linear(1, 1)}, mode="sync") as manager:
            manager.save(1)
        _multiply(run, count)
    listing = subprocess.run(_command(many), check=True, capture_output=True, text=True).stdout
    seen = len(re.findall(r'"step"', listing))
    if seen < options.checkpoints:
        raise AssertionError(f"`resilio ls` shows {seen} of {options.checkpoints} checkpoints: its time means nothing")
    acts = {
        name: partial(subprocess.run, _command(run), check=True, capture_output=True)
        for name, run in (("one", one), ("many", many))
    }
    times = by_turns(options.rounds, acts)  # type: ignore[arg-type]
    return [
        Figure(
            "ls",
            median(times.wall["many"]) / median(times.wall["one"]),
            times.wall,
            {"checkpoints": options.checkpoints},
            note="the whole command, start of Python included",
        )
    ]


def _command(run: Path) -> list[str]:
    return [sys.executable, "-m", "resilio", "ls", "--json", str(run)]


def _multiply(run: Path, count: int) -> None:
    """More checkpoints like the first, without the cost of saving them."""
    storage = LocalStorage(run)
    catalog = discover(storage)
    ref = catalog.commits[0]
    record = catalog.read(ref)
    for step in range(2, count + 1):
        attempt = keys.attempt_name(step, ref.generation, f"{step:08x}")
        (run / attempt).mkdir()
        for path in (run / record.attempt).iterdir():
            (run / attempt / path.name).hardlink_to(path)
        data = schema.encode(msgspec.structs.replace(record, step=step, attempt=attempt))
        (run / keys.commit_key(CheckpointRef(ref.generation, step))).write_bytes(data)
