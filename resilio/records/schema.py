"""The records of a run as they lie on storage. docs/format.md describes each field for people.

Field names and meanings are for ever: later releases add fields, with defaults, and change none. Decoding checks types
and bounds, ignores fields it does not know, and refuses a `format` newer than `FORMAT`. Records that no other one has a
digest of (`Sealed`) end with a check of their own bytes, and nothing in them is believed before that.
"""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, TypeVar

import msgspec
import xxhash

from ..errors import ConfigError, FormatError, NewerFormatError

__all__ = [
    "FORMAT",
    "LEASE_LIMIT_S",
    "TEXT_LIMIT",
    "CommitRecord",
    "Finding",
    "GenerationRecord",
    "LeaseRecord",
    "Manifest",
    "ManifestPart",
    "ObjectRecord",
    "ParentRef",
    "PartRef",
    "Piece",
    "PinRecord",
    "QuarantineRecord",
    "RunRecord",
    "Sealed",
    "TensorRecord",
    "decode",
    "encode",
    "seal",
]

FORMAT = 1
LEASE_LIMIT_S = 2_678_400  # 31 days: no lease is longer, so that a damaged one cannot hold for ever
TEXT_LIMIT = 4096  # characters

Step = Annotated[int, msgspec.Meta(ge=0, le=999_999_999)]
Generation = Annotated[int, msgspec.Meta(ge=1, le=999_999)]
Size = Annotated[int, msgspec.Meta(ge=0, le=2**63 - 1)]
Name = Annotated[str, msgspec.Meta(min_length=1, max_length=1024)]
Digest = Annotated[str, msgspec.Meta(pattern=r"^[a-z0-9_]{1,20}:[0-9a-f]{1,128}$")]  # "xxh3_128:9f86…"
Text = Annotated[str, msgspec.Meta(max_length=TEXT_LIMIT)]
Whole = Annotated[int, msgspec.Meta(ge=-(2**63), le=2**63 - 1)]
Dims = Annotated[list[Size], msgspec.Meta(max_length=64)]


class Sealed(msgspec.Struct, kw_only=True):
    """A record that nothing else has a digest of: it ends with the field `check`, see `seal`.

    Attributes:
        way_out: what to do where the bytes are not those that were written.
        limit_bytes: none is larger; what is, was never one, and is not read.
    """

    way_out: ClassVar[str]
    limit_bytes: ClassVar[int] = 1 << 20


class RunRecord(Sealed, kw_only=True):
    """`resilio.json`: this is a run."""

    way_out = "Bring it back from a backup; or delete it, and the next save writes a new one."

    format: int
    run_id: Name


class ParentRef(msgspec.Struct, kw_only=True, frozen=True):
    """A checkpoint of the lineage, as a generation record names it."""

    generation: Generation
    step: Step


class GenerationRecord(Sealed, kw_only=True):
    """`generations/000007.json`: one life of a manager that writes.

    `ancestors` are the checkpoints of the lineage up to and including the parent that still had a commit when the
    generation was made, so one record is enough to know the whole lineage.
    """

    way_out = "Bring it back from a backup, or copy the checkpoint you want out of its folder with plain DCP."
    limit_bytes = 64 << 20  # an ancestor takes up to 42 bytes, and a run that keeps all of its checkpoints may be long

    format: int
    generation: Generation
    nonce: Name
    parent: ParentRef | None = None
    ancestors: list[ParentRef] = []
    host: str = ""
    pid: int = 0
    time_s: float = 0.0


class CommitRecord(Sealed, kw_only=True):
    """`commits/<step>-g<generation>.json`: what makes an attempt a checkpoint."""

    way_out = "Bring it back from a backup, or restore another checkpoint."

    format: int
    step: Step
    generation: Generation
    attempt: Name
    manifest_size_bytes: Size
    manifest_digest: Digest
    nonce: Name
    time_s: float
    world: Annotated[int, msgspec.Meta(ge=1, le=10_000_000)]
    size_bytes: Size = 0
    metrics: dict[str, float | str] = {}  # non-finite ones as "nan", "inf", "-inf": JSON has no such numbers
    reasons: list[str] = []
    versions: dict[str, str] = {}
    about: dict[Name, dict[Text, Text | Whole | float | bool | None]] = {}  # plugin -> what it said of this save
    non_finite: Size | None = None  # values that make it unhealthy; None where they were not counted


