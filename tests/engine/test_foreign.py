"""Folders that plain `dcp.save` wrote: restored bit for bit at any world, and nothing in them is ever run."""

from __future__ import annotations

import argparse
import datetime
import decimal
import io
import logging
import os
import pickle
import re
import uuid
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, Metadata, MetadataIndex
from torch.distributed.checkpoint.state_dict import get_model_state_dict, get_optimizer_state_dict
from workload import assert_same, build, rng, snapshot

import resilio
from resilio import CheckpointManager, safe_types
from resilio.engine.foreign_metadata import read_foreign_metadata
from resilio.errors import (
    ConfigError,
    FormatError,
    IntegrityError,
    MismatchError,
    NoCheckpointError,
    ResilioError,
    RestoreError,
)
from resilio.testing.worlds import run_world


def trained(job: Any) -> dict[str, Any]:
    return {key: value for key, value in snapshot(job).items() if key not in ("scheduler", "loader")}


def save(rank: int, world: int, folder: str, how: str) -> dict[str, Any]:
    """What a user of plain DCP does."""
    job = build("fsdp2" if world > 1 else "single", rank, world)
    for _ in range(3):
        job.train_step()
    state = {
        "model": get_model_state_dict(job.model),
        "optimizer": get_optimizer_state_dict(job.model, job.optimizer),
        "step": 3,
    }
    if how == "async":
        dcp.async_save(state, checkpoint_id=folder).result()
    else:
        dcp.save(state, checkpoint_id=folder)
    return trained(job)


def restore(rank: int, world: int, folder: str) -> dict[str, Any]:
    job = build("fsdp2" if world > 1 else "single", rank, world, seed=9)
    before = rng()
    report = resilio.restore(folder, {"model": job.model, "optimizer": job.optimizer})
    assert_same(rng(), before, "rng")
    return {"state": trained(job), "step": report.step, "how": {o.component: (o.how, o.note) for o in report.outcomes}}


@pytest.mark.parametrize(("saved", "how", "worlds"), [(1, "sync", (1, 2)), (2, "sync", (1, 2, 3)), (2, "async", (1,))])
def test_a_plain_checkpoint_comes_back_bit_for_bit_at_any_world(tmp_path, saved, how, worlds):
    folder = str(tmp_path / "plain")
    wrote = run_world(save, saved, folder, how, init=saved > 1)[0]
    for world in worlds:
        for got in run_world(restore, world, folder, init=world > 1):
            assert_same(got["state"], wrote)
            assert got["step"] == 3
            assert got["how"]["model"][0] == got["how"]["optimizer"][0] == "exact"
            assert got["how"]["rng"] == ("stayed live", "not in the checkpoint")


# ---------------------------------------------------------------------------------------------------- a small one


class Small(nn.Module):
    def __init__(self, seed: int = 0) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.a, self.b = nn.Linear(4, 6), nn.Linear(6, 2, bias=False)
        self.register_buffer("seen", torch.tensor(seed))


def write(folder: Path, model: nn.Module | None = None, **more: Any) -> Path:
    dcp.save({"model": (model or Small()).state_dict(), **more}, checkpoint_id=str(folder))
    return folder


def read(folder: Path, **options: Any) -> nn.Module:
    """A model restored from `folder`; if that fails, it must be as it was."""
    model = Small(9)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    try:
        resilio.restore(folder, {"model": model}, **options)
    except ResilioError:
        assert_same(dict(model.state_dict()), before, "after a failure")
        raise
    return model


def rewrite(folder: Path, change: Callable[[Metadata], Any]) -> None:
    path = folder / ".metadata"
    metadata = pickle.loads(path.read_bytes())
    path.write_bytes(pickle.dumps(change(metadata) or metadata))


class Runs:
    """Pickles as a call of `os.system`."""

    def __init__(self, marker: Path) -> None:
        self.marker = marker

    def __reduce__(self) -> Any:
        return os.system, (f"touch {self.marker}",)


@pytest.fixture
def marker(tmp_path) -> Path:
    """A file that a payload makes when it is run; that it would is shown first."""
    control = tmp_path / "control"
    pickle.loads(pickle.dumps(Runs(control)))
    assert control.exists()
    return tmp_path / "was-run"


