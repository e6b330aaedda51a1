"""Snapshot isolation: whatever changes right after `save` has returned, the checkpoint is of the moment of the call.

Bug reports BR-18, BR-28, BR-43, BR-66.
"""

from __future__ import annotations

import copy
from collections import OrderedDict
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed.checkpoint as dcp
from manager.exit_jobs import wait_until
from torch.distributed.tensor import DTensor
from workload import Job, assert_same, build, rng, seed_all, snapshot

from resilio import CheckpointManager, TrainingState, failpoints, per_rank
from resilio.engine.stage import Stager
from resilio.errors import CaptureError
from resilio.state import tree
from resilio.testing.worlds import run_world

ROUNDS = 20
# Where the saving thread stands while everything changes, by the round modulo 4; None: it runs.
PLACES = (None, "save.staged", None, "save.data_open")


@pytest.fixture(autouse=True)
def _disarmed() -> Any:
    yield
    failpoints.disarm()


class Holder:
    """State of a user's own whose `state_dict` hands out the live objects."""

    def __init__(self) -> None:
        self.seen: list[Any] = []
        self.average = torch.zeros(3)

    def state_dict(self) -> dict[str, Any]:
        return self.__dict__

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.seen = state["seen"]
        self.average.copy_(state["average"])


class Live:
    """A job with everything that can change in place, and the changes."""

    def __init__(self, strategy: str, rank: int = 0, world: int = 1) -> None:
        self.job: Job = build(strategy, rank, world)
        self.job.train_step()  # moments
        big = torch.zeros(4, 6)
        self.extras: dict[str, Any] = {
            "array": np.zeros((2, 3)),
            "number": np.zeros((), dtype=np.int32),
            "nested": {"list": [0, [0], {"deep": [0]}], "tuple": (0, [0]), "set": {0}, "ordered": OrderedDict(a=0)},
            "tensors": {"list": [torch.zeros(2), [torch.zeros(1)]], "tuple": (torch.zeros(2), {"t": torch.zeros(2)})},
            "arrays": {"list": [np.zeros(2)], "tuple": (np.zeros(2),)},
            "tensor": torch.zeros(5),
            "scalar": torch.zeros(()),
            "half": torch.zeros(3, dtype=torch.bfloat16),
            "view": big[1:3, ::2],
            "transposed": big.t(),
            "holder": Holder(),
            "own": {"x": torch.zeros(2), "n": [0]},
        }

    def state(self) -> TrainingState:
        own = per_rank(self.extras["own"])
        return TrainingState(**{**self.job.state(), **self.extras, "own": own})

    def tensors(self) -> list[tuple[torch.Tensor, bool]]:
        """Each tensor that is trained or saved, this rank's part, and whether it is that alone."""
        self.job.model.state_dict()  # FSDP2: sharded parameters
        found = [*self.job.model.parameters(), *self.job.model.buffers()]
        for state in self.job.optimizer.state.values():
            found += [value for value in state.values() if isinstance(value, torch.Tensor)]
        extras = self.extras
        lists = extras["tensors"]
        found += [extras[name] for name in ("tensor", "scalar", "half", "view", "transposed")]
        found += [lists["list"][0], lists["list"][1][0], lists["tuple"][0], lists["tuple"][1]["t"]]
        found += [extras["holder"].average, extras["own"]["x"]]
        shards = [(one, isinstance(one, DTensor)) for one in found]
        return [(one.detach().to_local() if sharded else one.detach(), sharded) for one, sharded in shards]

    def change(self, number: int) -> None:
        """Everything, in place, to values that belong to this number."""
        for index, (one, sharded) in enumerate(self.tensors()):
            seed_all(1000 * abs(number) + index + (self.job.rank << 20 if sharded else 0))
            one.copy_(torch.rand(one.shape).mul(100).to(one.dtype))
        seed_all(abs(number))
        extras = self.extras
        arrays = [extras["array"], extras["number"], extras["arrays"]["list"][0], extras["arrays"]["tuple"][0]]
        for array in arrays:
            array[...] = np.random.random(array.shape) * 100
        nested = extras["nested"]
        nested["list"][0] = number
        nested["list"][1][:] = [number] * (1 + number % 3)
        nested["list"][2]["deep"].append(number)
        nested["tuple"][1][0] = number
        nested["set"].symmetric_difference_update({number, number + 1})
        nested["ordered"]["a"] = number
        nested["ordered"].move_to_end("a")
        nested["ordered"][str(number % 2)] = number
        extras["holder"].seen.append([number])
        extras["own"]["n"][0] = number + self.job.rank
        self.job.loader.position = number
        for group in self.job.optimizer.param_groups:
            group["lr"] = number / 7
        self.job.scheduler.last_epoch = number

    def look(self) -> dict[str, Any]:
        """A copy of all of it. Collective."""
        extras = {name: copy.deepcopy(getattr(value, "__dict__", value)) for name, value in self.extras.items()}
        return {"job": snapshot(self.job), "extras": plain(extras), "rng": rng()}


