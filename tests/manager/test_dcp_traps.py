"""What DCP makes of failures, and what must come of them: an error of ours, by rank, on all ranks, and no checkpoint.

Bare DCP loses an error in a writer thread, raises a `BaseException`, and cannot send what does not pickle (BR-19).
"""

from __future__ import annotations

import contextlib
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.checkpoint.api import CheckpointException
from workload import build

import resilio
from resilio import CheckpointManager, keep_all, per_rank
from resilio.clock import SystemClock
from resilio.engine import Root
from resilio.errors import CaptureError, InternalError, ResilioError, RestoreError, SaveError
from resilio.manager.saving import Committer
from resilio.records.schema import PartRef
from resilio.storage.local import LocalStorage
from resilio.testing.worlds import run_world

LATE_S = 300.0  # a deadline that must not be waited for
Mode = Any


class SocketError(Exception):
    """As many a client's: it does not pickle, and cannot be made from its text."""

    def __init__(self, host: str, port: int) -> None:
        super().__init__(f"{host}:{port} hung up")
        self.lock = threading.Lock()


class Riddle(Exception):
    """Pickles, and comes apart when it is unpickled."""

    def __init__(self, a: str, b: str) -> None:
        super().__init__("one argument")


class NoText(Exception):
    """Cannot even be printed."""

    def __str__(self) -> str:
        raise RuntimeError("no text")


def make(kind: str) -> BaseException:
    if kind == "checkpoint":  # a part of the state that itself uses DCP
        return CheckpointException("write", {})
    return {
        "socket": lambda: SocketError("store", 443),
        "riddle": lambda: Riddle("a", "b"),
        "plain": lambda: OSError(5, "I/O"),
        "no text": lambda: NoText(),
        "exit": lambda: SystemExit(3),
    }[kind]()


WORDS = {"socket": "SocketError", "riddle": "Riddle", "plain": "I/O", "checkpoint": "Checkpoint", "exit": "Exit"}


class Failing(LocalStorage):
    """Raises where it is told to, and not when it is a bad moment."""

    place = ""
    kind = ""

    def fail(self, place: str, key: str) -> None:
        if self.place == place and (key.startswith("step-") or place == "commit"):
            raise make(self.kind)

    def writer(self, key: str, *, size_hint: int | None = None) -> Any:
        @contextlib.contextmanager
        def opened() -> Any:
            self.fail("open", key)
            with LocalStorage.writer(self, key, size_hint=size_hint) as writer:
                yield Half(self, key, writer)
            self.fail("end", key)

        return opened()

    def put(self, key: str, data: Any, *, if_absent: bool = False) -> Any:
        if key.startswith("commits/"):
            self.fail("commit", key)
        self.fail("put", key)
        return super().put(key, data, if_absent=if_absent)

    def read_into(self, key: str, ranges: Any) -> None:
        self.fail("read", key if key.endswith(".distcp") else "")
        super().read_into(key, ranges)


class Half:
    """Fails in the middle of the bytes."""

    def __init__(self, storage: Failing, key: str, writer: Any) -> None:
        self.storage, self.key, self.inner = storage, key, writer

    def write(self, data: Any) -> None:
        self.storage.fail("write", self.key)
        self.inner.write(data)


class Part:
    """State of a user's own that fails where it is told to."""

    kind = ""
    loads = True

    def state_dict(self) -> dict[str, Any]:
        if self.kind and not self.loads:
            raise make(self.kind)
        return {"x": 1}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        if self.kind and self.loads:
            self.loads = False  # the undo goes well
            raise make(self.kind)


def text_of(error: BaseException) -> str:
    return f"{type(error).__name__} {error}"


def attempt(call: Any) -> str:
    try:
        call()
    except ResilioError as error:
        return text_of(error)
    except Exception as error:
        return f"NOT OURS {text_of(error)}"
    except BaseException as error:
        return f"ESCAPED {text_of(error)}"
    return ""


def fails_in_storage(rank: int, world: int, folder: str, mode: Mode) -> dict[str, Any]:
    """Every place and kind, on one rank after the other; a save that works after each."""
    storage = Failing(folder)
    heard: dict[str, Any] = {}
    step = 1
    live = torch.ones(700_000)  # more than one write
    with CheckpointManager(storage, {"live": live}, mode=mode, timeout_s=LATE_S) as ckpt:
        ckpt.restore()
        ckpt.save(step).exception()
        for place in ("open", "write", "end", "put", "commit"):
            for kind in (
                "socket",
                "riddle",
                "plain",
                *(("checkpoint", "exit") if mode == "async" else ("checkpoint",)),
            ):
                for bad in range(world if place != "commit" else 1):
                    storage.place, storage.kind = (place if rank == bad else ""), kind
                    step += 1

                    def save() -> None:
                        ckpt.save(step).exception()  # noqa: B023
                        storage.place = ""
                        ckpt.save(step + 1)  # noqa: B023

                    heard[f"{place} {kind} {bad}"] = attempt(save)
                    step += 2
                    storage.place = ""
                    ckpt.save(step).result()
    return heard