def test_the_report_and_a_warning_say_what_it_is(tmp_path, caplog):
    folder = write(tmp_path / "plain", step=7)
    with caplog.at_level(logging.WARNING, "resilio"):
        report = resilio.restore(folder, {"model": Small(9)})
    assert report.found is not None
    assert (report.found.attempt, report.found.ref.generation, report.step) == ("", 0, 7)
    assert report.found.size_bytes == sum(path.stat().st_size for path in folder.glob("*.distcp"))
    assert report.read_bytes > sum(value.nbytes for value in Small().state_dict().values())
    assert [record.levelname for record in caplog.records if "no digests" in record.message] == ["WARNING"]


def test_a_bare_model_fits_by_rename(tmp_path):
    dcp.save(Small().state_dict(), checkpoint_id=str(tmp_path))
    with pytest.raises(MismatchError):
        read(tmp_path)
    assert_same(dict(read(tmp_path, rename={"": "model."}).state_dict()), dict(Small().state_dict()))


def test_an_optimizer_without_state_and_values_of_all_plain_kinds_come_back(tmp_path):
    model = Small()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.125)
    extra = {"list": [1, [2, "x"]], "deep": [{"a": torch.arange(3)}, {"b": (1, None, True, 0.5)}], "none": None}
    state = {"model": model.state_dict(), "optimizer": get_optimizer_state_dict(model, optimizer), "extra": extra}
    dcp.save(state, checkpoint_id=str(tmp_path))
    live = Small(9)
    into = torch.optim.SGD(live.parameters(), lr=1.0)
    found: dict[str, Any] = {}
    resilio.restore(tmp_path, {"model": live, "optimizer": into, "extra": found})
    assert into.param_groups[0]["lr"] == 0.125
    assert_same(found, extra)


def test_memory_order_of_a_piece_does_not_matter(tmp_path):
    wrote = nn.Conv2d(3, 4, 3).to(memory_format=torch.channels_last)
    dcp.save({"model": wrote.state_dict()}, checkpoint_id=str(tmp_path))
    for layout in (torch.channels_last, torch.contiguous_format):
        live = nn.Conv2d(3, 4, 3).to(memory_format=layout)
        resilio.restore(tmp_path, {"model": live})
        assert live.weight.equal(wrote.weight)
        assert live.weight.is_contiguous(memory_format=layout)


def test_only_the_newest_can_be_asked_for_and_a_manager_starts_a_run_of_its_own(tmp_path):
    write(tmp_path)
    with pytest.raises(NoCheckpointError, match="without steps"):
        read(tmp_path, which=3)
    with CheckpointManager(str(tmp_path), {"model": Small()}) as ckpt:
        assert ckpt.restore().found is None
        ckpt.save(1)
    assert resilio.restore(tmp_path, {"model": Small(9)}).found.attempt  # a run now: the bare checkpoint is passed over


def test_a_folder_with_neither_is_no_checkpoint(tmp_path):
    with pytest.raises(NoCheckpointError):
        read(tmp_path)


# ------------------------------------------------------------------------------------------------- nothing is run


@pytest.mark.parametrize("protocol", [2, 4, 5])
@pytest.mark.parametrize("place", ["whole", "planner_data", "storage_meta", "in a dict"])
def test_a_payload_in_metadata_is_refused_by_name_and_not_run(tmp_path, marker, place, protocol):
    write(tmp_path / "plain")

    def plant(metadata: Metadata) -> Any:
        if place == "whole":
            return Runs(marker)
        if place == "in a dict":
            metadata.state_dict_metadata["extra"] = Runs(marker)
        else:
            setattr(metadata, place, Runs(marker))
        return metadata

    path = tmp_path / "plain" / ".metadata"
    path.write_bytes(pickle.dumps(plant(pickle.loads(path.read_bytes())), protocol=protocol))
    with pytest.raises(FormatError, match=r"system"):
        read(tmp_path / "plain")
    assert not marker.exists()


TOWER = b"".join(b"h" + bytes([level]) + b"\x86\x94" for level in range(24))


