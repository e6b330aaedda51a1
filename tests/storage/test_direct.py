"""Writing past the page cache: byte-exact at every border, given up where it is refused, and nothing left behind."""

from __future__ import annotations

import errno
import os
import pickle
import resource
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import numpy as np
import pytest

from resilio.drill.crash.log import Create, Link, Log, Sync, Write
from resilio.drill.crash.recorder import RecordingDisk
from resilio.errors import OutOfSpaceError, StorageError
from resilio.storage import LocalStorage, Storage, direct
from resilio.storage.disk import Disk
from resilio.testing import StorageContract

BUFFER = 2 * direct.ALIGNED


class TestDirect(StorageContract):
    def make_storage(self, tmp_path: Path) -> Storage:
        return LocalStorage(tmp_path / "run", direct=True)


class TestThroughThePageCache(StorageContract):
    def make_storage(self, tmp_path: Path) -> Storage:
        return LocalStorage(tmp_path / "run", direct=False)


@pytest.fixture(autouse=True)
def small_buffers(monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> None:
    if request.cls is None:  # the contract's objects are large enough for real ones
        monkeypatch.setattr(direct, "BUFFER_BYTES", BUFFER)


@pytest.fixture
def trials(monkeypatch: pytest.MonkeyPatch) -> list[Path]:
    """Where it was tried; `O_DIRECT` takes half as long."""
    folders: list[Path] = []

    def tried(folder: Path) -> tuple[float, float]:
        folders.append(folder)
        return 2.0, 1.0

    monkeypatch.setattr(direct, "_verdicts", {})
    monkeypatch.setattr(direct, "_try", tried)
    return folders


class Watching(Disk):
    """Notes what is written, and whether past the page cache; only the flag is not set, which not every disk takes."""

    def __init__(self) -> None:
        self.on: dict[int, bool] = {}
        self.written: list[tuple[bool, int]] = []
        self.asked = 0
        self.before: Callable[[bool, int], None] = lambda on, number: None

    def create(self, path: Path) -> int:
        fd = super().create(path)
        self.on[fd] = False  # a closed descriptor's number is given out again
        return fd

    def set_direct(self, fd: int, on: bool) -> None:
        self.on[fd] = on

    def write(self, fd: int, data: memoryview) -> int:
        self.asked += 1
        self.before(self.on[fd], self.asked - 1)
        self.written.append((self.on[fd], len(data)))
        if self.on[fd]:
            assert os.lseek(fd, 0, os.SEEK_CUR) % direct.ALIGNED == len(data) % direct.ALIGNED == 0
            assert np.frombuffer(data, np.uint8).__array_interface__["data"][0] % direct.ALIGNED == 0
        return super().write(fd, data)


def body(size_bytes: int) -> bytes:
    return np.random.default_rng(size_bytes).bytes(size_bytes)


def write(storage: LocalStorage, data: bytes, pieces: int = 1 << 30, key: str = "a/key") -> None:
    with storage.writer(key) as out:
        for at in range(0, len(data), pieces):
            assert out.write(data[at : at + pieces]) == min(pieces, len(data) - at)


@contextmanager
def nothing_left(storage: LocalStorage, folder: Path) -> Iterator[None]:
    """After the block: no file, no folder, no descriptor, no thread and no buffer less than before."""
    before = fds(), threading.active_count()
    yield
    assert [*folder.rglob("*")] in ([], [folder / "run"])
    assert (fds(), threading.active_count()) == before
    assert len(storage._buffers._sets) == direct._FILES


def fds() -> int:
    return len(os.listdir("/proc/self/fd"))


SIZES = sorted({max(0, n * direct.ALIGNED + d) for n in (0, 1, 2, 3, 4, 8) for d in (-1, 0, 1, 77)})


@pytest.mark.parametrize("past", [True, False])
@pytest.mark.parametrize("pieces", [1, 63, 4095, 4096, 5000, 1 << 30])
def test_every_size_around_the_borders_is_exact(tmp_path: Path, past: bool, pieces: int) -> None:
    storage = LocalStorage(tmp_path, direct=past)
    for size_bytes in SIZES if pieces > 1 else SIZES[:8]:
        key, data = f"{size_bytes}", body(size_bytes)
        write(storage, data, pieces, key)
        assert storage.get(key) == data
        storage.put(f"put/{key}", data)
        assert storage.get(f"put/{key}") == data


def test_large_pieces_are_copied_without_the_gil_and_exactly(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(direct, "BUFFER_BYTES", 4 * direct._COPY)
    storage = LocalStorage(tmp_path, direct=True)
    for size_bytes in (direct._COPY, 4 * direct._COPY, 13 * direct._COPY + 5):
        write(storage, body(size_bytes), key=str(size_bytes))
        assert storage.get(str(size_bytes)) == body(size_bytes)


def test_only_whole_blocks_go_past_the_page_cache(tmp_path: Path) -> None:
    disk = Watching()
    write(LocalStorage(tmp_path, disk, direct=True), body(2 * BUFFER + direct.ALIGNED + 5), 1000)
    assert disk.written == [(True, BUFFER), (True, BUFFER), (True, direct.ALIGNED), (False, 5)]


def test_who_watches_the_disk_sees_every_write_in_order(tmp_path: Path) -> None:
    log = Log()
    write(LocalStorage(tmp_path, RecordingDisk(log, str(tmp_path)), direct=True), body(5 * BUFFER + 5), 1000)
    calls = [entry.call for entry in log.entries]
    kinds = [type(call) for call in calls if isinstance(call, Create | Write | Sync | Link)]
    assert kinds == [Create, *[Write] * 6, Sync, Link]
    assert b"".join(call.data for call in calls if isinstance(call, Write)) == body(5 * BUFFER + 5)


# ---- refused


def test_a_filesystem_that_does_not_know_it_gets_everything_through_the_page_cache(tmp_path: Path) -> None:
    class Old(Watching):
        def set_direct(self, fd: int, on: bool) -> None:
            assert on, "it never was"
            raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))

    disk = Old()
    storage = LocalStorage(tmp_path, disk, direct=True)
    write(storage, body(3 * BUFFER + 5), 1000)
    assert storage.get("a/key") == body(3 * BUFFER + 5)
    assert not any(on for on, _ in disk.written)


