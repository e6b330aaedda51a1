"""Public bug reports about optimizer state, each with what is right. Numbers are those of the case list."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from state.state_helpers import bits, picture, restore, save
from torch import nn

from resilio.errors import CaptureError, MismatchError, RestoreError
from resilio.state.training_state import TrainingState

AdamW, SGD = torch.optim.AdamW, torch.optim.SGD


def two_layers(seed: int = 0) -> nn.Sequential:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(3, 3, bias=False), nn.Linear(3, 3, bias=False))


def step(model: nn.Module, optimizer: torch.optim.Optimizer, *names: str) -> None:
    """A step with a gradient for the named parameters only; all by default."""
    for index, (name, parameter) in enumerate(model.named_parameters()):
        parameter.grad = None
        if not names or name in names:
            parameter.grad = torch.full_like(parameter, 0.1 * (index + 1))
    optimizer.step()


def by_name(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    names = {p: n for n, p in model.named_parameters()}
    return {names[p]: bits(entry) for p, entry in optimizer.state.items()}


def test_br_01_capture_of_an_unused_optimizer_changes_nothing_and_the_first_step_is_the_same() -> None:
    model, twin = two_layers(), two_layers()
    optimizer, twins = AdamW(model.parameters(), lr=0.1), AdamW(twin.parameters(), lr=0.1)
    fired: list[str] = []
    optimizer.register_step_pre_hook(lambda *_: fired.append("pre"))
    optimizer.register_step_post_hook(lambda *_: fired.append("post"))
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    grads = [parameter.grad for parameter in model.parameters()]
    before = picture(model, optimizer)
    flat = TrainingState(model=model, optimizer=optimizer).capture(0)
    assert picture(model, optimizer) == before
    assert not fired
    assert len(optimizer.state) == 0
    assert all(parameter.grad is grad for parameter, grad in zip(model.parameters(), grads, strict=True))
    assert flat.tree["optimizer"]["state"] == {}
    step(model, optimizer)
    step(twin, twins)
    assert bits(model.state_dict()) == bits(twin.state_dict())


def test_br_02_moments_of_a_parameter_frozen_at_load_come_back() -> None:
    model = two_layers()
    optimizer = AdamW(model.parameters(), lr=0.1)
    step(model, optimizer)
    stored = save({"model": model, "optimizer": optimizer})
    fresh = two_layers(1)
    fresh[0].weight.requires_grad_(False)
    other = AdamW(fresh.parameters(), lr=0.1)
    restore({"model": fresh, "optimizer": other}, stored)
    assert by_name(fresh, other) == by_name(model, optimizer)
    assert set(by_name(fresh, other)) == {"0.weight", "1.weight"}


def test_br_02_a_partly_used_optimizer_is_saved_and_restored_as_it_is() -> None:
    model = two_layers()
    optimizer = AdamW(model.parameters(), lr=0.1)
    step(model, optimizer, "0.weight")
    stored = save({"model": model, "optimizer": optimizer})
    fresh = two_layers(1)
    used = AdamW(fresh.parameters(), lr=0.1)
    step(fresh, used)  # has state for 1.weight, which the saved one has not
    restore({"model": fresh, "optimizer": used}, stored)
    assert set(by_name(fresh, used)) == {"0.weight"}
    assert by_name(fresh, used) == by_name(model, optimizer)


@pytest.mark.parametrize("momentum", [0.0, 0.9])
def test_br_03_stateless_sgd_stays_stateless(momentum: float) -> None:
    model = two_layers()
    optimizer = SGD(model.parameters(), lr=0.1, momentum=momentum)
    step(model, optimizer)
    fresh = two_layers(1)
    other = SGD(fresh.parameters(), lr=0.1, momentum=momentum)
    restore({"model": fresh, "optimizer": other}, save({"model": model, "optimizer": optimizer}))
    assert bits(other.state_dict()) == bits(optimizer.state_dict())
    if not momentum:
        assert other.state_dict()["state"] == {}


def test_br_04_a_parameter_that_never_stepped_has_no_state_after_a_restore() -> None:
    model = two_layers()
    optimizer = AdamW(model.parameters(), lr=0.1)
    step(model, optimizer, "0.weight")
    fresh = two_layers(1)
    other = AdamW(fresh.parameters(), lr=0.1)
    restore({"model": fresh, "optimizer": other}, save({"model": model, "optimizer": optimizer}))
    assert fresh[1].weight not in other.state
    step(model, optimizer)
    step(fresh, other)
    assert bits(fresh.state_dict()) == bits(model.state_dict())


@pytest.mark.parametrize("position", [0, 1])
def test_br_05_an_empty_group_keeps_its_own_hyper_parameters(position: int) -> None:
    def make(model: nn.Module, lr: float, empty_lr: float) -> torch.optim.Optimizer:
        groups: list[dict[str, Any]] = [{"params": list(model.parameters()), "lr": lr}]
        groups.insert(position, {"params": [], "lr": empty_lr, "weight_decay": 0.9})
        return AdamW(groups)

    model, fresh = two_layers(), two_layers(1)
    optimizer, other = make(model, 0.1, 0.5), make(fresh, 7.0, 8.0)
    step(model, optimizer)
    restore({"model": fresh, "optimizer": other}, save({"model": model, "optimizer": optimizer}))
    assert other.param_groups[position]["lr"] == 0.5
    assert other.param_groups[position]["weight_decay"] == 0.9
    assert other.param_groups[1 - position]["lr"] == 0.1
    step(model, optimizer)
    step(fresh, other)
    assert bits(fresh.state_dict()) == bits(model.state_dict())


def test_br_06_group_keys_that_the_live_optimizer_does_not_know_come_back() -> None:
    model = two_layers()
    optimizer = AdamW(model.parameters(), lr=0.1)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)
    for _ in range(3):
        step(model, optimizer)
        scheduler.step()
    stored = save({"model": model, "optimizer": optimizer})
    fresh = two_layers(1)
    other = AdamW(fresh.parameters(), lr=0.3)
    restore({"model": fresh, "optimizer": other}, stored)
    assert other.param_groups[0]["lr"] == 0.0125
    assert other.param_groups[0]["initial_lr"] == 0.1
    torch.optim.lr_scheduler.StepLR(other, 1, 0.5, last_epoch=3)


@pytest.mark.parametrize("saved_as", [float, torch.tensor])
@pytest.mark.parametrize("live_as", [float, torch.tensor])
def test_br_08_the_learning_rate_comes_back_in_the_live_kind(saved_as: Any, live_as: Any) -> None:
    model, fresh = two_layers(), two_layers(1)
    optimizer, other = AdamW(model.parameters(), lr=saved_as(0.25)), AdamW(fresh.parameters(), lr=live_as(0.5))
    live = other.param_groups[0]["lr"]
    step(model, optimizer)
    restore({"model": fresh, "optimizer": other}, save({"model": model, "optimizer": optimizer}))
    assert float(other.param_groups[0]["lr"]) == 0.25
    if live_as is float:
        assert type(other.param_groups[0]["lr"]) is float
    else:
        assert other.param_groups[0]["lr"] is live


def test_br_08_groups_that_share_one_live_tensor_are_not_given_two_values() -> None:
    model, fresh = two_layers(), two_layers(1)
    optimizer = AdamW([{"params": [p], "lr": lr} for p, lr in zip(model.parameters(), (0.1, 0.2), strict=True)])
    other = AdamW([{"params": [p]} for p in fresh.parameters()], lr=torch.tensor(0.5))
    with pytest.raises(MismatchError, match="share one tensor"):
        restore({"model": fresh, "optimizer": other}, save({"model": model, "optimizer": optimizer}))
    assert float(other.param_groups[0]["lr"]) == 0.5


def grouped(model: nn.Module, *groups: tuple[list[str], float]) -> torch.optim.Optimizer:
    named = dict(model.named_parameters())
    return AdamW([{"params": [named[n] for n in names], "weight_decay": decay} for names, decay in groups], lr=0.01)


def test_br_31_swapped_groups_are_matched_by_name() -> None:
    model, fresh = two_layers(), two_layers(1)
    optimizer = grouped(model, (["0.weight"], 0.1), (["1.weight"], 0.0))
    other = grouped(fresh, (["1.weight"], 9.0), (["0.weight"], 9.0))
    step(model, optimizer)
    restore({"model": fresh, "optimizer": other}, save({"model": model, "optimizer": optimizer}))
    assert [group["weight_decay"] for group in other.param_groups] == [0.0, 0.1]
    assert by_name(fresh, other) == by_name(model, optimizer)


@pytest.mark.parametrize(
    "now", [[(["0.weight", "1.weight"], 0.5)], [(["0.weight", "1.weight"], 0.5), ([], 0.5)]], ids=["merged", "moved"]
)
def test_br_31_other_membership_is_refused_and_nothing_changes(now: Any) -> None:
    model, fresh = two_layers(), two_layers(1)
    optimizer = grouped(model, (["0.weight"], 0.1), (["1.weight"], 0.0))
    other = grouped(fresh, *now)
    step(model, optimizer)
    before = picture(fresh, other)
    with pytest.raises(MismatchError, match=r"0\.weight") as caught:
        restore({"model": fresh, "optimizer": other}, save({"model": model, "optimizer": optimizer}))
    assert "hyper-parameters" in str(caught.value)
    assert picture(fresh, other) == before


def test_br_31_a_scheduler_that_counts_groups_by_number_is_not_swapped_silently() -> None:
    def make(model: nn.Module, order: int) -> Any:
        named = dict(model.named_parameters())
        groups = [{"params": [named["0.weight"]], "lr": 0.1}, {"params": [named["1.weight"]], "lr": 0.2}][::order]
        optimizer = AdamW(groups)
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1)
        return {"model": model, "optimizer": optimizer, "scheduler": scheduler}

    stored = save(make(two_layers(), 1))
    with pytest.raises(MismatchError, match="base_lrs"):
        restore(make(two_layers(1), -1), stored)


class Master(torch.optim.Optimizer):
    """Keeps an fp32 master weight and moment next to a bf16 parameter."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {"lr": 0.1})

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for p in group["params"]:
                entry = self.state[p]
                entry.setdefault("master", p.detach().float() + 1e-4)
                entry.setdefault("moment", torch.rand_like(entry["master"]))


