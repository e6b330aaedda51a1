"""Imports go one way, torch begins where it may, and DCP's non-public names stay in one file.

`violations` reads the source only, so it also sees imports that no test runs. Its own tests plant each kind of
violation in a small tree and see it found.
"""

from __future__ import annotations

import ast
import subprocess
import sys
import warnings
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]

# From the bottom up. A room imports from the rows below its own; the bottom row's modules also from each other.
LAYERS = (
    ("errors", "types", "events", "clock", "failpoints", "native", "registry", "safe_types"),
    ("storage", "policies"),
    ("records",),
    ("ranks", "state"),
    ("runtime", "hooks", "engine"),
    ("manager",),
    ("__init__",),  # the public names
    ("drill",),
    ("cli",),
    ("__main__", "testing"),
)
LAYER = {room: height for height, row in enumerate(LAYERS) for room in row}
NO_TORCH = {*LAYERS[0], *LAYERS[1], *LAYERS[2], "hooks", "__init__", "cli", "__main__"}
PUBLIC = {"errors", "events", "types", "testing", "policies", "failpoints", "storage", "safe_types"}
DCP, DCP_FILE = "torch.distributed.checkpoint", "resilio/engine/dcp.py"
LINES_WANTED, LINES_MAX = 400, 420


def violations(root: Path) -> list[str]:
    """What breaks a rule in the source under `root`, as `file:line: what`."""
    return [
        f"{path.relative_to(root)}:{line}: {what}"
        for top in ("resilio", "plugins", "drills")
        for path in sorted((root / top).rglob("*.py"))
        for line, what in _of_file(path, path.relative_to(root))
    ]


def _of_file(path: Path, where: Path) -> Iterator[tuple[int, str]]:
    text = path.read_text("utf-8")
    if where.parts[0] == "resilio" and len(text.splitlines()) > LINES_MAX:
        yield 1, f"more than {LINES_MAX} lines"
    tree = ast.parse(text)
    for line, name, deferred in _imports(tree, list(where.parent.parts)):
        if where.parts[0] == "resilio":
            yield from ((line, what) for what in _inside(where.parts[1].removesuffix(".py"), name, deferred))
        elif name.startswith("resilio.") and _room(name) not in {"__init__", *PUBLIC}:
            yield line, f"imports {name}, which is not public"
    if where.as_posix() != DCP_FILE:
        for line, name in sorted(_dotted(tree, where)):
            if name.startswith(f"{DCP}.") and any(_private(part) for part in name.removeprefix(DCP).split(".")):
                yield line, f"uses {name}; DCP's non-public names belong in {DCP_FILE}"


def _inside(room: str, name: str, deferred: bool) -> Iterator[str]:
    if room not in LAYER:
        yield f"the room {room} has no place in the layers"
    elif name.split(".")[0] == "torch" and room in NO_TORCH and not deferred:
        yield f"{room} imports torch"
    elif name.split(".")[0] == "resilio" and (other := _room(name)) != room:
        if LAYER[other] > LAYER[room]:
            yield f"{room} imports {other}, which is above it"
        elif LAYER[other] == LAYER[room] != 0:
            yield f"{room} imports {other}, which is beside it"


def _imports(tree: ast.Module, package: list[str]) -> Iterator[tuple[int, str, bool]]:
    """Each imported name in full, its line, and whether it is imported only when some function runs."""
    functions = [node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)]
    inside = {id(node) for function in functions for node in ast.walk(function)}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name, id(node) in inside) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else []
            module = ".".join([*base, *([node.module] if node.module else [])])
            yield from ((node.lineno, f"{module}.{alias.name}", id(node) in inside) for alias in node.names)


def _dotted(tree: ast.Module, where: Path) -> set[tuple[int, str]]:
    """Every imported name and every `a.b.c` in full, with aliases resolved: `dcp._x` after `import … as dcp`."""
    found = {(line, name) for line, name, _ in _imports(tree, list(where.parent.parts))}
    aliases = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import | ast.ImportFrom):
            module = f"{node.module}." if isinstance(node, ast.ImportFrom) else ""
            aliases.update({alias.asname or alias.name: module + alias.name for alias in node.names})
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute):
            first, _, rest = ast.unparse(node).partition(".")
            found.add((node.lineno, f"{aliases.get(first, first)}.{rest}"))
    return found


def _private(part: str) -> bool:
    return part.startswith("_") and not part.startswith("__")


def _room(name: str) -> str:
    """`resilio.records.keys.stem` -> records; what is no room is a name of `resilio` itself."""
    part = name.partition(".")[2].partition(".")[0]
    return part if part in LAYER else "__init__"


def test_the_house_keeps_its_rules() -> None:
    assert violations(ROOT) == []


def test_files_stay_short() -> None:
    for path in sorted((ROOT / "resilio").rglob("*.py")):
        if (lines := len(path.read_text("utf-8").splitlines())) > LINES_WANTED:
            warnings.warn(f"{path.relative_to(ROOT)} has {lines} lines: is it two ideas?", stacklevel=1)


