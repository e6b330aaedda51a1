"""Train the byte-level GPT with checkpoints: one loop for one process, DDP and FSDP2, eager or compiled.

One process (a laptop, a debugger):

    python -m resilio_drills.train --store "file://$PWD/.runs/gpt"

Two ranks, sharded and compiled. On CPUs this runs over gloo; on GPUs the same command runs over NCCL:

    torchrun --standalone --nproc-per-node 2 -m resilio_drills.train --strategy fsdp2 --compile \
        --steps 100 --save-every 10 --store "file://$PWD/.runs/gpt"

Resume: give the same command again, after a crash, Ctrl-C or a SIGKILL. The number of ranks, the strategy and
`--micro-batch` may differ; `--global-batch` and what describes model, data and schedule must not:

    python -m resilio_drills.train --steps 100 --save-every 10 --store "file://$PWD/.runs/gpt"

Lines that use resilio are marked `# resilio`. The rest is a training loop as you have one.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import json
import os
import sys
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.nn.parallel import DistributedDataParallel
from torch.optim.lr_scheduler import CosineAnnealingLR, LinearLR, SequentialLR

from resilio import (  # resilio
    CheckpointManager,
    TrainingState,
    keep_last,
    replicated,
    save_every,
    save_on_signal,
)
from resilio_drills.data import GlobalSampler, MicroBatch, corpus, share_of, windows
from resilio_drills.model import GPT, GPTConfig, parameter_groups

__all__ = ["Config", "main", "train"]


@dataclass(frozen=True)
class Config:
    """Every setting; each is a flag of the same name (`--global-batch 12`, `--compile`)."""

    # Checkpoints
    store: str = ""  # the run's URL: file:///…, s3://…
    save_every: int = 10  # steps
    keep_last: int = 3  # checkpoints
    mode: Literal["sync", "async"] = "async"
    fresh: bool = False  # start anew over a store that has checkpoints
    # How far
    steps: int = 100  # the whole run: warm-up and decay of the learning rate are laid out over it
    stop_after: int = 0  # end after this step already, as if the time were up; 0: go on to `steps`
    # How
    strategy: str = "single"  # single | ddp | fsdp2
    compile: bool = False
    compile_backend: str = "inductor"
    device: str = "auto"  # auto | cpu | cuda
    global_batch: int = (
        12  # samples per optimizer step, all ranks together; 12 can be shared by 1, 2, 3, 4 ranks evenly
    )
    micro_batch: int = 6  # at most so many samples in one pass on one rank; the rest by gradient accumulation
    # Model and data
    n_layer: int = 2
    n_head: int = 2
    n_embd: int = 64
    block_size: int = 64
    dropout: float = 0.0
    bias: bool = False
    corpus_bytes: int = 2_000_000
    seed: int = 1337
    # Optimizer
    lr: float = 3e-3
    warmup: int = 5  # steps
    weight_decay: float = 0.1
    grad_clip: float = 1.0
    # Output
    # Each rank appends one JSON line per step to <step_log>.<rank>; reads the loss at every step. (A flag named --log
    # would not do: torchrun takes it for a shortened --log-dir or --logs-specs of its own.)
    step_log: str = ""
    print_every: int = 10  # steps


CHOICES = {
    "mode": ("sync", "async"),
    "strategy": ("single", "ddp", "fsdp2"),
    "device": ("auto", "cpu", "cuda"),
}

# ---------------------------------------------------------------------------------------------------------------------
# Where this process stands among the others


@dataclass(frozen=True)
class World:
    """This process's place: its rank, the number of ranks, its device."""

    rank: int
    size: int
    device: torch.device


def join_world(config: Config) -> World:
    """Make the process group, if the strategy needs one, and pick the device."""
    local_rank = int(os.environ.get("LOCAL_RANK", "0"))  # torchrun sets RANK, LOCAL_RANK and WORLD_SIZE
    cuda = config.device == "cuda" or (config.device == "auto" and torch.cuda.is_available())
    device = torch.device("cuda", local_rank) if cuda else torch.device("cpu")
    if cuda:
        torch.cuda.set_device(device)
        # Same numbers in every life of the job: exactness is what resuming is judged by here. Costs some speed.
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
        torch.use_deterministic_algorithms(True, warn_only=True)
    if config.strategy == "single":
        if int(os.environ.get("WORLD_SIZE", "1")) > 1:
            raise ValueError("--strategy single is one process; with more ranks use --strategy ddp or fsdp2")
        return World(0, 1, device)
    backend = "cpu:gloo,cuda:nccl" if cuda else "gloo"
    if not dist.is_initialized():
        if "RANK" in os.environ:
            dist.init_process_group(backend)
        else:  # no torchrun: a world of one, for a debugger
            dist.init_process_group(backend, init_method="tcp://127.0.0.1:0", rank=0, world_size=1)
    return World(dist.get_rank(), dist.get_world_size(), device)


