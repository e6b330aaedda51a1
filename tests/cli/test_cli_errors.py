"""Whatever goes wrong is one sentence and an exit code, in every command that looks at a run."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from records.fake_store import forged

from resilio.records import keys

COMMANDS = {
    "ls": (),
    "show": (),
    "verify": (),
    "pin": ("400", "--because", "x"),
    "unpin": ("400",),
    "quarantine": ("400", "--because", "x"),
    "release": ("400",),
    "forget": ("--keep", "keep_last(1)"),
    "plan": ("--save", "save_every(5)", "--steps", "10"),
    "doctor": ("--read-only",),
}
STEPS = {
    "show": (),
    "verify": (),
    "pin": ("--because", "x"),
    "unpin": (),
    "quarantine": ("--because", "x"),
    "release": (),
}


@pytest.fixture
def small(run: Any) -> Any:
    run.begin(1)
    run.commit(400, n_bytes=1000)
    return run


@pytest.fixture
def newer(small: Any) -> str:
    path = small.folder / keys.RUN
    path.chmod(0o644)
    path.write_bytes(forged({"format": 99, "run_id": "x"}))
    return str(small.url)


@pytest.fixture
def unreadable(small: Any, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    folder = small.folder / "commits"
    folder.chmod(0)
    if os.access(folder, os.R_OK):  # we are root, whom modes do not stop
        real = os.scandir

        def scandir(path: Any) -> Any:
            if Path(path) == folder:
                raise PermissionError(13, "Permission denied")
            return real(path)

        monkeypatch.setattr(os, "scandir", scandir)
    yield str(small.url)
    folder.chmod(0o755)


def ended(resilio: Any, code: int, says: str, *args: str) -> None:
    """It ends with `code` and one sentence that says so; as JSON with the same; and a traceback if asked for."""
    found, out, err = resilio(*args)
    assert (found, out) == (code, "")
    assert err.startswith("resilio: ") and says in err and "Traceback" not in err
    assert len(err.splitlines()) <= 2  # of usage, the second says where to look
    found, out, err = resilio(*args, "--json")
    assert (found, out) == (code, "")
    error = json.loads(err)["error"]
    assert says in error["message"] and error["exit_code"] == code
    assert "Traceback" in resilio(*args, "--debug")[2]


@pytest.mark.parametrize("command", COMMANDS)
@pytest.mark.parametrize(
    ("url", "code", "says"),
    [
        ("nobody://x", 2, "plugin that offers nobody://"),
        ("file:/x", 2, "write it so"),
        ("s3//bucket/run", 2, "write it so"),
        ("", 2, "a run is a URL or a path"),
    ],
)
def test_a_url_that_is_none(resilio: Any, command: str, url: str, code: int, says: str) -> None:
    ended(resilio, code, says, command, url, *COMMANDS[command])


@pytest.mark.parametrize("command", [command for command in COMMANDS if command != "doctor"])
def test_an_empty_folder_and_a_run_without_a_checkpoint(resilio: Any, run: Any, command: str) -> None:
    ended(resilio, 4, "no run", command, run.url, *COMMANDS[command])
    run.begin(1)
    ended(resilio, 4, "without a checkpoint", command, run.url, *COMMANDS[command])


@pytest.mark.parametrize("command", [command for command in COMMANDS if command != "doctor"])
def test_a_newer_format(resilio: Any, newer: str, command: str) -> None:
    ended(resilio, 3, "pgrade", command, newer, *COMMANDS[command])


@pytest.mark.parametrize("command", [command for command in COMMANDS if command != "doctor"])
def test_a_folder_that_may_not_be_read(resilio: Any, unreadable: str, command: str) -> None:
    ended(resilio, 5, "permission denied", command, unreadable, *COMMANDS[command])


@pytest.mark.parametrize("command", STEPS)
@pytest.mark.parametrize(
    ("step", "code", "says"),
    [("7", 4, "newest steps"), ("4e2", 2, "neither a step"), ("../x", 2, "neither a step"), ("-1", 2, "-1")],
)
def test_a_step_that_is_none(resilio: Any, small: Any, command: str, step: str, code: int, says: str) -> None:
    ended(resilio, code, says, command, small.url, step, *STEPS[command])


def test_doctor_tells_the_same_in_its_list(resilio: Any, newer: str) -> None:
    code, out, _ = resilio("doctor", newer, "--read-only")
    assert (code, "FAILED  run" in out) == (1, True)


def test_doctor_of_a_folder_that_may_not_be_read_is_5(resilio: Any, unreadable: str) -> None:
    code, out, _ = resilio("doctor", unreadable)
    assert (code, "FAILED  reachable" in out) == (5, True)
