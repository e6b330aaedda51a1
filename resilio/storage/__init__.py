"""Bytes by key: the narrow waist, the storages that need no other library, and the one layer that retries."""

from __future__ import annotations

from .base import (
    Buffer,
    Capabilities,
    Incomplete,
    ObjectInfo,
    Storage,
    Writer,
    byte_view,
    check_key,
    check_prefix,
)
from .local import LocalStorage
from .memory import MemoryStorage
from .registry import RegisterStorage, StorageFactory, StorageRegistry
from .retrying import retrying

__all__ = [
    "Buffer",
    "Capabilities",
    "Incomplete",
    "LocalStorage",
    "MemoryStorage",
    "ObjectInfo",
    "RegisterStorage",
    "Storage",
    "StorageFactory",
    "StorageRegistry",
    "Writer",
    "byte_view",
    "check_key",
    "check_prefix",
    "retrying",
]
