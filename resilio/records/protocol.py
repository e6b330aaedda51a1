"""How an attempt becomes a checkpoint: the commit protocol, rank 0's side. No clock decides, and no lock is taken.

A manager that writes has a *generation*: a number created at its first save, once, by whoever comes first. It may
commit as long as no newer one exists, and it acknowledges a save only after it has looked once more. So of two managers
that write to one run at most one goes on being told that its saves are good, and the other learns why not.

Source: an explicit-state model of managers, crashes, pauses, rollbacks, lost answers; each look it calls for is here.
"""

from __future__ import annotations

import os
import secrets
import socket
from collections.abc import Callable, Iterable, Mapping
from typing import Any, NoReturn

from .. import failpoints
from ..clock import Clock, SystemClock
from ..errors import (
    AlreadyExistsError,
    ConfigError,
    FencedError,
    FormatError,
    NotFoundError,
    ResilioError,
    SaveError,
    StorageError,
    ThrottledError,
    TransientError,
)
from ..storage.base import Storage
from ..types import CheckpointRef, Scalar
from . import keys, schema
from .catalog import Catalog, discover, list_generations, read_generation
from .owners import owner_of, replaced_by
from .reading import read_bytes
from .run import open_run
from .values import encode_metrics

__all__ = ["RunWriter"]


