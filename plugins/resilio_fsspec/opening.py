"""Which scheme is which kind of store."""

from __future__ import annotations

from importlib import import_module
from typing import NamedTuple

from resilio.errors import ConfigError

from .place import parse
from .storage import FsspecStorage
from .store import Store

__all__ = ["OFFERS", "Offer", "open_fsspec"]


class Offer(NamedTuple):
    """One scheme.

    Attributes:
        kind: module and class of the store, imported when it is opened.
        hint: what to do if a library is missing.
    """

    kind: str
    hint: str


_S3 = Offer("s3:S3Store", "pip install 'resilio-ckpt[s3]'")

OFFERS: dict[str, Offer] = {
    "s3": _S3,
    "s3a": _S3,
}


def open_fsspec(url: str) -> FsspecStorage:
    """Open a URL of one of `OFFERS`.

    Raises:
        ConfigError: the URL cannot be right.
        ImportError: the client library is missing.
    """
    scheme = url.partition("://")[0].lower()
    offer = OFFERS.get(scheme)
    if offer is None:
        raise ConfigError(f"resilio_fsspec does not know {scheme}://", url=url)
    module, _, name = offer.kind.partition(":")
    found = import_module(f".{module}", __package__)
    kind: type[Store] = getattr(found, name)
    place = parse(url, found.OPTIONS)
    kind.check(place)
    return FsspecStorage(place, kind, open_fsspec)
