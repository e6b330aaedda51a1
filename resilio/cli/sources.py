"""Models from elsewhere: safetensors, mapped into memory, and what torch.save wrote. All of it is data from outside."""

from __future__ import annotations

import json
import logging
import pickle
from itertools import pairwise
from math import prod
from pathlib import Path
from typing import Any
from zipfile import BadZipFile

import numpy as np

from ..errors import ConfigError, FormatError
from .safetensors_file import DTYPES

__all__ = ["module_of", "read_source"]

_HEADER_LIMIT = 100_000_000  # bytes; the library reads no larger one
_INDEX = "model.safetensors.index.json"
_DTYPES = {name: dtype for dtype, name in DTYPES.items()}
_PARTS = ("model", "state_dict")
_DIMS = 64  # torch's own limit
_ITEMS = 1 << 24  # brackets and commas in a header or an index: each may make an object, or a place for one

_log = logging.getLogger("resilio")


def read_source(path: Path, trust: bool = False) -> dict[str, Any]:
    """The tensors in a safetensors file, a folder of them, or a file of torch.save.

    Args:
        path: of it.
        trust: whether to unpickle what a file of torch.save must not hold otherwise, which may run anything.

    Raises:
        FormatError: it is none, or it is damaged.
        ConfigError: it holds no model.
    """
    if path.is_dir():
        found: dict[str, Any] = {}
        for file in _files(path):
            for name, tensor in _read_safetensors(file).items():
                if name in found:
                    raise FormatError(f"{path}: {name!r} is there twice", where=str(path))
                found[name] = tensor
        return found
    _refuse_pipes(path)
    with path.open("rb") as start:
        head = start.read(9)
    # torch.save writes a zip; safetensors begin with a length and a JSON object
    return _read_safetensors(path) if head[8:9] == b"{" else _read_torch(path, trust)


def module_of(tensors: dict[str, Any]) -> Any:
    """A module whose state is `tensors`, by name; it can do nothing.

    Raises:
        ConfigError: a name is no place in a module.
    """
    import torch

    root = torch.nn.Module()
    for name, tensor in tensors.items():
        *path, last = name.split(".")
        node = root
        for part in path:
            if part in node._parameters:
                raise ConfigError(f"{name!r} is no name of a parameter beside the others")
            # Their tables, not add_module: a name may be that of a method, which nobody calls here.
            node = node._modules.setdefault(part, torch.nn.Module())  # type: ignore[assignment]
        if not all((*path, last)) or last in node._modules or last in node._parameters:
            raise ConfigError(f"{name!r} is no name of a parameter beside the others")
        node._parameters[last] = torch.nn.Parameter(tensor, requires_grad=False)
    return root


def _refuse_pipes(path: Path) -> None:
    if not path.is_file():  # nobody may ever write into the other end
        raise FormatError(f"{path} is no file", where=str(path))


def _files(folder: Path) -> list[Path]:
    index = folder / _INDEX
    if not index.exists():
        files = sorted(folder.glob("*.safetensors"))
        if not files:
            raise ConfigError(f"{folder} holds no safetensors; give a file, or a folder with *.safetensors.")
        return files
    _refuse_pipes(index)
    try:
        if index.stat().st_size > _HEADER_LIMIT:
            raise ValueError("it is too large")
        names = sorted(set(_json(index.read_bytes())["weight_map"].values()))
        if any(Path(name).name != name for name in names):
            raise ValueError("a file outside of the folder")
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise FormatError(f"{index} is no index of safetensors: {error}", where=str(index)) from error
    missing = [name for name in names if not (folder / name).is_file()]
    if missing:
        raise FormatError(f"{folder}: {missing[0]} is missing, which {_INDEX} names", where=str(folder))
    return [folder / name for name in names]


