"""A restore that passes over damaged checkpoints writes down which and why; the next one does not read them again."""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from manager.state_jobs import Unreadable
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

import resilio
from resilio import CheckpointManager, hookimpl, keep_last
from resilio.errors import AccessDeniedError, FencedError, IntegrityError, NotFoundError, ResilioError
from resilio.events import Event, Quarantined
from resilio.manager.saving import Committer
from resilio.records.quarantine import quarantine, quarantined, release
from resilio.storage import LocalStorage, ObjectInfo
from resilio.testing.worlds import run_world
from resilio.types import CheckpointRef

REFS = [CheckpointRef(1, step) for step in range(5)]


def state_of(rank: int, world: int, value: float) -> tuple[dict[str, Any], torch.Tensor, dict[str, float]]:
    mesh = init_device_mesh("cpu", (world,))
    weight = distribute_tensor(torch.full((40_000,), value), mesh, [Shard(0)])
    seen = {"n": value}
    return {"weight": weight, "seen": seen, "rng": False}, weight.to_local(), seen


def save_steps(rank: int, world: int, url: str, last: int = 3) -> None:
    state, weight, seen = state_of(rank, world, 0.0)
    with CheckpointManager(url, state, mode="sync") as ckpt:
        ckpt.restore()
        for step in range(1, last + 1):
            weight.fill_(step)
            seen["n"] = step
            ckpt.save(step)


def flip(root: Path, step: int, rank: int = 0) -> None:
    folder = next(root.glob(f"step-{step:09d}-*"))
    (piece,) = json.loads((folder / f"manifest-{rank}.json").read_bytes())["tensors"]["weight"]["pieces"]
    path = folder / f"__{rank}_0.distcp"
    data = bytearray(path.read_bytes())
    data[piece["at"]] ^= 1
    path.unlink()
    path.write_bytes(data)