def plain(value: Any) -> Any:
    """With tensors for arrays, and sets as lists, so that `assert_same` compares bit for bit."""
    if isinstance(value, np.ndarray):
        return torch.from_numpy(value.copy())
    if isinstance(value, dict):
        return [type(value).__name__, [[key, plain(below)] for key, below in value.items()]]
    if isinstance(value, (list, tuple)):
        return type(value)(map(plain, value))
    return ["set", sorted(value)] if isinstance(value, set) else value


def no_copy(self: Stager, state: dict[str, Any], late: Any) -> dict[str, Any]:
    return dict(state)


def save_and_change(rank: int, world: int, folder: str, plant: str = "") -> None:
    """Save `ROUNDS` times, change everything at once each time; then every checkpoint must be of its own moment."""
    if plant == "a stager without a copy":
        Stager._copies = no_copy  # type: ignore[method-assign]
    if plant == "values without a copy":
        tree._copied = lambda value, where: value
    live = Live("fsdp2" if world > 1 else "single", rank, world)
    want: dict[int, Any] = {}
    held = Path(folder) / f"held.{rank}"
    url = f"file://{folder}/run"
    loss = torch.zeros(())
    metrics: dict[str, Any] = {}
    with CheckpointManager(url, live.state(), mode="async", stage="block", timeout_s=60) as ckpt:
        ckpt.restore()
        for step in range(1, ROUNDS + 1):
            live.change(step)
            loss.fill_(step)
            metrics.update(loss=loss, array=np.array(step), seen=step)
            want[step] = live.look()
            place = PLACES[step % 4]
            failpoints.disarm()
            if place:
                failpoints.arm(f"{place}=hold:{held}")
            handle = ckpt.save(step, metrics=metrics)
            live.change(-step % 1000)
            loss.fill_(-1)
            metrics.update(seen=-1, array=None)
            metrics.pop("loss")
            if step % 3 == 0:
                live.job.train_step()  # as the loop does
            if place:
                assert not handle.done()
                wait_until(held.exists)
                failpoints.disarm()
                held.unlink()
        ckpt.save(ROUNDS).result()
        infos = {info.step: info for info in ckpt.checkpoints()}
        assert sorted(infos) == list(range(1, ROUNDS + 1))
        for step, info in infos.items():
            assert info.metrics == {"loss": step, "array": step, "seen": step}
            assert info.attempt.startswith(f"step-{step:09d}-")
    twin = Live("fsdp2" if world > 1 else "single", rank, world)
    with CheckpointManager(url, twin.state(), mode="sync", timeout_s=60) as ckpt:
        for step in want:
            twin.change(999)
            assert ckpt.restore(step).step == step
            assert ckpt.verify(step) == []
            assert_same(twin.look(), want[step], f"step {step}")
            if world == 1:  # to readers that know nothing of manifests as well
                bare: dict[str, Any] = {"nested": {"tuple": 0, "set": 0}, "holder": {"seen": 0}, "number": 0}
                dcp.load(bare, checkpoint_id=Path(folder) / "run" / infos[step].attempt)
                for name, below in (("tuple", "nested"), ("set", "nested"), ("seen", "holder")):
                    saved = plain(twin.extras[below][name] if below == "nested" else twin.extras[below].seen)
                    assert_same(plain(bare[below][name]), saved, f"step {step}.extras.{below}")
                assert bare["number"] == twin.extras["number"], f"step {step}.extras.number"


