"""What all parts of a restore plan share: both sides, what is asked for, and what was found wrong."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, Literal

import torch

from .flat import Outcome, Ref, SavedState
from .names import Slot
from .plan import RestorePlan
from .saved import Problems, Rename, SavedView, Selection, mismatch
from .tensors import SHARE, expanded, fits, local, refusal, same_bytes
from .training_state import Part, TrainingState
from .tree import refs

__all__ = ["Context"]


class Context:
    """One restore in the making.

    Args:
        state: the live objects.
        saved: what the checkpoint holds.
        rank: this process.
        world: number of ranks now.
        selection: what is asked for.
        rename: saved names -> live names.
        strict: whether what is on one side only is an error.
        lent: see `plan_restore`.
    """

    def __init__(
        self,
        state: TrainingState,
        saved: SavedState,
        rank: int,
        world: int,
        selection: Selection,
        rename: Rename | None,
        strict: bool,
        lent: Mapping[str, torch.Tensor] | None = None,
    ) -> None:
        self.state, self.rank, self.world, self.select, self.strict = state, rank, world, selection, strict
        self.problems = Problems()
        self.saved = SavedView(saved, rename, self.problems, lent)
        self.result = RestorePlan(self.saved.scratch)
        self._same: dict[int, tuple[str, torch.Tensor]] = {}

    def outcome(self, name: str, how: Literal["exact", "re-derived", "stayed live"], note: str = "") -> None:
        """Note how a component comes back."""
        self.result.outcomes.append(Outcome(name, how, note))

    def stays(self, name: str, note: str) -> None:
        """Note that a whole part stays as it is."""
        self.outcome(name, "stayed live", note)
        self.result.stayed.append(name)

    def present(self, part: Part, key: str) -> bool:
        """Whether a part as a whole is asked for and saved; the rest is noted."""
        node = self.saved.nodes.get(key)
        keys = [self.saved.rename(leaf) for leaf in refs(node)] or [key]
        chosen = [self.select(leaf, part.name) for leaf in keys]  # each is asked, so that no pattern counts as unused
        if not any(chosen):
            self.saved.claim(node)
            self.stays(part.name, "not asked for")
            return False
        if node is None:
            if self.strict:
                self.problems.missing.append(key)
            self.stays(part.name, "not in the checkpoint")
            return False
        return True

    def tensor(
        self, key: str, node: Any, slot: Slot | None, live: torch.Tensor, *, own: bool = False
    ) -> torch.Tensor | None:
        """Scratch for a live tensor that is written in place, or None and a problem noted.

        `own`: it is written by somebody else's load, which cannot write into an expanded one.
        """
        self.saved.claim(node)
        if not isinstance(node, Ref):
            self.problems.others.append(f"{key} is a tensor here and nested state in the checkpoint")
            return None
        reason = refusal(live) or (f"{SHARE}; `.clone()` it" if own and slot is not None and expanded(live) else None)
        if reason is not None:
            self.problems.others.append(f"{key} {reason}")
            return None
        if not self.saved.check(key, node.key, live):
            return None
        scratch = self.saved.want(node.key, live)
        self.saved.take(node)
        if slot is not None:
            self._same_if_tied(key, slot.tensor, scratch)
        if not own:  # else the bits are looked at after the load
            self.result.checks.append(lambda: _must_fit(key, live, scratch))
        return scratch

    def narrowed(self, key: str, live: torch.Tensor, scratch: torch.Tensor) -> torch.Tensor:
        """`live`, which may be kept in fewer bits than it is saved in: they must do."""

        def check() -> None:
            if not same_bytes(local(scratch).to(live.dtype).to(scratch.dtype), scratch):
                raise mismatch(
                    f"{key} is kept in {live.dtype} while training (FSDP1's buffer_dtype), and was saved with more "
                    "bits than that; restore before the first forward"
                )

        if live.dtype != scratch.dtype:
            self.result.checks.append(check)
        return live

    def _same_if_tied(self, key: str, tensor: torch.Tensor, scratch: torch.Tensor) -> None:
        first, other = self._same.setdefault(id(tensor), (key, scratch))
        if other is scratch:
            return

        def check() -> None:
            if not same_bytes(other, scratch):
                raise mismatch(
                    f"{first} and {key} are one tensor here (tied), but were saved as two with different values; untie "
                    "them, or exclude one"
                )

        self.result.checks.append(check)

    def want_all(self, node: Any, live: Any) -> None:
        """Scratch for every tensor below `node`, on the devices of the live ones in the same places."""
        self.saved.claim(node)
        self.saved.take(node)
        for key, value in _side_by_side(node, live):
            spec = self.saved.spec(key)
            if spec is not None:
                like = value if isinstance(value, torch.Tensor) and refusal(value) is None else None
                self.saved.want(key, like, order=spec.order)


def _must_fit(key: str, live: torch.Tensor, saved: torch.Tensor) -> None:
    if not fits(live, saved):
        raise mismatch(f"{key} {SHARE}, and they were saved with different values; `.clone()` it")


def _side_by_side(node: Any, live: Any) -> Iterable[tuple[str, Any]]:
    """(saved flat key, what is live in the same place or None) of every leaf."""
    if isinstance(node, Ref):
        yield node.key, live
    elif isinstance(node, dict):
        for key, below in node.items():
            yield from _side_by_side(below, live.get(key) if isinstance(live, dict) else None)
    elif isinstance(node, (list, tuple, set, frozenset)):
        same = isinstance(live, (list, tuple)) and len(live) == len(node)
        for i, below in enumerate(node):
            yield from _side_by_side(below, live[i] if same else None)
