"""A plan that all ranks agreed on is used again: without a collective in the background, never stale, never alone."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
import torch.distributed as dist
from workload import assert_same, build, snapshot

from resilio import CheckpointManager, failpoints, per_rank
from resilio.engine import Engine
from resilio.engine.agreed import Stand, still_holds
from resilio.errors import RanksDisagreeError, ResilioError
from resilio.testing.worlds import run_world

LATE_S = 300.0  # a deadline that must not be waited for

OPS = (
    *("allgather", "_allgather_base", "allgather_coalesced", "allreduce", "allreduce_coalesced", "alltoall"),
    *("alltoall_base", "barrier", "broadcast", "gather", "monitored_barrier", "recv", "recv_anysource", "reduce"),
    *("reduce_scatter", "_reduce_scatter_base", "scatter", "send"),
)


@contextmanager
def counted() -> Iterator[list[str]]:
    """The operations of all process groups that are not the training loop's."""
    seen: list[str] = []
    before = {name: dist.ProcessGroup.__dict__[name] for name in OPS}  # as it is: pybind's are bound when looked up

    def counting(name: str) -> Callable[..., Any]:
        def op(*args: Any, **named: Any) -> Any:
            if threading.current_thread() is not threading.main_thread():
                seen.append(name)
            return before[name].__get__(args[0], dist.ProcessGroup)(*args[1:], **named)

        return op

    for name in OPS:
        setattr(dist.ProcessGroup, name, counting(name))
    try:
        yield seen
    finally:
        for name, op in before.items():
            setattr(dist.ProcessGroup, name, op)


def planned(ckpt: CheckpointManager) -> int:
    """The step for which the plan was made that is in use."""
    agreed = ckpt._engine._agreed
    assert agreed is not None
    return int(agreed.name.split("-")[1])


def counts(rank: int, world: int, url: str, kind: str) -> list[Any]:
    job = build(kind, rank, world)
    found: list[Any] = []
    with CheckpointManager(url, job.state(), timeout_s=LATE_S) as ckpt:
        ckpt.restore()
        for step in (1, 2, 3):
            job.train_step()
            with counted() as seen:
                ckpt.save(step).result()
            found.append(len(seen))
        want = snapshot(job)
        found.append(planned(ckpt))
    twin = build(kind, rank, world, seed=3)
    with CheckpointManager(url, twin.state()) as ckpt:
        assert ckpt.restore(check_fingerprints=True).step == 3
    assert_same(snapshot(twin), want)
    return found


@pytest.mark.parametrize("kind", ["fsdp2", "ddp"])
def test_later_saves_open_no_collective_in_the_background_and_come_back_bit_for_bit(tmp_path: Any, kind: str) -> None:
    for first, second, third, step in run_world(counts, 2, f"file://{tmp_path}", kind):
        assert first > 0, "the operations of DCP are not counted: this test could not fail"
        # The first step made the optimizer's state: the second save is of another structure than the first, or not.
        assert second == third == 0
        assert step == 1


class Held:
    """State of a rank's own."""

    def __init__(self, state: Any) -> None:
        self.state = state

    def state_dict(self) -> Any:
        return self.state

    def load_state_dict(self, state: Any) -> None:
        self.state = state


def plain() -> dict[str, Any]:
    return {"a": torch.arange(6.0).view(2, 3), "b": [torch.ones(2), 1], "n": 5, "c": {"x": torch.zeros(3)}}


CHANGES: dict[str, Callable[[dict[str, Any]], Any]] = {
    "shape": lambda state: state.update(a=torch.arange(8.0).view(2, 4)),
    "dtype": lambda state: state.update(a=state["a"].double()),
    "memory order": lambda state: state.update(a=torch.arange(6.0).view(3, 2).t()),
    "tensor more": lambda state: state.update(d=torch.full((3,), 7.0)),
    "tensor less": lambda state: state.pop("a"),
    "value for tensor": lambda state: state.update(a=3),
    "tensor for value": lambda state: state.update(n=torch.tensor(5)),
    "value more": lambda state: state.update(m=6),
    "value less": lambda state: state.pop("n"),
    "container": lambda state: state.update(b=tuple(state["b"])),
    "key type": lambda state: state.update(c={1: torch.zeros(3)}),
    "order": lambda state: state.update(a=state.pop("a")),
}


def changes(rank: int, world: int, url: str, names: list[str]) -> list[Any]:
    mine = Held(plain())
    shared = {"w": torch.ones(4)}
    found: list[Any] = []
    with CheckpointManager(url, {"mine": per_rank(mine), "shared": shared}, timeout_s=LATE_S) as ckpt:
        ckpt.restore()
        for step, name in enumerate(names):
            for at, change in enumerate((lambda state: None, lambda state: None, CHANGES[name])):
                if at == 0:
                    mine.state = plain()
                if rank == 1:
                    change(mine.state)
                mine.state["c"]["y"] = 10 * step + at + rank  # a value, new each time
                shared["w"].fill_(step + at)
                now = 3 * step + at + 1
                ckpt.save(now).result()
                want = {**mine.state, "c": dict(mine.state["c"])}
                made = planned(ckpt)
            mine.state = plain()
            assert ckpt.restore().step == now
            assert_same(mine.state, want)
            assert type(mine.state["b"]) is type(want["b"]) and list(mine.state) == list(want)
            found.append((name, made == now))
    return found


