"""Hostile and damaged files for `resilio import`: safetensors, indices of them, and what torch.save might have written.

Each is made by a function that is given a folder and returns what to import; with a word of the reason, or `WHOLE`
where what was done does no harm.
"""

from __future__ import annotations

import io
import json
import os
import pickle
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from hostile.corpus import (
    GIB,
    Payload,
    _deflated,
    _directory_of,
    _legacy,
    _overlapping,
    _pkl,
    _saved,
    _tower,
    _two_directories,
    _with_pickle,
    canary,
)

__all__ = ["SOURCES", "WHOLE", "control"]

WHOLE = "whole"
SOURCES: dict[str, tuple[Callable[[Path], Path], str]] = {}


def control(folder: Path) -> Path:
    """A file that is what it should be."""
    (folder / "good.pt").write_bytes(_saved({"w": torch.zeros(3)}))
    return folder / "good.pt"


def _torch(name: str, data: Callable[[], bytes], word: str) -> None:
    def make(folder: Path) -> Path:
        (folder / "x.pt").write_bytes(data())
        return folder / "x.pt"

    SOURCES[f"torch.save: {name}"] = make, word


_torch("a call of os.system", lambda: _saved(Payload(os.system, canary())), "system")
_torch("a call of eval beside a model", lambda: _saved({"model": {}, "a": Payload(eval, "1")}), "eval")
_torch("a bare pickle", lambda: pickle.dumps(Payload(os.system, canary())), "no file of torch.save")
_torch("a tensor of the old format", _legacy, "no file of torch.save")
_torch("compressed", _deflated, "compressed")
_torch("a directory that is elsewhere for others", _two_directories, "directory")
_torch("records that overlap", _overlapping, "overlap|more than")
_torch("a directory of a gigabyte", lambda: _directory_of(24_000_000), "too many")
_torch("a directory of entries that are one", lambda: _directory_of(100_000), "one name")
_torch("a tower of tuples as a key", lambda: _with_pickle(_tower(60)), "repeats")
_torch("a list nested without end", lambda: _with_pickle(b"\x80\x02" + b"]" * 100_000 + b"a" * 99_999 + b"."), "x.pt")
_torch("seven million sets", lambda: _with_pickle(b"\x80\x04](" + b"\x8f" * 7_000_000 + b"e."), "more than a value")
_torch("a list that holds itself", lambda: _with_pickle(b"\x80\x02]q\x00h\x00a."), "holds itself")
_torch("an int of 2 GiB", lambda: _with_pickle(b"\x80\x02\x8b\xff\xff\xff\x7f."), "x.pt")
_torch(
    "a bytearray of 8 GiB",
    lambda: _with_pickle(b"\x80\x02cbuiltins\nbytearray\n\x8a\x05\x00\x00\x00\x00\x02\x85R."),
    "bytearray",
)
_torch("a storage that is too short", lambda: _with_pickle(_pkl(torch.zeros(3)), None, **{"0": b"abc"}), "x.pt")
_torch("a view of one element as 4 TiB", lambda: _saved({"w": torch.zeros(1).expand(1 << 40)}), "more elements")
_torch("a sparse tensor", lambda: _saved({"w": torch.eye(9).to_sparse()}), "plain tensor")
_torch("a tensor without memory", lambda: _saved({"w": torch.empty(1 << 40, device="meta")}), "plain tensor")
_torch("no model", lambda: _saved([1, 2]), "no model")
_torch("names that are no places", lambda: _saved({"a": torch.zeros(1), "a.b": torch.zeros(1)}), "no name")
_torch("a name that goes up", lambda: _saved({"../../x": torch.zeros(1)}), "no name")
_torch("a name of a method", lambda: _saved({"forward.x": torch.zeros(1), "__class__": torch.zeros(1)}), WHOLE)
_torch("nothing", lambda: b"", "no file of torch.save")
_torch("a name of a value and of a folder", lambda: _saved({"a.b": torch.zeros(1), "a": torch.zeros(1)}), "no name")
_torch("cut to half", lambda: _saved({"w": torch.zeros(300)})[:700], "no file of torch.save")


def _tensors(name: str, header: Callable[[], bytes], word: str, data: bytes = bytes(64)) -> None:
    def make(folder: Path) -> Path:
        head = header()
        (folder / "x.safetensors").write_bytes(len(head).to_bytes(8, "little") + head + data)
        return folder / "x.safetensors"

    SOURCES[f"safetensors: {name}"] = make, word


def _entry(**fields: Any) -> Callable[[], bytes]:
    return lambda: json.dumps({"w": {"dtype": "F32", "shape": [4], "data_offsets": [0, 16], **fields}}).encode()


