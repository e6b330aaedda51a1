"""A manager as the code has it, reduced to its operations on the store: restore, save, sweep.

See `processes` for what is kept of the code and what is left out.
"""

from __future__ import annotations

from collections.abc import Generator, Hashable
from typing import Any

from model.processes import Catalog, NoCheckpointError, Operation, View
from model.rules import Rules
from model.run_store import Attempt, Commit, Generation, Ref
from model.sweeping import Sweeper

__all__ = ["Manager"]


class FencedError(Exception):
    pass


class SaveError(Exception):
    """This save failed, the next may work."""


class Manager(Sweeper):
    """`CheckpointManager`, `saving.Committer` and `protocol.RunWriter` of one job, rank 0.

    `script`: what the job does: ("restore", which), ("fresh", None), ("save", step), one after the other. After a
    FencedError it ends; after another failure of a save it goes on in its script.
    """

    kept = (
        *Sweeper.kept,
        *("script", "asked", "seen", "knew", "newest_seen", "requested", "parent", "ancestors", "entered", "last"),
        *("pending", "sent", "life", "latest_sent", "broken"),
    )

    def __init__(
        self,
        name: str,
        rules: Rules,
        *script: tuple[str, Any],
        keep: str = "newest",
        sweeps: bool = True,
    ) -> None:
        super().__init__(name, rules, keep)
        self.script = script
        self.sweeps = sweeps
        self.asked = False
        self.seen: frozenset[Ref] = frozenset()
        self.knew: frozenset[Ref] = frozenset()  # (ghost) what the job was really told of
        self.newest_seen = 0
        self.requested = 0
        self.parent: Ref | None = None
        self.ancestors: tuple[Ref, ...] = ()
        self.entered = False
        self.last: Ref | None = None
        self.pending: Commit | None = None
        self.sent: frozenset[Attempt] = frozenset()
        self.life = 0  # (ghost)
        self.latest_sent: Ref | None = None  # (ghost)
        self.broken: str | None = None  # (ghost) a promise to the job that was broken

    def view(self) -> Hashable:
        owns = self.generation if self.entered else None
        return View(self.name, owns, self.held, self.broken)

    def run(self) -> Generator[Operation, Any, None]:
        while self.script:
            (deed, what), self.script = self.script[0], self.script[1:]
            try:
                if deed == "save":
                    yield from self.save(what)
                elif deed == "restore":
                    yield from self.restore(what)
                else:
                    yield from self.fresh()
            except SaveError:
                pass
            except (FencedError, NoCheckpointError):
                break
        self.entered = False
        yield from self.let_go()

    # ---------------------------------------------------------------------------------------------- restore

    def restore(self, which: Ref | str) -> Generator[Operation, Any, None]:
        """`CheckpointManager.restore`, `Committer.restored`."""
        before, self.leases = self.leases, ()
        catalog, chosen = yield from self.choose(which)
        now, self.leases = self.leases, before
        yield from self.release()
        self.leases = now
        self.saw_restore(catalog, chosen)
        del catalog, before, now
        self.knew = self.seen
        if "hold until the first commit" not in self.rules:
            yield from self.release()

    def saw_restore(self, catalog: Catalog, chosen: Ref | None) -> None:
        """`RunWriter.saw_restore`."""
        if chosen is None or chosen != self.latest_sent:
            self.life += 1
        answered = self.pending is None or "behind the unanswered a branch" not in self.rules
        goes_on = (
            chosen is not None and chosen == self.last and answered and catalog.newest_generation == self.generation
        )
        if self.generation and "going back ends a generation" not in self.rules:
            goes_on = catalog.newest_generation == self.generation
            self.last = None
        self.see(catalog)
        if not goes_on:
            self.branch(chosen, catalog.line_of(chosen) if chosen else ())

    def see(self, catalog: Catalog) -> None:
        """`RunWriter._see`."""
        self.asked = True
        self.seen = catalog.refs
        self.newest_seen = max([catalog.newest_generation, *(ref.generation for ref in catalog.refs)])

    def branch(self, parent: Ref | None, ancestors: tuple[Ref, ...]) -> None:
        """`RunWriter._branch`."""
        self.parent, self.ancestors = parent, ancestors
        self.generation, self.entered, self.last, self.pending = 0, False, None, None

    def fresh(self) -> Generator[Operation, Any, None]:
        """`Committer.begin_fresh`, `RunWriter.fresh`."""
        catalog = yield from self.discover()
        self.life += 1
        self.see(catalog)
        self.knew = self.seen
        self.branch(None, ())

    # ------------------------------------------------------------------------------------------------- save

    def save(self, step: int) -> Generator[Operation, Any, None]:
        """`CheckpointManager._save`, `SaveJob.commit`, `SaveJob.sweep`."""
        attempt = yield from self.begin_attempt(step)
        try:
            if "record last" in self.rules:
                yield from self.write(attempt)
                yield from self.commit(attempt)
            else:
                yield from self.commit(attempt)
                yield from self.write(attempt)
        except (SaveError, FencedError):
            self.abandon(attempt)
            raise
        del attempt, step
        yield from self.let_go()  # in the code at the head of `SaveJob.sweep`
        if self.sweeps:
            yield from self.sweep()

    def begin_attempt(self, step: int) -> Generator[Operation, Any, Attempt]:
        """`RunWriter.begin_attempt`."""
        if self.pending is not None:
            if "settle before the next" in self.rules:
                yield from self.send_pending()
            self.pending = None
        if not self.asked:
            catalog = yield from self.discover()
            if catalog.commits and "who never restored has seen nothing" in self.rules:
                raise FencedError
            self.see(catalog)
            self.branch(None, ())
            del catalog
        if (self.last is not None and step <= self.last.step) or (self.parent is not None and step < self.parent.step):
            raise SaveError
        requested = self.requested if "a number is asked for once" in self.rules else 0
        self.generation = self.generation or max(self.newest_seen, requested) + 1
        del requested
        attempt = Attempt(Ref(self.generation, step), self.name, len(self.begun))
        self.begun |= {attempt}
        return attempt

    def write(self, attempt: Attempt) -> Generator[Operation, Any, None]:
        """The engine, and the first half of `SaveJob.commit`."""
        written = yield ("put attempt", attempt)
        if not written:
            raise SaveError

    def abandon(self, attempt: Attempt) -> None:
        """`RunWriter.abandon`."""
        if attempt not in self.sent or "sent is never garbage" not in self.rules:
            self.failed |= {attempt}

    def commit(self, attempt: Attempt) -> Generator[Operation, Any, None]:
        """`RunWriter.commit`."""
        if "generation before commit" in self.rules:
            yield from self.enter()
        if "sweep after the first commit" not in self.rules and self.sweeps:
            yield from self.sweep()
        if "look before the commit" in self.rules:
            newest = yield ("look", attempt.ref, False)
            if newest > attempt.ref.generation:
                raise FencedError
            del newest
        self.sent |= {attempt}
        self.pending = Commit(attempt.ref, attempt, (self.name, self.life))
        self.latest_sent = attempt.ref
        yield from self.send_pending()

    def enter(self) -> Generator[Operation, Any, None]:
        """`RunWriter._enter`."""
        if self.entered:
            return
        there = frozenset(self.ancestors)
        if "test before the generation" in self.rules:
            there = yield from self.test_newest()
        elif "trim ancestors" in self.rules:
            there = (yield from self.discover()).refs
        if "trim ancestors" not in self.rules:
            there = frozenset(self.ancestors)
        ancestors = tuple(ref for ref in self.ancestors if ref in there)
        record = Generation(self.generation, self.name, self.parent, ancestors, self.knew)
        del there, ancestors
        self.requested = self.generation
        while True:
            answer = yield ("create generation", record, "create if absent" in self.rules)
            if answer != "no answer":
                break
            again = yield ("decide", "ask again")
            if not again:
                raise SaveError
        if answer != "made":
            _, by, parent = answer
            mine = by == self.name
            if mine and "own nonce is success" not in self.rules:
                self.broken = "nobody is fenced by itself"
            if not mine and "compare nonces" in self.rules:
                raise FencedError
            if mine and parent != self.parent:
                self.broken = "a generation record names what its manager went on from"
            del by, parent, mine
        del record, answer
        if "test again after the generation" in self.rules:
            yield from self.test_newest()
        self.entered = True

    def test_newest(self) -> Generator[Operation, Any, frozenset[Ref]]:
        """`RunWriter._test_newest`."""
        catalog = yield from self.discover()
        if catalog.newest_generation > self.generation:
            raise FencedError
        if catalog.newest is not None and catalog.newest not in self.seen and "the newest was seen" in self.rules:
            raise FencedError
        return catalog.refs

    def send_pending(self) -> Generator[Operation, Any, None]:
        """`RunWriter._send_pending`, with `RunWriter._create` of a commit record."""
        assert self.pending is not None
        ref, sent = self.pending.ref, self.pending.attempt
        while True:
            answer = yield ("create commit", self.pending)
            if answer != "no answer":
                break
            again = yield ("decide", "ask again")
            if not again:
                raise SaveError
            newest = yield ("look", ref, False)
            if newest > ref.generation:
                self.pending = None
                raise FencedError
            del newest
        ours = answer == "made" or answer[1] == sent
        del answer
        self.pending = None
        if not ours:
            raise SaveError
        self.last = ref
        if "generation before commit" not in self.rules:
            yield from self.enter()
        if "look after the commit" in self.rules:
            newest = yield ("look", ref, True)
            if newest > ref.generation:
                raise FencedError
        else:
            yield ("acknowledge", ref)
