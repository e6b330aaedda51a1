"""Random number generators: python, numpy, torch on CPU and on every accelerator device. Each rank has its own."""

from __future__ import annotations

import hashlib
import random
from typing import Any

import numpy as np
import torch

__all__ = ["capture_rng", "derive_rng", "restore_rng"]


def capture_rng() -> dict[str, Any]:
    """The state of every global generator of this process; draws nothing."""
    state: dict[str, Any] = {
        "python": random.getstate(),
        "numpy": np.random.get_state(legacy=True),
        "torch": torch.get_rng_state(),
    }
    device = _accelerator()
    if device is not None:
        state["accelerator"] = {"type": device, "states": _device_states(device)}
    return state


def restore_rng(state: dict[str, Any]) -> str:
    """Put the generators back to `state`.

    Returns:
        what could not be put back exactly, because this machine has other devices; empty if all was.
    """
    random.setstate(state["python"])
    np.random.set_state(state["numpy"])
    torch.set_rng_state(state["torch"])
    device, saved = _accelerator(), state.get("accelerator")
    if device is None:
        return f"no {saved['type']} here: its generators are left out" if saved else ""
    states = _device_states(device)
    if saved is None or saved["type"] != device:
        _seed_devices(device, _seed(state["torch"], 0, 0), range(len(states)))
        return f"{device} generators were not saved: derived from the saved CPU generator"
    known = saved["states"][: len(states)]
    _set_device_states(device, known)
    if len(states) > len(known):
        _seed_devices(device, _seed(state["torch"], 0, 0), range(len(known), len(states)))
    if len(states) != len(saved["states"]):
        return f"{len(saved['states'])} {device} devices saved, {len(states)} here: restored by index, new ones derived"
    return ""


def derive_rng(torch_state: torch.Tensor, step: int, rank: int) -> None:
    """Seed the generators of a rank that the checkpoint does not know: the same at every resume from it.

    Args:
        torch_state: rank 0's saved CPU generator; stands for the job's seed.
        step: of the checkpoint.
        rank: this one.
    """
    seed = _seed(torch_state, step, rank)
    random.seed(seed)
    np.random.seed([int(word) for word in np.frombuffer(seed, np.uint32)])
    torch.default_generator.manual_seed(int.from_bytes(seed[:8], "little") >> 1)
    device = _accelerator()
    if device is not None:
        _seed_devices(device, seed, range(len(_device_states(device))))


def _seed(torch_state: torch.Tensor, step: int, rank: int) -> bytes:
    text = f"resilio rng step={step} rank={rank} ".encode()
    return hashlib.sha256(text + torch_state.cpu().numpy().tobytes()).digest()


def _accelerator() -> str | None:
    if not torch.accelerator.is_available():
        return None
    device = torch.accelerator.current_accelerator()
    return None if device is None else device.type


def _device_states(device: str) -> list[torch.Tensor]:
    module = torch.get_device_module(device)
    return list(module.get_rng_state_all()) if hasattr(module, "get_rng_state_all") else [module.get_rng_state()]


def _set_device_states(device: str, states: list[torch.Tensor]) -> None:
    module = torch.get_device_module(device)
    if hasattr(module, "set_rng_state_all"):
        for index, state in enumerate(states):
            module.set_rng_state(state, index)
    elif states:
        module.set_rng_state(states[0])


def _seed_devices(device: str, seed: bytes, indices: range) -> None:
    module = torch.get_device_module(device)
    for index in indices:
        word = hashlib.sha256(seed + b"device %d" % index).digest()[:8]
        generator = torch.Generator(device=f"{device}:{index}" if hasattr(module, "set_rng_state_all") else device)
        generator.manual_seed(int.from_bytes(word, "little") >> 1)
        state = generator.get_state()
        if hasattr(module, "set_rng_state_all"):
            module.set_rng_state(state, index)
        else:
            module.set_rng_state(state)
