"""Public bug reports about models and other state, each with what is right. Numbers are those of the case list."""

from __future__ import annotations

import random
from collections import OrderedDict
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from state.state_helpers import Holder, bits, picture, raw, restore, save, store
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

from resilio.errors import CaptureError, MismatchError
from resilio.state.training_state import TrainingState


def compiled(module: nn.Module) -> nn.Module:
    return torch.compile(module, backend="eager")  # type: ignore[return-value]


WRAPS: dict[str, Callable[[nn.Module], nn.Module]] = {
    "plain": lambda m: m,
    "compile": compiled,
    "ac": checkpoint_wrapper,
    "compile(ac)": lambda m: compiled(checkpoint_wrapper(m)),
    "ac(compile)": lambda m: checkpoint_wrapper(compiled(m)),
    "dp(ac(compile))": lambda m: nn.DataParallel(checkpoint_wrapper(compiled(m))),
}


class Net(nn.Module):
    """Has modules with the names that wrappers use."""

    def __init__(self, wrap: Callable[[nn.Module], nn.Module], seed: int) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.module = nn.Linear(2, 2)
        self._orig_mod = wrap(nn.Sequential(OrderedDict(module=nn.Linear(2, 2))))
        self.blk = wrap(nn.Linear(2, 2))


def net(wrap: str, seed: int) -> tuple[nn.Module, torch.optim.Optimizer]:
    model = WRAPS[wrap](Net(WRAPS[wrap], seed))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    for parameter in model.parameters():
        parameter.grad = torch.full_like(parameter, 0.1 * seed + 0.1)
    optimizer.step()
    return model, optimizer


CANONICAL = {f"{m}.{p}" for m in ("module", "_orig_mod.module", "blk") for p in ("weight", "bias")}


@pytest.mark.parametrize("wrap", WRAPS)
def test_br_10_names_are_canonical_in_every_order_and_a_module_named_like_a_wrapper_survives(wrap: str) -> None:
    model, optimizer = net(wrap, 0)
    tree = TrainingState(model=model, optimizer=optimizer).capture(0).tree
    assert set(tree["model"]) == CANONICAL
    assert set(tree["optimizer"]["state"]) == CANONICAL


@pytest.mark.parametrize("wrap", WRAPS)
def test_br_10_a_checkpoint_of_one_wrapping_loads_into_every_other(wrap: str) -> None:
    eager, optimizer = net("plain", 0)
    stored = save({"model": eager, "optimizer": optimizer})
    model, other = net(wrap, 1)
    restore({"model": model, "optimizer": other}, stored)
    assert [raw(p) for p in model.parameters()] == [raw(p) for p in eager.parameters()]
    assert bits(other.state_dict()["state"]) == bits(optimizer.state_dict()["state"])
    back, _ = net("plain", 2)
    restore({"model": back}, save({"model": model}))
    assert bits(back.state_dict()) == bits(eager.state_dict())


def test_br_09_names_do_not_depend_on_history() -> None:
    model = compiled(nn.Linear(4, 4))
    first = save({"model": model})
    model(torch.ones(1, 4))
    restore({"model": model}, first)
    assert save({"model": model}).saved.tensors.keys() == first.saved.tensors.keys()
    assert set(first.saved.tree["model"]) == {"weight", "bias"}


def test_two_keys_with_one_canonical_name_are_refused() -> None:
    def twice(module: nn.Module, state: dict[str, Any], prefix: str, meta: Any) -> None:
        state["weight"] = state["_orig_mod.weight"]

    model = compiled(nn.Linear(2, 2))
    model._register_state_dict_hook(twice)
    with pytest.raises(CaptureError, match="both mean 'weight'"):
        TrainingState(model=model).capture(0)


def counting(dtype: torch.dtype) -> nn.Module:
    model = nn.Linear(2, 3)
    model.register_buffer("seen", torch.tensor([1 << 40], dtype=torch.int64).to(dtype))
    return model


