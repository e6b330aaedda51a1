"""Reasons to live that are written down in the store: pins, of people, and leases, of readers while they read.

Who holds a checkpoint writes the hold first and reads the commit record and finds the manifest again afterwards; who
deletes one looks for holds, deletes the commit record, and looks again before the rest. Whatever the two do in between
each other, a hold that was granted has a whole checkpoint behind it.

Source: the order is the project's own, checked by an explicit-state model; it is the store-side form of a hazard
pointer (M. Michael, 2004): publish, then look again.
"""

from __future__ import annotations

import logging
import os
import secrets
import socket
from collections.abc import Iterator
from types import TracebackType

from ..clock import Clock, SystemClock
from ..errors import (
    AccessDeniedError,
    ConfigError,
    FormatError,
    NoCheckpointError,
    NotFoundError,
    OutOfSpaceError,
    StorageError,
)
from ..storage.base import ObjectInfo, Storage
from ..types import CheckpointRef
from . import keys, schema
from .commits import decode_commit, find_commit_bytes, list_pins, read_pin
from .reading import read_bytes, read_record

__all__ = ["LEASE_TTL_S", "Holds", "Lease", "lease", "pin", "pins", "unpin"]

LEASE_TTL_S = 7200.0  # of a lease, unless its reader says otherwise
_CLOCKS_DIFFER_S = 86_400.0  # by how much two hosts' clocks are believed to differ, where the store's does not count
_LONG_AGO_S = 86_400.0  # since when a lease must have run out to be removed

_log = logging.getLogger("resilio")


def pin(storage: Storage, ref: CheckpointRef, because: str, clock: Clock | None = None) -> schema.PinRecord:
    """Keep a checkpoint until `unpin`, whatever policies say. May be pinned more than once, each with its reason.

    It is written under a lease. So a pin that is there was granted, even if who wrote it died right afterwards, and may
    stand in for a commit record that is gone.

    Ranks: any; local.

    Raises:
        NoCheckpointError: there is none, or it was being deleted; nothing is pinned.
        ConfigError: no reason is given.
        StorageError: the store failed. It may be pinned all the same, and is held until the lease runs out.
    """
    if not because.strip():
        raise ConfigError("a pin says why: whoever finds it in a year must know whether it may go", ref=ref)
    with lease(storage, ref, clock, owner="pin") as hold:
        record = schema.PinRecord(
            format=schema.FORMAT,
            step=ref.step,
            generation=ref.generation,
            because=because,
            commit=hold.data.decode(),
            host=socket.gethostname(),
            pid=os.getpid(),
            time_s=(clock or SystemClock()).wall_s(),
        )
        key, data = keys.pin_key(ref, secrets.token_hex(8)), schema.encode(record)
        try:
            stored_s = storage.put(key, data).modified_s
        except BaseException:
            # Whatever the last answer was, a request may be on its way, and what it pins must be whole when it arrives.
            hold.let_run_out()
            raise
        if not hold.sure_at(stored_s):
            # The lease could not be written, or ran out over this: the pin must be granted by itself.
            try:
                _find_manifest(storage, ref, read_bytes(storage, keys.commit_key(ref), schema.CommitRecord))
            except NotFoundError as error:
                _delete(storage, [key])
                raise _gone(storage, ref) from error
    _log.info("pinned step=%d generation=%d because=%r", ref.step, ref.generation, because)
    return record


def unpin(storage: Storage, ref: CheckpointRef) -> int:
    """Remove all pins of a checkpoint; return how many there were. It then lives as policies say.

    Where a pin stood in for the commit record, what it held is garbage from now on.

    Ranks: any; local.
    """
    found = [pin.key for pin in list_pins(storage) if pin.ref == ref]
    storage.delete(found)
    return len(found)


def pins(storage: Storage) -> list[schema.PinRecord]:
    """All pins, by generation and step. One that cannot be read still holds, but is passed over here, with a warning.

    Ranks: any; local.
    """
    found = []
    for one in list_pins(storage):
        try:
            found.append(read_pin(storage, one))
        except NotFoundError:
            continue
        except (FormatError, AccessDeniedError) as error:
            _log.warning("pin passed over key=%s error=%s", one.key, error)
    return found