# ---------------------------------------------------------------------------------------------------------------------
# Model, optimizer, schedule


def build_model(config: Config, world: World) -> nn.Module:
    """The model on this rank's device, wrapped as the strategy wants it. Every rank starts from the same weights."""
    torch.manual_seed(config.seed)
    gpt = GPT(GPTConfig(config.n_layer, config.n_head, config.n_embd, config.block_size, config.dropout, config.bias))
    model: nn.Module = gpt
    if config.compile:
        # Block by block: all blocks share one compiled graph, so it is quick to start, and FSDP's hooks stay outside.
        for i, block in enumerate(gpt.blocks):
            gpt.blocks[i] = cast(nn.Module, torch.compile(block, backend=config.compile_backend))
    if config.strategy == "fsdp2":
        mesh = init_device_mesh(world.device.type, (world.size,))
        for block in gpt.blocks:
            fully_shard(block, mesh=mesh)  # moves the block to the device as it shards it
        fully_shard(gpt, mesh=mesh)  # what is left: embeddings, last norm, head
    elif config.strategy == "ddp":
        model = DistributedDataParallel(gpt.to(world.device))
    else:
        gpt.to(world.device)
    # From here on randomness (dropout) is each rank's own.
    torch.manual_seed(config.seed + 1 + world.rank)
    return model


def build_optimizer(config: Config, model: nn.Module) -> tuple[torch.optim.Optimizer, SequentialLR]:
    """AdamW, and a learning rate that warms up and then falls along a cosine to a tenth."""
    optimizer = torch.optim.AdamW(parameter_groups(model, config.weight_decay), lr=config.lr, betas=(0.9, 0.95))
    warmup = LinearLR(optimizer, start_factor=1 / (config.warmup + 1), total_iters=config.warmup)
    decay = CosineAnnealingLR(optimizer, T_max=max(1, config.steps - config.warmup), eta_min=config.lr / 10)
    return optimizer, SequentialLR(optimizer, [warmup, decay], milestones=[config.warmup])


# ---------------------------------------------------------------------------------------------------------------------
# One step


def last_pass_only(model: nn.Module, is_last: bool) -> contextlib.AbstractContextManager[None]:
    """Let the gradients of all passes but the last pile up locally: ranks talk once per step, not once per pass."""
    if isinstance(model, FSDPModule):
        model.set_requires_gradient_sync(is_last)
    if isinstance(model, DistributedDataParallel) and not is_last:
        return model.no_sync()
    return contextlib.nullcontext()


def forward_backward(
    model: nn.Module, samples: Tensor, passes: Sequence[MicroBatch], config: Config, world: World
) -> Tensor:
    """Gradients of the mean loss over the global batch, whatever the number of ranks and passes.

    Args:
        model: as `build_model` made it.
        samples: the whole corpus cut into windows, uint8, (n_samples, T + 1).
        passes: this rank's part of the global batch.
        config: for the size of the global batch.
        world: this process's place.

    Returns:
        This rank's part of the mean loss, a 0-d tensor on the device; summed over the ranks it is the mean.
    """
    total = torch.zeros((), device=world.device)
    for i, micro in enumerate(passes):
        window = samples[micro.ids].to(world.device, torch.long)  # (B, T + 1)
        weight = torch.zeros(len(micro.ids), device=world.device)  # (B,)
        weight[: micro.n_real] = 1 / config.global_batch  # padding weighs nothing
        with last_pass_only(model, is_last=i == len(passes) - 1):
            losses = model(window[:, :-1], window[:, 1:])  # (B,)
            loss = (losses * weight).sum()  # 0-d
            (loss * world.size).backward()  # DDP and FSDP2 take the mean over ranks; what is wanted is the sum
        total += loss.detach()
    return total


def train_step(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    scheduler: SequentialLR,
    samples: Tensor,
    passes: Sequence[MicroBatch],
    config: Config,
    world: World,
) -> Tensor:
    """One optimizer step. Returns the mean loss over the global batch: 0-d, on the device, so nothing waits yet."""
    loss = forward_backward(model, samples, passes, config, world)
    if world.size > 1:
        dist.all_reduce(loss)
    torch.nn.utils.clip_grad_norm_(model.parameters(), config.grad_clip)
    optimizer.step()
    scheduler.step()
    optimizer.zero_grad(set_to_none=True)
    return loss


# ---------------------------------------------------------------------------------------------------------------------
# The loop


