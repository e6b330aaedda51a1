"""The plugin host: finds plugins, names whose fault it is if one is broken, and keeps what they registered."""

from __future__ import annotations

import functools
import os
from collections.abc import Iterable
from importlib import metadata

import pluggy

from ..errors import ConfigError, ResilioError
from ..storage import Storage, StorageRegistry, retrying
from ..storage.registry import to_url
from . import specs

__all__ = ["Host", "host", "open_storage"]

_DISABLE = "RESILIO_DISABLE_PLUGINS"


class Host:
    """The plugins of this process.

    Args:
        entry_points: what to load; None for all installed ones of the group ``resilio``, less those whose names are
            listed, comma-separated, in the environment variable ``RESILIO_DISABLE_PLUGINS``.

    Attributes:
        manager: pluggy's.
        storages: the URL schemes.

    Raises:
        ConfigError: a plugin cannot be imported, implements a hook that does not exist or has other arguments, or two
            claim one name. Names plugin and distribution.
    """

    def __init__(self, entry_points: Iterable[metadata.EntryPoint] | None = None) -> None:
        self.manager = pluggy.PluginManager(specs.PROJECT)
        self.manager.add_hookspecs(specs)
        self.storages = StorageRegistry()
        if entry_points is None:
            disabled = {name.strip() for name in os.environ.get(_DISABLE, "").split(",")}
            entry_points = (e for e in metadata.entry_points(group=specs.PROJECT) if e.name not in disabled)
        for entry_point in sorted(entry_points, key=lambda e: (e.name, e.value)):
            self._load(entry_point)

    def _load(self, entry_point: metadata.EntryPoint) -> None:
        owner = f"plugin {entry_point.name!r} of {_distribution(entry_point)}"
        try:
            self.register(entry_point.load(), name=entry_point.name, owner=owner)
        except ResilioError:
            raise
        except Exception as error:
            raise ConfigError(
                f"{owner} ({entry_point.value}) cannot be loaded: {type(error).__name__}: {error}. "
                f"Repair or uninstall it, or set {_DISABLE}={entry_point.name}",
                plugin=entry_point.name,
            ) from error

    def register(self, plugin: object, *, name: str, owner: str | None = None) -> None:
        """Take in one plugin: any object with functions marked by `hookimpl`.

        Args:
            plugin: usually a module.
            name: what it goes by; taken once.
            owner: how messages name it.

        Raises:
            ConfigError: it registers something that has another owner.
            pluggy.PluginValidationError: it implements an unknown hook, or one with unknown arguments.
            ValueError: name or plugin is registered already.
        """
        self.manager.register(plugin, name=name)
        self.manager.check_pending()  # else a misspelt hook would pass, and never be called
        # One plugin at a time: only so it is known who registers.
        others = self.manager.get_plugins() - {plugin}
        call = self.manager.subset_hook_caller("resilio_register_storage", others)
        call(register=functools.partial(self.storages.register, owner=owner or f"plugin {name!r}"))


def _distribution(entry_point: metadata.EntryPoint) -> str:
    found = getattr(entry_point, "dist", None)
    return f"{found.name} {found.version}" if found else "an unknown distribution"


@functools.lru_cache(maxsize=1)
def host() -> Host:
    """The host with the installed plugins; loaded once per process."""
    return Host()


def open_storage(url: str | os.PathLike[str] | Storage, *, retry: bool = True) -> Storage:
    """Open the storage behind a URL or a path.

    Args:
        url: ``file:///abs/path``, ``memory://name``, what plugins offer, or a plain path. A `Storage` is
            returned as it is.
        retry: repeat calls that failed for a reason that may pass, see `resilio.storage.retrying`.

    Returns:
        The storage. Nothing was connected or created yet. Its `url` shows no credentials.

    Raises:
        UnknownSchemeError: no plugin offers the scheme; says which are known and what to install.
        ConfigError: the URL is malformed, or an installed plugin is broken.

    Ranks: any; not collective.
    """
    if isinstance(url, Storage):
        return url
    storages = host().storages
    storage = storages.open(to_url(url, storages.schemes()))
    return retrying(storage) if retry else storage
