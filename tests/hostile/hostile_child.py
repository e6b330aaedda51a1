"""Reads every variant of the corpus in every way there is, in a process of its own with little memory, and writes what
came of each as a line of JSON. A call that starts a process, runs code or imports what nobody asked for is noted, and
ends.

    python hostile_child.py <good run> <good plain folder> <scratch folder> <results>
"""

from __future__ import annotations

import contextlib
import functools
import io
import json
import logging
import os
import resource
import shutil
import sys
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

import numpy  # noqa: F401  what a reader may import is imported: all else is odd
import torch
import typer.main
from hostile.corpus import VARIANTS, Variant
from hostile.hostile_store import Run, copy, fingerprint, live_state

import resilio
from resilio import CheckpointManager
from resilio.cli import main
from resilio.errors import InternalError, ResilioError

ROOM = 3 << 30  # bytes of address space beyond what the imports have taken
FORBIDDEN = (
    "os.system",
    "os.exec",
    "os.fork",
    "os.forkpty",
    "os.posix_spawn",
    "os.spawn",
    "subprocess.Popen",
    "pty.spawn",
)
ODD = ("this", "antigravity", "__hello__", "ctypes.test", "pdb")

typer.main.get_command = functools.cache(typer.main.get_command)  # building it anew takes longer than the command

seen: list[str] = []
watching = False


def watch(event: str, args: tuple[Any, ...]) -> None:
    if not watching:
        return
    if event in FORBIDDEN or (event == "import" and args[0] in ODD):
        seen.append(f"{event} {args!r:.200}")
        raise RuntimeError(f"the corpus ran {event}")


def command(*args: str) -> str:
    """What the command says, and how it ends."""
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        try:
            main(list(args))
        except SystemExit as ended:
            code = ended.code
    text = out.getvalue() + err.getvalue()
    raw = sorted({char for char in text if not char.isprintable() and char != "\n"})
    unforeseen = " [unforeseen]" if "This is a bug" in text or "Traceback" in text else ""
    return f"exit {code}{f' [raw {raw}]' if raw else ''}{unforeseen}: {text if unforeseen else text[-300:]}"


def attempt(call: Callable[[dict[str, Any]], Any]) -> str:
    """What a restore does, in words: ``step 1 passed over: …``, or ``refused IntegrityError: …``."""
    live = live_state(-1.0)
    try:
        report = call(live)
    except ResilioError as error:
        touched = {float(value) for param in live["model"].parameters() for value in param.detach().flatten()} != {-1.0}
        ours = "broken" if isinstance(error, InternalError) else "refused"
        return f"{'touched' if touched else ours} {type(error).__name__}: {error}"
    except BaseException as error:
        return f"broken {type(error).__name__}: {error}\n{''.join(traceback.format_exception(error)[-4:])}"
    filled = {float(value) for param in live["model"].parameters() for value in param.detach().flatten()}
    passed = "; ".join(str(one) for one in report.passed_over)
    return f"step {report.step} filled {sorted(filled)} passed over: {passed}"


def managed(url: str) -> Callable[[dict[str, Any]], Any]:
    def call(live: dict[str, Any]) -> Any:
        with CheckpointManager(url, live) as ckpt:
            report = ckpt.restore()
            ckpt.checkpoints()
            return report

    return call


def read(variant: Variant, root: Path) -> dict[str, str]:
    url = str(root)
    found = {"restore": attempt(lambda live: resilio.restore(url, live))}
    commands = [("ls", url), ("show", url), ("show", url, "--tensors"), ("verify", url)]
    if variant.store is Run:
        found["manager"] = attempt(managed(url))
        found["restore 2"] = attempt(lambda live: resilio.restore(url, live, 2))
        commands = [("ls", url, "--json"), ("show", url, "2"), ("show", url, "2", "--tensors"), ("verify", url, "2")]
        commands += [("ls", url), ("verify", url)]
    for args in commands:
        found[" ".join(one for one in args if one != url)] = command(*args)
    return found


def main_child(good_run: Path, good_plain: Path, scratch: Path, results: Path) -> None:
    global watching
    os.environ["CANARY"] = str(scratch / "canary")
    sys.addaudithook(watch)
    command("--version")
    attempt(lambda live: resilio.restore(str(good_run), live))
    logging.disable(logging.CRITICAL)
    base = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (base + ROOM, base + ROOM))
    chosen = sys.argv[5:] or VARIANTS
    with results.open("w") as out:
        for name in chosen:
            variant = VARIANTS[name]
            print(name, file=sys.stderr, flush=True)
            root = copy(good_run if variant.store is Run else good_plain, scratch / "store")
            os.environ["OUTSIDE"] = str(scratch / "outside")
            (scratch / "outside").mkdir()
            variant.make(variant.store(root))
            before = fingerprint(root) | fingerprint(scratch / "outside")
            seen.clear()
            started, watching = time.monotonic(), True
            found = read(variant, root)
            watching = False
            after = fingerprint(root) | fingerprint(scratch / "outside")
            # What a manager's restore finds damaged it writes down, beside what is there.
            after = {name: what for name, what in after.items() if name in before or "quarantine" not in str(name)}
            line = {
                "name": name,
                "found": found,
                "seen": [*seen],
                "changed": sorted(set(before.items()) ^ set(after.items())),
                "canary": (scratch / "canary").exists(),
                "seconds": round(time.monotonic() - started, 2),
                "peak_bytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss << 10,
            }
            out.write(json.dumps(line) + "\n")
            out.flush()
            shutil.rmtree(root)
            shutil.rmtree(scratch / "outside")


if __name__ == "__main__":
    torch.set_num_threads(1)
    main_child(*map(Path, sys.argv[1:5]))