class PinRecord(Sealed, kw_only=True):
    """`pins/<step>-g<generation>-<hex>.json`: a person's reason to keep a checkpoint, and a copy of its commit record.

    `commit` is the text of the commit record, byte for byte: it stands in for the record where a sweep had deleted
    that before it saw the pin.
    """

    way_out = "Bring it back from a backup, or delete it: until then it holds its checkpoint."
    limit_bytes = 4 << 20  # as text within text a commit record may have twice its length

    format: int
    step: Step
    generation: Generation
    because: str
    commit: str
    host: str = ""
    pid: int = 0
    time_s: float = 0.0


class LeaseRecord(Sealed, kw_only=True):
    """`leases/<step>-g<generation>-<hex>.json`: a reader's reason to keep a checkpoint, for `ttl_s` seconds.

    They count from the moment the store says the object was written; `time_s` is the reader's clock, which counts only
    where the store does not tell.
    """

    way_out = "Delete it once nobody reads its checkpoint: until then it holds that."

    format: int
    step: Step
    generation: Generation
    ttl_s: Annotated[float, msgspec.Meta(ge=0, le=LEASE_LIMIT_S)]
    owner: str = ""
    host: str = ""
    pid: int = 0
    time_s: float = 0.0


class Finding(msgspec.Struct, kw_only=True):
    """One problem of a checkpoint: which object or tensor, and what is wrong with it."""

    where: Text
    what: Text


class QuarantineRecord(Sealed, kw_only=True):
    """`quarantine/<step>-g<generation>-<hex>.json`: a finding that a checkpoint must not be resumed from.

    `problems` are the first of what was found, `more` is how many there are besides.
    """

    way_out = "Delete it, or run `resilio release`, once its checkpoint is known to be good: until then it counts."

    format: int
    step: Step
    generation: Generation
    because: Text
    found_by: Text = ""  # person, restore, verify, drill
    attempt: Text = ""  # the folder that was looked at, where known
    problems: list[Finding] = []
    more: Size = 0
    host: str = ""
    pid: int = 0
    time_s: float = 0.0
    version: str = ""  # of resilio


class ObjectRecord(msgspec.Struct, kw_only=True):
    """An object of the attempt's folder.

    Attributes:
        name: within the folder.
        size_bytes: its length.
        digest: over the whole.
        rest: over what lies in no piece, in its order: with the block digests this too covers each byte. None where it
            was not computed, or where block digests are not as good as `digest`.
    """

    name: Name
    size_bytes: Size
    digest: Digest
    rest: Digest | None = None


class PartRef(msgspec.Struct, kw_only=True):
    """A per-rank part of the manifest."""

    rank: Annotated[int, msgspec.Meta(ge=0, le=10_000_000)]
    name: Name
    size_bytes: Size
    digest: Digest


class Manifest(msgspec.Struct, kw_only=True):
    """`manifest.json`: the root. Its digest is in the commit record; it holds those of the parts and root objects."""

    format: int
    step: Step
    attempt: Name
    world: Annotated[int, msgspec.Meta(ge=1, le=10_000_000)]
    digest: str  # algorithm of the whole-object digests: xxh3_128, crc32 or sha256
    parts: list[PartRef]
    objects: list[ObjectRecord]  # of the root: .metadata
    ties: dict[str, str] = {}  # flat key -> the flat key whose bytes it shares


class Piece(msgspec.Struct, kw_only=True, omit_defaults=True):
    """The part of a tensor that one rank saved, as row-major raw bytes inside an object.

    There are hundreds of thousands of them: what has its default is left out.

    Attributes:
        offsets: position of the first element in the tensor, per dim.
        sizes: elements per dim.
        object: index into the part's `objects`.
        at: offset of the raw bytes in that object.
        size_bytes: number of raw bytes.
        block: index of the first block digest in the object's digests file.
        fingerprint: of these elements, see `resilio.records.fingerprints`; None where it was not computed.
        nan: how many of these elements are NaN, if the part says that it has `counted` them.
        inf: how many others are infinite.
    """

    offsets: Dims
    sizes: Dims
    object: Size
    at: Size
    size_bytes: Size
    block: Size
    fingerprint: Digest | None = None
    nan: Size = 0
    inf: Size = 0


class TensorRecord(msgspec.Struct, kw_only=True):
    """A tensor and the pieces of it that this part holds.

    Attributes:
        dtype: torch's name without ``torch.``, e.g. ``bfloat16``.
        shape: of the whole logical tensor.
        order: the dims from slowest to fastest in the live tensor's memory, where that is not row-major; `[0, 2, 3, 1]`
            is channels_last. Bytes on storage are always row-major.
        pieces: what this rank saved of it.
    """

    dtype: Annotated[str, msgspec.Meta(pattern=r"^[a-z][a-z0-9_]{1,30}$")]
    shape: Dims
    pieces: list[Piece]
    order: Dims | None = None


