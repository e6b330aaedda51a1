"""The command as a whole: usage, errors, exit codes, closed pipes, interrupts, and what it must not import."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from importlib.metadata import version
from typing import Any

import pytest

from resilio.errors import AccessDeniedError
from resilio.hooks import host
from resilio.storage import MemoryStorage, ObjectInfo

COMMANDS = ("ls", "show", "verify")


@pytest.mark.parametrize("args", [(), ("--help",), ("-h",), *[(command, "-h") for command in COMMANDS]])
def test_help(resilio: Any, args: tuple[str, ...]) -> None:
    code, out, err = resilio(*args)
    assert code in ((0, 2) if not args else (0,))
    assert "Usage: resilio" in out + err


def test_version(resilio: Any) -> None:
    assert resilio("--version") == (0, f"resilio {version('resilio-ckpt')}\n", "")


@pytest.mark.parametrize(
    "args",
    [
        ("ls",),
        ("nonsense",),
        ("ls", "file:///x", "--nonsense"),
        ("ls", "nobody://x"),
        ("show", "file:///x", "1", "2"),
        ("verify", "file:///x", "1", "--all"),
    ],
)
def test_usage_is_2_in_both_ways_of_speaking(resilio: Any, args: tuple[str, ...]) -> None:
    code, out, err = resilio(*args)
    assert (code, out) == (2, "")
    assert err.startswith("resilio: ")
    assert "Traceback" not in err
    code, out, err = resilio(*args, "--json")
    assert (code, out) == (2, "")
    assert json.loads(err)["error"]["exit_code"] == 2


@pytest.mark.parametrize("command", COMMANDS)
def test_nothing_there_is_4(resilio: Any, run: Any, command: str) -> None:
    code, out, err = resilio(command, run.url)
    assert (code, out) == (4, "")
    assert err.startswith("resilio: ")
    code, out, err = resilio(command, run.url, "--json")
    assert (code, out) == (4, "")
    assert json.loads(err)["error"]["type"] == "NoCheckpointError"


class Unreachable(MemoryStorage):
    def list(self, prefix: str) -> Iterator[ObjectInfo]:
        raise AccessDeniedError(f"{self.url}: not with these credentials", url=self.url)

    def stat(self, key: str) -> ObjectInfo:
        raise AccessDeniedError(f"{self.url}: not with these credentials", url=self.url)


@pytest.mark.parametrize("command", COMMANDS)
def test_a_store_that_fails_is_5(resilio: Any, command: str) -> None:
    host.cache_clear()
    try:
        host().storages.register("unreachable", lambda url: Unreachable("x"), owner="this test")
        code, out, err = resilio(command, "unreachable://x")
        assert (code, out) == (5, "")
        assert err.endswith("not with these credentials\n")
        assert err.count("\n") == 1
        code, out, err = resilio(command, "unreachable://x", "--json")
        assert (code, out) == (5, "")
        assert json.loads(err)["error"]["type"] == "AccessDeniedError"
    finally:
        host.cache_clear()


@pytest.mark.parametrize("command", COMMANDS)
def test_debug_shows_the_traceback(resilio: Any, run: Any, command: str, monkeypatch: pytest.MonkeyPatch) -> None:
    assert "Traceback" not in resilio(command, run.url)[2]
    assert "Traceback" in resilio(command, run.url, "--debug")[2]
    monkeypatch.setenv("RESILIO_DEBUG", "1")
    assert "Traceback" in resilio(command, run.url)[2]


@pytest.mark.parametrize("command", COMMANDS)
def test_ctrl_c_is_130(resilio: Any, branched: Any, command: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(*_: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("resilio.cli.look.discover", interrupted)
    code, out, err = resilio(command, branched.url)
    assert (code, out) == (130, "")
    assert "Traceback" not in err


NO_TORCH = """
import sys
from resilio.cli import main

url = sys.argv[1]
for args in (
    ("ls", url), ("ls", url, "--json"), ("show", url), ("verify", url), ("pin", url, "400", "--because", "x"),
    ("unpin", url, "400"), ("quarantine", url, "400", "--because", "x"), ("ls", url), ("release", url, "400"),
    ("forget", url, "--keep", "keep_all()"), ("forget", url, "--keep", "keep_all()", "--yes"),
    ("plan", url, "--save", "save_every(5)", "--steps", "10"), ("plugins",), ("doctor", url), ("completion", "bash"),
    ("--help",),
):
    try:
        main(args)
    except SystemExit as ended:
        assert ended.code == 0, args
    assert "torch" not in sys.modules, args
"""


def test_no_command_imports_torch(branched: Any) -> None:
    done = subprocess.run([sys.executable, "-c", NO_TORCH, branched.url], capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""


def test_ls_imports_no_library_of_a_plugin(branched: Any) -> None:
    code = (
        "import sys; from resilio.cli import main\n"
        "try: main(sys.argv[1:])\n"
        "finally: print(sorted({'numpy', 'fsspec', 's3fs'} & sys.modules.keys()))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, "ls", branched.url], capture_output=True, text=True, timeout=120, check=True
    )
    assert done.stdout.splitlines()[-1] == "[]"


@pytest.mark.parametrize("command", COMMANDS)
@pytest.mark.parametrize("mode", [(), ("--json",)])
def test_a_reader_that_goes_away_is_no_traceback(branched: Any, command: str, mode: tuple[str, ...]) -> None:
    read, write = os.pipe()
    os.close(read)
    try:
        done = subprocess.run(
            [sys.executable, "-m", "resilio", command, branched.url, *mode],
            stdout=write,
            stderr=subprocess.PIPE,
            text=True,
            timeout=120,
        )
    finally:
        os.close(write)
    assert (done.returncode, done.stderr) == (0, "")


def test_the_console_script_is_this_command(branched: Any) -> None:
    from importlib.metadata import entry_points

    from resilio.cli import main

    (script,) = entry_points(group="console_scripts", name="resilio")
    assert script.load() is main


def test_shell_completion_answers() -> None:
    env = {**os.environ, "_RESILIO_COMPLETE": "complete_bash", "COMP_WORDS": "resilio ver", "COMP_CWORD": "1"}
    done = subprocess.run([sys.executable, "-m", "resilio"], env=env, capture_output=True, text=True, timeout=120)
    assert done.stdout.split() == ["verify"], done.stderr