@pytest.mark.parametrize(
    ("code", "problem"),
    [
        (b"\x80\x02cbuiltins\neval\n.", "builtins.eval"),
        (b"\x80\x02ctorch\nload\n.", "torch.load"),
        (b"\x80\x02ctorch.serialization\nload\n.", "torch.serialization.load"),
        (b"\x80\x02(S'true'\nios\nsystem\n.", "STRING"),  # INST: makes an object without naming it as a global
        (b"\x80\x02ctorch\nSize\n}\x8c\x08__dict__}sb.", "given a state"),  # BUILD on what stands for a class
        (b"\x80\x02ctorch\nSize\n)R}b}b.", "a state twice"),
        (b"\x80\x02ctorch\nfloat32\n)R.", "what is called"),
        (b"\x80\x02\x82\x01.", "EXT1"),
        (b"\x80\x02\x8c\x01xQ.", "BINPERSID"),
        # A tuple of twice a tuple of twice …: of a few more, hashing would never end, nor would printing.
        (b"\x80\x04})\x94" + TOWER + b"Ns.", "key of a dict is a tuple"),
        (b"\x80\x04ctorch.distributed.checkpoint.metadata\nMetadata\n)\x94" + TOWER + b"\x85R.", "arguments"),
        (b"\x80\x04}(h\x00K\x01u.", "damaged"),
        (b"\x80\x04})K\x01s.", "key of a dict is a tuple"),
        (b"\x80\x04]K\x01r\xff\xff\xff\xffa.", "no Metadata"),  # a memo of four thousand million places
        (b"\x80\x04\x96\xff\xff\xff\xff\xff\xff\xff\x0f.", "damaged"),  # an exbyte of bytearray
        (b"\x80\x04\x8d\xff\xff\xff\xff\xff\xff\xff\x0f.", "damaged"),
        (b"\x80\x04N.", "no Metadata"),
    ],
    ids=lambda value: repr(value)[:40],
)
def test_what_metadata_does_not_need_is_refused(code, problem):
    with pytest.raises(FormatError, match=problem):
        read_foreign_metadata(code, "here")


def test_a_payload_in_a_value_is_refused_by_name_and_not_run(tmp_path, marker):
    write(tmp_path / "plain", extra={"x": Runs(marker), "fine": 1})
    with pytest.raises(RestoreError, match=r"'extra.x'.*system.*exclude"):
        read(tmp_path / "plain", strict=False)
    assert not marker.exists()
    model = read(tmp_path / "plain", exclude=["extra"])
    assert_same(dict(model.state_dict()), dict(Small().state_dict()))
    assert_same(dict(read(tmp_path / "plain", only="model").state_dict()), dict(Small().state_dict()))
    assert not marker.exists()


def test_a_payload_where_a_tensor_should_be_is_refused_and_not_run(tmp_path, marker):
    write(tmp_path / "plain", extra=Runs(marker), other=[1, 2])

    def point(metadata: Metadata, name: str, key: str) -> None:
        index = next(index for index in metadata.storage_data if index.fqn == key)
        metadata.storage_data[index] = metadata.storage_data[MetadataIndex(name)]

    rewrite(tmp_path / "plain", lambda metadata: point(metadata, "extra", "model.seen"))
    with pytest.raises(RestoreError, match=r"'model.seen'.*system"):
        read(tmp_path / "plain", only=["model"])
    assert not marker.exists()
    rewrite(tmp_path / "plain", lambda metadata: point(metadata, "other", "model.seen"))
    with pytest.raises(IntegrityError, match=r"'model.seen'.*list, no plain tensor"):
        read(tmp_path / "plain", only=["model"])
    rewrite(tmp_path / "plain", lambda m: m.storage_data.update({MetadataIndex("model.seen", []): _of(m, "a.bias")}))
    with pytest.raises(IntegrityError, match=r"'model.seen'.*float32 \[6\], not torch.int64 \[\]"):
        read(tmp_path / "plain", only=["model"])


def _of(metadata: Metadata, name: str) -> Any:
    return next(place for index, place in metadata.storage_data.items() if index.fqn == f"model.{name}")


def test_own_checkpoints_are_restored_without_unpickling_anything(tmp_path, marker):
    model = Small()
    with CheckpointManager(str(tmp_path / "run"), {"model": model}) as ckpt:
        ckpt.restore()
        ckpt.save(1)
    payload = pickle.dumps(Runs(marker))
    folder = next((tmp_path / "run").glob("step-*"))
    stray, own = tmp_path / "run" / ".metadata", folder / ".metadata"
    stray.write_bytes(payload)  # beside the run's own records: not looked at
    live = Small(9)
    assert resilio.restore(tmp_path / "run", {"model": live}).step == 1
    assert_same(dict(live.state_dict()), dict(model.state_dict()))
    saved = own.read_bytes()
    assert len(payload) < len(saved)
    own.unlink()
    own.write_bytes(payload + bytes(len(saved) - len(payload)))  # of the right size: compared by digest, never decoded
    with pytest.raises(IntegrityError, match=r"\.metadata is damaged"):
        resilio.restore(tmp_path / "run", {"model": live})
    with CheckpointManager(str(tmp_path / "run"), {"model": Small(9)}) as ckpt, pytest.raises(IntegrityError):
        ckpt.restore()
    assert not marker.exists()


