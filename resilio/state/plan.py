"""What a restore will do, as a list of steps that either all happen or none."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch

from ..errors import LiveStateError, RanksLostError, RestoreError
from .flat import Outcome
from .rng import capture_rng, restore_rng
from .scratch import Scratch
from .tree import text_of

__all__ = ["Agree", "Own", "RestorePlan", "Step"]

Step = Callable[[], None]
Agree = Callable[[BaseException | None], None]
_AS_IT_WAS = ", everything is as it was"
_INTERRUPTS = (KeyboardInterrupt, SystemExit)


@dataclass
class Own:
    """A call of somebody else's load: it may raise, so it comes first and can be undone."""

    name: str
    remember: Callable[[], Step]
    load: Step
    hint: str = ""  # what to do if it raises


@dataclass
class RestorePlan:
    """What a restore will do to live objects; until `apply` it has done nothing.

    Attributes:
        memory: what is read into; by saved flat key, each allocated like the live one.
        renamed: saved flat key -> live one, of what comes back under another name.
        stayed: live flat keys that stay as they are; of an optimizer or other part that stays whole, its name.
        unused: saved flat keys that go nowhere; what is a rank's own is left out.
    """

    memory: Scratch = field(default_factory=Scratch)
    generators: dict[str, Any] = field(default_factory=capture_rng)
    checks: list[Step] = field(default_factory=list)
    own: list[Own] = field(default_factory=list)
    stock: list[tuple[str, Step]] = field(default_factory=list)
    rng: list[Callable[[], Outcome]] = field(default_factory=list)
    outcomes: list[Outcome] = field(default_factory=list)
    renamed: dict[str, str] = field(default_factory=dict)
    stayed: list[str] = field(default_factory=list)
    unused: list[str] = field(default_factory=list)

    @property
    def scratch(self) -> dict[str, torch.Tensor]:
        """Saved flat key -> tensor to be filled from the checkpoint."""
        return self.memory.tensors

    def check(self) -> None:
        """Look at the filled scratch for what the records alone could not show. Touches nothing live.

        Raises:
            MismatchError: tensors that are one here came back as two different ones.

        Ranks: each for itself: agree on the result before any rank applies.
        """
        for check in self.checks:
            check()

    def apply(self, agree: Agree | None = None) -> list[Outcome]:
        """Put everything in place: users' own loads first, then tensors and optimizers, random generators last.

        Args:
            agree: called with this rank's error or None after each phase; raises on all ranks if any has one, so that a
                load that fails on one rank is undone on all. Without it this rank is alone.

        Returns:
            how each component came back.

        Raises:
            MismatchError: see `check`; nothing was touched.
            RestoreError: a `load_state_dict` raised; everything is as it was.
            LiveStateError: it raised and could not be undone, or a rank was lost or a Ctrl-C came when state was being
                put in place.
            RanksLostError: a rank was lost before that; everything is as it was. So it is after a Ctrl-C.

        Ranks: all, if `agree` is collective.
        """
        agree = agree or _alone
        agree(_error_of(self.check))
        undo: list[tuple[str, Step]] = []
        failure = _error_of(lambda: self._load_own(undo))
        interrupt = failure.__cause__ if failure is not None else None
        try:
            agree(failure)
        except BaseException as caught:
            told = caught  # `caught` is unbound when the block ends, and the lambda must not outlive it
            undone = _error_of(lambda: _undo(undo, told))
            restore_rng(self.generators)
            if isinstance(caught, Exception) and not isinstance(caught, RanksLostError):
                agree(undone)
            elif undone is not None:
                raise undone from caught
            if isinstance(interrupt, _INTERRUPTS):
                raise interrupt from None
            raise
        outcomes: list[Outcome] = []
        try:
            agree(_error_of(lambda: outcomes.extend(self._put_stock())))
        except (RanksLostError, *_INTERRUPTS) as error:
            why = str(error) if isinstance(error, RanksLostError) else text_of(error)
            raise LiveStateError(
                f"{why}. This rank's state was put back, theirs may not have been: restore again, or start anew",
                component="",
            ) from error
        return outcomes

    def _load_own(self, undo: list[tuple[str, Step]]) -> None:
        for own in self.own:
            try:
                undo.append((own.name, own.remember()))
                own.load()
            except BaseException as error:  # a Ctrl-C as well: what it cuts short must be undone
                hint = f". {own.hint}" if own.hint else ""
                raise RestoreError(
                    f"{own.name} could not be restored{_AS_IT_WAS}: {text_of(error)}{hint}", component=own.name
                ) from error

    def _put_stock(self) -> list[Outcome]:
        name = ""
        try:
            for own_name, put in self.stock:
                name = own_name
                put()
            name = "rng"
            return [*self.outcomes, *(put() for put in self.rng)]
        except BaseException as error:
            raise LiveStateError(
                f"restoring {name} failed midway: live state is a mixture of before and after. Start the process anew: "
                f"{text_of(error)}",
                component=name,
            ) from error


def _alone(error: BaseException | None) -> None:
    if error is not None:
        raise error


def _error_of(step: Step) -> Exception | None:
    try:
        step()
    except Exception as error:  # noqa: BLE001 - handed on whole
        return error
    return None


def _undo(steps: list[tuple[str, Step]], cause: BaseException) -> None:
    for name, back in reversed(steps):
        try:
            back()
        except BaseException as error:  # noqa: BLE001 - anything a user's load may raise; a second Ctrl-C
            # The cause was worded, maybe on another rank, when the undo was still to come.
            raise LiveStateError(
                f"a restore failed ({text_of(cause).replace(_AS_IT_WAS, '')}), and putting {name} back failed too "
                f"({text_of(error)}): live state is a mixture. Start the process anew",
                component=name,
            ) from cause
