"""Imports every file of `sources.py` in a process with little memory, and writes what came of each as a line of JSON.

python source_child.py <scratch folder> <results> [names]
"""

from __future__ import annotations

import json
import logging
import os
import resource
import shutil
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

import torch
from hostile import hostile_child
from hostile.sources import SOURCES, control


def main_child(scratch: Path, results: Path, *names: str) -> None:
    os.environ["CANARY"] = str(scratch / "canary")
    sys.addaudithook(hostile_child.watch)
    said = hostile_child.command("import", str(control(scratch)), "--to", str(scratch / "first"))
    assert said.startswith("exit 0"), said  # and everything is imported now
    logging.disable(logging.CRITICAL)
    base = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    with results.open("w") as out:
        for name in names or SOURCES:
            print(name, file=sys.stderr, flush=True)
            folder, run = scratch / "source", scratch / "run"
            folder.mkdir()
            resource.setrlimit(resource.RLIMIT_AS, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
            path = SOURCES[name][0](folder)
            limit = base + hostile_child.ROOM
            resource.setrlimit(resource.RLIMIT_AS, (limit, resource.RLIM_INFINITY))
            hostile_child.seen.clear()
            started, hostile_child.watching = time.monotonic(), True
            said = hostile_child.command("import", str(path), "--to", str(run))
            hostile_child.watching = False
            line = {
                "name": name,
                "said": said,
                "seen": [*hostile_child.seen],
                "canary": (scratch / "canary").exists(),
                "made": run.exists(),
                "outside": sorted(one.name for one in scratch.iterdir()),
                "seconds": round(time.monotonic() - started, 2),
            }
            out.write(json.dumps(line) + "\n")
            out.flush()
            shutil.rmtree(folder)
            shutil.rmtree(run, ignore_errors=True)


if __name__ == "__main__":
    torch.set_num_threads(1)
    main_child(Path(sys.argv[1]), Path(sys.argv[2]), *sys.argv[3:])
