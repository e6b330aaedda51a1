"""`.metadata` of a checkpoint that plain DCP wrote, read without running anything that is in it.

It is a pickle, and unpickling runs what the author of the file wants. The few instructions that DCP's own metadata
needs are therefore interpreted here: a global is a name on a list, making an object notes the name and the arguments,
and nothing is imported, called or hashed. What comes out is checked field by field, because a pickle can put anything
into any field, and only then made into DCP's classes.
"""

from __future__ import annotations

import pickletools
from collections.abc import Callable
from math import prod
from typing import Any

import torch
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorStorageMetadata,
)

from ..errors import ConfigError, FormatError
from ..records.schema import Piece
from ..records.tiling import tiling_problem
from ..storage.base import check_key
from . import dcp

__all__ = ["LIMIT", "read_foreign_metadata"]

LIMIT = 1 << 28  # bytes of `.metadata`; 1000 ranks with 600 tensors of their own need about 100 MB
_INSTRUCTIONS = 1 << 27  # those 100 MB have 41 million, about 0.33 a byte with protocol 2 and 0.5 with 4
_DENSE = 7 / 8  # instructions a byte, but for the beginning: each may make an object of 60 bytes and more
_KEY_LIMIT = 4096  # characters of a flat key
_DIMS = 64  # torch's own limit
_DEPTH = 64  # of nested state
_INT64 = 1 << 63

_CLASSES = "torch.distributed.checkpoint.metadata"
_OLDER = "torch.distributed._shard.sharded_tensor.metadata"  # where two of them lay before
# Fields of each class whose instances are pickled as a dict of fields.
_FIELDS: dict[str, frozenset[str]] = {
    "Metadata": frozenset({"state_dict_metadata", "planner_data", "storage_data", "storage_meta", "version"}),
    "TensorStorageMetadata": frozenset({"properties", "size", "chunks"}),
    "BytesStorageMetadata": frozenset(),
    "ChunkStorageMetadata": frozenset({"offsets", "sizes"}),
    "MetadataIndex": frozenset({"fqn", "offset", "index"}),
    "StorageMeta": frozenset({"checkpoint_id", "save_id", "load_id", "modules"}),
    "_StorageInfo": frozenset({"relative_path", "offset", "length", "transform_descriptors"}),
}
_ALLOWED: dict[tuple[str, str], str] = {
    **{(_CLASSES, name): name for name in _FIELDS if name != "_StorageInfo"},
    (_CLASSES, "TensorProperties"): "TensorProperties",
    (_CLASSES, "_MEM_FORMAT_ENCODING"): "_MEM_FORMAT_ENCODING",
    (_OLDER, "TensorProperties"): "TensorProperties",
    (_OLDER, "MEM_FORMAT_ENCODING"): "_MEM_FORMAT_ENCODING",
    ("torch.distributed.checkpoint.filesystem", "_StorageInfo"): "_StorageInfo",
    ("torch", "Size"): "Size",
    ("torch.serialization", "_get_layout"): "_get_layout",
    # the folder it was saved to; its module has another name in Python 3.13
    **{(module, name): "Path" for module in ("pathlib", "pathlib._local") for name in ("PosixPath", "WindowsPath")},
}


def read_foreign_metadata(data: bytes, where: str) -> Metadata:
    """DCP's metadata from the bytes of `.metadata`, every field checked; `storage_meta` is left out.

    Whether the objects it names are there is not looked at.

    Args:
        data: the bytes.
        where: whose, for the error.

    Raises:
        FormatError: not what stock DCP writes. Names the global, the field or the key.

    Source: what a stock `.metadata` needs was read off files of torch 2.13, saved by 1 and 2 ranks, sync and async.
    """
    if len(data) > LIMIT:
        raise FormatError(f"{where}: {len(data)} bytes are too many for a .metadata", where=where)
    try:
        return _metadata(_Machine().run(data))
    except _Refused as error:
        problem = str(error)
    except Exception as error:  # noqa: BLE001  of a damaged pickle anything can come, MemoryError too
        problem = f"it is damaged ({type(error).__name__})"
    raise FormatError(f"{where} is not what torch.distributed.checkpoint writes: {problem}", where=where)


class _Refused(Exception):
    """What is wrong, in words."""


# ---------------------------------------------------------------------------------------------- from bytes to records


class _Global:
    """A name on the list. Stands for a class or function and is none."""

    def __init__(self, name: str) -> None:
        self.name = name


