"""`.metadata` as each release of torch since 2.4 pickles it, made by hand from what its classes have: all are read, and
what a release that nobody knows yet may add is refused by name."""

from __future__ import annotations

import pickle
import struct
from typing import Any

import pytest
import torch
from torch.distributed.checkpoint.metadata import BytesStorageMetadata, Metadata, MetadataIndex, TensorStorageMetadata

from resilio.engine.foreign_metadata import read_foreign_metadata
from resilio.errors import FormatError

CLASSES = "torch.distributed.checkpoint.metadata"
SHARDED = "torch.distributed._shard.sharded_tensor.metadata"
FILES = "torch.distributed.checkpoint.filesystem"


class Made:
    """An object as a pickle makes it: a global, its arguments, and its state."""

    def __init__(self, module: str, name: str, args: tuple[Any, ...] = (), state: Any = None, new: bool = True) -> None:
        self.module, self.name, self.args, self.state, self.new = module, name, args, state, new


def code(value: Any) -> bytes:
    """The pickle instructions that make `value`, of protocol 2, which all later ones know too."""
    if isinstance(value, Made):
        make = f"c{value.module}\n{value.name}\n".encode() + code(value.args) + (b"\x81" if value.new else b"R")
        return make if value.state is None else make + code(value.state) + b"b"
    if isinstance(value, torch.dtype):
        return f"ctorch\n{str(value).removeprefix('torch.')}\n".encode()
    if isinstance(value, str):
        return b"X" + struct.pack("<I", len(value.encode())) + value.encode()
    if isinstance(value, tuple):
        return b"(" + b"".join(map(code, value)) + b"t"
    if isinstance(value, list):
        return b"](" + b"".join(map(code, value)) + b"e"
    if isinstance(value, dict):
        return b"}(" + b"".join(code(k) + code(v) for k, v in value.items()) + b"u"
    return pickle.dumps(value, protocol=2)[2:-1]  # None, a bool, a number


def of(name: str, **state: Any) -> Made:
    return Made(CLASSES, name, state=state or None)


def size(*numbers: int) -> Made:
    return Made("torch", "Size", (numbers,), new=False)


def path(name: str, module: str = "pathlib") -> Made:
    return Made(module, name, ("/", "data", "run"), new=False)


def properties(dtype: torch.dtype = torch.float32, memory_format: int = 0, grad: bool = False) -> Made:
    layout = Made("torch.serialization", "_get_layout", ("torch.strided",), new=False)
    order = Made(CLASSES, "_MEM_FORMAT_ENCODING", (memory_format,), new=False)
    return Made(CLASSES, "TensorProperties", state=(dtype, layout, grad, order, False))


def older_properties() -> Made:
    """Before DCP had a class of its own for them."""
    layout = Made("torch.serialization", "_get_layout", ("torch.strided",), new=False)
    order = Made(SHARDED, "MEM_FORMAT_ENCODING", (0,), new=False)
    return Made(SHARDED, "TensorProperties", state=(torch.float32, layout, False, order, False))


def metadata(
    place: dict[str, Any] | None = None,
    storage_meta: Any = None,
    properties: Made = properties(),  # noqa: B008  never changed
    **more: Any,
) -> bytes:
    """One tensor in two chunks, and a value."""
    chunks = [of("ChunkStorageMetadata", offsets=size(at, 0), sizes=size(2, 3)) for at in (0, 2)]
    tensor = of("TensorStorageMetadata", properties=properties, size=size(4, 3), chunks=chunks)

    def stored(offset: int) -> Made:
        fields = {"relative_path": "__0_0.distcp", "offset": offset, "length": 2000, **(place or {})}
        return Made(FILES, "_StorageInfo", state=fields)

    storage = {
        of("MetadataIndex", fqn="model.w", offset=size(at, 0), index=i): stored(i) for i, at in enumerate((0, 2))
    }
    storage[of("MetadataIndex", fqn="n.x", offset=None, index=None)] = stored(9)
    whole = of(
        "Metadata",
        state_dict_metadata={"model.w": tensor, "n.x": of("BytesStorageMetadata")},
        planner_data={"model.w": ("model", "w"), "n.x": ("n", "x")},
        storage_data=storage,
        **{"storage_meta": storage_meta, **more},
    )
    return b"\x80\x02" + code(whole) + b"."


