"""The plugin host: finds plugins, names whose fault it is if one is broken, and keeps what they registered."""

from __future__ import annotations

import copy
import functools
import os
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from importlib import import_module, metadata
from types import ModuleType
from typing import Any

from ..errors import ConfigError
from ..policies import PolicyFactory, PolicyRegistry
from ..storage import Storage, StorageFactory, StorageRegistry, retrying
from ..storage.registry import to_url
from . import specs
from .implementations import Implementation, implementations
from .info import DISABLE, EXTRA, PluginInfo
from .names import CommandRegistry, DrillRegistry

__all__ = ["Host", "host", "open_storage"]

_MODULE = re.compile(r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)*", re.ASCII)


@dataclass(frozen=True)
class _Plugin:
    info: PluginInfo
    plugin: object = None
    hooks: Mapping[str, Sequence[Implementation]] | None = None


class Host:
    """The plugins of this process, or of one manager.

    Args:
        entry_points: what to load; None for all installed ones of the group ``resilio`` and the modules that the
            environment variable ``RESILIO_PLUGINS`` lists, separated by commas, less those whose names are listed so in
            ``RESILIO_DISABLE_PLUGINS``.
        lenient: whether a broken plugin is only noted, see `plugins`, for a command that is to say what is broken.

    Attributes:
        storages: the URL schemes.
        policies: those that can be read from text, ours included.
        drills: workloads that can be drilled: name -> ``package.module:function``.
        commands: that plugins add to ``resilio``: name -> `Command`.

    Raises:
        ConfigError: a plugin cannot be imported, has no hook, implements one that does not exist or has other
            arguments, or two claim one name. Names plugin and distribution, and the way out.
    """

    def __init__(self, entry_points: Iterable[metadata.EntryPoint] | None = None, *, lenient: bool = False) -> None:
        self.storages = StorageRegistry()
        self.policies = PolicyRegistry()
        self.drills = DrillRegistry()
        self.commands = CommandRegistry()
        self._plugins: list[_Plugin] = []
        disabled: set[str] = set()
        modules: list[str] = []
        if entry_points is None:
            entry_points = metadata.entry_points(group=specs.PROJECT)
            disabled, modules = set(_listed(DISABLE)), _listed(EXTRA)
        found = [(_info_of(one), one.load) for one in sorted(entry_points, key=lambda one: (one.name, one.value))]
        found += [(PluginInfo(name, EXTRA, name), functools.partial(_module, name)) for name in modules]
        for info, load in found:
            if info.name in disabled:
                self._plugins.append(_Plugin(replace(info, disabled=True)))
                continue
            try:
                self._take(info, load)
            except ConfigError as error:
                if not lenient:
                    raise
                self._plugins.append(_Plugin(replace(info, error=str(error))))

    def plugins(self) -> list[PluginInfo]:
        """All of them, by how they came in and by name; those that are broken or disabled included."""
        return [one.info for one in self._plugins]

    def with_plugins(self, plugins: Iterable[object]) -> Host:
        """One with the same plugins, and these besides; this one stays as it is.

        Args:
            plugins: objects, or modules, with functions marked by `hookimpl`. Each goes by the name of its class.

        Raises:
            ConfigError: one of them is none, is broken, or claims a name that has an owner.
        """
        if isinstance(plugins, str | bytes | Mapping) or not isinstance(plugins, Iterable):
            raise ConfigError(f"plugins={plugins!r:.200}: give a list of objects, such as plugins=[MyDashboard()]")
        twin = copy.copy(self)
        twin.storages, twin.policies = self.storages.copy(), self.policies.copy()
        twin.drills, twin.commands = self.drills.copy(), self.commands.copy()
        twin._plugins = list(self._plugins)
        for plugin in plugins:
            twin.register(plugin)
        return twin

    def register(self, plugin: object, *, name: str | None = None) -> PluginInfo:
        """Take in one plugin: any object with functions marked by `hookimpl`.

        Args:
            plugin: a module or an instance.
            name: what it goes by, taken once; None: the name of its module or class.

        Raises:
            ConfigError: it is none, is broken, or claims a name that has an owner.
        """
        of = plugin if isinstance(plugin, ModuleType) else type(plugin)
        where = of.__name__ if isinstance(of, ModuleType) else f"{of.__module__}.{of.__qualname__}"
        if name is None:
            taken = {one.info.name for one in self._plugins}
            names = (of.__name__ + (f"-{n}" if n > 1 else "") for n in range(1, len(taken) + 2))
            name = next(one for one in names if one not in taken)
        return self._take(PluginInfo(name, "given", where), lambda: plugin)

    def implementations(self, hook: str) -> list[tuple[PluginInfo, Implementation]]:
        """Who implements `hook`, and how: in the order of `plugins`."""
        return [(one.info, how) for one in self._plugins for how in (one.hooks or {}).get(hook, ())]

    def open_storage(self, url: str | os.PathLike[str] | Storage, *, retry: bool = True) -> Storage:
        """The function of this name, with the schemes of these plugins."""
        if isinstance(url, Storage):
            return url
        storage = self.storages.open(to_url(url, self.storages.schemes()))
        return retrying(storage) if retry else storage

    def _take(self, info: PluginInfo, load: Callable[[], object]) -> PluginInfo:
        try:
            for other in self._plugins:
                if other.info.name == info.name and not other.info.disabled:
                    raise ConfigError(f"{other.info.owner} and {info.owner} have one name, so one of them must go")
            plugin = load()
            for other in self._plugins:
                if other.plugin is plugin and plugin is not None:
                    raise ConfigError(f"{other.info.owner} and {info.owner} are the same: leave out one of them")
            hooks = implementations(plugin)
            info = replace(info, hooks=tuple(sorted(hooks)))
            info = self._register(info, hooks)
        except (Exception, SystemExit) as error:  # whatever it is, it must be known whose fault it is
            said = str(error)
            if not (isinstance(error, ConfigError) and info.owner in said):
                kind = "" if isinstance(error, ConfigError) else f"{type(error).__name__}: "
                said = f"{info.owner} ({info.where}) cannot be loaded: {kind}{said}"
            if DISABLE not in said:
                said = f"{said.rstrip('.')}. {info.way_out}"
            raise ConfigError(said, plugin=info.name) from error
        self._plugins.append(_Plugin(info, plugin, hooks))
        return info

    def _register(self, info: PluginInfo, hooks: Mapping[str, Sequence[Implementation]]) -> PluginInfo:
        """All that it registers, or nothing."""
        owner = info.owner

        def storage(scheme: str, factory: StorageFactory, *, hint: str = "") -> None:
            self.storages.register(scheme, factory, owner=owner, hint=hint)

        def policy(name: str, make: PolicyFactory) -> None:
            self.policies.register(name, make, owner=owner)

        def drill(name: str, factory: str) -> None:
            self.drills.register(name, factory, owner=owner)

        def command(name: str, where: str, *, help: str = "") -> None:
            self.commands.register(name, where, owner=owner, help=help)

        given: dict[str, dict[str, Any]] = {
            "resilio_register_storage": {"register": storage},
            "resilio_register_policies": {"register": policy},
            "resilio_register_drills": {"register": drill},
            "resilio_add_commands": {"commands": command},
        }
        registries = (self.storages, self.policies, self.drills, self.commands)
        try:
            for hook, arguments in given.items():
                for implementation in hooks.get(hook, ()):
                    implementation.call(arguments)
        except BaseException:
            for registry in registries:
                registry.drop(owner)
            raise
        schemes, policies, drills, commands = (registry.of(owner) for registry in registries)
        return replace(info, schemes=schemes, policies=policies, drills=drills, commands=commands)


def _info_of(entry_point: metadata.EntryPoint) -> PluginInfo:
    found = getattr(entry_point, "dist", None)
    name, version = (found.name, found.version) if found else (None, None)
    return PluginInfo(entry_point.name, "entry point", entry_point.value, name, version)


def _listed(variable: str) -> list[str]:
    """What an environment variable lists, each once."""
    return list(dict.fromkeys(name.strip() for name in os.environ.get(variable, "").split(",") if name.strip()))


def _module(name: str) -> object:
    if not _MODULE.fullmatch(name):
        raise ConfigError(f"{name!r:.80} is no name of a module, as in {EXTRA}=my_package.my_plugin,another")
    return import_module(name)


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
    return url if isinstance(url, Storage) else host().open_storage(url, retry=retry)
