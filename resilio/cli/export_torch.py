"""Exporting by `torch.save`: the nested state as it was, whole in memory."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from ..records.tensors import Held, Reads
from ..records.values import decode_value
from .landing import landing

__all__ = ["export_torch"]

_GONE = object()


@dataclass(frozen=True)
class _Ref:
    key: str


def export_torch(
    target: Path,
    reader: Reads,
    names: Mapping[str, str],
    *,
    flat: bool,
    force: bool,
    progress: Callable[[int, int], None],
) -> list[str]:
    """Write one file. All of what is written is in memory at once.

    Args:
        target: the file.
        reader: of the checkpoint.
        names: flat key -> the name to write it by, which counts where the state is `flat`.
        flat: one dict by name, instead of the nested state.
        force: replace a file that is there.
        progress: called with bytes done and bytes in all.
    """
    import torch

    manifest = reader.manifest
    keys = {manifest.ties.get(name, name) for name in names} & manifest.tensors.keys()
    total = sum(manifest.tensors[key].size_bytes for key in keys)
    tensors: dict[str, Any] = {}
    done = 0
    with landing(target, folder=False, force=force, ours=lambda name: False) as part:  # before anything is read
        for key in sorted(keys):
            saved = manifest.tensors[key]
            raw = torch.empty(saved.size_bytes, dtype=torch.uint8)
            view, at = raw.numpy(), 0
            for slab in reader.stream(key):
                piece = np.frombuffer(slab, np.uint8)
                view[at : at + len(piece)] = piece
                at += len(piece)
                done += len(piece)
                progress(done, total)
            tensors[key] = raw.view(getattr(torch, saved.dtype)).reshape(saved.shape)

        def leaf(key: str) -> Any:
            if key not in names:
                return _GONE
            if key in manifest.values:
                return decode_value(manifest.values[key], key)
            return tensors[manifest.ties.get(key, key)]

        state = {new: leaf(key) for key, new in names.items()} if flat else _nested(manifest, leaf)
        torch.save(state, part)
    return [target.name]


def _nested(manifest: Held, leaf: Callable[[str], Any]) -> Any:
    def walk(node: Any) -> Any:
        if isinstance(node, _Ref):
            return leaf(node.key)
        if isinstance(node, dict):
            below = {key: walk(child) for key, child in node.items()}
            kept = {key: child for key, child in below.items() if child is not _GONE}
            return kept if kept or not below else _GONE
        if isinstance(node, list):
            items = [walk(child) for child in node]
            left = [child for child in items if child is not _GONE]
            return left if left or not items else _GONE
        return node

    state = walk(decode_value(manifest.tree, "tree", _Ref))
    return {} if state is _GONE else state
