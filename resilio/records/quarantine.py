"""Quarantine: a finding, written down, that a checkpoint must not be resumed from. Nothing is moved or deleted.

Any object in `quarantine/` that is named after a checkpoint counts, whatever it holds: a record that cannot be read may
have said the worst. `release` takes them away.
"""

from __future__ import annotations

import logging
import os
import secrets
import socket
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass

from ..clock import Clock, SystemClock
from ..errors import AccessDeniedError, ConfigError, FormatError, NoCheckpointError, NotFoundError
from ..storage.base import ObjectInfo, Storage
from ..types import CheckpointInfo, CheckpointRef, Damage
from . import keys, schema
from .commits import find_commit
from .reading import read_record
from .texts import clean

__all__ = ["Quarantine", "asked_twice", "listed", "quarantine", "quarantined", "release", "why"]

_TEXT_MAX = 500  # characters of a problem that are written down; and how many problems: the record stays small
_PROBLEMS_MAX = 100
_REASONS_MAX = 10  # told of one checkpoint

_log = logging.getLogger("resilio")


@dataclass(frozen=True)
class Quarantine:
    """What is written against one checkpoint.

    Attributes:
        ref: which.
        records: those that can be read, oldest first.
        unread: of each of the others, why not.
    """

    ref: CheckpointRef
    records: tuple[schema.QuarantineRecord, ...] = ()
    unread: tuple[str, ...] = ()

    @property
    def why(self) -> str:
        """The reasons as one text, printable: anybody may have written them."""
        said = [_said(record) for record in self.records]
        said += [f"its quarantine record cannot be read, and counts all the same: {text}" for text in self.unread]
        told = list(dict.fromkeys(said))
        more = [f"and {len(told) - _REASONS_MAX} more reasons"] if len(told) > _REASONS_MAX else []
        return "; ".join(clean(one) for one in [*told[:_REASONS_MAX], *more])


def quarantine(
    storage: Storage,
    ref: CheckpointRef,
    because: str,
    problems: Sequence[Damage] = (),
    *,
    more: int = 0,
    found_by: str = "person",
    attempt: str | None = None,
    clock: Clock | None = None,
) -> schema.QuarantineRecord | None:
    """Write down that a checkpoint must not be resumed from, until `release`. Its data stays as and where it is.

    The commit record is looked for after the finding and right before this is written: a sweep deletes it first, so
    what was found damaged was not being deleted while it was looked at.

    Ranks: any; local.

    Args:
        storage: the run's.
        ref: which checkpoint.
        because: why, in words.
        problems: what was found; the first hundred are written down.
        more: how many there are besides.
        found_by: ``person``, ``restore``, ``verify`` or ``drill``.
        attempt: the folder that was looked at, where it is known: it must still be this checkpoint's.
        clock: of the time in the record.

    Returns:
        What was written; None if the same was written before.

    Raises:
        NoCheckpointError: there is none, or another one by now; nothing is written.
        ConfigError: no reason is given, or one of more than 4,096 characters.
    """
    because = _text(because)
    if not because.strip() or len(because) > schema.TEXT_LIMIT:
        raise ConfigError(
            f"a quarantine says why, in 1 to {schema.TEXT_LIMIT} characters: whoever finds it must know whether to "
            "release it",
            ref=ref,
        )
    told = [
        schema.Finding(where=_text(one.where)[:_TEXT_MAX], what=_text(one.what)[:_TEXT_MAX])
        for one in problems[:_PROBLEMS_MAX]
    ]
    record = schema.QuarantineRecord(
        format=schema.FORMAT,
        step=ref.step,
        generation=ref.generation,
        because=because,
        found_by=found_by,
        problems=told,
        more=more + len(problems) - len(told),
        host=socket.gethostname(),
        pid=os.getpid(),
        time_s=(clock or SystemClock()).wall_s(),
        version=_version(),
    )
    known = _read(storage, ref, listed(storage).get(ref, []))
    if any(_same(record, one) for one in known.records):
        return None
    record.attempt = _still(storage, ref, attempt)
    storage.put(keys.quarantine_key(ref, secrets.token_hex(8)), schema.encode(record))
    _log.info("quarantined step=%d generation=%d because=%r", ref.step, ref.generation, because)
    return record


