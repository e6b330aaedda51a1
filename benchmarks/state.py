"""The state that is saved: a model of GPT-2's shape with AdamW's moments, at any size."""

from __future__ import annotations

from math import sqrt

import torch
from torch import nn
from torch.distributed.tensor import DTensor

__all__ = ["LAYERS", "SPOILT", "Job", "local"]

LAYERS, _WIDTH, _VOCAB, _CONTEXT = 12, 768, 50257, 1024  # GPT-2 124M
SPOILT = -1.0
_BYTES_EACH = 12  # fp32: parameter and two moments


class Shapes(nn.Module):
    """GPT-2's parameters at another width: as many tensors, all in the same proportions.

    Its forward uses each of them as GPT-2 does, but for attention: gates stand in for it.
    """

    def __init__(self, width: int, layers: int) -> None:
        super().__init__()
        self.wte = nn.Embedding(_VOCAB * width // _WIDTH, width)
        self.wpe = nn.Embedding(_CONTEXT * width // _WIDTH, width)
        self.blocks = nn.ModuleList(
            nn.ModuleDict(
                {
                    "norm_1": nn.LayerNorm(width),
                    "qkv": nn.Linear(width, 3 * width),
                    "proj": nn.Linear(width, width),
                    "norm_2": nn.LayerNorm(width),
                    "up": nn.Linear(width, 4 * width),
                    "down": nn.Linear(4 * width, width),
                }
            )
            for _ in range(layers)
        )
        self.norm = nn.LayerNorm(width)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """The loss of predicting each token from itself."""
        places = torch.arange(len(tokens), device=tokens.device) % self.wpe.num_embeddings
        hidden = self.wte(tokens) + self.wpe(places)
        for block in self.blocks:
            query, key, value = block["qkv"](block["norm_1"](hidden)).chunk(3, dim=-1)  # type: ignore[index]
            hidden = hidden + block["proj"](torch.tanh(query) * key + value)  # type: ignore[index]
            hidden = hidden + block["down"](nn.functional.gelu(block["up"](block["norm_2"](hidden))))  # type: ignore[index]
        return nn.functional.cross_entropy(self.norm(hidden) @ self.wte.weight.T, tokens)


def local(tensor: torch.Tensor) -> torch.Tensor:
    """This rank's part."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


class Job:
    """Model and optimizer after one step; sharded over the default group by FSDP2 if asked for.

    Args:
        mb: size of parameters and moments, 10^6 bytes; 1490 is GPT-2 124M.
        layers: blocks of the model; fewer are wider.
        sharded: whether each rank holds its rows only.
        device: of all of it.
    """

    def __init__(self, mb: float, layers: int = LAYERS, *, sharded: bool = False, device: str = "cpu") -> None:
        parameters = 12 * layers * _WIDTH**2 + (_VOCAB + _CONTEXT) * _WIDTH  # without vectors, which do not count
        width = max(8, 8 * round(_WIDTH * sqrt(mb * 1e6 / _BYTES_EACH / parameters) / 8))
        torch.manual_seed(0)
        self.model: nn.Module = Shapes(width, layers).to(device)
        self.vocabulary: int = self.model.wte.num_embeddings
        if sharded:
            from torch.distributed.device_mesh import init_device_mesh
            from torch.distributed.fsdp import fully_shard

            world = torch.distributed.get_world_size()
            fully_shard(self.model, mesh=init_device_mesh("cpu", (world,)))
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-4)
        for parameter in self.model.parameters():
            parameter.grad = parameter.detach().clone()
        self.optimizer.step()
        self.optimizer.zero_grad()
        self._marks = [float(_first(tensor)) for tensor in self.tensors()]

    def tensors(self) -> list[torch.Tensor]:
        """This rank's parts of parameters, moments and step counters."""
        moments = [value for state in self.optimizer.state.values() for value in state.values()]
        found = [*self.model.parameters(), *moments]
        return [local(tensor.detach()) for tensor in found if isinstance(tensor, torch.Tensor)]

    @property
    def size_bytes(self) -> int:
        """What this rank has to save or load, without names and settings."""
        return sum(tensor.nbytes for tensor in self.tensors())

    def scramble(self) -> None:
        """Spoil one element of every tensor, so that a load that does nothing shows."""
        for tensor in self.tensors():
            _first(tensor).fill_(SPOILT)

    def check(self) -> None:
        """Pass if what `scramble` spoilt is back."""
        marks = [float(_first(tensor)) for tensor in self.tensors()]
        if marks != self._marks:
            raise AssertionError("the load did not bring the state back: its time means nothing")


def _first(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.reshape(-1)[:1] if tensor.numel() else torch.zeros(1)
