"""A plugin of resilio to copy: a storage, a policy, an event sink and a command.

Every process that uses resilio imports this module, so it imports no more than it must: what a hook needs, it imports
when it is called.
"""

from __future__ import annotations

from typing import Any

from resilio import hookimpl


@hookimpl
def resilio_register_storage(register: Any) -> None:
    """Open ``sqlite:///abs/path.db``."""
    register("sqlite", open_sqlite)


def open_sqlite(url: str) -> Any:
    """The storage of a URL; called when one is opened, so here the client library is imported."""
    from .storage import SqliteStorage

    return SqliteStorage(url.removeprefix("sqlite://"))


@hookimpl
def resilio_register_policies(register: Any) -> None:
    """Let ``resilio forget --keep "keep_first(2)"`` be read."""
    from .policy import KeepFirst

    register("keep_first", KeepFirst)


@hookimpl
def resilio_add_commands(commands: Any) -> None:
    """Add ``resilio sizes URL``."""
    commands("sizes", "resilio_example.command:sizes", help="Tell what takes how much.")


@hookimpl
def resilio_on_event(event: Any) -> None:
    """Write every event down."""
    from .events import write_down

    write_down(event)
