"""`resilio completion`: what makes a shell complete this command. Printed, never written to anybody's files."""

from __future__ import annotations

import os
from enum import Enum
from importlib import import_module
from typing import Annotated, Any

import typer

from .errors import Exit
from .options import Debug, Json

__all__ = ["completion", "prepare"]

VARIABLE = "_RESILIO_COMPLETE"


class Shell(str, Enum):
    """The shells it is tried with, or likely to work with."""

    bash = "bash"
    zsh = "zsh"
    fish = "fish"


def prepare() -> None:
    """Be ready to answer a shell, if it is one that asks."""
    if VARIABLE in os.environ:
        _typers().completion_init()


def completion(
    shell: Annotated[Shell, typer.Argument(help="Which shell.", show_default=False)],
    as_json: Json = False,
    debug: Debug = False,
) -> int:
    """Print the script with which a shell completes commands and options, those of plugins too.

    In ~/.bashrc: eval "$(resilio completion bash)". In ~/.zshrc, after compinit: eval "$(resilio completion zsh)". For
    fish: resilio completion fish > ~/.config/fish/completions/resilio.fish
    """
    from . import output

    script = _typers().get_completion_script(prog_name="resilio", complete_var=VARIABLE, shell=shell.value)
    if as_json:
        output.emit_json({"shell": shell.value, "script": script})
    else:
        output.emit(script + "\n")
    return Exit.GOOD


def _typers() -> Any:
    # Its names, not exported in a checker's sense, have been the same in all releases that we take.
    return import_module("typer.completion")
