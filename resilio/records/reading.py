"""Reading a small record: never more bytes than such a record may have, whatever lies at its key."""

from __future__ import annotations

from typing import TypeVar

from ..errors import FormatError, IntegrityError
from ..storage.base import Storage
from . import schema

__all__ = ["read_bytes", "read_record"]

_T = TypeVar("_T", bound=schema.Sealed)


def read_bytes(storage: Storage, key: str, kind: type[schema.Sealed], size_bytes: int | None = None) -> bytes:
    """The bytes of the record at `key`. Not decoded: nothing in them is believed yet.

    Args:
        storage: the run's.
        key: where.
        kind: which record it is to be: says how large it may be.
        size_bytes: its size where a listing told it, which saves a request.

    Raises:
        NotFoundError: there is none.
        FormatError: it is larger than any such record, or shorter than it was listed.
    """
    if size_bytes is None:
        size_bytes = storage.stat(key).size_bytes
    where = f"{storage.url}: {key}"
    if size_bytes > kind.limit_bytes:
        raise FormatError(
            f"{where} is not a readable {kind.__name__}: it has {size_bytes} bytes, and none has more than "
            f"{kind.limit_bytes}. {kind.way_out}",
            where=where,
        )
    data = bytearray(size_bytes)
    try:
        storage.read_into(key, [(0, memoryview(data))])
    except IntegrityError as error:
        raise FormatError(f"{where} is not a readable {kind.__name__}: {error}. {kind.way_out}", where=where) from error
    return bytes(data)


def read_record(storage: Storage, key: str, kind: type[_T], size_bytes: int | None = None) -> _T:
    """The record at `key`. Arguments are those of `read_bytes`.

    Raises:
        NotFoundError: there is none.
        NewerFormatError: written by a newer resilio.
        FormatError: not such a record, or damaged.
    """
    return schema.decode(read_bytes(storage, key, kind, size_bytes), kind, f"{storage.url}: {key}")
