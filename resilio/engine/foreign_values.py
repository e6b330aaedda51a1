"""A tensor or value that `torch.save` wrote, read back without running anything and without growing beyond its size.

`torch.load(weights_only=True)` makes nothing but tensors and plain values, but it believes sizes: a compressed record
swells, records may lie one over the other, and a few bytes of a pickle can stand for more than any memory holds. So
what is to be loaded is looked at before, and what came out of it after.
"""

from __future__ import annotations

import io
import pickletools
import struct
import zipfile
from typing import Any

import torch

__all__ = ["VALUE_LIMIT", "load_saved"]

VALUE_LIMIT = 1 << 30  # bytes of a stored value
_PARTS = 1 << 24  # of a value, each counted as often as it is there
_DEPTH = 64  # containers within containers, as in our own records
_END = struct.Struct("<4s4H2LH")
_LOCATOR = struct.Struct("<4sLQL")
_END64 = struct.Struct("<4sQ2H2L4Q")


def load_saved(stream: io.BytesIO) -> Any:
    """What `torch.save` wrote to `stream`.

    Raises:
        pickle.UnpicklingError: it is more than tensors and plain values.
        ValueError: it would become larger than it is, or is nested too deep.
        Exception: whatever a damaged one leads torch to.
    """
    _check_archive(stream)
    stream.seek(0)
    value = torch.load(stream, map_location="cpu", weights_only=True)
    _check_value(value, 0, {})
    return value


def _check_archive(stream: io.BytesIO) -> None:
    with stream.getbuffer() as data, zipfile.ZipFile(stream) as inside:
        entries = inside.infolist()
        if not _one_directory(data, inside.start_dir):
            raise ValueError("its directory is not where torch.save puts it")
        if any(one.compress_type != zipfile.ZIP_STORED for one in entries):
            raise ValueError("it is compressed, which torch.save never does")
        if sum(one.file_size for one in entries) > len(data):
            raise ValueError("its records overlap, or are said to hold more than there is")
        names = [one.filename.lower() for one in entries]  # torch's reader does not tell cases apart
        if len({*names}) < len(names):
            raise ValueError("two of its records have one name")
        for one in entries:
            if one.filename.lower().endswith("data.pkl"):
                _check_pickle(inside.read(one))


def _one_directory(data: memoryview, start: int) -> bool:
    """Whether all that tells where the directory begins says `start`: readers differ in what they go by."""
    size = len(data)
    mark, _, _, _, _, _, offset, comment = _END.unpack(data[size - _END.size :])
    if mark != b"PK\5\6" or comment:
        return False
    at = size - _END.size - _LOCATOR.size
    if at < _END64.size or bytes(data[at : at + 4]) != b"PK\6\7":
        return bool(offset == start)
    _, _, far, _ = _LOCATOR.unpack(data[at : at + _LOCATOR.size])
    end64 = _END64.unpack(data[at - _END64.size : at])
    return far == at - _END64.size and end64[0] == b"PK\6\6" and end64[-1] == start and offset in (start, 0xFFFFFFFF)


def _check_pickle(code: bytes) -> None:
    """Pass unless it says again and again "that one once more": hashing or copying what it makes would never end."""
    stack: list[int] = []  # parts of each thing on the unpickler's stack; 0 for a mark
    memo: dict[int, int] = {}
    repeated = 0
    argument: Any
    for instruction, argument, _ in pickletools.genops(code):
        name = instruction.name
        if name in ("GET", "BINGET", "LONG_BINGET", "DUP"):
            stack.append(stack[-1] if name == "DUP" else memo[int(argument)])
            repeated += stack[-1]
            if repeated > _PARTS:
                raise ValueError("it repeats parts of itself until no memory holds it")
        elif name in ("PUT", "BINPUT", "LONG_BINPUT", "MEMOIZE"):
            memo[len(memo) if argument is None else int(argument)] = stack[-1]
        elif name == "GLOBAL" and argument.endswith(" bytearray"):
            raise ValueError("it holds a bytearray, which a number may make as large as it likes")
        else:
            parts = 1
            for before in reversed(instruction.stack_before):
                if before is pickletools.stackslice:
                    continue
                top = stack.pop()
                if before is pickletools.markobject:
                    while top:
                        parts += top
                        top = stack.pop()
                else:
                    parts += top
            after = instruction.stack_after
            stack.extend(0 if one is pickletools.markobject else parts for one in after)


def _check_value(value: Any, depth: int, known: dict[int, tuple[int, int]]) -> tuple[int, int]:
    """How many parts `value` has, and how deep they are nested; `known` remembers both by id."""
    if not isinstance(value, list | tuple | set | frozenset | dict):
        return 1, 0
    if id(value) in known:
        parts, height = known[id(value)]
    else:
        if depth > _DEPTH:
            raise ValueError(f"it is nested deeper than {_DEPTH}, or holds itself")
        below = [*value.keys(), *value.values()] if isinstance(value, dict) else value
        parts, height = 1, 0
        for one in below:
            more, deep = _check_value(one, depth + 1, known)
            parts, height = parts + more, max(height, deep + 1)
        known[id(value)] = parts, height
    if parts > _PARTS or depth + height > _DEPTH:
        raise ValueError(f"it has more than {_PARTS} parts, or is nested deeper than {_DEPTH}")
    return parts, height
