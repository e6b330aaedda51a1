"""Room for one more checkpoint: looked for, made, refused with numbers, and told of before it is needed."""

from __future__ import annotations

import errno
import logging
import os
import subprocess
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from manager.space_tools import Faulty, committed, litter, state, value_of
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

import resilio
from resilio import CheckpointManager, TrainingState, failpoints, per_rank
from resilio.engine.plan import LocalPlan
from resilio.errors import RanksLostError, SaveError
from resilio.manager.space import unwritable, worst_case_bytes
from resilio.records.discard import discard
from resilio.storage.local import LocalStorage
from resilio.storage.memory import MemoryStorage
from resilio.testing.worlds import run_world

pytestmark = pytest.mark.usefixtures("calm")


# ---------------------------------------------------------------------------------------------------- room for one more


class Small(LocalStorage):
    """Says that only so much is free."""

    free: int | None = 1 << 40

    def free_bytes(self) -> int | None:
        return self.free


def size_of(root: Path) -> int:
    """What the run takes of a filesystem with blocks of 4 KiB."""
    return sum(-(-path.lstat().st_size // 4096) * 4096 for path in root.rglob("*"))


def many_small() -> dict[str, Any]:
    return {f"encoder.layers.{i}.self_attention.{'long.' * (i % 5)}weight": torch.zeros(1, 2, 1, 2) for i in range(300)}


VALUES = {
    "text": "\u00e9\U0001f600" * 40_000,
    "bytes": bytes(range(256)) * 400,
    "int": 10**4000,
    "keys": {i: [None, True, 0.5, "", (), []] for i in range(40)},
    "deep": {"a": {"b": [(1, {"c": []})] * 20}},
}


@pytest.mark.parametrize(
    ("kind", "at_most"),
    [("nothing", 2.5), ("many small", 1.7), ("long names", 1.7), ("values", 1.5), ("large", 1.01), ("mixed", 1.9)],
)
def test_the_worst_case_is_never_too_little_nor_much_too_much(tmp_path, kind, at_most):
    parts: dict[str, dict[str, Any]] = {
        "nothing": {"x": 1},
        "many small": many_small(),
        "long names": {f"{i}{'.abcdefghij' * 40}": torch.zeros(3, 3) for i in range(200)},
        "values": VALUES,
        "large": {"a": torch.rand(1000, 1000), "b": torch.rand(3_000_000).bfloat16(), "c": torch.rand(999_999).bool()},
        "mixed": {**many_small(), **{f"value{i}": i / 7 for i in range(300)}, "t": torch.rand(7, 9).t()},
    }
    job = TrainingState(part=parts[kind])
    flat = job.capture(1, rank=0, world=1)
    bound = worst_case_bytes(flat, LocalPlan.of(flat, 0), 0)
    root = tmp_path / "run"
    with CheckpointManager(root, job, mode="sync") as ckpt:
        ckpt.save(1)
    taken = size_of(root)
    assert taken <= bound, kind
    print(f"{kind}: {taken} taken, {bound} asked for, {bound / taken}")
    assert bound <= at_most * taken


def shares(rank: int, world: int, root: str) -> list[Any]:
    mesh = init_device_mesh("cpu", (2,))
    torch.manual_seed(0)
    job = TrainingState(
        sharded=distribute_tensor(torch.rand(500, 700), mesh, [Shard(0)]),
        uneven=distribute_tensor(torch.rand(1, 5), mesh, [Shard(0)]),
        copied=distribute_tensor(torch.rand(200, 300), mesh, [Replicate()]),
        plain=torch.rand(1000),
        own=per_rank(torch.rand(10_000 * (rank + 1))),
    )
    flat = job.capture(1, rank=rank, world=world)
    assert isinstance(flat.tensors["sharded"], DTensor)
    with CheckpointManager(root, job, mode="sync") as ckpt:
        ckpt.save(1)
    return [worst_case_bytes(flat, LocalPlan.of(flat, rank), rank)]


def test_the_worst_case_of_ranks_counts_what_they_share_once(tmp_path):
    root = tmp_path / "run"
    bound = sum(one for (one,) in run_world(shares, 2, str(root)))
    taken = size_of(root)
    assert taken <= bound <= 1.25 * taken, (taken, bound)


@pytest.mark.parametrize("mode", ["sync", "async"])
def test_a_save_without_room_is_refused_with_numbers_before_anything_is_written(tmp_path, mode):
    root, live = tmp_path / "run", torch.zeros(100_000)
    store = Small(root)
    with CheckpointManager(store, state(live), mode=mode) as ckpt:
        ckpt.save(1).result()
        before = sorted(root.rglob("*"))
        store.free = 400_000  # the tensor alone would go in
        match = (
            r"no room to save step 2: it needs up to 4\d\d,\d{3} bytes, and 400,000 are free.*keep fewer.*Nothing was"
        )
        with pytest.raises(SaveError, match=match) as caught:
            ckpt.save(2)
        assert caught.value.cause == "OutOfSpaceError"
        assert caught.value.free_bytes == 400_000 < caught.value.needed_bytes < 600_000
        assert sorted(root.rglob("*")) == before
        store.free = caught.value.needed_bytes
        ckpt.save(2).result()
        store.free = None  # it does not tell
        ckpt.save(3).result()
    assert committed(root) == [1, 2, 3]


def has_no_room(rank: int, world: int, root: str, on_save_error: Any) -> list[Any]:
    """Each rank's own part has room, the sum has not. What rank 1 sees free is of no interest."""
    store = Small(root)
    store.free = 500_000 if rank == 0 else 0
    told = []
    job = TrainingState(rng=False, own=per_rank(torch.zeros(60_000)))
    with CheckpointManager(store, job, mode="async", on_save_error=on_save_error) as ckpt:
        for step, free in ((1, 500_000), (2, 1_000_000)):
            store.free = free if rank == 0 else 0
            try:
                error = ckpt.save(step).exception()
            except SaveError as caught:
                error = caught
            told.append(error and (type(error), error.needed_bytes, error.free_bytes, str(error)))
    return told


@pytest.mark.parametrize("on_save_error", ["raise", "warn"])
def test_all_ranks_refuse_together_by_the_sum_of_all(tmp_path, on_save_error):
    root = tmp_path / "run"
    first, second = run_world(has_no_room, 2, str(root), on_save_error)
    assert first == second
    assert first[1] is None
    kind, needed, free, _ = first[0]
    assert kind is SaveError and free == 500_000 and 2 * 240_000 < needed < 700_000
    assert committed(root) == [2] and not litter(root)


def test_the_free_space_of_a_folder_is_that_of_its_filesystem_even_before_it_is_there(tmp_path):
    found = os.statvfs(tmp_path)
    free = LocalStorage(tmp_path / "not" / "yet").free_bytes()
    assert free is not None
    assert abs(free - found.f_bavail * found.f_frsize) < 1 << 30
    assert resilio.storage.retrying(Small(tmp_path)).free_bytes() == 1 << 40
    assert LocalStorage("/proc/nothing").free_bytes() is None  # a filesystem without blocks
    assert MemoryStorage("m").free_bytes() is None


# ------------------------------------------------------------------------------------------- what failed attempts leave


@pytest.mark.parametrize("mode", ["sync", "async"])
@pytest.mark.parametrize("place", ["save.data_written", "save.before_manifest", "save.before_commit"])
def test_what_a_failed_attempt_left_is_gone_when_its_failure_is_told(tmp_path, place, mode):
    """Not only after the next save that goes well: on a full disk there would be none."""
    root = tmp_path / "run"
    with CheckpointManager(root, state(torch.ones(1)), mode=mode) as ckpt:
        failpoints.arm(f"{place}=enospc")
        for step in (1, 2):
            with pytest.raises(SaveError):
                ckpt.save(step)
                ckpt.save(step + 1)  # asynchronous: told here
            assert not [*root.glob("step-*")]
        failpoints.disarm()
        ckpt.save(3)
    assert committed(root) == [3]


def test_what_could_not_be_deleted_at_once_goes_before_the_next_save_looks_for_room(tmp_path, caplog):
    root, disk = tmp_path / "run", Faulty()

    class Quota(LocalStorage):
        def free_bytes(self) -> int:
            return 1_200_000 - size_of(root)

    live = torch.zeros(100_000)
    with CheckpointManager(Quota(root, disk), state(live), mode="sync") as ckpt:
        ckpt.save(1)
        failpoints.arm("save.data_written=raise")
        delete = disk.unlink

        def refuse(path: Path) -> None:
            if path.name == "__0_0.distcp":
                raise OSError(errno.EROFS, "read-only")
            delete(path)

        disk.unlink = refuse  # type: ignore[method-assign]
        with caplog.at_level(logging.WARNING, logger="resilio"), pytest.raises(SaveError, match="failpoint"):
            ckpt.save(2)
        failpoints.disarm()
        assert "failed attempt not deleted yet attempt=step-000000002" in caplog.text
        assert litter(root)
        with pytest.raises(SaveError, match="no room"):
            ckpt.save(2)
        disk.unlink = delete  # type: ignore[method-assign]
        ckpt.save(2)
    assert committed(root) == [1, 2] and not litter(root)


def test_discarding_takes_data_and_temporary_files_and_nothing_of_the_neighbours(tmp_path):
    root = tmp_path / "run"
    mine, other = "step-000000002-g000001-aaaa", "step-000000002-g000001-aaaab"
    for name in (mine, other):
        for file in ("manifest.json", "__0_0.distcp", ".tmp-1-0123456789abcdef-manifest-0.json"):
            (root / name).mkdir(parents=True, exist_ok=True)
            (root / name / file).write_bytes(b"x")
    discard(LocalStorage(root), mine)
    assert not (root / mine).exists()
    assert len([*(root / other).iterdir()]) == 3
    discard(LocalStorage(root), mine)


def dies_while_writing(rank: int, world: int, root: str) -> Any:
    """Rank 1 is late for a save; when it comes at last, its leftovers go with the rest."""
    late = Path(root).with_name("late")
    with CheckpointManager(root, state(torch.ones(1)), mode="async", timeout_s=3.0) as ckpt:
        ckpt.save(1).result()
        if rank == 1:
            failpoints.arm(f"save.data_open=hold:{late}")
        error: BaseException | None = None
        try:
            handle = ckpt.save(3)
            if rank == 0:
                error = handle.exception()
                assert isinstance(error, RanksLostError), error
                late.unlink()
            handle.exception()
            ckpt.save(4)
        except (RanksLostError, SaveError) as caught:
            error = caught
        failpoints.disarm()
        ckpt.save(5).result()
    return type(error).__name__


def test_a_rank_that_was_late_leaves_nothing_behind_either(tmp_path):
    root = tmp_path / "run"
    assert run_world(dies_while_writing, 2, str(root)) == ["RanksLostError"] * 2
    assert committed(root)[-1] == 5
    assert not litter(root)


# ---------------------------------------------------------------------------------------------------- a real full disk


class Unaware(LocalStorage):
    """Does not tell what is free, as a quota or somebody else who writes meanwhile do not."""

    def free_bytes(self) -> None:
        return None


@pytest.mark.parametrize("mode", ["sync", "async"])
def test_a_disk_that_fills_up_while_it_is_written_to_recovers_by_itself(small_disk, mode):
    root, live = small_disk / "run", torch.zeros(100_000)
    with CheckpointManager(Unaware(root), state(live), mode=mode) as ckpt:
        ckpt.save(1).result()
        (small_disk / "hog").write_bytes(bytes(1_400_000))
        for step in (2, 3):
            with pytest.raises(SaveError, match="the disk is full; free space or keep fewer") as caught:
                ckpt.save(step)
                ckpt.save(9)  # asynchronous: told here
            assert caught.value.cause == "OutOfSpaceError" and caught.value.errno == errno.ENOSPC
            assert len([*root.glob("step-*")]) == 1  # not even a folder is left
        (small_disk / "hog").unlink()
        live.fill_(4)
        ckpt.save(4).result()
        assert ckpt.verify(1) == ckpt.verify(4) == []
        live.zero_()
        ckpt.restore()
    assert live.eq(4).all()


def test_a_filesystem_mounted_read_only_meanwhile_costs_the_saves_until_it_is_writable(small_disk):
    root, live = small_disk / "run", torch.ones(1)
    with CheckpointManager(root, state(live), mode="sync") as ckpt:
        ckpt.save(1)
        subprocess.run(["mount", "-o", "remount,ro", str(small_disk)], check=True)
        try:
            with pytest.raises(SaveError, match="mounted read-only") as caught:
                ckpt.save(2)
            assert caught.value.cause == "AccessDeniedError"
            assert value_of(root, 1) == 1
            assert "mounted read-only" in str(unwritable(str(root)))
        finally:
            subprocess.run(["mount", "-o", "remount,rw", str(small_disk)], check=True)
        ckpt.save(2)
    assert committed(root) == [1, 2]
    assert unwritable(str(root)) is None


# -------------------------------------------------------------------------------------------- told before it is needed


def test_a_folder_that_cannot_be_written_is_warned_of_at_the_start_and_still_restored_from(small_disk, caplog):
    root, live = small_disk / "run", torch.zeros(1)
    with CheckpointManager(root, state(torch.ones(1)), mode="sync") as ckpt:
        ckpt.save(1)
    assert "saves will fail" not in caplog.text
    subprocess.run(["mount", "-o", "remount,ro", str(small_disk)], check=True)
    try:
        with CheckpointManager(root, state(live)) as ckpt:
            assert f"restoring works, but saves will fail url=file://{root} error=the filesystem of" in caplog.text
            assert ckpt.restore().step == 1
    finally:
        subprocess.run(["mount", "-o", "remount,rw", str(small_disk)], check=True)
    assert live == 1


def as_nobody(ask: Callable[[], str]) -> str:
    """What `ask` says in a process of another user. Forked: such a user may not be allowed to read our modules."""
    inward, outward = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            os.setgid(65534)
            os.setuid(65534)
            os.write(outward, ask().encode())
        finally:
            os._exit(0)
    os.close(outward)
    with open(inward, encoding="utf-8") as answer:
        said = answer.read()
    os.waitpid(child, 0)
    return said


@pytest.mark.skipif(os.getuid() != 0, reason="only root can become another user")
def test_a_folder_of_somebody_else_is_told_by_its_nearest_place_that_exists():
    with tempfile.TemporaryDirectory() as name:
        ours, theirs = Path(name, "ours"), Path(name, "theirs")
        for folder, mode in ((Path(name), 0o755), (ours, 0o777), (theirs, 0o755)):
            folder.mkdir(exist_ok=True)
            folder.chmod(mode)
        asked = [ours, ours / "new" / "run", theirs, theirs / "new"]
        well, soon, here, below = as_nobody(lambda: "\n".join(str(unwritable(str(one))) for one in asked)).split("\n")
    assert well == soon == "None"
    assert here == below == f"no permission to write to {theirs}"


def warns(rank: int, world: int, root: str) -> int:
    found: list[str] = []

    class Keep(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            found.append(record.getMessage())

    logging.getLogger("resilio").addHandler(Keep())
    with CheckpointManager(root, state(torch.ones(1))):
        pass
    return sum("saves will fail" in text for text in found)


def test_it_is_rank_0_that_says_so(small_disk):
    subprocess.run(["mount", "-o", "remount,ro", str(small_disk)], check=True)
    assert run_world(warns, 2, str(small_disk / "run")) == [1, 0]