@pytest.mark.parametrize("mode", ["sync", "async"])
@pytest.mark.parametrize("world", [1, 2])
def test_br_19_whatever_a_storage_raises_is_the_same_error_of_ours_on_all_ranks(
    tmp_path: Any, world: int, mode: Mode
) -> None:
    outcomes = run_world(fails_in_storage, world, str(tmp_path), mode, init=world > 1, timeout_s=200)
    first = outcomes[0]
    for place, text in first.items():
        assert [outcome[place] for outcome in outcomes] == [text] * world, place
        _, kind, bad = place.split()
        assert text.startswith("SaveError ") and WORDS[kind] in text, (place, text)
        if world > 1:
            assert f"rank {bad}" in text, (place, text)
        if kind == "socket":
            assert "store:443 hung up" in text


def fails_in_state(rank: int, world: int, folder: str) -> dict[str, Any]:
    storage, part = Failing(folder), Part()
    job = build("fsdp2", rank, world)
    heard = {}
    with CheckpointManager(storage, {**job.state(), "mine": part}, mode="async", timeout_s=LATE_S) as ckpt:
        ckpt.restore()
        ckpt.save(1)
        step = 1
        for kind in ("socket", "riddle", "plain", "checkpoint"):
            for bad in range(world):
                part.kind = kind if rank == bad else ""
                part.loads, step = False, step + 1
                heard[f"state_dict {kind} {bad}"] = attempt(lambda: ckpt.save(step))  # noqa: B023
                part.loads = True
                heard[f"load_state_dict {kind} {bad}"] = attempt(ckpt.restore)
                part.kind = ""
                storage.place, storage.kind = ("read" if rank == bad else ""), kind
                heard[f"read {kind} {bad}"] = attempt(ckpt.restore)
                storage.place = ""
                assert ckpt.restore().step == 1
    return heard


def test_br_19_whatever_state_or_a_read_raises_is_the_same_error_of_ours_on_all_ranks(tmp_path: Any) -> None:
    first, second = run_world(fails_in_state, 2, str(tmp_path), timeout_s=120)
    assert first == second
    for place, text in first.items():
        what, kind, bad = place.split()
        ours = CaptureError if what == "state_dict" else RestoreError
        assert text.startswith(f"{ours.__name__} ") and f"rank {bad}" in text, (place, text)
        assert WORDS[kind] in text, (place, text)


def no_text(rank: int, world: int, folder: str) -> str:
    storage = Failing(folder)
    with CheckpointManager(storage, {"mine": {"x": 1}}, mode="sync", timeout_s=LATE_S) as ckpt:
        ckpt.restore()
        storage.place, storage.kind = ("put" if rank == 1 else ""), "no text"
        return attempt(lambda: ckpt.save(1))


def test_an_error_without_a_text_is_told_all_the_same(tmp_path: Any) -> None:
    assert set(run_world(no_text, 2, str(tmp_path))) == {"SaveError rank 1: NoText: (it has no text)"}


def test_a_ctrl_c_in_the_middle_of_a_write_stays_one(tmp_path: Any, monkeypatch: Any) -> None:
    """torch.save closes its zip on the way out, finds it cut short, and says that instead."""
    from resilio.engine.data_object import _DataObject

    def interrupted(self: Any, data: Any) -> int:
        raise KeyboardInterrupt

    with CheckpointManager(f"file://{tmp_path}", {"live": torch.ones(5)}, mode="sync") as ckpt:
        ckpt.restore()
        ckpt.save(1)
        with monkeypatch.context() as patched:
            patched.setattr(_DataObject, "write", interrupted)
            with pytest.raises(KeyboardInterrupt):
                ckpt.save(2)
        ckpt.save(3)
    assert [info.step for info in ckpt.checkpoints()] == [1, 3]


# ------------------------------------------------------------------------------------- no collective is open during I/O


class Slow(LocalStorage):
    """Each data object takes longer than the groups would wait for one."""

    wait_s = 0.0

    def writer(self, key: str, *, size_hint: int | None = None) -> Any:
        time.sleep(self.wait_s)
        return super().writer(key, size_hint=size_hint)

    def read_into(self, key: str, ranges: Any) -> None:
        if key.endswith(".distcp"):
            time.sleep(self.wait_s)
        super().read_into(key, ranges)


def slowly(rank: int, world: int, folder: str, mode: Mode) -> list[Any]:
    """All ranks write longer than the deadline, and not all equally long."""
    storage = Slow(folder)
    job = build("fsdp2", rank, world)
    with CheckpointManager(storage, job.state(), mode=mode, timeout_s=1.0) as ckpt:
        ckpt.restore()
        storage.wait_s = 2.0 + 0.4 * rank
        ckpt.save(1).result()
        ckpt.save(1)
        steps = [info.step for info in ckpt.checkpoints()]
        for group in (ckpt._ranks.groups.control, ckpt._ranks.groups.data):  # type: ignore[union-attr]
            dist.barrier(group)
        return [steps, ckpt.restore().step]


@pytest.mark.parametrize("mode", ["sync", "async"])
def test_ranks_that_all_write_and_read_longer_than_the_deadline_are_only_slow(tmp_path: Any, mode: Mode) -> None:
    assert run_world(slowly, 2, str(tmp_path), mode) == [[[1], 1]] * 2


