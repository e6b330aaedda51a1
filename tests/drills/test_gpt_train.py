"""The loop: one gradient however a global batch is cut, and a resumed run that goes on as if nothing had happened."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from resilio.testing.worlds import run_world
from resilio_drills.data import GlobalSampler, corpus, share_of, windows
from resilio_drills.train import Config, World, build_model, forward_backward, main, train

TINY = Config(n_layer=1, n_head=2, n_embd=32, block_size=16, corpus_bytes=50_000, steps=10, warmup=2, device="cpu")
TINY = dataclasses.replace(TINY, print_every=100, save_every=3)
SAMPLES = windows(corpus(TINY.corpus_bytes), TINY.block_size)
BATCH = GlobalSampler(len(SAMPLES), seed=2).next_batch(12)


def url(folder: Path) -> str:
    return f"file://{folder / 'run'}"


# ---------------------------------------------------------------------------------------------------------------------
# One step


def gradients(world: int, micro_batch: int, batch: list[int] = BATCH) -> tuple[float, list[Tensor]]:
    """Loss and gradients of one step, as all ranks of a world would have them, computed one after the other."""
    config = dataclasses.replace(TINY, global_batch=len(batch))
    model = build_model(config, World(0, 1, torch.device("cpu")))
    loss = 0.0
    for rank in range(world):
        place = World(rank, world, torch.device("cpu"))
        passes = share_of(batch, rank, world, micro_batch)
        loss += forward_backward(model, SAMPLES, passes, config, place).item()
    # The gradients of all ranks have piled up in one model; DDP and FSDP2 would have taken their mean.
    return loss, [p.grad / world for p in model.parameters() if p.grad is not None]


@pytest.mark.parametrize(
    ("world", "micro_batch"), [(1, 6), (1, 5), (1, 1), (2, 6), (2, 4), (3, 6), (3, 3), (4, 2), (5, 2)]
)
def test_loss_and_gradients_do_not_depend_on_how_the_batch_is_cut(world: int, micro_batch: int) -> None:
    whole_loss, whole = gradients(1, len(BATCH))
    loss, cut = gradients(world, micro_batch)
    assert loss == pytest.approx(whole_loss, rel=1e-6)
    for a, b in zip(cut, whole, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-7)


def test_padding_weighs_nothing() -> None:
    """Eleven samples on four ranks: one place is padding."""
    assert any(p.n_real < len(p.ids) for p in share_of(BATCH[:11], 3, 4, 6))
    whole_loss, whole = gradients(1, 11, BATCH[:11])
    loss, cut = gradients(4, 6, BATCH[:11])
    assert loss == pytest.approx(whole_loss, rel=1e-6)
    for a, b in zip(cut, whole, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-7)


def real_gradients(rank: int, world: int, strategy: str, micro_batch: int) -> list[Tensor]:
    config = dataclasses.replace(TINY, strategy=strategy, micro_batch=micro_batch)
    place = World(rank, world, torch.device("cpu"))
    model = build_model(config, place)
    forward_backward(model, SAMPLES, share_of(BATCH, rank, world, micro_batch), config, place)
    return [_full(p) for p in model.parameters()]


def _full(parameter: nn.Parameter) -> Tensor:
    grad: Any = parameter.grad
    full: Tensor = grad.full_tensor() if hasattr(grad, "full_tensor") else grad
    return full.clone()


@pytest.mark.parametrize("strategy", ["ddp", "fsdp2"])
@pytest.mark.parametrize("world", [2, 3])
def test_ranks_together_have_the_gradients_of_one_process(strategy: str, world: int) -> None:
    """With accumulation, where ranks talk in the last pass only."""
    _, whole = gradients(1, len(BATCH))
    for grads in run_world(real_gradients, world, strategy, 2):
        for a, b in zip(grads, whole, strict=True):
            torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-7)


def test_gradients_stay_local_until_the_last_pass() -> None:
    for strategy in ("ddp", "fsdp2"):
        assert run_world(count_reductions, 2, strategy) == [[0, 0, 1]] * 2


def count_reductions(rank: int, world: int, strategy: str) -> list[int]:
    """For each of three passes, whether the gradient of a block's first weight was reduced in it."""
    from unittest.mock import patch

    import resilio_drills.train as train_module

    config = dataclasses.replace(TINY, strategy=strategy, micro_batch=2)
    place = World(rank, world, torch.device("cpu"))
    model = build_model(config, place)
    asked: list[int] = []
    real = train_module.last_pass_only

    def spy(module: nn.Module, is_last: bool) -> Any:
        context = real(module, is_last)
        if strategy == "ddp":
            asked.append(int(type(context).__name__ == "nullcontext"))
        else:
            state: Any = module
            asked.append(int(state._get_fsdp_state()._fsdp_param_group.reduce_grads))
        return context

    with patch.object(train_module, "last_pass_only", spy):
        forward_backward(model, SAMPLES, share_of(BATCH, rank, world, 2), config, place)
    return asked


