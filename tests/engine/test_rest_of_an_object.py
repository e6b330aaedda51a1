"""What lies in no piece has a digest of its own, so that verifying reads each byte once and hashes it once."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from resilio import CheckpointManager
from resilio.records import verify
from resilio.records.catalog import discover
from resilio.records.digests import BLOCK_SIZE, digest_of
from resilio.records.manifest import load_manifest
from resilio.records.verify import verify_checkpoint
from resilio.storage.local import LocalStorage


@pytest.mark.parametrize("in_small_parts", [False, True], ids=["at once", "in small parts"])
@pytest.mark.parametrize("digest", ["xxh3_128", "crc32", "sha256"])
def test_a_save_notes_it_and_damage_anywhere_is_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, digest: str, in_small_parts: bool
) -> None:
    """Twice the same tensor, a large value, and one that stays small: all ways that bytes take through the writer. And
    all ways that they are read: several units at a time, several times, by several threads."""
    if in_small_parts:
        monkeypatch.setattr(verify, "_LOCAL_UNIT", BLOCK_SIZE)
        monkeypatch.setattr(verify, "_LOCAL_RUN", 3)
    twin = torch.arange(70_000.0)
    state = {"mine": {"one": twin, "two": twin.clone(), "large": "x" * 600_000, "small": [1], "no": torch.empty(0)}}
    with CheckpointManager(tmp_path, state, mode="sync", digest=digest) as ckpt:
        ckpt.restore()
        ckpt.save(1)
    storage = LocalStorage(tmp_path)
    catalog = discover(storage)
    ref = catalog.commits[-1]
    manifest = load_manifest(storage, catalog.read(ref))
    key = next(key for key in manifest.objects if key.endswith(".distcp"))
    path = tmp_path / key
    clean = path.read_bytes()
    spans = sorted(
        (placed.piece.at, placed.piece.at + placed.piece.size_bytes)
        for tensor in manifest.tensors.values()
        for placed in tensor.pieces
        if placed.piece.size_bytes
    )
    assert len(spans) >= 2
    rest, at = b"", 0
    for start, end in spans:
        rest, at = rest + clean[at:start], end
    rest += clean[at:]
    assert len(rest) > 600_000
    # Whoever asks for sha256 means to be safe from more than accidents, which 64-bit block digests are not.
    assert manifest.objects[key].rest == (None if digest == "sha256" else digest_of(rest, digest))
    assert verify_checkpoint(storage, ref) == []
    for at in (0, 40, spans[0][0], spans[0][1] - 1, spans[0][1], spans[1][0] - 1, len(clean) // 2, len(clean) - 1):
        data = bytearray(clean)
        data[at] ^= 16
        path.write_bytes(data)
        damage = verify_checkpoint(storage, ref)
        within = any(start <= at < end for start, end in spans)
        assert [(one.where, "tensor" in one.facts) for one in damage] == [(key, within)], at
    for data in (clean[:-1], clean + b"\0", clean[spans[0][0] :] + clean[: spans[0][0]]):
        path.write_bytes(data)
        assert verify_checkpoint(storage, ref)[0].where == key
