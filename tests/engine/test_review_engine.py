"""Every dtype, layout and placement comes back bit for bit; what cannot be saved or written is named."""

from __future__ import annotations

from contextlib import contextmanager, nullcontext
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from workload import assert_same

from resilio import CheckpointManager
from resilio.errors import CaptureError, OutOfSpaceError, SaveError
from resilio.storage.memory import MemoryStorage
from resilio.testing.worlds import run_world

DTYPES = [
    torch.float32,
    torch.float64,
    torch.bfloat16,
    torch.float16,
    torch.float8_e4m3fn,
    torch.float8_e5m2,
    torch.float8_e8m0fnu,
    torch.float4_e2m1fn_x2,
    torch.complex32,
    torch.complex64,
    torch.complex128,
    torch.bool,
    torch.int8,
    torch.uint8,
    torch.int16,
    torch.uint16,
    torch.int32,
    torch.uint32,
    torch.int64,
    torch.uint64,
]


def pattern(shape: tuple[int, ...], dtype: torch.dtype = torch.float32, seed: int = 0) -> torch.Tensor:
    """Bits of every kind, NaNs with payloads included; 0 and 1 for bool."""
    generator = torch.Generator().manual_seed(seed + sum(shape))
    size = torch.Size(shape).numel() * dtype.itemsize
    raw = torch.randint(0, 2 if dtype is torch.bool else 256, (size,), dtype=torch.uint8, generator=generator)
    return raw.view(dtype).reshape(shape)


def bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().resolve_conj().resolve_neg().contiguous().reshape(-1).view(torch.uint8)


@pytest.mark.parametrize("mode", ["sync", "async"])
def test_every_dtype_and_layout_comes_back_bit_for_bit(mode):
    base = pattern((6, 40_000))
    complex_one = pattern((5, 7), torch.complex64, 3)
    live: dict[str, torch.Tensor] = {str(dtype): pattern((3, 5), dtype) for dtype in DTYPES}
    live |= {
        "0d": torch.tensor(2.5),
        "empty": torch.empty(0),
        "empty2": torch.empty(3, 0, 2, dtype=torch.bfloat16),
        "big": base,
        "view": base[2:5, 10:30_000],
        "one of many": base[3],
        "transposed": base[:, :1000].clone().t(),
        "expanded": torch.arange(5.0).expand(4, 5),
        "conj": complex_one.conj(),
        "neg": complex_one.conj().imag,
        "channels_last": pattern((2, 3, 4, 5), torch.float32, 4).to(memory_format=torch.channels_last),
        "requires grad": pattern((4,), torch.float32, 5).requires_grad_(),
        "parameter": nn.Parameter(pattern((4, 3), torch.float32, 6)),
        "whole blocks": pattern((2, 65536), torch.uint8),
        "odd": pattern((65537 * 3,), torch.uint8),
    }
    want = {key: bits(value).clone() for key, value in live.items()}
    url = f"memory://review-{mode}"
    with CheckpointManager(url, {"things": dict(live)}, mode=mode) as ckpt:
        ckpt.restore()
        ckpt.save(1)
    back: dict[str, torch.Tensor] = {}
    with CheckpointManager(url, {"things": back}) as ckpt:
        assert ckpt.verify(1) == []
        ckpt.restore()
    assert back.keys() == live.keys()
    for key, value in live.items():
        assert back[key].dtype == value.dtype, key
        assert back[key].shape == value.shape, key
        assert torch.equal(bits(back[key]), want[key]), key
    assert back["transposed"].stride() == (1, 1000)
    assert back["channels_last"].is_contiguous(memory_format=torch.channels_last)