def meta(**fields: Any) -> Made:
    return of("StorageMeta", **{"checkpoint_id": "/data/run", "save_id": "6f1c", "load_id": None, **fields})


FIXTURES: dict[str, bytes] = {
    "2.4: storage_meta as it came, no fourth field of a place": metadata(storage_meta=meta()),
    "2.4: a folder given as a Path": metadata(storage_meta=meta(checkpoint_id=path("PosixPath"))),
    "2.4: a folder on Windows": metadata(storage_meta=meta(checkpoint_id=path("WindowsPath"))),
    "2.4: by a writer without storage_meta": metadata(),
    "2.5: modules in storage_meta": metadata(storage_meta=meta(modules=["model"])),
    "2.6: modules, none": metadata(storage_meta=meta(modules=[])),
    "2.7: transform_descriptors, none": metadata({"transform_descriptors": None}, meta(modules=[])),
    "2.8: transform_descriptors, an empty list": metadata({"transform_descriptors": []}, meta(modules=[])),
    "2.13: a version": metadata(storage_meta=meta(modules=[]), version="1.0.0"),
    "2.13: a version of none": metadata(storage_meta=meta(modules=[]), version=None),
    "Python 3.13: pathlib has another name": metadata(
        storage_meta=meta(checkpoint_id=path("PosixPath", "pathlib._local"))
    ),
    "before 2.4: properties of another class": metadata(properties=older_properties()),
    "channels_last": metadata(properties=properties(memory_format=1)),
    "a Parameter": metadata(properties=properties(grad=True)),
    "bfloat16": metadata(properties=properties(torch.bfloat16)),
    "float8": metadata(properties=properties(torch.float8_e4m3fn)),
}


@pytest.mark.parametrize("name", FIXTURES)
def test_what_a_release_wrote_is_read(name: str) -> None:
    read = read_foreign_metadata(FIXTURES[name], "here")
    tensor = read.state_dict_metadata["model.w"]
    assert isinstance(tensor, TensorStorageMetadata) and isinstance(
        read.state_dict_metadata["n.x"], BytesStorageMetadata
    )
    assert tensor.size == (4, 3) and [tuple(chunk.offsets) for chunk in tensor.chunks] == [(0, 0), (2, 0)]
    dtypes = {"bfloat16": torch.bfloat16, "float8": torch.float8_e4m3fn}
    assert tensor.properties.dtype == dtypes.get(name, torch.float32)
    assert read.storage_data[MetadataIndex("model.w", [2, 0])].offset == 1
    assert read.storage_data[MetadataIndex("n.x")].relative_path == "__0_0.distcp"
    assert read.planner_data == {"model.w": ("model", "w"), "n.x": ("n", "x")}


def test_the_fixtures_are_pickles_that_torch_itself_reads() -> None:
    for name in ("2.4: storage_meta as it came, no fourth field of a place", "2.13: a version", "channels_last"):
        assert isinstance(pickle.loads(FIXTURES[name]), Metadata)


@pytest.mark.parametrize(
    ("data", "problem"),
    [
        (metadata(storage_meta=Made(CLASSES, "StorageMetaV2", state={"a": 1})), r"metadata\.StorageMetaV2"),
        (metadata(storage_meta=meta(region="x")), "unknown field region"),
        (metadata({"checksum": "ab"}), "unknown field checksum"),
        (metadata(placements=[1]), "unknown field placements"),
        (metadata({"transform_descriptors": ["zstd"]}), r"extension \(zstd\)"),
        (metadata(properties=Made(CLASSES, "TensorProperties", state=(torch.float32,))), "not five"),
        (metadata(storage_meta=Made("numpy", "dtype", ("f4",), new=False)), r"numpy\.dtype"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_what_no_known_release_wrote_is_refused_by_name(data: bytes, problem: str) -> None:
    with pytest.raises(FormatError, match=problem):
        read_foreign_metadata(data, "here")
