"""`plugins/example` built, installed and used from the command line: the road of everybody who writes a plugin."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import textwrap
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]
EXAMPLE = ROOT / "plugins/example"

TRAIN = """
    import sys
    from resilio import CheckpointManager

    url, counter = sys.argv[1], {"n": 0}
    with CheckpointManager(url, {"counter": counter}, mode="sync") as ckpt:
        ckpt.restore()
        for step in range(ckpt.next_step, 5):
            counter["n"] = step * 10
            ckpt.save(step)
        assert ckpt.verify(2) == []

    counter["n"] = 0
    with CheckpointManager(url, {"counter": counter}) as ckpt:
        assert ckpt.restore().step == 4
    assert counter == {"n": 40}
"""


@dataclass
class Installed:
    """A folder that the example was installed to, and a run that a job with it has saved."""

    target: Path
    url: str
    events: Path

    def python(self, *args: str, **env: str) -> subprocess.CompletedProcess[str]:
        given = {**os.environ, "PYTHONPATH": str(self.target), "RESILIO_EXAMPLE_EVENTS": str(self.events), **env}
        return subprocess.run(
            [sys.executable, *args],
            cwd=self.target,
            env=given,
            capture_output=True,
            text=True,
            timeout=240,
            check=False,
        )

    def resilio(self, *args: str, code: int = 0, **env: str) -> str:
        done = self.python("-m", "resilio", *args, **env)
        assert done.returncode == code, done.stdout + done.stderr
        return done.stdout if code == 0 else done.stderr

    def listed(self) -> list[int]:
        return sorted(one["step"] for one in json.loads(self.resilio("ls", self.url, "--json"))["checkpoints"])


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Installed:
    folder = tmp_path_factory.mktemp("stranger")
    source, target = folder / "source", folder / "target"
    shutil.copytree(EXAMPLE, source)  # a build may leave something where it builds
    install = [sys.executable, "-m", "pip", "install", "--quiet", "--no-index", "--no-deps", "--no-build-isolation"]
    subprocess.run([*install, "--no-cache-dir", "--target", str(target), str(source)], check=True, timeout=240)
    made = Installed(target, f"sqlite://{folder}/run.db", folder / "events.jsonl")
    done = made.python("-c", textwrap.dedent(TRAIN), made.url)
    assert done.returncode == 0, done.stdout + done.stderr
    return made


def test_its_wheel_holds_the_package_and_its_entry_point(installed: Installed) -> None:
    found = {path.relative_to(installed.target).as_posix() for path in installed.target.rglob("*") if path.is_file()}
    modules = {one for one in found if one.endswith(".py")}
    assert modules == {f"resilio_example/{path.name}" for path in (EXAMPLE / "resilio_example").glob("*.py")}
    (points,) = installed.target.glob("*.dist-info/entry_points.txt")
    assert points.read_text().split() == ["[resilio]", "example", "=", "resilio_example"]


def test_it_is_listed_with_all_that_it_brings(installed: Installed) -> None:
    listed = {one["name"]: one for one in json.loads(installed.resilio("plugins", "--json"))["plugins"]}
    example = listed["example"]
    assert (example["state"], example["error"]) == ("active", None)
    assert (example["distribution"], example["version"]) == ("resilio-example", "0.1.0")
    brings = {"schemes": ["sqlite"], "policies": ["keep_first"], "commands": ["sizes"], "drills": []}
    assert {kind: example[kind] for kind in brings} == brings
    assert example["hooks"] == [
        "resilio_add_commands",
        "resilio_on_event",
        "resilio_register_policies",
        "resilio_register_storage",
    ]


def test_it_is_cheap_to_import(installed: Installed) -> None:
    code = "import resilio_example, sys; print(*{'torch', 'sqlite3', 'typer'} & set(sys.modules))"
    assert installed.python("-c", code).stdout.strip() == ""


def test_its_storage_is_opened_by_every_command(installed: Installed) -> None:
    assert installed.listed()[-1] == 4
    installed.resilio("verify", installed.url)
    checks = json.loads(installed.resilio("doctor", installed.url, "--json"))["checks"]
    assert {one["name"] for one in checks} >= {"storage", "create-if-absent", "large objects", "second process"}
    assert [one for one in checks if one["state"] != "ok"] == []
    refused = installed.resilio("ls", installed.url, code=2, RESILIO_DISABLE_PLUGINS="example")
    assert "no installed plugin offers storage for sqlite://" in refused


def test_looking_at_nothing_makes_nothing(installed: Installed) -> None:
    assert "is empty" in installed.resilio("sizes", f"{installed.url}.none", code=4)
    assert not Path(f"{installed.url.removeprefix('sqlite://')}.none").exists()
    assert "give an absolute path" in installed.resilio("ls", "sqlite://run.db", code=2)


def test_its_command_tells_what_takes_how_much(installed: Installed) -> None:
    assert "Tell what takes how much." in installed.resilio("--help")
    told = json.loads(installed.resilio("sizes", installed.url, "--json"))
    folders = [folder for folder in told if re.fullmatch(r"step-\d{9}-g\d{6}-\w+", folder)]
    assert len(folders) >= 3
    assert all(told[folder]["bytes"] > 1000 and told[folder]["objects"] > 3 for folder in folders)
    lines = installed.resilio("sizes", installed.url).splitlines()
    assert [line.split()[-1] for line in lines] == [*told]


def test_its_policy_can_be_read_from_text(installed: Installed) -> None:
    assert "at least 1" in installed.resilio("forget", installed.url, "--keep", "keep_first(0)", code=2)
    forgotten = installed.resilio("forget", installed.url, "--keep", "keep_first(2)", "--yes")
    assert "one of the first 2" in forgotten
    assert installed.listed() == [1, 2, 4]  # and the newest, which no policy can let go
    code = "from resilio.policies import *; from resilio_example.policy import *; print(KeepFirst(2) | keep_last(3))"
    assert installed.python("-c", code).stdout == "keep_first(2) | keep_last(3)\n"


def test_its_sink_wrote_down_what_happened(installed: Installed) -> None:
    events: list[dict[str, Any]] = [json.loads(line) for line in installed.events.read_text().splitlines()]
    saves = [
        (one["event"], one.get("step", one.get("ref", {}).get("step"))) for one in events if "Save" in one["event"]
    ]
    assert saves == [(kind, step) for step in (1, 2, 3, 4) for kind in ("SaveStarted", "Saved")]
    assert [one["event"] for one in events if "Save" not in one["event"]] == ["Restored", "Verified", "Restored"]
    assert events[-1]["ref"] == {"generation": 1, "step": 4}
    assert {one["url"] for one in events} == {installed.url}


def test_its_own_tests_pass(installed: Installed) -> None:
    shutil.copytree(EXAMPLE / "tests", installed.target / "tests")
    # SQLite has no pages, and to commit a thousand times takes long where the disk is slow.
    few = ["-k", "not more_objects_than_a_page_holds"]
    done = installed.python("-m", "pytest", "-q", "-p", "no:cacheprovider", *few, "tests")
    assert done.returncode == 0, done.stdout
    assert re.search(r"\d\d passed", done.stdout)


def test_the_pages_show_its_very_code() -> None:
    page = (ROOT / "docs/plugins.md").read_text("utf-8")
    shown = dict(re.findall(r"^<!-- file: (\S+) -->\n```\w+\n(.*?)^```", page, re.M | re.S))
    files = [path for path in EXAMPLE.rglob("*") if path.suffix in (".py", ".toml")]
    assert {path.relative_to(EXAMPLE).as_posix() for path in files} <= set(shown)
    for path in files:
        assert shown[path.relative_to(EXAMPLE).as_posix()] == path.read_text("utf-8")
