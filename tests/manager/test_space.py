"""Room, rights and the run's own folder: what is taken away in the middle of a save costs that save, nothing else."""

from __future__ import annotations

import errno
import logging
import os
import shutil
import subprocess
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

import resilio
from resilio import CheckpointManager, TrainingState, failpoints, keep_last, per_rank
from resilio.engine.plan import LocalPlan
from resilio.errors import AccessDeniedError, FencedError, OutOfSpaceError, RanksLostError, SaveError
from resilio.manager.space import unwritable, worst_case_bytes
from resilio.records.discard import discard
from resilio.storage.disk import Disk
from resilio.storage.local import LocalStorage
from resilio.storage.memory import MemoryStorage
from resilio.testing.worlds import run_world


@pytest.fixture(autouse=True)
def _calm() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)
    failpoints.disarm()


def state(live: torch.Tensor) -> TrainingState:
    return TrainingState(live=live, rng=False)


@pytest.fixture
def in_memory(tmp_path: Path) -> Iterator[Path]:
    """A folder where fsync costs nothing, if this machine has one: there are thousands of them here."""
    shm = Path("/dev/shm")
    if not os.access(shm, os.W_OK):
        yield tmp_path
        return
    with tempfile.TemporaryDirectory(dir=shm) as name:
        yield Path(name)


# ------------------------------------------------------------------------------------------------ every write may fail


