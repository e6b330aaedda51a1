"""What is known of a plugin: for lists, messages, and the comparison between ranks."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, Literal

__all__ = ["DISABLE", "EXTRA", "PluginInfo", "Source"]

DISABLE: Final = "RESILIO_DISABLE_PLUGINS"
EXTRA: Final = "RESILIO_PLUGINS"

Source = Literal["entry point", "RESILIO_PLUGINS", "given"]


@dataclass(frozen=True)
class PluginInfo:
    """One plugin.

    Attributes:
        name: what it goes by: of its entry point, of its module, of its class.
        source: how it came in: by an entry point of the group ``resilio``, by the environment variable
            ``RESILIO_PLUGINS``, or given to a manager.
        where: its module or class.
        distribution: that its entry point is of; None where there is none.
        version: of the distribution.
        hooks: that it implements, sorted.
        schemes: URL schemes that it registered, sorted.
        policies: the same of policies.
        drills: the same of workloads.
        commands: the same of commands.
        error: why it could not be loaded; None if it could. A broken one has registered nothing.
        disabled: whether ``RESILIO_DISABLE_PLUGINS`` names it: it was not even imported.
    """

    name: str
    source: Source
    where: str
    distribution: str | None = None
    version: str | None = None
    hooks: tuple[str, ...] = ()
    schemes: tuple[str, ...] = ()
    policies: tuple[str, ...] = ()
    drills: tuple[str, ...] = ()
    commands: tuple[str, ...] = ()
    error: str | None = None
    disabled: bool = False

    @property
    def active(self) -> bool:
        """Whether it is loaded and takes part."""
        return self.error is None and not self.disabled

    @property
    def owner(self) -> str:
        """How messages name it."""
        if self.source == "given":
            return f"plugin {self.name!r}"
        if self.source == EXTRA:
            return f"plugin {self.name!r} of {EXTRA}"
        of = f"{self.distribution} {self.version}" if self.distribution else "an unknown distribution"
        return f"plugin {self.name!r} of {of}"

    @property
    def way_out(self) -> str:
        """What to do if it is broken."""
        if self.source == "given":
            return "Repair it, or leave it out of plugins=[...]"
        if self.source == EXTRA:
            return f"Repair it, or take it out of the environment variable {EXTRA}"
        return f"Repair or uninstall it, or set {DISABLE}={self.name}"
