"""`resilio plugins`, commands that plugins add, and what a broken plugin may not take away."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from resilio.cli.extra import plugin_host

GOOD = """
    import resilio.hooks
    from resilio.storage import MemoryStorage

    @resilio.hooks.hookimpl
    def resilio_register_storage(register):
        register("good", lambda url: MemoryStorage(url))

    @resilio.hooks.hookimpl
    def resilio_add_commands(commands):
        commands("greet", "good_commands:greet", help="Say hello [/to] somebody.")
        commands("group", "good_commands:app")
        commands("gone", "no_such_module:greet", help="Cannot be loaded.")
        commands("number", "good_commands:NUMBER")
        commands("odd", "good_commands:odd")
"""
COMMANDS = """
    import typer
    from typing import Annotated
    from resilio.errors import NoCheckpointError

    NUMBER = 7
    app = typer.Typer()

    def greet(name: str, code: Annotated[int, typer.Option("--code", help="What to end with.")] = 0) -> int:
        "Say hello to NAME."
        print("hello", name)
        return code

    def odd(how: str):
        if how == "exit":
            raise typer.Exit(3)
        if how == "abort":
            raise typer.Abort()
        if how == "foreseen":
            raise NoCheckpointError("no such thing")
        if how == "text":
            return "text"
        if how == "usage":
            raise typer.BadParameter("not that")
        1 / 0

    @app.command()
    def one() -> int:
        print("one")
        return 4
