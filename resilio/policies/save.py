"""When a save is due, and why.

All ranks must come to the same answer, so `reason` may depend only on its `SaveContext`, which the ranks agreed on.
Clocks and signals differ between ranks. A policy that looks at them therefore says beforehand which: `clocks`, the
lengths of time, and `signals`, the names. The manager agrees on one flag for each (up if it is up on any rank, in the
vote it holds anyway), and `reason` sees those flags. A policy holds no collective, no handler and no state.

The save at the end of training is no policy: the manager does it whatever the policy says.
"""

from __future__ import annotations

import signal
from abc import ABC, abstractmethod
from dataclasses import dataclass
from datetime import timedelta

from ..errors import ConfigError
from .checks import whole_number
from .periods import all_reasons, any_reason, in_units, in_words, steps_or_period_s

__all__ = ["SaveContext", "SavePolicy", "save_at", "save_every", "save_on_signal"]

# The first two cannot be caught; after the others, faults of the process itself, no Python code would run any more.
_NO_HANDLER = frozenset({"SIGKILL", "SIGSTOP", "SIGSEGV", "SIGBUS", "SIGFPE", "SIGILL"})


@dataclass(frozen=True)
class SaveContext:
    """All a save policy may know, the same on every rank.

    Attributes:
        step: optimizer steps completed.
        last_saved_step: step of the last save of this manager, or of the checkpoint it resumed from; None if neither.
        times_due: those of the policy's `SavePolicy.clocks` that have run out on some rank since the last save.
        last: this is the last step of the run.
        signalled: names of the signals that any rank received since the last step, e.g. ``SIGTERM``.
    """

    step: int
    last_saved_step: int | None = None
    times_due: frozenset[float] = frozenset()
    last: bool = False
    signalled: frozenset[str] = frozenset()


class SavePolicy(ABC):
    """Decides whether a save is due. Frozen, equal by value, prints as its source.

    `a | b` is due when either is, `a & b` when both are at the same step.

    Your own is a frozen dataclass with a `reason`; one that looks at time has `clocks` too, one that looks at signals
    `signals`.
    """

    def clocks(self) -> tuple[float, ...]:
        """The lengths of time, in seconds, that `reason` looks for in `SaveContext.times_due`.

        Each is distinct, in an order that is the same on every rank. They count from when the last save began,
        whatever its reason; from when the manager began, if there was none.
        """
        return ()

    @property
    def signals(self) -> frozenset[str]:
        """Names of the signals that `reason` looks for in `SaveContext.signalled`: the manager listens for these."""
        return frozenset()

    @abstractmethod
    def reason(self, context: SaveContext) -> str | None:
        """Why a save is due at this step, in a few words for people; None if none is due.

        Ranks: all, with equal contexts; the answer must be a function of the context alone.
        """

    def __or__(self, other: SavePolicy) -> SavePolicy:
        if not isinstance(other, SavePolicy):
            return NotImplemented
        return _AnySave(_parts(self, _AnySave) + _parts(other, _AnySave))

    def __and__(self, other: SavePolicy) -> SavePolicy:
        if not isinstance(other, SavePolicy):
            return NotImplemented
        return _AllSave(_parts(self, _AllSave) + _parts(other, _AllSave))


def save_every(
    steps: int | timedelta | None = None,
    *,
    days: float | None = None,
    hours: float | None = None,
    minutes: float | None = None,
    seconds: float | None = None,
) -> SavePolicy:
    """Save at every multiple of `steps`, or when so much time has passed since the last save.

    Say either steps or time (`days`, `hours`, `minutes` and `seconds` add up; a `timedelta` is time); for both, join
    two with `|`: ``save_every(500) | save_every(minutes=20)``. Time is looked at once a step: a save waits for the
    step to end.

    Raises:
        ConfigError: nothing, both, or a number that is not above 0.
    """
    units = {"days": days, "hours": hours, "minutes": minutes, "seconds": seconds}
    whole, seconds_each = steps_or_period_s("save_every", steps, units)
    return _EverySteps(whole) if whole else _EveryTime(seconds_each)


def save_at(*steps: int) -> SavePolicy:
    """Save at exactly these steps. One that a resumed run is past already is never due.

    Raises:
        ConfigError: no step, or one that is no whole number of at least 0.
    """
    if not steps:
        raise ConfigError("save_at takes at least one step: save_at(1000, 5000).")
    return _At(tuple(sorted({whole_number(step, "save_at(step)", least=0) for step in steps})))


