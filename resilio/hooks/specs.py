"""The hooks a plugin may implement. None of them can delete, veto a save or change bytes."""

from __future__ import annotations

import pluggy

from ..storage import RegisterStorage

__all__ = ["PROJECT", "hookimpl", "hookspec", "resilio_register_storage"]

PROJECT = "resilio"

hookspec = pluggy.HookspecMarker(PROJECT)
hookimpl = pluggy.HookimplMarker(PROJECT)


@hookspec
def resilio_register_storage(register: RegisterStorage) -> None:
    """Offer storage for one or more URL schemes.

    Called once per process, when the first URL is opened. A plugin is a module with an entry point in the group
    ``resilio``; it should import its libraries in the factory, not at its top, because every process that opens any
    storage imports it::

        # pyproject.toml:  [project.entry-points.resilio]
        #                  mystore = "my_store"
        import resilio

        @resilio.hookimpl
        def resilio_register_storage(register):
            register("mystore", open_my_store, hint="pip install my-store[client]")

        def open_my_store(url):
            from .client import MyStorage    # a resilio.storage.Storage that passes resilio.testing.StorageContract
            return MyStorage(url)

    A scheme has one owner: a second one is an error that names both.

    Args:
        register: call it with the scheme and a factory, see `resilio.storage.RegisterStorage`.

    Ranks: any; not collective.
    """
