"""`resilio ls`: which checkpoints there are."""

from __future__ import annotations

import time

from .errors import Exit
from .options import Debug, Json, Url

__all__ = ["ls"]


def ls(url: Url, as_json: Json = False, debug: Debug = False) -> int:
    """List the checkpoints of a run, or of a folder of plain DCP checkpoints, newest first.

    Exit codes: 0 all can be read; 1 a commit record cannot; 4 nothing there.
    """
    from ..hooks import open_storage
    from . import look, output, pages

    with open_storage(url) as storage:
        catalog, found = look.catalog_or_plain(storage)
        if catalog is None:
            from . import plain_pages

            return plain_pages.ls(storage, found, as_json=as_json)
        infos, damaged = catalog.checkpoints()
        held = look.in_quarantine(storage)
    infos.sort(key=lambda info: info.ref, reverse=True)
    if as_json:
        output.emit_json(
            {
                "url": storage.url,
                "checkpoints": [pages.info_json(info, held) for info in infos],
                "damaged": [pages.damage_json(one) for one in damaged],
            }
        )
    else:
        output.emit_page(pages.ls_table(infos, held, now_s=time.time()), *map(pages.damage_line, damaged))
    return Exit.WANTING if damaged else Exit.GOOD