def save_on_signal(*names: str) -> SavePolicy:
    """Save at the end of the step in which one of these signals reached any rank.

    Making it installs nothing: the manager it is given to does, see `SavePolicy.signals`.

    Args:
        names: such as ``"SIGTERM"``, as the module `signal` has them.

    Raises:
        ConfigError: no name, an unknown one, or a signal after which no save could be made (``SIGKILL``, ``SIGSEGV``).
    """
    if not names:
        raise ConfigError('save_on_signal takes at least one name: save_on_signal("SIGTERM").')
    return _OnSignal(tuple(sorted({_signal(name) for name in names})))


def _signal(name: str) -> str:
    """The name under which the signal is reported, of which `name` may be an alias.

    Source: `signal.Signals` holds exactly the signals of this platform.
    """
    known = signal.Signals.__members__
    if not isinstance(name, str) or name not in known:
        usual = [each for each in ("SIGTERM", "SIGINT", "SIGUSR1", "SIGUSR2") if each in known]
        raise ConfigError(
            f"save_on_signal takes names of signals of this platform, such as {', '.join(usual)}; not {name!r}.",
            value=name,
        )
    if known[name].name in _NO_HANDLER:
        raise ConfigError(f"save_on_signal: no save can be made after {name}.", value=name)
    return known[name].name


@dataclass(frozen=True, repr=False)
class _EverySteps(SavePolicy):
    steps: int

    def reason(self, context: SaveContext) -> str | None:
        return f"every {in_words(self.steps, 'steps')}" if context.step % self.steps == 0 else None

    def __repr__(self) -> str:
        return f"save_every({self.steps})"


@dataclass(frozen=True, repr=False)
class _EveryTime(SavePolicy):
    seconds: float

    def clocks(self) -> tuple[float, ...]:
        return (self.seconds,)

    def reason(self, context: SaveContext) -> str | None:
        unit, amount = in_units(self.seconds)
        return f"every {in_words(amount, unit)}" if self.seconds in context.times_due else None

    def __repr__(self) -> str:
        unit, amount = in_units(self.seconds)
        return f"save_every({unit}={amount})"


@dataclass(frozen=True, repr=False)
class _At(SavePolicy):
    steps: tuple[int, ...]

    def reason(self, context: SaveContext) -> str | None:
        return f"at step {context.step}" if context.step in self.steps else None

    def __repr__(self) -> str:
        return f"save_at({', '.join(map(str, self.steps))})"


@dataclass(frozen=True, repr=False)
class _OnSignal(SavePolicy):
    names: tuple[str, ...]

    @property
    def signals(self) -> frozenset[str]:
        return frozenset(self.names)

    def reason(self, context: SaveContext) -> str | None:
        heard = [name for name in self.names if name in context.signalled]
        return f"signal {', '.join(heard)}" if heard else None

    def __repr__(self) -> str:
        return f"save_on_signal({', '.join(map(repr, self.names))})"


@dataclass(frozen=True, repr=False)
class _Joined(SavePolicy):
    policies: tuple[SavePolicy, ...]

    def clocks(self) -> tuple[float, ...]:
        return tuple(sorted({seconds for policy in self.policies for seconds in policy.clocks()}))

    @property
    def signals(self) -> frozenset[str]:
        return frozenset().union(*(policy.signals for policy in self.policies))

    def _reasons(self, context: SaveContext) -> list[str]:
        return [reason for policy in self.policies if (reason := policy.reason(context)) is not None]


@dataclass(frozen=True, repr=False)
class _AnySave(_Joined):
    def reason(self, context: SaveContext) -> str | None:
        return any_reason(self._reasons(context)) or None

    def __repr__(self) -> str:
        return " | ".join(map(repr, self.policies))


@dataclass(frozen=True, repr=False)
class _AllSave(_Joined):
    def reason(self, context: SaveContext) -> str | None:
        reasons = self._reasons(context)
        return all_reasons(reasons) if len(reasons) == len(self.policies) else None

    def __repr__(self) -> str:
        return " & ".join(f"({p!r})" if isinstance(p, _AnySave) else repr(p) for p in self.policies)


def _parts(policy: SavePolicy, kind: type[_Joined]) -> tuple[SavePolicy, ...]:
    return policy.policies if isinstance(policy, kind) else (policy,)
