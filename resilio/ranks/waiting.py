"""Waiting for something that can only be asked for, so that a Ctrl-C comes through and a deadline is kept."""

from __future__ import annotations

import time
from collections.abc import Callable

__all__ = ["wait_until"]

_SHARE = 0.05  # of the time waited so far: what is waited for is noticed at most so much late, and asked for seldom


def wait_until(here: Callable[[float], bool], timeout_s: float, *, shortest_s: float, longest_s: float) -> bool:
    """Whether `here` came true in time.

    Args:
        here: asked again and again, with the seconds waited so far; what it raises goes through.
        timeout_s: how long.
        shortest_s: between two askings, at first.
        longest_s: the same, later on.
    """
    began_s = time.monotonic()
    waited_s = 0.0
    while not here(waited_s):
        waited_s = time.monotonic() - began_s
        if waited_s >= timeout_s:
            return False
        time.sleep(min(max(shortest_s, _SHARE * waited_s), longest_s, timeout_s - waited_s))
    return True