@pytest.mark.parametrize(
    ("live", "fact", "keys"),
    [
        (nn.Linear(2, 3).bfloat16(), "dtypes", {"model.weight", "model.bias"}),
        (counting(torch.int32), "dtypes", {"model.seen"}),
        (nn.Linear(2, 4), "shapes", {"model.weight", "model.bias"}),
    ],
    ids=["bf16", "int32", "shape"],
)
def test_br_11_another_dtype_or_shape_is_an_error_that_names_the_key(
    live: nn.Module, fact: str, keys: set[str]
) -> None:
    stored = save({"model": counting(torch.int64) if hasattr(live, "seen") else nn.Linear(2, 3)})
    before = picture(live)
    for strict in (True, False):
        with pytest.raises(MismatchError, match=r"model\.") as caught:
            restore({"model": live}, stored, strict=strict)
        assert set(caught.value.facts[fact]) == keys
    assert picture(live) == before


@pytest.mark.parametrize(
    ("saved", "template"),
    [
        ({"x": [torch.tensor(1.0), torch.tensor(2.0)]}, {"x": [torch.tensor(0.0)]}),
        ({"x": {"a": 1}}, {"x": {}}),
        ({"x": [{"a": 1}, {"b": torch.ones(2)}]}, {"x": []}),
        ({"x": {}}, {"x": {"a": 1, "b": 2}}),
        ({"x": None, "y": {}, "z": []}, {"x": torch.ones(1)}),
        ({"x": (torch.ones(1), {"y": torch.zeros(2)}), "l": [[], [torch.ones(1)], ()]}, {}),
    ],
)
def test_br_13_containers_come_back_as_saved_whatever_the_live_ones_hold(saved: Any, template: Any) -> None:
    stored = save({"holder": Holder(saved), "plain": saved})
    live, plain = Holder(template), dict(template)
    restore({"holder": live, "plain": plain}, stored)
    assert bits(live.state) == bits(saved)
    assert bits(plain) == bits(saved)


def test_br_14_key_types_and_clashing_keys_survive() -> None:
    saved = {
        0: torch.tensor([1.0]),
        1: "one",
        "1": "text one",
        "a": {"b": 2, "~1": 0},
        "a.b": 3,
        "a.b~1": torch.tensor(4),
        (1, "t"): -0.0,
        None: float("nan"),
    }
    live = Holder({0: torch.tensor([0.0]), 1: "?"})
    stored = save({"holder": Holder(saved)})
    restore({"holder": live}, stored)
    assert bits(live.state) == bits(saved)
    assert list(live.state) == list(saved)


def test_br_14_a_raw_optimizer_state_dict_comes_back_whole_into_a_fresh_holder() -> None:
    model, optimizer = net("plain", 0)
    live = Holder(torch.optim.AdamW(model.parameters()).state_dict())
    restore({"holder": live}, save({"holder": Holder(optimizer.state_dict())}))
    assert bits(live.state) == bits(optimizer.state_dict())


def test_br_16_what_is_on_one_side_only_is_an_error_both_ways_unless_asked_for() -> None:
    both = {"model": nn.Linear(2, 2), "ema": nn.Linear(2, 2)}
    with pytest.raises(MismatchError) as caught:
        restore({"model": nn.Linear(2, 2)}, save(both))
    assert caught.value.facts["unexpected"] == ["ema.*"]
    with pytest.raises(MismatchError) as caught:
        restore(both, save({"model": nn.Linear(2, 2)}))
    assert caught.value.facts["missing"] == ["ema.*"]
    outcomes = restore({"model": nn.Linear(2, 2)}, save(both), strict=False)
    assert (outcomes["model"].how, outcomes["ema"].how) == ("exact", "stayed live")
    assert restore({"model": nn.Linear(2, 2)}, save(both), only="model")["model"].how == "exact"


