"""Commands that plugins add. They are listed with the others, and imported only when one is run or asked for help.

A plugin that is broken must not take away the command that tells what is wrong with it.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from importlib import import_module
from typing import TYPE_CHECKING, Any

import typer
from typer.core import TyperCommand, TyperGroup

from .errors import PluginCommandError

if TYPE_CHECKING:
    from ..hooks import Command, Host

__all__ = ["CommandGroup", "plugin_host"]


@functools.lru_cache(maxsize=1)
def plugin_host() -> Host:
    """The plugins, the broken ones noted: for what must work all the same."""
    from ..hooks import Host

    return Host(lenient=True)


class CommandGroup(TyperGroup):
    """resilio's own commands, and those of plugins after them. Plugins are not even looked for to run one of ours."""

    _warned = False

    def list_commands(self, ctx: Any) -> list[str]:
        """Ours in their order, then those of plugins."""
        return [*super().list_commands(ctx), *self._plugins(ctx)]

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        """The command of this name, or what stands for it in a list; None if there is none."""
        own = super().get_command(ctx, cmd_name)
        if own is not None:
            return own
        found = self._plugins(ctx).get(cmd_name)
        return found and _Listed(cmd_name, found)

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        """Name, command and what follows. Here a plugin's command is wanted itself."""
        name, command, rest = super().resolve_command(ctx, args)
        if isinstance(command, _Listed):
            try:
                command = command.load()
            except PluginCommandError:
                if not ctx.resilient_parsing:  # while a shell completes, nobody can be told
                    raise
        return name, command, rest

    def _plugins(self, ctx: Any) -> dict[str, Command]:
        found = plugin_host()
        if not ctx.resilient_parsing and not self._warned:
            self._warned = True
            _warn_of_broken(found)
        return dict(found.commands)


class _Listed(TyperCommand):
    """What stands for a plugin's command as long as only its name and its line of help are wanted."""

    def __init__(self, name: str, found: Command) -> None:
        from rich.markup import escape

        # A stranger's text, which the page would take for markup.
        super().__init__(name, help=escape(found.help or f"({found.owner})"))
        self.found = found

    def load(self) -> Any:
        """The command itself.

        Raises:
            PluginCommandError: it cannot be imported, or is none.
        """
        module, _, path = self.found.where.partition(":")
        try:
            thing: Any = functools.reduce(getattr, path.split("."), import_module(module))
            return _guarded(_as_command(thing, str(self.name)), str(self.name), self.found)
        except (Exception, SystemExit) as error:
            raise PluginCommandError(
                f"{self.name}: this command of {self.found.owner} ({self.found.where}) cannot be loaded: "
                f"{type(error).__name__}: {error}. Repair or uninstall that plugin."
            ) from error


def _as_command(thing: Any, name: str) -> Any:
    if isinstance(thing, typer.Typer):
        made = typer.main.get_group(thing)
        made.name = name
        return made
    if not callable(thing):
        raise TypeError(f"it is {type(thing).__name__}, neither a function nor a typer.Typer")
    app = typer.Typer(add_completion=False, context_settings={"help_option_names": ["-h", "--help"]})
    app.command(name)(thing)
    return typer.main.get_command(app)


def _guarded(command: Any, name: str, found: Command) -> Any:
    """`command`, with what it does not foresee told as the plugin's."""
    from ..errors import InternalError, ResilioError

    invoke: Callable[[Any], Any] = command.invoke

    def guarded(ctx: Any) -> Any:
        try:
            code = invoke(ctx)
        except Exception as error:
            typers = hasattr(error, "exit_code") or isinstance(error, typer.Abort)
            if typers or (isinstance(error, ResilioError | OSError) and not isinstance(error, InternalError)):
                raise
            raise PluginCommandError(
                f"{name}: unexpected {type(error).__name__}: {error}. This command is of {found.owner}: please report "
                "it there with what RESILIO_DEBUG=1 shows.",
                ran=True,
            ) from error
        if code is not None and not isinstance(code, int):
            raise PluginCommandError(
                f"{name}: this command of {found.owner} returned {type(code).__name__}, which is no exit code", ran=True
            )
        return code

    command.invoke = guarded
    return command


def _warn_of_broken(found: Host) -> None:
    """One line on stderr for each broken plugin: what is wrong, and the way out."""
    from .output import clean

    for info in found.plugins():
        if info.error:
            print(f"resilio: warning: {clean(info.error)}", file=sys.stderr)  # noqa: T201 - this is the command