def test_br_70_fp32_state_of_a_bf16_parameter_stays_fp32_bit_for_bit() -> None:
    def make(seed: int) -> tuple[nn.Module, Master]:
        torch.manual_seed(seed)
        model = nn.Linear(3, 3, bias=False).bfloat16()
        return model, Master(model.parameters())

    model, optimizer = make(0)
    optimizer.step()
    fresh, other = make(1)
    restore({"model": fresh, "optimizer": other}, save({"model": model, "optimizer": optimizer}))
    entry = other.state[fresh.weight]
    assert entry["master"].dtype == torch.float32
    assert bits(entry) == bits(dict(optimizer.state[model.weight]))


def test_br_70_an_own_load_that_casts_is_found_out_and_undone() -> None:
    class Hooked(Master):
        def load_state_dict(self, state_dict: Any) -> None:
            super().load_state_dict(state_dict)

    model, fresh = nn.Linear(3, 3, bias=False).bfloat16(), nn.Linear(3, 3, bias=False).bfloat16()
    optimizer, other = Hooked(model.parameters()), Hooked(fresh.parameters())
    optimizer.step()
    other.step()
    stored, before = save({"model": model, "optimizer": optimizer}), picture(fresh, other)
    live = other.state[fresh.weight]["master"]
    with pytest.raises(RestoreError, match=r"optimizer\.state\.weight\.m"):
        restore({"model": fresh, "optimizer": other}, stored)
    assert picture(fresh, other) == before
    assert other.state[fresh.weight]["master"] is live