"""


@pytest.fixture
def good(installed: Any) -> Any:
    installed.add("good", GOOD)
    installed.module("good_commands", COMMANDS)
    return installed


def test_each_is_listed_with_what_it_brings(resilio: Any, good: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    good.add("other", "import no_such_library")
    monkeypatch.setenv("RESILIO_DISABLE_PLUGINS", "other")
    code, out, err = resilio("plugins")
    assert (code, err) == (0, "")
    rows = {line.split()[0]: line for line in out.splitlines()}
    assert " good-dist " in rows["good"]
    assert "schemes good; commands gone, greet, group, number, odd" in rows["good"]
    assert "disabled" in rows["other"]
    code, out, _ = resilio("plugins", "--json")
    assert code == 0
    assert next(one for one in json.loads(out)["plugins"] if one["name"] == "good") == {
        "name": "good",
        "source": "entry point",
        "where": "good_module",
        "distribution": "good-dist",
        "version": "1.2",
        "state": "active",
        "error": None,
        "hooks": ["resilio_add_commands", "resilio_register_storage"],
        "schemes": ["good"],
        "policies": [],
        "drills": [],
        "commands": ["gone", "greet", "group", "number", "odd"],
    }


def test_a_command_runs_with_its_options_and_its_exit_code(resilio: Any, good: Any) -> None:
    assert resilio("greet", "you") == (0, "hello you\n", "")
    assert resilio("greet", "you", "--code", "3") == (3, "hello you\n", "")
    assert resilio("group", "one") == (4, "one\n", "")
    code, _, err = resilio("greet")
    assert (code, "name" in err.lower()) == (2, True)


def test_it_is_listed_without_being_imported_and_has_its_help(resilio: Any, good: Any) -> None:
    (good.folder / "good_commands.py").write_text("raise RuntimeError('imported')")
    code, out, err = resilio("--help")
    assert (code, err) == (0, "")
    assert re.search(r"Say hello \\?\[/to\] somebody\.", out)  # no markup of a stranger's is taken for such
    for name in ("greet", "group", "gone", "number", "odd"):
        assert f" {name} " in out
    good.module("good_commands", COMMANDS)
    code, out, _ = resilio("greet", "--help")
    assert (code, "What to end with." in out) == (0, True)
    code, out, _ = resilio("group", "--help")
    assert (code, " one " in out) == (0, True)


@pytest.mark.parametrize(
    ("args", "code", "says"),
    [
        (("gone",), 2, "no_such_module"),
        (("gone", "--help"), 2, "no_such_module"),
        (("number",), 2, "neither a function nor a typer.Typer"),
        (("odd", "oops"), 5, "ZeroDivisionError"),
        (("odd", "text"), 5, "str, which is no exit code"),
    ],
)
def test_a_command_that_is_broken_is_named_with_its_distribution(
    resilio: Any, good: Any, args: tuple[str, ...], code: int, says: str
) -> None:
    found, out, err = resilio(*args)
    assert (found, out) == (code, "")
    assert err.count("\n") == 1
    assert says in err and "plugin 'good' of good-dist 1.2" in err


@pytest.mark.parametrize(
    ("how", "code", "says"),
    [("exit", 3, ""), ("abort", 130, "interrupted"), ("foreseen", 4, "no such thing"), ("usage", 2, "not that")],
)
def test_how_a_command_ends_is_its_own_affair(resilio: Any, good: Any, how: str, code: int, says: str) -> None:
    found, _, err = resilio("odd", how)
    assert found == code
    assert says in err and "good-dist" not in err


def test_a_broken_plugin_takes_away_no_command_that_tells_of_it(resilio: Any, good: Any, branched: Any) -> None:
    good.add("bad", "import no_such_library_at_all")
    for args in (("--version",), ("ls", "--help"), ("completion", "bash")):
        code, _, err = resilio(*args)
        assert (code, err) == (0, "")
    for args, ended in ((("--help",), 0), (("nonsense",), 2), (("greet", "you"), 0)):
        code, _, err = resilio(*args)
        assert code == ended
        assert err.count("warning: plugin 'bad' of bad-dist 1.2") == 1
        assert "RESILIO_DISABLE_PLUGINS=bad" in err
    code, out, err = resilio("plugins")
    assert (code, err) == (1, "")
    assert "BROKEN  plugin 'bad' of bad-dist 1.2" in out and "no_such_library_at_all" in out
    code, out, _ = resilio("plugins", "--json")
    assert (code, [one["state"] for one in json.loads(out)["plugins"] if one["name"] == "bad"]) == (1, ["broken"])
    code, out, err = resilio("ls", branched.url)
    assert (code, out) == (2, "")
    assert "resilio: plugin 'bad' of bad-dist 1.2" in err


def test_one_of_our_commands_looks_for_no_plugin(resilio: Any, good: Any) -> None:
    good.add("loud", "raise RuntimeError('imported')")
    assert resilio("completion", "fish")[0] == 0
    assert plugin_host.cache_info().currsize == 0


BASH = """
source <(resilio completion bash)
complete -p resilio
COMP_WORDS=(resilio {words}); COMP_CWORD={at}
_resilio_completion resilio
printf '%s\\n' "${{COMPREPLY[@]}}"
"""


@pytest.mark.parametrize(
    ("words", "at", "wanted"),
    [
        ("un", 1, ["unpin"]),
        ("gre", 1, ["greet"]),
        ("forget --k", 2, ["--keep"]),
        ("greet --c", 2, ["--code"]),
        ("selftest cr", 2, ["crash"]),
        ("gone --x", 2, [""]),
    ],
)
def test_bash_takes_the_script_and_completes(good: Any, tmp_path: Path, words: str, at: int, wanted: list[str]) -> None:
    good.add("bad", "import no_such_library_at_all")  # which must not write into somebody's prompt
    script = tmp_path / "bin" / "resilio"
    script.parent.mkdir()
    script.write_text(f'#!/bin/sh\nexec {sys.executable} -m resilio "$@"\n')
    script.chmod(0o755)
    env = {**os.environ, "PATH": f"{script.parent}{os.pathsep}{os.environ['PATH']}"}
    done = subprocess.run(
        ["bash", "--norc", "-c", BASH.format(words=words, at=at)],
        env=env,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.stderr == ""
    assert done.stdout.splitlines() == ["complete -o default -F _resilio_completion resilio", *wanted]


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_the_script_is_printed_for_each_shell_and_nothing_is_written(
    resilio: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, shell: str
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    code, out, err = resilio("completion", shell)
    assert (code, err) == (0, "")
    assert f"_RESILIO_COMPLETE=complete_{shell}" in out
    page = json.loads(resilio("completion", shell, "--json")[1])
    assert page == {"shell": shell, "script": out.rstrip("\n")}
    assert list(tmp_path.iterdir()) == []
    assert resilio("completion", "cmd.exe")[0] == 2
