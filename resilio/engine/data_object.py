"""One data object of a rank: the bytes of tensors and values, with their digests, as plain DCP reads them.

A tensor inside it is the small zip that `torch.save` makes, so plain DCP can read it. The raw bytes lie in
it uncompressed and reach the stream as one write straight from the tensor's memory; noting where that write fell is
what lets our reader skip the zip and read exactly the bytes it needs.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch.distributed.checkpoint.planner import SavePlanner, WriteItem
from torch.distributed.checkpoint.storage import WriteResult

from ..errors import InternalError
from ..records.digests import DIGEST_SIZE, TAMPER_EVIDENT, Digester, append_block_digests
from ..records.schema import ObjectRecord, Piece
from ..storage.base import Storage, Writer
from . import dcp
from .pieces import look_at

__all__ = ["Task", "Written", "write_object"]

_SMALL = 256 * 1024  # bytes; below, a copy costs less than a call

# `torch.save` takes 0.1 ms for the smallest tensor, and writes the same for all of one dtype, shape and strides but for
# the raw bytes: no checksum of theirs either, which is switched off. So that is kept: 1.5 KB for each kind.
_frames: dict[Any, tuple[bytes, bytes]] = {}
_FRAMES = 16384


@dataclass
class Task:
    """A data object to be written.

    Attributes:
        name: within the attempt's folder.
        items: what goes into it, in order.
        pieces: of each item that is a tensor, the manifest's line; filled in.
        size_bytes: about how large it will be.
    """

    name: str
    items: list[WriteItem] = field(default_factory=list)
    pieces: list[Piece | None] = field(default_factory=list)
    size_bytes: int = 0


@dataclass(frozen=True)
class Written:
    """A data object that is durable.

    Attributes:
        record: the manifest's line.
        digests: of its blocks, to be stored.
        results: where plain DCP finds each item.
    """

    record: ObjectRecord
    digests: bytes
    results: list[WriteResult]


def write_object(
    storage: Storage,
    key: str,
    task: Task,
    planner: SavePlanner,
    digest: str,
    fingerprints: bool,
    check: Callable[[], None],
) -> Written:
    """Write one data object; durable on return. Any thread.

    Args:
        storage: the run's store.
        key: of the object.
        task: what goes into it.
        planner: knows the data of items.
        digest: algorithm of the digest over the whole.
        fingerprints: whether to compute those of pieces.
        check: called between writes; what it raises ends the writing, and nothing is published.
    """
    data = _DataObject(digest, check)
    results: list[WriteResult] = []
    # torch.save's CRC32 would be the slowest pass over the data, and our digests cover the same bytes. Thread-local.
    crc = torch.serialization.get_crc32_options()
    torch.serialization.set_crc32_options(False)
    try:
        with storage.writer(key, size_hint=task.size_bytes) as sink:
            data.sink = sink
            for item, piece in zip(task.items, task.pieces, strict=True):
                start = data.tell()
                resolved = planner.resolve_data(item)
                if isinstance(resolved, torch.Tensor):
                    assert piece is not None
                    plain = row_major(resolved)
                    look_at(piece, plain, fingerprints=fingerprints)
                    piece.at, piece.size_bytes, piece.block = data.write_tensor(plain)
                else:
                    data.write(resolved.getbuffer())
                info = dcp.storage_info(task.name, start, data.tell() - start)
                results.append(WriteResult(item.index, data.tell() - start, info))
            data.hand_on(b"")
    finally:
        torch.serialization.set_crc32_options(crc)
    record = ObjectRecord(name=task.name, size_bytes=data.tell(), digest=data.digest.text(), rest=data.rest())
    return Written(record, bytes(data.blocks), results)


class _DataObject:
    """The stream `torch.save` writes into: counts, digests, and notices the raw bytes of the tensor passing by."""

    def __init__(self, algorithm: str, check: Callable[[], None]) -> None:
        self.sink: Writer | None = None
        self._check = check
        self.digest = Digester(algorithm)
        self.blocks = bytearray()
        self._rest = None if algorithm in TAMPER_EVIDENT else Digester(algorithm)
        self._between = bytearray()  # what `_rest` has yet to take
        self._position = 0
        self._awaited: tuple[int, int] | None = None  # address and length of the tensor being written
        self._seen_at: list[int] = []  # where its bytes went
        self._around: bytearray | None = None  # what is written besides them, while that is to be remembered
        self._failure: Exception | None = None
        # torch.save makes 39 small writes for each tensor: handed on one by one they would cost more than the tensors.
        self._small = bytearray()

    def tell(self) -> int:
        return self._position

    def rest(self) -> str | None:
        """The digest over what is in no tensor; None where that and block digests are no match for `digest`."""
        if self._rest is None:
            return None
        self._rest.update(self._between)
        self._between.clear()
        return self._rest.text()

    def flush(self) -> None:
        pass

    def write(self, data: bytes | memoryview) -> int:
        if self._failure is not None:  # torch.save still closes its zip
            raise self._failure
        view = memoryview(data).cast("B")
        if self._awaited is not None and len(view) == self._awaited[1] and _address(view) == self._awaited[0]:
            self._seen_at.append(self._position)
            append_block_digests(self.blocks, view)
        else:
            if self._around is not None:
                self._around += view
            if self._rest is not None:
                self._between += view
                if len(self._between) >= _SMALL:
                    self.rest()
        if len(view) < _SMALL:
            self._small += view
            if len(self._small) >= _SMALL:
                self.hand_on(b"")
        else:
            self.hand_on(view)
        self._position += len(view)
        return len(view)

    def hand_on(self, view: bytes | memoryview) -> None:
        """Pass what was collected, then `view`, to storage."""
        assert self.sink is not None
        small, self._small = self._small, bytearray()
        try:
            self._check()
            for data in (small, view):
                if len(data):
                    self.sink.write(data)
                    self.digest.update(data)
        except Exception as error:
            self._failure = error
            raise

    def write_tensor(self, tensor: torch.Tensor) -> tuple[int, int, int]:
        """Append `tensor`, as `row_major` made it, as `torch.save` would; return offset and number of its raw bytes,
        and its first block's index.
        """
        block = len(self.blocks) // DIGEST_SIZE
        if tensor.numel() == 0:
            self._save(tensor)
            return self._position, 0, block
        kind = tensor.dtype, tensor.shape, tensor.stride()
        frame = _frames.get(kind)
        if frame is None:
            return self._frame(tensor, kind), tensor.nbytes, block
        self.write(frame[0])
        at = self._position
        self._awaited = tensor.data_ptr(), tensor.nbytes
        self.write(tensor.reshape(-1).view(torch.uint8).numpy().data)
        self._awaited = None
        self.write(frame[1])
        return at, tensor.nbytes, block

    def _frame(self, tensor: torch.Tensor, kind: Any) -> int:
        """Append a tensor by `torch.save`, and remember for others of its kind what that writes around the raw bytes.

        Returns: where the raw bytes are.
        """
        self._around = bytearray()
        start = self._position
        self._awaited = tensor.data_ptr(), tensor.nbytes
        self._seen_at.clear()
        self._save(tensor)
        self._awaited = None
        if len(self._seen_at) != 1:
            raise InternalError(
                f"torch {torch.__version__} did not write the bytes of a tensor from its own memory (shape "
                f"{tuple(tensor.shape)}, {tensor.dtype}); this resilio does not know that way of torch.save"
            )
        around, self._around = bytes(self._around), None
        before = self._seen_at[0] - start
        if len(_frames) < _FRAMES:
            _frames[kind] = around[:before], around[before:]
        return self._seen_at[0]

    def _save(self, tensor: torch.Tensor) -> None:
        try:
            torch.save(tensor, self)  # type: ignore[arg-type]  # write and flush are all it uses
        except RuntimeError as error:
            # On its way out torch.save closes its zip, finds it cut short, and says that instead of what happened.
            if self._failure is not None:
                raise self._failure from None
            if error.__context__ is not None and not isinstance(error.__context__, Exception):
                raise error.__context__ from None  # a Ctrl-C
            raise


def row_major(tensor: torch.Tensor) -> torch.Tensor:
    """`tensor` on the CPU, as the bytes to be written: itself where it has a storage of its own and lies so."""
    tensor = tensor.detach().cpu()
    whole = tensor.untyped_storage().nbytes() == tensor.nbytes
    if not (tensor.is_contiguous() and whole) or tensor.is_conj() or tensor.is_neg():
        # torch.save writes whole storages: a view would drag its base along
        tensor = tensor.clone(memory_format=torch.contiguous_format).resolve_conj().resolve_neg()
    return tensor


def _address(view: memoryview) -> int:
    return int(np.frombuffer(view, dtype=np.uint8).__array_interface__["data"][0]) if len(view) else 0
