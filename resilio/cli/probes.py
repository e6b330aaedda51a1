"""Is a store fit to hold a run? Each promise that matters is tried on it, in a scratch folder that no run uses.

A quick look; `resilio selftest crash` and `resilio.testing.StorageContract` go deeper.
"""

from __future__ import annotations

import os
import pickle
import secrets
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from ..errors import (
    AlreadyExistsError,
    NewerFormatError,
    NotFoundError,
    ResilioError,
)
from ..records import keys
from ..records.run import read_run
from ..storage.base import Storage
from .output import count, size

__all__ = ["Check", "Probes"]

State = Literal["ok", "warning", "failed"]

SCRATCH = "resilio-doctor-"  # no name of a run's
_BIG = 4 << 20
_RACERS = 8
_ROUNDS = 5
_SKEW_S = 60.0
_CHILD_S = 120.0
_CHILD = """
import pickle, sys
storage, prefix = pickle.load(sys.stdin.buffer), sys.argv[1]
if storage.get(prefix + "here") != b"from the first process":
    sys.exit("it sees other bytes than were written")
storage.put(prefix + "there", b"from the second process")
"""


@dataclass(frozen=True)
class Check:
    """What came of one.

    Attributes:
        name: of what was looked at.
        state: ``failed`` is what resilio cannot work with; ``warning`` what somebody should know.
        said: what was seen.
        todo: what to do; "" where there is nothing.
    """

    name: str
    state: State
    said: str
    todo: str = ""


class _Wanting(Exception):
    """A promise was broken: what was seen, and what to do."""

    def __init__(self, said: str, todo: str, state: State = "failed") -> None:
        super().__init__(said)
        self.said, self.todo, self.state = said, todo, state


_REPORT = "Report it to who offers this storage; until it is mended, keep no checkpoints there."