def test_a_change_of_structure_on_one_rank_makes_the_plan_anew_on_all(tmp_path: Any) -> None:
    for found in run_world(changes, 2, f"file://{tmp_path}", list(CHANGES)):
        assert found == [(name, True) for name in CHANGES]


def disagrees(rank: int, world: int, url: str, mode: Any) -> list[Any]:
    shared = Held({"a": torch.ones(3), "b": torch.ones(2), "n": 1})
    said: list[Any] = []
    with CheckpointManager(url, {"shared": shared}, mode=mode, timeout_s=LATE_S) as ckpt:
        ckpt.restore()
        step = 0
        for change in (
            lambda state: state.pop("b"),
            lambda state: state.update(a=torch.ones(4)),
            lambda state: state.update(n=2),
            lambda state: state.update(b=1),
        ):
            for wrong in (False, False, True):
                step += 1
                shared.state = {"a": torch.ones(3), "b": torch.ones(2), "n": 1}
                if wrong and rank == 1:
                    change(shared.state)
                try:
                    ckpt.save(step)
                    ckpt.step(step + 1) if step % 2 else None
                    ckpt._saves.settle()
                except RanksDisagreeError as error:
                    said.append(f"{step} {error.facts['key']} {error}")
        return [said, [info.step for info in ckpt.checkpoints()]]


@pytest.mark.parametrize("mode", ["sync", "async"])
def test_what_one_rank_lacks_or_has_otherwise_is_refused_by_name_as_in_a_first_save(tmp_path: Any, mode: str) -> None:
    first, second = run_world(disagrees, 2, f"file://{tmp_path}", mode)
    assert first == second
    said, steps = first
    assert [one.split()[:2] for one in said] == [
        ["3", "shared.b"],
        ["6", "shared.a"],
        ["9", "shared.n"],
        ["12", "shared.b"],
    ]
    assert steps == [1, 2, 4, 5, 7, 8, 10, 11]


def fails(rank: int, world: int, url: str, place: str, on: int, mode: Any) -> list[Any]:
    job = build("fsdp2", rank, world)
    said: list[str] = []
    with CheckpointManager(url, job.state(), mode=mode, timeout_s=LATE_S) as ckpt:
        ckpt.restore()
        job.train_step()
        for step in (1, 2, 3, 4, 5):
            if step == 3:
                assert planned(ckpt) == 1
                failpoints.arm(f"{place}=raise@{on}#1")
            try:
                ckpt.save(step)
                ckpt._saves.settle()
            except ResilioError as error:
                said.append(f"{step} {type(error).__name__} {error} {getattr(error, 'rank', None)}")
        return [said, [info.step for info in ckpt.checkpoints()], planned(ckpt)]


@pytest.mark.parametrize("mode", ["sync", "async"])
@pytest.mark.parametrize(
    ("place", "on"),
    [
        *[("save.staged", rank) for rank in (0, 1)],
        *[("save.data_open", rank) for rank in (0, 1)],
        ("save.part_written", 1),
        *[(place, 0) for place in ("save.before_metadata", "save.before_manifest", "save.before_commit")],
    ],
)
def test_a_rank_that_fails_under_an_agreed_plan_is_told_to_all_and_all_is_planned_anew(
    tmp_path: Any, place: str, on: int, mode: str
) -> None:
    first, second = run_world(fails, 2, f"file://{tmp_path}", place, on, mode)
    assert first == second
    said, steps, made = first
    assert len(said) == 1 and said[0].startswith("3 SaveError") and place in said[0]
    assert steps == [1, 2, 4, 5]
    assert made == 4


def late_in_dcp(rank: int, world: int, url: str, mode: Any) -> list[Any]:
    """DCP fails on rank 1 after it has written: rank 1 alone knows, and its bytes are there."""
    job = build("fsdp2", rank, world)
    with CheckpointManager(url, job.state(), mode=mode, timeout_s=LATE_S) as ckpt:
        ckpt.restore()
        ckpt.save(1).result()
        finish = Engine.save.__globals__["AttemptWriter"].finish
        hit = 1 if mode == "sync" else 0

        def broken(self: Any, metadata: Any, results: Any) -> None:
            if rank == hit:
                raise ValueError("not today")
            finish(self, metadata, results)

        Engine.save.__globals__["AttemptWriter"].finish = broken
        said = []
        try:
            ckpt.save(2)
            ckpt._saves.settle()
        except ResilioError as error:
            said.append(str(error))
        Engine.save.__globals__["AttemptWriter"].finish = finish
        ckpt.save(3).result()
        return [said, [info.step for info in ckpt.checkpoints()]]


def test_a_failure_after_all_has_been_written_leaves_nobody_waiting(tmp_path: Any) -> None:
    first, second = run_world(late_in_dcp, 2, f"file://{tmp_path}/0", "async")
    assert first == second and first[1] == [1, 3] and "not today" in first[0][0]
    assert run_world(late_in_dcp, 2, f"file://{tmp_path}/1", "sync") == [[[], [1, 2, 3]]] * 2


def test_a_plan_holds_only_if_all_ranks_say_so_of_the_same_one() -> None:
    same = Stand("one", "s", ("b",))
    assert still_holds([same, Stand("one", "s", ("other",))])
    for other in (None, Stand(None, "s", ()), Stand("two", "s", ()), Stand("one", "other", ())):
        assert not still_holds([same, other])
        assert not still_holds([other, same])
    assert not still_holds([Stand(None, "s", ())])