def test_an_own_load_that_is_exact_is_called_with_numbers_and_passes() -> None:
    class Own(AdamW):
        loaded: Any = None

        def load_state_dict(self, state_dict: Any) -> None:
            self.loaded = state_dict
            super().load_state_dict(state_dict)

    model, fresh = two_layers(), two_layers(1)
    optimizer, other = Own(model.parameters(), lr=0.1), Own(list(fresh.parameters())[::-1], lr=0.2)
    step(model, optimizer)
    restore({"model": fresh, "optimizer": other}, save({"model": model, "optimizer": optimizer}))
    assert set(other.loaded["state"]) == {0, 1}
    assert by_name(fresh, other) == by_name(model, optimizer)
    assert other.param_groups[0]["lr"] == 0.1
    assert other.param_groups[0]["params"][0] is fresh[1].weight


def test_an_own_state_dict_is_captured_by_name() -> None:
    class Own(AdamW):
        def state_dict(self) -> Any:
            return {**super().state_dict(), "extra": torch.tensor(3.0)}

        def load_state_dict(self, state_dict: Any) -> None:
            self.extra = state_dict["extra"]
            super().load_state_dict({k: v for k, v in state_dict.items() if k != "extra"})

    model, fresh = two_layers(), two_layers(1)
    optimizer, other = Own(model.parameters(), lr=0.1), Own(fresh.parameters(), lr=0.2)
    step(model, optimizer)
    flat = TrainingState(model=model, optimizer=optimizer).capture(1)
    assert {"optimizer.extra", "optimizer.state.0.weight.exp_avg"} <= set(flat.tensors)
    restore({"model": fresh, "optimizer": other}, save({"model": model, "optimizer": optimizer}))
    assert by_name(fresh, other) == by_name(model, optimizer)
    assert float(other.extra) == 3.0


