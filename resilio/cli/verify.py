"""`resilio verify`: is every byte what was saved?"""

from __future__ import annotations

from contextlib import suppress
from typing import Annotated

import typer

from .errors import Exit
from .options import Debug, Json, Url, Which

__all__ = ["verify"]


def verify(
    url: Url,
    which: Which = None,
    every: Annotated[bool, typer.Option("--all", help="Every checkpoint, off the lineage too.")] = False,
    as_json: Json = False,
    debug: Debug = False,
) -> int:
    """Read a checkpoint whole and compare every byte with its digests; name what is damaged. Plugins may find more.

    Exit codes: 0 every byte is what was saved; 1 something is not; 3 nothing is, but a plugin could not tell; 4 there
    is no such checkpoint.
    """
    from ..errors import ConfigError, FormatError, IntegrityError, NoCheckpointError, NotFoundError
    from ..hooks import Calls, host, open_storage
    from ..records import keys
    from ..records.verify import verify_checkpoint
    from . import look, output, pages

    if every and which is not None:
        raise ConfigError("verify takes a STEP or --all, not both.")
    results, findings = [], []
    calls = Calls(host())
    with open_storage(url) as storage:
        catalog = look.catalog_of(storage)
        for ref in reversed(catalog.commits) if every else [look.choose(catalog, which)]:
            try:
                with output.progress_bar(keys.stem(ref)) as progress:
                    damage = verify_checkpoint(storage, ref, progress)
            except NoCheckpointError:
                if not every:
                    raise
                continue  # somebody's sweep took it since the listing
            with suppress(FormatError, IntegrityError, NotFoundError):  # such a record is among the damage already
                damage += calls.verify(catalog.info(ref), storage)
            findings += damage
            results.append(pages.verify_json(ref, damage, on_lineage=ref in catalog.lineage))
            if not as_json:
                output.emit("".join(f"{line}\n" for line in pages.verify_lines(ref, damage)))
    good = all(result["good"] for result in results)
    if as_json:
        output.emit_json({"url": storage.url, "good": good, "checkpoints": results})
    if good:
        return Exit.GOOD
    return Exit.INCONCLUSIVE if all(map(pages.is_open, findings)) else Exit.WANTING