class _Made:
    """What the pickle made of a global: its arguments, and its state if it was given one. Equal to itself only."""

    def __init__(self, name: str, args: tuple[Any, ...]) -> None:
        self.name = name
        self.args = args
        self.state: Any = None


class _Machine:
    """The pickle instructions that metadata needs, protocols 2 to 5. Time and memory are linear in the input."""

    def __init__(self) -> None:
        self._stack: list[Any] = []
        self._marks: list[list[Any]] = []
        self._memo: dict[int, Any] = {}

    def run(self, data: bytes) -> Any:
        for number, (instruction, argument, place) in enumerate(pickletools.genops(data)):
            if number > min(_INSTRUCTIONS, 4096 + _DENSE * (place or 0)):
                raise _Refused(f"it has {number} pickle instructions or more, too many for its size")
            step = _STEPS.get(instruction.name)
            if step is None:
                raise _Refused(f"it holds the pickle instruction {instruction.name}")
            step(self, argument)
        return self._stack.pop()

    def nothing(self, argument: Any) -> None:
        """PROTO, FRAME, STOP."""

    def push(self, argument: Any) -> None:
        self._stack.append(argument)

    def mark(self, argument: Any) -> None:
        self._marks.append(self._stack)
        self._stack = []

    def _marked(self) -> list[Any]:
        items, self._stack = self._stack, self._marks.pop()
        return items

    def tuple(self, argument: Any) -> None:
        items = self._marked()  # first: it changes which stack is on top
        self._stack.append(tuple(items))

    def tuple1(self, argument: Any) -> None:
        self._stack[-1:] = [(self._stack[-1],)]

    def tuple2(self, argument: Any) -> None:
        self._stack[-2:] = [(self._stack[-2], self._stack[-1])]

    def tuple3(self, argument: Any) -> None:
        self._stack[-3:] = [(self._stack[-3], self._stack[-2], self._stack[-1])]

    def append(self, argument: Any) -> None:
        self._extend([self._stack.pop()])

    def appends(self, argument: Any) -> None:
        self._extend(self._marked())

    def _extend(self, items: list[Any]) -> None:
        _of(self._stack[-1], list, "a list that is added to").extend(items)

    def setitem(self, argument: Any) -> None:
        value, key = self._stack.pop(), self._stack.pop()
        self._update([key, value])

    def setitems(self, argument: Any) -> None:
        self._update(self._marked())

    def _update(self, items: list[Any]) -> None:
        target = _of(self._stack[-1], dict, "a dict that is added to")
        for key, value in zip(items[::2], items[1::2], strict=True):
            if type(key) not in (str, _Made):  # hashing a tuple of tuples of tuples can take forever
                raise _Refused(f"the key of a dict is a {type(key).__name__}")
            target[key] = value

    def memoize(self, argument: Any) -> None:
        self._memo[len(self._memo)] = self._stack[-1]

    def put(self, argument: int) -> None:
        self._memo[argument] = self._stack[-1]

    def get(self, argument: int) -> None:
        self._stack.append(self._memo[argument])

    def stack_global(self, argument: Any) -> None:
        name, module = self._stack.pop(), self._stack.pop()
        self._find(_of(module, str, "the module of a global"), _of(name, str, "the name of a global"))

    def named_global(self, argument: str) -> None:
        self._find(*argument.split(" ", 1))

    def _find(self, module: str, name: str) -> None:
        if (module, name) in _ALLOWED:
            self._stack.append(_Global(_ALLOWED[module, name]))
            return
        dtype = vars(torch).get(name) if module == "torch" else None
        if not isinstance(dtype, torch.dtype):
            raise _Refused(f"it holds {module:.100}.{name:.100}, which metadata has no need of. Nothing in it was run")
        self._stack.append(dtype)

    def make(self, argument: Any) -> None:
        """REDUCE and NEWOBJ: a function called, or an instance made. Here neither is."""
        args, maker = self._stack.pop(), self._stack.pop()
        self._stack.append(_Made(_of(maker, _Global, "what is called").name, _of(args, tuple, "arguments")))

    def build(self, argument: Any) -> None:
        state = self._stack.pop()
        made = _of(self._stack[-1], _Made, "what is given a state")
        if made.state is not None:
            raise _Refused(f"a {made.name} is given a state twice")
        made.state = state