def test_br_16_a_component_that_was_not_saved_is_missing_unless_asked_for() -> None:
    model, optimizer = net("plain", 0)
    live = {"model": model, "optimizer": optimizer, "loader": Holder({"at": 1})}
    stored = save({"model": model})
    with pytest.raises(MismatchError) as caught:
        restore(live, stored)
    assert caught.value.facts["missing"] == ["optimizer", "loader"]
    outcomes = restore(live, stored, strict=False)
    assert [outcomes[name].how for name in ("optimizer", "loader")] == ["stayed live"] * 2


def test_br_18_values_are_copied_at_capture() -> None:
    state: dict[str, Any] = {"array": np.ones(2), "list": [1], "dict": {"a": {"b": 1}}}
    holder = Holder(state)
    flat = TrainingState(model=nn.Linear(1, 1), holder=holder).capture(0)
    state["array"][0] = 5
    state["list"].append(2)
    state["dict"]["a"]["b"] = 9
    fresh = Holder({})
    restore({"model": nn.Linear(1, 1), "holder": fresh}, store(flat))
    assert bits(fresh.state) == bits({"array": np.ones(2), "list": [1], "dict": {"a": {"b": 1}}})


class Tied(nn.Module):
    def __init__(self, tie: bool = True) -> None:
        super().__init__()
        self.embedding = nn.Embedding(4, 2)
        self.head = nn.Linear(2, 4, bias=False)
        if tie:
            self.head.weight = self.embedding.weight


def test_br_20_a_shared_weight_is_saved_once_and_stays_shared() -> None:
    model, fresh = Tied(), Tied()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    flat = TrainingState(model=model, optimizer=optimizer).capture(0)
    assert flat.ties == {"model.head.weight": "model.embedding.weight"}
    assert "model.head.weight" not in flat.tensors
    assert flat.values["optimizer.param_groups.0.params"] == ["embedding.weight"]
    live = fresh.embedding.weight
    restore({"model": fresh}, save({"model": model}))
    assert fresh.head.weight is fresh.embedding.weight is live
    assert raw(live) == raw(model.embedding.weight)


def test_br_20_a_tied_weight_fills_two_live_ones_and_two_different_ones_do_not_fill_a_tied() -> None:
    model, untied = Tied(), Tied(tie=False)
    restore({"model": untied}, save({"model": model}))
    assert raw(untied.head.weight) == raw(untied.embedding.weight) == raw(model.head.weight)
    other, live = Tied(tie=False), Tied()
    before = picture(live)
    with pytest.raises(MismatchError, match="tied"):
        restore({"model": live}, save({"model": other}))
    assert picture(live) == before
    with torch.no_grad():
        other.head.weight.copy_(other.embedding.weight)
    restore({"model": live}, save({"model": other}))
    assert raw(live.head.weight) == raw(other.head.weight)


def test_br_38_every_generator_continues_bit_for_bit() -> None:
    def draw() -> Any:
        return random.random(), np.random.randn(3).tolist(), torch.randn(3).tolist(), random.gauss(0, 1)

    model = nn.Linear(1, 1)
    stored = save({"model": model})
    first = draw()
    draw()
    outcome = restore({"model": model}, stored)
    assert draw() == first
    assert outcome["rng"].how == "exact"


def scaler(**options: Any) -> torch.amp.GradScaler:
    return torch.amp.GradScaler("cpu", **options)


def backed_off() -> torch.amp.GradScaler:
    scale = scaler()
    for _ in range(2):
        scale.scale(torch.ones(1))
        weight = nn.Parameter(torch.ones(1))
        weight.grad = torch.full((1,), float("inf"))
        scale.step(torch.optim.SGD([weight], lr=0.1))
        scale.update()
    return scale


def test_br_41_the_scale_comes_back() -> None:
    saved, fresh = backed_off(), scaler()
    assert saved.get_scale() == 16384.0
    restore({"scaler": fresh}, save({"scaler": saved}))
    assert fresh.get_scale() == 16384.0
    assert fresh.state_dict() == saved.state_dict()


