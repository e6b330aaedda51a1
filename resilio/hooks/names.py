"""What plugins register by name besides storages and policies: workloads and commands, by where they lie."""

from __future__ import annotations

import re
from dataclasses import dataclass

from ..errors import ConfigError
from ..registry import Registry

__all__ = ["OWN_COMMANDS", "Command", "CommandRegistry", "DrillRegistry"]

# resilio's own, those to come included: no plugin may have one, so that a later release takes nothing from anybody.
OWN_COMMANDS = (
    *("ls", "show", "verify", "selftest", "forget", "pin", "unpin", "plugins", "doctor", "plan", "completion"),
    *("drill", "report", "advise", "run", "import", "export", "diff", "schedule", "quarantine", "release"),
)

_NAME = "[a-z][a-z0-9-]*"
_WHERE = re.compile(r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)*:[A-Za-z_]\w*(\.[A-Za-z_]\w*)*", re.ASCII)
_WHERE_MAX = 256
_HELP_MAX = 200


@dataclass(frozen=True)
class Command:
    """A command that a plugin adds.

    Attributes:
        where: ``package.module:object``.
        help: one line.
        owner: how messages name the plugin.
    """

    where: str
    help: str
    owner: str


class DrillRegistry(Registry[str]):
    """Workloads that can be drilled: name -> ``package.module:function``."""

    def __init__(self) -> None:
        super().__init__("a drill called {}", "no name for a drill: lower case letters, digits, -", _NAME)

    def register(self, name: str, factory: str, *, owner: str) -> None:
        """Add a workload.

        Raises:
            ConfigError: it is no name, the factory no place, or it has an owner already; both are named.
        """
        self.add(name, _where(factory, name, owner), owner=owner)


class CommandRegistry(Registry[Command]):
    """Commands that plugins add: name -> `Command`. resilio's own are not in it, and cannot be added."""

    def __init__(self) -> None:
        rule = "no name for a command: lower case letters, digits, -"
        super().__init__("a command called {}", rule, _NAME, reserved=OWN_COMMANDS)

    def register(self, name: str, where: str, *, owner: str, help: str = "") -> None:
        """Add a command.

        Raises:
            ConfigError: it is no name, `where` no place, `help` not one line, or it has an owner already; both are
                named.
        """
        if not isinstance(help, str) or len(help) > _HELP_MAX or not help.isprintable():
            raise ConfigError(
                f"{owner} registers {name!r:.80} with help={help!r:.80}: give one line of up to {_HELP_MAX} characters",
                owner=owner,
            )
        self.add(name, Command(_where(where, name, owner), help, owner), owner=owner)


def _where(where: str, name: str, owner: str) -> str:
    if not isinstance(where, str) or len(where) > _WHERE_MAX or not _WHERE.fullmatch(where):
        raise ConfigError(
            f"{owner} registers {name!r:.80} as {where!r:.80}: give the place it lies at, as package.module:function "
            f"of at most {_WHERE_MAX} characters; it is imported when it is used",
            owner=owner,
        )
    return where
