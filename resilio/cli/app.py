"""Which commands there are, and how one ends. Each returns its exit code, and imports what it needs when it runs."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Annotated, NoReturn

import typer

from .completion import completion, prepare
from .diff import diff
from .doctor import doctor
from .errors import report
from .export import export
from .extra import CommandGroup
from .forget import forget
from .importing import import_
from .ls import ls
from .pin import pin, unpin
from .plan import plan
from .plugins import plugins
from .quarantine import quarantine, release
from .selftest import selftest
from .show import show
from .verify import verify

__all__ = ["app", "main"]

app = typer.Typer(
    name="resilio",
    cls=CommandGroup,
    add_completion=False,  # it guesses the shell and writes to its files; `resilio completion` prints
    help="Look at the checkpoints of a run, and after them: what there is, whether it is intact, what may go.",
    epilog="Exit codes: 0 good, 1 found wanting, 2 usage, 3 inconclusive or partial, 4 nothing there, 5 storage, "
    "130 Ctrl-C.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


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
        prepare()
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


for command in (
    ls,
    show,
    verify,
    diff,
    export,
    pin,
    unpin,
    quarantine,
    release,
    forget,
    plan,
    plugins,
    doctor,
    completion,
):
    app.command()(command)
app.command("import")(import_)
app.add_typer(selftest, name="selftest")
