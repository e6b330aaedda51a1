"""The run as a whole: its `resilio.json`, and whether what one host wrote is what this host sees."""

from __future__ import annotations

import uuid
from collections.abc import Mapping

from ..errors import AccessDeniedError, AlreadyExistsError, FormatError, IntegrityError, NewerFormatError, NotFoundError
from ..storage.base import Storage
from . import keys, schema
from .reading import read_record

__all__ = ["check_folder", "open_run", "read_run", "refuse_newer"]


def read_run(storage: Storage) -> schema.RunRecord | None:
    """The run's record, None if nothing was ever saved here.

    Raises:
        NewerFormatError: a newer resilio wrote this run.
        FormatError: not readable.
    """
    try:
        return read_record(storage, keys.RUN, schema.RunRecord)
    except NotFoundError:
        return None


def refuse_newer(storage: Storage) -> None:
    """Pass unless a newer resilio wrote this run: what its checkpoints mean, only that one knows.

    A record that cannot be read at all says nothing about them, and is left for the next save to stumble on.

    Raises:
        NewerFormatError: a newer resilio wrote this run.
    """
    try:
        read_run(storage)
    except NewerFormatError:
        raise
    except (FormatError, AccessDeniedError):
        pass


def open_run(storage: Storage, run_id: str | None = None) -> schema.RunRecord:
    """The run's record, made now if there is none; of several who make it at once one wins and all adopt it.

    Raises:
        NewerFormatError: a newer resilio wrote this run; nothing may be added to it.
        FormatError: not readable.
    """
    found = read_run(storage)
    if found is not None:
        return found
    made = schema.RunRecord(format=schema.FORMAT, run_id=run_id or uuid.uuid4().hex)
    try:
        storage.put(keys.RUN, schema.encode(made), if_absent=True)
    except AlreadyExistsError:
        # Another's, or our own whose answer was lost: both are the run's from now on.
        return read_record(storage, keys.RUN, schema.RunRecord)
    return made


def check_folder(storage: Storage, attempt: str, expected: Mapping[str, int]) -> None:
    """Pass if this host's listing of the attempt's folder has every expected object at its size.

    Args:
        storage: the run's.
        attempt: name of the folder.
        expected: name of the object within the folder -> length in bytes, as the ranks reported.

    Raises:
        IntegrityError: objects are missing or of another size; attributes `missing` and `differing` name them.
    """
    prefix = f"{attempt}/"
    found = {info.key.removeprefix(prefix): info.size_bytes for info in storage.list(prefix)}
    missing = sorted(name for name in expected if name not in found)
    differing = sorted(name for name, size in expected.items() if name in found and found[name] != size)
    if not missing and not differing:
        return
    says = []
    if missing:
        says.append(f"missing: {_some(missing)}")
    if differing:
        says.append("of another size: " + _some([f"{n} ({found[n]} bytes, not {expected[n]})" for n in differing]))
    raise IntegrityError(
        f"{storage.url}: {attempt} does not hold what the ranks say they wrote; {'; '.join(says)}. "
        "Nothing was committed. If the URL is a file:// path, it must be one file system that all hosts share.",
        attempt=attempt,
        missing=missing,
        differing=differing,
    )


def _some(names: list[str], limit: int = 8) -> str:
    return ", ".join(names[:limit]) + (f" and {len(names) - limit} more" if len(names) > limit else "")