def test_br_41_a_switch_between_fp16_and_bf16_is_explained_and_can_be_asked_for() -> None:
    on, off = {"scaler": scaler()}, {"scaler": scaler(enabled=False)}
    with pytest.raises(MismatchError, match="switched off"):
        restore(off, save(on))
    with pytest.raises(MismatchError, match="switched off"):
        restore(on, save(off))
    with pytest.raises(MismatchError, match="scaler"):
        restore({"model": nn.Linear(1, 1)}, save({"model": nn.Linear(1, 1), **on}))
    assert restore(on, save(off), exclude="scaler")["scaler"].how == "stayed live"
    assert restore(off, save(off))["scaler"].how == "exact"


class Rotary(nn.Module):
    def __init__(self, device: str = "cpu") -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(2, device=device))
        self.register_buffer("inv_freq", torch.tensor([1.0, 0.1, 0.01, 0.001], device=device), persistent=False)


def test_br_42_non_persistent_buffers_come_back_after_meta_init() -> None:
    stored = save({"model": Rotary()})
    assert "buffers_np.inv_freq" in stored.saved.tensors
    live = Rotary("meta").to_empty(device="cpu")
    with torch.no_grad():
        live.inv_freq.fill_(float("nan"))
    restore({"model": live}, stored)
    assert live.inv_freq.tolist() == pytest.approx([1.0, 0.1, 0.01, 0.001])
    assert raw(live.inv_freq) == raw(Rotary().inv_freq)


def test_br_42_meta_tensors_are_refused_with_what_to_do() -> None:
    with pytest.raises(CaptureError, match=r"model\.weight is on the meta device.*to_empty"):
        TrainingState(model=Rotary("meta")).capture(0)
    with pytest.raises(MismatchError, match=r"buffers_np\.inv_freq is on the meta device.*to_empty"):
        restore({"model": Rotary("meta")}, save({"model": Rotary()}))


class Wrapped(torch.Tensor):
    pass


def test_br_43_tensor_subclasses_are_refused_by_key_and_class() -> None:
    with pytest.raises(CaptureError, match=r"holder\.x is a .*Wrapped"):
        TrainingState(holder=Holder({"x": torch.ones(2).as_subclass(Wrapped)})).capture(0)
    with pytest.raises(CaptureError, match=r"model\.weight is a .*UninitializedParameter"):
        TrainingState(model=nn.LazyLinear(2)).capture(0)
    with pytest.raises(CaptureError, match=r"holder\.x has the layout"):
        TrainingState(holder=Holder({"x": torch.eye(2).to_sparse()})).capture(0)


def test_values_that_cannot_come_back_are_refused_by_name() -> None:
    with pytest.raises(CaptureError, match=r"holder\.x"):
        TrainingState(holder=Holder({"x": lambda: 1})).capture(0)


def test_nan_payloads_and_negative_zero_come_back_bit_for_bit() -> None:
    model, fresh = nn.Linear(2, 2), nn.Linear(2, 2)
    with torch.no_grad():
        model.weight.view(torch.int32).copy_(
            torch.tensor([[0x7FC12345, -0x80000000], [0x7F800001, 1]], dtype=torch.int32)
        )
    restore({"model": fresh}, save({"model": model}))
    assert raw(fresh.weight) == raw(model.weight)


def test_a_channels_last_model_and_a_contiguous_one_take_each_other_s_checkpoint() -> None:
    model, fresh = nn.Conv2d(2, 4, 3).to(memory_format=torch.channels_last), nn.Conv2d(2, 4, 3)
    stored = save({"model": model})
    assert stored.saved.tensors["model.weight"].order == (0, 2, 3, 1)
    strides = fresh.weight.stride()
    restore({"model": fresh}, stored)
    assert torch.equal(fresh.weight, model.weight)
    assert fresh.weight.stride() == strides
