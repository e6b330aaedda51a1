"""`resilio show`: what one checkpoint holds."""

from __future__ import annotations

import time
from typing import Annotated

import typer

from .errors import Exit
from .options import Debug, Json, Url, Which

__all__ = ["show"]


def show(
    url: Url,
    which: Which = None,
    tensors: Annotated[bool, typer.Option("--tensors", help="List every tensor, by name.")] = False,
    match: Annotated[
        str | None,
        typer.Option(metavar="GLOB", help="With --tensors: those alone, e.g. 'model.*.bias'.", show_default=False),
    ] = None,
    as_json: Json = False,
    debug: Debug = False,
) -> int:
    """Show what one checkpoint holds, without reading its data.

    Exit codes: 0 good; 1 its records are damaged; 4 there is no such checkpoint.
    """
    from ..errors import ConfigError
    from ..hooks import open_storage
    from ..records.manifest import load_manifest
    from . import look, output, pages, plain, plain_pages, tensor_pages

    if match is not None and not tensors:
        raise ConfigError("--match chooses among tensors: say --tensors too.")
    with open_storage(url) as storage:
        catalog, found = look.catalog_or_plain(storage)
        if catalog is None:
            one = plain.choose(storage, found, which)
            return plain_pages.show(storage, one, listed=tensors, match=match, as_json=as_json)
        ref = look.choose(catalog, which)
        info, manifest = catalog.info(ref), load_manifest(storage, catalog.read(ref))
        page = pages.show_json(info, manifest, look.in_quarantine(storage))
    if tensors:
        page["tensors"]["listed"] = tensor_pages.listed(manifest, match)
    if as_json:
        output.emit_json({"url": storage.url, **page})
    elif tensors:
        output.emit_page(*tensor_pages.listing(page["tensors"]["listed"], len(manifest.tensors) + len(manifest.ties)))
    else:
        output.emit_page(*pages.show_page(page, now_s=time.time()))
    return Exit.GOOD