def test_parameters_of_no_model_are_refused_by_group_and_position() -> None:
    model = two_layers()
    optimizer = AdamW([{"params": list(model.parameters())}, {"params": [nn.Parameter(torch.ones(2))]}])
    with pytest.raises(CaptureError, match="parameter 0 of group 1"):
        TrainingState(model=model, optimizer=optimizer).capture(0)


def test_live_state_keeps_the_identity_of_dicts_and_tensors() -> None:
    model, fresh = two_layers(), two_layers(1)
    optimizer, other = AdamW(model.parameters(), lr=0.1), AdamW(fresh.parameters(), lr=0.1)
    step(model, optimizer)
    step(fresh, other)
    state, entry, group = other.state, other.state[fresh[0].weight], other.param_groups[0]
    moment = entry["exp_avg"]
    restore({"model": fresh, "optimizer": other}, save({"model": model, "optimizer": optimizer}))
    assert other.state is state
    assert other.state[fresh[0].weight] is entry
    assert entry["exp_avg"] is moment
    assert other.param_groups[0] is group
    assert by_name(fresh, other) == by_name(model, optimizer)


def test_how_a_step_is_computed_stays_live_and_is_reported() -> None:
    model, fresh = two_layers(), two_layers(1)
    optimizer, other = AdamW(model.parameters(), foreach=True), AdamW(fresh.parameters(), fused=True)
    outcome = restore({"model": fresh, "optimizer": other}, save({"model": model, "optimizer": optimizer}))
    assert other.param_groups[0]["fused"] is True
    assert other.param_groups[0]["foreach"] is not True
    assert "fused was None, stays True" in outcome["optimizer"].note


def test_moments_lie_in_memory_like_their_parameter_and_a_fused_step_is_the_same() -> None:
    def make(seed: int, memory_format: torch.memory_format) -> tuple[nn.Module, torch.optim.Optimizer]:
        torch.manual_seed(seed)
        model = nn.Conv2d(2, 4, 3).to(memory_format=memory_format)
        return model, AdamW(model.parameters(), lr=0.1, fused=True)

    for saved_format in (torch.channels_last, torch.contiguous_format):
        for live_format in (torch.channels_last, torch.contiguous_format):
            model, optimizer = make(0, saved_format)
            step(model, optimizer)
            fresh, other = make(1, live_format)
            restore({"model": fresh, "optimizer": other}, save({"model": model, "optimizer": optimizer}))
            assert other.state[fresh.weight]["exp_avg"].stride() == fresh.weight.stride()
            assert by_name(fresh, other) == by_name(model, optimizer)
            step(model, optimizer)
            step(fresh, other)
            torch.testing.assert_close(fresh.weight, model.weight, rtol=1e-6, atol=1e-6)


def test_lists_of_tensors_in_optimizer_state_come_back() -> None:
    def make(seed: int) -> tuple[nn.Module, Any]:
        torch.manual_seed(seed)
        model = nn.Linear(3, 1)
        return model, torch.optim.LBFGS(model.parameters(), lr=0.1, max_iter=3, history_size=4)

    def train(model: nn.Module, optimizer: Any) -> None:
        def closure() -> torch.Tensor:
            optimizer.zero_grad()
            loss = (model(torch.eye(3)) - 1).square().sum()
            loss.backward()
            return loss

        optimizer.step(closure)

    model, optimizer = make(0)
    train(model, optimizer)
    fresh, other = make(1)
    restore({"model": fresh, "optimizer": other}, save({"model": model, "optimizer": optimizer}))
    assert bits(other.state_dict()) == bits(optimizer.state_dict())
    train(model, optimizer)
    train(fresh, other)
    assert bits(fresh.state_dict()) == bits(model.state_dict())


def test_only_the_learning_rate_can_be_left_out() -> None:
    model, fresh = two_layers(), two_layers(1)
    optimizer, other = AdamW(model.parameters(), lr=0.1), AdamW(fresh.parameters(), lr=0.5, weight_decay=0.7)
    step(model, optimizer)
    stored = save({"model": model, "optimizer": optimizer})
    restore({"model": fresh, "optimizer": other}, stored, exclude="optimizer.param_groups.*.lr")
    assert other.param_groups[0]["lr"] == 0.5
    assert other.param_groups[0]["weight_decay"] == 0.01
    assert by_name(fresh, other) == by_name(model, optimizer)