@pytest.mark.parametrize("nth", [0, 1, 2, 3])
def test_a_write_that_is_refused_is_done_through_the_page_cache(tmp_path: Path, nth: int) -> None:
    disk = Watching()

    def refuse(on: bool, number: int) -> None:
        if on and number == nth:
            raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))

    disk.before = refuse
    storage = LocalStorage(tmp_path, disk, direct=True)
    data = body(3 * BUFFER + direct.ALIGNED)
    write(storage, data, 1000)
    assert storage.get("a/key") == data
    assert [on for on, _ in disk.written] == [number < nth for number in range(4)]


def test_short_writes_are_continued(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also unaligned ones, after which the filesystem refuses what follows."""
    real = os.write
    monkeypatch.setattr(os, "write", lambda fd, data: real(fd, data[:700]))
    storage = LocalStorage(tmp_path, direct=True)
    write(storage, body(3 * BUFFER + 5))
    assert storage.get("a/key") == body(3 * BUFFER + 5)


# ---- errors


@pytest.mark.parametrize("nth", range(5))
def test_a_disk_that_fills_up_publishes_nothing_and_leaves_nothing(tmp_path: Path, nth: int) -> None:
    disk = Watching()

    def fill(on: bool, number: int) -> None:
        if number == nth:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    disk.before = fill
    storage = LocalStorage(tmp_path / "run", disk, direct=True)
    for pieces in (1000, 1 << 30):
        disk.asked = 0
        with nothing_left(storage, tmp_path), pytest.raises(OutOfSpaceError, match="cannot write 'a/key'") as caught:
            write(storage, body(3 * BUFFER + direct.ALIGNED + 5), pieces)
        assert caught.value.facts["errno"] == errno.ENOSPC
        assert disk.asked == nth + 1  # and nothing after it


def test_a_file_that_may_not_be_as_large_says_so(tmp_path: Path) -> None:
    """The kernel takes what is allowed of the write that goes too far, an odd number of bytes, and refuses the next."""
    storage = LocalStorage(tmp_path / "run", direct=True)
    old = resource.getrlimit(resource.RLIMIT_FSIZE)
    with nothing_left(storage, tmp_path), pytest.raises(OutOfSpaceError, match="ulimit -f"):
        resource.setrlimit(resource.RLIMIT_FSIZE, (BUFFER + 1000, old[1]))
        try:
            write(storage, body(3 * BUFFER))
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, old)


def test_who_goes_on_after_an_error_publishes_nothing(tmp_path: Path) -> None:
    disk = Watching()

    def fail(on: bool, number: int) -> None:
        if number == 0:
            raise OSError(errno.EIO, os.strerror(errno.EIO))

    disk.before = fail
    storage = LocalStorage(tmp_path / "run", disk, direct=True)
    with nothing_left(storage, tmp_path), pytest.raises(StorageError), storage.writer("a/key") as out:
        for _ in range(5):
            try:
                out.write(body(BUFFER))
            except StorageError:
                disk.before = lambda on, number: None


@pytest.mark.parametrize("swallowed", [False, True])
def test_a_ctrl_c_while_the_disk_is_busy_leaves_nothing(tmp_path: Path, swallowed: bool) -> None:
    disk, seen = Watching(), threading.Event()

    def interrupt(on: bool, number: int) -> None:
        if number == 1 and not seen.is_set():
            signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGINT)
            assert seen.wait(60)

    disk.before = interrupt
    storage = LocalStorage(tmp_path / "run", disk, direct=True)
    with nothing_left(storage, tmp_path), pytest.raises(KeyboardInterrupt), storage.writer("a/key") as out:
        try:
            for _ in range(9):
                out.write(body(BUFFER))
        except KeyboardInterrupt:
            seen.set()
            if not swallowed:
                raise


def test_a_second_ctrl_c_does_not_let_go_of_a_buffer_that_is_being_written(tmp_path: Path) -> None:
    disk, seen = Watching(), threading.Event()

    def interrupt(on: bool, number: int) -> None:
        if number == 0:
            assert seen.wait(60)
            signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGINT)

    disk.before = interrupt
    storage = LocalStorage(tmp_path / "run", disk, direct=True)
    with nothing_left(storage, tmp_path), pytest.raises(KeyboardInterrupt), storage.writer("a/key") as out:
        out.write(body(BUFFER))
        seen.set()
        raise RuntimeError("the first one")


def test_a_child_forked_meanwhile_neither_hangs_nor_disturbs(tmp_path: Path) -> None:
    storage = LocalStorage(tmp_path, direct=True)
    data = body(3 * BUFFER + 5)
    with storage.writer("a/key") as out:
        out.write(data[: BUFFER + 100])
        child = os.fork()
        if child == 0:
            try:
                out._direct._filling[:] = bytes(BUFFER)  # type: ignore[attr-defined]
                out.close()  # type: ignore[attr-defined]
                write(storage, body(2 * BUFFER), key="child")
                os._exit(0)
            finally:
                os._exit(1)
        assert os.waitpid(child, 0)[1] == 0
        out.write(data[BUFFER + 100 :])
    assert (storage.get("a/key"), storage.get("child")) == (data, body(2 * BUFFER))


def test_without_a_thread_the_caller_writes_itself(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As at the end of a process, when a save in flight is waited for."""

    def refuse(self: threading.Thread) -> None:
        raise RuntimeError("can't start new thread at interpreter shutdown")

    storage = LocalStorage(tmp_path, direct=True)
    monkeypatch.setattr(threading.Thread, "start", refuse)
    write(storage, body(5 * BUFFER + 5), 1000)
    assert storage.get("a/key") == body(5 * BUFFER + 5)


# ---- buffers


def test_files_beyond_the_buffers_are_written_through_the_page_cache(tmp_path: Path) -> None:
    disk = Watching()
    storage = LocalStorage(tmp_path, disk, direct=True)
    with ExitStack() as opened:
        for number in range(direct._FILES + 2):
            opened.enter_context(storage.writer(f"{number}")).write(body(3 * BUFFER))
    assert [storage.get(f"{number}") for number in range(direct._FILES + 2)] == [body(3 * BUFFER)] * (direct._FILES + 2)
    assert disk.written.count((False, 3 * BUFFER)) == 2


def test_buffers_are_used_again_and_let_go_at_close(tmp_path: Path) -> None:
    storage = LocalStorage(tmp_path, direct=True)

    def made() -> list[int]:
        return [id(one) for one in storage._buffers._sets if one is not None]

    write(storage, body(3 * BUFFER))
    first = made()
    assert len(first) == 1
    write(storage, body(3 * BUFFER), key="other")
    assert made() == first
    assert pickle.loads(pickle.dumps(storage))._buffers._sets == [None] * direct._FILES
    storage.close()
    assert made() == []
    write(storage, body(3 * BUFFER), key="again")
    assert len(made()) == 1


# ---- the trial


def test_it_is_tried_once_for_a_device_and_not_for_small_objects(tmp_path: Path, trials: list[Path]) -> None:
    disk = Watching()
    storage = LocalStorage(tmp_path / "run", disk)
    storage.put("put", body(3 * BUFFER))
    for key, hint in (("none", None), ("small", direct.LARGE_BYTES - 1)):
        with storage.writer(key, size_hint=hint) as out:
            out.write(body(3 * BUFFER))
    assert not trials
    assert not any(on for on, _ in disk.written)
    for number in range(3):
        with LocalStorage(tmp_path / "run", disk).writer(f"{number}", size_hint=direct.LARGE_BYTES) as out:
            out.write(body(3 * BUFFER))
    assert len(trials) == 1
    assert disk.written[-3:] == [(True, BUFFER)] * 3


@pytest.mark.parametrize(("answer", "tries"), [(None, 1), (errno.EINVAL, 1), (errno.ENOSPC, 2)])
def test_where_it_does_not_pay_it_is_not_done(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, trials: list[Path], answer: int | None, tries: int
) -> None:
    """What says nothing about the device, such as a full disk, is tried again."""

    def tried(folder: Path) -> tuple[float, float]:
        trials.append(folder)
        if answer is not None:
            raise OSError(answer, os.strerror(answer))
        return 1.0, 1.01 * direct._WORTH

    monkeypatch.setattr(direct, "_try", tried)
    disk = Watching()
    for number in range(2):
        with LocalStorage(tmp_path, disk).writer(f"{number}", size_hint=direct.LARGE_BYTES) as out:
            out.write(body(3 * BUFFER))
    assert len(trials) == tries
    assert not any(on for on, _ in disk.written)


def test_the_trial_itself_leaves_nothing_there(tmp_path: Path) -> None:
    before = fds()
    try:
        through, past = direct._try(tmp_path)
    except OSError:
        pytest.skip("this filesystem has no O_DIRECT")
    assert min(through, past) > 0
    assert ([*tmp_path.iterdir()], fds()) == ([], before)
