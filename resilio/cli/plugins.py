"""`resilio plugins`: which there are, what each brings, and what is wrong with those that are broken."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from .errors import Exit
from .options import Debug, Json

if TYPE_CHECKING:
    from ..hooks import PluginInfo

__all__ = ["json_of", "plugins"]

_KINDS = ("schemes", "policies", "drills", "commands")


def plugins(as_json: Json = False, debug: Debug = False) -> int:
    """List the plugins that are installed, what each registers, and which are disabled or broken.

    Exit codes: 0 none is broken; 1 one is.
    """
    from . import output
    from .extra import plugin_host
    from .tables import Table

    found = plugin_host().plugins()
    if as_json:
        output.emit_json({"plugins": [json_of(info) for info in found]})
    else:
        shown = Table("plugin", "version", "of", "state", "brings", "hooks")
        for info in found:
            shown.add_row(
                output.clean(info.name),
                output.clean(info.version or "?"),
                output.clean(info.distribution or f"{info.source}: {info.where}"),
                _state(info),
                output.clean("; ".join(_brings(info)) or "-"),
                output.clean(", ".join(hook.removeprefix("resilio_") for hook in info.hooks) or "-"),
            )
        broken = [output.clean(f"BROKEN  {info.error}") for info in found if info.error]
        output.emit_page(shown, *broken)
    return Exit.WANTING if any(info.error for info in found) else Exit.GOOD


def json_of(info: PluginInfo) -> dict[str, Any]:
    """A plugin, for programs."""
    return {
        "name": info.name,
        "source": info.source,
        "where": info.where,
        "distribution": info.distribution,
        "version": info.version,
        "state": _state(info),
        "error": info.error,
        "hooks": list(info.hooks),
        **{kind: list(getattr(info, kind)) for kind in _KINDS},
    }


def _state(info: PluginInfo) -> str:
    return "broken" if info.error else "disabled" if info.disabled else "active"


def _brings(info: PluginInfo) -> list[str]:
    return [f"{kind} {', '.join(getattr(info, kind))}" for kind in _KINDS if getattr(info, kind)]
