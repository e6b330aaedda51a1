"""Which scheme is which kind of store."""

from __future__ import annotations

import re
from importlib import import_module, metadata
from typing import TYPE_CHECKING, NamedTuple

from resilio.errors import ConfigError

if TYPE_CHECKING:
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
_GS = Offer("gcs:GcsStore", "pip install 'resilio-ckpt[gs]'")
_ABFS = Offer("azure:AzureStore", "pip install 'resilio-ckpt[abfs]'")
_SFTP = Offer("sftp:SftpStore", "pip install 'resilio-ckpt[sftp]'")

_OWN: dict[str, Offer] = {
    "s3": _S3,
    "s3a": _S3,
    "gs": _GS,
    "gcs": _GS,
    "abfs": _ABFS,
    "abfss": _ABFS,
    "az": _ABFS,
    "sftp": _SFTP,
    "ssh": _SFTP,
}

_HINT = "Install the client library that fsspec needs for this protocol."
# fsspec's own that hold files and can be written. Behind a prefix, for they promise less.
_OTHERS = (
    *("box", "dbfs", "dropbox", "file", "ftp", "gdrive", "hdfs", "hf", "lakefs", "local", "memory"),
    *("oci", "ocilake", "oss", "root", "smb", "tos", "tosfs", "webdav", "webhdfs"),
)


def _offers() -> dict[str, Offer]:
    """All of them. Packages announce theirs to fsspec by entry points; fsspec itself is not imported for that."""
    announced = {point.name for point in metadata.entry_points(group="fsspec.specs")}
    protocols = sorted({*_OTHERS, *announced, *_OWN})
    generic = Offer("generic:GenericStore", _HINT)
    return _OWN | {
        f"fsspec+{name}": _OWN.get(name, generic) for name in protocols if re.fullmatch(r"[a-z][a-z0-9+.-]*", name)
    }


OFFERS: dict[str, Offer] = _offers()


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
    # Not before: whoever opens any storage at all imports this file.
    from .place import parse
    from .storage import FsspecStorage

    module, _, name = offer.kind.partition(":")
    found = import_module(f".{module}", "resilio_fsspec")
    kind: type[Store] = getattr(found, name)
    place = parse(url, found.OPTIONS)
    kind.check(place)
    return FsspecStorage(place, kind, open_fsspec)
