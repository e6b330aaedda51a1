"""What a restore will do, as a list of steps that either all happen or none."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import torch

from ..errors import LiveStateError, RestoreError
from .flat import Outcome
from .rng import capture_rng, restore_rng

__all__ = ["Own", "RestorePlan", "Step"]

Step = Callable[[], None]


@dataclass
class Own:
    """A call of somebody else's load: it may raise, so it comes first and can be undone."""

    name: str
    remember: Callable[[], Step]
    load: Step


@dataclass
class RestorePlan:
    """What a restore will do to live objects; until `apply` it has done nothing.

    Attributes:
        scratch: saved flat key -> tensor to be filled from the checkpoint, allocated like the live one.
    """

    scratch: dict[str, torch.Tensor] = field(default_factory=dict)
    checks: list[Step] = field(default_factory=list)
    own: list[Own] = field(default_factory=list)
    stock: list[tuple[str, Step]] = field(default_factory=list)
    rng: list[Callable[[], Outcome]] = field(default_factory=list)
    outcomes: list[Outcome] = field(default_factory=list)

    def check(self) -> None:
        """Look at the filled scratch for what the records alone could not show. Touches nothing live.

        Raises:
            MismatchError: tensors that are one here came back as two different ones.

        Ranks: each for itself: agree on the result before any rank applies.
        """
        for check in self.checks:
            check()

    def apply(self) -> list[Outcome]:
        """Put everything in place: users' own loads first, then tensors and optimizers, random generators last.

        Returns:
            how each component came back.

        Raises:
            MismatchError: see `check`; nothing was touched.
            RestoreError: a `load_state_dict` raised; everything is as it was.
            LiveStateError: it raised and could not be undone.
        """
        self.check()
        generators = capture_rng()
        undo: list[tuple[str, Step]] = []
        name = ""
        try:
            for own in self.own:
                name = own.name
                back = own.remember()
                undo.append((name, back))
                own.load()
        except Exception as error:
            _undo(undo, error)
            restore_rng(generators)
            raise RestoreError(
                f"{name} could not be restored, everything is as it was: {type(error).__name__}: {error}",
                component=name,
            ) from error
        try:
            for own_name, put in self.stock:
                name = own_name
                put()
            name = "rng"
            outcomes = [*self.outcomes, *(put() for put in self.rng)]
        except Exception as error:
            raise LiveStateError(
                f"restoring {name} failed midway: live state is a mixture of before and after. Start the "
                f"process "
                f"anew: {type(error).__name__}: {error}",
                component=name,
            ) from error
        return outcomes


def _undo(steps: list[tuple[str, Step]], cause: Exception) -> None:
    for name, back in reversed(steps):
        try:
            back()
        except Exception as error:  # noqa: BLE001 - anything a user's load may raise
            raise LiveStateError(
                f"a restore failed ({type(cause).__name__}: {cause}), and putting {name} back failed too "
                f"({type(error).__name__}: {error}): live state is a mixture. Start the process anew",
                component=name,
            ) from cause
