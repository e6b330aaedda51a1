"""`resilio pin` and `resilio unpin`: a person's reason to keep a checkpoint."""

from __future__ import annotations

from typing import Annotated

import typer

from .errors import Exit
from .options import Debug, Json, Step, Url

__all__ = ["pin", "unpin"]


def pin(
    url: Url,
    step: Step,
    because: Annotated[
        str,
        typer.Option(
            metavar="TEXT", help="Why, for whoever finds it in a year: 'the paper, table 2'.", show_default=False
        ),
    ],
    as_json: Json = False,
    debug: Debug = False,
) -> int:
    """Keep a checkpoint whatever policies say, until it is unpinned.

    Exit codes: 0 pinned; 4 there is no such checkpoint, or it was just being deleted.
    """
    from ..hooks import open_storage
    from ..records import holds, keys
    from . import look, output

    with open_storage(url) as storage:
        ref = look.choose(look.catalog_of(storage), step)
        record = holds.pin(storage, ref, because)
    if as_json:
        output.emit_json(
            {
                "url": storage.url,
                **look.named(ref),
                "because": record.because,
                "host": record.host,
                "pinned_at": output.iso(record.time_s),
                "time_s": record.time_s,
            }
        )
    else:
        output.emit(output.clean(f"pinned {keys.stem(ref)}: {record.because}") + "\n")
    return Exit.GOOD


def unpin(url: Url, step: Step, as_json: Json = False, debug: Debug = False) -> int:
    """Take all pins off a checkpoint: it lives as policies say again.

    Exit codes: 0 done; 4 there is no such checkpoint, or it is not pinned.
    """
    from ..errors import NoCheckpointError
    from ..hooks import open_storage
    from ..records import holds, keys
    from . import look, output

    with open_storage(url) as storage:
        catalog = look.catalog_of(storage)
        # A pin may be left of a checkpoint that is gone altogether.
        ref = look.exact(step) or look.choose(catalog, step)
        count = holds.unpin(storage, ref)
        stood_in = ref not in catalog.commits
    if not count:
        raise NoCheckpointError(f"{storage.url}: {keys.stem(ref)} is not pinned.")
    if as_json:
        output.emit_json({"url": storage.url, **look.named(ref), "pins": count, "has_record": not stood_in})
    else:
        output.emit(f"unpinned {keys.stem(ref)}: {output.count(count, 'pin')} removed\n")
        if stood_in:
            output.emit("Its commit record is gone: what it held is removed by the next sweep.\n")
    return Exit.GOOD
