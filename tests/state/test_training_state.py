"""What `TrainingState` takes and how a restore treats it as a whole."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest
import torch
from state.state_helpers import Stored, bits, fill, picture, raw, restore, save, store
from torch import nn

from resilio.errors import ConfigError, LiveStateError, MismatchError, RanksLostError, RestoreError
from resilio.state.extras import per_rank, replicated
from resilio.state.restore import plan_restore
from resilio.state.training_state import TrainingState


class Counter:
    """A loader: counts, and may refuse to load."""

    def __init__(self, at: int = 0, fails: int = 0) -> None:
        self.at, self.fails = at, fails

    def state_dict(self) -> dict[str, Any]:
        return {"at": self.at}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.at = state["at"]
        if self.fails:
            self.fails -= 1
            raise RuntimeError("no")


def job(seed: int, **extras: Any) -> dict[str, Any]:
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(2, 3), nn.BatchNorm1d(3))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1 + seed)
    scheduler = torch.optim.lr_scheduler.MultiStepLR(optimizer, [1 + seed, 5])
    for _ in range(seed + 1):
        optimizer.zero_grad()
        model(torch.randn(4, 2)).square().sum().backward()
        optimizer.step()
        scheduler.step()
    return {"model": model, "optimizer": optimizer, "scheduler": scheduler, **extras}


def seen(parts: dict[str, Any]) -> Any:
    return picture(*parts.values())


def test_a_whole_job_comes_back_bit_for_bit() -> None:
    saved, live = job(0, loader=Counter(5)), job(1, loader=Counter(0))
    restore(live, save(saved))
    for name in saved:
        assert bits(live[name].state_dict()) == bits(saved[name].state_dict()), name


@pytest.mark.parametrize("position", ["first", "last"])
def test_all_or_nothing_when_a_load_raises(position: str) -> None:
    bad = Counter(1, fails=1)
    live = {"bad": bad, **job(1)} if position == "first" else {**job(1), "bad": bad}
    saved = job(0, bad=Counter(5))
    stored, before = save(saved), seen(live)
    with pytest.raises(RestoreError, match="bad could not be restored, everything is as it was: RuntimeError: no") as e:
        restore(live, stored)
    assert isinstance(e.value.__cause__, RuntimeError)
    assert seen(live) == before


def test_a_failed_undo_says_that_live_state_is_a_mixture() -> None:
    with pytest.raises(LiveStateError, match="mixture"):
        restore({"bad": Counter(1, fails=2)}, save({"bad": Counter(5)}))


@pytest.mark.parametrize(("nth", "error"), [(1, RanksLostError), (2, RanksLostError), (3, LiveStateError)])
def test_a_rank_lost_before_state_is_put_in_place_changes_nothing_and_after_it_is_a_mixture(
    nth: int, error: type[Exception]
) -> None:
    live, stored = {**job(1), "mine": Counter(1)}, save({**job(0), "mine": Counter(5)})
    before = seen(live)
    asked = 0

    def agree(failure: BaseException | None) -> None:
        nonlocal asked
        asked += 1
        if asked >= nth:
            raise RanksLostError("rank(s) 1 did not come")

    plan = plan_restore(TrainingState.of(live), stored.saved, rank=0, world=1)
    fill(plan, stored)
    with pytest.raises(error, match="did not come"):
        plan.apply(agree)
    assert asked == nth  # the lost one is not waited for again
    assert (seen(live) == before) == (nth < 3)


def test_planning_and_a_failed_read_touch_nothing() -> None:
    live, stored = job(1), save(job(0))
    before = seen(live)
    plan = plan_restore(TrainingState.of(live), stored.saved, rank=0, world=1)
    for tensor in plan.scratch.values():
        tensor.view(torch.uint8 if tensor.dim() else tensor.dtype).fill_(7)
    assert seen(live) == before


def test_one_error_lists_everything() -> None:
    class Other(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Linear(2, 2), nn.Linear(2, 2).double()

    class Saved(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.b, self.c = nn.Linear(2, 3), nn.Linear(2, 2)

    with pytest.raises(MismatchError) as caught:
        restore({"model": Other()}, save({"model": Saved()}))
    facts = caught.value.facts
    assert facts["missing"] == ["model.a.weight", "model.a.bias"]
    assert facts["unexpected"] == ["model.c.weight", "model.c.bias"]
    assert set(facts["shapes"]) == {"model.b.weight", "model.b.bias"}
    assert set(facts["dtypes"]) == {"model.b.weight", "model.b.bias"}
    assert all(word in str(caught.value) for word in ("model.a.weight", "model.c.bias", "saved [3, 2], live [2, 2]"))


def gan(seed: int) -> dict[str, Any]:
    torch.manual_seed(seed)
    models = {"gen": nn.Linear(2, 2), "disc": nn.Linear(2, 1)}
    both = [*models["gen"].parameters(), models["disc"].bias]
    optimizers = {
        "o": torch.optim.SGD(both, lr=0.1, momentum=0.5),
        "p": torch.optim.SGD([models["disc"].weight], lr=0.2 + seed, momentum=0.5),
    }
    for optimizer in optimizers.values():
        for p in optimizer.param_groups[0]["params"]:
            p.grad = torch.rand_like(p)
        optimizer.step()
    return {"model": models, "optimizer": optimizers}


def test_several_models_and_optimizers() -> None:
    saved, live = gan(0), gan(1)
    stored = save(saved)
    keys = {"model.gen.weight", "model.disc.bias", "optimizer.o.state.disc.bias.momentum_buffer"}
    assert keys <= set(stored.saved.tensors)
    assert stored.saved.values["optimizer.p.param_groups.0.params"] == ["disc.weight"]
    restore(live, stored)
    for group in saved:
        for name in saved[group]:
            assert bits(live[group][name].state_dict()) == bits(saved[group][name].state_dict())


def test_an_averaged_model_comes_back_and_can_be_loaded_as_the_model() -> None:
    model = nn.Linear(2, 2)
    ema = torch.optim.swa_utils.AveragedModel(model)
    with torch.no_grad():
        model.weight.add_(1)
    ema.update_parameters(model)
    stored = save({"model": model, "ema": ema})
    fresh = nn.Linear(2, 2)
    other = torch.optim.swa_utils.AveragedModel(fresh)
    restore({"model": fresh, "ema": other}, stored)
    assert bits(other.state_dict()) == bits(ema.state_dict())
    restore({"model": fresh}, stored, rename={"model.": "old.", "ema.module.": "model."}, only="model")
    assert raw(fresh.weight) == raw(ema.module.weight)


def test_rename_of_a_model_prefix_takes_the_optimizer_along() -> None:
    class Old(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.backbone = nn.Linear(2, 2)

    class New(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.encoder = nn.Linear(2, 2)

    def train(model: nn.Module) -> dict[str, Any]:
        optimizer = torch.optim.AdamW(model.parameters())
        model.get_parameter(next(iter(dict(model.named_parameters())))).grad = torch.rand(2, 2)
        optimizer.step()
        return {"model": model, "optimizer": optimizer}

    saved, live = train(Old()), train(New())
    restore(live, save(saved), rename={"model.backbone.": "model.encoder."})
    assert bits(live["optimizer"].state_dict()) == bits(saved["optimizer"].state_dict())
    assert raw(live["model"].encoder.weight) == raw(saved["model"].backbone.weight)


def test_with_strict_false_a_new_head_stays_live_and_the_rest_comes_back() -> None:
    def make(head: str, seed: int) -> dict[str, Any]:
        torch.manual_seed(seed)
        model = nn.ModuleDict({"body": nn.Linear(2, 2), head: nn.Linear(2, 2)})
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.1 + seed)
        for p in model.parameters():
            p.grad = torch.rand_like(p)
        optimizer.step()
        return {"model": model, "optimizer": optimizer}

    saved, live = make("old", 0), make("new", 1)
    head = raw(live["model"]["new"].weight)
    moment = bits(live["optimizer"].state[live["model"]["new"].weight])
    with pytest.raises(MismatchError, match="new"):
        restore(live, save(saved))
    outcome = restore(live, save(saved), strict=False)
    assert "2 of 4 keys stayed live" in outcome["model"].note
    assert raw(live["model"]["body"].weight) == raw(saved["model"]["body"].weight)
    assert raw(live["model"]["new"].weight) == head
    assert bits(live["optimizer"].state[live["model"]["new"].weight]) == moment
    assert live["optimizer"].param_groups[0]["lr"] == 0.1


def test_a_new_group_does_not_get_the_hyper_parameters_of_one_that_is_gone() -> None:
    def make(head: str, decay: float) -> dict[str, Any]:
        model = nn.ModuleDict({"body": nn.Linear(2, 2), head: nn.Linear(2, 2)})
        groups = [{"params": list(m.parameters()), "weight_decay": decay * i} for i, m in enumerate(model.values())]
        return {"model": model, "optimizer": torch.optim.AdamW(groups)}

    live = make("new", 0.5)
    restore(live, save(make("old", 0.7)), strict=False)
    assert [group["weight_decay"] for group in live["optimizer"].param_groups] == [0.0, 0.5]


def test_only_and_exclude_by_component_prefix_and_pattern() -> None:
    stored = save(job(0))
    live = job(1)
    lr, momentum = live["optimizer"].param_groups[0]["lr"], bits(live["optimizer"].state_dict())
    restore(live, stored, only=["model"])
    assert bits(live["optimizer"].state_dict()) == momentum
    assert live["optimizer"].param_groups[0]["lr"] == lr
    live = job(1)
    restore(live, stored, exclude=["model.1", "scheduler", "optimizer", "rng"])
    assert raw(live["model"][1].running_mean) == raw(job(1)["model"][1].running_mean)
    assert raw(live["model"][0].weight) == raw(job(0)["model"][0].weight)
    with pytest.raises(ConfigError, match="modle"):
        restore(live, stored, only=["modle"])
    with pytest.raises(MismatchError, match="only be restored whole"):
        restore(live, stored, exclude="scheduler.last_epoch")


def test_another_kind_of_scheduler_is_refused() -> None:
    live = job(1)
    live["scheduler"] = torch.optim.lr_scheduler.CosineAnnealingLR(live["optimizer"], 5)
    with pytest.raises(MismatchError, match=r"scheduler\.milestones"):
        restore(live, save(job(0)))


def test_plain_values_are_read_from_the_state_and_containers_change_in_place() -> None:
    def make(n: int) -> dict[str, Any]:
        return {
            "epoch": n,
            "best": None if n else 0.25,
            "table": {"a": torch.full((2,), float(n)), n: [n]},
            "log": [n] * (n + 1),
            "tensor": torch.full((3,), n),
            "array": np.full(2, n),
        }

    saved, live = make(0), make(1)
    table, log, held = live["table"], live["log"], live["table"]["a"]
    state = TrainingState.of(live)
    outcome = restore(state, save(saved))
    assert state["epoch"] == state.epoch == 0
    assert state.best == 0.25
    assert "state['epoch']" in outcome["epoch"].note
    assert bits(table) == bits(saved["table"])
    assert table["a"] is held
    assert log == [0]
    assert raw(live["tensor"]) == raw(saved["tensor"])
    assert live["array"].tolist() == [0, 0]
    state["epoch"] = 4
    assert state.capture(1).values["epoch"] == 4


def test_extra_state_and_own_hooks_go_through_the_module_s_own_load() -> None:
    class Net(nn.Module):
        def __init__(self, n: int) -> None:
            super().__init__()
            self.layer, self.n = nn.Linear(2, 2), {"n": n, 1: torch.full((2,), float(n))}

        def get_extra_state(self) -> Any:
            return self.n

        def set_extra_state(self, state: Any) -> None:
            self.n = state

    model, live = Net(3), Net(0)
    order: list[str] = []
    live.register_load_state_dict_post_hook(lambda *_: order.append("hook"))
    restore({"model": live}, save({"model": model}))
    assert bits(live.state_dict()) == bits(model.state_dict())
    assert order == ["hook"]


def test_a_module_whose_load_converts_is_found_out_and_put_back() -> None:
    class Net(nn.Linear):
        def _load_from_state_dict(self, state: Any, prefix: str, *rest: Any) -> None:
            state[prefix + "weight"] = state[prefix + "weight"] * 2
            super()._load_from_state_dict(state, prefix, *rest)

    model, live = Net(2, 2), Net(2, 2)
    before = picture(live)
    with pytest.raises(RestoreError, match="weight: load_state_dict"):
        restore({"model": live}, save({"model": model}))
    assert picture(live) == before


def test_a_key_that_state_dict_leaves_out_stays_out() -> None:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.frozen = nn.Linear(2, 2), nn.Linear(2, 2)
            self.register_state_dict_post_hook(
                lambda module, state, prefix, meta: (
                    [state.pop(k) for k in list(state) if k.startswith("frozen")] and None
                )
            )

    model = Net()
    assert set(TrainingState(model=model).capture(0).tree["model"]) == {"a.weight", "a.bias"}


def two_ranks(*loaders: int, make: Any = lambda value: value) -> Stored:
    states = [TrainingState(model=nn.Linear(1, 1), dataloader=make(Counter(at))) for at in loaders]
    return store(*(state.capture(7, rank=rank, world=2) for rank, state in enumerate(states)))


def test_a_loader_that_is_equal_on_all_ranks_goes_to_any_world() -> None:
    stored = two_ranks(4, 4)
    loader = Counter(0)
    restore({"model": nn.Linear(1, 1), "dataloader": loader}, stored, rank=2, world=3)
    assert loader.at == 4


def test_br_60_a_loader_of_each_rank_comes_back_there_and_is_refused_at_another_world() -> None:
    stored = two_ranks(4, 6)
    loader = Counter(0)
    live = {"model": nn.Linear(1, 1), "dataloader": loader}
    restore(live, stored, rank=1, world=2)
    assert loader.at == 6
    for world in (1, 3):
        with pytest.raises(MismatchError, match="saved by 2 ranks"):
            restore(live, stored, rank=0, world=world)
    assert restore(live, stored, world=1, exclude="dataloader")["dataloader"].how == "stayed live"
    assert loader.at == 6


def test_per_rank_extras_follow_their_declaration() -> None:
    def state(n: int, on_resize: Any = "refuse") -> TrainingState:
        return TrainingState(seen=per_rank({"n": n, "t": torch.tensor(n)}, on_resize), same=replicated([n]))

    stored = store(state(3).capture(7, rank=0, world=2), state(4).capture(7, rank=1, world=2))
    live = state(0)
    restore(live, stored, rank=1, world=2)
    assert (live["seen"]["n"], int(live["seen"]["t"]), live["same"]) == (4, 4, [3])
    with pytest.raises(MismatchError, match="on_resize"):
        restore(state(0), stored, rank=0, world=1)

    def add(states: list[Any], rank: int, world: int) -> Any:
        return {"n": sum(s["n"] for s in states) * 10 + rank, "t": sum(s["t"] for s in states)}

    live = state(0, add)
    outcome = restore(live, stored, rank=2, world=3)
    assert (live["seen"]["n"], int(live["seen"]["t"])) == (72, 7)
    assert outcome["seen"].how == "re-derived"
    with pytest.raises(MismatchError, match="declared equal"):
        restore({"seen": {"n": 0}, "same": [0]}, stored, rank=0, world=2)


def test_br_17_each_rank_gets_its_own_generators_and_new_ranks_their_own_stream() -> None:
    def draw() -> Any:
        return random.random(), np.random.rand(), torch.rand(2).tolist()

    flats, first = [], []
    for rank in range(2):
        torch.manual_seed(rank)
        np.random.seed(rank)
        random.seed(rank)
        flats.append(TrainingState(x=1).capture(7, rank=rank, world=2))
        first.append(draw())
    stored = store(*flats)
    for rank in range(2):
        assert restore({"x": 0}, stored, rank=rank, world=2)["rng"].how == "exact"
        assert draw() == first[rank]
    streams = []
    for rank in range(4):
        outcome = restore({"x": 0}, stored, rank=rank, world=4)["rng"]
        assert outcome.how == "re-derived"
        streams.append(draw())
        restore({"x": 0}, stored, rank=rank, world=4)
        assert draw() == streams[-1]
    assert streams[:2] == first
    for part in range(3):
        assert len({repr(stream[part]) for stream in streams}) == 4


def test_generators_are_restored_after_a_load_that_draws() -> None:
    class Drawing(Counter):
        def load_state_dict(self, state: Any) -> None:
            torch.rand(5)
            super().load_state_dict(state)

    stored = save({"x": Drawing(1)})
    first = torch.rand(3)
    restore({"x": Drawing(0)}, stored)
    assert raw(torch.rand(3)) == raw(first)


def test_reserved_and_impossible_names_are_refused() -> None:
    for name in ("rank", "step", "buffers_np", "a.b"):
        with pytest.raises(ConfigError, match="cannot name"):
            TrainingState(**{name: 1})
    with pytest.raises(ConfigError, match="model must be"):
        TrainingState(model=3)
    with pytest.raises(ConfigError, match="no state_dict"):
        TrainingState(scheduler=object())
    with pytest.raises(ConfigError):
        TrainingState(rng=3)  # type: ignore[arg-type]
    with pytest.raises(AttributeError):
        _ = TrainingState().nothing


def test_capture_matches_plain_dcp_keys_and_paths() -> None:
    from torch.distributed.checkpoint._nested_dict import flatten_state_dict

    parts = job(0)
    nested = {"a": {"b": [1, 2]}, "c": [{"d": 1}, 2], "e": (1, 2), "f": [torch.ones(1), 3], "h": [[1], [2]]}
    flat = TrainingState(**parts, nested=nested, rng=False).capture(3)
    names = {p: n for n, p in parts["model"].named_parameters()}
    optimizer = parts["optimizer"]
    twin = {
        "model": parts["model"].state_dict(),
        "optimizer": {
            "state": {names[p]: entry for p, entry in optimizer.state.items()},
            "param_groups": [
                {**group, "params": [names[p] for p in group["params"]]} for group in optimizer.param_groups
            ],
        },
        "scheduler": {k: v for k, v in parts["scheduler"].state_dict().items() if k != "milestones"},
        "nested": nested,
        "step": 3,
    }
    _, mapping = flatten_state_dict(twin)
    flat.paths.pop("scheduler.milestones")  # a Counter: one value here, entered by DCP, which loses its type
    assert flat.paths == dict(mapping)


def test_a_plan_asks_for_nothing_that_is_not_needed() -> None:
    live, stored = job(1), save(job(0))
    plan = plan_restore(TrainingState.of(live), stored.saved, rank=0, world=1, only="model")
    assert {key.partition(".")[0] for key in plan.scratch} == {"model"}
    fill(plan, stored).apply()