# --------------------------------------------------------------------------------------- metadata that is not right


def entry(metadata: Metadata) -> Any:
    return metadata.state_dict_metadata["model.a.weight"]


def place(metadata: Metadata) -> Any:
    return metadata.storage_data[MetadataIndex("model.a.weight", [0, 0])]


def put(what: Callable[[Metadata], Any], name: str, value: Any) -> Callable[[Metadata], None]:
    return lambda metadata: object.__setattr__(what(metadata), name, value)


def whole(metadata: Metadata) -> Any:
    return metadata


def chunk(*boxes: tuple[list[int], list[int]]) -> Callable[[Metadata], None]:
    return put(entry, "chunks", [ChunkStorageMetadata(torch.Size(o), torch.Size(s)) for o, s in boxes])


FORGED: dict[str, tuple[Callable[[Metadata], Any], str]] = {
    "unknown field": (put(whole, "__class__x", 1), "unknown field"),
    "no entries": (put(whole, "state_dict_metadata", None), "state_dict_metadata"),
    "no storage": (put(whole, "storage_data", None), "storage_data"),
    "version": (put(whole, "version", 1), "version"),
    "a key that is no text": (lambda m: m.state_dict_metadata.update({3: entry(m)}), "key of a dict"),
    "a key without end": (lambda m: m.state_dict_metadata.update({"k" * 5000: entry(m)}), "5000 characters"),
    "an entry of another class": (lambda m: m.state_dict_metadata.update(x=m.storage_meta), "StorageMeta"),
    "an entry that is not stored": (lambda m: m.state_dict_metadata.update(x=entry(m)), "lacks 'x'"),
    "negative size": (put(entry, "size", torch.Size([-6, 4])), "out of bounds"),
    "absurd size": (put(entry, "size", torch.Size([1 << 40, 1 << 40])), "out of bounds"),
    "size no Size": (put(entry, "size", (6, 4)), "is a tuple"),
    "absurd but tiled": (
        lambda m: (put(entry, "size", torch.Size([1 << 50, 4]))(m), chunk(([0, 0], [1 << 50, 4]))(m)),
        "needs",
    ),
    "too many dims": (put(entry, "size", torch.Size([1] * 65)), "65 dims"),
    "a chunk outside": (chunk(([1, 0], [6, 4])), "leaves its shape"),
    "a chunk of other dims": (chunk(([0], [6])), "leaves its shape"),
    "a hole": (chunk(([0, 0], [5, 4])), "out"),
    "an overlap": (chunk(([0, 0], [6, 4]), ([1, 0], [5, 4])), "overlap"),
    "no chunks": (put(entry, "chunks", []), "not there"),
    "chunks no list": (put(entry, "chunks", 5), "chunks"),
    "dtype a text": (lambda m: put(lambda m: entry(m).properties, "dtype", "float32")(m), "dtype"),
    "sparse": (put(lambda m: entry(m).properties, "layout", torch.sparse_coo), "strided"),
    "grad no bool": (put(lambda m: entry(m).properties, "requires_grad", 1), "requires_grad"),
    "up and out": (put(place, "relative_path", "../x"), "inside the folder"),
    "out in the middle": (put(place, "relative_path", "a/../../x"), "inside the folder"),
    "absolute": (put(place, "relative_path", "/etc/passwd"), "inside the folder"),
    "path no text": (put(place, "relative_path", Path("x")), "file"),
    "negative offset": (put(place, "offset", -1), "out of bounds"),
    "offset a bool": (put(place, "offset", True), "bool"),
    "a length too short": (put(place, "length", 1), "needs 96 bytes"),
    "place no place": (lambda m: m.storage_data.update({MetadataIndex("model.a.weight", [0, 0]): "x"}), "place"),
    "index of another class": (lambda m: m.storage_data.update({"x": place(m)}), "a key of storage_data"),
    "compressed": (put(place, "transform_descriptors", ["stream.zstd"]), "stream.zstd"),
    "path no tuple": (lambda m: m.planner_data.update({"model.a.weight": ["model", "a.weight"]}), "path"),
    "path elsewhere": (lambda m: m.planner_data.update({"model.a.weight": ("model", "b.weight")}), "elsewhere"),
    "path of an object": (lambda m: m.planner_data.update({"model.a.weight": ("model", None)}), "path"),
    "path too deep": (lambda m: m.planner_data.update({"model.a.weight": ("a",) * 65}), "65 parts"),
    "path of a negative place": (lambda m: m.planner_data.update({"model.a.weight": ("model", -1)}), "path"),
    "planner data": (put(whole, "planner_data", [1]), "planner_data"),
}


