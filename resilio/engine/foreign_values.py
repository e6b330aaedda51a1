"""What `torch.save` wrote, read back without running anything and without growing beyond its size.

`torch.load(weights_only=True)` makes nothing but tensors and plain values, but it believes sizes: a compressed record
swells, records may lie one over the other, and a few bytes of a pickle can stand for more than any memory holds. So
what is to be loaded is looked at before, and what came out of it after. Files may be larger than memory: what is looked
at is their directory and the pickle in them.
"""

from __future__ import annotations

import os
import pathlib
import pickletools
import struct
import threading
import zipfile
from argparse import Namespace
from collections import deque
from collections.abc import Callable, Iterable
from typing import Any, BinaryIO

import torch
from torch.serialization import get_safe_globals, get_unsafe_globals_in_checkpoint, safe_globals

from .. import safe_types

__all__ = ["VALUE_LIMIT", "check_directory", "contents", "load_saved"]

VALUE_LIMIT = 1 << 30  # bytes of a stored value
_PARTS = 1 << 24  # of a value, each counted as often as it is there
_DEPTH = 64  # containers within containers, as in our own records
_DIRECTORY = 1 << 25  # bytes of an archive's directory: a third of a million tensors
_MADE = 3 << 29  # bytes that a pickle's instructions may make, by the sizes below
_END = struct.Struct("<4s4H2LH")
_LOCATOR = struct.Struct("<4sLQL")
_END64 = struct.Struct("<4sQ2H2L4Q")
# What an instruction leaves in memory, in bytes: on the stack alone, in the memo, as an object; text and bytes are as
# long as they are in the file, or a few times that.
_SHARED = frozenset({"NONE", "NEWTRUE", "NEWFALSE", "MARK", "PROTO", "FRAME", "STOP", "POP", "POP_MARK"})
_REPEATS = frozenset({"GET", "BINGET", "LONG_BINGET", "DUP"})
_PUTS = frozenset({"PUT", "BINPUT", "LONG_BINPUT", "MEMOIZE"})
_LARGER = {"EMPTY_SET": 232, "FROZENSET": 232, **dict.fromkeys(_SHARED | _REPEATS, 8), **dict.fromkeys(_PUTS, 100)}

_allowing = threading.Lock()  # torch's list of safe types is one for the whole process


def load_saved(stream: BinaryIO, types: bool = True, trusted: Callable[[str], None] | None = None) -> Any:
    """What `torch.save` wrote to `stream`, which can be read anywhere.

    Args:
        stream: of a length that may be trusted.
        types: whether it may hold the types of `safe_types`, too.
        trusted: what it must not hold is made all the same, which may run anything; called before, with the names of
            what is made.

    Raises:
        pickle.UnpicklingError: it is more than tensors, plain values and registered types.
        ValueError: it would become larger than it is, or is nested too deep.
        Exception: whatever a damaged one leads torch to.
    """
    try:
        _check_archive(stream)
        stream.seek(0)
        if not types:
            value = torch.load(stream, map_location="cpu", weights_only=True)
        else:
            with _allowing, safe_globals([*_allowed()]):
                value = torch.load(stream, map_location="cpu", weights_only=True)
        _check_value(value, 0, {})
        return value
    except Exception:
        if trusted is None:
            raise
    trusted(contents(stream))
    stream.seek(0)
    return torch.load(stream, map_location="cpu", weights_only=False)


def contents(stream: BinaryIO) -> str:
    """The names of what is in it and is neither tensor nor plain value, as far as that can be told; for messages."""
    try:
        stream.seek(0)
        known = {one[1] if isinstance(one, tuple) else f"{one.__module__}.{one.__qualname__}" for one in _allowed()}
        names = sorted({*get_unsafe_globals_in_checkpoint(stream)} - known)
    except Exception:  # noqa: BLE001  only to tell what is in it
        names = []
    more = f" and {len(names) - 4} more" if len(names) > 4 else ""
    return ", ".join(name[:80] for name in names[:4]) + more or "of an unknown kind"