@dataclass
class Probes:
    """Looks at a store.

    Args:
        storage: the run's, or what is to become one.
        write: whether to try what writes.

    Attributes:
        reachable: whether it answered at all.
        latency_s: median seconds of a small request, by its name.
        newest_bytes: size of the newest checkpoint, where there is one.
        prefix: of the scratch folder.
        written: keys in it.
    """

    storage: Storage
    write: bool = True
    reachable: bool = False
    latency_s: dict[str, float] = field(default_factory=dict)
    newest_bytes: int | None = None
    prefix: str = ""
    written: set[str] = field(default_factory=set, repr=False)

    def run(self) -> Iterator[Check]:
        """All checks, one after the other. What was written is removed again, whatever happens."""
        reached = self._check("reachable", self._reach)
        self.reachable = reached.state != "failed"
        yield reached
        if not self.reachable:
            return
        yield self._check("run", self._look_at_run)
        yield self._check("space", self._space)
        if not self.write:
            return
        self.prefix = f"{SCRATCH}{secrets.token_hex(6)}/"
        with _scratch(self.storage, self.prefix, self.written) as left:
            writable = self._check("writing", self._writing)
            yield writable
            if writable.state != "failed":
                for name, probe in (
                    ("large objects", self._large),
                    ("create-if-absent", self._create),
                    ("listing", self._listing),
                    ("deleting", self._deleting),
                    ("clock", self._clock),
                    ("second process", self._second_process),
                    ("latency", self._latency),
                ):
                    yield self._check(name, probe)
        if left:
            yield Check("cleaning up", "failed", left[0], "Delete it by hand; no run uses that name.")

    def _check(self, name: str, probe: Callable[[], str]) -> Check:
        try:
            return Check(name, "ok", probe())
        except _Wanting as wanting:
            return Check(name, wanting.state, wanting.said, wanting.todo)
        except ResilioError as error:
            return Check(name, "failed", str(error))
        except Exception as error:  # noqa: BLE001 - a stranger's storage may raise anything
            said = f"{type(error).__name__}: {error}, which is none of resilio's errors"
            return Check(name, "failed", said, _REPORT)

    # ---- without writing

    def _reach(self) -> str:
        began_s = time.perf_counter()
        objects = sum(1 for _ in self.storage.list(keys.COMMITS))
        return (
            f"answered in {(time.perf_counter() - began_s) * 1000:.1f} ms; {count(objects, 'object')} in {keys.COMMITS}"
        )

    def _look_at_run(self) -> str:
        from ..records.catalog import discover

        try:
            run = read_run(self.storage)
        except NewerFormatError as error:
            raise _Wanting(str(error), "Upgrade: pip install -U resilio-ckpt") from error
        catalog = discover(self.storage)
        if run is None and not catalog.commits:
            return "none yet; the first save begins one"
        if run is None:
            raise _Wanting(f"there are commits and no {keys.RUN}", "Bring it back from a backup.", "warning")
        if catalog.newest is not None:
            self.newest_bytes = catalog.info(catalog.newest).size_bytes
        return (
            f"run {run.run_id}, format {run.format}, {count(len(catalog.lineage), 'checkpoint')}, "
            f"{len(catalog.off_lineage)} more off the lineage, newest {catalog.newest}"
        )

    def _space(self) -> str:
        free = self.storage.free_bytes()
        if free is None:
            return "the store does not tell how much is free"
        if self.newest_bytes and free < 2 * self.newest_bytes:
            raise _Wanting(
                f"{size(free)} free, and the newest checkpoint has {size(self.newest_bytes)}",
                "Free space, or forget checkpoints: a new one is written before an old one goes.",
                "failed" if free < self.newest_bytes else "warning",
            )
        return f"{size(free)} free"

    # ---- with writing

    def _writing(self) -> str:
        key, data = self._key("small"), secrets.token_bytes(500)
        self.storage.put(key, data)
        self._same(self.storage.get(key), data, "a small object")
        if self.storage.stat(key).size_bytes != len(data):
            raise _Wanting(f"an object of {len(data)} bytes has another size", _REPORT)
        return "a small object comes back as it was written"

    def _large(self) -> str:
        key, data = self._key("large"), secrets.token_bytes(_BIG)
        with self.storage.writer(key, size_hint=len(data)) as writer:
            for at in range(0, len(data), _BIG // 4):
                writer.write(data[at : at + _BIG // 4])
        ranges = [(at, bytearray(1000)) for at in (0, _BIG // 2 - 500, _BIG - 1000)]
        self.storage.read_into(key, [(at, memoryview(buffer)) for at, buffer in ranges])
        for at, buffer in ranges:
            self._same(bytes(buffer), data[at : at + 1000], "a range of a large object")
        self._same(self.storage.get(key), data, "a large object")
        return f"{size(_BIG)}, written in parts, comes back whole and in ranges"

    def _create(self) -> str:
        if not self.storage.capabilities.create_if_absent:
            raise _Wanting(
                "the store does not offer it", "Never let two jobs save to one run: nothing would stop them.", "warning"
            )
        key = self._key("once")
        self.storage.put(key, b"first", if_absent=True)
        with suppress(AlreadyExistsError):
            self.storage.put(key, b"second", if_absent=True)
            raise _Wanting("an object was created twice", _REPORT)
        self._same(self.storage.get(key), b"first", "the object that was created first")
        key, won = self._key("raced"), self._race(self._key("raced"))
        if len(won) != 1:
            raise _Wanting(f"of {_RACERS} creates at once {len(won)} had the answer that they won", _REPORT)
        self._same(self.storage.get(key), won[0], "the object whose create won")
        return f"a second create is refused, and of {_RACERS} at once one wins"

    def _race(self, key: str) -> list[bytes]:
        start, won, failed = threading.Barrier(_RACERS), list[bytes](), list[BaseException]()

        def create(number: int) -> None:
            start.wait()
            try:
                self.storage.put(key, b"%d" % number, if_absent=True)
                won.append(b"%d" % number)
            except AlreadyExistsError:
                pass
            except BaseException as error:  # noqa: BLE001 - raised below
                failed.append(error)

        threads = [threading.Thread(target=create, args=(number,)) for number in range(_RACERS)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        if failed:
            raise failed[0]
        return won

    def _listing(self) -> str:
        for number in range(_ROUNDS):
            key = self._key(f"listed-{number}")
            self.storage.put(key, b"x")
            if key not in self._names(f"{self.prefix}listed-"):
                raise _Wanting("an object that was just written is not listed", _REPORT)
        return "what was just written is listed"

    def _deleting(self) -> str:
        kept, gone = self._key("del-1"), self._key("del-2")
        for key in (kept, gone):
            self.storage.put(key, b"x")
        self.storage.delete([gone])
        if gone in self._names(f"{self.prefix}del-"):
            raise _Wanting("an object that was just deleted is still listed", _REPORT)
        with suppress(NotFoundError):
            self.storage.get(gone)
            raise _Wanting("an object that was just deleted can still be read", _REPORT)
        self.storage.delete([gone, f"{self.prefix}del-*", f"{self.prefix}del-[0-9]", f"{self.prefix}del"])
        if self._names(f"{self.prefix}del-") != [kept]:
            raise _Wanting("deleting a name with * or [ in it, or a part of one, deleted something else", _REPORT)
        return "what was deleted is gone, and names are taken to the letter"

    def _clock(self) -> str:
        before_s = time.time()
        stored_s = self.storage.put(self._key("clock"), b"x").modified_s
        after_s = time.time()
        if stored_s is None:
            return "the store does not tell times; this host's are used"
        ahead_s = stored_s - after_s if stored_s > after_s else min(0.0, stored_s - before_s)
        if abs(ahead_s) > _SKEW_S:
            raise _Wanting(
                f"the store's is {abs(ahead_s):.0f} s {'ahead of' if ahead_s > 0 else 'behind'} this host's",
                "Set this host's clock (NTP): keep policies go by the times of both.",
                "warning",
            )
        return "the store's and this host's agree"

    def _second_process(self) -> str:
        if not self.storage.capabilities.shared:
            raise _Wanting(
                "the store serves one process", "Use it for tests: it is gone when the process ends.", "warning"
            )
        self.storage.put(self._key("here"), b"from the first process")
        try:
            sent = pickle.dumps(self.storage)
        except Exception as error:
            raise _Wanting(f"it cannot be sent to another process: {type(error).__name__}: {error}", _REPORT) from error
        done = subprocess.run(
            [sys.executable, "-c", _CHILD, self.prefix],
            input=sent,
            capture_output=True,
            env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
            timeout=_CHILD_S,
            check=False,
        )
        if done.returncode:
            lines = done.stderr.decode(errors="replace").strip().splitlines() or [f"it ended with {done.returncode}"]
            raise _Wanting(f"another process cannot use it: {lines[-1]}", _REPORT)
        self._same(self.storage.get(self._key("there")), b"from the second process", "what another process wrote")
        return "another process reads what this one wrote, and the other way round"

    def _latency(self) -> str:
        key = self._key("latency")
        calls: tuple[tuple[str, Callable[[], object]], ...] = (
            ("put", lambda: self.storage.put(key, b"x" * 500)),
            ("get", lambda: self.storage.get(key)),
            ("list", lambda: self._names(self.prefix)),
        )
        for name, call in calls:
            took_s = []
            for _ in range(_ROUNDS):
                began_s = time.perf_counter()
                call()
                took_s.append(time.perf_counter() - began_s)
            self.latency_s[name] = statistics.median(took_s)
        return ", ".join(f"{name} {took_s * 1000:.1f} ms" for name, took_s in self.latency_s.items())

    def _key(self, name: str) -> str:
        """The key of a scratch object, noted: a store that does not list it must not keep it either."""
        self.written.add(f"{self.prefix}{name}")
        return f"{self.prefix}{name}"

    def _names(self, prefix: str) -> list[str]:
        return [info.key for info in self.storage.list(prefix)]

    def _same(self, found: bytes, wanted: bytes, what: str) -> None:
        if found != wanted:
            raise _Wanting(f"{what} does not come back as it was written", _REPORT)


@contextmanager
def _scratch(storage: Storage, prefix: str, written: set[str]) -> Iterator[list[str]]:
    """A folder to write to, removed at the end; what cannot be removed is said in the list.

    With plain files, folders that were made for it go as well: a look must not leave an empty run.
    """
    left: list[str] = []
    local = storage.capabilities.local_path
    missing = []
    if local is not None:
        missing = [folder for folder in (Path(local), *Path(local).parents) if not folder.exists()]
    try:
        yield left
    finally:
        try:
            for item in storage.incomplete(prefix):
                storage.abort(item)
            if written:
                storage.delete(sorted({*written, *(info.key for info in storage.list(prefix))}))
        except Exception as error:  # noqa: BLE001 - a stranger's storage may raise anything
            left.append(f"{storage.url}/{prefix} could not be removed: {error}")
        for folder in missing:
            with suppress(OSError):
                folder.rmdir()