def cut(root: Path, step: int, name: str = "manifest.json") -> None:
    path = next(root.glob(f"step-{step:09d}-*")) / name
    data = path.read_bytes()
    path.unlink()
    path.write_bytes(data[: len(data) // 2])


def contents(root: Path) -> dict[str, bytes]:
    return {str(path.relative_to(root)): path.read_bytes() for path in root.rglob("*") if path.is_file()}


def go_on(rank: int, world: int, url: str) -> tuple[int, list[str], list[float], float]:
    """Restore the newest, and save one more."""
    state, weight, seen = state_of(rank, world, -1.0)
    with CheckpointManager(url, state, mode="sync") as ckpt:
        report = ckpt.restore()
        live = weight.unique().tolist(), seen["n"]
        ckpt.save(report.step + 10)
    return report.step, [str(one) for one in report.passed_over], *live


def fail(rank: int, world: int, url: str) -> tuple[str, bool]:
    state, weight, seen = state_of(rank, world, -1.0)
    with CheckpointManager(url, state, mode="sync") as ckpt:
        try:
            ckpt.restore()
        except IntegrityError as error:
            text = str(error)
        try:
            ckpt.save(1)
            text += " AND SAVED"  # a fresh start
        except ResilioError:
            pass
    return text, weight.eq(-1).all().item() and seen == {"n": -1.0}


@pytest.mark.parametrize("world", [1, 2])
def test_two_damaged_newest_give_way_to_the_third_on_all_ranks_and_are_quarantined_with_reasons(tmp_path, world):
    url, storage = f"file://{tmp_path}", LocalStorage(str(tmp_path))
    run_world(save_steps, 2, url)
    flip(tmp_path, 3, rank=1)
    cut(tmp_path, 2)
    before = contents(tmp_path)
    for step, passed, weight, seen in run_world(go_on, world, url):
        assert (step, weight, seen) == (1, [1.0], 1)
        assert len(passed) == 2 and "__1_0.distcp" in passed[0] and "manifest.json" in passed[1]
    found = quarantined(storage)
    assert list(found) == [REFS[2], REFS[3]]
    assert "manifest.json has" in found[REFS[2]].why and "'weight' is damaged in block 0" in found[REFS[3]].why
    for ref in found:
        (record,) = found[ref].records
        assert (record.found_by, len(record.problems), record.pid > 0) == ("restore", 1, True)
    after = contents(tmp_path)
    assert before.items() <= after.items()  # nothing was moved or deleted
    new = sorted(name.split("/")[0] for name in after.keys() - before.keys())
    assert new[:4] == ["commits", "generations", "quarantine", "quarantine"]


@pytest.mark.parametrize("world", [1, 2])
def test_if_nothing_is_intact_it_is_an_error_and_nothing_is_written_or_changed(tmp_path, world):
    url = f"file://{tmp_path}"
    run_world(save_steps, 2, url)
    flip(tmp_path, 3, rank=1)
    cut(tmp_path, 2)
    flip(tmp_path, 1)
    before = contents(tmp_path)
    told = run_world(fail, world, url)
    assert len(set(told)) == 1
    text, untouched = told[0]
    assert untouched and "none of the 3" in text and "SAVED" not in text
    assert all(f"step {step} (generation 1): " in text for step in (1, 2, 3))
    assert contents(tmp_path) == before  # a mount or permissions may be the cause


def one_cannot(rank: int, world: int, root: str, error: type[ResilioError]) -> tuple[int, list[str]]:
    storage = Unreadable(root, error) if rank == 1 else LocalStorage(root)
    with CheckpointManager(storage, state_of(rank, world, -1.0)[0]) as ckpt:
        report = ckpt.restore()
    return report.step, [str(one) for one in report.passed_over]


@pytest.mark.parametrize("error", [AccessDeniedError, NotFoundError], ids=lambda error: error.__name__)
def test_a_rank_that_cannot_read_is_damage_for_all_and_no_finding_about_the_checkpoint(tmp_path, error):
    run_world(save_steps, 2, f"file://{tmp_path}", 2)
    told = run_world(one_cannot, 2, str(tmp_path), error)
    assert told[0] == told[1]
    assert told[0][0] == 1 and "rank 1" in told[0][1][0]
    assert not (tmp_path / "quarantine").exists()


class Noisy(LocalStorage):
    """The store as a rank sees it whose reads of the data of step 3 go wrong once."""

    noise = 1

    def read_into(self, key: str, ranges: Any) -> None:
        super().read_into(key, ranges)
        if key.startswith("step-000000003") and key.endswith(".distcp") and self.noise:
            self.noise -= 1
            for _, buffer in ranges:
                buffer[0] ^= 4


def one_is_noisy(rank: int, world: int, root: str) -> tuple[int, list[str]]:
    storage = Noisy(root) if rank == world - 1 else LocalStorage(root)
    with CheckpointManager(storage, state_of(rank, world, -1.0)[0]) as ckpt:
        report = ckpt.restore()
    return report.step, [str(one) for one in report.passed_over]


@pytest.mark.parametrize("world", [1, 2])
def test_what_a_second_look_does_not_find_is_no_finding(tmp_path, world):
    """A bit that flipped on the way to one host, or once, is no reason that no job ever resumes from it again."""
    run_world(save_steps, 2, f"file://{tmp_path}")
    for step, passed in run_world(one_is_noisy, world, str(tmp_path)):
        assert step == 2 and "'weight' is damaged" in passed[0]
    assert not (tmp_path / "quarantine").exists()
    flip(tmp_path, 3, rank=1)
    assert [step for step, _ in run_world(one_is_noisy, world, str(tmp_path))] == [2] * world
    assert list(quarantined(LocalStorage(str(tmp_path)))) == [REFS[3]]


# ------------------------------------------------------------------------------------------- one process from here on


class Numbers:
    """A run of one process."""

    def __init__(self, root: Path, last: int = 3) -> None:
        self.url, self.root = f"file://{root}", root
        self.storage = LocalStorage(str(root))
        live: dict[str, Any] = {"weight": torch.zeros(40_000), "rng": False}
        with CheckpointManager(self.url, live, mode="sync") as ckpt:
            ckpt.restore()
            for step in range(1, last + 1):
                live["weight"].fill_(step)
                ckpt.save(step)

    def restore(self, which: Any = "newest", **more: Any) -> Any:
        with CheckpointManager(self.url, {"weight": torch.zeros(40_000), "rng": False}, **more) as ckpt:
            return ckpt.restore(which)


@pytest.fixture
def run(tmp_path: Path) -> Iterator[Numbers]:
    yield Numbers(tmp_path / "run")


def test_the_next_restore_passes_over_it_unread_says_why_and_writes_nothing(run: Numbers, monkeypatch):
    flip(run.root, 3)
    assert run.restore().step == 2
    before = contents(run.root)
    read: list[str] = []
    whole = LocalStorage.read_into

    def noting(self: LocalStorage, key: str, ranges: Any) -> None:
        read.append(key)
        whole(self, key, ranges)

    monkeypatch.setattr(LocalStorage, "read_into", noting)
    report = run.restore()
    assert report.step == 2 and not [key for key in read if key.startswith("step-000000003")]
    (passed,) = report.passed_over
    assert "in quarantine: found damaged by a restore" in str(passed) and "'weight' is damaged" in str(passed)
    assert passed.facts["ref"] == REFS[3]
    assert contents(run.root) == before
    (again,) = resilio.restore(run.url, {"weight": torch.zeros(40_000), "rng": False}).passed_over
    assert str(again) == str(passed)


def test_by_its_step_it_is_tried_all_the_same_with_a_loud_warning(run: Numbers, caplog):
    quarantine(run.storage, REFS[3], "loss exploded\nhere")
    with caplog.at_level(logging.WARNING, "resilio"):
        assert run.restore(3).step == 3
        assert run.restore(REFS[3]).step == 3
    assert caplog.text.count("in quarantine, as asked for: step 3 (generation 1) because loss exploded") == 2
    flip(run.root, 3)
    with pytest.raises(IntegrityError, match="'weight' is damaged"):
        run.restore(3)
    assert len(quarantined(run.storage)[REFS[3]].records) == 1


def test_a_reason_from_the_store_adds_no_line_to_a_log_and_moves_no_cursor(run: Numbers, caplog):
    quarantine(run.storage, REFS[3], "x\x1b[31m\nresilio: all is well")
    with caplog.at_level(logging.WARNING, "resilio"):
        report = run.restore()
        run.restore(3)
    texts = [record.getMessage() for record in caplog.records] + [str(one) for one in report.passed_over]
    assert len(texts) == 3 and all(text.isprintable() and "all is well" in text for text in texts)


def test_released_it_is_the_newest_again(run: Numbers):
    quarantine(run.storage, REFS[3], "x")
    assert run.restore().step == 2
    release(run.storage, REFS[3])
    assert run.restore().step == 3


def test_a_job_that_went_back_past_it_saves_and_the_one_before_is_fenced(run: Numbers):
    live: dict[str, Any] = {"weight": torch.zeros(40_000), "rng": False}
    with CheckpointManager(run.url, live, mode="sync") as old:
        assert old.restore().step == 3
        old.save(4)
        quarantine(run.storage, CheckpointRef(2, 4), "x")
        with CheckpointManager(run.url, live, mode="sync") as new:
            assert new.restore().step == 3
            new.save(5)
        with pytest.raises(FencedError):
            old.save(6)
    assert run.restore().step == 5


def test_all_in_quarantine_is_an_error_that_lists_all_and_says_how_to_release(run: Numbers):
    for step in (1, 2, 3):
        quarantine(run.storage, REFS[step], f"reason {step}")
    with pytest.raises(IntegrityError, match="none of the 3") as caught:
        run.restore()
    assert all(f"reason {step}" in str(caught.value) for step in (1, 2, 3))
    assert f"resilio release {run.url} 3" in str(caught.value)


def test_what_cannot_be_written_is_a_warning_and_the_restore_succeeds(run: Numbers, monkeypatch, caplog):
    cut(run.root, 3)
    put = LocalStorage.put

    def refuse(self: LocalStorage, key: str, data: Any, **more: Any) -> ObjectInfo:
        if key.startswith("quarantine/"):
            raise AccessDeniedError(f"{key}: read-only")
        return put(self, key, data, **more)

    monkeypatch.setattr(LocalStorage, "put", refuse)
    with caplog.at_level(logging.WARNING, "resilio"):
        assert run.restore().step == 2
    assert "not quarantined: step 3" in caplog.text and "read-only" in caplog.text


def test_who_only_reads_writes_nothing(run: Numbers):
    flip(run.root, 3)
    before = contents(run.root)
    assert resilio.restore(run.url, {"weight": torch.zeros(40_000), "rng": False}).step == 2
    assert contents(run.root) == before


def test_a_lease_that_ran_out_over_the_read_is_no_ground_for_a_finding(run: Numbers, monkeypatch):
    """It may have been deleted meanwhile, and begun anew by nobody: what was read is not known to have been whole."""
    flip(run.root, 3)
    monkeypatch.setattr("resilio.records.holds.Lease.sure", property(lambda self: False))
    assert run.restore().step == 2
    assert not (run.root / "quarantine").exists()


def test_plugins_hear_of_it_before_they_hear_of_the_restore(run: Numbers):
    told: list[Event] = []

    class Listener:
        @hookimpl
        def resilio_on_event(self, event: Event) -> None:
            told.append(event)

    flip(run.root, 3)
    run.restore(plugins=[Listener()])
    assert [type(event).__name__ for event in told] == ["Quarantined", "Restored"]
    first = told[0]
    assert isinstance(first, Quarantined)
    assert first.ref == REFS[3] and "found damaged" in first.because and first.problems[0].facts["tensor"] == "weight"


def test_a_policy_keeps_as_many_as_can_be_resumed_from(run: Numbers):
    quarantine(run.storage, REFS[3], "x")
    live: dict[str, Any] = {"weight": torch.zeros(40_000), "rng": False}
    with CheckpointManager(run.url, live, mode="sync", keep=keep_last(2)) as ckpt:
        assert ckpt.restore(3).step == 3  # a person knows better
        ckpt.save(4)
        assert [info.step for info in ckpt.checkpoints()] == [2, 3, 4]
    assert os.listdir(run.root / "quarantine")


@pytest.mark.parametrize("name", ["manifest.json", "manifest-0.json", "__0_0.digests", "__0_0.distcp", ".metadata"])
@pytest.mark.parametrize("how", ["gone", "short"])
def test_an_object_that_was_away_for_a_moment_is_no_finding(run: Numbers, monkeypatch, caplog, name, how):
    """A mount that came back: what is there now is whole."""
    path = next(run.root.glob("step-000000003-*")) / name
    data = path.read_bytes()
    path.unlink()
    if how == "short":
        path.write_bytes(data[:-1])
    restored = Committer.restored

    def back(self: Committer, *more: Any) -> None:
        path.unlink(missing_ok=True)
        path.write_bytes(data)
        restored(self, *more)

    with monkeypatch.context() as patch, caplog.at_level(logging.WARNING, "resilio"):
        patch.setattr(Committer, "restored", back)
        assert run.restore().step == 2
        assert "a second look finds nothing: step 3" in caplog.text
    assert run.restore().step == 3
    path.unlink()
    assert run.restore().step == 2
    assert list(quarantined(run.storage)) == [REFS[3]]


def test_a_storage_that_fails_as_none_may_does_not_fail_a_restore_that_is_done(run: Numbers, monkeypatch, caplog):
    cut(run.root, 3)
    put = LocalStorage.put

    def fail(self: LocalStorage, key: str, data: Any, **more: Any) -> ObjectInfo:
        if key.startswith("quarantine/"):
            raise ValueError("a bug of a plugin")
        return put(self, key, data, **more)

    monkeypatch.setattr(LocalStorage, "put", fail)
    with caplog.at_level(logging.WARNING, "resilio"):
        assert run.restore().step == 2
    assert "not quarantined: step 3" in caplog.text and "a bug of a plugin" in caplog.text
