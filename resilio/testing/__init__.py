"""For authors of plugins: the promises as tests. Needs pytest, which is imported only when one of them is asked for."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .storage_contract import StorageContract

__all__ = ["StorageContract"]


def __getattr__(name: str) -> Any:
    if name == "StorageContract":
        import pytest

        for part in ("tools", "writing", "reading", "sharing"):  # so that a failed promise shows its values
            pytest.register_assert_rewrite(f"{__name__}._contract_{part}")
        from .storage_contract import StorageContract

        return StorageContract
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
