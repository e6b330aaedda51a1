"""A look at what was found damaged, once more: a read may fail for once, and a mount be gone for a moment."""

from __future__ import annotations

from collections.abc import Sequence

from ..errors import FormatError, IntegrityError, NewerFormatError, NotFoundError
from ..storage.base import Storage
from ..types import Damage
from . import keys, schema
from .digests import BLOCK_SIZE, DIGEST_SIZE, bad_blocks
from .manifest import LoadedManifest, load_manifest
from .problems import problems_of

__all__ = ["still_there"]


def still_there(storage: Storage, commit: schema.CommitRecord, problems: Sequence[Damage]) -> list[Damage]:
    """Those of `problems` that are seen from here as well, now; what only a restore can see, such as a value or a
    fingerprint, is among them.

    Of a piece, one block that is damaged is proof enough, and the others are not read.

    Ranks: any; local.

    Raises:
        StorageError: the store could not be looked at.
        NewerFormatError: a newer resilio wrote it.
    """
    try:
        manifest = load_manifest(storage, commit)
    except NewerFormatError:
        raise
    except (IntegrityError, FormatError) as error:
        return problems_of(error)
    return [one for one in problems if _is_there(storage, manifest, one)]


def _is_there(storage: Storage, manifest: LoadedManifest, one: Damage) -> bool:
    if one.where not in manifest.objects:
        # What leads to the objects was just read, and is whole.
        return not (one.facts.get("missing") or keys.split_attempt_key(one.where))
    try:
        if "blocks" in one.facts:
            return _is_bad(storage, manifest, one)
        if not keys.parse_data_name(one.where.rpartition("/")[2]):
            manifest.read_object(storage, one.where)
            return False
        return storage.stat(one.where).size_bytes != manifest.objects[one.where].size_bytes
    except (IntegrityError, NotFoundError):
        return True


def _is_bad(storage: Storage, manifest: LoadedManifest, one: Damage) -> bool:
    """Whether a block of them differs from its digest."""
    tensor = manifest.tensors[one.facts["tensor"]]
    (placed,) = (p for p in tensor.pieces if (p.key, p.piece.at) == (one.where, one.facts["at"]) and p.piece.size_bytes)
    digests = manifest.read_object(storage, placed.digests_key)
    for block in one.facts["blocks"]:
        start = block * BLOCK_SIZE
        data = bytearray(min(BLOCK_SIZE, placed.piece.size_bytes - start))
        storage.read_into(placed.key, [(placed.piece.at + start, memoryview(data))])
        at = DIGEST_SIZE * (placed.piece.block + block)
        if bad_blocks(memoryview(data), digests[at : at + DIGEST_SIZE]):
            return True
    return False
