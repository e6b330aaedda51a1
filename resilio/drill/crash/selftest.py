"""The selftest: record each scenario on a storage, make up every crash, judge every state, clean up."""

from __future__ import annotations

import logging
import secrets
import time
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from random import Random

from ...clock import FakeClock
from ...errors import ConfigError, ResilioError
from ...storage.base import Storage
from ...storage.disk import Disk
from ...storage.files import temp_name
from ...storage.local import LocalStorage
from ...storage.retrying import RetryingStorage
from .invariants import Judge
from .log import Known, Log
from .objects import ObjectStates
from .plants import HEALTHY, PLANTS, Plant
from .posix import PosixStates
from .recorder import RecordingDisk, RecordingStorage, Scratch
from .scenarios import SCENARIOS, Stage
from .states import Found, ModelStorage, State

__all__ = ["EXHAUSTIVE", "ON_STORAGE", "Report", "ScenarioReport", "Violation", "crash_selftest"]

ENOUGH = 25  # states with something wrong, of one scenario at one level, after which it is enough
SHOWN = 20  # violations that a report lists of one scenario; all are counted
EXHAUSTIVE = 4  # things at once of which every subset is tried
ON_STORAGE = 2  # states of each scenario and level that are also judged on the storage itself

Progress = Callable[[str, int, int], None]


@dataclass(frozen=True)
class Violation:
    """A state in which an invariant does not hold.

    Attributes:
        invariant: its name, see `INVARIANTS`.
        scenario: in which it happened.
        level: ``objects`` or ``posix``; ``recording``: it was seen without any crash.
        what: does not hold.
        crash: when, and what got lost.
    """

    invariant: str
    scenario: str
    level: str
    what: str
    crash: str


@dataclass
class ScenarioReport:
    """One scenario at one level.

    Attributes:
        scenario: its name.
        level: ``objects`` or ``posix``.
        operations: that it asked for.
        states: crash states that were made.
        distinct: of those, different ones that the level before had not; each was judged.
        sampled: moments at which not all combinations were made, since there are too many.
        on_storage: states that were judged on the storage itself too.
        seconds: it took.
        violations: the first `SHOWN`, and of each invariant the first.
        violated: how many there are in all, by invariant.
        stopped: whether it was enough before all states were made: too much is wrong.
        ended: the error that ended the scenario early, as a planted bug may; None: it came to its end.
    """

    scenario: str
    level: str
    operations: int = 0
    states: int = 0
    distinct: int = 0
    sampled: int = 0
    on_storage: int = 0
    seconds: float = 0.0
    violations: list[Violation] = field(default_factory=list)
    violated: dict[str, int] = field(default_factory=dict)
    stopped: bool = False
    ended: str | None = None

    def add(self, violation: Violation) -> None:
        """Count it, and list it if there is room."""
        self.violated[violation.invariant] = self.violated.get(violation.invariant, 0) + 1
        if len(self.violations) < SHOWN or self.violated[violation.invariant] == 1:
            self.violations.append(violation)


@dataclass
class Report:
    """What a selftest came to.

    Attributes:
        url: the storage.
        plant: name of the planted bug, if any.
        scenarios: each at each level.
        skipped: scenarios that this storage cannot play, and why.
        left: what could not be cleaned up, and why; None if all was.
    """

    url: str
    plant: str | None
    scenarios: list[ScenarioReport] = field(default_factory=list)
    skipped: dict[str, str] = field(default_factory=dict)
    left: str | None = None

    @property
    def violated(self) -> dict[str, int]:
        """How many violations there are, by invariant."""
        total: dict[str, int] = {}
        for one in self.scenarios:
            for name, count in one.violated.items():
                total[name] = total.get(name, 0) + count
        return total

    @property
    def good(self) -> bool:
        """Whether there is none."""
        return not self.violated


def crash_selftest(
    storage: Storage,
    *,
    plant: str | None = None,
    seed: int = 0,
    exhaustive: int = EXHAUSTIVE,
    on_storage: int = ON_STORAGE,
    scenarios: Collection[str] = tuple(SCENARIOS),
    progress: Progress | None = None,
) -> Report:
    """Play every scenario on `storage`, in a scratch folder of its own that is removed at the end, and crash it.

    Storages of ``file://`` are crashed at the level of the filesystem too. Most states are judged in memory.

    Args:
        storage: any; nothing outside of the scratch folder is touched.
        plant: a bug to plant, by its name in `PLANTS`. It ends with the first scenario that finds it.
        seed: of the choices where there are too many states.
        exhaustive: how many things may be uncertain at once for all combinations of them to be tried. Of more, these
            are: none, all, each alone, all but each, the first few, and some at random.
        on_storage: how many states of each scenario and level are also written to `storage` and judged there.
        scenarios: which ones.
        progress: called with the name of what is judged, how much of it is, and how much there is.

    Raises:
        ConfigError: no such bug, or this storage cannot have it.
        StorageError: the storage failed: nothing is known.
    """
    inner = storage.inner if isinstance(storage, RetryingStorage) else storage
    local = inner if type(inner) is LocalStorage else None
    bug = _plant(plant, storage.url, posix=local is not None)
    folder = f"resilio-selftest-{secrets.token_hex(6)}/"
    existed = local is None or Path(local.root).exists()
    report = Report(storage.url, plant)
    scratch = Scratch(storage, folder)
    try:
        with _quiet():
            for name in scenarios:
                if name == "races" and not storage.capabilities.create_if_absent:
                    report.skipped[name] = "this storage has no create-if-absent: a run on it takes one manager only"
                    continue
                if bug is not HEALTHY and report.violated:
                    break  # found
                _Play(report, name, storage, local, folder, bug, seed, exhaustive, on_storage, progress).run()
    finally:
        try:
            scratch.clear()
        except (ResilioError, OSError) as error:
            report.left = f"{scratch.url} could not be removed, please do so: {error}"
        if local is not None and not existed:
            with suppress(OSError):
                Path(local.root).rmdir()
    return report


