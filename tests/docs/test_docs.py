"""The documentation is true where a machine can tell: its code runs, its links lead somewhere, its lists are complete.

A fenced ``python`` block is executed, in order, one namespace per page, in an empty folder. An HTML comment on the line
before says otherwise: ``fragment`` (compiled only), ``file: name.py`` (written there first), ``alone`` (run in a Python
of its own).
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import textwrap
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from resilio import CheckpointManager, errors
from resilio.cli.errors import Exit
from resilio.records import keys, schema, values
from resilio.testing.worlds import run_world

ROOT = Path(__file__).resolve().parents[2]
PAGES = sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/*.md"), *ROOT.glob("plugins/*.md"), *ROOT.glob("drills/*.md")])
FENCE = re.compile(
    r"^(?:<!-- (?P<mark>fragment|alone|file: (?P<file>\S+)) -->\n)?```(?P<language>\w+)\n(?P<code>.*?)^```", re.M | re.S
)


@dataclass
class Block:
    mark: str
    file: str | None
    language: str
    code: str
    line: int


def blocks(page: Path) -> list[Block]:
    text = page.read_text("utf-8")
    return [
        Block(m["mark"] or "", m["file"], m["language"], m["code"], text.count("\n", 0, m.start("code")))
        for m in FENCE.finditer(text)
    ]


def python(code: str, folder: Path) -> str:
    """Run `code` in a Python of its own, in `folder`, as a stranger would."""
    env = {**os.environ, "PYTHONPATH": str(folder), "PYTHONWARNINGS": "error::UserWarning:__main__"}
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=folder, env=env, capture_output=True, text=True, timeout=240, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def ids(page: Path) -> str:
    return str(page.relative_to(ROOT))


@pytest.mark.parametrize("page", PAGES, ids=ids)
def test_the_code_on_the_page_runs(page: Path, tmp_path: Path) -> None:
    # Blocks that are run alone belong between the others: each is a subprocess of the page's own.
    lines: list[str] = []
    for block in blocks(page):
        if block.language == "toml":
            install(block.code, tmp_path)
        if block.language != "python":
            continue
        where = f"{page.name}:{block.line}"
        compile(block.code, where, "exec")
        if block.file:
            (tmp_path / block.file).parent.mkdir(parents=True, exist_ok=True)
            (tmp_path / block.file).write_text(block.code)
        elif block.mark == "alone":
            lines.append(f"import subprocess, sys; subprocess.run([sys.executable, '-c', {block.code!r}], check=True)")
        elif block.mark != "fragment":
            lines.append(f"exec(compile({block.code!r}, {where!r}, 'exec'))")
    if lines:
        python("\n".join(lines), tmp_path)


def install(toml: str, folder: Path) -> None:
    """What an installer would make of the page's `pyproject.toml`."""
    name = re.search(r'^name = "(.+)"', toml, re.M)[1]
    points = toml.split("[project.entry-points.resilio]")[1].replace('"', "")
    info = folder / f"{name.replace('-', '_')}-0.1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 0.1.0\n")
    (info / "entry_points.txt").write_text(f"[resilio]{points}")


