"""Files in the safetensors format, written as they are read: 8 bytes of length, a JSON header, raw bytes.

Our own writer because the library's holds all tensors of a file in memory at once, and a checkpoint may be larger.

Source: the format as https://github.com/huggingface/safetensors documents it.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import BinaryIO, Protocol

from ..errors import ConfigError
from ..records.manifest import ITEMSIZE, SavedTensor

__all__ = ["DTYPES", "Entry", "plan_shards", "write_file"]

DTYPES = {
    "bool": "BOOL",
    "uint8": "U8",
    "int8": "I8",
    "int16": "I16",
    "uint16": "U16",
    "int32": "I32",
    "uint32": "U32",
    "int64": "I64",
    "uint64": "U64",
    "float16": "F16",
    "bfloat16": "BF16",
    "float32": "F32",
    "float64": "F64",
    "float8_e4m3fn": "F8_E4M3",
    "float8_e5m2": "F8_E5M2",
    "float8_e8m0fnu": "F8_E8M0",
    "complex64": "C64",
}
_HEADER_LIMIT = 100_000_000  # bytes; the library reads no larger one


class _Reads(Protocol):
    def stream(self, name: str, /) -> Iterator[object]: ...


@dataclass(frozen=True)
class Entry:
    """A tensor under the name that it is written by; `key` is what it is stored as."""

    name: str
    key: str
    tensor: SavedTensor


def plan_shards(entries: Iterable[Entry], limit: int) -> list[list[Entry]]:
    """Entries in their order, in files of at most `limit` bytes each; a larger tensor has one of its own.

    Raises:
        ConfigError: the format has no such dtype.
    """
    shards: list[list[Entry]] = [[]]
    room = limit
    for entry in entries:
        if entry.tensor.dtype not in DTYPES:
            raise ConfigError(
                f"{entry.name!r} is {entry.tensor.dtype}, which safetensors has no name for. Leave it out with --only, "
                "or take --format torch."
            )
        if shards[-1] and entry.tensor.size_bytes > room:
            shards.append([])
            room = limit
        shards[-1].append(entry)
        room -= entry.tensor.size_bytes
    return shards


def write_file(out: BinaryIO, entries: Sequence[Entry], reader: _Reads, metadata: Mapping[str, str]) -> Iterator[int]:
    """Write one file; yields the number of bytes of each slab that was written.

    Raises:
        ConfigError: its header would be too large to be read.
    """
    header: dict[str, object] = {"__metadata__": dict(metadata)}
    at = 0
    # Large items first, so that each tensor is aligned to its own.
    ordered = sorted(entries, key=lambda entry: (-ITEMSIZE[entry.tensor.dtype], entry.name))
    for entry in ordered:
        end = at + entry.tensor.size_bytes
        header[entry.name] = {
            "dtype": DTYPES[entry.tensor.dtype],
            "shape": list(entry.tensor.shape),
            "data_offsets": [at, end],
        }
        at = end
    text = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-len(text) % 8)
    if len(text) > _HEADER_LIMIT:
        raise ConfigError(f"a safetensors header of {len(text)} bytes could not be read again; use a --shard-size")
    out.write(len(text).to_bytes(8, "little"))
    out.write(text)
    for entry in ordered:
        for part in reader.stream(entry.key):
            view = memoryview(part)  # type: ignore[arg-type]
            out.write(view)
            yield view.nbytes