def release(storage: Storage, ref: CheckpointRef) -> int:
    """Take back all that is written against a checkpoint; return how many objects there were.

    Ranks: any; local.
    """
    found = [info.key for info in listed(storage).get(ref, [])]
    storage.delete(found)
    return len(found)


def listed(storage: Storage) -> dict[CheckpointRef, list[ObjectInfo]]:
    """Which checkpoints something is written against, and the objects. One request; nothing is read.

    Ranks: any; local.
    """
    found: dict[CheckpointRef, list[ObjectInfo]] = {}
    for info in storage.list(keys.QUARANTINE):
        ref = keys.parse_about(info.key)
        if ref is not None and info.key.count("/") == 1:  # by its name alone: nothing that leaves the folder
            found.setdefault(ref, []).append(info)
    return found


def quarantined(storage: Storage) -> dict[CheckpointRef, Quarantine]:
    """All that is written against checkpoints, those that are gone by now included.

    Ranks: any; local.
    """
    return {ref: _read(storage, ref, infos) for ref, infos in sorted(listed(storage).items())}


def why(storage: Storage, ref: CheckpointRef, objects: Sequence[ObjectInfo]) -> str | None:
    """The reasons in `objects`, which were listed; None if they are gone by now: it was released.

    Ranks: any; local.
    """
    return _read(storage, ref, objects).why or None


def asked_twice(
    keep: Callable[[list[CheckpointInfo]], Mapping[CheckpointRef, str]],
    infos: list[CheckpointInfo],
    usable: Collection[CheckpointRef],
) -> dict[CheckpointRef, str]:
    """What a keep policy says of all `infos`, and of those that are `usable`, not in quarantine: either reason counts.

    So three to keep are three that can be resumed from, and what is in quarantine lives as if it were not.
    """
    given = dict(keep(infos))
    if usable and len(usable) != len(infos):
        there = set(usable)
        for ref, reason in keep([info for info in infos if info.ref in there]).items():
            if reason and not given.get(ref):
                given[ref] = f"{reason}, of those that are not quarantined"
    return given


def _read(storage: Storage, ref: CheckpointRef, objects: Sequence[ObjectInfo]) -> Quarantine:
    records, unread = [], []
    for info in objects:
        try:
            record = read_record(storage, info.key, schema.QuarantineRecord, info.size_bytes)
            if (record.generation, record.step) != (ref.generation, ref.step):
                raise FormatError(
                    f"{storage.url}: {info.key} says step {record.step}, generation {record.generation}: not what its "
                    "name says"
                )
        except NotFoundError:
            continue
        except (FormatError, AccessDeniedError) as error:
            _log.warning("a quarantine record cannot be read, and counts key=%s error=%s", info.key, error)
            unread.append(str(error))
        else:
            records.append(record)
    return Quarantine(ref, tuple(sorted(records, key=lambda record: record.time_s)), tuple(unread))


def _still(storage: Storage, ref: CheckpointRef, attempt: str | None) -> str:
    """The folder of the checkpoint as its commit record says it now; what is known, where that cannot be read."""
    try:
        found = find_commit(storage, ref).attempt
    except NotFoundError as error:
        raise NoCheckpointError(f"{storage.url}: there is no checkpoint of {ref} any more", ref=ref) from error
    except (FormatError, AccessDeniedError):  # which may be the finding
        return attempt or ""
    if attempt is not None and found != attempt:
        raise NoCheckpointError(f"{storage.url}: {ref} is another checkpoint by now, in {found}", ref=ref)
    return found


def _same(one: schema.QuarantineRecord, other: schema.QuarantineRecord) -> bool:
    return (one.because, one.problems, one.more) == (other.because, other.problems, other.more)


def _said(record: schema.QuarantineRecord) -> str:
    if not record.problems:
        return record.because
    first, rest = record.problems[0], len(record.problems) - 1 + record.more
    what = first.what if first.where in first.what else f"{first.where}: {first.what}"
    return f"{record.because}: {what}" + (f", and {rest} more" if rest else "")


def _text(text: str) -> str:
    """What JSON can hold: a name in a message may have bytes that are no text."""
    return text.encode("utf-8", "backslashreplace").decode()


def _version() -> str:
    from importlib.metadata import PackageNotFoundError, version

    try:
        return version("resilio-ckpt")
    except PackageNotFoundError:
        return ""
