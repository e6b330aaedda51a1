"""Rank 0's side of a save: from "all ranks' bytes are durable" to "a checkpoint", and the sweep after it."""

from __future__ import annotations

import logging
import platform
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from importlib.metadata import version
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from .. import failpoints
from ..clock import Clock
from ..engine import Root
from ..engine.health import Health
from ..engine.trained import Trained
from ..errors import (
    AccessDeniedError,
    ConfigError,
    FencedError,
    FormatError,
    IntegrityError,
    InternalError,
    NewerFormatError,
    ResilioError,
    SaveError,
)
from ..events import Saved, Swept
from ..hooks import Calls, Host
from ..policies import KeepPolicy
from ..records import keys
from ..records.catalog import Catalog, RecordCache, discover
from ..records.digests import digest_of
from ..records.discard import discard
from ..records.fates import Explanation, explain
from ..records.protocol import RunWriter
from ..records.run import check_folder, open_run, read_run
from ..records.schema import FORMAT, Manifest, ObjectRecord, encode
from ..records.sweep import sweep
from ..storage.base import Storage
from ..types import CheckpointInfo, CheckpointRef, Scalar
from .choosing import Picker
from .quarantining import quarantine_findings
from .telling import Held, Teller

__all__ = ["Committer", "SaveJob", "numbers"]

_log = logging.getLogger("resilio")


def numbers(metrics: Mapping[str, Any]) -> dict[str, float]:
    """`metrics` as plain numbers. Reads tensors, which waits for their device: call it only when a save needs them.

    Raises:
        ConfigError: one is neither a number nor a tensor of one element, or its value is spread over ranks.
    """
    if not isinstance(metrics, Mapping):
        raise ConfigError(f"metrics={metrics!r}: give a mapping from names to numbers, such as {{'loss': loss}}")
    found: dict[str, float] = {}
    for name, value in metrics.items():
        try:
            if isinstance(value, str | bytes):
                raise TypeError("text")
            if isinstance(value, DTensor) and not all(placement.is_replicate() for placement in value.placements):
                raise ConfigError(  # rank 0's part is a number as well, and not the metric
                    f"metrics[{name!r}] is a DTensor whose value is spread over the ranks: pass its full_tensor(), "
                    "called on all of them",
                    metric=name,
                )
            found[str(name)] = float(value.detach() if isinstance(value, torch.Tensor) else value)
        except ConfigError:
            raise
        except (TypeError, ValueError, RuntimeError, OverflowError) as error:
            raise ConfigError(
                f"metrics[{name!r}] is {type(value).__name__}; it must be a number or a tensor of one element",
                metric=name,
            ) from error
    return found


