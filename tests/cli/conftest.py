"""A run written by hand through the records functions: valid, small, and without torch."""

from __future__ import annotations

import os
import sys
import textwrap
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from resilio.cli.extra import plugin_host
from resilio.hooks import host, open_storage
from resilio.records import digests, keys, schema
from resilio.storage.base import Storage
from resilio.types import CheckpointRef

TIME_S = 1_700_000_000.0


@dataclass
class Run:
    """A run below a folder, and what a test does to it."""

    folder: Path
    storage: Storage = field(init=False)
    parent: schema.ParentRef | None = None
    generation: int = 1
    ancestors: list[schema.ParentRef] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.storage = open_storage(self.url)

    @property
    def url(self) -> str:
        return f"file://{self.folder}"

    def begin(self, generation: int = 1, *ancestors: tuple[int, int]) -> None:
        """A generation that goes on from the last of `ancestors`, pairs of generation and step."""
        refs = [schema.ParentRef(generation=g, step=s) for g, s in ancestors]
        if generation == 1:
            self._put(keys.RUN, schema.RunRecord(format=1, run_id="run-1"))
        record = schema.GenerationRecord(
            format=1,
            generation=generation,
            nonce=f"nonce-{generation}",
            parent=refs[-1] if refs else None,
            ancestors=refs,
            time_s=TIME_S,
        )
        self._put(keys.generation_key(generation), record)
        self.generation = generation

    def commit(
        self,
        step: int,
        metrics: dict[str, float | str] | None = None,
        n_bytes: int = 200_000,
        about: dict[str, Any] | None = None,
        non_finite: int | None = None,
        inf: int = 0,
    ) -> str:
        """A checkpoint of one rank and two tensors; returns the name of its folder.

        `non_finite` values are NaN in the optimizer's state; `inf` are infinite in the model's, which nothing trains.
        """
        attempt = keys.attempt_name(step, self.generation, "7f3a")
        raw = bytes(i * 7 % 251 for i in range(n_bytes)) + step.to_bytes(8, "little")
        blocks = bytearray()
        first = digests.append_block_digests(blocks, raw[:n_bytes])
        digests.append_block_digests(blocks, raw[n_bytes:])
        data = keys.data_name(0, 0)

        def put(name: str, content: bytes) -> schema.ObjectRecord:
            self.storage.put(keys.attempt_key(attempt, name), content)
            return schema.ObjectRecord(name=name, size_bytes=len(content), digest=digests.digest_of(content))

        objects = [put(data, raw), put(keys.digests_name(data), bytes(blocks))]
        piece = schema.Piece(offsets=[0], sizes=[n_bytes], object=0, at=0, size_bytes=n_bytes, block=0, inf=inf)
        small = schema.Piece(offsets=[], sizes=[], object=0, at=n_bytes, size_bytes=8, block=first, nan=non_finite or 0)
        part = schema.ManifestPart(
            format=1,
            rank=0,
            objects=objects,
            tensors={
                "model.weight": schema.TensorRecord(dtype="uint8", shape=[n_bytes], pieces=[piece]),
                "optimizer.state.weight.step": schema.TensorRecord(dtype="int64", shape=[], pieces=[small]),
            },
            values={"step": step, "optimizer.param_groups.0.lr": 0.001, "scheduler.note": "\x1b[31mred"},
            tree={},
            counted=non_finite is not None,
        )
        part_object = put(keys.part_name(0), schema.encode(part))
        manifest = schema.Manifest(
            format=1,
            step=step,
            attempt=attempt,
            world=1,
            digest="xxh3_128",
            parts=[
                schema.PartRef(
                    rank=0, name=part_object.name, size_bytes=part_object.size_bytes, digest=part_object.digest
                )
            ],
            objects=[put(keys.METADATA, b"stock DCP metadata")],
        )
        root = put(keys.MANIFEST, schema.encode(manifest))
        record = schema.CommitRecord(
            format=1,
            step=step,
            generation=self.generation,
            attempt=attempt,
            manifest_size_bytes=root.size_bytes,
            manifest_digest=root.digest,
            nonce=f"nonce-{self.generation}",
            time_s=TIME_S + step,
            world=1,
            size_bytes=len(raw),
            metrics=metrics or {},
            reasons=["every 100 steps"],
            about=about or {},
            versions={"torch": "2.13.0", "resilio": "0.1.0"},
            non_finite=non_finite,
        )
        self._put(keys.commit_key(CheckpointRef(self.generation, step)), record)
        return attempt

    def _put(self, key: str, record: schema.RunRecord | schema.GenerationRecord | schema.CommitRecord) -> None:
        self.storage.put(key, schema.encode(record), if_absent=True)


@pytest.fixture
def run(tmp_path: Path) -> Run:
    """An empty run."""
    return Run(tmp_path / "run")


@pytest.fixture
def branched(run: Run) -> Run:
    """Generation 1 saved 100, 200, 300; generation 2 went on from 200: 1/300 is off the lineage."""
    run.begin(1)
    for step in (100, 200, 300):
        run.commit(step, {"loss": 1.0 / step})
    run.begin(2, (1, 100), (1, 200))
    run.commit(300, {"loss": "nan"})
    run.commit(400)
    return run


@pytest.fixture
def resilio(capfd: pytest.CaptureFixture[str]) -> Callable[..., tuple[int, str, str]]:
    """Run the command in this process: exit code, stdout, stderr."""
    from resilio.cli import main

    def call(*args: str) -> tuple[int, str, str]:
        with pytest.raises(SystemExit) as ended:
            main(list(args))
        out, err = capfd.readouterr()
        code = ended.value.code
        assert isinstance(code, int)
        return code, out, err

    return call


class Installed:
    """A folder on the path of this process and its children, to which distributions are installed."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def module(self, name: str, source: str) -> None:
        (self.folder / f"{name}.py").write_text(textwrap.dedent(source))

    def add(self, name: str, source: str) -> None:
        self.module(f"{name}_module", source)
        info = self.folder / f"{name}_dist-1.2.dist-info"
        info.mkdir()
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}-dist\nVersion: 1.2\n")
        (info / "entry_points.txt").write_text(f"[resilio]\n{name} = {name}_module\n")
        _forget()


@pytest.fixture
def installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Installed]:
    folder = tmp_path / "installed"
    folder.mkdir()
    monkeypatch.syspath_prepend(folder)
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(folder), os.environ.get("PYTHONPATH", "")]))
    _forget()
    yield Installed(folder)
    _forget()
    for name in [name for name, one in sys.modules.items() if str(folder) in str(getattr(one, "__file__", ""))]:
        del sys.modules[name]


def _forget() -> None:
    host.cache_clear()
    plugin_host.cache_clear()
