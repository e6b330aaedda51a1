"""docs/command.md names every command, option and exit code, and every field of the JSON, and no other."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import typer

from resilio.cli.app import app
from resilio.drill.crash import Report, ScenarioReport, Violation
from resilio.hooks.names import OWN_COMMANDS


def write_plain(folder: Path) -> Path:
    import torch
    import torch.distributed.checkpoint as dcp

    dcp.save({"model": {"w": torch.ones(3)}, "lr": 0.1}, checkpoint_id=str(folder))
    return folder


PAGE = (Path(__file__).resolve().parents[2] / "docs" / "command.md").read_text("utf-8")
SECTIONS = {head.strip(): text for head, text in re.findall(r"^##+ (.*?)\n(.*?)(?=^##+ |\Z)", PAGE, re.M | re.S)}
SHARED = {"--json", "--debug", "--help"}


def leaves() -> Iterator[tuple[str, Any]]:
    def walk(name: str, command: Any) -> Iterator[tuple[str, Any]]:
        if hasattr(command, "commands"):
            for sub, one in command.commands.items():
                yield from walk(f"{name} {sub}", one)
        else:
            yield name, command

    yield from walk("resilio", typer.main.get_command(app))


def fields(section: str) -> set[str]:
    """The paths that a section's table of fields documents."""
    table = SECTIONS[section].partition("| field | is |\n|---|---|\n")[2]
    found = set()
    for path, what in re.findall(r"^\| `(.+?)` \|(.*)\|$", table, re.M):
        found |= {f"{path}.{field}" for field in fields("A checkpoint")} if "#a-checkpoint" in what else {path}
    return found


def told(value: Any, documented: set[str], path: str = "") -> Iterator[str]:
    """The paths of what is really there: a map whose keys are data is one that is documented so."""
    if isinstance(value, dict) and value:
        data = any(one.startswith(f"{path}{{}}") for one in documented)
        for key, item in value.items():
            yield from told(item, documented, f"{path}{{}}" if data else f"{path}.{key}".lstrip("."))
    elif isinstance(value, list) and value:
        for item in value:
            yield from told(item, documented, f"{path}[]")
    else:
        yield path + ("{}" if value == {} else "[]" if value == [] else "")


def test_each_command_and_option_is_on_the_page_and_each_section_is_a_command() -> None:
    commands = dict(leaves())
    assert {name.split()[1] for name in commands} <= set(OWN_COMMANDS)  # no plugin may have one
    assert {head for head in SECTIONS if head.startswith("resilio ")} == set(commands)
    for name, command in commands.items():
        text = SECTIONS[name]
        assert f"[`{name.removeprefix('resilio ')}`](#{name.replace(' ', '-')})" in PAGE
        for param in command.params:
            if param.param_type_name == "argument":
                assert (param.metavar or param.name.upper()).strip("[]") in text, (name, param.name)
            elif not set(param.opts) & SHARED:
                assert param.opts[0] in text, (name, param.opts)
        said = set(re.findall(r"--[a-z][a-z-]+", re.sub(r"```.*?```", "", text, flags=re.S)))
        real = {option for param in command.params for option in param.opts}
        assert said <= real, name
    for option in SHARED:
        assert f"`{option}`" in SECTIONS["Every command"]


def test_what_help_says_of_exit_codes_is_on_the_page() -> None:
    for name, command in leaves():
        codes = set(re.findall(r"(?<=[:;] )(\d+)(?= )", (command.help or "").partition("Exit codes")[2]))
        text = SECTIONS[name].partition("Exit codes:")[2]
        assert codes <= set(re.findall(r"\b(\d+)\b", text)), name


def test_the_json_of_each_command_is_as_documented(
    resilio: Any, installed: Any, branched: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    url = branched.url
    installed.add("bad", "import no_such_library_at_all")
    monkeypatch.setenv("RESILIO_DISABLE_PLUGINS", "bad")
    branched.commit(500, {"loss": 1.0}, about={"git": {"commit": "abc"}})
    branched.storage.put("step-000000050-g000001-aaaa/__0_0.distcp", b"x")
    violation = Violation("order", "saves", "objects", "step 1 is gone", "after put commits/x")
    scenario = ScenarioReport("saves", "objects", violations=[violation], violated={"order": 1})
    report = Report("memory://x", "commit-first", [scenario], {"races": "no create-if-absent"})
    monkeypatch.setattr("resilio.drill.crash.crash_selftest", lambda *args, **named: report)
    damaged = branched.folder / "commits" / "000000200-g000001.json"
    tree = branched.folder.parent / "tree"
    write_plain(tree / "step-5")
    write_plain(tree / "step-6").joinpath("__0_0.distcp").write_bytes(b"")
    runs: dict[str, list[tuple[str, ...]]] = {
        "resilio pin": [("pin", url, "100", "--because", "x")],
        "resilio unpin": [("unpin", url, "100")],
        "resilio quarantine": [("quarantine", url, "100", "--because", "x")],
        "resilio release": [("release", url, "100")],
        "resilio show": [("show", url), ("show", url, "--tensors"), ("show", str(tree), "5")],
        "resilio plan": [
            ("plan", url, "--save", "save_every(9)", "--keep", "keep_last(1)", "--steps", "9", "--step-seconds", "1")
        ],
        "resilio plugins": [("plugins",)],
        "resilio doctor": [("doctor", url), ("doctor", url, "--read-only")],
        "resilio completion": [("completion", "bash")],
        "resilio selftest crash": [
            ("selftest", "crash", "memory://x", "--plant", "commit-first"),
            ("selftest", "crash", "--list-plants"),
        ],
        "resilio diff": [("diff", url, "100", "300")],
        "resilio export": [("export", url, "--to", str(branched.folder.parent / "exported"))],
        "resilio import": [
            ("import", str(branched.folder.parent / "exported"), "--to", str(branched.folder.parent / "new"))
        ],
        "damage": [],
        "resilio ls": [("ls", url), ("ls", str(tree))],
        "resilio verify": [("verify", url, "--all"), ("verify", str(tree), "--all")],
        "resilio forget": [
            ("forget", url, "--keep", "keep_last(1)"),
            ("forget", url, "--keep", "keep_last(1)", "--yes"),
        ],
    }
    assert {head for head in SECTIONS if head.startswith("resilio ")} == set(runs) - {"damage"}
    for section, calls in runs.items():
        if section == "damage":
            damaged.chmod(0o644)
            damaged.write_bytes(b"{")
            continue
        documented, seen = fields(section), set()
        for call in calls:
            code, out, err = resilio(*call, "--json")
            assert err == "", (call, code)
            seen |= set(told(json.loads(out), documented))
        # What is null or empty here may hold more elsewhere.
        unknown = {
            path for path in seen if not any(re.match(rf"{re.escape(path)}($|[.\[{{])", one) for one in documented)
        }
        assert unknown == set(), section
        never = {path for path in documented if path not in seen and not _may_be_empty(path, seen)}
        assert never == set(), section


def _may_be_empty(path: str, seen: set[str]) -> bool:
    """Whether only the empty list or map was there of what `path` is in: told of elsewhere, by tests of its own."""
    return any(one.endswith(("[]", "{}")) and path.startswith(one) for one in seen) and not any(
        one.startswith(path.rpartition(".")[0] + ".") for one in seen
    )
