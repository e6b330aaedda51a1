"""What goes wrong with S3 in practice, against a real server: each is a trap that somebody has fallen into."""

from __future__ import annotations

import asyncio
import logging
import os
import pickle
import signal
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from threading import Barrier, Event
from typing import Any

import pytest
import torch
import torch.distributed as dist
from fsspec.asyn import get_loop
from plugins.conftest import s3_client
from plugins.proxy import Line
from torch import nn

import resilio
from resilio import CheckpointManager, keep_last, open_storage
from resilio.errors import (
    AccessDeniedError,
    AlreadyExistsError,
    ConfigError,
    NotFoundError,
    StorageError,
    TransientError,
)
from resilio.storage import Storage
from resilio.testing.worlds import run_world
from resilio_fsspec import open_fsspec


@pytest.fixture
def run_url(s3_endpoint: str, tmp_path: Path) -> str:
    return f"s3://tests{tmp_path}"


@pytest.fixture
def storage(run_url: str) -> Iterator[Storage]:
    with open_fsspec(run_url) as storage:
        yield storage


@pytest.fixture
def line(s3_endpoint: str) -> Iterator[Line]:
    with Line.to(int(s3_endpoint.rpartition(":")[2])) as line:
        yield line


def over(line: Line, run_url: str) -> str:
    return f"{run_url}?endpoint_url=http://127.0.0.1:{line.port}"


# ------------------------------------------------------------------------------------------------------------- creates


def test_of_four_creates_at_once_one_wins(storage: Storage) -> None:
    start = Barrier(4)

    def create(racer: int) -> bool:
        start.wait()
        try:
            storage.put("key", b"%d" % racer, if_absent=True)
        except AlreadyExistsError:
            return False
        return True

    with ThreadPoolExecutor(4) as pool:
        won = [*pool.map(create, range(4))]
    assert won.count(True) == 1
    assert storage.get("key") == b"%d" % won.index(True)


def test_a_large_object_replaces_none_that_came_meanwhile(storage: Storage) -> None:
    """The condition is on the end of the upload, and what was sent is gone."""
    with pytest.raises(AlreadyExistsError), storage.writer("key") as out:
        out.write(bytes(9_000_000))
        storage.put("key", b"came meanwhile")
        assert [item.key for item in storage.incomplete("")] == ["key"]
    assert storage.get("key") == b"came meanwhile"
    assert [*storage.incomplete("")] == []


def test_a_create_whose_answer_is_lost_is_no_failure(run_url: str, line: Line) -> None:
    """The store has it, whoever repeats is told "exists", and what exists is ours."""
    left = [1]

    def cut(request: bytes) -> bool:
        first = request.split(b"\r\n", 1)[0]
        if first.startswith(b"PUT") and b"/key" in first and left[0]:
            left[0] -= 1
            return True
        return False

    line.cut = cut
    with open_storage(over(line, run_url)) as storage:
        for lost in (1, 2, 3):
            left[0] = lost
            assert storage.put("key", b"ours", if_absent=True).size_bytes == 4
            assert left == [0] and storage.get("key") == b"ours"
            with pytest.raises(AlreadyExistsError):
                storage.put("key", b"ours", if_absent=True)
            storage.delete(["key"])


def test_a_line_that_stays_broken_is_told_as_such_without_tries_of_ours(run_url: str, line: Line) -> None:
    """One try, and the one more of aiohttp for a connection that broke: no tower of retries."""
    line.cut = lambda request: request.startswith(b"PUT")
    with open_fsspec(over(line, run_url)) as bare, pytest.raises(TransientError):
        bare.put("key", b"ours", if_absent=True)
    assert len(line.requests) <= 2


# ------------------------------------------------------------------------------------------------------ large objects


def test_a_part_that_fails_leaves_nothing_even_if_the_block_goes_on(run_url: str, line: Line) -> None:
    line.cut = lambda request: b"partNumber=2" in request.split(b"\r\n", 1)[0]
    with open_fsspec(over(line, run_url)) as storage:
        with pytest.raises(StorageError, match="not published"), storage.writer("key") as out:
            out.write(bytes(9_000_000))
            with pytest.raises(TransientError):
                out.write(bytes(9_000_000))
        assert [*storage.list("")] == [] and [*storage.incomplete("")] == []


