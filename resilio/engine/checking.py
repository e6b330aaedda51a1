"""Whether what was read is what was saved, tensor by tensor, at whatever world: by fingerprints.

Digests prove that the bytes on storage are those that were written. This proves that the right ones of them came to the
right place of the right tensor.
"""

from __future__ import annotations

from collections.abc import Mapping
from math import prod

import torch

from ..errors import IntegrityError, ResilioError, RestoreError
from ..ranks import Ranks, portable, raise_first
from ..records.fingerprints import Lanes, combine
from ..records.manifest import LoadedManifest
from ..records.problems import joined
from ..state.fingerprint import fp1
from ..state.flat_shard import FlatShard
from . import dcp
from .structure import local_tensor

__all__ = ["Own", "compare", "evidence", "own_pieces"]

Own = tuple[tuple[int, ...], int, Lanes]  # of a piece: its offsets, number of elements, fingerprint


def evidence(manifest: LoadedManifest) -> dict[str, Lanes]:
    """Flat key -> the fingerprint that was taken at save. Ties have that of their twin.

    Raises:
        RestoreError: it was not taken: there is nothing to check by, which is no pass.
    """
    found: dict[str, Lanes] = {}
    for key, tensor in manifest.tensors.items():
        lanes = tensor.fingerprint()
        if lanes is None:
            raise RestoreError(
                f"the checkpoint of step {manifest.step} has no fingerprint of {key!r}, so there is nothing for "
                "check_fingerprints=True to compare with: it was saved with fingerprints=False, or before there "
                "were any",
                tensor=key,
            )
        found[key] = lanes
    return found | {key: found[twin] for key, twin in manifest.ties.items()}


def own_pieces(key: str, tensor: torch.Tensor) -> list[Own]:
    """The pieces of a tensor that this rank has. Local."""
    if isinstance(tensor, FlatShard):
        boxes = [(box.offsets, box.tensor) for box in tensor.boxes()]
    else:
        chunks = [item.tensor_data.chunk for item in dcp.write_items(key, tensor) if item.tensor_data is not None]
        boxes = [(tuple(chunk.offsets), local_tensor(tensor)) for chunk in chunks]
    return [(offsets, part.numel(), fp1(part, offsets)) for offsets, part in boxes if part.numel()]


def compare(
    tensors: Mapping[str, torch.Tensor], expected: Mapping[str, Lanes], manifest: LoadedManifest, ranks: Ranks
) -> None:
    """Pass if all ranks' parts of `tensors` together are what was saved.

    Args:
        tensors: flat key -> tensor as it was read; lies on ranks as it will live.
        expected: what `evidence` found.
        manifest: of the checkpoint.
        ranks: who takes part.

    Raises:
        IntegrityError: tensors are not what was saved, or not the same on two ranks; `problems` names each. On all
            ranks.
        RestoreError: the ranks' parts do not make up the whole, so nothing can be said.

    Ranks: all; collective.
    """
    error: ResilioError | None = None
    mine: dict[str, list[Own]] = {}
    try:
        mine = {key: own_pieces(key, tensor) for key, tensor in tensors.items()}
    except Exception as caught:  # noqa: BLE001  told to all ranks
        error = portable(caught, RestoreError)
    told = ranks.gather((error, mine), "comparing fingerprints")
    raise_first([one[0] for one in told], "comparing fingerprints")
    # From here on all ranks know the same, and come to the same end.
    problems: list[ResilioError] = []
    for key in sorted({key for _, pieces in told for key in pieces}):
        seen: dict[tuple[int, ...], tuple[int, int, Lanes]] = {}
        for rank, (_, pieces) in enumerate(told):
            for offsets, count, lanes in pieces.get(key, ()):
                first, *others = seen.setdefault(offsets, (rank, count, lanes))
                if others != [count, lanes]:
                    # By digests both have read what was saved: a fault of a host sooner than of the checkpoint.
                    raise IntegrityError(
                        f"{key!r} was read as one thing by rank {first} and as another by rank {rank}",
                        where=key,
                        tensor=key,
                        ranks_differ=True,
                    )
        shape = manifest.tensors[manifest.ties.get(key, key)].shape
        have = sum(count for _, count, _ in seen.values())
        if have != prod(shape):
            raise RestoreError(
                f"the fingerprint of {key!r} cannot be checked: the ranks have {have} of its {prod(shape)} elements",
                tensor=key,
            )
        found = combine(lanes for _, _, lanes in seen.values())
        if found != expected[key]:
            like = sorted(name for name, lanes in expected.items() if lanes == found and any(found))
            holds = f"; it holds the values of {like[0]!r}" if like else ""
            problem = IntegrityError(
                f"{key!r} of step {manifest.step} is not what was saved: its fingerprint differs{holds}",
                where=key,
                tensor=key,
                **({"values_of": like[0]} if like else {}),
            )
            problems.append(problem)
    if problems:
        raise joined(problems, f"step {manifest.step}")