@pytest.mark.parametrize("what", FORGED)
def test_metadata_with_a_wrong_field_is_refused(tmp_path, what):
    change, problem = FORGED[what]
    write(tmp_path)
    read(tmp_path)
    rewrite(tmp_path, lambda metadata: (change(metadata), None)[1])
    with pytest.raises(FormatError, match=problem):
        read(tmp_path)


@pytest.mark.parametrize(
    ("keys", "problem"),
    [
        ([("l", 10**9)], "list"),
        ([("l", 0), ("l", "x")], "names and places"),
        ([("l",), ("l", "x")], "no container|is none"),
        ([("l", "x"), ("l",)], "no container|is none"),
    ],
    ids=str,
)
def test_paths_that_make_no_tree_are_refused(tmp_path, keys, problem):
    write(tmp_path)

    def change(metadata: Metadata) -> None:
        for path in keys:
            name = ".".join(map(str, path))
            metadata.state_dict_metadata[name] = entry(metadata)
            metadata.storage_data[MetadataIndex(name, [0, 0])] = place(metadata)
            metadata.planner_data[name] = path

    rewrite(tmp_path, change)
    with pytest.raises(FormatError, match=problem):
        read(tmp_path)


def test_metadata_that_is_cut_or_changed_anywhere_is_read_or_refused_and_nothing_else(tmp_path):
    data = (write(tmp_path) / ".metadata").read_bytes()
    for end in range(len(data)):
        with pytest.raises(FormatError):
            read_foreign_metadata(data[:end], "here")
    refused = 0
    for place in range(len(data)):
        for change in (0x01, 0x80, 0xFF):
            damaged = bytearray(data)
            damaged[place] ^= change
            try:
                assert isinstance(read_foreign_metadata(bytes(damaged), "here"), Metadata)
            except FormatError:
                refused += 1
    assert refused > len(data)


def test_an_absurdly_large_metadata_is_refused_before_it_is_read(tmp_path):
    write(tmp_path)
    with (tmp_path / ".metadata").open("r+b") as file:
        file.truncate(1 << 40)  # sparse
    with pytest.raises(FormatError, match="too many"):
        read(tmp_path)


def test_objects_that_are_missing_short_or_damaged_are_named(tmp_path):
    write(tmp_path)
    data = next(tmp_path.glob("*.distcp"))
    good = data.read_bytes()
    data.write_bytes(good[:-10])
    with pytest.raises(IntegrityError, match=data.name):
        read(tmp_path)
    data.write_bytes(bytes(len(good)))
    with pytest.raises(IntegrityError, match=rf"'model.*{data.name}"):
        read(tmp_path)
    data.unlink()
    with pytest.raises(IntegrityError, match="missing"):
        read(tmp_path)
    rewrite_length = put(place, "length", 1 << 60)
    data.write_bytes(good)
    rewrite(tmp_path, rewrite_length)
    with pytest.raises(IntegrityError, match="should end at"):
        read(tmp_path)


def test_an_item_that_would_swell_is_refused(tmp_path):
    write(tmp_path, extra=1)
    plain, packed = io.BytesIO(), io.BytesIO()
    torch.save(0, plain)
    with zipfile.ZipFile(plain) as source, zipfile.ZipFile(packed, "w", zipfile.ZIP_DEFLATED) as target:
        for name in source.namelist():
            target.writestr(name, source.read(name) + bytes(100_000))
    (tmp_path / "packed").write_bytes(packed.getvalue())
    info = _StorageInfo("packed", 0, len(packed.getvalue()))
    rewrite(tmp_path, lambda metadata: metadata.storage_data.update({MetadataIndex("extra"): info}))
    with pytest.raises(IntegrityError, match=r"'extra'.*compressed"):
        read(tmp_path, strict=False)


class Where:
    """Somebody's own type."""

    def __init__(self, place: str) -> None:
        self.place = place

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Where) and other.place == self.place


