"""What goes wrong with the other kinds of store, against servers on loopback; and a whole run on each."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from plugins.proxy import Line

import resilio
from resilio import CheckpointManager, keep_last, open_storage
from resilio.errors import AccessDeniedError, AlreadyExistsError, NotFoundError, StorageError, TransientError
from resilio_fsspec import open_fsspec

KINDS = ["memory", "file", "gs", "abfs", "sftp"]


@pytest.fixture
def url_of(request: Any, tmp_path: Path) -> Callable[[str], str]:
    """An empty folder of a kind of store; the server is started with the first of its kind."""

    def url(kind: str) -> str:
        if kind in ("memory", "file"):
            return f"fsspec+{kind}://{tmp_path}/run"
        if kind == "sftp":
            return str(request.getfixturevalue("sftp_url").format(tmp_path / "run"))
        request.getfixturevalue({"gs": "gs_endpoint", "abfs": "abfs_connection", "s3": "s3_endpoint"}[kind])
        return f"{kind}://tests{tmp_path}"

    return url


@pytest.mark.parametrize("kind", [*KINDS, "s3"])
def test_what_was_put_has_the_time_of_the_store(kind: str, url_of: Callable[[str], str]) -> None:
    """The age of leases and of what is off the lineage is told by it."""
    with open_fsspec(url_of(kind)) as storage:
        for if_absent in (True, False):
            stored_s = storage.put("key", b"x", if_absent=if_absent).modified_s
            assert stored_s is not None and abs(stored_s - storage.stat("key").modified_s) < 60


@pytest.mark.parametrize("kind", KINDS)
def test_a_run_is_saved_swept_restored_and_verified(kind: str, url_of: Callable[[str], str]) -> None:
    url = url_of(kind)
    for life in range(2):
        live = {"x": -1}
        with CheckpointManager(url, {"live": live}, mode="sync", keep=keep_last(2)) as ckpt:
            assert ckpt.restore().step == 3 * life
            assert live["x"] == (3 * life or -1)
            for step in range(3 * life + 1, 3 * life + 4):
                live["x"] = step
                ckpt.save(step)
            assert ckpt.verify(3 * life + 3) == []
            assert [info.step for info in ckpt.checkpoints()] == [3 * life + 2, 3 * life + 3]
    live = {}
    assert resilio.restore(url, {"live": live}).step == 6 and live == {"x": 6}
    with open_storage(url) as storage:
        assert len({info.key.split("/")[0] for info in storage.list("step-")}) == 2
        assert [*storage.incomplete("")] == []


# ------------------------------------------------------------------------------------------------------- Google, Azure


@pytest.fixture
def cut_line(request: Any, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[str], Line]]:
    """A line to the server of a kind, put into the environment."""
    lines = []

    def to(kind: str) -> Line:
        address = request.getfixturevalue({"gs": "gs_endpoint", "abfs": "abfs_connection"}[kind])
        port = re.search(r"127\.0\.0\.1:(\d+)", address)[1]
        line = Line(int(port))
        lines.append(line)
        name = {"gs": "STORAGE_EMULATOR_HOST", "abfs": "AZURE_STORAGE_CONNECTION_STRING"}[kind]
        monkeypatch.setenv(name, address.replace(f":{port}", f":{line.port}"))
        return line

    yield to
    for line in lines:
        line.close()


@pytest.mark.parametrize("kind", ["gs", "abfs"])
def test_a_create_whose_answer_is_lost_is_no_failure(
    kind: str, url_of: Callable[[str], str], cut_line: Callable[[str], Line]
) -> None:
    """The store has it, whoever repeats is told "exists", and what exists is ours."""
    line, left = cut_line(kind), [0]

    def cut(request: bytes) -> bool:
        if request.split(b" ", 1)[0] in (b"PUT", b"POST") and left[0]:
            left[0] -= 1
            return True
        return False

    line.cut = cut
    with open_storage(url_of(kind)) as storage:
        for lost in (1, 2, 3):
            left[0] = lost
            assert storage.put("key", b"ours", if_absent=True).size_bytes == 4
            assert left == [0] and storage.get("key") == b"ours"
            with pytest.raises(AlreadyExistsError):
                storage.put("key", b"ours", if_absent=True)
            storage.delete(["key"])


@pytest.mark.parametrize("kind", ["gs", "abfs"])
def test_a_store_that_does_not_answer_is_a_fault_that_may_pass(
    kind: str, url_of: Callable[[str], str], cut_line: Callable[[str], Line]
) -> None:
    """Tried once, and a second time only by aiohttp."""
    line = cut_line(kind)
    line.cut = lambda request: True
    with open_fsspec(url_of(kind)) as storage:
        for verb in (lambda: storage.put("key", b"x"), lambda: storage.get("key"), lambda: storage.list("")):
            line.requests.clear()
            with pytest.raises(TransientError):
                verb()
            assert 1 <= len(line.requests) <= 2


@pytest.mark.parametrize("kind", ["gs", "abfs"])
def test_a_missing_bucket_is_not_the_same_as_nothing(kind: str, url_of: Callable[[str], str]) -> None:
    """A run in it must not look new."""
    url_of(kind)
    with open_fsspec(f"{kind}://no-such-bucket/run") as storage:
        for verb in (lambda: storage.list(""), lambda: storage.exists("key"), lambda: storage.put("key", b"x")):
            with pytest.raises(StorageError) as caught:
                verb()
            assert not isinstance(caught.value, NotFoundError)


# ---------------------------------------------------------------------------------------------------------------- SFTP


def test_a_host_that_is_not_known_is_refused(sftp_url: str, tmp_path: Path) -> None:
    """The message says what to do, and nothing is written to the file of known hosts."""
    known = tmp_path / "known_hosts"
    url = re.sub(r"known_hosts=[^&]*", f"known_hosts={known}", sftp_url.format(tmp_path / "run"))
    with open_fsspec(url) as storage, pytest.raises(AccessDeniedError, match="ssh-keyscan"):
        storage.list("")
    assert not known.exists() and not (tmp_path / "run").exists()


def test_a_user_who_is_not_known_is_refused(sftp_url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RESILIO_SFTP_PASSWORD", "never-shown")
    url = re.sub(r"&identity=.*", "", sftp_url.format(tmp_path / "run"))
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.delenv("SSH_AUTH_SOCK", raising=False)
    with open_fsspec(url) as storage, pytest.raises(AccessDeniedError) as caught:
        storage.list("")
    assert "never-shown" not in str(caught.value)


def test_a_broken_line_is_a_fault_that_may_pass_and_the_next_call_connects_anew(sftp_url: str, tmp_path: Path) -> None:
    target = int(re.search(r"127\.0\.0\.1:(\d+)", sftp_url)[1])
    known = Path(re.search(r"known_hosts=([^&]*)", sftp_url)[1]).read_text()
    with Line.to(target) as line:
        mine = tmp_path / "known_hosts"
        mine.write_text(known.replace(f":{target}", f":{line.port}"))
        url = re.sub(r"known_hosts=[^&]*", f"known_hosts={mine}", sftp_url.format(tmp_path / "run"))
        with open_fsspec(url.replace(f":{target}/", f":{line.port}/")) as storage:
            storage.put("a", b"x")
            line.drop()
            with suppress(TransientError):  # that of a call which is under way; the client may know already
                storage.put("b", b"y")
            storage.put("b", b"y")
            with pytest.raises(TransientError), storage.writer("c") as out:
                out.write(bytes(9_000_000))
                line.drop()
                out.write(bytes(9_000_000))
            with suppress(TransientError):  # as above
                storage.exists("a")
            assert [info.key for info in storage.list("")] == ["a", "b"]
            for item in storage.incomplete(""):
                assert item.key == "c"
                storage.abort(item)
            assert sorted(path.name for path in (tmp_path / "run").iterdir()) == ["a", "b"]


def test_folders_come_and_go_with_their_objects(sftp_url: str, tmp_path: Path) -> None:
    with open_fsspec(sftp_url.format(tmp_path / "run")) as storage:
        storage.put("step-1/deep/data", b"x")
        storage.put("step-2/data", b"x")
        storage.delete(["step-1/deep/data"])
        assert [path.name for path in (tmp_path / "run").iterdir()] == ["step-2"]
        with pytest.raises(ZeroDivisionError), storage.writer("step-3/data"):
            raise ZeroDivisionError
        assert [path.name for path in (tmp_path / "run").iterdir()] == ["step-2"]
        with pytest.raises(StorageError, match="a folder has this name"):
            storage.put("step-2", b"x")
