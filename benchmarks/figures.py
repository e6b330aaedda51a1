"""The figures: what each is a ratio of, what the project aims at, and how they are shown."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from statistics import median
from typing import Any

from rich.box import SIMPLE
from rich.console import Console
from rich.table import Table

__all__ = ["FIGURES", "Figure", "paired", "show"]


@dataclass(frozen=True)
class Goal:
    """What a figure is, in words, and what the project aims at.

    Attributes:
        about: numerator over denominator.
        target: None where there is none.
        at_most: whether less is better.
    """

    about: str
    target: float | None = None
    at_most: bool = False


FIGURES: dict[str, Goal] = {
    "hold_overlap": Goal("hold of DCP's default async_save / ours, stage='overlap'", 50),
    "hold_block": Goal("hold of DCP's default async_save / ours, stage='block'", 5),
    "hold_block_vs_memcpy": Goal("our hold, stage='block' / copying the bytes into touched memory", 1.5, at_most=True),
    "hold_vs_torch_checkpointing": Goal("hold of torch_checkpointing / ours, stage='overlap', later saves", 0.3),
    "step_during_save": Goal("a step while our save is in flight / an undisturbed one", 1.25, at_most=True),
    "step_during_dcp_save": Goal("a step while DCP's default async_save is in flight / an undisturbed one"),
    "first_hold": Goal("hold of DCP's default async_save / ours, first save of a process, warm-up included", 1),
    "save_vs_dcp_default": Goal("durable save: dcp.save / ours", 2.2),
    "save_vs_dcp_best": Goal("durable save: dcp.save with its best number of threads / ours", 1.3),
    "save_vs_limit": Goal("durable save: best raw write / ours", 0.85),
    "save_vs_torch_checkpointing": Goal("save: torch_checkpointing / ours", 2),
    "integrity_cost": Goal("durable save: with fingerprints / without; digests are always on", 1.10, at_most=True),
    "restore_warm_vs_dcp": Goal("restore from page cache: dcp.load / ours, digests checked", 5),
    "restore_vs_preadv": Goal("from page cache, unchecked in place: best preadv / our reader", 0.5),
    "restore_vs_torch_checkpointing": Goal("restore from page cache: torch_checkpointing / ours", 5),
    "restore_cold_vs_dcp": Goal("restore, page cache dropped: dcp.load / ours", 1.5),
    "restore_1to4_vs_dcp": Goal("4 ranks restore what 1 saved: dcp.load / ours", 5),
    "restore_4to1_vs_dcp": Goal("1 rank restores what 4 saved: dcp.load / ours", 1.5),
    "read_amplification": Goal("4 ranks restore what 1 saved: bytes read / bytes needed", 1.02, at_most=True),
    "replan": Goal("planning at many ranks: second save / first", 0.1, at_most=True),
    "loop_overhead": Goal("ckpt.step that does not save / a step of 50 ms, 2 ranks", 0.02, at_most=True),
    "memory": Goal("resident memory after the last of many saves / after the first of them"),
    "manifest": Goal("our manifest / plain DCP's .metadata, bytes, many ranks"),
    "ls": Goal("`resilio ls` at many checkpoints / at one"),
}


@dataclass
class Figure:
    """A figure of this run.

    Attributes:
        name: one of `FIGURES`.
        ratio: None if it could not be measured; `absent` says why.
        seconds: by contender, what is behind it: an entry for each round.
        parts: whatever helps to read it.
        absent: contender -> why it does not take part.
        note: what was not measured, what differs.
    """

    name: str
    ratio: float | None
    seconds: Mapping[str, list[float]] = field(default_factory=dict)
    parts: dict[str, Any] = field(default_factory=dict)
    absent: dict[str, str] = field(default_factory=dict)
    note: str = ""

    @property
    def reached(self) -> bool | None:
        """Whether the target was reached in this run; None if there is none, or no ratio."""
        goal = FIGURES[self.name]
        if goal.target is None or self.ratio is None:
            return None
        return self.ratio <= goal.target if goal.at_most else self.ratio >= goal.target

    @property
    def target(self) -> str:
        """In words, empty if there is none."""
        goal = FIGURES[self.name]
        return "" if goal.target is None else f"{'<=' if goal.at_most else '>='} {goal.target:g}"

    def line(self) -> dict[str, Any]:
        """As it is printed in JSON."""
        return {
            "figure": self.name,
            "ratio": self.ratio,
            "target": self.target or None,
            "reached": self.reached,
            "about": FIGURES[self.name].about,
            "seconds": dict(self.seconds),
            "parts": self.parts,
            "absent": self.absent,
            "note": self.note,
        }

    def __str__(self) -> str:
        said = {True: "reached", False: "not reached", None: "no verdict"}[self.reached]
        ratio = "no ratio" if self.ratio is None else f"{self.ratio:.3g}"
        why = "".join(f"; {name}: {reason}" for name, reason in self.absent.items())
        return f"{self.name}: {ratio}" + (f" (target {self.target}: {said})" if self.target else "") + why


def paired(these: list[float], those: list[float]) -> float:
    """The median of the rounds' ratios: a slow phase of the machine hits both sides of one."""
    return median(a / b for a, b in zip(these, those, strict=True))


def show(about: dict[str, Any], figures: list[Figure], console: Console) -> None:
    """All of it, for people."""
    console.print(", ".join(f"{key} {value}" for key, value in about.items() if not isinstance(value, dict)))
    for name, version in about["peers"].items():
        console.print(f"{name}: {version}")
    table = Table("figure", "ratio", "target", "", "what", box=SIMPLE)
    for figure in figures:
        reached = {True: "reached", False: "not reached", None: ""}[figure.reached]
        ratio = "absent" if figure.ratio is None else f"{figure.ratio:.3g}"
        table.add_row(figure.name, ratio, figure.target, reached, FIGURES[figure.name].about)
    console.print(table)
    for figure in figures:
        medians = ", ".join(f"{name} {median(times):.4g}" for name, times in figure.seconds.items() if times)
        parts = ", ".join(f"{name} {_short(value)}" for name, value in figure.parts.items())
        absent = ", ".join(f"{name} is absent ({why})" for name, why in figure.absent.items())
        told = [f"seconds: {medians}" if medians else "", parts, absent, figure.note]
        console.print(f"{figure.name}: {'; '.join(filter(None, told))}", highlight=False, markup=False)


def _short(value: Any) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)