@pytest.mark.parametrize(
    ("file", "source", "what"),
    [
        ("resilio/errors.py", "from .storage.base import Storage", "errors imports storage, which is above"),
        ("resilio/records/x.py", "from ..state import flat", "records imports state, which is above"),
        ("resilio/records/x.py", "from .. import hooks", "records imports hooks, which is above"),
        ("resilio/records/deep/x.py", "from ...engine import dcp", "records imports engine, which is above"),
        ("resilio/records/__init__.py", "from ..manager import CheckpointManager", "records imports manager"),
        ("resilio/records/x.py", "import resilio.manager", "records imports manager, which is above"),
        ("resilio/records/x.py", "def f():\n    from resilio.cli import main", "records imports cli, which is above"),
        ("resilio/manager/x.py", "from resilio import save_every", "manager imports __init__, which is above"),
        ("resilio/manager/x.py", "from .. import open_storage", "manager imports __init__, which is above"),
        ("resilio/state/x.py", "if TYPE_CHECKING:\n    from ..engine import x", "state imports engine"),
        ("resilio/storage/x.py", "from ..policies import keep_all", "storage imports policies, which is beside it"),
        ("resilio/new/x.py", "import os", "the room new has no place"),
        ("resilio/records/x.py", "import torch", "records imports torch"),
        ("resilio/types.py", "import torch.nn as nn", "types imports torch"),
        ("resilio/policies/x.py", "try:\n    from torch import Tensor\nexcept ImportError: pass", "imports torch"),
        ("resilio/hooks/x.py", "class A:\n    import torch", "hooks imports torch"),
        ("resilio/cli/x.py", "from torch.distributed import init_process_group", "cli imports torch"),
        ("resilio/engine/x.py", "from torch.distributed.checkpoint._nested_dict import f", "_nested_dict.f; DCP's"),
        ("resilio/engine/x.py", "from torch.distributed.checkpoint.filesystem import _StorageInfo", "._StorageInfo"),
        ("resilio/engine/x.py", "def f():\n    import torch.distributed.checkpoint._traverse", "._traverse"),
        ("resilio/engine/x.py", "import torch.distributed.checkpoint as dcp\ndcp._x.y()", "checkpoint._x"),
        ("resilio/engine/x.py", "from torch.distributed import checkpoint\ncheckpoint.api._y", "checkpoint.api._y"),
        ("drills/resilio_drills/x.py", "import torch.distributed.checkpoint as d\nd._x", "checkpoint._x"),
        ("resilio/engine/x.py", "\n" * LINES_MAX + "pass", "more than"),
        ("plugins/resilio_x/x.py", "from resilio.records.keys import stem", "records.keys.stem, which is not public"),
        ("plugins/resilio_x/x.py", "from resilio import engine", "resilio.engine, which is not public"),
        ("drills/resilio_drills/x.py", "def f():\n    import resilio.manager.save", "which is not public"),
    ],
)
def test_a_planted_violation_is_found(tmp_path: Path, file: str, source: str, what: str) -> None:
    (tmp_path / file).parent.mkdir(parents=True)
    (tmp_path / file).write_text(source)
    found = violations(tmp_path)
    assert len(set(found)) >= 1
    assert all(line.startswith(f"{file}:") and what in line for line in found), found


@pytest.mark.parametrize(
    ("file", "source"),
    [
        ("resilio/types.py", "from .errors import ConfigError\nfrom . import clock"),
        (
            "resilio/records/x.py",
            "from ..errors import ConfigError\nfrom ..storage.base import Storage\nfrom . import y",
        ),
        ("resilio/records/x.py", "from .. import failpoints"),
        ("resilio/cli/x.py", "def drill():\n    import torch\n    from ..manager import restore"),
        ("resilio/cli/x.py", "from .. import __version__\nfrom ..hooks import open_storage"),
        ("resilio/engine/dcp.py", "from torch.distributed.checkpoint.filesystem import _StorageInfo"),
        ("resilio/engine/x.py", "import torch.distributed.checkpoint as dcp\ndcp.save\ndcp.api.__name__\nself._x.y"),
        ("resilio/engine/x.py", "from .dcp import StorageInfo\nfrom torch._C import _x"),
        (
            "plugins/resilio_x/x.py",
            "import resilio\nfrom resilio import open_storage\nfrom resilio.errors import StorageError",
        ),
        (
            "drills/resilio_drills/x.py",
            "from resilio.policies import keep_last\nfrom resilio import failpoints, errors",
        ),
    ],
)
def test_what_is_allowed_is_let_be(tmp_path: Path, file: str, source: str) -> None:
    (tmp_path / file).parent.mkdir(parents=True)
    (tmp_path / file).write_text(source)
    assert violations(tmp_path) == []


@pytest.mark.parametrize(
    "code",
    [
        "import resilio",
        "import resilio.policies, resilio.hooks, resilio.cli",
        "from resilio import save_every, keep_last, open_storage, errors, __version__; import resilio as r; dir(r)",
        "from resilio.cli import main\ntry: main(['ls', 'file:///no/run'])\nexcept SystemExit as e: assert e.code == 4",
    ],
)
def test_torch_stays_out(code: str) -> None:
    """The command answers at once because nothing on its way imports torch (seconds, tens of them when cold)."""
    code += "\nimport sys; sys.exit(3 if 'torch' in sys.modules else 0)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
