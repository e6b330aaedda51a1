"""A small training loop, and what a save does to it."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from dataclasses import dataclass
from statistics import fmean, median
from typing import Any

import torch
from torch.optim.optimizer import register_optimizer_step_pre_hook

from resilio.clock import SystemClock

from .contenders import Contender
from .state import Job

__all__ = ["Hold", "Loop", "Waits"]

_clock = SystemClock()
_UNDISTURBED = 3  # steps before each save
_TOKENS_MAX = 4096


class Waits:
    """How long the hooks between two of ours keep an optimizer from stepping.

    Hooks run in the order of their registration, those of all optimizers before those of one: make this before any
    manager.
    """

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self.seconds = 0.0
        self._start_s = 0.0
        self._first = register_optimizer_step_pre_hook(self._begin)
        self._last = optimizer.register_step_pre_hook(self._end)

    def _begin(self, *_: Any) -> None:
        self._start_s = _clock.monotonic_s()

    def _end(self, *_: Any) -> None:
        self.seconds += _clock.monotonic_s() - self._start_s

    def close(self) -> None:
        self._first.remove()
        self._last.remove()


@dataclass(frozen=True)
class Hold:
    """What one save cost the loop.

    Attributes:
        call_s: in the call.
        wait_s: the next step's, in a hook or lock before the optimizer.
        excess_s: what the next step took besides that over an undisturbed one; never negative.
        undisturbed_s: median of the steps before the save.
        during_s: mean of the steps that began while the save was in flight, the next one with its wait.
        setup_s: what a process does once before its first save; 0 at later ones.
    """

    call_s: float
    wait_s: float
    excess_s: float
    undisturbed_s: float
    during_s: float
    setup_s: float = 0.0

    @property
    def total_s(self) -> float:
        """How long training was held."""
        return self.setup_s + self.call_s + self.wait_s + self.excess_s


class Loop:
    """Trains `job`, with as many tokens in each step as make it take about `step_s`."""

    def __init__(self, job: Job, step_s: float) -> None:
        self._job = job
        self._waits = Waits(job.optimizer)
        self._step = 0
        self._device = next(job.model.parameters()).device
        count = 4
        self._tokens = torch.arange(count, device=self._device) % job.vocabulary
        self._one(contextlib.nullcontext())
        while self._one(contextlib.nullcontext())[0] < step_s and count < _TOKENS_MAX:
            count *= 2
            self._tokens = torch.arange(count, device=self._device) % job.vocabulary

    def hold(self, contender: Contender, setup: Callable[[], object] | None = None) -> Hold:
        """Train some steps, save in the last, train on until the save is complete."""
        undisturbed_s = median(self._one(contender.guarded())[0] for _ in range(_UNDISTURBED)) if setup is None else 0.0
        setup_s = 0.0
        if setup is not None:
            # A lock of the contender's is there only after that.
            undisturbed_s = median(self._one(contextlib.nullcontext())[0] for _ in range(_UNDISTURBED))
            start_s = _clock.monotonic_s()
            setup()
            setup_s = _clock.monotonic_s() - start_s
        self._step += 1
        start_s = _clock.monotonic_s()
        contender.save(self._step)
        call_s = _clock.monotonic_s() - start_s
        next_s, wait_s = self._one(contender.guarded())
        during = [next_s]
        while contender.in_flight:
            during.append(self._one(contender.guarded())[0])
        contender.settle()
        excess_s = max(0.0, next_s - wait_s - undisturbed_s)
        return Hold(call_s, wait_s, excess_s, undisturbed_s, fmean(during), setup_s)

    def close(self) -> None:
        """Take the hooks off."""
        self._waits.close()

    def _finish(self) -> None:
        """Wait for the device: what it has yet to do is no time gained."""
        if self._device.type != "cpu":
            torch.accelerator.synchronize(self._device)

    def _one(self, guard: contextlib.AbstractContextManager[None]) -> tuple[float, float]:
        """One step: how long it took, and how much of that it waited."""
        self._waits.seconds = 0.0
        start_s = _clock.monotonic_s()
        self._job.model(self._tokens).backward()
        before_s = _clock.monotonic_s()
        with guard:
            waited_s = _clock.monotonic_s() - before_s
            self._job.optimizer.step()
        self._job.optimizer.zero_grad()
        self._finish()
        return _clock.monotonic_s() - start_s, waited_s + self._waits.seconds