class Faulty(Disk):
    """Fails the n-th operation that changes the filesystem, alone or with all that come after it.

    Of a write that fails, half of the bytes are there. A full disk still lets names be taken away; one that is mounted
    read-only does not.
    """

    def __init__(self) -> None:
        self._writing = Path()
        self.disarm()

    def arm(self, nth: int, number: int, *, lasts: bool) -> None:
        self._done, self._nth, self._number, self._lasts = 0, nth, number, lasts
        self._place: Path | None = None

    def disarm(self) -> Path | None:
        """Fail no more; where the first failure was, if there was one."""
        place = getattr(self, "_place", None)
        self.arm(0, 0, lasts=False)
        return place

    def _hit(self, where: Path, *, takes_room: bool = True) -> None:
        if not self._number or (not takes_room and self._number in (errno.ENOSPC, errno.EDQUOT)):
            return
        self._done += 1
        if self._done == self._nth or (self._lasts and self._done > self._nth):
            self._place = self._place or where
            raise OSError(self._number, os.strerror(self._number), str(where))

    def create(self, path: Path) -> int:
        self._hit(path)
        self._writing = path
        return super().create(path)

    def write(self, fd: int, data: memoryview) -> int:
        try:
            self._hit(self._writing)
        except OSError:
            os.write(fd, data[: len(data) // 2])
            raise
        return super().write(fd, data)

    def sync(self, fd: int) -> None:
        self._hit(self._writing)
        super().sync(fd)

    def link(self, path: Path, new: Path) -> None:
        self._hit(new)
        super().link(path, new)

    def replace(self, path: Path, new: Path) -> None:
        self._hit(new)
        super().replace(path, new)

    def unlink(self, path: Path) -> None:
        self._hit(path, takes_room=False)
        super().unlink(path)

    def mkdir(self, folder: Path) -> None:
        self._hit(folder)
        super().mkdir(folder)

    def rmdir(self, folder: Path) -> None:
        self._hit(folder, takes_room=False)
        super().rmdir(folder)

    def sync_folder(self, folder: Path) -> None:
        self._hit(folder)
        super().sync_folder(folder)


def value_of(root: Path, step: int) -> int:
    """What a reader of its own restores of `step`, every digest looked at."""
    live = torch.zeros(1)
    assert resilio.restore(f"file://{root}", state(live), which=step).step == step
    return int(live)


def committed(root: Path) -> list[int]:
    return sorted(int(path.name.split("-")[0]) for path in root.glob("commits/[0-9]*.json"))


def litter(root: Path) -> set[str]:
    """Attempts that are no checkpoints. An empty folder is nothing: no listing shows it."""
    folders = {path.parent.name for path in root.glob("step-*/*")}
    return {name for name in folders if int(name.split("-")[1]) not in committed(root)}


KINDS: list[Any] = [
    pytest.param(errno.ENOSPC, True, id="full"),
    pytest.param(errno.EDQUOT, False, id="over quota for a moment"),
    pytest.param(errno.EROFS, True, id="read-only"),
]


@pytest.mark.parametrize(("number", "lasts"), KINDS)
def test_a_save_that_fails_at_any_of_its_writes_leaves_the_old_one_and_the_next_works(in_memory, number, lasts):
    """Every operation of a save, and of the sweep after it, of one that is not the first."""
    root, disk, live = in_memory / "run", Faulty(), torch.zeros(1)
    kind = OutOfSpaceError if number in (errno.ENOSPC, errno.EDQUOT) else AccessDeniedError
    failures = 0
    refused: set[str] = set()  # attempts whose commit was sent: never called failed, and left to the next generation

    def save(ckpt: CheckpointManager, step: int) -> None:
        live.fill_(step)
        ckpt.save(step)

    with CheckpointManager(LocalStorage(root, disk), state(live), keep=keep_last(1), mode="sync") as ckpt:
        ckpt.restore()
        save(ckpt, 1)
        old, nth = 1, 0
        while True:
            nth += 1
            failed = False
            disk.arm(nth, number, lasts=lasts)
            try:
                save(ckpt, old + 1)
            except SaveError as error:
                failed = True
                assert error.cause == kind.__name__ and error.errno == number, error
            place = disk.disarm()
            assert failed or old + 1 in committed(root)
            newest = committed(root)[-1]
            assert value_of(root, newest) == newest >= old
            if place is None:
                break
            if failed:
                failures += 1
                assert newest == old or value_of(root, old) == old
            save(ckpt, newest + 1)
            old = newest + 1
            if failed and "commits" in (place.name, place.parent.name):
                assert len(litter(root) - refused) <= 1
                refused |= litter(root)
            assert litter(root) == refused, (nth, place)
        assert committed(root) == [old + 1]
    with CheckpointManager(root, state(live), keep=keep_last(1), mode="sync") as ckpt:
        ckpt.restore()
        save(ckpt, old + 2)
    assert not litter(root)
    assert failures > 20
    print(f"errno {number} lasts={lasts}: {nth - 1} operations, {failures} saves failed, {len(refused)} at the commit")


def test_a_first_save_that_fails_at_any_of_its_writes_is_followed_by_one_that_works(in_memory):
    """With the run's record, its generation, and the folders of all."""
    live, nth, failures = torch.ones(1), 0, 0
    while True:
        nth += 1
        root, disk = in_memory / str(nth) / "run", Faulty()
        with CheckpointManager(LocalStorage(root, disk), state(live), mode="sync") as ckpt:
            disk.arm(nth, errno.ENOSPC, lasts=True)
            try:
                ckpt.save(1)
                failed = False
            except SaveError:
                failed = True
            place = disk.disarm()
            if place is None:
                break
            failures += failed
            done = committed(root)
            step = 2 if done else 1  # what failed after the record was there is a checkpoint, only not acknowledged
            ckpt.save(step)
            assert committed(root) == [*done, step]
            assert value_of(root, step) == 1
            if place.parent.name != "commits":
                assert not litter(root), (nth, place)
    assert failures > 40
    print(f"first save: {nth - 1} operations, {failures} saves failed")


def fails_on_one(rank: int, world: int, root: str) -> list[Any]:
    """Rank 1's disk fails at each of its operations in turn; rank 0's is well."""
    disk, live = Faulty(), torch.zeros(1)
    told = []
    with CheckpointManager(LocalStorage(root, disk), state(live), keep=keep_last(2), mode="async") as ckpt:
        ckpt.restore()
        ckpt.save(1).result()
        step = 1
        for nth in range(1, 100):
            disk.arm(nth, errno.ENOSPC if rank else 0, lasts=True)
            live.fill_(step + 1)
            handle, error = None, None
            try:
                handle = ckpt.save(step + 1)
                error = handle.exception()
            except SaveError as caught:
                error = caught
            disk.disarm()
            told.append(None if error is None else (type(error).__name__, error.rank, error.cause))
            step += 1
            if error is None:
                break
            with pytest.raises(SaveError):
                ckpt.save(step)  # raised on all ranks together
            ckpt.save(step).result()  # the same step, a new attempt
    return [told, step]


def test_a_disk_that_is_full_on_one_rank_fails_the_save_on_all_and_only_that_one(in_memory):
    root = in_memory / "run"
    first, second = run_world(fails_on_one, 2, str(root))
    told, step = first
    assert first == second
    assert told == [("SaveError", 1, "OutOfSpaceError")] * (len(told) - 1) + [None]
    assert len(told) > 15
    assert committed(root) == [step - 1, step] and not litter(root)
    assert value_of(root, step) == step
    print(f"one rank of two: {len(told) - 1} operations")


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


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A filesystem of 2 MiB."""
    disk = tmp_path / "disk"
    disk.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", "size=2m", "tmpfs", str(disk)]
    try:
        done = subprocess.run(command, capture_output=True)
    except FileNotFoundError:
        pytest.skip("there is no `mount`")
    if done.returncode:
        pytest.skip(f"not allowed to mount: {done.stderr.decode().strip()}")
    yield disk
    subprocess.run(["umount", str(disk)], check=True)


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


# ------------------------------------------------------------------------------------------------ the folder goes away


def moved_away(root: Path) -> Callable[[], None]:
    away = root.with_name("away")
    root.rename(away)

    def back() -> None:
        shutil.rmtree(root, ignore_errors=True)
        away.rename(root)

    return back


@pytest.mark.parametrize("mode", ["sync", "async"])
def test_a_run_that_vanished_stops_saves_and_one_that_came_back_takes_them_again(tmp_path, mode):
    root, live = tmp_path / "run", torch.ones(1)
    with CheckpointManager(root, state(live), mode=mode) as ckpt:
        ckpt.save(1).result()
        back = moved_away(root)
        for _ in range(2):
            with pytest.raises(
                SaveError, match=r"the run is gone: its resilio.json was there.*begin a new run"
            ) as caught:
                ckpt.save(2)
            assert not isinstance(caught.value, FencedError)
            assert not root.exists()
        back()
        ckpt.save(2).result()
    assert committed(root) == [1, 2]


def test_a_run_that_vanished_before_the_first_save_after_a_restore_is_missed_as_well(tmp_path):
    root, live = tmp_path / "run", torch.ones(1)
    with CheckpointManager(root, state(live), mode="sync") as ckpt:
        ckpt.save(1)
    for fresh in (False, True):
        with CheckpointManager(root, state(live), mode="sync", fresh=fresh) as ckpt:
            ckpt.restore()
            back = moved_away(root)
            with pytest.raises(SaveError, match="the run is gone"):
                ckpt.save(2)
            assert not root.exists()
            back()


@pytest.mark.parametrize("when", ["save.data_written", "save.before_manifest"])
@pytest.mark.parametrize("commits", [0, 1])
def test_a_run_that_vanishes_in_the_middle_of_a_save_gets_no_commit(tmp_path, when, commits, monkeypatch):
    root, live = tmp_path / "run", torch.ones(1)
    with CheckpointManager(root, state(live), mode="sync") as ckpt:
        if commits:
            ckpt.save(1)
        else:
            failpoints.arm("save.before_commit=raise")  # the run and its generation are there, no checkpoint is
            with pytest.raises(SaveError):
                ckpt.save(1)
            failpoints.disarm()
        hit = failpoints.hit

        def vanish(name: str, rank: int = 0) -> None:
            if name == when:
                shutil.rmtree(root)
            hit(name, rank)

        monkeypatch.setattr(failpoints, "hit", vanish)
        with pytest.raises(SaveError):
            ckpt.save(2)
        monkeypatch.setattr(failpoints, "hit", hit)
        with pytest.raises(SaveError, match="the run is gone"):
            ckpt.save(2)
        assert not [*root.rglob("*.json")]
        assert ckpt.restore().found is None  # asked for: a new run
        live.fill_(3)
        ckpt.save(3)
    assert committed(root) == [3] and value_of(root, 3) == 3
    assert len([*(root / "generations").iterdir()]) == 1


def test_another_run_in_its_place_is_left_alone(tmp_path):
    root, live = tmp_path / "run", torch.ones(1)
    with CheckpointManager(root, state(live), mode="sync", on_save_error="warn") as ckpt:
        ckpt.save(1)
        shutil.rmtree(root)
        with CheckpointManager(root, state(live), mode="sync") as other:
            other.save(7)
        before = sorted(root.rglob("*"))
        for _ in range(2):
            with pytest.raises(FencedError, match="another run lies here now"):
                ckpt.save(8)
        assert sorted(root.rglob("*")) == before
        ckpt.restore()
        ckpt.save(8)
    assert committed(root) == [7, 8]


def sees_it_vanish(rank: int, world: int, root: str) -> list[str]:
    told = []
    with CheckpointManager(root, state(torch.ones(1)), mode="async", on_save_error="warn") as ckpt:
        ckpt.save(1).result()
        ckpt.save(2).result()
        if rank == 0:
            shutil.rmtree(root)
        for step in (3, 4):
            told.append(str(ckpt.save(step).exception()))
        ckpt.restore()
        ckpt.save(5)
    return told


def test_all_ranks_hear_of_it_and_a_warned_job_trains_on(tmp_path):
    root = tmp_path / "run"
    first, second = run_world(sees_it_vanish, 2, str(root))
    assert first == second
    assert all("the run is gone" in text for text in first)
    assert committed(root) == [5]


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
