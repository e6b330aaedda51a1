"""What all ranks must see alike: one rank's choice, everybody's errors."""

from __future__ import annotations

import logging
import pickle
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, TypeVar

import torch.distributed as dist

from ..errors import ResilioError, SaveError, StorageError

__all__ = ["DEFAULT_TIMEOUT_S", "Ranks", "portable"]

DEFAULT_TIMEOUT_S = 1800.0  # torch.distributed's own, for gloo

_T = TypeVar("_T")
_log = logging.getLogger("resilio")


def portable(error: BaseException, kind: type[ResilioError] = ResilioError) -> ResilioError:
    """`error` as one that every rank can receive: our own as it is, anything else as text in a `kind`.

    A foreign exception may not pickle, or only come apart when it is unpickled on another rank, which would replace the
    cause by a riddle; so nothing foreign is ever sent. A storage error that ends a save becomes a `SaveError`, which is
    what those who go on without that checkpoint catch.
    """
    if isinstance(error, StorageError) and kind is SaveError:
        error = SaveError(str(error), **{**error.facts, "cause": type(error).__name__})
    if isinstance(error, ResilioError):
        try:
            pickle.loads(pickle.dumps(error))  # noqa: S301  (our own bytes)
        except Exception:  # noqa: BLE001  a fact that does not travel; the text still does
            return type(error)(str(error))
        return error
    text = "".join(traceback.format_exception(error))
    return kind(f"{type(error).__name__}: {error}", cause=type(error).__name__, trace=text)


@dataclass
class Ranks:
    """This process among the ranks of the job.

    Two gloo groups: `control` is used by the main thread alone, `data` by the saving thread alone. Sharing one would
    let a save in the background meet the training loop's collectives in another order on another rank, which deadlocks
    both.

    Attributes:
        rank: this process; 0 is the coordinator.
        world: number of ranks.
        control: group of the main thread, None without a process group.
        data: group of the saving thread, None without a process group.
    """

    rank: int = 0
    world: int = 1
    control: dist.ProcessGroup | None = None
    data: dist.ProcessGroup | None = None

    @classmethod
    def connect(cls, timeout_s: float = DEFAULT_TIMEOUT_S) -> Ranks:
        """Join the ranks of the default process group; alone if there is none.

        Ranks: all; collective, as the making of a process group is.
        Blocks: until every rank is here.
        """
        if not (dist.is_available() and dist.is_initialized()):
            return cls()
        timeout = timedelta(seconds=timeout_s)
        control = dist.new_group(backend="gloo", timeout=timeout, group_desc="resilio-control")
        data = dist.new_group(backend="gloo", timeout=timeout, group_desc="resilio-data")
        return cls(dist.get_rank(), dist.get_world_size(), control, data)

    @property
    def coordinator(self) -> bool:
        """Whether this is rank 0."""
        return self.rank == 0

    def gather(self, value: _T) -> list[_T]:
        """The values of all ranks, in order.

        Ranks: all; collective on the control group.
        """
        if self.control is None:
            return [value]
        values: list[Any] = [None] * self.world
        dist.all_gather_object(values, value, group=self.control)
        return values

    def agree(self, error: BaseException | None, kind: type[ResilioError] = ResilioError) -> None:
        """Return if no rank has an error; else raise the same one on all ranks.

        Args:
            error: this rank's, or None.
            kind: what a foreign exception becomes.

        Raises:
            ResilioError: the error of the lowest rank that has one, with `rank` and `ranks` (all that failed) as facts.

        Ranks: all; collective on the control group.
        """
        self.raise_first(self.gather(None if error is None else portable(error, kind)), error)

    def raise_first(self, errors: list[ResilioError | None], own: BaseException | None = None) -> None:
        """Raise the first of `errors` (by rank), if any, with the ranks that failed as facts. Not collective."""
        failed = [rank for rank, error in enumerate(errors) if error is not None]
        if not failed:
            return
        error = errors[failed[0]]
        assert error is not None
        if self.world > 1 and not hasattr(error, "rank"):
            where = f"rank {failed[0]}" + (f" (and {len(failed) - 1} more)" if len(failed) > 1 else "")
            error = type(error)(f"{where}: {error}", **{**error.facts, "rank": failed[0], "ranks": failed})
        if isinstance(own, ResilioError) and failed[0] == self.rank and self.world == 1:
            raise own
        raise error from own

    def from_coordinator(self, make: Callable[[], _T], kind: type[ResilioError] = ResilioError) -> _T:
        """What `make` returns on rank 0, on all ranks; its error too.

        Ranks: all; collective on the control group. `make` runs on rank 0 alone.
        """
        if self.control is None:
            return make()
        box: list[Any] = [None]
        own: BaseException | None = None
        if self.coordinator:
            try:
                box = [(make(), None)]
            except Exception as error:  # noqa: BLE001  whatever it is, the others must hear of it
                own = error
                box = [(None, portable(error, kind))]
        dist.broadcast_object_list(box, src=dist.get_global_rank(self.control, 0), group=self.control)
        value, told = box[0]
        if told is not None:
            raise told from own
        return value  # type: ignore[no-any-return]

    def close(self) -> None:
        """Give the groups back. Local: a group need not be left by all at once."""
        for group in (self.control, self.data):
            if group is not None and dist.is_initialized():
                try:
                    dist.destroy_process_group(group)
                except (ValueError, RuntimeError) as error:  # the job tore its groups down before us
                    _log.debug("closing a process group: %s", error)
        self.control = self.data = None