def _read_safetensors(path: Path) -> dict[str, Any]:
    import torch

    _refuse_pipes(path)
    try:
        size_bytes = path.stat().st_size
        with path.open("rb") as file:
            length = int.from_bytes(file.read(8), "little")
            if not 2 <= length <= min(_HEADER_LIMIT, size_bytes - 8):
                raise ValueError(f"its header would have {length} bytes")
            header = _json(file.read(length))
        header.pop("__metadata__", None)
        start, found, taken = 8 + length, {}, []
        # Copy on write: torch wants memory that can be written, and the file stays as it is.
        data = np.memmap(path, np.uint8, "c") if size_bytes else np.empty(0, np.uint8)
        for name, entry in header.items():
            dtype, (begin, end) = getattr(torch, _DTYPES[entry["dtype"]]), entry["data_offsets"]
            shape = entry["shape"]
            if type(shape) is not list or any(type(n) is not int for n in (*shape, begin, end)):
                raise ValueError(f"the shape or the place of {name!r} are no numbers")
            if not 0 <= begin <= end <= size_bytes - start or min(shape, default=0) < 0:
                raise ValueError(f"{name!r} leaves the file")
            if len(shape) > _DIMS or prod(shape) * dtype.itemsize != end - begin:
                raise ValueError(f"{name!r} has {end - begin} bytes for {str(shape)[:200]} of {entry['dtype']}")
            taken.append((begin, end, name))
            raw = data[start + begin : start + end]
            if (start + begin) % dtype.itemsize:
                raw = np.array(raw)  # a copy, which is aligned
            flat = torch.from_numpy(raw).view(dtype) if len(raw) else torch.empty(0, dtype=dtype)
            found[name] = flat.reshape(shape)
        for (_, end, one), (begin, _, other) in pairwise(sorted(one for one in taken if one[0] < one[1])):
            if begin < end:
                raise ValueError(f"{one!r} and {other!r} overlap")
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError, RuntimeError) as error:
        raise FormatError(f"{path} is no safetensors file, or damaged: {error}", where=str(path)) from error
    return found


def _json(data: bytes) -> Any:
    """What `data` says, in memory that is not many times as large.

    Raises:
        ValueError: it is no JSON, or says too much.
    """
    if sum(map(data.count, (b"[", b"{", b","))) > _ITEMS:
        raise ValueError("it has too many items")
    return json.loads(data)


def _read_torch(path: Path, trust: bool) -> dict[str, Any]:
    import torch

    from ..engine import contents, load_saved

    def trusted(names: str) -> None:
        _log.warning("unpickling what may run anything, because of --trust: %s in %s", names, path)

    with path.open("rb") as file:
        try:
            state = load_saved(file, trusted=trusted if trust else None)
        except pickle.UnpicklingError as error:
            raise FormatError(
                f"{path} holds more than tensors and plain values ({contents(file)}), and making that would run code "
                "of whoever wrote it. If you trust them, --trust does",
                where=str(path),
            ) from error
        except Exception as error:
            old = isinstance(error, BadZipFile) and not trust
            hint = ". If torch.save wrote it before torch 1.6 and you trust it, --trust reads it" * old
            said = f"{type(error).__name__}: {str(error)[:300]}"
            raise FormatError(f"{path} is no file of torch.save, or damaged: {said}{hint}", where=str(path)) from error
    for part in (None, *_PARTS):
        model = state if part is None else state.get(part) if isinstance(state, dict) else None
        if isinstance(model, dict) and model and all(isinstance(one, torch.Tensor) for one in model.values()):
            return {str(name): _whole(path, name, tensor.detach()) for name, tensor in model.items()}
    raise ConfigError(
        f"{path} holds no model: a dict of tensors by name, or one below {' or '.join(map(repr, _PARTS))}."
    )


def _whole(path: Path, name: Any, tensor: Any) -> Any:
    """`tensor`, if its elements are there: a view may say that one element is a million of them.

    Raises:
        FormatError: they are not.
    """
    import torch

    if tensor.layout is not torch.strided or tensor.device.type != "cpu":
        raise FormatError(f"{path}: {str(name)[:200]!r} is no plain tensor with its elements", where=str(path))
    if tensor.nbytes > tensor.untyped_storage().nbytes():
        raise FormatError(f"{path}: {str(name)[:200]!r} has more elements than are stored", where=str(path))
    return tensor