_STEPS: dict[str, Callable[..., None]] = {
    **dict.fromkeys(("PROTO", "FRAME", "STOP"), _Machine.nothing),
    **dict.fromkeys(("BININT", "BININT1", "BININT2", "LONG1"), _Machine.push),
    **dict.fromkeys(("SHORT_BINUNICODE", "BINUNICODE", "BINUNICODE8"), _Machine.push),
    **dict.fromkeys(("BINPUT", "LONG_BINPUT"), _Machine.put),
    **dict.fromkeys(("BINGET", "LONG_BINGET"), _Machine.get),
    **dict.fromkeys(("REDUCE", "NEWOBJ"), _Machine.make),
    "NONE": lambda machine, _: machine.push(None),
    "NEWTRUE": lambda machine, _: machine.push(True),
    "NEWFALSE": lambda machine, _: machine.push(False),
    "EMPTY_LIST": lambda machine, _: machine.push([]),
    "EMPTY_DICT": lambda machine, _: machine.push({}),
    "EMPTY_TUPLE": lambda machine, _: machine.push(()),
    "MARK": _Machine.mark,
    "TUPLE": _Machine.tuple,
    "TUPLE1": _Machine.tuple1,
    "TUPLE2": _Machine.tuple2,
    "TUPLE3": _Machine.tuple3,
    "APPEND": _Machine.append,
    "APPENDS": _Machine.appends,
    "SETITEM": _Machine.setitem,
    "SETITEMS": _Machine.setitems,
    "MEMOIZE": _Machine.memoize,
    "STACK_GLOBAL": _Machine.stack_global,
    "GLOBAL": _Machine.named_global,
    "BUILD": _Machine.build,
}

# --------------------------------------------------------------------------------------- from records to DCP's classes


def _of(value: Any, kind: type, what: str) -> Any:
    if type(value) is not kind:
        raise _Refused(f"{what} is a {type(value).__name__}, no {kind.__name__}")
    return value


def _made(value: Any, name: str, what: str) -> _Made:
    if type(value) is not _Made or value.name != name:
        found = value.name if type(value) is _Made else type(value).__name__
        raise _Refused(f"{what} is a {found}, no {name}")
    return value


def _fields(value: Any, name: str, what: str) -> dict[str, Any]:
    made = _made(value, name, what)
    fields: dict[str, Any] = _of({} if made.state is None else made.state, dict, f"the state of {what}")
    for field in fields:
        if field not in _FIELDS[name]:
            raise _Refused(f"{what} has the unknown field {field!s:.80}")
    if made.args:
        raise _Refused(f"{what} is made with arguments")
    return fields


def _text(value: Any, what: str) -> str:
    if not 0 < len(_of(value, str, what)) <= _KEY_LIMIT:
        raise _Refused(f"{what} has {len(value)} characters")
    return str(value)


def _number(value: Any, what: str) -> int:
    if not 0 <= _of(value, int, what) < _INT64:
        raise _Refused(f"{what} is out of bounds")
    return int(value)


def _size(value: Any, what: str) -> tuple[int, ...]:
    made = _made(value, "Size", what)
    numbers = _of(made.args[0] if len(made.args) == 1 else None, tuple, what)
    if len(numbers) > _DIMS:
        raise _Refused(f"{what} has {len(numbers)} dims")
    return tuple(_number(number, what) for number in numbers)


def _metadata(root: Any) -> Metadata:
    top = _fields(root, "Metadata", "the whole")
    places: dict[tuple[str, tuple[int, ...] | None], Any] = {}
    for index, info in _of(top.get("storage_data"), dict, "storage_data").items():
        fields = _fields(index, "MetadataIndex", "a key of storage_data")
        key = _text(fields.get("fqn"), "a name in storage_data")
        if fields.get("index") is not None:
            _number(fields["index"], f"the index of {key!r}")
        offset = fields.get("offset")
        places[key, None if offset is None else _size(offset, f"an offset of {key!r}")] = _place(info, key)
    entries: dict[str, Any] = {}
    wanted: dict[MetadataIndex, Any] = {}
    for key, entry in _of(top.get("state_dict_metadata"), dict, "state_dict_metadata").items():
        _text(key, "a name in state_dict_metadata")
        made = entries[key] = _entry(entry, key)
        for offset, size_bytes in _needs(made):
            place = places.get((key, offset))
            if place is None:
                raise _Refused(f"storage_data lacks {key!r} at {offset}")
            if place.length < size_bytes:
                raise _Refused(f"{key!r} at {offset} needs {size_bytes} bytes and is stored in {place.length}")
            wanted[MetadataIndex(key, offset)] = place
    if top.get("storage_meta") is not None:
        _fields(top["storage_meta"], "StorageMeta", "storage_meta")
    version = None if top.get("version") is None else _text(top["version"], "version")
    return Metadata(entries, _paths(top.get("planner_data"), entries), wanted, None, version)