def train(config: Config) -> dict[int, float]:
    """Train to the end, from the newest checkpoint on if there is one.

    Returns:
        Step -> mean loss over the global batch, for the last steps of this life (at most 1000).
    """
    was_initialized = dist.is_initialized()
    world = join_world(config)
    samples = windows(corpus(config.corpus_bytes), config.block_size)  # (n_samples, T + 1), uint8, stays on the host
    sampler = GlobalSampler(len(samples), config.seed)
    model = build_model(config, world)
    optimizer, scheduler = build_optimizer(config, model)
    last_step = min(config.steps, config.stop_after or config.steps)
    recent: deque[tuple[int, Tensor]] = deque(maxlen=1000)

    # The sampler's position is the whole job's, equal on all ranks: so it fits any number of them.
    state = TrainingState(  # resilio
        model=model, optimizer=optimizer, scheduler=scheduler, dataloader=replicated(sampler)
    )
    with (
        StepLog(config, world) as log,
        CheckpointManager(  # resilio
            config.store,
            state,
            save=save_every(config.save_every) | save_on_signal("SIGTERM"),
            keep=keep_last(config.keep_last),
            mode=config.mode,
            fresh=config.fresh,
        ) as ckpt,
    ):
        report = ckpt.restore()  # resilio
        ranks = f"{world.size} rank{'s' if world.size > 1 else ''}"
        log.say(f"resumed from step {report.step}" if report.found else "a new run", config.strategy, ranks)
        for step in range(ckpt.next_step, last_step + 1):  # resilio
            batch = sampler.next_batch(config.global_batch)
            passes = share_of(batch, world.rank, world.size, config.micro_batch)
            lr = optimizer.param_groups[0]["lr"]
            loss = train_step(model, optimizer, scheduler, samples, passes, config, world)
            recent.append((step, loss))
            log.step(step, passes, loss, lr, is_last=step == last_step)
            ckpt.step(step, metrics={"loss": loss}, last=step == last_step)  # resilio
            if ckpt.stop_requested:  # resilio: SIGTERM reached some rank, and all have saved this step
                log.say(f"asked to stop: step {step} is saved")
                break

    if dist.is_initialized() and not was_initialized:
        dist.destroy_process_group()
    return {step: float(loss) for step, loss in recent}


class StepLog(contextlib.AbstractContextManager["StepLog"]):
    """A line for people (rank 0), and a JSON line per step and rank for who wants to check which samples were seen."""

    def __init__(self, config: Config, world: World) -> None:
        self.config, self.world = config, world
        self.started = time.perf_counter()
        self.tokens = 0
        self.life = f"{os.getpid()}-{time.time_ns()}"  # one process's time on the job
        self.file = None
        if config.step_log:
            path = Path(f"{config.step_log}.{world.rank}")
            path.parent.mkdir(parents=True, exist_ok=True)
            self.file = path.open(
                "a", buffering=1, encoding="utf-8"
            )  # a line is out when it is written: we may be killed

    def __exit__(self, *_: object) -> None:
        if self.file is not None:
            self.file.close()

    def say(self, *parts: str) -> None:
        """One line for people, from rank 0."""
        if self.world.rank == 0:
            print(*parts, sep="   ", flush=True)

    def step(self, step: int, passes: Sequence[MicroBatch], loss: Tensor, lr: float, *, is_last: bool) -> None:
        """Note a step that is done."""
        config = self.config
        if self.file is not None:
            line: dict[str, Any] = {
                "life": self.life,
                "pid": os.getpid(),
                "rank": self.world.rank,
                "world": self.world.size,
            }
            ids = [i for micro in passes for i in micro.ids[: micro.n_real]]
            line |= {"step": step, "ids": ids, "loss": loss.item(), "lr": lr}
            self.file.write(json.dumps(line) + "\n")
        self.tokens += config.global_batch * config.block_size
        if step % config.print_every == 0 or is_last:
            value = loss.item()  # waits for the device: so not at every step
            now = time.perf_counter()
            speed = self.tokens / (now - self.started)
            self.say(f"step {step:>5}/{config.steps}", f"loss {value:.4f}", f"lr {lr:.2e}", f"{speed:,.0f} tokens/s")
            self.started, self.tokens = now, 0


# ---------------------------------------------------------------------------------------------------------------------


def main(argv: Sequence[str] | None = None) -> dict[int, float]:
    """Read the flags and train. Returns the last losses by step."""
    parser = argparse.ArgumentParser(
        prog="python -m resilio_drills.train", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    for field in dataclasses.fields(Config):
        flag = "--" + field.name.replace("_", "-")
        if isinstance(field.default, bool):
            parser.add_argument(flag, action=argparse.BooleanOptionalAction, default=field.default)
        else:
            kind = type(field.default)
            parser.add_argument(
                flag, type=kind, default=field.default, choices=CHOICES.get(field.name), required=field.name == "store"
            )
    return train(Config(**vars(parser.parse_args(argv))))


if __name__ == "__main__":
    try:
        main()
    except ValueError as error:  # a wrong flag, or a checkpoint that does not fit: the message says which
        sys.exit(f"error: {error}")