# ---------------------------------------------------------------------------------------------------------------------
# The loop, with checkpoints


def run(rank: int, world: int, changes: dict[str, Any]) -> dict[int, float]:
    """One life on every rank of a world."""
    return train(dataclasses.replace(TINY, **changes))


def lives(folder: Path, worlds: tuple[int, int], **changes: Any) -> tuple[dict[int, float], dict[int, float]]:
    """Losses of a run at the first number of ranks, and of one stopped there at step 7 and resumed at the second."""
    strategy = changes.pop("strategy", "single")
    whole = {**changes, "strategy": strategy, "store": url(folder / "whole")}
    parts = {**whole, "store": url(folder / "parts")}
    if strategy == "single":
        return run(0, 1, whole), {**run(0, 1, {**parts, "stop_after": 7}), **run(0, 1, parts)}
    first, second = worlds
    expected = run_world(run, first, whole)[0]
    before = run_world(run, first, {**parts, "stop_after": 7})[0]
    after = run_world(run, second, parts)[0]
    assert min(after) == 8, "it did not resume"
    return expected, {**before, **after}


@pytest.mark.parametrize(
    "changes", [{}, {"dropout": 0.2}, {"compile": True, "compile_backend": "eager"}, {"mode": "sync"}]
)
def test_one_process_stopped_and_resumed_is_bit_exact(tmp_path: Path, changes: dict[str, Any]) -> None:
    whole, parts = lives(tmp_path, (1, 1), **changes)
    assert list(whole) == list(range(1, 11))
    assert parts == whole


@pytest.mark.parametrize("strategy", ["ddp", "fsdp2"])
def test_two_ranks_stopped_and_resumed_are_bit_exact(tmp_path: Path, strategy: str) -> None:
    whole, parts = lives(tmp_path, (2, 2), strategy=strategy, dropout=0.2)
    assert parts == whole


@pytest.mark.parametrize(("second", "compiled"), [(1, True), (3, False)])
def test_resumed_at_another_number_of_ranks_it_goes_on_alike(tmp_path: Path, second: int, compiled: bool) -> None:
    """Sums are taken in another order: equal but for the last bits. A lost optimizer state is off by 2e-1."""
    whole, parts = lives(tmp_path, (2, second), strategy="fsdp2", compile=compiled, compile_backend="eager")
    assert parts == pytest.approx(whole, rel=1e-5)


def test_each_rank_notes_what_it_trained_on(tmp_path: Path) -> None:
    run_world(run, 2, {"strategy": "fsdp2", "store": url(tmp_path), "step_log": str(tmp_path / "log")})
    lines = [json.loads(line) for rank in (0, 1) for line in (tmp_path / f"log.{rank}").read_text().splitlines()]
    sampler = GlobalSampler(len(SAMPLES), TINY.seed)
    for step in range(1, 11):
        seen = [i for line in lines if line["step"] == step for i in line["ids"]]
        assert sorted(seen) == sorted(sampler.next_batch(12))
    assert len({line["life"] for line in lines}) == 2
    assert all(len({line["loss"] for line in lines if line["step"] == step}) == 1 for step in range(1, 11))


def test_flags_train_and_a_finished_run_has_nothing_left_to_do(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    flags = [
        "--steps",
        "4",
        "--n-layer",
        "1",
        "--n-embd",
        "32",
        "--block-size",
        "16",
        "--corpus-bytes",
        "50000",
        "--device",
        "cpu",
        "--print-every",
        "2",
    ]
    losses = main([*flags, "--store", url(tmp_path)])
    assert list(losses) == [1, 2, 3, 4]
    assert main([*flags, "--store", url(tmp_path)]) == {}
    out = capsys.readouterr().out
    assert "a new run   single   1 rank" in out and "resumed from step 4" in out and "step     4/4" in out


def test_a_fresh_run_starts_at_step_one_over_old_checkpoints(tmp_path: Path) -> None:
    changes = {"store": url(tmp_path), "steps": 4}
    first = run(0, 1, changes)
    assert run(0, 1, {**changes, "fresh": True}) == first


def test_single_under_several_ranks_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(ValueError, match="fsdp2"):
        train(dataclasses.replace(TINY, store="memory://x"))


def test_torchrun_takes_none_of_our_flags_for_its_own() -> None:
    """Its parser reads the flags behind the script, too, and stops at one that could be short for two of its own."""
    from torch.distributed.run import get_args_parser

    flags = [f"--{field.name.replace('_', '-')}" for field in dataclasses.fields(Config)]
    args = get_args_parser().parse_args(
        ["--nproc-per-node", "2", "-m", "resilio_drills.train", *(part for flag in flags for part in (flag, "1"))]
    )
    assert args.training_script_args[::2] == flags
