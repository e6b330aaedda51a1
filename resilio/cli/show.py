"""`resilio show`: what one checkpoint holds."""

from __future__ import annotations

import time

from .errors import Exit
from .options import Debug, Json, Url, Which

__all__ = ["show"]


def show(url: Url, which: Which = None, as_json: Json = False, debug: Debug = False) -> int:
    """Show what one checkpoint holds, without reading its data.

    Exit codes: 0 good; 1 its records are damaged; 4 there is no such checkpoint.
    """
    from ..hooks import open_storage
    from ..records.manifest import load_manifest
    from . import look, output, pages

    with open_storage(url) as storage:
        catalog = look.catalog_of(storage)
        ref = look.choose(catalog, which)
        page = pages.show_json(catalog.info(ref), load_manifest(storage, catalog.read(ref)))
    if as_json:
        output.emit_json({"url": storage.url, **page})
    else:
        output.emit_page(*pages.show_page(page, now_s=time.time()))
    return Exit.GOOD