class ManifestPart(msgspec.Struct, kw_only=True):
    """`manifest-<rank>.json`: what one rank saved.

    Attributes:
        objects: this rank's data objects, each followed by its digests object.
        tensors: by flat key.
        values: by flat key, as tagged JSON (`resilio.records.values`).
        tree: how flat keys make up nested state: dicts and lists as tagged JSON whose leaves are `{"$ref": flat key}`.
            Rank 0's holds the state all ranks share; another rank's only its own (`rank.<r>`).
        counted: whether its pieces say how many of their elements are no finite numbers.
    """

    format: int
    rank: Annotated[int, msgspec.Meta(ge=0, le=10_000_000)]
    objects: list[ObjectRecord]
    tensors: dict[str, TensorRecord]
    values: dict[str, Any]
    tree: Any = None
    counted: bool = False


_T = TypeVar("_T", bound=msgspec.Struct)
_CHECK_SIZE = 44  # bytes of ,"check":"<32 hex digits>"}
_SIZE_LIMIT = 1 << 30  # a record is JSON in memory several times its size; 1 GiB is no honest record
_PARTS_LIMIT = 1 << 25  # lists, objects and what is in them: each takes up to a hundred bytes of memory, and 3 of JSON


def encode(record: msgspec.Struct) -> bytes:
    """`record` as JSON bytes, sealed if it is to be. Dicts keep their order: the order of saved values comes back.

    Raises:
        ConfigError: it is larger than `limit_bytes`, or than `decode` takes.
    """
    data = msgspec.json.encode(record)
    if not isinstance(record, Sealed):
        problem = _too_much(data)
        if problem:
            raise ConfigError(f"a {type(record).__name__} of {problem} could not be read again: hold it as arrays")
        return data
    data = seal(data)
    if len(data) > record.limit_bytes:
        raise ConfigError(
            f"a {type(record).__name__} of {len(data)} bytes could not be read again, {record.limit_bytes} are the "
            "most: its metrics, reasons, versions or texts are too many or too long"
        )
    return data


def _too_much(data: bytes) -> str | None:
    """What there is too much of, in words. Known before any of it is made."""
    if len(data) > _SIZE_LIMIT:
        return f"{len(data)} bytes"
    parts = sum(map(data.count, (b",", b"[", b"{"))) if len(data) > _PARTS_LIMIT else 0
    return f"{parts} parts" if parts > _PARTS_LIMIT else None


def seal(data: bytes) -> bytes:
    """`data`, a JSON object, with a last field `check`: the xxh3_128 of all bytes before the comma that precedes it."""
    return data[:-1] + _check(data[:-1])


def _check(body: bytes) -> bytes:
    return b',"check":"%s"}' % xxhash.xxh3_128_hexdigest(body).encode()


def decode(data: bytes, kind: type[_T], where: str) -> _T:
    """The record in `data`.

    Args:
        data: JSON bytes from storage.
        kind: which record it must be.
        where: its URL or key, for the error.

    Raises:
        NewerFormatError: written by a newer resilio.
        FormatError: not such a record, or not the bytes that were written.
    """
    problem = _too_much(data)
    if problem:
        raise FormatError(f"{where}: {problem} are too many for a {kind.__name__}", where=where)
    if issubclass(kind, Sealed) and data[-_CHECK_SIZE:] != _check(data[:-_CHECK_SIZE]):
        # Before anything else: a hit in a field's name makes it its default, one in the format a newer resilio's.
        raise FormatError(
            f"{where} is not a readable {kind.__name__}: the check at its end is missing or is not that of its bytes, "
            f"so it was damaged, cut short or edited. {kind.way_out}",
            where=where,
        )
    try:
        head = msgspec.json.decode(data, type=_Head)
        if head.format > FORMAT:
            raise NewerFormatError(
                f"{where} has format {head.format}; this resilio reads up to {FORMAT}. Upgrade resilio-ckpt.",
                where=where,
                found=head.format,
            )
        return msgspec.json.decode(data, type=kind)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise FormatError(f"{where} is not a readable {kind.__name__}: {error}", where=where) from error


class _Head(msgspec.Struct):
    format: Annotated[int, msgspec.Meta(ge=1)]