class Committer:
    """What rank 0 keeps between saves: the commit protocol's view of the run, and the keep policy.

    Every rank has one, rank 0 alone uses its storage.
    """

    def __init__(
        self, storage: Storage, keep: KeepPolicy, clock: Clock, digest: str, teller: Teller | None = None
    ) -> None:
        self.storage = storage
        self.teller = teller or Teller(Calls(Host([])), storage.url, clock, coordinator=False)
        self.keep = keep
        self.clock = clock
        self.digest = digest
        self.writer = RunWriter(storage, clock=clock)
        self.records: RecordCache = {}
        self._picker: Picker | None = None  # what was restored from
        self.unfinished: frozenset[str] = frozenset()  # attempts whose deletion was begun and failed
        self._discarded: set[str] = set()  # failed attempts of which nothing is left
        self._trained: tuple[int, Trained] | None = None  # the last checkpoint since the live state was another
        self._run_id: str | None = None  # of the run that was seen here

    def keep_reasons(self, infos: list[CheckpointInfo]) -> dict[CheckpointRef, str]:
        """What the keep policy says of the checkpoints of the lineage, now."""
        return self.keep.reasons(infos, self.clock.wall_s())

    def explain(self) -> Explanation:
        """What the next sweep of this manager would do."""
        return explain(
            self.storage,
            self.keep_reasons,
            claims=self.teller.calls.pins,
            generation=self.writer.generation,
            failed=self.writer.failed | self.unfinished,
            begun=self.writer.begun,
            clock=self.clock,
        ).with_pins(self.storage)

    def begin_fresh(self) -> None:
        """A new run over whatever is there: it has been seen, and stays behind."""
        catalog = discover(self.storage, self.records)
        if catalog.commits:
            # A job that is restarted with the flag still there loses its progress this way: never without a word.
            _log.warning(
                "begun anew by fresh=True: %d checkpoint(s) are left off the lineage newest=%s url=%s",
                *(len(catalog.commits), catalog.newest or catalog.commits[-1], self.storage.url),
            )
        self.writer.fresh(catalog)
        self._meet_run(catalog)

    def restored(self, picker: Picker, chosen: CheckpointRef | None) -> None:
        """The job goes on from `chosen`. It is held until the first save of this manager: another manager's sweep must
        not take away what this one would need if it died before.
        """
        assert picker.catalog is not None  # rank 0 looked
        self._trained = None
        self.let_go()
        self._picker = picker
        self.writer.saw_restore(picker.catalog, chosen)
        self._meet_run(picker.catalog)
        if chosen is not None:
            quarantine_findings(self.storage, picker.findings, self.clock, self.teller)

    def note_trained(self, step: int, trained: Trained) -> None:
        """A checkpoint was made: warn if nothing was learned since the one before."""
        if self._trained is not None and trained.stale_after(self._trained[1]):
            _log.warning(
                "nothing was learned from step %d to step %d: every parameter that the optimizer has is bit for bit as "
                "it was, though the learning rate is not 0 and the optimizer has stepped. Is the model that is saved "
                "the one that is trained, and do its gradients arrive?",
                *(self._trained[0], step),
            )
        self._trained = step, trained

    def note_health(self, step: int, health: Health) -> None:
        """A checkpoint was made: warn if training cannot go on from its values."""
        if health.non_finite:
            _log.warning(
                "the checkpoint of step %d is NOT HEALTHY: %d value(s) of it are not finite: %s. It is kept like any "
                'other, and the newest healthy one lives beside it: restore("healthy") goes back to that, '
                "keep=keep_healthy(2) | … keeps more of them",
                *(step, health.non_finite, health),
            )

    def let_go(self) -> None:
        """Hold what was restored from no more."""
        if self._picker is not None:
            self._picker.let_go()

    def begin(self, step: int) -> str:
        """Name the attempt to save `step`. What failed attempts have left makes room for it. No rank writes now."""
        self.check_run()
        self.discard_failed()
        if self._picker is not None and self._picker.hold is not None and self._picker.hold.due:
            self._picker.hold.renew()
        return self.writer.begin_attempt(step)

    def discard_failed(self) -> None:
        """Delete what failed attempts of this manager have left. What cannot be deleted is tried again, and logged."""
        for attempt in sorted(self.writer.failed - self._discarded):
            try:
                discard(self.storage, attempt)
            except (ResilioError, OSError) as error:
                _log.warning("failed attempt not deleted yet attempt=%s error=%s", attempt, error)
                return
            self._discarded.add(attempt)

    def check_run(self, *, make: bool = False) -> None:
        """Pass if the run is there that was there before: it may be deleted, moved or unmounted under a job.

        Args:
            make: whether to make the run's record if none was ever seen.

        Raises:
            SaveError: it is gone.
            FencedError: another run lies in its place.
        """
        make = make and self._run_id is None
        try:
            found = open_run(self.storage) if make else read_run(self.storage)
        except NewerFormatError:
            raise
        except (FormatError, AccessDeniedError):
            return  # which run it is cannot be told; the first save of a generation says so
        url = self.storage.url
        if self._run_id is None:
            self._run_id = found.run_id if found else None
        elif found is None:
            raise SaveError(
                f"{url}: the run is gone: its {keys.RUN} was there, and is no more. The folder was deleted or moved, "
                "or its filesystem is no longer mounted. Bring it back, and the next save goes on; or call restore() "
                "to begin a new run here. Nothing was committed.",
                url=url,
            )
        elif found.run_id != self._run_id:
            raise FencedError(
                f"{url}: another run lies here now: {self._run_id} was deleted or moved, and {found.run_id} begun in "
                "its place. Stop this job if the other one is meant to run. Nothing was committed.",
                url=url,
                stored=False,
            )

    def _meet_run(self, catalog: Catalog) -> None:
        """Take the run that `catalog` lists for ours from now on."""
        self._run_id = None
        if catalog.commits:
            with suppress(ResilioError):  # a restore does not need it
                self.check_run()

    def job(self, attempt: str, step: int, world: int, metrics: dict[str, float], reason: str) -> SaveJob:
        """One attempt. What it will record is frozen here: the training loop is at another step when it commits."""
        about = self.teller.describe(step, world, metrics, reason)
        return SaveJob(self, attempt, step, world, metrics, reason, about, self.clock.monotonic_s(), Held(self.clock))


