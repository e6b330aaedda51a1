"""`resilio forget`: delete what a policy has no reason for. Tells what would go; does it only when asked to."""

from __future__ import annotations

import shlex
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any

import typer

from .errors import Exit
from .options import Debug, Json, Url
from .tables import Table

if TYPE_CHECKING:
    from ..records.fates import Explanation, Fate
    from ..records.sweep import SweepReport
    from ..storage.base import Storage
    from ..types import CheckpointInfo, CheckpointRef

__all__ = ["forget"]

EXAMPLE = '--keep "keep_last(3) | keep_every(1000)"'


def forget(
    url: Url,
    keep: Annotated[
        str | None,
        typer.Option(metavar="POLICY", help="What lives: 'keep_last(3) | keep_every(1000)'.", show_default=False),
    ] = None,
    yes: Annotated[bool, typer.Option("--yes", help="Do it. Without, the plan is only told.")] = False,
    as_json: Json = False,
    debug: Debug = False,
) -> int:
    """Tell which checkpoints a policy has no reason to keep; with --yes, delete them, and what crashes left behind.

    The newest, what is pinned (by plugins too) or being read, and what a newer branch left less than 7 days ago live
    whatever the policy says. A job may be saving to the run meanwhile.

    Exit codes: 0 all that goes is gone, or the plan was told; 2 also: the policy keeps nothing at all; 3 something that
    was to go could not be deleted or read, or a newer job took over; 4 nothing there.
    """
    from ..errors import ConfigError
    from ..hooks import Calls, host, open_storage
    from ..records.fates import explain
    from ..records.sweep import sweep
    from . import look, output

    if keep is None:
        raise ConfigError(f"forget needs to know what lives: resilio forget {shlex.quote(url)} {EXAMPLE}")
    policy = look.keep_policy(keep)
    with open_storage(url) as storage:
        catalog = look.catalog_of(storage)
        if not catalog.commits:
            raise ConfigError(f"{storage.url}: only pins hold what is left of this run; unpin what may go.")
        generation, now_s = catalog.commits[-1].generation, time.time()

        def reasons(infos: list[CheckpointInfo]) -> Mapping[CheckpointRef, str]:
            return policy.reasons(infos, now_s)

        claims = Calls(host()).pins
        told = explain(storage, reasons, claims=claims, generation=generation).with_pins(storage)
        if told.refused:
            raise ConfigError(f"{storage.url}: {told.refused}. Say one that keeps something, such as {EXAMPLE}")
        plan = Plan(told, _sizes(storage), look.in_quarantine(storage))
        if not as_json:
            output.emit_page(*plan.page(now_s))
        # What there is may have changed since: the sweep looks and decides anew, by the same rules.
        done = sweep(storage, reasons, claims=claims, generation=generation) if yes else None
    code = Exit.GOOD if done is None or plan.left(done) == [] else Exit.INCONCLUSIVE
    if as_json:
        output.emit_json({"url": storage.url, "keep": repr(policy), **plan.json(), "done": _done_json(plan, done)})
    elif done is not None:
        output.emit("".join(f"{output.clean(line)}\n" for line in _done_lines(plan, done)))
    elif plan.goes:
        command = f"resilio forget {shlex.quote(url)} --keep {shlex.quote(keep)} --yes"
        output.emit(f"Nothing was deleted. To delete what goes: {output.clean(command)}\n")
    return code


def _sizes(storage: Storage) -> dict[str, int]:
    """Attempt -> bytes in its folder."""
    from ..records import keys

    sizes: dict[str, int] = {}
    for info in storage.list(keys.STEP_PREFIX):
        found = keys.split_attempt_key(info.key)
        if found:
            sizes[found[0]] = sizes.get(found[0], 0) + info.size_bytes
    return sizes


