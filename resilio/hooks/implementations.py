"""The hooks of one plugin: found and compared with their specs by pluggy, called by ourselves.

pluggy's own call stops at the first exception, and calls all plugins at once: then one broken observer would silence
the others, and nobody would know who registers what.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from types import ModuleType
from typing import Any, NamedTuple

import pluggy

from ..errors import ConfigError
from . import specs

__all__ = ["Implementation", "implementations"]

_LAZY = ("resilio_verify",)  # may be a generator: what it returns is gone through


class Implementation(NamedTuple):
    """One function of a plugin that implements a hook."""

    function: Any
    needs: tuple[str, ...]
    takes: tuple[str, ...]  # with defaults

    def call(self, arguments: Mapping[str, Any]) -> Any:
        """Call it with those of the `arguments` that it asks for."""
        return self.function(
            *(arguments[name] for name in self.needs),
            **{name: arguments[name] for name in self.takes if name in arguments},
        )


def implementations(plugin: object) -> dict[str, list[Implementation]]:
    """The hooks that `plugin` implements.

    Raises:
        ConfigError: it is no plugin, has no hook, or one that cannot be called.
        pluggy.PluginValidationError: an unknown hook, or unknown arguments.
    """
    if plugin is None or isinstance(plugin, str | bytes | type):
        what = f"the class {plugin.__name__}" if isinstance(plugin, type) else repr(plugin)[:80]
        raise ConfigError(
            f"{what} is no plugin: give an instance, or a module, with functions marked by @resilio.hookimpl"
        )
    manager = pluggy.PluginManager(specs.PROJECT)
    manager.add_hookspecs(specs)
    manager.register(plugin, name="plugin")
    manager.check_pending()  # else a misspelt hook would pass, and never be called
    known = {spec.__name__ for spec in specs.HOOKS}
    found: dict[str, list[Implementation]] = {}
    for caller in manager.get_hookcallers(plugin) or ():
        for one in caller.get_hookimpls() if caller.name in known else ():
            _refuse_what_would_not_run(caller.name, one)
            implementation = Implementation(one.function, tuple(one.argnames), tuple(one.kwargnames))
            found.setdefault(caller.name, []).append(implementation)
    if not found:
        what = f"module {plugin.__name__}" if isinstance(plugin, ModuleType) else type(plugin).__name__
        raise ConfigError(f"{what} has no hook: mark the functions that are some by @resilio.hookimpl")
    return found


def _refuse_what_would_not_run(hook: str, one: pluggy.HookImpl) -> None:
    if getattr(one, "wrapper", False) or one.hookwrapper:
        raise ConfigError(f"{hook} is a hook wrapper: no plugin may come between another one and its caller")
    if inspect.iscoroutinefunction(one.function) or inspect.isasyncgenfunction(one.function):
        raise ConfigError(f"{hook} is async, and nobody would await it: make it a plain function")
    if inspect.isgeneratorfunction(one.function) and hook not in _LAZY:
        raise ConfigError(f"{hook} is a generator, which nobody would go through: return what it is to return")
