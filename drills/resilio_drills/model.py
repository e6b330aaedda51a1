"""A byte-level GPT in one file: the model that every loop and drill here trains.

The vocabulary is the 256 bytes, so there is no tokenizer. It is a plain pre-norm decoder: token and position
embeddings, `n_layer` blocks of causal self-attention and an MLP, a last norm, and a head that shares its weight with
the token embedding. Sizes go from "seconds on a CPU" (the defaults) to billions of parameters by the fields of
`GPTConfig`:

    GPTConfig()                                                       0.1 M   a test
    GPTConfig(n_layer=12, n_head=12, n_embd=768,  block_size=1024)     86 M   GPT-2's shape
    GPTConfig(n_layer=32, n_head=32, n_embd=4096, block_size=2048)    6.5 G   needs FSDP2

In the shape comments: B samples, T bytes of context, C = n_embd, H = n_head, D = C / H, V = 256.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F

__all__ = ["GPT", "VOCAB", "GPTConfig", "parameter_groups"]

VOCAB = 256  # every byte is a token


@dataclass(frozen=True)
class GPTConfig:
    """Sizes of a `GPT`.

    Attributes:
        n_layer: blocks.
        n_head: attention heads per block; must divide `n_embd`.
        n_embd: width of the model.
        block_size: the longest context, in bytes.
        dropout: probability; 0 for exact comparison between different numbers of ranks.
        bias: whether linear layers and norms have one.
    """

    n_layer: int = 2
    n_head: int = 2
    n_embd: int = 64
    block_size: int = 64
    dropout: float = 0.0
    bias: bool = False

    def __post_init__(self) -> None:
        if self.n_embd % self.n_head:
            raise ValueError(f"n_embd={self.n_embd} is not a multiple of n_head={self.n_head}")


class CausalSelfAttention(nn.Module):
    """Every position looks at itself and at what came before."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.n_head = config.n_head
        self.dropout = config.dropout
        self.qkv = nn.Linear(config.n_embd, 3 * config.n_embd, bias=config.bias)  # weight (3C, C)
        self.proj = nn.Linear(config.n_embd, config.n_embd, bias=config.bias)  # weight (C, C)

    def forward(self, x: Tensor) -> Tensor:
        """(B, T, C) -> (B, T, C)."""
        B, T, C = x.shape
        q, k, v = self.qkv(x).split(C, dim=2)  # 3 × (B, T, C)
        q, k, v = (t.view(B, T, self.n_head, C // self.n_head).transpose(1, 2) for t in (q, k, v))  # 3 × (B, H, T, D)
        p = self.dropout if self.training else 0.0
        y = F.scaled_dot_product_attention(q, k, v, dropout_p=p, is_causal=True)  # (B, H, T, D)
        y = y.transpose(1, 2).reshape(B, T, C)  # heads side by side again: (B, T, C)
        return F.dropout(self.proj(y), self.dropout, self.training)  # (B, T, C)


class MLP(nn.Module):
    """Four times as wide inside."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.dropout = config.dropout
        self.up = nn.Linear(config.n_embd, 4 * config.n_embd, bias=config.bias)  # weight (4C, C)
        self.down = nn.Linear(4 * config.n_embd, config.n_embd, bias=config.bias)  # weight (C, 4C)

    def forward(self, x: Tensor) -> Tensor:
        """(B, T, C) -> (B, T, C)."""
        y = self.down(F.gelu(self.up(x)))  # (B, T, C), by way of (B, T, 4C)
        return F.dropout(y, self.dropout, self.training)


class Block(nn.Module):
    """Attention, then MLP, each on a normed input and added to the stream. The unit that FSDP2 shards."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.norm_1 = nn.LayerNorm(config.n_embd, bias=config.bias)  # weight (C,)
        self.attention = CausalSelfAttention(config)
        self.norm_2 = nn.LayerNorm(config.n_embd, bias=config.bias)  # weight (C,)
        self.mlp = MLP(config)

    def forward(self, x: Tensor) -> Tensor:
        """(B, T, C) -> (B, T, C)."""
        x = x + self.attention(self.norm_1(x))  # (B, T, C)
        return torch.add(x, self.mlp(self.norm_2(x)))  # (B, T, C)


class GPT(nn.Module):
    """The whole model. Deterministic on a CPU: the same seed gives the same weights, the same weights the same loss."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.config = config
        self.wte = nn.Embedding(VOCAB, config.n_embd)  # weight (V, C)
        self.wpe = nn.Embedding(config.block_size, config.n_embd)  # weight (block_size, C)
        self.blocks = nn.ModuleList(Block(config) for _ in range(config.n_layer))
        self.norm = nn.LayerNorm(config.n_embd, bias=config.bias)  # weight (C,)
        self.lm_head = nn.Linear(config.n_embd, VOCAB, bias=False)  # weight (V, C), the same tensor as wte's
        self.lm_head.weight = self.wte.weight
        self._init_weights()

    def _init_weights(self) -> None:
        for name, parameter in self.named_parameters():  # names a tied weight once
            if parameter.dim() < 2:
                continue  # norms start at one and biases as torch makes them
            # What is added to the stream gets smaller with depth, so that the sum does not grow (GPT-2).
            into_stream = name.endswith(("proj.weight", "down.weight"))
            std = 0.02 / math.sqrt(2 * self.config.n_layer) if into_stream else 0.02
            nn.init.normal_(parameter, mean=0.0, std=std)

    def forward(self, idx: Tensor, targets: Tensor | None = None) -> Tensor:
        """Logits, or with `targets` the loss of each sample.

        Args:
            idx: bytes as int64, (B, T) with T up to `block_size`.
            targets: the byte after each of them, (B, T).

        Returns:
            Without targets (B, T, V); with them (B,): nats per byte, not yet averaged over samples, because only the
            loop knows how big the global batch is.
        """
        _, T = idx.shape
        position = torch.arange(T, device=idx.device)  # (T,)
        x = self.wte(idx) + self.wpe(position)  # (B, T, C) + (T, C)
        x = F.dropout(x, self.config.dropout, self.training)  # (B, T, C)
        for block in self.blocks:
            x = block(x)  # (B, T, C)
        logits: Tensor = self.lm_head(self.norm(x))  # (B, T, V)
        if targets is None:
            return logits
        # cross_entropy wants the classes second: (B, V, T) against (B, T) -> (B, T) -> (B,)
        return F.cross_entropy(logits.transpose(1, 2), targets, reduction="none").mean(dim=1)


def parameter_groups(model: nn.Module, weight_decay: float) -> list[dict[str, object]]:
    """Two groups for an optimizer: matrices and embeddings decay, norms and biases do not.

    Call it *after* `fully_shard`, which replaces the parameters.
    """
    parameters = [p for p in model.parameters() if p.requires_grad]
    return [
        {"params": [p for p in parameters if p.dim() >= 2], "weight_decay": weight_decay},
        {"params": [p for p in parameters if p.dim() < 2], "weight_decay": 0.0},
    ]
