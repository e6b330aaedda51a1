"""Reading a checkpoint's manifest: a chain of digests from the commit record down, and one checked view over all parts.

What is read here decides where bytes are read from and written to, so nothing is believed: sizes and digests along the
chain, names within the attempt's folder, indices and ranges in bounds, pieces that tile their tensor exactly.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from itertools import pairwise
from math import prod
from typing import Any

from ..errors import FormatError, IntegrityError, NewerFormatError, NotFoundError, ResilioError
from ..storage.base import Storage
from ..types import CheckpointRef
from . import keys, schema
from .digests import DIGEST_SIZE, block_count, check_digest, digester_for
from .fingerprints import Lanes, combine, from_text
from .problems import joined
from .tiling import tiling_problem

__all__ = ["ITEMSIZE", "LoadedManifest", "PlacedPiece", "SavedTensor", "load_manifest"]

# Bytes per element, by torch's name of the dtype without "torch.".
ITEMSIZE: dict[str, int] = {
    **dict.fromkeys(("bool", "uint8", "int8", "float8_e4m3fn", "float8_e4m3fnuz", "float8_e5m2", "float8_e5m2fnuz"), 1),
    **dict.fromkeys(("float8_e8m0fnu", "float4_e2m1fn_x2", "quint8", "qint8"), 1),
    **dict.fromkeys(("uint16", "int16", "float16", "bfloat16"), 2),
    **dict.fromkeys(("uint32", "int32", "float32", "complex32", "qint32"), 4),
    **dict.fromkeys(("uint64", "int64", "float64", "complex64"), 8),
    "complex128": 16,
}
_LIMIT = 1 << 30  # bytes of manifest.json or a part


@dataclass(frozen=True)
class PlacedPiece:
    """A piece and where it lies.

    Attributes:
        piece: as the manifest part says.
        rank: whose part it is.
        key: of the data object in the store.
        digests_key: of the object with its block digests.
        counted: whether it is known how many of its elements are no finite numbers.
    """

    piece: schema.Piece
    rank: int
    key: str
    digests_key: str
    counted: bool = False


@dataclass(frozen=True)
class SavedTensor:
    """A tensor over all parts: dtype, logical shape, memory order where not row-major, and its pieces by offsets."""

    dtype: str
    shape: tuple[int, ...]
    order: tuple[int, ...] | None
    pieces: tuple[PlacedPiece, ...]

    @property
    def size_bytes(self) -> int:
        """Raw bytes of the whole tensor."""
        return prod(self.shape) * ITEMSIZE[self.dtype]

    @property
    def non_finite(self) -> tuple[int, int] | None:
        """How many elements are NaN, and how many others infinite; None where they were not counted."""
        if not all(one.counted for one in self.pieces):
            return None
        return sum(one.piece.nan for one in self.pieces), sum(one.piece.inf for one in self.pieces)

    def fingerprint(self) -> Lanes | None:
        """Of the whole tensor, whatever its name; None where it was not computed when it was saved.

        Raises:
            FormatError: it is of a kind that this resilio does not know.
        """
        texts = [(one.piece.fingerprint, one.key) for one in self.pieces]
        if any(text is None for text, _ in texts):
            return None
        return combine(from_text(text, where) for text, where in texts if text is not None)


@dataclass(frozen=True)
class LoadedManifest:
    """A checkpoint's manifest, verified against its commit record. Pickles, so that rank 0 can hand it on.

    Attributes:
        commit: the commit record it was reached from.
        root: `manifest.json`.
        tensors: flat key -> tensor, over all ranks; tied keys are in `ties`.
        values: flat key -> tagged JSON (see `decode_value`).
        ties: flat key -> the flat key whose bytes it shares.
        tree: nested state as tagged JSON with `{"$ref": flat key}` leaves: what all ranks share, and each rank's own
            under `tree["rank"]["<r>"]`.
        objects: storage key -> record, of every object but the manifest's own.
    """

    commit: schema.CommitRecord
    root: schema.Manifest
    tensors: dict[str, SavedTensor]
    values: dict[str, Any]
    ties: dict[str, str]
    tree: Any
    objects: dict[str, schema.ObjectRecord]

    @property
    def step(self) -> int:
        """Optimizer steps completed."""
        return self.root.step

    @property
    def world(self) -> int:
        """Number of ranks that saved it."""
        return self.root.world

    @property
    def attempt(self) -> str:
        """Its folder."""
        return self.root.attempt

    def read_object(self, storage: Storage, key: str) -> bytes:
        """The whole of a small object of the checkpoint, checked against its record.

        Raises:
            IntegrityError: missing, or not the bytes that were saved.
        """
        record = self.objects.get(key)
        if record is None:
            raise IntegrityError(f"{storage.url}: the manifest does not name {key}, so it cannot be checked", where=key)
        return _read(storage, key, record.size_bytes, record.digest)

    def check_objects(self, storage: Storage) -> None:
        """Pass if every object is there at its size. One listing; no data is read.

        Raises:
            IntegrityError: some are missing or of another size; `problems` has all of them.
        """
        problems = _absent(storage, self.attempt, self.objects)
        if problems:
            raise joined(problems, f"{storage.url}: {self.attempt}")


def load_manifest(storage: Storage, commit: schema.CommitRecord) -> LoadedManifest:
    """The manifest of the checkpoint that `commit` makes.

    Ranks: any; local.

    Raises:
        IntegrityError: an object of the chain is missing, or its size or digest is not what its parent says. Attribute
            `where` is its key, `missing` is True where it is not there. If parts are damaged `problems` lists all of
            them, and which of the other parts' objects are missing or of another size.
        FormatError: a record cannot be understood or contradicts itself.
        NewerFormatError: written by a newer resilio.
    """
    root_key = keys.object_key(commit.attempt, keys.MANIFEST, keys.commit_key(_ref_of(commit)))
    data = _read(storage, root_key, commit.manifest_size_bytes, commit.manifest_digest)
    root = schema.decode(data, schema.Manifest, root_key)
    for what, found, expected in (
        ("folder", root.attempt, commit.attempt),
        ("step", root.step, commit.step),
        ("world", root.world, commit.world),
    ):
        if found != expected:
            raise FormatError(f"{root_key}: {what} {found!r}, but its commit record says {expected!r}", where=root_key)
    ranks = [part.rank for part in root.parts]
    if sorted(ranks) != list(range(root.world)):
        raise FormatError(f"{root_key}: not one part of each of {root.world} ranks", where=root_key)
    view = _View(root.attempt)
    for record in root.objects:
        view.add_object(record, root_key)
    problems: list[ResilioError] = []
    for ref in sorted(root.parts, key=lambda ref: ref.rank):
        if ref.name != keys.part_name(ref.rank):
            raise FormatError(f"{root_key}: the part of rank {ref.rank} is called {ref.name!r}", where=root_key)
        key = keys.object_key(root.attempt, ref.name, root_key)
        try:
            part = schema.decode(_read(storage, key, ref.size_bytes, ref.digest), schema.ManifestPart, key)
            if part.rank != ref.rank:
                raise FormatError(f"{key} says it is the part of rank {part.rank}", where=key)
            view.add_part(part, key)
        except NewerFormatError:
            raise
        except (IntegrityError, FormatError) as error:
            problems.append(error)
    if problems:
        problems += _absent(storage, root.attempt, view.objects)
        raise joined(problems, f"{storage.url}: {root.attempt}") from problems[0]
    return view.finish(commit, root, root_key)


class _View:
    """Collects the parts, checking each as it comes."""

    def __init__(self, attempt: str) -> None:
        self.attempt = attempt
        self.objects: dict[str, schema.ObjectRecord] = {}
        self.heads: dict[str, schema.TensorRecord] = {}
        self.pieces: dict[str, list[PlacedPiece]] = {}
        self.values: dict[str, Any] = {}
        self.tree: dict[str, Any] = {}

    def add_object(self, record: schema.ObjectRecord, where: str) -> str:
        key = keys.object_key(self.attempt, record.name, where)
        if key in self.objects:
            raise FormatError(f"{where}: object {record.name!r} is named twice", where=where)
        for digest in filter(None, (record.digest, record.rest)):
            digester_for(digest, where)
        self.objects[key] = record
        return key

    def add_part(self, part: schema.ManifestPart, where: str) -> None:
        names = [record.name for record in part.objects]
        pairs = list(zip(names[::2], names[1::2], strict=False))
        # Each data object is followed by its digests object.
        if len(names) % 2 or any(not keys.parse_data_name(a) or keys.digests_name(a) != b for a, b in pairs):
            raise FormatError(f"{where}: objects are not data objects, each followed by its digests", where=where)
        object_keys = [self.add_object(record, where) for record in part.objects]
        ranges: dict[int, list[tuple[int, int, str]]] = {}
        for key, tensor in part.tensors.items():
            self._add_head(key, tensor, where)
            for piece in tensor.pieces:
                _check_piece(piece, tensor, part.objects, f"{where}: tensor {key!r}")
                ranges.setdefault(piece.object, []).append((piece.at, piece.at + piece.size_bytes, key))
                where_from = object_keys[piece.object], object_keys[piece.object + 1]
                self.pieces[key].append(PlacedPiece(piece, part.rank, *where_from, counted=part.counted))
        for spans in ranges.values():
            for (_, end, one), (start, _, other) in pairwise(sorted(span for span in spans if span[0] < span[1])):
                if start < end:
                    raise FormatError(f"{where}: the bytes of {one!r} and {other!r} overlap", where=where)
        for key, value in part.values.items():
            if self.values.setdefault(key, value) != value or key in self.heads:
                raise FormatError(f"{where}: {key!r} is there twice, and not the same", where=where)
        self._add_tree(part, where)

    def _add_head(self, key: str, tensor: schema.TensorRecord, where: str) -> None:
        if tensor.dtype not in ITEMSIZE:
            raise FormatError(
                f"{where}: tensor {key!r} has the unknown dtype {tensor.dtype!r}", where=where, newer=True
            )
        if tensor.order is not None and sorted(tensor.order) != list(range(len(tensor.shape))):
            raise FormatError(f"{where}: tensor {key!r} has the impossible order {tensor.order}", where=where)
        head = self.heads.setdefault(key, tensor)
        self.pieces.setdefault(key, [])
        if head.order is None and tensor.order is not None:
            # A thin shard lies the same in several orders, so ranks may tell none or different ones: the first that is
            # told counts. It says how to lay out memory, never where bytes are.
            head = self.heads[key] = tensor
        if (head.dtype, head.shape) != (tensor.dtype, tensor.shape) or key in self.values:
            raise FormatError(f"{where}: {key!r} is something else in another part of the manifest", where=where)

    def _add_tree(self, part: schema.ManifestPart, where: str) -> None:
        if part.tree is None:
            return
        own = part.tree.get("rank", {}) if isinstance(part.tree, dict) else None
        shared = part.tree.keys() - {"rank"} if isinstance(part.tree, dict) else ()
        if not isinstance(own, dict) or not own.keys() <= {str(part.rank)} or (shared and part.rank != 0):
            raise FormatError(f"{where}: its tree holds other state than rank {part.rank}'s", where=where)
        if part.rank == 0:
            self.tree.update(part.tree)
        if own:
            self.tree["rank"] = {**self.tree.get("rank", {}), **own}

    def finish(self, commit: schema.CommitRecord, root: schema.Manifest, where: str) -> LoadedManifest:
        tensors: dict[str, SavedTensor] = {}
        for key, head in self.heads.items():
            pieces = sorted(self.pieces[key], key=lambda placed: placed.piece.offsets)
            problem = tiling_problem(head.shape, [placed.piece for placed in pieces])
            if problem:
                raise FormatError(f"{where}: the pieces of tensor {key!r} {problem}", where=where)
            order = tuple(head.order) if head.order is not None else None
            tensors[key] = SavedTensor(head.dtype, tuple(head.shape), order, tuple(pieces))
        for key, twin in root.ties.items():
            if twin not in tensors or key in tensors or key in self.values:
                raise FormatError(f"{where}: {key!r} is tied to {twin!r}, which cannot be", where=where)
        return LoadedManifest(commit, root, tensors, self.values, dict(root.ties), self.tree, self.objects)


def _check_piece(
    piece: schema.Piece, tensor: schema.TensorRecord, objects: list[schema.ObjectRecord], where: str
) -> None:
    dims = len(tensor.shape)
    if piece.object >= len(objects) or piece.object % 2:
        problem = f"object {piece.object} is no data object of this part"
    elif len(piece.offsets) != dims or len(piece.sizes) != dims:
        problem = f"offsets {piece.offsets} and sizes {piece.sizes} do not have {dims} dims"
    elif any(o + n > length for o, n, length in zip(piece.offsets, piece.sizes, tensor.shape, strict=True)):
        problem = f"a piece at {piece.offsets} of sizes {piece.sizes} leaves the shape {tensor.shape}"
    elif prod(piece.sizes) * ITEMSIZE[tensor.dtype] != piece.size_bytes:
        problem = f"{piece.size_bytes} bytes are not {piece.sizes} of {tensor.dtype}"
    elif piece.at + piece.size_bytes > objects[piece.object].size_bytes:
        problem = f"bytes {piece.at} to {piece.at + piece.size_bytes} leave the object"
    elif DIGEST_SIZE * (piece.block + block_count(piece.size_bytes)) > objects[piece.object + 1].size_bytes:
        problem = f"block digests from {piece.block} on leave their object"
    else:
        return
    raise FormatError(f"{where}: {problem}", where=where)


def _absent(storage: Storage, attempt: str, objects: Mapping[str, schema.ObjectRecord]) -> list[ResilioError]:
    """Of each of `objects` that is not there at its size, what is wrong. One listing."""
    found = {info.key: info.size_bytes for info in storage.list(f"{attempt}/")}
    problems: list[ResilioError] = []
    for key, record in objects.items():
        if key not in found:
            problems.append(IntegrityError(f"{storage.url}: {key} is missing", where=key, missing=True))
        elif found[key] != record.size_bytes:
            told = f"{storage.url}: {key} has {found[key]} bytes, saved were {record.size_bytes}"
            problems.append(IntegrityError(told, where=key))
    return problems


def _read(storage: Storage, key: str, size_bytes: int, digest: str) -> bytes:
    if size_bytes > _LIMIT:
        raise FormatError(f"{key}: {size_bytes} bytes are too many for one object of the manifest", where=key)
    try:
        found = storage.stat(key).size_bytes  # before anything is allocated or read
        if found != size_bytes:
            raise IntegrityError(f"{storage.url}: {key} has {found} bytes, saved were {size_bytes}", where=key)
        data = bytearray(size_bytes)
        storage.read_into(key, [(0, memoryview(data))])
    except NotFoundError as error:
        raise IntegrityError(f"{storage.url}: {key} is missing", where=key, missing=True) from error
    check_digest(data, digest, key)
    return bytes(data)


def _ref_of(commit: schema.CommitRecord) -> CheckpointRef:
    return CheckpointRef(commit.generation, commit.step)