@dataclass
class SaveJob:
    """One attempt on its way to a checkpoint."""

    owner: Committer
    attempt: str
    step: int
    world: int
    metrics: dict[str, float]
    reason: str
    about: dict[str, dict[str, Scalar]]
    began_s: float
    held: Held
    size_bytes: int = 0
    non_finite: int | None = None
    told: bool = False  # plugins know how it ended

    @property
    def ref(self) -> CheckpointRef:
        """The checkpoint it would be."""
        ref = keys.parse_attempt(self.attempt)
        if ref is None:
            raise InternalError(f"{self.attempt!r} is no name of an attempt")
        return ref

    def commit(self, root: Root) -> CheckpointRef:
        """`.metadata`, manifest, a look at the folder, the commit record: in this order. Rank 0; in the saving
        thread. Returns the checkpoint.
        """
        storage = self.owner.storage
        wrote = sorted(part.rank for part in root.parts)
        if wrote != list(range(self.world)):
            raise InternalError(f"of {self.world} ranks only {wrote} said what they wrote; nothing was committed")
        storage.put(keys.attempt_key(self.attempt, keys.METADATA), root.metadata)
        failpoints.hit("save.before_manifest")
        metadata = ObjectRecord(
            name=keys.METADATA, size_bytes=len(root.metadata), digest=digest_of(root.metadata, self.owner.digest)
        )
        manifest = encode(
            Manifest(
                format=FORMAT,
                step=self.step,
                attempt=self.attempt,
                world=self.world,
                digest=self.owner.digest,
                parts=sorted(root.parts, key=lambda part: part.rank),
                objects=[metadata],
                ties=root.ties,
            )
        )
        storage.put(keys.attempt_key(self.attempt, keys.MANIFEST), manifest)
        expected = {**root.sizes, keys.METADATA: len(root.metadata), keys.MANIFEST: len(manifest)}
        self.owner.check_run(make=True)
        try:
            check_folder(storage, self.attempt, expected)
        except IntegrityError as error:
            raise self.cause(error) from None
        self.size_bytes = sum(expected.values())
        self.owner.writer.commit(
            self.attempt,
            manifest_size_bytes=len(manifest),
            manifest_digest=digest_of(manifest, self.owner.digest),
            world=self.world,
            size_bytes=self.size_bytes,
            metrics=self.metrics,
            reasons=[self.reason],
            versions=_versions(),
            about=self.about,
            non_finite=root.health.non_finite,
        )
        self.non_finite = root.health.non_finite
        self.owner.note_trained(self.step, root.trained)
        self.owner.note_health(self.step, root.health)
        _log.info(
            "saved step=%d generation=%d world=%d seconds=%.3f size_bytes=%d reason=%r",
            *(self.step, self.ref.generation, self.world, self.owner.clock.monotonic_s() - self.began_s),
            *(self.size_bytes, self.reason),
        )
        return self.ref

    def cause(self, error: BaseException) -> BaseException:
        """Why it failed: `error`, or that another manager owns the run now. That one collects what is being written
        here, and then a store says that things are missing which were there. Rank 0.
        """
        if not isinstance(error, FencedError):
            try:
                self.owner.writer.refuse_if_replaced(self.attempt)
            except FencedError as fenced:
                return fenced
        return error

    def failed(self, *, over: bool) -> None:
        """The attempt failed on some rank: what it left goes, at once if it is `over` on all ranks. Rank 0."""
        self.owner.writer.abandon(self.attempt)
        if over:
            self.owner.discard_failed()

    def tell_failed(self, error: BaseException) -> None:
        """Tell plugins that it failed, unless they know how it ended: a save ends once. Rank 0."""
        if not self.told:
            self.told = True
            self.owner.teller.save_failed(self.step, self.reason, error)

    def committed(self) -> None:
        """After the acknowledged commit: plugins hear of it, then comes the sweep. Rank 0; in the saving thread."""
        self.told = True
        self.owner.teller.tell(
            Saved,
            ref=self.ref,
            world=self.world,
            size_bytes=self.size_bytes,
            seconds=self.owner.clock.monotonic_s() - self.began_s,
            held_s=self.held.seconds,
            reason=self.reason,
            non_finite=self.non_finite,
        )
        self.sweep()

    def sweep(self) -> None:
        """Delete what has no reason to live any more. Rank 0; in the saving thread; a failure never fails training."""
        owner = self.owner
        owner.let_go()
        try:
            report = sweep(
                owner.storage,
                owner.keep_reasons,
                claims=owner.teller.calls.pins,
                generation=self.ref.generation,
                failed=owner.writer.failed | owner.unfinished,
                begun=owner.writer.begun,
                cache=owner.records,
                clock=owner.clock,
            )
        except Exception as error:  # noqa: BLE001  a policy of the user's own, or a storage, may raise anything
            _log.warning("sweep put off until the next save error=%s: %s", type(error).__name__, error)
            _log.debug("sweep", exc_info=True)
            owner.teller.tell(Swept, deleted=(), leftovers=0, failed=(f"{type(error).__name__}: {error}",))
            return
        owner.unfinished = frozenset(report.unfinished)
        if report.idle and report.fenced_by is None:
            _log.warning("swept nothing: %s", report.idle)
        if report.refused:
            _log.warning("swept nothing of the lineage: %s", report.refused)
        if report.deleted or report.attempts or report.failed:
            owner.teller.tell(
                Swept,
                deleted=tuple(report.deleted),
                leftovers=len(report.attempts),
                failed=tuple(report.failed),
            )
            _log.info(
                "swept checkpoints=%s leftovers=%d failed=%s",
                *([ref.step for ref in report.deleted], len(report.attempts), report.failed),
            )


@cache
def _versions() -> dict[str, str]:
    return {"resilio": version("resilio-ckpt"), "torch": str(torch.__version__), "python": platform.python_version()}