class Buffers(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("lazy", torch.polar(torch.ones(4), torch.arange(4.0)).conj())
        self.register_buffer("bits", torch.tensor([True, False]))
        self.register_buffer("scale", torch.tensor([1.0, 2.0]).to(torch.float8_e4m3fn), persistent=False)
        self.register_buffer("none", torch.empty(0, 2))


def test_buffers_of_unusual_kinds_come_back():
    live, other = Buffers(), Buffers()
    other.lazy.zero_()
    with CheckpointManager("memory://review-buffers", {"model": live}, mode="async") as ckpt:
        ckpt.restore()
        ckpt.save(1)
    with CheckpointManager("memory://review-buffers", {"model": other}) as ckpt:
        ckpt.restore()
    assert torch.equal(other.lazy.resolve_conj(), live.lazy.resolve_conj())


def placed(rank: int, world: int, seed: int) -> dict[str, Any]:
    """Tensors of known content on meshes of 1 and 2 dims; `seed` 0 holds zeros."""
    flat = init_device_mesh("cpu", (world,))
    meshes = [flat]
    if world == 4:
        meshes.append(init_device_mesh("cpu", (2, 2), mesh_dim_names=("a", "b")))

    def put(shape, mesh, placements, dtype=torch.float32):
        whole = pattern(shape, dtype, seed) if seed else torch.zeros(shape, dtype=dtype)
        return distribute_tensor(whole, mesh, placements)

    things: dict[str, Any] = {
        "rows": put((7, 300), flat, [Shard(0)]),
        "columns": put((300, 7), flat, [Shard(1)]),
        "wide": put((40, 20_001), flat, [Shard(1)]),
        "tall": put((20_001, 5), flat, [Shard(0)], torch.bfloat16),
        "middle": put((3, 10, 5), flat, [Shard(1)]),
        "few": put((2, 3), flat, [Shard(0)]),
        "none": put((0, 3), flat, [Shard(0)]),
        "none2": put((3, 0), flat, [Shard(0)]),
        "same": put((5, 5), flat, [Replicate()]),
        "scalar": put((), flat, [Replicate()]),
    }
    second = meshes[-1]
    two = [Replicate(), Shard(0)] if world == 4 else [Shard(0)]
    grid = [Shard(0), Shard(1)] if world == 4 else [Shard(1)]
    twice = [Shard(0), Shard(0)] if world == 4 else [Shard(0)]
    mixed = [Shard(1), Replicate()] if world == 4 else [Replicate()]
    things |= {
        "hsdp": put((9, 4), second, two),
        "grid": put((9, 11), second, grid),
        "twice": put((11, 3), second, twice),
        "mixed": put((5, 7), second, mixed, torch.complex64),
    }
    return things


def round_trip(rank: int, world: int, url: str, save: bool) -> dict[str, torch.Tensor]:
    things = placed(rank, world, 7 if save else 0)
    with CheckpointManager(url, {"things": things}, mode="async") as ckpt:
        ckpt.restore()
        if save:
            ckpt.save(1)
    found = {key: value.full_tensor() for key, value in things.items()}
    for key, value in found.items():
        want = pattern(tuple(value.shape), value.dtype, 7)
        assert torch.equal(bits(value), bits(want)), f"{key} on rank {rank} of {world}"
    return found


def test_every_placement_comes_back_at_other_worlds_and_placements(tmp_path):
    run_world(round_trip, 4, f"file://{tmp_path}/4", True)
    for world in (1, 2, 4):
        run_world(round_trip, world, f"file://{tmp_path}/4", False)
    run_world(round_trip, 1, f"file://{tmp_path}/1", True)
    run_world(round_trip, 4, f"file://{tmp_path}/1", False)


class Mlp(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(6, 10), nn.Linear(10, 6)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(torch.relu(self.up(x)))


def tp_and_fsdp(rank: int, world: int, url: str, save: bool, kind: str) -> dict[str, torch.Tensor]:
    torch.manual_seed(0 if save else 1)
    model = Mlp()
    if world == 4 and kind == "tp":
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
        parallelize_module(model, mesh["tp"], {"up": ColwiseParallel(), "down": RowwiseParallel()})
        fully_shard(model, mesh=mesh["dp"])
    elif world == 4:
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
        fully_shard(model, mesh=mesh)
    else:
        fully_shard(model, mesh=init_device_mesh("cpu", (world,)))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    with CheckpointManager(url, {"model": model, "optimizer": optimizer}, mode="sync") as ckpt:
        ckpt.restore()
        if save:
            model(torch.ones(4, 6)).square().sum().backward()
            optimizer.step()
            ckpt.save(1)
    found = {}
    for name, p in model.named_parameters():
        assert isinstance(p, DTensor)
        found[name] = p.full_tensor().detach()
        found |= {
            f"{name}.{k}": v.full_tensor() if isinstance(v, DTensor) else v for k, v in optimizer.state[p].items()
        }
    return found


@pytest.mark.parametrize("kind", ["tp", "hsdp"])
def test_tensor_parallel_and_hybrid_sharding_under_fsdp2_come_back_at_other_worlds(tmp_path, kind):
    url = f"file://{tmp_path}"
    want = run_world(tp_and_fsdp, 4, url, True, kind)[0]
    assert len(want) == 4 * 4
    for world in (1, 4):
        for found in run_world(tp_and_fsdp, world, url, False, kind):
            assert_same(found, want)


class FullDisk(MemoryStorage):
    """Takes `room` bytes of each data object, then refuses as a full disk does."""

    room = 10_000

    @contextmanager
    def writer(self, key, *, size_hint=None):
        left = [self.room]
        with super().writer(key) as sink:

            class Writer:
                def write(self, data):
                    left[0] -= memoryview(data).nbytes
                    if left[0] < 0:
                        raise OutOfSpaceError("the disk is full", key=key)
                    return sink.write(data)

            yield Writer()


@pytest.mark.parametrize("room", [0, 150, 700, 900, 5_000, 50_000])
@pytest.mark.parametrize("mode", ["sync", "async"])
def test_a_disk_that_fills_up_in_the_middle_of_a_tensor_is_named_as_the_cause(mode, room):
    storage = FullDisk(f"review-full-{mode}-{room}")
    storage.room = room
    state = {"things": {"a": torch.ones(1000), "b": torch.ones(100_000)}}
    ckpt = CheckpointManager(storage, state, mode=mode)
    ckpt.restore()
    # A full disk must not look like a broken file format, nor escape those who catch what save() says it raises.
    with pytest.raises(SaveError, match="the disk is full"):
        ckpt.save(1).result()
    with pytest.raises(SaveError) if mode == "async" else nullcontext():
        ckpt.close()
    assert ckpt.checkpoints() == []


def test_a_dtype_the_format_does_not_know_is_refused_before_anything_is_written():
    with CheckpointManager("memory://review-bits", {"things": {"odd": torch.empty(4, dtype=torch.bits8)}}) as ckpt:
        ckpt.restore()
        with pytest.raises(CaptureError, match=r"things\.odd.*bits8"):
            ckpt.save(1)
        assert ckpt.checkpoints() == []
