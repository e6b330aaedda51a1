"""Crash enumeration: every state that a crash could leave a run in, each judged by the code that reads runs.

A scenario of saves, sweeps, pins and branches is run for real, and all that it asks of the storage is logged. Then for
each moment the states are made up that a crash then could leave: what was not yet durable is dropped, torn or kept, in
any combination that POSIX or an object store allows. Each different one is a store of its own, in which the newest
checkpoint is chosen, all of it verified, and a next manager restores, saves and cleans up.

Source: after CrashMonkey and ACE (Mohan et al., OSDI 2018) and ALICE (Pillai et al., OSDI 2014), which found in this
way what file systems and applications lose; what a directory promises before its fsync is read here as strictly.
"""

from __future__ import annotations

from .invariants import INVARIANTS
from .plants import PLANTS, Plant
from .scenarios import SCENARIOS
from .selftest import EXHAUSTIVE, ON_STORAGE, Report, ScenarioReport, Violation, crash_selftest

__all__ = [
    "EXHAUSTIVE",
    "INVARIANTS",
    "ON_STORAGE",
    "PLANTS",
    "SCENARIOS",
    "Plant",
    "Report",
    "ScenarioReport",
    "Violation",
    "crash_selftest",
]