def lease(
    storage: Storage,
    ref: CheckpointRef,
    clock: Clock | None = None,
    *,
    ttl_s: float = LEASE_TTL_S,
    owner: str = "",
) -> Lease:
    """Keep a checkpoint while it is read: until `release`, or for `ttl_s` if the reader is killed.

    Where the store lets nobody write (denied, or full) it is read without a lease, which is said in the log: a run on
    read-only storage must still be restorable.

    Ranks: rank 0, for all.

    Args:
        storage: the run's.
        ref: which checkpoint.
        clock: for durations, and for times where the store does not tell them.
        ttl_s: how long it holds unless renewed.
        owner: who reads, for people.

    Raises:
        NoCheckpointError: there is none, or it was being deleted; nothing is held.
        ConfigError: `ttl_s` is not within 0 and 31 days.
    """
    if not 0 < ttl_s <= schema.LEASE_LIMIT_S:
        raise ConfigError(f"ttl_s={ttl_s}: a lease lasts more than 0 and up to {schema.LEASE_LIMIT_S} seconds")
    return Lease(storage, ref, clock or SystemClock(), ttl_s, owner)


class Lease:
    """A reader's hold on a checkpoint, granted. Made by `lease`; a context manager that releases.

    Not thread-safe.

    Attributes:
        ref: the checkpoint.
        commit: its commit record, read after the lease was written.
        data: the bytes of that.
    """

    def __init__(self, storage: Storage, ref: CheckpointRef, clock: Clock, ttl_s: float, owner: str) -> None:
        self.ref = ref
        self._storage = storage
        self._clock = clock
        self._ttl_s = ttl_s
        self._owner = owner
        self._written: list[str] = []  # keys
        self._until_s = self._due_s = clock.monotonic_s()
        self._until_wall_s = clock.wall_s()
        self._until_store_s: float | None = None
        try:
            self._write()
        except (AccessDeniedError, OutOfSpaceError) as error:
            _log.warning("read without a lease step=%d url=%s error=%s", ref.step, storage.url, error)
        self.data = self._look()
        try:
            self.commit = decode_commit(self.data, ref, f"{storage.url}: {keys.commit_key(ref)}")
        except Exception:
            self.release()
            raise

    @property
    def held(self) -> bool:
        """Whether there is an object in the store. False where it could not be written, and after `release`."""
        return bool(self._written)

    @property
    def sure(self) -> bool:
        """Whether it has not run out yet, by this host's clocks; one alone may have stood still, or was set back."""
        return self.held and self._clock.monotonic_s() < self._until_s and self._clock.wall_s() < self._until_wall_s

    def sure_at(self, stored_s: float | None) -> bool:
        """Whether it had not run out when an object was stored, at `stored_s` by the store's clock if that tells."""
        if stored_s is not None and self._until_store_s is not None and stored_s >= self._until_store_s:
            return False
        return self.sure

    @property
    def due(self) -> bool:
        """Whether half of its time has passed: time to `renew`. Asks nothing of the store."""
        return self.held and self._clock.monotonic_s() >= self._due_s

    def renew(self) -> None:
        """Hold for another `ttl_s`: a new object. Nothing is done where nothing is held.

        The one before stays beside it until `release`, so that no listing can fall between the two. A store that does
        not take it is logged, and asked again when it is next `due`.

        Raises:
            NoCheckpointError: it had run out, and the checkpoint was deleted meanwhile.
            StorageError: it had run out, and the store could not be looked at. Nothing is held any more.
        """
        if not self.held:
            return
        try:
            unbroken = self._write()
        except StorageError as error:
            self._due_s = self._clock.monotonic_s() + self._ttl_s / 8
            _log.warning("lease not renewed step=%d url=%s error=%s", self.ref.step, self._storage.url, error)
            return
        if not unbroken:
            self._look()

    def release(self) -> None:
        """Hold no more. Idempotent, and never fails: what cannot be deleted runs out."""
        if self._written:
            _delete(self._storage, self._written)
        self._written = []

    def let_run_out(self) -> None:
        """Look after it no more, and leave what is written: it holds for what is left of its time."""
        self._written = []

    def __enter__(self) -> Lease:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.release()

    def _look(self) -> bytes:
        try:
            data = find_commit_bytes(self._storage, self.ref)
            _find_manifest(self._storage, self.ref, data)
        except Exception as error:
            self.release()
            if isinstance(error, NotFoundError):
                raise _gone(self._storage, self.ref) from error
            raise
        return data

    def _write(self) -> bool:
        """Write a new object. Whether the one before still held when it was there: then so did what they hold."""
        record = schema.LeaseRecord(
            format=schema.FORMAT,
            step=self.ref.step,
            generation=self.ref.generation,
            ttl_s=self._ttl_s,
            owner=self._owner,
            host=socket.gethostname(),
            pid=os.getpid(),
            time_s=self._clock.wall_s(),
        )
        key = keys.lease_key(self.ref, secrets.token_hex(8))
        # Before the store's time of it: by our clocks it ends first.
        began_s, began_wall_s = self._clock.monotonic_s(), self._clock.wall_s()
        stored_s = self._storage.put(key, schema.encode(record)).modified_s
        unbroken = self.sure_at(stored_s)
        self._written.append(key)
        self._until_s, self._due_s = began_s + self._ttl_s, began_s + self._ttl_s / 2
        self._until_wall_s = began_wall_s + self._ttl_s
        self._until_store_s = None if stored_s is None else stored_s + self._ttl_s
        return unbroken