class RunWriter:
    """One manager's right to write to a run.

    Ranks: rank 0. Not thread-safe: a save is settled before the next begins.

    Args:
        storage: the run's.
        clock: for times in records and waits between repeated requests.
        nonce: what tells this manager's records from another's; random by default.
        patience_s: how long a create whose answer is lost is repeated before `commit` gives up; a commit is taken up
            again by the next `begin_attempt`.
    """

    def __init__(
        self, storage: Storage, clock: Clock | None = None, nonce: str | None = None, patience_s: float = 600.0
    ) -> None:
        self.storage = storage
        self.nonce = nonce or secrets.token_hex(16)
        self._clock: Clock = clock or SystemClock()
        self._patience_s = patience_s
        self._asked = False  # restore() or fresh=True
        self._seen: frozenset[CheckpointRef] = frozenset()
        self._newest_seen = 0  # generation
        self._requested = 0  # generation whose record was asked for last; that request may arrive at any time
        self._parent: CheckpointRef | None = None
        self._ancestors: list[CheckpointRef] = []
        self._generation: int | None = None  # chosen; its record exists once _entered
        self._entered = False
        self._last: CheckpointRef | None = None  # newest commit of our generation
        self._pending: tuple[CheckpointRef, bytes] | None = None  # a commit that was sent and is not answered
        self._failed: set[str] = set()
        self._begun: set[str] = set()
        self._sent: set[str] = set()  # attempts whose commit was sent: never called failed, whatever came back
        self._fenced: tuple[str, dict[str, Any]] | None = None  # by whom, for people and for programs

    @property
    def generation(self) -> int | None:
        """The generation this manager writes as; None before its first attempt."""
        return self._generation

    @property
    def last(self) -> CheckpointRef | None:
        """The newest checkpoint that this generation has committed."""
        return self._last

    @property
    def failed(self) -> frozenset[str]:
        """Attempts of ours that failed before their commit was sent: garbage that sweep may collect."""
        return frozenset(self._failed)

    @property
    def begun(self) -> frozenset[str]:
        """All attempts that this manager has begun."""
        return frozenset(self._begun)

    def saw_restore(self, catalog: Catalog, chosen: CheckpointRef | None) -> None:
        """Note that `restore` saw `catalog` and went on from `chosen`, or found nothing there.

        Going back to another checkpoint than the last one of this generation ends the generation: the next save begins
        a new one on its own branch.

        Raises:
            ConfigError: there are checkpoints and none was chosen: that is never a fresh start.
        """
        if chosen is None and catalog.commits:
            raise ConfigError(
                f"{self.storage.url} holds {len(catalog.commits)} checkpoints and none was restored; that is no fresh "
                "start. Restore one by its step, or pass fresh=True to begin a new line beside them.",
            )
        # A commit without an answer that this catalog does not show is left behind like any other later one.
        goes_on = (
            chosen is not None
            and chosen == self._last
            and self._pending is None
            and catalog.newest_generation == self._generation
        )
        self._see(catalog)
        if not goes_on:
            self._branch(chosen, catalog.line_of(chosen) if chosen else [])

    def fresh(self, catalog: Catalog) -> None:
        """Note that a new line was asked for beside what `catalog` lists; that stays, off the lineage."""
        self._see(catalog)
        self._branch(None, [])

    def begin_attempt(self, step: int) -> str:
        """Begin a save: the name of the attempt's folder. Its generation is decided; nothing is written.

        Settles a commit that was left without an answer first.

        Args:
            step: optimizer steps completed.

        Raises:
            FencedError: another manager owns the run, or checkpoints exist that `restore` was never asked about.
            ConfigError: the step is not after the last one of this generation.
        """
        self._refuse_if_fenced()
        if self._pending is not None:
            self._send_pending()
        if not self._asked:
            catalog = discover(self.storage)
            if catalog.commits:
                raise FencedError(
                    f"{self.storage.url} already holds {len(catalog.commits)} checkpoints (newest: "
                    f"{catalog.newest}) that this manager has not restored from: call restore() before the first save, "
                    "or pass fresh=True to begin a new line beside them. Nothing was written.",
                    newest=catalog.newest,
                )
            self.saw_restore(catalog, None)
        if self._last is not None and step <= self._last.step:
            raise ConfigError(
                f"step {step} was to be saved after step {self._last.step}: steps only grow within a generation. To go "
                "back, call restore(which=...); what is saved then begins a new branch.",
                step=step,
                last=self._last.step,
            )
        if self._parent is not None and step < self._parent.step:
            raise ConfigError(
                f"step {step} was to be saved in a run that was restored at step {self._parent.step}; count on from "
                "there (ckpt.next_step), restore an older step, or pass fresh=True.",
                step=step,
                last=self._parent.step,
            )
        if self._generation is None:
            # A record of an earlier branch that comes late names the parent of that one: never the same number again.
            self._generation = max(self._newest_seen, self._requested) + 1
        attempt = keys.attempt_name(step, self._generation, secrets.token_hex(4))
        self._begun.add(attempt)
        return attempt

    def abandon(self, attempt: str) -> None:
        """Note that an attempt of ours failed: garbage, unless its commit was sent and may still arrive."""
        if attempt not in self._sent:
            self._failed.add(attempt)

    def commit(
        self,
        attempt: str,
        *,
        manifest_size_bytes: int,
        manifest_digest: str,
        world: int,
        size_bytes: int = 0,
        metrics: Mapping[str, float] | None = None,
        reasons: Iterable[str] = (),
        versions: Mapping[str, str] | None = None,
        about: Mapping[str, dict[str, Scalar]] | None = None,
        non_finite: int | None = None,
    ) -> CheckpointRef:
        """Make an attempt a checkpoint. All else of it is on storage already, its manifest last.

        Blocks: while the store does not answer, for up to `patience_s`.

        Args:
            attempt: from `begin_attempt`.
            manifest_size_bytes: length of `manifest.json`.
            manifest_digest: its digest.
            world: number of ranks that saved.
            size_bytes: total of the attempt.
            metrics: rank 0's.
            reasons: why it was saved.
            versions: of resilio, torch, python.
            about: what plugins say of it.
            non_finite: how many values make it unhealthy; None: not counted.

        Returns:
            The checkpoint, acknowledged.

        Raises:
            FencedError: another manager owns the run; attributes `generation`, `host`, `pid` and `time_s` say which, as
                far as its record can be read. Attribute `stored`: True if the checkpoint was stored all the same (who
                owns the run may collect it), None if that is not known.
            SaveError: the store gave no answer in time; the next attempt asks it again.
            StorageError: the store refused.
        """
        ref = keys.parse_attempt(attempt)
        if ref is None or ref.generation != self._generation:
            raise ConfigError(f"{attempt!r} is no attempt of this manager's generation {self._generation}")
        record = schema.CommitRecord(
            format=schema.FORMAT,
            step=ref.step,
            generation=ref.generation,
            attempt=attempt,
            manifest_size_bytes=manifest_size_bytes,
            manifest_digest=manifest_digest,
            nonce=self.nonce,
            time_s=self._clock.wall_s(),
            world=world,
            size_bytes=size_bytes,
            metrics=encode_metrics(metrics or {}),
            reasons=list(reasons),
            versions=dict(versions or {}),
            about=dict(about or {}),
            non_finite=non_finite,
        )
        try:
            data = schema.encode(record)
            self._refuse_if_fenced()
            self._enter()
            failpoints.hit("save.before_commit")
            self._look(ref, stored=False)
        except BaseException:
            self.abandon(attempt)
            raise
        self._sent.add(attempt)
        self._pending = ref, data
        self._send_pending()
        return ref

    def refuse_if_replaced(self, attempt: str) -> None:
        """Pass if this manager still owns the run, or the store does not say. Asked when `attempt` has failed.

        Who owns the run collects the attempts of those before it, under their hands if they still write. One whose
        commit was sent has had its answer about that.

        Raises:
            FencedError: another manager owns the run.
        """
        if attempt in self._sent:
            return
        own = self._generation or 0
        try:
            newest = max(list_generations(self.storage), default=0)
            ours = newest != own or self._entered or read_generation(self.storage, own).nonce == self.nonce
        except ResilioError:
            return
        if newest > own or not ours:
            self._fence(newest, stored=False)

    def _see(self, catalog: Catalog) -> None:
        self._asked = True
        self._seen = frozenset(catalog.commits)
        self._newest_seen = max([catalog.newest_generation, *(ref.generation for ref in catalog.commits)])

    def _branch(self, parent: CheckpointRef | None, ancestors: list[CheckpointRef]) -> None:
        self._parent, self._ancestors = parent, ancestors
        self._generation, self._entered, self._last = None, False, None
        # A commit of the generation left behind is not repeated; should it still appear, it was not seen and fences us.
        self._pending, self._fenced = None, None

    def _enter(self) -> None:
        """First save of the generation: test, create its record, list and test again."""
        if self._entered:
            return
        assert self._generation is not None
        open_run(self.storage)
        catalog = self._test_newest()
        there = set(catalog.commits)
        record = schema.GenerationRecord(
            format=schema.FORMAT,
            generation=self._generation,
            nonce=self.nonce,
            parent=_parent_ref(self._parent) if self._parent else None,
            ancestors=[_parent_ref(ref) for ref in self._ancestors if ref in there],
            host=socket.gethostname(),
            pid=os.getpid(),
            time_s=self._clock.wall_s(),
        )
        failpoints.hit("generation.before_create")
        self._requested = self._generation
        key = keys.generation_key(self._generation)
        existing = self._create(key, schema.GenerationRecord, schema.encode(record), lambda: None)
        if existing is not None:
            # Ours already if an answer was lost, or an earlier attempt of ours failed between here and its commit.
            other = schema.decode(existing, schema.GenerationRecord, f"{self.storage.url}: {key}")
            if other.nonce != self.nonce:
                self._fence(self._generation, stored=False)
        failpoints.hit("generation.created")
        self._test_newest()
        self._entered = True

    def _test_newest(self) -> Catalog:
        """The newest checkpoint that counts must be one seen at restore; else somebody has gone on since."""
        assert self._generation is not None
        catalog = discover(self.storage)
        if catalog.newest_generation > self._generation:
            self._fence(catalog.newest_generation, stored=False)
        newest = catalog.newest
        if newest is not None and newest not in self._seen:
            if any(keys.parse_attempt(attempt) == newest for attempt in self._sent):
                facts: dict[str, Any] = {"generation": newest.generation}
                self._fenced = f"the commit of {newest}, its own, which came late", facts
                whose = "this manager's own: its own request, which had no answer, arrived only after the restore"
            else:
                who, facts = owner_of(self.storage, newest.generation)
                self._fenced = who, facts
                whose = f"{who}'s, committed after this manager restored"
            raise FencedError(
                f"{self.storage.url}: the newest checkpoint, {newest}, is {whose}; going on would leave it behind. "
                "Nothing was committed. Call restore() to go on from it, or pass fresh=True to begin a line beside it.",
                newest=newest,
                stored=False,
                **facts,
            )
        return catalog

    def _send_pending(self) -> None:
        """Create the commit record until there is an answer, then look whether it may be acknowledged."""
        assert self._pending is not None
        ref, data = self._pending
        try:
            existing = self._create(
                keys.commit_key(ref), schema.CommitRecord, data, lambda: self._look(ref, stored=None)
            )
        except (FencedError, FormatError):  # FormatError: what lies there is no commit record, so not ours
            self._pending = None
            raise
        if existing is not None and existing != data:
            self._pending = None
            raise SaveError(
                f"{self.storage.url}: another commit record of {ref} exists; this attempt is no checkpoint", ref=ref
            )
        self._pending, self._last = None, ref
        failpoints.hit("save.committed")
        self._look(ref, stored=True)
        failpoints.hit("save.acknowledged")

    def _create(self, key: str, kind: type[schema.Sealed], data: bytes, look: Callable[[], None]) -> bytes | None:
        """Create an object, repeated with the same bytes until answered. None if we made it, else what is there.

        `look` is called between tries, and raises if it is no use to go on.
        """
        give_up_s = self._clock.monotonic_s() + self._patience_s
        pause_s = 0.1
        sent_before = False
        while True:
            try:
                if sent_before:
                    look()
                try:
                    self.storage.put(key, data, if_absent=True)
                    return None
                except AlreadyExistsError:
                    sent_before = True
                    return read_bytes(self.storage, key, kind)
            except (TransientError, ThrottledError, NotFoundError) as error:
                # NotFound: somebody deleted it after it "existed". Only a newer generation does, so look.
                sent_before = True
                if self._clock.monotonic_s() >= give_up_s:
                    raise SaveError(
                        f"{self.storage.url}: no answer for {key} in {self._patience_s:.0f} s ({error}); whether it is "
                        "stored is not known. The next save asks again.",
                        key=key,
                    ) from error
            except StorageError:
                if not sent_before:
                    self._pending = None  # a clear refusal of the only request: nothing is stored
                raise
            self._clock.sleep(pause_s)
            pause_s = min(pause_s * 2, 5.0)

    def _look(self, ref: CheckpointRef, stored: bool | None) -> None:
        newest = max(list_generations(self.storage), default=0)
        if newest > ref.generation:
            self._fence(newest, stored, ref)

    def _fence(self, by: int, stored: bool | None, ref: CheckpointRef | None = None) -> NoReturn:
        who, facts = self._fenced = owner_of(self.storage, by)
        raise replaced_by(who, facts, self.storage.url, self._generation, stored, ref)

    def _refuse_if_fenced(self) -> None:
        if self._fenced is not None:
            who, facts = self._fenced
            raise FencedError(
                f"{self.storage.url}: this manager was fenced by {who} and writes no more; call restore() to go on "
                "from what is there.",
                own=self._generation,
                stored=False,
                **facts,
            )


def _parent_ref(ref: CheckpointRef) -> schema.ParentRef:
    return schema.ParentRef(generation=ref.generation, step=ref.step)