def test_code_that_fails_on_a_page_is_seen(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text("```python\nx = 1\n```\n\n```python\nassert x == 2\n```\n")
    assert [block.line for block in blocks(page)] == [1, 5]
    with pytest.raises(AssertionError, match="AssertionError"):
        test_the_code_on_the_page_runs(page, tmp_path)


def sharded(rank: int, world: int, folder: str) -> list[list[float]]:
    torch.manual_seed(0)
    model = nn.Linear(30, 21)
    fully_shard(model, mesh=init_device_mesh("cpu", (world,)))
    with CheckpointManager(f"{folder}/runs/first", {"model": model}, mode="sync") as ckpt:
        ckpt.restore()
        ckpt.save(1)
        with torch.no_grad():
            model.weight.mul_(-3)
        ckpt.save(2)
    return model.weight.full_tensor().tolist()


def test_the_reader_on_the_page_reads_a_sharded_tensor_without_resilio_and_torch(tmp_path: Path) -> None:
    saved = run_world(sharded, 2, str(tmp_path))[0]
    reader = next(block for block in blocks(ROOT / "docs/format.md") if block.mark == "alone")
    check = f"""
        import sys
        assert tensor.tolist() == {saved!r}
        assert not {{"torch", "resilio"}} & set(sys.modules), "it needs them after all"
        """
    python(reader.code + textwrap.dedent(check), tmp_path)
    assert len(reader.code.strip().splitlines()) <= 20


def run_fragment(rank: int, world: int, code: str) -> int | None:
    names: dict[str, Any] = {
        "torch": torch,
        "CheckpointManager": CheckpointManager,
        "model": nn.Sequential(nn.Linear(8, 16), nn.Dropout(0.1), nn.Linear(16, 1)),
    }
    exec(code + "    ckpt.save(1)\n", names)
    return names["ckpt"].checkpoints()[0].world


def test_the_sharded_fragment_of_the_training_page_works_on_two_ranks(tmp_path: Path) -> None:
    (fragment,) = [block for block in blocks(ROOT / "docs/training.md") if block.mark == "fragment"]
    code = fragment.code.replace("file:///shared", f"file://{tmp_path}").replace("dist.init_process_group(", "(")
    assert run_world(run_fragment, 2, code) == [2, 2]


@pytest.mark.parametrize("page", PAGES, ids=ids)
def test_relative_links_lead_somewhere(page: Path) -> None:
    text = re.sub(r"```.*?```", "", page.read_text("utf-8"), flags=re.S)
    for target in re.findall(r"\]\(([^)\s]+)\)", text):
        path, _, anchor = target.partition("#")
        if "://" in target:
            continue
        file = (page.parent / path).resolve() if path else page
        assert file.exists(), f"{page.name} links to {target}"
        assert file.is_relative_to(ROOT), f"{page.name} links out of the repository: {target}"
        if anchor:
            assert anchor in anchors(file), f"{page.name} links to {target}"


def anchors(page: Path) -> set[str]:
    headings = re.findall(r"^#+ (.+)$", re.sub(r"```.*?```", "", page.read_text("utf-8"), flags=re.S), re.M)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("page", [*PAGES, ROOT / "docs/save.svg", ROOT / "LICENSE"], ids=ids)
def test_no_page_names_a_place_on_somebodys_machine(page: Path) -> None:
    text = page.read_text("utf-8")
    found = re.findall(r"(?<![\w/])/(?:home|root|tmp|Users|work|mnt|opt|var|private)/\S*", text)
    assert not found, f"{page.name} names {found}"
    assert str(ROOT) not in text


def test_the_list_of_errors_is_complete() -> None:
    text = (ROOT / "docs/errors.md").read_text("utf-8")
    rows = re.findall(r"^\| (— )?`(\w+)`( \*also (\w+)\*)? \|", text, re.M)
    assert sorted(name for _, name, _, _ in rows) == sorted(errors.__all__)
    parent = ""
    for indented, name, _, also in rows:
        cls = getattr(errors, name)
        twins = [base.__name__ for base in cls.__bases__ if not issubclass(base, errors.ResilioError)]
        assert ([also] if also else []) == (twins if name != "ResilioError" else []), name
        if indented:
            assert issubclass(cls, getattr(errors, parent)), name
        else:
            parent = name
            assert name == "ResilioError" or cls.__bases__[0] is errors.ResilioError, name


def test_the_exit_codes_are_complete() -> None:
    text = (ROOT / "docs/errors.md").read_text("utf-8").partition("## Exit codes")[2]
    assert [int(code) for code in re.findall(r"^\| (\d+) \|", text, re.M)] == sorted(Exit)


def section(heading: str) -> str:
    text = (ROOT / "docs/format.md").read_text("utf-8")
    return re.split(r"^#{2,3} ", text.partition(f"{heading}\n")[2], maxsplit=1, flags=re.M)[0]


@pytest.mark.parametrize(
    ("heading", "records"),
    [
        ("### `resilio.json`", [schema.RunRecord]),
        ("### `generations/<n>.json`", [schema.GenerationRecord]),
        ("### `commits/<step>-g<generation>.json`", [schema.CommitRecord]),
        ("### `pins/<step>-g<generation>-<hex>.json`", [schema.PinRecord]),
        ("### `leases/<step>-g<generation>-<hex>.json`", [schema.LeaseRecord]),
        ("### `quarantine/<step>-g<generation>-<hex>.json`", [schema.QuarantineRecord, schema.Finding]),
        ("### `manifest.json`", [schema.Manifest]),
        ("### `manifest-<rank>.json`", [schema.ManifestPart, schema.TensorRecord, schema.Piece]),
    ],
)
def test_every_field_of_every_record_is_described(heading: str, records: list[type[msgspec.Struct]]) -> None:
    first_cells = re.findall(r"^\| (.+?) \|", section(heading), re.M)
    described = [name for cell in first_cells for name in re.findall(r"`(\w+)`", cell)]
    named = [field.name for record in records for field in msgspec.structs.fields(record)]
    named += ["check" for record in records if issubclass(record, schema.Sealed)]
    assert sorted(described) == sorted(named)


def test_every_tag_and_reserved_folder_is_described() -> None:
    tags = set(re.findall(r"`(\$\w+)`", section("### Values")))
    assert tags == set(re.findall(r"``(\$\w+)``", values.__doc__ or ""))
    text = (ROOT / "docs/format.md").read_text("utf-8")
    for folder in (keys.PINS, keys.LEASES, keys.QUARANTINE, keys.PROOFS, keys.WITNESS, keys.JOURNAL):
        assert f"`{folder}`" in text


def test_every_test_named_in_the_readme_is_there() -> None:
    named = set(re.findall(r"`(test_\w+)`", (ROOT / "README.md").read_text("utf-8")))
    there = {
        name
        for path in (ROOT / "tests").rglob("test_*.py")
        for name in re.findall(r"^def (test_\w+)", path.read_text("utf-8"), re.M)
    }
    assert len(named) > 10
    assert named <= there