def _allowed() -> Iterable[Any]:
    """The registered types that torch does not allow already: what it is told for a while it forgets afterwards."""
    known = get_safe_globals()
    for cls in safe_types.classes():
        if cls not in known:
            yield cls
        if issubclass(cls, pathlib.PurePath):  # its module has another name in Python 3.13
            yield from ((cls, f"{module}.{cls.__name__}") for module in ("pathlib", "pathlib._local"))


def _check_archive(stream: BinaryIO) -> None:
    size = stream.seek(0, os.SEEK_END)
    start = check_directory(stream)
    stream.seek(0)
    with zipfile.ZipFile(stream) as inside:
        entries = inside.infolist()
        if inside.start_dir != start:
            raise ValueError("its directory is not where torch.save puts it")
        if any(one.compress_type != zipfile.ZIP_STORED for one in entries):
            raise ValueError("it is compressed, which torch.save never does")
        if sum(one.file_size for one in entries) > size:
            raise ValueError("its records overlap, or are said to hold more than there is")
        names = [one.filename.lower() for one in entries]  # torch's reader does not tell cases apart
        if len({*names}) < len(names):
            raise ValueError("two of its records have one name")
        for one in entries:
            if one.filename.lower().endswith("data.pkl"):
                if one.file_size > VALUE_LIMIT:
                    raise ValueError(f"the pickle in it has {one.file_size} bytes, which are too many")
                _check_pickle(inside.read(one))


def check_directory(stream: BinaryIO) -> int:
    """Where an archive's directory begins, if all that tells it says the same: readers differ in what they go by.

    Raises:
        BadZipFile: it is no archive.
        ValueError: it begins elsewhere for others, or is larger than it should be read.
    """
    size = stream.seek(0, os.SEEK_END)
    stream.seek(max(0, size - _END.size - _LOCATOR.size - _END64.size))
    tail = stream.read(_END.size + _LOCATOR.size + _END64.size)
    if len(tail) < _END.size:
        raise zipfile.BadZipFile("it is no archive")
    mark, _, _, _, _, length, offset, comment = _END.unpack(tail[-_END.size :])
    if mark != b"PK\5\6":
        raise zipfile.BadZipFile("it is no archive, or has no end")
    at = len(tail) - _END.size - _LOCATOR.size
    if at >= _END64.size and tail[at : at + 4] == b"PK\6\7":
        _, _, far, _ = _LOCATOR.unpack(tail[at : at + _LOCATOR.size])
        end64 = _END64.unpack(tail[at - _END64.size : at])
        start, end = int(end64[-1]), size - len(tail) + at - _END64.size
        fits = end64[0] == b"PK\6\6" and far == end and end64[-2] == end - start and offset in (start, 0xFFFFFFFF)
    else:
        start, end = offset, size - _END.size
        fits = length == end - start
    if not fits or comment or not 0 <= start <= end:
        raise ValueError("its directory is not where torch.save puts it")
    if size - start > _DIRECTORY:  # before it is read
        raise ValueError(f"its directory has {size - start} bytes, which are too many")
    return start


def _check_pickle(code: bytes) -> None:
    """Pass unless it makes more than memory holds, or says again and again "that one once more": hashing or copying
    what it makes would never end.
    """
    stack: list[int] = []  # parts of each thing on the unpickler's stack; 0 for a mark
    memo: dict[int, int] = {}
    repeated = made = 0
    argument: Any
    for instruction, argument, _ in pickletools.genops(code):
        name = instruction.name
        made += _LARGER.get(name, 72)
        if made > _MADE:
            raise ValueError("it makes more than a value may hold")
        if name in _REPEATS:
            stack.append(stack[-1] if name == "DUP" else memo[int(argument)])
            repeated += stack[-1]
            if repeated > _PARTS:
                raise ValueError("it repeats parts of itself until no memory holds it")
        elif name in _PUTS:
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
    if isinstance(value, Namespace):
        value = vars(value)
    if not isinstance(value, list | tuple | set | frozenset | dict | deque):
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