def test_an_upload_that_cannot_be_aborted_is_found_later(run_url: str, line: Line, caplog: Any) -> None:
    """The exception of the block comes out all the same."""
    with open_fsspec(over(line, run_url)) as storage:
        block = storage.writer("key")
        with pytest.raises(ZeroDivisionError), block as out:
            out.write(bytes(9_000_000))
            line.close()
            raise ZeroDivisionError
    assert "upload not aborted" in caplog.text
    with open_fsspec(run_url) as storage:
        (item,) = storage.incomplete("")
        assert item.key == "key" and item.started_s
        storage.abort(item)
        assert [*storage.incomplete("")] == [] and [*storage.list("")] == []


def test_a_killed_upload_is_swept_by_the_next_job(run_url: str) -> None:
    """What a dead job was sending into an attempt's folder costs money until somebody aborts it."""

    def life(step: int) -> None:
        with CheckpointManager(run_url, {"live": {"x": step}}, mode="sync", keep=keep_last(1)) as ckpt:
            ckpt.restore()
            ckpt.save(step)

    life(1)
    with open_fsspec(run_url) as storage:
        key = "step-000000002-g000001-0123/__0_0.distcp"
        if not (child := os.fork()):
            with storage.writer(key) as out:
                out.write(bytes(9_000_000))
                os.kill(os.getpid(), signal.SIGKILL)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -signal.SIGKILL
        assert [item.key for item in storage.incomplete("step-")] == [key]
        life(3)
        assert [*storage.incomplete("")] == []
        assert len({info.key.split("/")[0] for info in storage.list("step-")}) == 1


def test_a_call_that_is_interrupted_does_not_go_on_behind_our_back(run_url: str, line: Line) -> None:
    """A part that is still sent would outlive the abort, and a range still fill a buffer that is in use again."""
    interrupted = Event()

    def hang(request: bytes) -> bool:
        if b"partNumber=2" in request.split(b"\r\n", 1)[0]:
            os.kill(os.getpid(), signal.SIGINT)
            interrupted.wait(60)
        return False

    line.cut = hang
    with open_fsspec(over(line, run_url)) as storage:
        with pytest.raises(KeyboardInterrupt), storage.writer("key") as out:
            out.write(bytes(9_000_000))
            try:
                out.write(bytes(9_000_000))
            finally:
                busy = [task for task in asyncio.all_tasks(get_loop()) if "watched" in repr(task)]
                interrupted.set()
        assert busy == []
        assert [*storage.list("")] == [] and [*storage.incomplete("")] == []


# ------------------------------------------------------------------------------------------------ listings and deletes


def test_a_listing_shows_what_another_client_did(storage: Storage, run_url: str) -> None:
    """BR-46: no cache, also where the folder was listed and the object looked for before."""
    bucket, _, folder = run_url.removeprefix("s3://").partition("/")
    other = s3_client()
    storage.put("step-1/data", b"x")
    assert [info.key for info in storage.list("")] == ["step-1/data"] and not storage.exists("step-2/data")
    other.call_s3("put_object", Bucket=bucket, Key=f"{folder}/step-2/data", Body=b"xyz")
    other.call_s3("delete_object", Bucket=bucket, Key=f"{folder}/step-1/data")
    assert [(info.key, info.size_bytes) for info in storage.list("")] == [("step-2/data", 3)]
    assert storage.exists("step-2/data") and not storage.exists("step-1/data")
    assert storage.get("step-2/data") == b"xyz"


def test_names_that_are_no_keys_are_passed_over(storage: Storage, run_url: str) -> None:
    """Consoles put objects that stand for folders."""
    bucket, _, folder = run_url.removeprefix("s3://").partition("/")
    other = s3_client()
    other.call_s3("put_object", Bucket=bucket, Key=f"{folder}/", Body=b"")
    other.call_s3("put_object", Bucket=bucket, Key=f"{folder}/a/", Body=b"")
    storage.put("a/b", b"x")
    assert [info.key for info in storage.list("")] == ["a/b"]
    other.call_s3("delete_object", Bucket=bucket, Key=f"{folder}/")
    other.call_s3("delete_object", Bucket=bucket, Key=f"{folder}/a/")


def test_a_version_in_a_name_is_part_of_the_name(storage: Storage) -> None:
    """s3fs cuts it off."""
    storage.put("a?versionId=1", b"one")
    assert storage.get("a?versionId=1") == b"one"
    assert not storage.exists("a")


# ------------------------------------------------------------------------------------------------------------- refusals


