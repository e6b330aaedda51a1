"""The GPT: its shapes, its tie, causality, and that it learns."""

from __future__ import annotations

import math

import pytest
import torch

from resilio_drills.data import GlobalSampler, corpus, windows
from resilio_drills.model import GPT, VOCAB, GPTConfig, parameter_groups

TINY = GPTConfig(n_layer=2, n_head=2, n_embd=32, block_size=32)


def tiny(config: GPTConfig = TINY, seed: int = 0) -> GPT:
    torch.manual_seed(seed)
    return GPT(config)


def test_logits_and_losses_have_the_documented_shapes() -> None:
    model = tiny()
    idx = torch.randint(0, VOCAB, (3, 20))
    assert model(idx).shape == (3, 20, VOCAB)
    assert model(idx, idx).shape == (3,)


def test_an_untrained_model_knows_nothing() -> None:
    idx = torch.randint(0, VOCAB, (8, 32))
    assert tiny()(idx, idx.roll(1)).mean().item() == pytest.approx(math.log(VOCAB), abs=0.1)


def test_the_head_shares_the_embedding() -> None:
    model = tiny()
    assert model.lm_head.weight is model.wte.weight
    names = [name for name, _ in model.named_parameters()]
    assert "wte.weight" in names and "lm_head.weight" not in names
    assert "lm_head.weight" in model.state_dict()


def test_no_position_sees_what_comes_after_it() -> None:
    model = tiny().eval()
    idx = torch.randint(0, VOCAB, (1, 20))
    changed = idx.clone()
    changed[0, 12] = (changed[0, 12] + 1) % VOCAB
    same = (model(idx) == model(changed)).all(dim=2)[0]
    assert same[:12].all() and not same[12:].any()


def test_the_same_seed_gives_the_same_weights() -> None:
    first, second, other = tiny(), tiny(), tiny(seed=1)
    assert all(torch.equal(a, b) for a, b in zip(first.parameters(), second.parameters(), strict=True))
    assert not torch.equal(first.wte.weight, other.wte.weight)


def test_dropout_acts_in_training_only() -> None:
    model = tiny(GPTConfig(n_layer=1, n_head=2, n_embd=32, block_size=32, dropout=0.5))
    idx = torch.randint(0, VOCAB, (1, 20))
    assert not torch.equal(model(idx), model(idx))
    model.eval()
    assert torch.equal(model(idx), model(idx))


def test_heads_that_do_not_divide_the_width_are_refused() -> None:
    with pytest.raises(ValueError, match="n_head=3"):
        GPTConfig(n_embd=64, n_head=3)


@pytest.mark.parametrize("bias", [False, True])
def test_every_parameter_is_in_one_group_and_only_matrices_decay(bias: bool) -> None:
    model = tiny(GPTConfig(n_layer=1, n_head=2, n_embd=32, block_size=32, bias=bias))
    decay, plain = parameter_groups(model, 0.1)
    assert (decay["weight_decay"], plain["weight_decay"]) == (0.1, 0.0)
    assert {p.dim() for p in decay["params"]} == {2} and {p.dim() for p in plain["params"]} == {1}  # type: ignore[attr-defined]
    grouped = [id(p) for group in (decay, plain) for p in group["params"]]  # type: ignore[attr-defined]
    assert sorted(grouped) == sorted(id(p) for p in model.parameters())


def test_the_loss_falls_in_thirty_steps() -> None:
    model = tiny()
    optimizer = torch.optim.AdamW(parameter_groups(model, 0.1), lr=3e-3)
    samples = windows(corpus(200_000), TINY.block_size)
    sampler = GlobalSampler(len(samples), seed=0)
    losses = []
    for _ in range(30):
        window = samples[sampler.next_batch(12)].long()
        loss = model(window[:, :-1], window[:, 1:]).mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    assert losses[-1] < 4.0 < 5.0 < losses[0]
