"""Storage for whatever fsspec opens: S3, Google Cloud Storage, Azure, SFTP, and ``fsspec+<protocol>://`` for the rest.

Plain and correct before fast: no listing cache, keys to the letter, every error translated, nothing carried over a
fork, no retry but resilio's own. What a store cannot promise, its `capabilities` say, and docs/storage.md lists.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from resilio import hookimpl
from resilio.storage import RegisterStorage

from .opening import OFFERS, open_fsspec

if TYPE_CHECKING:
    from .storage import FsspecStorage as FsspecStorage

__all__ = ["FsspecStorage", "open_fsspec", "resilio_register_storage"]


def __getattr__(name: str) -> Any:
    if name == "FsspecStorage":
        from .storage import FsspecStorage

        return FsspecStorage
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


@hookimpl
def resilio_register_storage(register: RegisterStorage) -> None:
    """Offer every scheme of `OFFERS`."""
    for scheme, offer in OFFERS.items():
        register(scheme, open_fsspec, hint=offer.hint)