def test_a_type_that_the_user_calls_safe_is_taken_and_no_other_with_it(tmp_path, marker, monkeypatch):
    monkeypatch.setattr(safe_types, "_by_name", dict(safe_types._by_name))
    monkeypatch.setattr(safe_types, "_by_type", dict(safe_types._by_type))
    write(tmp_path, extra={"where": Where("x/y"), "fine": 1})
    with pytest.raises(RestoreError, match=r"'extra.where'.*Where.*exclude=.*safe_types\.register.*trust=True"):
        resilio.restore(tmp_path, {"model": Small(9), "extra": {}})
    write(tmp_path / "other", extra={"where": Runs(marker)})
    before = torch.serialization.get_safe_globals()
    for how in ("torch", "resilio"):
        found: dict[str, Any] = {}
        with torch.serialization.safe_globals([Where] if how == "torch" else []):
            if how == "resilio":
                safe_types.register(Where, encode=lambda one: one.place, decode=Where)
            resilio.restore(tmp_path, {"model": Small(9), "extra": found})
            assert found == {"where": Where("x/y"), "fine": 1}
            with pytest.raises(RestoreError, match=r"'extra.where'.*system"):
                resilio.restore(tmp_path / "other", {"model": Small(9), "extra": {}})
        assert {*torch.serialization.get_safe_globals()} == {*before}
    assert not marker.exists()


def test_types_that_are_there_from_the_start_are_taken(tmp_path):
    zone = datetime.timezone(datetime.timedelta(hours=2), "x")
    extra = {
        "path": Path("x/y"),
        "when": datetime.datetime(2026, 11, 30, 1, 2, 3, 4, tzinfo=zone),
        "day": [datetime.date(2026, 11, 30), datetime.timedelta(days=3)],
        "price": decimal.Decimal("0.10"),
        "id": uuid.UUID(int=7, is_safe=uuid.SafeUUID.safe),
        "args": argparse.Namespace(lr=0.1, betas=(0.9, 0.99)),
        "device": torch.device("cuda:1"),
        "steps": range(2, 9, 3),
    }
    write(tmp_path, extra=extra)
    found: dict[str, Any] = {}
    resilio.restore(tmp_path, {"model": Small(9), "extra": found})
    assert found == extra and found["id"].is_safe is uuid.SafeUUID.safe
    assert found["when"].tzname() == "x"


def test_what_is_trusted_is_run_and_a_warning_names_it(tmp_path, marker, caplog):
    write(tmp_path / "plain", extra={"x": Runs(marker), "fine": 1})
    with caplog.at_level(logging.WARNING, "resilio"):
        resilio.restore(tmp_path / "plain", {"model": Small(9)}, exclude=["extra"], trust=True)
    assert not marker.exists() and "trust=True" not in caplog.text
    found: dict[str, Any] = {}
    with caplog.at_level(logging.WARNING, "resilio"):
        resilio.restore(tmp_path / "plain", {"model": Small(9), "extra": found}, trust=True)
    assert marker.exists() and found == {"x": 0, "fine": 1}
    assert re.search(r"may run anything, because trust=True: \w+\.system in extra\.x url=file://", caplog.text)
    with pytest.raises(ConfigError, match="trust='yes'"):
        resilio.restore(tmp_path / "plain", {"model": Small(9)}, trust="yes")


def test_trust_does_not_reach_metadata_or_tensors(tmp_path, marker):
    """DCP needs nothing there that is not on the list."""
    write(tmp_path / "a", extra=Runs(marker))
    index = MetadataIndex("model.seen", [])
    rewrite(tmp_path / "a", lambda m: m.storage_data.update({index: m.storage_data[MetadataIndex("extra")]}))
    with pytest.raises(RestoreError, match=r"'model.seen'.*system"):
        read(tmp_path / "a", only=["model"], trust=True)
    write(tmp_path / "b")
    rewrite(tmp_path / "b", lambda m: setattr(m, "storage_meta", Runs(marker)))
    with pytest.raises(FormatError, match="system"):
        read(tmp_path / "b", trust=True)
    assert not marker.exists()


def test_trust_makes_no_difference_to_a_checkpoint_of_ours(tmp_path):
    with CheckpointManager(str(tmp_path), {"model": Small(1), "extra": {"a": (1, 2)}}, mode="sync") as ckpt:
        ckpt.save(1)
    for trust in (False, True):
        found: dict[str, Any] = {"a": None}
        resilio.restore(tmp_path, {"model": Small(9), "extra": found}, trust=trust)
        assert found == {"a": (1, 2)}