def _place(value: Any, key: str) -> Any:
    what = f"the place of {key!r}"
    fields = _fields(value, "_StorageInfo", what)
    path = _text(fields.get("relative_path"), f"{what}, its file,")
    try:
        check_key(path)
    except ConfigError:
        raise _Refused(f"{what} is {path!r}, which is no name inside the folder") from None
    transforms = fields.get("transform_descriptors")
    if transforms:
        given = _of(transforms, list, f"{what}, its extensions,")
        names = ", ".join(_text(name, f"an extension of {key!r}") for name in given[:4])
        raise _Refused(f"{key!r} was saved through an extension ({names}), which only DCP itself undoes")
    return dcp.storage_info(path, _number(fields.get("offset"), what), _number(fields.get("length"), what))


def _entry(value: Any, key: str) -> TensorStorageMetadata | BytesStorageMetadata:
    if type(value) is _Made and value.name == "BytesStorageMetadata":
        _fields(value, value.name, repr(key))
        return BytesStorageMetadata()
    fields = _fields(value, "TensorStorageMetadata", repr(key))
    dtype = _dtype(fields.get("properties"), key)
    shape = _size(fields.get("size"), f"the shape of {key!r}")
    if prod(shape) * dtype.itemsize >= _INT64:
        raise _Refused(f"the shape of {key!r} is out of bounds")
    pieces: list[Piece] = []
    for chunk in _of(fields.get("chunks"), list, f"the chunks of {key!r}"):
        of_chunk = _fields(chunk, "ChunkStorageMetadata", f"a chunk of {key!r}")
        offsets = _size(of_chunk.get("offsets"), f"an offset of {key!r}")
        sizes = _size(of_chunk.get("sizes"), f"a size of {key!r}")
        fits = len(offsets) == len(sizes) == len(shape)
        if not fits or any(o + n > length for o, n, length in zip(offsets, sizes, shape, strict=True)):
            raise _Refused(f"a chunk of {key!r} leaves its shape")
        size_bytes = prod(sizes) * dtype.itemsize
        piece = Piece(offsets=[*offsets], sizes=[*sizes], object=0, at=0, size_bytes=size_bytes, block=0)
        pieces.append(piece)
    problem = tiling_problem(list(shape), pieces)
    if problem:
        raise _Refused(f"the chunks of {key!r} {problem}")
    return dcp.tensor_metadata(dtype, shape, ((piece.offsets, piece.sizes) for piece in pieces))


def _dtype(value: Any, key: str) -> torch.dtype:
    state = _made(value, "TensorProperties", f"the properties of {key!r}").state
    if type(state) is not tuple or len(state) != 5 or value.args:
        raise _Refused(f"the properties of {key!r} are not five")
    dtype, layout, needs_grad, memory_format, pinned = state
    if _made(layout, "_get_layout", f"the layout of {key!r}").args != ("torch.strided",):
        raise _Refused(f"{key!r} is no strided tensor")
    _made(memory_format, "_MEM_FORMAT_ENCODING", f"the memory format of {key!r}")
    _of(needs_grad, bool, f"requires_grad of {key!r}")
    _of(pinned, bool, f"pin_memory of {key!r}")
    checked: torch.dtype = _of(dtype, torch.dtype, f"the dtype of {key!r}")
    return checked


def _needs(entry: TensorStorageMetadata | BytesStorageMetadata) -> list[tuple[tuple[int, ...] | None, int]]:
    """(offset, least number of bytes) of what must be stored for an entry."""
    if isinstance(entry, BytesStorageMetadata):
        return [(None, 1)]
    itemsize = entry.properties.dtype.itemsize
    return [(tuple(chunk.offsets), chunk.sizes.numel() * itemsize) for chunk in entry.chunks]


def _paths(value: Any, entries: dict[str, Any]) -> dict[str, tuple[str | int, ...]]:
    """Flat key -> path. A key that the planner did not flatten stands at the top."""
    given = _of({} if value is None else value, dict, "planner_data")
    paths: dict[str, tuple[str | int, ...]] = {}
    for key in entries:
        path = _of(given.get(key, (key,)), tuple, f"the path of {key!r}")
        if not 0 < len(path) <= _DEPTH:
            raise _Refused(f"the path of {key!r} has {len(path)} parts")
        for part in path:
            if type(part) is not str:
                _number(part, f"a part of the path of {key!r}")
        if ".".join(map(str, path)) != key or type(path[0]) is not str:
            raise _Refused(f"the path of {key!r} leads elsewhere")
        paths[key] = path
    return paths
