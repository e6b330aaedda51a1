"""Each rank's bytes onto storage: data objects, written side by side, their block digests, its part of the manifest."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner, WriteItem, WriteItemType
from torch.distributed.checkpoint.storage import StorageWriter, WriteResult
from torch.futures import Future

from .. import failpoints
from ..errors import SaveError
from ..ranks import portable
from ..records import keys
from ..records.digests import digest_of
from ..records.schema import FORMAT, ManifestPart, ObjectRecord, PartRef, Piece, TensorRecord, encode
from ..storage.base import Storage
from . import dcp, health, trained
from .data_object import Task, Written, write_object
from .health import NOT_COUNTED, Health
from .parallel import in_parallel
from .plan import LocalPlan, size_bytes, spread
from .priority import give_way
from .trained import UNKNOWN, Trained

__all__ = ["AttemptWriter", "Root"]

# A key no state can have: the report of a rank to rank 0 rides along with DCP's own results.
_PART = MetadataIndex("\0resilio")
# Of one rank: more gain nothing (measured with buffered writes that end with an fsync: 1.9, 2.6, 3.1 GiB/s at 1, 2, 4).
_OBJECTS = 4
_WORTH_ONE = 32 << 20  # bytes; for fewer another object costs more than it saves
_IN_THE_WAY = 32 << 20  # bytes; fewer are written before a training loop would notice


@dataclass(frozen=True)
class Root:
    """What rank 0 knows when all ranks have written.

    Attributes:
        metadata: bytes of `.metadata`.
        parts: all ranks' manifest parts.
        sizes: name -> length in bytes of every object the ranks wrote.
        ties: flat key -> the flat key whose bytes it shares.
        trained: what it says of the progress of training.
        health: what it says of values that are not finite.
    """

    metadata: bytes
    parts: list[PartRef]
    sizes: dict[str, int]
    ties: dict[str, str]
    trained: Trained = UNKNOWN
    health: Health = NOT_COUNTED


class AttemptWriter(StorageWriter):
    """Writes one attempt.

    Args:
        storage: the run's store.
        attempt: name of the attempt's folder.
        local: this rank's plan.
        rank: this process.
        digest: algorithm of the whole-object digests.
        fingerprints: whether to compute those of what is written.
        arrive: called with what went wrong here, or None, and what was written: raises on all ranks if one is missing
            or has failed.
        alone: whether DCP gathers nothing: then rank 0 hands all ranks' results to `gather`.
        background: whether a thread of its own writes, beside training.

    Attributes:
        root: on rank 0, what all ranks have written, once they have.
    """

    def __init__(
        self,
        storage: Storage,
        attempt: str,
        local: LocalPlan,
        rank: int,
        digest: str,
        fingerprints: bool,
        arrive: Callable[[BaseException | None, list[WriteResult]], None],
        *,
        alone: bool = False,
        background: bool = False,
    ) -> None:
        super().__init__()
        self._background = background
        self._storage = storage
        self._attempt = attempt
        self._local = local
        self._rank = rank
        self._digest = digest
        self._fingerprints = fingerprints
        self._arrive = arrive
        self._alone = alone
        self.root: Root | None = None

    def reset(self, checkpoint_id: Any = None) -> None:
        """A writer is for one attempt; there is nothing to reset."""

    # DCP looks for a parameter literally named `kwargs` before it passes the rank.
    def set_up_storage_writer(self, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        """Nothing: all is known from the start."""

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        """As planned."""
        return plan

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        """As planned."""
        return plans

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        """Write this rank's objects, each durable when this returns, and wait for those of the other ranks.

        So DCP's collective, which comes next, is never open while somebody writes, however long that takes.
        """
        results: list[WriteResult] = []
        failure: BaseException | None = None
        try:
            results = self._write(plan, planner)
        except BaseException as error:  # noqa: BLE001  told to all ranks, which raise it together; a Ctrl-C as well
            failure = error
        self._arrive(failure, results)
        future: Future[list[WriteResult]] = Future()
        future.set_result(results)
        return future

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        """What DCP gathered, on rank 0. The commit comes when it has closed its collective."""
        if not self._alone:
            self.gather(metadata, results)

    def gather(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        """Rank 0: put the ranks' reports together.

        Args:
            metadata: of the plan.
            results: of all ranks.
        """
        try:
            where: dict[MetadataIndex, Any] = {}
            parts: list[PartRef] = []
            sizes: dict[str, int] = {}
            shares: list[tuple[Trained, Health]] = []
            for result in (one for of_rank in results for one in of_rank):
                if result.index == _PART:
                    part, written, share = result.storage_data
                    shares.append(share)
                    parts.append(part)
                    sizes.update(written)
                else:
                    where[result.index] = result.storage_data
            failpoints.hit("save.before_metadata", self._rank)
            data = dcp.finish_metadata(metadata, where, self._local.ties, self._attempt)
            progress, condition = zip(*shares, strict=True)
            self.root = Root(
                data, parts, sizes, self._local.ties, trained.together(progress), health.together(condition)
            )
        except Exception as error:
            raise portable(error, SaveError) from error

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: Any) -> bool:
        """Never chosen by DCP itself."""
        return False

    def _write(self, plan: SavePlan, planner: SavePlanner) -> list[WriteResult]:
        failpoints.hit("save.data_open", self._rank)
        tensors, tasks = self._tasks(plan)
        if self._background and sum(task.size_bytes for task in tasks) >= _IN_THE_WAY:
            give_way()

        def writing(task: Task) -> Callable[[Callable[[], None]], Written]:
            key = keys.attempt_key(self._attempt, task.name)
            how = self._digest, self._fingerprints
            return lambda check: write_object(self._storage, key, task, planner, *how, check)

        written = in_parallel([writing(task) for task in tasks], "resilio-write")
        failpoints.hit("save.data_written", self._rank)
        objects: list[ObjectRecord] = []
        for one in written:
            objects += one.record, self._put(keys.digests_name(one.record.name), one.digests)
        written_values = {item.index.fqn for item in plan.items if item.type == WriteItemType.BYTE_IO}
        part = ManifestPart(
            format=FORMAT,
            rank=self._rank,
            objects=objects,
            tensors=tensors,
            values={key: value for key, value in self._local.values.items() if key in written_values},
            tree=self._local.tree,
            counted=True,
        )
        of_part = self._put(keys.part_name(self._rank), encode(part))
        failpoints.hit("save.part_written", self._rank)
        ref = PartRef(rank=self._rank, name=of_part.name, size_bytes=of_part.size_bytes, digest=of_part.digest)
        sizes = {one.name: one.size_bytes for one in [*objects, of_part]}
        structure = self._local.structure
        share = (
            trained.summary(structure.trained, structure.finite - structure.trained, tensors, self._local.values),
            health.summary(structure.finite, tensors),
        )
        results = [result for one in written for result in one.results]
        return [*results, WriteResult(_PART, of_part.size_bytes, (ref, sizes, share))]

    def _tasks(self, plan: SavePlan) -> tuple[dict[str, TensorRecord], list[Task]]:
        """The manifest's lines of what this rank writes, and the data objects it goes into."""
        tensors: dict[str, TensorRecord] = {}
        total = sum(map(size_bytes, plan.items))
        count = max(1, min(_OBJECTS, os.cpu_count() or 1, total // _WORTH_ONE))
        tasks = [Task(keys.data_name(self._rank, number)) for number in range(count)]
        place = spread(
            {item.index: item for item in plan.items}, {item.index: range(count) for item in plan.items}, count
        )
        for item in plan.items:
            number = place[item.index]
            tasks[number].items.append(item)
            tasks[number].pieces.append(None if item.tensor_data is None else self._note(tensors, item, 2 * number))
            tasks[number].size_bytes += size_bytes(item)
        return tensors, tasks

    def _put(self, name: str, data: bytes) -> ObjectRecord:
        self._storage.put(keys.attempt_key(self._attempt, name), data)
        return ObjectRecord(name=name, size_bytes=len(data), digest=digest_of(data, self._digest))

    def _note(self, tensors: dict[str, TensorRecord], item: WriteItem, number: int) -> Piece:
        assert item.tensor_data is not None
        key = item.index.fqn
        dtype, shape, order = self._local.specs[key]
        record = tensors.setdefault(key, TensorRecord(dtype=dtype, shape=shape, pieces=[], order=order))
        chunk = item.tensor_data.chunk
        # Where its bytes are is known when they are written.
        piece = Piece(offsets=list(chunk.offsets), sizes=list(chunk.sizes), object=number, at=0, size_bytes=0, block=0)
        record.pieces.append(piece)
        return piece
