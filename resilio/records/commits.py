"""Commit records, and the pins that hold a copy of one and so can stand in for it."""

from __future__ import annotations

import logging
from dataclasses import dataclass, field

from ..errors import AccessDeniedError, FormatError, NotFoundError
from ..storage.base import Storage
from ..types import CheckpointRef
from . import keys, schema
from .reading import read_bytes, read_record

__all__ = ["Pin", "decode_commit", "find_commit", "find_commit_bytes", "list_pins", "read_pin"]

_log = logging.getLogger("resilio")


@dataclass(frozen=True, order=True)
class Pin:
    """A pin as a listing shows it: which checkpoint, its key, and its size."""

    ref: CheckpointRef
    key: str
    size_bytes: int | None = field(default=None, compare=False)


def find_commit(storage: Storage, ref: CheckpointRef, size_bytes: int | None = None) -> schema.CommitRecord:
    """The commit record of `ref`, or the copy that a pin holds of it. Pins are looked at only if there is no record.

    Args:
        storage: the run's.
        ref: which checkpoint.
        size_bytes: of the record where a listing told it, which saves a request.

    Raises:
        NotFoundError: there is neither.
        FormatError: the record cannot be understood, or is not the record of `ref`.
    """
    return decode_commit(find_commit_bytes(storage, ref, size_bytes), ref, f"{storage.url}: {keys.commit_key(ref)}")


def find_commit_bytes(storage: Storage, ref: CheckpointRef, size_bytes: int | None = None) -> bytes:
    """What `find_commit` decodes. Raises as it does, and FormatError only where the record is too large for one."""
    try:
        return read_bytes(storage, keys.commit_key(ref), schema.CommitRecord, size_bytes)
    except NotFoundError:
        for pin in list_pins(storage):
            if pin.ref != ref:
                continue
            try:
                return read_pin(storage, pin).commit.encode()
            except (NotFoundError, FormatError, AccessDeniedError) as error:
                _log.warning("pin passed over key=%s error=%s", pin.key, error)
        raise


def list_pins(storage: Storage) -> list[Pin]:
    """All pins, by checkpoint. One request; names that are not ours are left out."""
    listed = storage.list(keys.PINS)
    return sorted(Pin(ref, info.key, info.size_bytes) for info in listed if (ref := keys.parse_hold(info.key)))


def read_pin(storage: Storage, pin: Pin) -> schema.PinRecord:
    """A pin; the commit record in it is checked.

    Raises:
        NotFoundError: it is gone by now.
        FormatError: it or the commit record in it cannot be understood, or is not of the checkpoint in the pin's name.
    """
    where = f"{storage.url}: {pin.key}"
    record = read_record(storage, pin.key, schema.PinRecord, pin.size_bytes)
    if (record.generation, record.step) != (pin.ref.generation, pin.ref.step):
        raise FormatError(
            f"{where} says step {record.step}, generation {record.generation}: not what its name says", where=where
        )
    decode_commit(record.commit.encode(), pin.ref, where)
    return record


def decode_commit(data: bytes, ref: CheckpointRef, where: str) -> schema.CommitRecord:
    """The commit record in `data`, which must be that of `ref`.

    Raises:
        FormatError: it cannot be understood, or is another's.
    """
    record = schema.decode(data, schema.CommitRecord, where)
    if (record.generation, record.step) != (ref.generation, ref.step) or keys.parse_attempt(record.attempt) != ref:
        raise FormatError(
            f"{where} says step {record.step}, generation {record.generation}, folder {record.attempt!r}: not what its "
            "name says; it was copied, edited or damaged",
            where=where,
        )
    return record
