"""Arguments and options that several commands share, so that they mean the same everywhere."""

from __future__ import annotations

from typing import Annotated

import typer

__all__ = ["Debug", "Json", "Step", "Trust", "Url", "Which"]

_STEP = "A step (4000: of the lineage) or one exact checkpoint (000004000-g000002, off the lineage too)."

Url = Annotated[
    str,
    typer.Argument(metavar="URL", help="The run, e.g. file:///data/run-17 or s3://bucket/run-17.", show_default=False),
]
Which = Annotated[str | None, typer.Argument(metavar="STEP", help=f"{_STEP} Default: the newest.", show_default=False)]
Step = Annotated[str, typer.Argument(metavar="STEP", help=_STEP, show_default=False)]
Json = Annotated[bool, typer.Option("--json", help="One JSON document on stdout; errors as JSON on stderr.")]
Debug = Annotated[bool, typer.Option("--debug", help="Show the traceback of an error. RESILIO_DEBUG=1 does the same.")]
Trust = Annotated[
    bool, typer.Option("--trust", help="Unpickle what is refused otherwise: it may run anything its author put there.")
]
