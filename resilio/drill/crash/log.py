"""What a scenario did, in order: operations of the store, calls to the filesystem, and what the job was told."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import NamedTuple

from ...types import CheckpointRef

__all__ = [
    "Begin",
    "Create",
    "Delete",
    "DiskCall",
    "Dropped",
    "Entry",
    "Known",
    "Link",
    "Log",
    "Mkdir",
    "Put",
    "Replace",
    "Sync",
    "SyncFolder",
    "Unlink",
    "Write",
]


class Known(NamedTuple):
    """What a job, or a person, had been promised at one moment; what a crash then must not take back.

    Attributes:
        acknowledged: checkpoints whose save was reported as done.
        newest: the last of them on the lineage.
        flying: checkpoints whose save was begun and is not over.
        doomed: checkpoints that a sweep may delete, by the scenario's own count.
        pinned: checkpoints whose pin was granted.
    """

    acknowledged: frozenset[CheckpointRef] = frozenset()
    newest: CheckpointRef | None = None
    flying: frozenset[CheckpointRef] = frozenset()
    doomed: frozenset[CheckpointRef] = frozenset()
    pinned: frozenset[CheckpointRef] = frozenset()


# ---- operations of the store; `lane`: which rank asked, None where nobody else could ask at the same time


@dataclass(frozen=True)
class Put:
    """An object appeared, whole. `late`: nobody knows when, if ever; it was asked for here."""

    key: str
    data: bytes
    if_absent: bool = False
    lane: int | None = None
    late: bool = False


@dataclass(frozen=True)
class Begin:
    """An upload was begun: nothing is visible of it but that."""

    key: str
    lane: int | None = None


@dataclass(frozen=True)
class Dropped:
    """An upload was given up."""

    key: str
    lane: int | None = None


@dataclass(frozen=True)
class Delete:
    """One request for these; in no order."""

    keys: tuple[str, ...]
    lane: int | None = None


# ---- calls to the filesystem; paths are relative to the storage's root, files have a number


@dataclass(frozen=True)
class Create:
    """A new, empty file."""

    path: str
    file: int


@dataclass(frozen=True)
class Write:
    """Bytes at a file's end."""

    file: int
    data: bytes


@dataclass(frozen=True)
class Sync:
    """fsync of a file."""

    file: int


@dataclass(frozen=True)
class Link:
    """A second name."""

    path: str
    new: str


@dataclass(frozen=True)
class Replace:
    """A rename over whatever is there."""

    path: str
    new: str


@dataclass(frozen=True)
class Unlink:
    """A name is gone."""

    path: str
    folder: bool = False


@dataclass(frozen=True)
class Mkdir:
    """A new folder."""

    path: str


@dataclass(frozen=True)
class SyncFolder:
    """fsync of a folder."""

    path: str


StoreCall = Put | Begin | Dropped | Delete
DiskCall = Create | Write | Sync | Link | Replace | Unlink | Mkdir | SyncFolder


class Entry(NamedTuple):
    """One entry: what was called, or None where only what is known changed; and what was known from then on."""

    call: StoreCall | DiskCall | None
    known: Known


@dataclass
class Log:
    """Collects entries.

    Attributes:
        entries: so far.
        known: as of now.
        truth: folder of an attempt -> name -> the bytes that a rank meant to write.
        broken: rules that were seen broken while recording: invariant and what happened.
    """

    entries: list[Entry] = field(default_factory=list)
    known: Known = field(default_factory=Known)
    truth: dict[str, dict[str, bytes]] = field(default_factory=dict)
    broken: list[tuple[str, str]] = field(default_factory=list)
    lane: int | None = None

    def add(self, call: StoreCall | DiskCall) -> None:
        """Note a call that took effect."""
        self.entries.append(Entry(call, self.known))

    @contextmanager
    def rank(self, rank: int) -> Iterator[None]:
        """What is asked for in the block is asked for by `rank`, while other ranks ask for other things."""
        self.lane = rank
        try:
            yield
        finally:
            self.lane = None

    def begun(self, ref: CheckpointRef) -> None:
        """A save of `ref` begins."""
        self._now(self.known._replace(flying=self.known.flying | {ref}))

    def over(self, ref: CheckpointRef) -> None:
        """The save of `ref` failed, before its commit was sent."""
        self._now(self.known._replace(flying=self.known.flying - {ref}))

    def acknowledged(self, ref: CheckpointRef) -> None:
        """The save of `ref` was reported as done."""
        known = self.known
        self._now(known._replace(acknowledged=known.acknowledged | {ref}, newest=ref, flying=known.flying - {ref}))

    def doomed(self, refs: set[CheckpointRef]) -> None:
        """A sweep that may delete `refs`, and nothing else, begins."""
        self._now(self.known._replace(doomed=self.known.doomed | refs))

    def pinned(self, ref: CheckpointRef) -> None:
        """A pin was granted. It may hold what is being deleted."""
        self._now(self.known._replace(pinned=self.known.pinned | {ref}))

    def unpinned(self, ref: CheckpointRef) -> None:
        """A pin is about to be taken away."""
        self._now(self.known._replace(pinned=self.known.pinned - {ref}))

    def note(self, invariant: str, what: str) -> None:
        """A rule was seen broken while recording."""
        self.broken.append((invariant, what))

    def _now(self, known: Known) -> None:
        self.known = known
        self.entries.append(Entry(None, known))