def test_wrong_credentials_are_told_once_and_not_shown(
    run_url: str, line: Line, monkeypatch: pytest.MonkeyPatch, caplog: Any
) -> None:
    caplog.set_level(logging.DEBUG)
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "wrong-and-never-shown")
    with open_storage(over(line, run_url)) as storage:
        verbs = [
            lambda: storage.put("key", b"x"),
            lambda: storage.put("key", b"x", if_absent=True),
            lambda: storage.get("key"),
            lambda: storage.read_into("key", [(0, memoryview(bytearray(1)))]),
            lambda: storage.stat("key"),
            lambda: storage.list(""),
            lambda: storage.delete(["key"]),
            lambda: storage.incomplete(""),
        ]
        for verb in verbs:
            line.requests.clear()
            with pytest.raises(AccessDeniedError) as caught:
                verb()
            assert len(line.requests) == 1
            copy = pickle.loads(pickle.dumps(caught.value))
            assert str(copy) == str(caught.value) and copy.url == storage.url
            assert "never-shown" not in str(caught.value) + repr(storage)
    assert "never-shown" not in "".join(
        record.getMessage() for record in caplog.records if "botocore" not in record.name
    )


def test_a_missing_bucket_is_not_the_same_as_nothing(s3_endpoint: str) -> None:
    """A run in it must not look new. (The server here makes a bucket when something is put into it.)"""
    with open_fsspec("s3://no-such-bucket/run") as storage:
        for verb in (lambda: storage.list(""), lambda: storage.exists("key"), lambda: storage.incomplete("")):
            with pytest.raises(StorageError, match="NoSuchBucket") as caught:
                verb()
            assert not isinstance(caught.value, NotFoundError)


def test_a_store_that_nobody_serves_is_a_fault_that_may_pass(run_url: str, line: Line) -> None:
    line.close()
    with open_fsspec(over(line, run_url)) as storage, pytest.raises(TransientError):
        storage.put("key", b"x")


@pytest.mark.parametrize(
    "url",
    [
        "s3://AKIAUSER:very/secret@bucket/run",
        "s3://bucket/run?secret_key=very-secret",
        "s3://bucket/run?region=x&token=very-secret",
        "s3://bucket/run?unknown=1",
        "s3://bucket/run?region=a&region=b",
        "s3://bucket/run?anon=yes",
        "s3://bucket/run?addressing=sideways",
        "s3://bucket/../run",
        "s3:///run",
    ],
)
def test_a_url_that_cannot_be_right_is_refused_and_shows_no_secret(url: str) -> None:
    with pytest.raises(ConfigError) as caught:
        open_storage(url)
    assert "very" not in str(caught.value)


# ------------------------------------------------------------------------------------------------------ clean machines


def test_nothing_is_left_open_whether_it_was_closed_or_not(run_url: str) -> None:
    """No "unclosed" at the end of a program."""
    code = """
import sys
from resilio import open_storage
for close in (True, False):
    storage = open_storage(sys.argv[1])
    storage.put("key", b"x")
    with storage.writer("large") as out:
        out.write(bytes(9_000_000))
    storage.delete(["large"])
    if close:
        storage.close()
"""
    done = subprocess.run(
        [sys.executable, "-X", "dev", "-c", code, run_url], capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr
    assert "nclosed" not in done.stderr and "Traceback" not in done.stderr, done.stderr


# ---------------------------------------------------------------------------------------------------------- whole runs


def train(rank: int, world: int, url: str) -> list[int]:
    """Five saves, two of them kept; then back to the newest."""
    torch.manual_seed(0)
    model = nn.Linear(30, 21)
    sgd = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    with CheckpointManager(url, {"model": model, "optimizer": sgd}, mode="sync", keep=keep_last(2)) as ckpt:
        assert ckpt.restore().found is None
        for step in range(1, 6):
            sgd.zero_grad()
            model(torch.ones(30)).sum().backward()
            sgd.step()
            ckpt.save(step)
        before = model.weight.detach().clone()
        with torch.no_grad():
            model.weight.zero_()
        report = ckpt.restore()
        assert report.step == 5 and torch.equal(model.weight, before)
        assert ckpt.verify(5) == [] and ckpt.verify(4) == []
        dist.barrier()
        return [info.step for info in ckpt.checkpoints()]


def test_two_ranks_save_sweep_restore_and_verify(run_url: str) -> None:
    assert run_world(train, 2, run_url, timeout_s=180) == [[4, 5]] * 2
    model = nn.Linear(30, 21)
    assert resilio.restore(run_url, {"model": model}, 4, only=["model"]).step == 4
    with open_storage(run_url) as storage:
        assert len({info.key.split("/")[0] for info in storage.list("step-")}) == 2
        assert [*storage.incomplete("")] == []
