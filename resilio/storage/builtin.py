"""The built-in storages, as a plugin like any other: it comes in by the entry-point group ``resilio``."""

from __future__ import annotations

import pluggy

from .local import open_local
from .memory import open_memory
from .registry import RegisterStorage

# The same marker as `resilio.hookimpl`, which lies in a room above this one.
_hookimpl = pluggy.HookimplMarker("resilio")


@_hookimpl
def resilio_register_storage(register: RegisterStorage) -> None:
    """Offer ``file://`` and ``memory://``."""
    register("file", open_local)
    register("memory", open_memory)
