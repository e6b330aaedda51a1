"""A small good run and a small good folder of plain DCP, and the tools to change them as an attacker would: each change
is sealed again with the digests and checks that the readers will look for."""

from __future__ import annotations

import json
import os
import pickle
import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch import nn

from resilio import CheckpointManager
from resilio.records import schema
from resilio.records.digests import digest_of

__all__ = ["PlainDcp", "Run", "fingerprint", "live_state", "make_plain", "make_run"]


def live_state(fill: float = 0.0) -> dict[str, Any]:
    """What is saved and restored: a model whose tensors are all `fill`, and a value."""
    model = nn.Linear(4, 3)
    with torch.no_grad():
        for value in model.parameters():
            value.fill_(fill)
    return {"model": model, "n": {"x": int(fill)}}


def make_run(folder: Path) -> None:
    """Steps 1 and 2, the second pinned and leased."""
    from resilio.clock import SystemClock
    from resilio.records.holds import lease

    state = live_state(1.0)
    with CheckpointManager(str(folder), state, mode="sync") as ckpt:
        ckpt.restore()
        for step in (1, 2):
            state["n"]["x"] = step
            with torch.no_grad():
                for value in state["model"].parameters():
                    value.fill_(float(step))
            ckpt.save(step)
        ref = ckpt.checkpoints()[-1].ref
        ckpt.pin(2, because="a paper")
    from resilio.hooks import open_storage

    lease(open_storage(str(folder)), ref, SystemClock(), owner="somebody")


def make_plain(folder: Path) -> None:
    """What `dcp.save` writes of the same state."""
    state = live_state(2.0)
    dcp.save({"model": state["model"].state_dict(), "n": state["n"]}, checkpoint_id=str(folder))


def put(path: Path, data: bytes) -> None:
    """Replace a file by a new one, so that a copy made of hard links stays as it was."""
    path.unlink(missing_ok=True)
    path.write_bytes(data)


@dataclass
class Run:
    """A copy of the good run; `step 2` is the one that is changed."""

    root: Path

    def only(self, pattern: str) -> Path:
        """The one file that fits."""
        (found,) = self.root.glob(pattern)
        return found

    @property
    def commit(self) -> Path:
        return self.only("commits/000000002-*.json")

    @property
    def generation(self) -> Path:
        return self.only("generations/*.json")

    @property
    def pin(self) -> Path:
        return self.only("pins/*.json")

    @property
    def lease(self) -> Path:
        return self.only("leases/*.json")

    @property
    def run(self) -> Path:
        return self.root / "resilio.json"

    @property
    def folder(self) -> Path:
        return self.only("step-000000002-*")

    def quarantine(self, of: int = 2, **fields: Any) -> Path:
        """The record of a new quarantine of step `of`, with these fields."""
        from resilio.hooks import open_storage
        from resilio.records.quarantine import quarantine
        from resilio.types import CheckpointRef

        quarantine(open_storage(str(self.root)), CheckpointRef(1, of), "x")
        path = self.only(f"quarantine/{of:09d}-*.json")
        self.sealed(path, lambda record: record.update(fields))
        return path

    def file(self, name: str) -> Path:
        """A file of step 2's folder."""
        return self.folder / name

    def sealed(self, path: Path, change: Callable[[dict[str, Any]], Any]) -> None:
        """Change a record that ends with a check, and seal it."""
        record = json.loads(path.read_bytes())
        del record["check"]
        change(record)
        put(path, schema.seal(json.dumps(record).encode()))

    def sealed_text(self, path: Path, change: Callable[[bytes], bytes]) -> None:
        """The same on its bytes."""
        body = path.read_bytes()
        put(path, schema.seal(change(body[: body.rindex(b',"check"')] + b"}")))

    def part(self, change: Callable[[dict[str, Any]], Any]) -> None:
        """Change rank 0's part of the manifest, with right digests up to the commit record."""
        part = json.loads(self.file("manifest-0.json").read_bytes())
        change(part)
        self.part_bytes(json.dumps(part).encode())

    def part_bytes(self, data: bytes) -> None:
        """Its bytes, whatever they are."""
        put(self.file("manifest-0.json"), data)
        sealed = {"size_bytes": len(data), "digest": digest_of(data)}
        self.manifest(lambda root: root["parts"][0].update(sealed))

    def manifest(self, change: Callable[[dict[str, Any]], Any]) -> None:
        """Change the root of the manifest, with the right digest in the commit record."""
        root = json.loads(self.file("manifest.json").read_bytes())
        change(root)
        self.manifest_bytes(json.dumps(root).encode())

    def manifest_bytes(self, data: bytes) -> None:
        """Its bytes, whatever they are."""
        put(self.file("manifest.json"), data)
        sealed = {"manifest_size_bytes": len(data), "manifest_digest": digest_of(data)}
        self.sealed(self.commit, lambda record: record.update(sealed))

    def tensor(self, change: Callable[[dict[str, Any]], Any]) -> None:
        """Change the record of `model.weight`."""
        self.part(lambda part: change(part["tensors"]["model.weight"]))

    def piece(self, **fields: Any) -> None:
        """Change the one piece of `model.weight`."""
        self.tensor(lambda tensor: tensor["pieces"][0].update(fields))

    def value(self, value: Any) -> None:
        """Put something else in the place of the value `n.x`."""
        self.part(lambda part: part["values"].update({"n.x": value}))

    def object(self, name: str, data: bytes) -> None:
        """Replace a data object or its digests, with the right size and digest in the manifest part."""
        put(self.file(name), data)

        def change(part: dict[str, Any]) -> None:
            for record in part["objects"]:
                if record["name"] == name:
                    record.update(size_bytes=len(data), digest=digest_of(data))

        self.part(change)


@dataclass
class PlainDcp:
    """A copy of the good folder of plain DCP."""

    root: Path

    @property
    def metadata(self) -> Path:
        return self.root / ".metadata"

    @property
    def data(self) -> Path:
        return self.root / "__0_0.distcp"

    def change(self, change: Callable[[Any], Any]) -> None:
        """Change the unpickled metadata."""
        metadata = pickle.loads(self.metadata.read_bytes())
        put(self.metadata, pickle.dumps(change(metadata) or metadata))

    def point(self, key: str, data: bytes, length: int | None = None) -> None:
        """Let `key` be stored as `data`, at the end of the data object."""
        old = self.data.read_bytes()
        put(self.data, old + data)

        def change(metadata: Any) -> None:
            for index, place in metadata.storage_data.items():
                if index.fqn == key:
                    place.offset, place.length = len(old), len(data) if length is None else length

        self.change(change)


def fingerprint(root: Path) -> dict[str, str]:
    """Everything below a folder but leases: path -> kind, and for plain files size, time and digest."""
    return {path: what for path, what in _walk(root) if not path.startswith("leases/")}


def _walk(root: Path) -> Iterator[tuple[str, str]]:
    for base, folders, files in os.walk(root):
        for name in [*folders, *files]:
            path = Path(base, name)
            found = path.lstat()
            what = oct(found.st_mode)
            if path.is_symlink():
                what += str(path.readlink())
            elif path.is_file():
                what += f" {found.st_size} {found.st_mtime_ns}"
                if found.st_size < 1 << 24:  # of the huge sparse ones size and time must do
                    what += digest_of(path.read_bytes())
            elif path.is_dir():
                what = "folder"
            yield path.relative_to(root).as_posix(), what


def copy(good: Path, to: Path) -> Path:
    """A copy that can be changed."""
    shutil.copytree(good, to)
    return to
