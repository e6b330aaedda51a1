"""The commands and their options. A command returns its exit code; what it needs is imported when it runs."""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence
from typing import Annotated, NoReturn

import typer

from .errors import Exit, report
from .selftest import selftest

__all__ = ["app", "main"]

app = typer.Typer(
    name="resilio",
    help="Look at the checkpoints of a run: which there are, what they hold, whether they are intact.",
    epilog="Exit codes: 0 good, 1 found wanting, 2 usage, 3 inconclusive, 4 nothing there, 5 storage, 130 Ctrl-C.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
app.add_typer(selftest, name="selftest")

Url = Annotated[
    str,
    typer.Argument(metavar="URL", help="The run, e.g. file:///data/run-17 or s3://bucket/run-17.", show_default=False),
]
Which = Annotated[
    str | None,
    typer.Argument(
        metavar="STEP",
        help="A step (4000: of the lineage) or one exact checkpoint (000004000-g000002, off the lineage too). "
        "Default: the newest.",
        show_default=False,
    ),
]
All = Annotated[bool, typer.Option("--all", help="Every checkpoint, off the lineage too.")]
Json = Annotated[bool, typer.Option("--json", help="One JSON document on stdout; errors as JSON on stderr.")]
Debug = Annotated[bool, typer.Option("--debug", help="Show the traceback of an error. RESILIO_DEBUG=1 does the same.")]


def main(args: Sequence[str] | None = None) -> NoReturn:
    """Run the command and exit: the console script, and `python -m resilio`.

    Args:
        args: what follows the command's name; the process's own arguments if None.
    """
    given = list(sys.argv[1:] if args is None else args)
    for stream in (sys.stdout, sys.stderr):
        if hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="backslashreplace")  # a name the terminal cannot show must not end the answer
    try:
        code = typer.main.get_command(app).main(args=given, prog_name="resilio", standalone_mode=False)
    except (KeyboardInterrupt, typer.Abort):
        code = report(KeyboardInterrupt(), as_json="--json" in given, debug=False)
    except Exception as error:  # noqa: BLE001 - the last stop: whatever it is, people get a sentence and an exit code
        code = report(error, as_json="--json" in given, debug="--debug" in given)
    sys.exit(int(code or 0))


def _show_version(asked: bool) -> None:
    if asked:
        from .. import __version__
        from .output import emit

        emit(f"resilio {__version__}\n")
        raise typer.Exit


@app.callback()
def _options(
    version: Annotated[
        bool, typer.Option("--version", help="Show the version and exit.", callback=_show_version, is_eager=True)
    ] = False,
) -> None:
    pass


@app.command()
def ls(url: Url, as_json: Json = False, debug: Debug = False) -> int:
    """List the checkpoints of a run, newest first."""
    from ..hooks import open_storage
    from . import look, output, pages

    with open_storage(url) as storage:
        catalog = look.catalog_of(storage)
        infos, damaged = catalog.checkpoints()
    infos.sort(key=lambda info: info.ref, reverse=True)
    if as_json:
        output.emit_json(
            {
                "url": storage.url,
                "checkpoints": [pages.info_json(info) for info in infos],
                "damaged": [pages.damage_json(one) for one in damaged],
            }
        )
    else:
        output.emit_rich(pages.ls_table(infos, now_s=time.time()), *map(pages.damage_line, damaged))
    return Exit.WANTING if damaged else Exit.GOOD


@app.command()
def show(url: Url, which: Which = None, as_json: Json = False, debug: Debug = False) -> int:
    """Show what one checkpoint holds, without reading its data."""
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
        output.emit_rich(*pages.show_page(page, now_s=time.time()))
    return Exit.GOOD


@app.command()
def verify(url: Url, which: Which = None, every: All = False, as_json: Json = False, debug: Debug = False) -> int:
    """Read a checkpoint whole and compare every byte with its digests; name what is damaged."""
    from ..errors import ConfigError, NoCheckpointError
    from ..hooks import open_storage
    from ..records import keys
    from ..records.verify import verify_checkpoint
    from . import look, output, pages

    if every and which is not None:
        raise ConfigError("verify takes a STEP or --all, not both.")
    results = []
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
            results.append(pages.verify_json(ref, damage, on_lineage=ref in catalog.lineage))
            if not as_json:
                output.emit("".join(f"{line}\n" for line in pages.verify_lines(ref, damage)))
    good = all(result["good"] for result in results)
    if as_json:
        output.emit_json({"url": storage.url, "good": good, "checkpoints": results})
    return Exit.GOOD if good else Exit.WANTING
