"""`resilio quarantine` and `resilio release`: a person's finding that a checkpoint must not be resumed from."""

from __future__ import annotations

from typing import Annotated

import typer

from .errors import Exit
from .options import Debug, Json, Step, Url

__all__ = ["quarantine", "release"]


def quarantine(
    url: Url,
    step: Step,
    because: Annotated[
        str,
        typer.Option(metavar="TEXT", help="Why, for whoever finds it: 'loss is nan from here on'.", show_default=False),
    ],
    as_json: Json = False,
    debug: Debug = False,
) -> int:
    """Let no job resume from a checkpoint by itself, until it is released. Its data stays as and where it is.

    Exit codes: 0 in quarantine, for this reason since now or before; 4 there is no such checkpoint.
    """
    from ..hooks import open_storage
    from ..records import keys
    from ..records import quarantine as records
    from . import look, output

    with open_storage(url) as storage:
        ref = look.choose(look.catalog_of(storage), step)
        new = records.quarantine(storage, ref, because) is not None
    if as_json:
        output.emit_json({"url": storage.url, **look.named(ref), "because": because, "new": new})
    else:
        before = "" if new else " (as before)"
        output.emit(output.clean(f"in quarantine{before}: {keys.stem(ref)}: {because}") + "\n")
    return Exit.GOOD


def release(url: Url, step: Step, as_json: Json = False, debug: Debug = False) -> int:
    """Take a checkpoint out of quarantine, whoever put it there: jobs may resume from it again.

    Exit codes: 0 done; 4 there is no such checkpoint, or it is not in quarantine.
    """
    from ..errors import NoCheckpointError
    from ..hooks import open_storage
    from ..records import keys
    from ..records import quarantine as records
    from . import look, output

    with open_storage(url) as storage:
        # A record may be left of a checkpoint that is gone altogether.
        ref = look.exact(step) or look.choose(look.catalog_of(storage), step)
        found = records.quarantined(storage).get(ref)
        count = records.release(storage, ref)
    if not count:
        raise NoCheckpointError(f"{storage.url}: {keys.stem(ref)} is not in quarantine.")
    why = found.why if found else ""
    if as_json:
        output.emit_json({"url": storage.url, **look.named(ref), "records": count, "because": why})
    else:
        output.emit(output.clean(f"released {keys.stem(ref)}: {output.count(count, 'record')} removed: {why}") + "\n")
    return Exit.GOOD