def one_slowly(rank: int, world: int, folder: str) -> list[Any]:
    storage = Slow(folder)
    with CheckpointManager(storage, {"live": torch.ones(5)}, mode="async", timeout_s=1.0) as ckpt:
        ckpt.restore()
        ckpt.save(1).result()
        storage.wait_s = 3.0 * rank
        heard = attempt(lambda: ckpt.save(2).result())
        storage.wait_s = 0
        for step in range(3, 9):  # a busy machine may be late for one of them, too
            attempt(lambda: ckpt.save(step).result())  # noqa: B023
        return [heard, [info.step for info in ckpt.checkpoints()]]


def test_one_rank_that_is_slower_than_the_others_by_the_deadline_is_named(tmp_path: Any) -> None:
    (first, steps), (_, same) = run_world(one_slowly, 2, str(tmp_path))
    assert first.startswith("RanksLostError writing") and "rank(s) 1" in first and "timeout_s" in first
    assert steps == same and 2 not in steps and steps[-1] > 2


# ----------------------------------------------------------------------------------------------------- other folders


def test_a_plain_dcp_folder_that_is_broken_is_an_error_of_ours(tmp_path: Any) -> None:
    live = {"live": torch.ones(5), "rng": False}
    folder = tmp_path / "plain"
    torch.distributed.checkpoint.save({"live": torch.zeros(5)}, checkpoint_id=folder)
    data = next(Path(folder).glob("*.distcp"))
    for damage in (data.read_bytes()[:-700], b"", None):
        if damage is None:
            data.unlink()
        else:
            data.write_bytes(damage)
        with pytest.raises(ResilioError):
            resilio.restore(f"file://{folder}", live)
        assert live["live"].tolist() == [1.0] * 5  # type: ignore[attr-defined]


def test_nothing_of_ours_lets_dcps_base_exception_pass() -> None:
    """`except Exception` around a call of DCP misses it: the one file that calls DCP catches it by name each time."""
    root = Path(resilio.__file__).parent
    callers = [path for path in root.rglob("*.py") if "dcp_save" in (text := path.read_text()) or "dcp_load" in text]
    assert callers == [root / "engine" / "dcp.py"]
    assert not issubclass(CheckpointException, Exception) and issubclass(SaveError, Exception)


def saves_without_groups(rank: int, world: int, url: str, mode: Any, more: bool) -> list[str]:
    said = []
    own = {"x": rank}
    ckpt = CheckpointManager(url, {"live": torch.ones(5), "own": per_rank(own)}, mode=mode, timeout_s=20)
    ckpt.restore()
    ckpt.save(1).result()
    if more:  # which takes another plan
        own["y"] = 1
    dist.destroy_process_group()
    for end in (lambda: ckpt.save(2).result(), ckpt.close):
        try:
            end()
        except ResilioError as error:
            said.append(f"{type(error).__name__} {error}")
    return said


@pytest.mark.parametrize("mode", ["sync", "async"])
def test_ranks_that_dcp_would_take_for_alone_save_nothing(tmp_path, mode):
    """Where the job has destroyed its groups DCP saves on each rank as if there were no other, without a word."""
    first, second = run_world(saves_without_groups, 2, f"file://{tmp_path}", mode, True)
    for said in (first, second):
        assert said and "process group" in said[0] and "1 of 2 ranks" in said[0]
    assert len(list(tmp_path.glob("commits/*"))) == 1
    live = torch.zeros(5)
    assert resilio.restore(f"file://{tmp_path}", {"live": live, "rng": False}, only=["live"], strict=False).step == 1


def restores_own(rank: int, world: int, url: str) -> tuple[int | None, int]:
    own = {"x": -1}
    state = {"live": torch.zeros(5), "own": per_rank(own), "rng": False}
    return resilio.restore(url, state, strict=False).step, own["x"]


@pytest.mark.parametrize("mode", ["sync", "async"])
def test_ranks_that_have_agreed_on_a_plan_need_no_groups_to_save_by_it(tmp_path, mode):
    url = f"file://{tmp_path}"
    assert run_world(saves_without_groups, 2, url, mode, False) == [[], []]
    assert run_world(restores_own, 2, url) == [(2, 0), (2, 1)]


@pytest.mark.parametrize("ranks", [[0], [1], [0, 0], [0, 1, 2]])
def test_no_manifest_and_no_commit_without_the_word_of_every_rank(tmp_path, ranks):
    """Whatever DCP hands over at the end."""
    storage = LocalStorage(tmp_path)
    committer = Committer(storage, keep_all(), SystemClock(), "xxh3_128")
    attempt = committer.begin(1)
    parts = [PartRef(rank=rank, name=f"manifest-{rank}.json", size_bytes=1, digest="crc32:00") for rank in ranks]
    with pytest.raises(InternalError, match=r"of 2 ranks only"):
        committer.job(attempt, 1, 2, {}, "asked for").commit(Root(b"metadata", parts, {}, {}))
    assert not list(storage.list(""))
