"""A sweep as the code has it: `fates.look`, which decides, and `sweep._Sweep`, which does it."""

from __future__ import annotations

from collections.abc import Generator
from typing import Any

from model.processes import Catalog, Operation, Process
from model.rules import Rules
from model.run_store import Attempt, Ref

__all__ = ["Sweeper"]


class Sweeper(Process):
    """What a manager needs to know of itself to sweep. `keep`: its policy, "newest", "oldest" or "all"."""

    kept = (*Process.kept, "generation", "begun", "failed")

    def __init__(self, name: str, rules: Rules, keep: str) -> None:
        super().__init__(name, rules)
        self.keep = keep
        self.generation = 0  # 0: not chosen
        self.begun: frozenset[Attempt] = frozenset()
        self.failed: frozenset[Attempt] = frozenset()

    def sweep(self) -> Generator[Operation, Any, None]:
        """`fates.look`, then `sweep._Sweep.run`."""
        if "attempts before commits" in self.rules:
            manifests, data = yield ("list attempts",)
            catalog = yield from self.discover()
        else:
            catalog = yield from self.discover()
            manifests, data = yield ("list attempts",)
        held = yield from self.holds()
        todo = self.decide(catalog, manifests, data, held)
        del catalog, manifests, data, held
        while todo:
            (kind, ref, attempt), todo = todo[0], todo[1:]
            holder = yield from self.holder(ref)
            if holder == "fenced":
                return
            if holder == "held":
                continue
            if kind == "record":
                there = yield ("stat manifest", attempt)
                if not there:
                    yield ("delete record", ref, self.name, self.generation)
                del there
            elif kind == "attempt":
                yield from self.delete_folder(attempt)
            else:
                again = yield from self.delete_checkpoint(ref, attempt)
                if again == "fenced":
                    return
                del again

    def delete_checkpoint(self, ref: Ref, attempt: Attempt) -> Generator[Operation, Any, str | None]:
        """`_Sweep._delete_checkpoint` after its first look."""
        if "record first" not in self.rules:
            yield from self.delete_folder(attempt)
        yield ("delete record", ref, self.name, self.generation)
        holder = None
        if "look again before the manifest" in self.rules:
            holder = yield from self.holder(ref)
        if holder is None:
            yield from self.delete_folder(attempt)
        else:
            self.failed |= {attempt}  # `SweepReport.unfinished`
        return holder

    def delete_folder(self, attempt: Attempt) -> Generator[Operation, Any, None]:
        """`_Sweep._delete_folder`."""
        if "manifest before data" in self.rules:
            yield ("delete manifest", attempt)
        yield ("delete data", attempt)
        if "manifest before data" not in self.rules:
            yield ("delete manifest", attempt)

    def holder(self, ref: Ref) -> Generator[Operation, Any, str | None]:
        """`_Sweep._holder`."""
        if "fenced sweeps stop" in self.rules:
            newest = yield ("look", Ref(self.generation, 0), False)
            if newest > self.generation:
                return "fenced"
        held = yield from self.holds()
        return "held" if ref in held else None

    def holds(self) -> Generator[Operation, Any, frozenset[Ref]]:
        """`holds.Holds`."""
        if "heed holds" not in self.rules:
            return frozenset()
        if "leases before pins" in self.rules:
            leased = yield ("list leases",)
            pinned = yield ("list pins",)
        else:
            pinned = yield ("list pins",)
            leased = yield ("list leases",)
        return frozenset(leased | {ref for ref, _ in pinned})

    def decide(
        self,
        catalog: Catalog,
        manifests: frozenset[Attempt],
        data: frozenset[Attempt],
        held: frozenset[Ref],
    ) -> tuple[tuple[str, Ref, Attempt], ...]:
        """`fates._Decision`: what goes, in the order in which it goes."""
        counted = max((ref.generation for ref in catalog.refs), default=0)
        if "fenced sweeps stop" in self.rules and catalog.newest_generation > self.generation:
            return ()
        if "sweep after the first commit" in self.rules and counted != self.generation:
            return ()
        attempts = {one.ref: one.attempt for one in catalog.commits}
        whole = [ref for ref in sorted(attempts) if attempts[ref] in manifests]
        absent = [ref for ref in sorted(attempts) if attempts[ref] not in manifests]
        on = [ref for ref in catalog.lineage if ref in whole]
        stay = set(on[-1:] if self.keep == "newest" else on[:1] if self.keep == "oldest" else on)
        if "spare the newest" in self.rules:
            stay |= {catalog.newest} if catalog.newest in on else set(on[-1:])
        off = [ref for ref in whole if ref not in catalog.lineage and self.abandoned(catalog, ref, on)]
        going = [("checkpoint", ref, attempts[ref]) for ref in [*off, *(ref for ref in on if ref not in stay)]]
        going += [("record", ref, attempts[ref]) for ref in absent if ref != catalog.newest]
        going += [
            ("attempt", one.ref, one)
            for one in sorted(manifests | data)
            if one not in attempts.values() and self.is_garbage(one)
        ]
        return tuple(fate for fate in going if fate[1] not in held)

    def is_garbage(self, attempt: Attempt) -> bool:
        """`fates._Decision._attempts`, `_is_over`."""
        if "own attempts may be under way" not in self.rules:
            return True
        if attempt.ref.generation != self.generation:
            return attempt.ref.generation < self.generation
        return attempt in self.failed or attempt not in self.begun

    def abandoned(self, catalog: Catalog, ref: Ref, sound: list[Ref]) -> bool:
        """`abandoned.Abandonment.judge`."""
        by_number = {one.number: one for one in catalog.generations}
        now = next((one.week for one in catalog.commits if one.ref == catalog.newest), 0)
        counted = {one.generation for one in catalog.refs}
        at = max(counted)
        while at > ref.generation:
            counted.add(at)
            parent = by_number[at].parent
            at = parent.generation if parent else 0
        newer = [one for one in catalog.generations if one.number > ref.generation]
        last = max([ref.generation, *(one.number for one in newer if ref in one.ancestors)])
        left = min((number for number in counted if number > last), default=None)
        if left is None:
            return False
        old = now > by_number[left].week or "old enough" not in self.rules
        grown = sum(one.generation >= left for one in sound) >= 2 or "two commits" not in self.rules
        return old and grown
