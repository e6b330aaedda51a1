"""The strangers' door: what a plugin may do, and the host that lets it in."""

from __future__ import annotations

from .calls import Calls
from .host import Host, host, open_storage
from .info import PluginInfo
from .names import Command
from .specs import SaveFacts, hookimpl

__all__ = ["Calls", "Command", "Host", "PluginInfo", "SaveFacts", "hookimpl", "host", "open_storage"]
