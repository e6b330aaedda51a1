"""Is every byte of a checkpoint what was saved? Without torch, and without stopping at the first finding."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from ..errors import FormatError, IntegrityError, NoCheckpointError, NotFoundError
from ..storage.base import Storage
from ..types import CheckpointRef, Damage
from . import keys
from .commits import find_commit
from .digests import BLOCK_SIZE, DIGEST_SIZE, block_count, digester_for, verify_blocks
from .manifest import LoadedManifest, PlacedPiece, load_manifest

__all__ = ["verify_checkpoint"]

_CHUNK = 128 * BLOCK_SIZE  # bytes in memory at a time

Progress = Callable[[int, int], None]


def verify_checkpoint(storage: Storage, ref: CheckpointRef, progress: Progress | None = None) -> list[Damage]:
    """Read all of a checkpoint and compare it with its digests.

    Each object's size and digest over the whole, and each 64 KiB block of each piece: a flipped bit is named by object,
    and by tensor where it lies in one. A damaged manifest is reported alone, since it is what the rest is judged by.

    Ranks: any; local.

    Args:
        storage: the run's.
        ref: which checkpoint.
        progress: called with bytes done and bytes in all, from time to time.

    Returns:
        What is damaged; empty if all is well.

    Raises:
        NoCheckpointError: there is no commit record of `ref`, nor a pin that stands in for it.
        StorageError: the store failed: nothing is known.
    """
    where = keys.commit_key(ref)
    try:
        commit = find_commit(storage, ref)
        where = keys.attempt_key(commit.attempt, keys.MANIFEST)
        manifest = load_manifest(storage, commit)
    except NotFoundError as error:
        raise NoCheckpointError(f"{storage.url}: there is no checkpoint of {ref}", ref=ref) from error
    except (IntegrityError, FormatError) as error:
        # Errors of the chain name a key within the attempt, and perhaps the tensor behind it.
        named = str(getattr(error, "where", "")).partition(":")[0]
        return [Damage(named if keys.split_attempt_key(named) else where, str(error))]
    return list(_Verifier(storage, manifest, progress or (lambda done, total: None)).run())


class _Verifier:
    def __init__(self, storage: Storage, manifest: LoadedManifest, progress: Progress) -> None:
        self.storage = storage
        self.manifest = manifest
        self.progress = progress
        self.done = 0
        self.total = sum(record.size_bytes for record in manifest.objects.values())
        self.buffer = memoryview(bytearray(_CHUNK))

    def run(self) -> Iterator[Damage]:
        prefix = keys.attempt_key(self.manifest.attempt, "")
        sizes = {info.key: info.size_bytes for info in self.storage.list(prefix)}
        pieces: dict[str, list[tuple[str, PlacedPiece]]] = {}
        for name, tensor in self.manifest.tensors.items():
            for piece in tensor.pieces:
                pieces.setdefault(piece.key, []).append((name, piece))
        digests: dict[str, bytes] = {}  # only those that are whole themselves
        # Digests objects first: the data is judged by them.
        for key in sorted(self.manifest.objects, key=lambda key: (not key.endswith(".digests"), key)):
            expected = self.manifest.objects[key].size_bytes
            if key not in sizes:
                yield Damage(key, "is missing")
            elif sizes[key] != expected:
                yield Damage(key, f"has {sizes[key]} bytes, saved were {expected}")
            elif key.endswith(".digests"):
                try:
                    digests[key] = self.manifest.read_object(self.storage, key)
                except IntegrityError as error:
                    yield Damage(key, str(error))
                self._advance(expected)
            else:
                yield from self._data(key, pieces.get(key, []), digests)

    def _data(self, key: str, pieces: list[tuple[str, PlacedPiece]], digests: dict[str, bytes]) -> Iterator[Damage]:
        record = self.manifest.objects[key]
        digester = digester_for(record.digest, key)
        bad: dict[tuple[str, int], list[int]] = {}  # (tensor, where its piece begins) -> blocks
        position = 0
        try:
            for name, placed in sorted(pieces, key=lambda one: (one[1].piece.at, one[1].piece.size_bytes)):
                piece, known = placed.piece, digests.get(placed.digests_key)
                for _, chunk in self._chunks(key, position, piece.at):
                    digester.update(chunk)
                for start, chunk in self._chunks(key, piece.at, piece.at + piece.size_bytes):
                    digester.update(chunk)
                    if known is not None:
                        block = (start - piece.at) // BLOCK_SIZE
                        found = _bad_blocks(chunk, known, piece.block + block)
                        if found:
                            bad.setdefault((name, piece.at), []).extend(block + i for i in found)
                position = piece.at + piece.size_bytes
            for _, chunk in self._chunks(key, position, record.size_bytes):
                digester.update(chunk)
        except (IntegrityError, NotFoundError) as error:
            yield Damage(key, f"changed while it was read: {error}")
            return
        for (name, at), blocks in bad.items():
            some = ", ".join(map(str, blocks[:8])) + (", …" if len(blocks) > 8 else "")
            what = f"tensor {name!r}: {len(blocks)} of its 64 KiB blocks here differ from what was saved ({some})"
            yield Damage(key, what, {"tensor": name, "at": at, "blocks": blocks})
        if digester.text() == record.digest:
            return
        if not bad:
            what = f"its digest is {digester.text()}, saved was {record.digest}"
            unknown = any(placed.digests_key not in digests for _, placed in pieces)
            yield Damage(key, what + ("" if unknown else "; the difference lies outside of all tensors"))

    def _chunks(self, key: str, start: int, end: int) -> Iterator[tuple[int, memoryview]]:
        """Bytes `start` … `end`, in chunks that begin on block borders counted from `start`."""
        for at in range(start, end, _CHUNK):
            chunk = self.buffer[: min(_CHUNK, end - at)]
            self.storage.read_into(key, [(at, chunk)])
            yield at, chunk
            self._advance(len(chunk))

    def _advance(self, size_bytes: int) -> None:
        self.done += size_bytes
        self.progress(self.done, self.total)


def _bad_blocks(chunk: memoryview, digests: bytes, first: int) -> list[int]:
    """Which blocks of `chunk`, counted from its start, do not have their digest; `first` is the first one's index."""
    expected = memoryview(digests)[DIGEST_SIZE * first : DIGEST_SIZE * (first + block_count(len(chunk)))]
    try:
        verify_blocks(chunk, expected, "")  # the whole chunk at once: damage is rare
    except IntegrityError:
        pass
    else:
        return []
    bad = []
    for i in range(block_count(len(chunk))):
        try:
            verify_blocks(chunk[i * BLOCK_SIZE : (i + 1) * BLOCK_SIZE], expected[i * DIGEST_SIZE :][:DIGEST_SIZE], "")
        except IntegrityError:
            bad.append(i)
    return bad
