"""What is special about files: durability in the right order, links, leftovers, folders, permissions."""

from __future__ import annotations

import errno
import os
import re
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path

import pytest

from resilio.errors import (
    AccessDeniedError,
    AlreadyExistsError,
    ConfigError,
    OutOfSpaceError,
    StorageError,
)
from resilio.storage import Incomplete, LocalStorage
from resilio.storage.files import temp_name
from resilio.storage.local import open_local


@pytest.fixture
def root(tmp_path: Path) -> Path:
    return tmp_path / "run"


@pytest.fixture
def storage(root: Path) -> LocalStorage:
    return LocalStorage(root)


def names(folder: Path) -> set[str]:
    return {path.relative_to(folder).as_posix() for path in folder.rglob("*")}


def keys(storage: LocalStorage, prefix: str = "") -> list[str]:
    return [info.key for info in storage.list(prefix)]


def failing(error_number: int) -> Callable[..., int]:
    def call(*_: object, **__: object) -> int:
        raise OSError(error_number, os.strerror(error_number))

    return call


@pytest.fixture
def deeds(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> list[str]:
    """What was asked of the filesystem, in order, with the random part of names left out."""
    told: list[str] = []

    def name(path: object) -> str:
        shown = Path(os.fspath(path)).relative_to(tmp_path).as_posix()  # type: ignore[call-overload]
        return re.sub(r"\.tmp-\d+-[0-9a-f]{16}-", "TEMP-", shown)

    def record(verb: str, shown: Callable[..., str]) -> None:
        real = getattr(os, verb)

        def call(*args: object, **kwargs: object) -> object:
            told.append(f"{verb} {shown(*args)}")
            return real(*args, **kwargs)

        monkeypatch.setattr(os, verb, call)

    record("fsync", lambda fd: name(os.readlink(f"/proc/self/fd/{fd}")))
    for verb in ("link", "replace"):
        record(verb, lambda source, target, *_: f"{name(source)} {name(target)}")
    for verb in ("unlink", "mkdir", "rmdir"):
        record(verb, lambda path, *_: name(path))
    return told


# ---- durability


def test_new_object_is_durable_before_it_has_its_name_and_its_name_before_put_returns(
    storage: LocalStorage, deeds: list[str]
) -> None:
    storage.put("a/b/key", b"x", if_absent=True)
    assert deeds[:10] == [
        "mkdir run",
        "fsync .",
        "mkdir run/a",
        "fsync run",
        "mkdir run/a/b",
        "fsync run/a",
        "fsync run/a/b/TEMP-key",
        "link run/a/b/TEMP-key run/a/b/key",
        "unlink run/a/b/TEMP-key",
        "fsync run/a/b",
    ]


def test_folders_made_by_others_are_made_durable_too(storage: LocalStorage, root: Path, deeds: list[str]) -> None:
    """Another rank may have made the folder and not have come to its fsync yet."""
    (root / "a" / "b").mkdir(parents=True)
    deeds.clear()
    with storage.writer("a/b/key") as out:
        out.write(b"x")
    assert deeds[deeds.index("unlink run/a/b/TEMP-key") + 1 :][:3] == ["fsync run/a/b", "fsync run/a", "fsync run"]


def test_overwriting_put_replaces_in_one_step(storage: LocalStorage, deeds: list[str]) -> None:
    storage.put("key", b"old")
    deeds.clear()
    storage.put("key", b"new")
    assert deeds[:3] == ["fsync run/TEMP-key", "replace run/TEMP-key run/key", "fsync run"]


def test_delete_is_durable_once_per_folder_and_takes_empty_folders_along(
    storage: LocalStorage, deeds: list[str]
) -> None:
    for key in ("step/x/1", "step/x/2", "step/y/1", "other"):
        storage.put(key, b"x")
    deeds.clear()
    storage.delete(["step/x/1", "step/x/2", "step/y/1"])
    assert [deed for deed in deeds if deed.startswith("fsync")] == ["fsync run"]
    assert names(Path(storage.root)) == {"other"}
    storage.delete(["other"])
    assert Path(storage.root).is_dir()  # the root stays


def test_a_failed_fsync_is_never_followed_by_a_second_one(
    storage: LocalStorage, root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The kernel may have dropped the pages and report success the second time: only a new file is a retry."""
    synced: list[str] = []

    def fsync(fd: int) -> None:
        synced.append(os.readlink(f"/proc/self/fd/{fd}"))
        raise OSError(errno.EIO, "Input/output error")

    monkeypatch.setattr(os, "fsync", fsync)
    for _ in range(2):
        (root / "step").mkdir(parents=True)
        with pytest.raises(StorageError) as caught, storage.writer("step/key") as out:
            out.write(b"x")
        assert (caught.value.facts["key"], caught.value.facts["errno"]) == ("step/key", errno.EIO)
    assert len(synced) == len(set(synced)) == 2
    assert all(name.startswith(f"{root}/step/") for name in synced)


@pytest.mark.parametrize("place", ["write", "fsync", "open"])
def test_a_failed_create_leaves_no_folder_that_no_listing_would_show(
    storage: LocalStorage, root: Path, monkeypatch: pytest.MonkeyPatch, place: str
) -> None:
    storage.put("a/there", b"x")
    with monkeypatch.context() as patched:
        if place == "open":
            patched.setattr(
                storage, "_open_new", lambda temp: (temp.parent.mkdir(parents=True), failing(errno.ENOSPC)())
            )
        else:
            patched.setattr(os, place, failing(errno.ENOSPC))
        for key in ("a/b/c/key", "d/key", "a/key"):
            with pytest.raises(StorageError), storage.writer(key) as out:
                out.write(b"x")
    assert {path.relative_to(root).as_posix() for path in root.rglob("*")} == {"a", "a/there"}


def test_a_failed_folder_fsync_is_an_error(storage: LocalStorage, root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    root.mkdir()
    real = os.fsync
    monkeypatch.setattr(
        os, "fsync", lambda fd: failing(errno.EIO)() if os.path.isdir(f"/proc/self/fd/{fd}") else real(fd)
    )
    with pytest.raises(StorageError):
        storage.put("key", b"x", if_absent=True)


def test_short_writes_are_continued(storage: LocalStorage, monkeypatch: pytest.MonkeyPatch) -> None:
    real = os.write
    monkeypatch.setattr(os, "write", lambda fd, data: real(fd, data[:7]))
    with storage.writer("key") as out:
        assert out.write(bytes(range(100))) == 100
    assert storage.get("key") == bytes(range(100))


def test_short_reads_are_continued(storage: LocalStorage, monkeypatch: pytest.MonkeyPatch) -> None:
    storage.put("key", bytes(range(100)))
    real = os.preadv
    monkeypatch.setattr(os, "preadv", lambda fd, buffers, offset: real(fd, [buffers[0][:7]], offset))
    assert storage.get("key") == bytes(range(100))


# ---- links


def test_the_loser_of_a_race_at_the_last_moment_is_told(storage: LocalStorage, root: Path) -> None:
    """The other came between the first look and the link."""
    with pytest.raises(AlreadyExistsError), storage.writer("key") as out:
        out.write(b"loser")
        LocalStorage(root).put("key", b"winner", if_absent=True)
    assert storage.get("key") == b"winner"
    assert names(root) == {"key"}


def test_a_lost_answer_to_link_is_no_loss(storage: LocalStorage, root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """NFS may repeat the request and then say EEXIST about our own link."""
    real = os.link

    def link_and_lose_the_answer(source: str, target: str) -> None:
        real(source, target)
        raise FileExistsError(errno.EEXIST, "File exists")

    monkeypatch.setattr(os, "link", link_and_lose_the_answer)
    storage.put("key", b"ours", if_absent=True)
    assert storage.get("key") == b"ours"
    assert names(root) == {"key"}


@pytest.mark.parametrize("number", [errno.EPERM, errno.EOPNOTSUPP])
def test_a_filesystem_without_links_is_refused_clearly(
    storage: LocalStorage, root: Path, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    monkeypatch.setattr(os, "link", failing(number))
    with pytest.raises(StorageError, match="no hard links") as caught:
        storage.put("key", b"x", if_absent=True)
    assert caught.value.facts["key"] == "key"
    assert names(root) == set()


# ---- leftovers


def test_temporary_files_are_never_listed(storage: LocalStorage) -> None:
    with storage.writer("step/data") as out:
        out.write(b"x" * 10)
        assert len(names(Path(storage.root))) == 2  # it is there
        assert keys(storage) == keys(storage, "step/") == keys(storage, "step/.tmp") == []


def test_a_killed_writer_leaves_a_file_that_incomplete_finds_and_abort_removes(
    storage: LocalStorage, root: Path
) -> None:
    script = (
        "import os, signal, sys; from resilio.storage import LocalStorage\n"
        "with LocalStorage(sys.argv[1]).writer('step-7/data') as out:\n"
        "    out.write(b'x' * 1000); os.kill(os.getpid(), signal.SIGKILL)"
    )
    assert subprocess.run([sys.executable, "-c", script, str(root)]).returncode == -signal.SIGKILL
    assert keys(storage) == []
    [item] = storage.incomplete("step-7")
    assert item.key == "step-7/data"
    assert item.started_s is not None
    assert [*storage.incomplete("step-8")] == []
    storage.abort(item)
    storage.abort(item)
    assert [*storage.incomplete("")] == []
    assert names(root) == set()  # the folder went with it


def test_a_crash_between_link_and_unlink_is_a_whole_object_and_a_leftover(storage: LocalStorage, root: Path) -> None:
    storage.put("key", b"whole")
    os.link(root / "key", root / temp_name("key"))
    assert keys(storage) == ["key"]
    [item] = storage.incomplete("")
    storage.abort(item)
    assert storage.get("key") == b"whole"


def test_abort_removes_nothing_but_temporary_files_of_this_store(storage: LocalStorage, tmp_path: Path) -> None:
    storage.put("key", b"x")
    outside = tmp_path / temp_name("key")
    outside.write_bytes(b"x")
    for token in ("key", f"../{outside.name}", str(outside), ""):
        with pytest.raises(ConfigError):
            storage.abort(Incomplete("key", token))
    assert outside.exists()
    assert keys(storage) == ["key"]


def test_names_of_temporary_files_are_no_keys(storage: LocalStorage) -> None:
    """They would be stored and never be listed."""
    for key in (temp_name("x"), f"folder/{temp_name('x')}", f"{temp_name('x')}/x"):
        with pytest.raises(ConfigError, match="temporary"):
            storage.put(key, b"x")
    storage.put(".tmp-notes", b"x")
    assert keys(storage) == [".tmp-notes"]


def test_names_as_long_as_the_filesystem_takes_work(storage: LocalStorage) -> None:
    for name in ("n" * 255, "ü" * 127):
        storage.put(name, b"x")
        storage.delete([name])
    with pytest.raises(StorageError):
        storage.put("n" * 256, b"x")


# ---- folders


def test_a_missing_root_is_empty_and_comes_with_the_first_object(storage: LocalStorage, root: Path) -> None:
    assert keys(storage) == []
    assert [*storage.incomplete("")] == []
    assert not storage.exists("key")
    storage.delete(["key", "folder/key"])
    assert not root.exists()
    storage.put("key", b"x")
    assert keys(storage) == ["key"]


def test_a_root_that_is_a_file_is_an_error_not_an_empty_store(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"x")
    storage = LocalStorage(tmp_path / "file")
    with pytest.raises(StorageError):
        storage.list("")
    with pytest.raises(StorageError):
        storage.put("key", b"x")


def test_an_object_and_a_folder_of_one_name_cannot_be(storage: LocalStorage) -> None:
    storage.put("a/b", b"x")
    storage.put("c", b"x")
    for key in ("a", "c/d"):
        for if_absent in (True, False):
            with pytest.raises(StorageError, match="cannot hold both") as caught:
                storage.put(key, b"x", if_absent=if_absent)
            assert not isinstance(caught.value, AlreadyExistsError)
    assert keys(storage) == ["a/b", "c"]
    assert [*storage.incomplete("")] == []


def test_a_folder_that_came_while_we_wrote_is_no_lost_race(storage: LocalStorage) -> None:
    with pytest.raises(StorageError, match="cannot hold both"), storage.writer("a"):
        storage.put("a/b", b"x")
    assert keys(storage) == ["a/b"]


def test_writers_and_deletes_in_one_folder_do_not_disturb_each_other(storage: LocalStorage) -> None:
    """A delete removes the empty folder just as a writer is about to begin in it."""
    failed: list[BaseException] = []

    def churn(name: str) -> None:
        try:
            for _ in range(150):
                storage.put(f"a/b/{name}", b"x")
                assert storage.exists(f"a/b/{name}")
                storage.delete([f"a/b/{name}"])
        except BaseException as error:
            failed.append(error)

    threads = [threading.Thread(target=churn, args=(str(number),)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert failed == []
    assert names(Path(storage.root)) == set()


def test_a_folder_that_never_stays_is_an_error_not_a_hang(
    storage: LocalStorage, root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    root.mkdir()
    monkeypatch.setattr("resilio.storage.local.make_folders", lambda folder, disk: None)
    with pytest.raises(StorageError, match="removed"):
        storage.put("folder/key", b"x")


def test_links_in_the_store_are_listed_and_never_followed(storage: LocalStorage, root: Path, tmp_path: Path) -> None:
    """Whoever made one in the place of an object meant it to be there: leaving it out would call it deleted."""
    outside = tmp_path / "outside"
    outside.mkdir()
    (outside / "secret").write_bytes(b"secret")
    storage.put("key", b"x")
    (root / "folder").symlink_to(outside)
    (root / "file").symlink_to(outside / "secret")
    (root / "loop").symlink_to(root)
    (root / "nowhere").symlink_to(root / "gone")
    assert keys(storage) == ["file", "folder", "key", "loop", "nowhere"]
    assert next(storage.list("file")).size_bytes == (root / "file").lstat().st_size
    for key in ("folder/secret", "file"):
        for verb in (
            lambda: storage.get(key),  # noqa: B023
            lambda: storage.stat(key),  # noqa: B023
            lambda: storage.put(key, b"mine"),  # noqa: B023
            lambda: [*storage.list(f"{key}/x")],  # noqa: B023
        ):
            with pytest.raises(AccessDeniedError, match="symbolic link"):
                verb()
    with pytest.raises(AccessDeniedError, match="symbolic link"):
        storage.delete(["folder/secret"])
    storage.delete(["file", "folder", "loop", "nowhere"])  # the links, not what they point to
    assert names(root) == {"key"}
    assert (outside / "secret").read_bytes() == b"secret"


def test_a_root_reached_over_a_link_works(tmp_path: Path) -> None:
    (tmp_path / "disk").mkdir()
    (tmp_path / "run").symlink_to(tmp_path / "disk")
    storage = LocalStorage(tmp_path / "run")
    storage.put("a/key", b"x")
    assert keys(storage) == ["a/key"]
    storage.delete(["a/key"])
    assert (tmp_path / "run").is_symlink()


def test_what_is_no_file_is_listed_and_refused(storage: LocalStorage, root: Path, monkeypatch) -> None:
    storage.put("a/key", b"x")
    os.mkfifo(root / "a" / "fifo")
    monkeypatch.chdir(root / "a")  # the name of a socket has few bytes
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind("socket")
    assert keys(storage, "a/") == ["a/fifo", "a/key", "a/socket"]
    for key in ("a/fifo", "a/socket"):
        for verb in (storage.get, storage.stat, lambda key: storage.put(key, b"mine", if_absent=True)):
            with pytest.raises(AccessDeniedError, match=rf"no plain file.*{key}|{key}.*no plain file"):
                verb(key)
    storage.delete(["a/fifo", "a/socket"])
    assert names(root) == {"a", "a/key"}


def test_a_file_where_a_folder_belongs_is_an_error_that_names_it(storage: LocalStorage, root: Path) -> None:
    """To say that nothing is there would make a new run of a damaged one."""
    storage.put("commits", b"x")
    for prefix in ("commits/", "commits/0", "commits/a/b"):
        for verb in (storage.list, storage.incomplete):
            with pytest.raises(StorageError, match=rf"{root}/commits.* is a file"):
                verb(prefix)
    assert keys(storage) == ["commits"]


def test_strangers_names_are_no_objects(storage: LocalStorage, root: Path) -> None:
    storage.put("key", b"x")
    (root / "back\\slash").write_bytes(b"x")
    (root / "line\nbreak").write_bytes(b"x")
    assert keys(storage) == ["key"]


def test_listing_goes_on_when_entries_vanish(storage: LocalStorage, monkeypatch: pytest.MonkeyPatch) -> None:
    for number in range(4):
        storage.put(f"a{number}/key", b"x")
    real, seen = os.scandir, []

    def scandir(path: str) -> object:
        entries = real(path)
        seen.append(path)
        if len(seen) == 1:
            found = [*entries]
            storage.delete(["a1/key"])  # with its folder
            return real_context(found)
        return entries

    class real_context(list[object]):
        def __enter__(self) -> real_context:
            return self

        def __exit__(self, *_: object) -> None: ...

    monkeypatch.setattr(os, "scandir", scandir)
    assert keys(storage) == ["a0/key", "a2/key", "a3/key"]


# ---- errors


@pytest.mark.parametrize(
    ("number", "kind"),
    [
        (errno.ENOSPC, OutOfSpaceError),
        (errno.EDQUOT, OutOfSpaceError),
        (errno.EACCES, AccessDeniedError),
        (errno.EROFS, AccessDeniedError),
        (errno.EIO, StorageError),
    ],
)
@pytest.mark.parametrize("verb", ["open", "write", "fsync", "link"])
def test_errors_of_the_system_are_translated(
    storage: LocalStorage, root: Path, monkeypatch: pytest.MonkeyPatch, verb: str, number: int, kind: type[Exception]
) -> None:
    root.mkdir()
    with monkeypatch.context() as patch, pytest.raises(StorageError) as caught:
        patch.setattr(os, verb, failing(number))
        storage.put("key", b"x", if_absent=True)
    assert type(caught.value) is kind
    assert caught.value.facts == {"key": "key", "url": storage.url, "errno": number}
    assert storage.url in str(caught.value) and "'key'" in str(caught.value)
    assert names(root) == set()


def test_errors_of_the_user_s_own_block_come_out_as_they_are(storage: LocalStorage) -> None:
    mine = OSError(errno.ENOSPC, "some other disk")
    with pytest.raises(OSError, match="some other disk") as caught, storage.writer("key"):
        raise mine
    assert caught.value is mine


def test_no_file_stays_open(storage: LocalStorage) -> None:
    before = os.listdir("/proc/self/fd")
    storage.put("key", b"x")
    storage.get("key")
    for body in (lambda: None, lambda: 1 / 0):
        with pytest.raises((ZeroDivisionError, AlreadyExistsError)), storage.writer("other"):
            body()
            raise AlreadyExistsError
    [*storage.list("")]
    assert os.listdir("/proc/self/fd") == before


def test_urls_name_the_folder_to_the_letter(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What a name looks like to a URL parser does not matter, and `url` opens the same store again."""
    for name in ("plain", "lr=1e-4?a", "run#3", "a%20b", "a b", "x@y:z"):
        storage = LocalStorage(tmp_path / name)
        storage.put("key", name.encode())
        assert open_local(storage.url).get("key") == name.encode()
        assert (tmp_path / name / "key").exists()
    monkeypatch.chdir(tmp_path)
    relative = LocalStorage("plain/../plain")
    monkeypatch.chdir("/")
    assert relative.url == f"file://{tmp_path}/plain"
    assert relative.get("key") == b"plain"


@pytest.mark.parametrize("url", ["file://host/abs", "file://relative", "file://", "file://./x"])
def test_file_urls_that_are_not_absolute_are_refused(url: str) -> None:
    with pytest.raises(ConfigError, match="three slashes"):
        open_local(url)


def test_new_files_have_the_mode_the_umask_gives(storage: LocalStorage, root: Path) -> None:
    """Not the 0600 of tempfile: the group must be able to read a checkpoint if the user's umask lets it."""
    old = os.umask(0o027)
    try:
        storage.put("folder/key", b"x")
    finally:
        os.umask(old)
    assert (root / "folder" / "key").stat().st_mode & 0o777 == 0o640
    assert (root / "folder").stat().st_mode & 0o777 == 0o750
