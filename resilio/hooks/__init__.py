"""The strangers' door: what a plugin may do, and the host that lets it in."""

from __future__ import annotations

from .host import Host, host, open_storage
from .info import PluginInfo
from .names import Command
from .specs import hookimpl

__all__ = ["Command", "Host", "PluginInfo", "hookimpl", "host", "open_storage"]
