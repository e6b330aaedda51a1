"""`resilio selftest`: does this storage, under this code, keep what it promises? Tried, not believed."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated, Any

import typer

from .errors import Exit
from .tables import Table

if TYPE_CHECKING:
    from ..drill.crash import Report

__all__ = ["selftest"]

selftest = typer.Typer(help="Try what a storage and this code promise.", no_args_is_help=True)


@selftest.callback()
def _group() -> None:
    pass  # with it a single command keeps its name


@selftest.command()
def crash(
    url: Annotated[
        str | None,
        typer.Argument(
            metavar="URL",
            help="Where to try it: a scratch folder is made there, and removed. A run's own URL will do.",
            show_default=False,
        ),
    ] = None,
    plant: Annotated[
        str | None, typer.Option(metavar="BUG", help="Plant a bug that must be found, see --list-plants.")
    ] = None,
    list_plants: Annotated[bool, typer.Option("--list-plants", help="Tell which bugs can be planted.")] = False,
    thorough: Annotated[bool, typer.Option("--thorough", help="All combinations; takes a minute.")] = False,
    as_json: Annotated[
        bool, typer.Option("--json", help="One JSON document on stdout; errors as JSON on stderr.")
    ] = False,
    debug: Annotated[bool, typer.Option("--debug", help="Show the traceback of an error.")] = False,
) -> int:
    """Crash saves, sweeps, pins and branches at every operation, and judge all that a crash could leave.

    Exit codes: 0 nothing is lost; 1 something is, or the planted bug was found; 3 the planted bug was not found.
    """
    from ..drill.crash import EXHAUSTIVE, INVARIANTS, ON_STORAGE, PLANTS, crash_selftest
    from ..errors import ConfigError
    from ..hooks import open_storage
    from . import output

    if list_plants:
        if as_json:
            output.emit_json({"plants": {name: bug.what for name, bug in PLANTS.items()}})
        else:
            output.emit_page(_table(("bug", "what it does"), [(name, bug.what) for name, bug in PLANTS.items()]))
        return Exit.GOOD
    if url is None:
        raise ConfigError("selftest crash needs a URL, such as file:///data/run-17; or --list-plants.")
    with open_storage(url) as storage, _progress() as progress:
        report = crash_selftest(
            storage,
            plant=plant,
            exhaustive=8 if thorough else EXHAUSTIVE,
            on_storage=20 if thorough else ON_STORAGE,
            progress=progress,
        )
    if as_json:
        output.emit_json(_json(report, INVARIANTS))
    else:
        output.emit_page(*_page(report, INVARIANTS))
    if plant is not None:
        return Exit.INCONCLUSIVE if report.good else Exit.WANTING
    if report.good and report.left:
        return Exit.STORAGE
    return Exit.GOOD if report.good else Exit.WANTING


def _json(report: Report, invariants: dict[str, str]) -> dict[str, Any]:
    return {
        **asdict(report),
        "good": report.good,
        "found": None if report.plant is None else not report.good,
        "violated": report.violated,
        "invariants": invariants,
        "states": sum(one.states for one in report.scenarios),
        "distinct": sum(one.distinct for one in report.scenarios),
        "seconds": sum(one.seconds for one in report.scenarios),
    }


def _page(report: Report, invariants: dict[str, str]) -> list[Table | str]:
    from .output import clean

    rows = [
        (
            one.scenario,
            one.level,
            f"{one.operations:,}",
            f"{one.states:,}",
            f"{one.distinct:,}{' (enough)' if one.stopped else ''}",
            f"{one.sampled:,}",
            f"{one.on_storage:,}",
            f"{one.seconds:.1f}",
            ", ".join(f"{name} {count}" for name, count in one.violated.items()) or "-",
        )
        for one in report.scenarios
    ]
    head = ("scenario", "level", "operations", "states", "judged", "sampled", "on storage", "seconds", "violations")
    lines: list[Table | str] = [_table(head, rows, right=range(2, 8))]
    lines += [f"skipped {name}: {why}" for name, why in report.skipped.items()]
    violations = [violation for one in report.scenarios for violation in one.violations]
    for name in report.violated:
        first = next(violation for violation in violations if violation.invariant == name)
        lines.append(f"VIOLATED  {name}: {invariants[name]}")
        lines.append(clean(f"  {first.what}"))
        lines.append(clean(f"  in {first.scenario}, {first.level}: {first.crash}"))
    lines += [clean(f"{one.scenario} ended early: {one.ended}") for one in report.scenarios if one.ended]
    judged, seconds = sum(one.distinct for one in report.scenarios), sum(one.seconds for one in report.scenarios)
    by = ", ".join(f"{name} {count}" for name, count in report.violated.items())
    if report.plant is None:
        verdict = "nothing is lost" if report.good else f"VIOLATED: {by}"
    elif report.good:
        verdict = f"NOT FOUND: {report.plant}. On this storage a selftest without findings proves less than it should."
    else:
        verdict = f"FOUND {report.plant}, by {by}"
    lines.append(f"{judged:,} crash states judged in {seconds:.1f} s: {verdict}")
    if report.left:
        lines.append(clean(report.left))
    return lines


def _table(head: tuple[str, ...], rows: Sequence[tuple[str, ...]], right: range = range(0)) -> Table:
    table = Table(*head, right=frozenset(head[number] for number in right))
    for row in rows:
        table.add_row(*row)
    return table


@contextmanager
def _progress() -> Iterator[Callable[[str, int, int], None] | None]:
    """A bar on stderr, if that is a terminal."""
    if not sys.stderr.isatty():
        yield None
        return
    from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

    from .output import console

    columns = (TextColumn("{task.description}", markup=False), BarColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console(), transient=True) as bar:
        task = bar.add_task("recording", total=None)
        yield lambda what, done, total: bar.update(task, description=what, completed=done, total=total)
