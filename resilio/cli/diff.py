"""`resilio diff`: what is different in another checkpoint?"""

from __future__ import annotations

from typing import Annotated

import typer

from .errors import Exit
from .options import Debug, Json, Trust, Url

__all__ = ["diff"]

_B = "The other: as A. Default: the newest."


def diff(
    url: Url,
    a: Annotated[
        str, typer.Argument(metavar="A", help="The one: a step, or one exact checkpoint.", show_default=False)
    ],
    b: Annotated[str | None, typer.Argument(metavar="[B]", help=_B, show_default=False)] = None,
    other: Annotated[
        str | None, typer.Option("--other", metavar="URL", help="The run that B is of.", show_default=False)
    ] = None,
    match: Annotated[
        str | None,
        typer.Option(metavar="GLOB", help="Names to look at, e.g. 'model.*'. Default: all.", show_default=False),
    ] = None,
    trust: Trust = False,
    as_json: Json = False,
    debug: Debug = False,
) -> int:
    """Tell what changed from checkpoint A to B: tensors and values. Data is read only where digests differ.

    Exit codes: 0 they hold the same; 1 they do not, or one is damaged or holds a value that is refused; 4 there is
    no such checkpoint.
    """
    from contextlib import ExitStack
    from fnmatch import fnmatchcase

    from ..records.compare import compare_tensors, compare_values
    from . import diff_pages, look, output

    def wanted(name: str) -> bool:
        return match is None or fnmatchcase(name, match)

    with ExitStack() as stack:
        readers, sides = [], []
        for at, which in ((url, a), (other or url, b)):
            reader, said, _ = stack.enter_context(look.reading(at, which, wanted, trust))
            readers.append(reader)
            sides.append(said)
        one, two = readers
        values = compare_values(*({k: v for k, v in r.manifest.values.items() if wanted(k)} for r in readers))
        with output.progress_bar("comparing", in_bytes=False) as progress:
            names = {*one.manifest.tensors, *one.manifest.ties, *two.manifest.tensors, *two.manifest.ties}
            tensors = []
            for found in compare_tensors(one, two, wanted):
                tensors.append(found)
                if progress:
                    progress(len(tensors), len(names))
    page = diff_pages.diff_json(sides, tensors, values)
    if as_json:
        output.emit_json(page)
    else:
        output.emit_page(*diff_pages.diff_page(page))
    return Exit.GOOD if page["same"] else Exit.WANTING