def test_br_18_twenty_times_everything_changes_and_every_checkpoint_is_of_its_own_moment(tmp_path: Any) -> None:
    run_world(save_and_change, 1, str(tmp_path), init=False, timeout_s=240)


def test_br_18_the_same_at_two_ranks(tmp_path: Any) -> None:
    run_world(save_and_change, 2, str(tmp_path), timeout_s=240)


@pytest.mark.parametrize(
    ("plant", "world"), [("a stager without a copy", 1), ("a stager without a copy", 2), ("values without a copy", 1)]
)
def test_what_does_not_copy_is_caught(tmp_path: Any, plant: str, world: int) -> None:
    with pytest.raises(Exception, match=r"AssertionError: step \d+\S*(job|extras|rng)"):
        run_world(save_and_change, world, str(tmp_path), plant, init=world > 1, timeout_s=240)


# -------------------------------------------------------------------------------------- tensors that are more than that


class Tagged(torch.Tensor):
    """Data of its own beside the elements."""


class Wrapped(torch.Tensor):
    """Elements that are made of two others: as many quantized tensors are."""

    @staticmethod
    def __new__(cls, data: torch.Tensor, scale: torch.Tensor) -> Any:
        made: Any = torch.Tensor._make_wrapper_subclass(cls, data.shape, dtype=torch.float32)  # type: ignore[attr-defined]
        made.inner, made.scale = data, scale
        return made

    def __tensor_flatten__(self) -> Any:
        return ["inner", "scale"], None

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        def open_up(value: Any) -> Any:
            return value.inner.float() * value.scale if isinstance(value, cls) else value

        return func(*map(open_up, args), **{name: open_up(value) for name, value in (kwargs or {}).items()})


def tagged() -> Any:
    made: Any = torch.ones(3).as_subclass(Tagged)
    made.tag = [1]
    return made


MORE = {
    "a tensor with a tag": tagged,
    "a wrapper": lambda: Wrapped(torch.ones(3, dtype=torch.int8), torch.tensor(0.5)),
    "a masked array": lambda: np.ma.masked_array([1, 2], [True, False]),
    "a matrix": lambda: np.asmatrix(np.ones((2, 2))),
    "an array of objects": lambda: np.array([[1], "x"], dtype=object),
    "a sparse tensor": lambda: torch.eye(3).to_sparse(),
    "a nested tensor": lambda: torch.nested.nested_tensor([torch.ones(2), torch.ones(3)], layout=torch.jagged),
}


@pytest.mark.parametrize("where", ["alone", "in a list", "in a tuple", "behind state_dict"])
@pytest.mark.parametrize("what", MORE)
def test_br_43_what_a_copy_might_not_reach_is_refused_before_anything_is_staged(
    tmp_path: Any, what: str, where: str
) -> None:
    odd = MORE[what]()
    holder = Holder()
    holder.seen = [odd]
    value = {"alone": odd, "in a list": {"k": [odd]}, "in a tuple": {"k": (1, odd)}, "behind state_dict": holder}[where]
    good = {"n": torch.ones(2)}
    state = TrainingState(good=good, mine=value)
    with CheckpointManager(f"file://{tmp_path}", state, mode="async") as ckpt:
        ckpt.restore()
        with pytest.raises(CaptureError, match="mine"):
            ckpt.save(1)
        assert not list(tmp_path.glob("step-*"))
        state["mine"] = 0
        ckpt.save(2)
    assert [info.step for info in ckpt.checkpoints()] == [2]
