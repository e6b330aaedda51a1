"""``resilio sizes URL``."""

from __future__ import annotations

import json
from collections import Counter
from typing import Annotated

import typer

from resilio import open_storage
from resilio.errors import NoCheckpointError


def sizes(
    url: Annotated[str, typer.Argument(metavar="URL", help="The run, e.g. file:///data/run-17.")],
    as_json: Annotated[bool, typer.Option("--json", help="One JSON document.")] = False,
) -> int:
    """Tell what takes how much: bytes and objects of each checkpoint's folder, and of the records.

    Exit codes: 0 told; 4 nothing there.
    """
    size_bytes: Counter[str] = Counter()
    objects: Counter[str] = Counter()
    with open_storage(url) as storage:
        for info in storage.list(""):
            folder = info.key.partition("/")[0]
            size_bytes[folder] += info.size_bytes
            objects[folder] += 1
    if not objects:
        raise NoCheckpointError(f"{storage.url} is empty")  # resilio's errors end in a sentence and an exit code
    if as_json:
        found = {folder: {"bytes": size_bytes[folder], "objects": objects[folder]} for folder in objects}
        typer.echo(json.dumps(found))
    else:
        for folder in objects:
            typer.echo(f"{size_bytes[folder]:>16,} bytes {objects[folder]:>6,} objects  {folder}")
    return 0