@dataclass(frozen=True)
class Plan:
    """What would go and what lives, and how big it is."""

    told: Explanation
    sizes: Mapping[str, int]
    quarantined: Mapping[CheckpointRef, str]

    @property
    def fates(self) -> list[Fate]:
        """Checkpoints, then leftovers."""
        return [*self.told.checkpoints, *self.told.leftovers]

    @property
    def goes(self) -> list[Fate]:
        """Those that go."""
        return [fate for fate in self.fates if fate.goes]

    def size_of(self, fate: Fate) -> int | None:
        """Bytes in its folder; None where that is not known."""
        return self.sizes.get(fate.attempt, 0) if fate.attempt else None

    def frees(self, fates: Iterable[Fate]) -> int:
        """Bytes that deleting these gives back."""
        return sum(self.size_of(fate) or 0 for fate in fates)

    def left(self, done: SweepReport) -> list[str]:
        """Why not all went that should have."""
        said = list(done.failed)
        if done.fenced_by is not None:
            said.append(
                f"generation {done.fenced_by} is newer: another job owns the run now, and deletes by its policy"
            )
        elif self.told.idle and self.told.idle not in said:
            said.append(self.told.idle)
        if done.refused:
            said.append(done.refused)
        kept = [fate for fate in self.told.checkpoints if fate.goes and fate.ref in done.kept]
        said += [f"{fate.ref} stays: {done.kept[fate.ref]}" for fate in kept]
        failed = [attempt for attempt in done.unfinished if not any(attempt in line for line in done.failed)]
        return said + [f"{attempt} stays: somebody has begun to read it" for attempt in failed]

    def page(self, now_s: float) -> list[Table | str]:
        """For people."""
        from .output import ago, clean, count, size

        shown = Table("step", "gen", "committed", "size", "", "because")
        for fate in sorted(self.told.checkpoints, key=lambda fate: fate.ref, reverse=True):
            shown.add_row(
                str(fate.ref.step),
                str(fate.ref.generation),
                ago(fate.info.time_s, now_s) if fate.info else "?",
                size(self.size_of(fate)),
                "goes" if fate.goes else "lives",
                clean(fate.why + (f" (in quarantine: {why})" if (why := self.quarantined.get(fate.ref)) else "")),
                style=None if fate.goes else "dim",
            )
        parts: list[Table | str] = [shown]
        if self.told.leftovers:
            rest = Table("leftover", "size", "", "because")
            for fate in self.told.leftovers:
                rest.add_row(
                    clean(fate.attempt or str(fate.ref)) if fate.kind == "attempt" else f"record of {fate.ref}",
                    size(self.size_of(fate)),
                    "goes" if fate.goes else "stays",
                    clean(fate.why),
                )
            parts += ["", rest]
        live = sum(not fate.goes for fate in self.told.checkpoints)
        go = len(self.told.checkpoints) - live
        left = sum(fate.goes for fate in self.told.leftovers)
        parts += [
            "",
            f"{count(len(self.told.checkpoints), 'checkpoint')}: {live} live, {go} go; "
            f"{count(len(self.told.leftovers), 'leftover')}: {left} go; that frees {size(self.frees(self.goes))}",
        ]
        if self.told.idle:
            parts.append(clean(f"Nothing goes now: {self.told.idle}."))
        return parts

    def json(self) -> dict[str, Any]:
        """The same for programs."""
        from .look import named
        from .pages import info_json

        def one(fate: Fate) -> dict[str, Any]:
            return {
                **named(fate.ref),
                "kind": fate.kind,
                "on_lineage": fate.on_lineage,
                "goes": fate.goes,
                "because": list(fate.reasons),
                "attempt": fate.attempt,
                "size_bytes": self.size_of(fate),
                "checkpoint": info_json(fate.info, self.quarantined) if fate.info else None,
            }

        return {
            "checkpoints": [one(fate) for fate in self.told.checkpoints],
            "leftovers": [one(fate) for fate in self.told.leftovers],
            "frees_bytes": self.frees(self.goes),
            "idle": self.told.idle,
        }


def _freed(plan: Plan, done: SweepReport) -> int:
    gone = [
        fate
        for fate in plan.fates
        if (fate.kind == "checkpoint" and fate.ref in done.deleted) or fate.attempt in done.attempts
    ]
    return plan.frees(fate for fate in gone if fate.attempt not in done.unfinished)


def _done_json(plan: Plan, done: SweepReport | None) -> dict[str, Any] | None:
    from ..records import keys

    if done is None:
        return None
    return {
        "deleted": [keys.stem(ref) for ref in done.deleted],
        "attempts": done.attempts,
        "records": [keys.stem(ref) for ref in done.records],
        "leases": len(done.leases),
        "freed_bytes": _freed(plan, done),
        "left": plan.left(done),
        "fenced_by": done.fenced_by,
    }


def _done_lines(plan: Plan, done: SweepReport) -> list[str]:
    from .output import count, size

    others = count(len(done.attempts) + len(done.records), "leftover")
    first = f"deleted {count(len(done.deleted), 'checkpoint')} and {others}, {size(_freed(plan, done))}"
    return [first, *(f"NOT DONE  {line}" for line in plan.left(done))]
