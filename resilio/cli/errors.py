"""How the command ends: exit codes, and one clear message where something went wrong."""

from __future__ import annotations

import json
import os
import sys
import traceback
from enum import IntEnum

from .. import errors
from .output import clean

__all__ = ["Exit", "PluginCommandError", "exit_code", "report"]


class Exit(IntEnum):
    """Exit codes. A code not listed here is a failure."""

    GOOD = 0
    WANTING = 1  # checked, and something is wrong with what is stored
    USAGE = 2
    INCONCLUSIVE = 3  # could not be judged
    NOTHING = 4  # nothing there
    STORAGE = 5  # storage or infrastructure failed; also what we did not foresee
    INTERRUPTED = 130


class PluginCommandError(Exception):
    """A command of a plugin cannot be loaded, or failed in a way that it did not foresee. Names the plugin.

    Attributes:
        ran: whether it had begun to run.
    """

    def __init__(self, message: str, *, ran: bool = False) -> None:
        super().__init__(message)
        self.ran = ran


# The first that fits; subclasses stand before their bases.
_CODES: tuple[tuple[type[BaseException], Exit], ...] = (
    (KeyboardInterrupt, Exit.INTERRUPTED),
    (errors.UnknownSchemeError, Exit.USAGE),
    (errors.ConfigError, Exit.USAGE),
    (errors.NoCheckpointError, Exit.NOTHING),
    (errors.NewerFormatError, Exit.INCONCLUSIVE),
    (errors.FormatError, Exit.WANTING),
    (errors.IntegrityError, Exit.WANTING),
    (errors.CaptureError, Exit.WANTING),
)


def exit_code(error: BaseException) -> int:
    """The exit code that `error` ends the command with."""
    if _is_usage(error):
        return Exit.USAGE
    if isinstance(error, errors.RestoreError) and hasattr(error, "key"):
        return Exit.WANTING  # a value that is not made of what is stored, as it is not safe to
    if isinstance(error, PluginCommandError):
        return Exit.STORAGE if error.ran else Exit.USAGE
    return next((code for kind, code in _CODES if isinstance(error, kind)), Exit.STORAGE)


def report(error: BaseException, *, as_json: bool, debug: bool) -> int:
    """Say on stderr what went wrong; the traceback only for `debug` or ``RESILIO_DEBUG=1``. Returns the exit code."""
    code = exit_code(error)
    message = str(error.format_message()) if _is_usage(error) else str(error)  # type: ignore[attr-defined]
    if _is_usage(error) and not message:
        return code  # nothing was asked, and the help is shown already
    name = "UsageError" if _is_usage(error) else type(error).__name__
    foreseen = _is_usage(error) or isinstance(
        error, errors.ResilioError | OSError | KeyboardInterrupt | PluginCommandError
    )
    if isinstance(error, KeyboardInterrupt):
        message = "interrupted"
    elif not foreseen or isinstance(error, errors.InternalError):
        message = f"unexpected {name}: {message}. This is a bug: please report it with the output of --debug."
    if debug or os.environ.get("RESILIO_DEBUG", "") not in ("", "0"):
        traceback.print_exception(error)
    if as_json:
        line = json.dumps({"error": {"type": name, "message": message, "exit_code": int(code)}}, sort_keys=True)
    else:
        line = f"resilio: {clean(message)}" + ("\nTry 'resilio --help'." if _is_usage(error) else "")
    print(line, file=sys.stderr)  # noqa: T201 - this is the command
    return code


def _is_usage(error: BaseException) -> bool:
    # typer brings click along under a name that differs between its releases, so it is known by what it can do.
    return hasattr(error, "format_message") and hasattr(error, "exit_code")