_tensors("as it should be", _entry(), WHOLE)
_tensors("offsets of 2**62", _entry(data_offsets=[0, 1 << 62]), "leaves the file")
_tensors("negative offsets", _entry(data_offsets=[-16, 0]), "leaves the file")
_tensors("offsets that go back", _entry(data_offsets=[16, 0]), "leaves the file")
_tensors("three offsets", _entry(data_offsets=[0, 16, 32]), "safetensors")
_tensors("a huge shape", _entry(shape=[1 << 62, 1 << 62]), "bytes for")
_tensors("an empty huge shape", _entry(shape=[0, 1 << 62, 1 << 62], data_offsets=[0, 0]), WHOLE)
_tensors("an empty tensor", _entry(shape=[0, 7], data_offsets=[0, 0]), WHOLE)
_tensors("a shape of a million dims", _entry(shape=[1] * 1_000_000, data_offsets=[0, 4]), "bytes for")
_tensors("a shape of fractions", _entry(shape=[4.0]), "no numbers")
_tensors("a dtype that is code", _entry(dtype="__import__('os')"), "safetensors")
_tensors("a dtype that is a list", _entry(dtype=[]), "safetensors")
_tensors("a header that is a list", lambda: b"[1]", "no file of torch.save|safetensors")
_tensors("a header nested without end", lambda: b'{"w":' + b"[" * 90_000_000, "too many")
_tensors("a header nested deep", lambda: b'{"w":' + b"[" * 100_000 + b"]" * 100_000 + b"}", "safetensors")
_tensors("a header of thirty million lists", lambda: b'{"w":[' + b"[]," * 30_000_000 + b"[]]}", "too many")
_tensors("a header that is no UTF-8", lambda: b'{"\xff":1}', "safetensors")
_tensors("an int of ten million digits", lambda: b'{"w":' + b"9" * 10_000_000 + b"}", "safetensors")
_tensors(
    "a thousand tensors on the same bytes",
    lambda: json.dumps(
        {f"w{i}": {"dtype": "F32", "shape": [4], "data_offsets": [0, 16]} for i in range(1000)}
    ).encode(),
    "overlap",
)


def source(name: str, word: str) -> Callable[[Callable[[Path], Path]], None]:
    """One that is made in its own way."""
    return lambda make: SOURCES.update({name: (make, word)})


@source("safetensors: a header that is longer than the file", "would have")
def _(folder: Path) -> Path:
    (folder / "x").write_bytes((1 << 40).to_bytes(8, "little") + b"{" + bytes(100))
    return folder / "x"


@source("safetensors: 3 GiB of nothing after a header of 100 MB", "safetensors")
def _(folder: Path) -> Path:
    (folder / "x").write_bytes((100_000_000).to_bytes(8, "little") + b"{")
    os.truncate(folder / "x", 3 * GIB)
    return folder / "x"


@source("safetensors: a folder whose file is a pipe", "no file")
def _(folder: Path) -> Path:
    os.mkfifo(folder / "x.safetensors")
    return folder


@source("a pipe", "no file")
def _(folder: Path) -> Path:
    os.mkfifo(folder / "x")
    return folder / "x"


@source("index: an index that names a file outside", "outside")
def _(folder: Path) -> Path:
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"w": "../x.safetensors"}}))
    return folder


@source("index: 3 GiB of nothing", "too large")
def _(folder: Path) -> Path:
    (folder / "model.safetensors.index.json").write_bytes(b"")
    os.truncate(folder / "model.safetensors.index.json", 3 * GIB)
    return folder


@source("index: names that are lists", "no index")
def _(folder: Path) -> Path:
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"w": ["x"]}}))
    return folder


@source("index: thirty million items", "too many")
def _(folder: Path) -> Path:
    (folder / "model.safetensors.index.json").write_bytes(b'{"weight_map":[' + b"[]," * 30_000_000 + b"[]]}")
    return folder


@source("index: a pipe", "no file")
def _(folder: Path) -> Path:
    os.mkfifo(folder / "model.safetensors.index.json")
    return folder


@source("torch.save: 3 GiB of nothing", "no file of torch.save")
def _(folder: Path) -> Path:
    (folder / "x").write_bytes(b"PK\3\4")
    os.truncate(folder / "x", 3 * GIB)
    return folder / "x"


@source("torch.save: a pickle of 3 GiB", "too many")
def _(folder: Path) -> Path:
    """Sparse on disk: a record of zeros whose directory says that it is the pickle."""
    path, size = folder / "x", 3 * GIB
    with path.open("wb") as file, zipfile.ZipFile(file, "w", zipfile.ZIP_STORED) as out:
        out.writestr("archive/version", b"3\n")
        one = zipfile.ZipInfo("archive/data.pkl")
        at = file.tell()
        one.header_offset, one.file_size, one.compress_size, one.CRC = at, size, size, 0
        file.write(one.FileHeader(zip64=True))
        file.seek(size, io.SEEK_CUR)
        out.start_dir = file.tell()
        out.filelist.append(one)
        out.NameToInfo[one.filename] = one
        out._didModify = True  # type: ignore[attr-defined]
    return path