@dataclass
class _Play:
    """One scenario: played once, crashed at each level."""

    report: Report
    name: str
    storage: Storage
    local: LocalStorage | None
    folder: str
    bug: Plant
    seed: int
    exhaustive: int
    on_storage: int
    progress: Progress | None
    log: Log = field(default_factory=Log)
    seen: set[tuple[State, Known]] = field(default_factory=set)

    def run(self) -> None:
        began_s = time.monotonic()
        ended = self._record()
        objects = self._level("objects", ObjectStates(self.log.entries, self.seed, self.exhaustive), began_s)
        objects.ended = ended
        for invariant, what in self.log.broken:
            objects.add(Violation(invariant, self.name, "recording", what, "without any crash"))
        if self.local is not None:
            posix = PosixStates(self.log.entries, f"{self.name}/", self.seed, self.exhaustive)
            self._level("posix", posix, time.monotonic())

    def _record(self) -> str | None:
        """Play it; why it did not come to its end, None if it did."""
        base = self.storage
        if self.local is not None:
            above = f"{self.local.root}/{self.folder}"
            base = LocalStorage(self.local.root, (self.bug.disk or RecordingDisk)(self.log, above))
        recorder = RecordingStorage(Scratch(base, f"{self.folder}{self.name}/"), self.log)
        planted = self.bug.storage(recorder) if self.bug.storage else recorder
        try:
            SCENARIOS[self.name](Stage(planted, recorder, self.log, reuse=self.bug.reuse))
        except ResilioError as error:
            if self.report.plant is None and not self.log.broken:
                raise  # the storage failed, and told so: that is no answer to whether it loses anything
            return f"{type(error).__name__}: {error}"
        return None

    def _level(self, level: str, source: ObjectStates | PosixStates, began_s: float) -> ScenarioReport:
        one = ScenarioReport(self.name, level, operations=source.operations)
        self.report.scenarios.append(one)
        judge, rng, bad = Judge(self.log.truth), Random(self.seed), 0
        sample: list[Found] = []  # an even choice from all
        for found in source:
            one.states += 1
            if (found.state, found.known) in self.seen:
                continue
            self.seen.add((found.state, found.known))
            one.distinct += 1
            if len(sample) < self.on_storage:
                sample.append(found)
            elif (at := rng.randrange(one.distinct)) < len(sample):
                sample[at] = found
            bad += self._judge(one, judge, ModelStorage(found.state, clock := FakeClock()), found, clock)
            if bad >= ENOUGH:
                one.stopped = True
                break
            if self.progress is not None:
                self.progress(f"{self.name}, {level}", found.at + 1, len(self.log.entries))
        for found in sample:
            self._on_storage(one, judge, found)
        one.sampled = source.sampled
        one.seconds = time.monotonic() - began_s
        return one

    def _judge(self, one: ScenarioReport, judge: Judge, storage: Storage, found: Found, clock: FakeClock) -> bool:
        """Whether anything is wrong."""
        broken = judge(storage, found.known, clock)
        where = "" if isinstance(storage, ModelStorage) else "on the storage: "
        for invariant, what in broken:
            one.add(Violation(invariant, self.name, one.level, where + what, found.how))
        return bool(broken)

    def _on_storage(self, one: ScenarioReport, judge: Judge, found: Found) -> None:
        """The same state on the storage itself, where nobody can move the time."""
        one.on_storage += 1
        # What is written here need not outlive anything, so it is not waited for.
        base = self.storage if self.local is None else LocalStorage(self.local.root, _Hasty())
        scratch = Scratch(base, f"{self.folder}{self.name}-{one.level}-{one.on_storage}/")
        for key, data in found.state.objects.items():
            scratch.put(key, data)
        if self.local is not None:
            for key in found.state.uploads:
                path = Path(self.local.root) / scratch.prefix / key
                path.parent.mkdir(parents=True, exist_ok=True)
                path.with_name(temp_name(path.name)).touch()
        self._judge(one, judge, scratch, found, FakeClock())
        scratch.clear()


class _Hasty(Disk):
    def sync(self, fd: int) -> None:
        """Left out."""

    def sync_folder(self, folder: Path) -> None:
        """Left out."""


def _plant(name: str | None, url: str, *, posix: bool) -> Plant:
    if name is None:
        return HEALTHY
    if name not in PLANTS:
        raise ConfigError(f"there is no bug {name!r} to plant; there are {', '.join(PLANTS)}", plant=name)
    if PLANTS[name].disk is not None and not posix:
        raise ConfigError(
            f"{url}: the bug {name!r} is one of calls to a filesystem, and this is none; plant it on a file:// URL",
            plant=name,
            url=url,
        )
    return PLANTS[name]


@contextmanager
def _quiet() -> Iterator[None]:
    """What the judged code logs of thousands of damaged states is nothing to tell."""
    log = logging.getLogger("resilio")

    def nothing(record: logging.LogRecord) -> bool:
        return False

    log.addFilter(nothing)
    try:
        yield
    finally:
        log.removeFilter(nothing)