class Holds:
    """One look at who holds what. Leases are listed first: a reader that turns its lease into a pin is always seen.

    Args:
        storage: the run's.
        now_s: a moment that has surely come, by the store's clock; None where it does not tell.
        clock: judges leases where the store's does not.

    Raises:
        StorageError: it could not look.
    """

    def __init__(self, storage: Storage, now_s: float | None, clock: Clock) -> None:
        self._storage = storage
        self._now_s = now_s
        self._clock = clock
        self._leases = list(storage.list(keys.LEASES))
        self._pins = [info.key for info in storage.list(keys.PINS)]

    def of(self, ref: CheckpointRef) -> str | None:
        """Why `ref` must stay: a pin or lease is named after it; None if none is.

        A lease that ran out does not count. One that cannot be read, or vanishes while it is looked at, does: it may
        have been renewed.

        Raises:
            StorageError: it could not look.
        """
        if any(keys.holds(key, ref) for key in self._pins):
            return "pinned"
        if any(keys.holds(info.key, ref) and not self._ran_out(info) for info in self._leases):
            return "leased"
        return None

    def run_out(self) -> Iterator[str]:
        """Keys of leases that ran out a day ago or more: nobody needs them any more."""
        for info in self._leases:
            if not keys.parse_hold(info.key):
                continue
            if info.modified_s is not None and self._now_s is not None and self._now_s - info.modified_s < _LONG_AGO_S:
                continue  # without reading it
            if self._ran_out(info, by_s=_LONG_AGO_S):
                yield info.key

    def _ran_out(self, info: ObjectInfo, by_s: float = 0.0) -> bool:
        try:
            record = read_record(self._storage, info.key, schema.LeaseRecord, info.size_bytes)
        except (NotFoundError, FormatError, AccessDeniedError):
            return False
        if info.modified_s is not None and self._now_s is not None:
            age_s = self._now_s - info.modified_s
        else:
            age_s = self._clock.wall_s() - record.time_s - _CLOCKS_DIFFER_S
        return age_s > record.ttl_s + by_s


def _find_manifest(storage: Storage, ref: CheckpointRef, commit: bytes) -> None:
    """Pass if the manifest of the checkpoint with this commit record is there, else raise NotFoundError."""
    attempt = decode_commit(commit, ref, f"{storage.url}: {keys.commit_key(ref)}").attempt
    storage.stat(keys.attempt_key(attempt, keys.MANIFEST))


def _gone(storage: Storage, ref: CheckpointRef) -> NoCheckpointError:
    return NoCheckpointError(
        f"{storage.url}: there is no checkpoint of {ref}, or it is being deleted; choose another one", ref=ref
    )


def _delete(storage: Storage, which: list[str]) -> None:
    try:
        storage.delete(which)
    except (StorageError, OSError) as error:
        _log.warning("left behind keys=%s url=%s error=%s", which, storage.url, error)
