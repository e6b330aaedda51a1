"""Python values as tagged JSON and back, without pickle: what comes back is what was there, type by type, bit by bit.

JSON's own scalars, lists, and dicts whose keys are strings stay as they are. What JSON lacks is a dict of one key:

==============  ==========================================  =====================================================
tag             value                                       stands for
==============  ==========================================  =====================================================
``$tuple``      list                                        tuple
``$map``        list of [key, value]                        dict with other keys, or with keys that start with ``$``
``$odict``      list of [key, value]                        collections.OrderedDict
``$counter``    list of [key, value]                        collections.Counter (MultiStepLR has one)
``$set``        list, sorted by canonical bytes             set
``$frozenset``  the same                                    frozenset
``$float``      "nan", "inf", "-inf" or 16 hex digits       a float that JSON lacks; hex: the bits of another nan
``$complex``    [real, imaginary]                           complex
``$int``        text, hexadecimal                           int beyond 64 bits
``$bytes``      base64                                      bytes
``$ndarray``    {"dtype", "shape", "data": base64}          numpy.ndarray, row-major little-endian
``$npscalar``   {"dtype", "data": base64}                   numpy scalar
``$dtype``      text                                        torch.dtype
``$size``       list                                        torch.Size
``$type``       [name, value]                               a type of `resilio.safe_types`, by the name it has there
``$ref``        flat key                                    a leaf of a tree; only where the caller asks for it
==============  ==========================================  =====================================================

Types are matched exactly: a subclass (an enum, a namedtuple) would come back as something else and is refused unless it
is registered. Two values are equal if their `canonical_bytes` are: types and bits count, the order of a plain dict does
not (as in Python), that of an OrderedDict does. Stored JSON keeps the order of dicts all the same, so that it comes
back.
"""

from __future__ import annotations

import base64
import binascii
import math
import struct
import sys
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import msgspec

from .. import safe_types
from ..errors import CaptureError, FormatError, UnknownTypeError

__all__ = ["DEPTH_LIMIT", "canonical_bytes", "decode_metrics", "decode_value", "encode_metrics", "encode_value"]

DEPTH_LIMIT = 64  # containers within containers; a structure that holds itself ends here
_INT64 = range(-(2**63), 2**63)
_NAN_BITS = 0x7FF8000000000000  # of float("nan")
_NUMPY_KINDS = "biufcSUMm"  # no objects (they are pickle), no records
_ARRAY_LIMIT = 1 << 30  # bytes of an array in a record
_SAME_HASH = 64  # keys of a container that may share a hash: more were chosen so that it takes for ever to make


def encode_value(value: Any, where: str, ref_type: type | None = None) -> Any:
    """`value` as what JSON can hold.

    Args:
        value: what to encode; not kept, not changed.
        where: its flat key; the error adds the path inside the value.
        ref_type: a type with a `key` and a constructor that takes it, for the leaves of a tree (`$ref`).

    Raises:
        CaptureError: a part of it is of another type, by name and path.
    """
    return _Encoder(ref_type).encode(value, where, 0)


def decode_value(data: Any, where: str, ref_type: type | None = None) -> Any:
    """The value that `encode_value` made `data` of.

    Args:
        data: decoded JSON; from outside, so checked.
        where: its flat key or record, for the error.
        ref_type: as for `encode_value`.

    Raises:
        FormatError: malformed, of an unknown tag, or nested too deep.
        UnknownTypeError: of a type that is not registered in `resilio.safe_types`, or that is another one here.
    """
    try:
        return _Decoder(ref_type).decode(data, where, 0)
    except FormatError:
        raise
    except (TypeError, ValueError, KeyError, AttributeError, OverflowError, struct.error, binascii.Error) as error:
        raise FormatError(f"{where} is no encoded value: {str(error)[:300]}", where=where) from error


def canonical_bytes(data: Any) -> bytes:
    """Bytes that are equal exactly for equal values; for hashes. `data` is what `encode_value` returned."""
    return msgspec.json.encode(_canonical(data))


def encode_metrics(metrics: Mapping[str, float]) -> dict[str, float | str]:
    """Metrics as a commit record holds them: floats, non-finite ones as text."""
    return {str(k): float(v) if math.isfinite(v) else str(float(v)) for k, v in metrics.items()}


def decode_metrics(metrics: Mapping[str, float | str], where: str) -> dict[str, float]:
    """Metrics of a commit record as floats.

    Raises:
        FormatError: text that is no float.
    """
    try:
        return {k: float(v) for k, v in metrics.items()}
    except ValueError as error:
        raise FormatError(f"{where}: a metric is no number: {error}", where=where) from error


class _Encoder:
    def __init__(self, ref_type: type | None) -> None:
        self._ref_type = ref_type

    def encode(self, x: Any, where: str, depth: int) -> Any:
        kind = type(x)
        if x is None or kind is bool:
            return x
        if kind is int:
            return x if x in _INT64 else {"$int": hex(x)}
        if kind is float:
            return _float(x)
        if kind is str:
            return _text(x, where)
        if kind is bytes:
            return {"$bytes": _base64(x)}
        if kind is complex:
            return {"$complex": [_float(x.real), _float(x.imag)]}
        if kind is self._ref_type:
            return {"$ref": _text(x.key, where)}
        if depth >= DEPTH_LIMIT:
            raise CaptureError(f"{where}: nested deeper than {DEPTH_LIMIT}, or holds itself", where=where)
        if kind is list:
            return self._items(x, where, depth)
        if kind is tuple:
            return {"$tuple": self._items(x, where, depth)}
        if kind is dict:
            if all(type(k) is str and not k.startswith("$") for k in x):
                return {_text(k, where): self.encode(v, f"{where}.{k}", depth + 1) for k, v in x.items()}
            return {"$map": self._pairs(x, where, depth)}
        if kind is OrderedDict:
            return {"$odict": self._pairs(x, where, depth)}
        if kind is Counter:
            return {"$counter": self._pairs(x, where, depth)}
        if kind is set or kind is frozenset:
            items = [self.encode(item, f"{where}{{…}}", depth + 1) for item in x]
            return {f"${kind.__name__}": sorted(items, key=canonical_bytes)}
        # By name, so that neither is imported for it: whoever holds such a value has imported it.
        if kind.__module__ == "torch" and kind.__qualname__ == "dtype":
            return {"$dtype": str(x).removeprefix("torch.")}
        if kind.__module__ == "torch" and kind.__qualname__ == "Size":
            return {"$size": [int(n) for n in x]}
        safe = safe_types.find(kind)
        if safe is not None:
            return {"$type": [safe.name, self.encode(_plain(safe, x, where), where, depth + 1)]}
        return self._numpy(x, kind, where)

    def _items(self, x: Iterable[Any], where: str, depth: int) -> list[Any]:
        # Numbers by themselves: python's generator has 625, and the place of each would be spelled for nothing.
        return [
            item if type(item) is int and item in _INT64 else self.encode(item, f"{where}[{i}]", depth + 1)
            for i, item in enumerate(x)
        ]

    def _pairs(self, x: Mapping[Any, Any], where: str, depth: int) -> list[Any]:
        pairs = []
        for k, v in x.items():
            at = f"{where}[{_brief(k)}]"
            pairs.append([self.encode(k, at, depth + 1), self.encode(v, at, depth + 1)])
        return pairs

    def _numpy(self, x: Any, kind: type, where: str) -> Any:
        np = sys.modules.get("numpy")
        if np is not None and (kind is np.ndarray or (issubclass(kind, np.generic) and kind is x.dtype.type)):
            # A scalar of text keeps trailing NULs that a dtype cannot tell of.
            if x.dtype.kind not in _NUMPY_KINDS or (kind is not np.ndarray and x.dtype.kind in "SU"):
                raise CaptureError(
                    f"{where}: a numpy value of dtype {x.dtype} cannot be saved without pickle; convert it to plain "
                    "numbers or text",
                    where=where,
                    type=str(x.dtype),
                )
            # An array by 0 dims would lose its shape in ascontiguousarray; tobytes() is row-major by itself.
            raw = np.asarray(x).astype(x.dtype.newbyteorder("<"), copy=False).tobytes()
            head = {"dtype": x.dtype.str}
            if kind is np.ndarray:
                return {"$ndarray": {**head, "shape": list(x.shape), "data": _base64(raw)}}
            return {"$npscalar": {**head, "data": _base64(raw)}}
        raise CaptureError(
            f"{where}: a value of type {kind.__module__}.{kind.__qualname__} cannot be saved exactly without pickle; "
            "leave it out, hold it as plain Python values, numpy arrays or tensors, or register the type with "
            "resilio.safe_types.register",
            where=where,
            type=f"{kind.__module__}.{kind.__qualname__}",
        )


class _Decoder:
    def __init__(self, ref_type: type | None) -> None:
        self._ref_type = ref_type
        self._tags: dict[str, Callable[[Any, str, int], Any]] = {
            "$tuple": lambda x, where, depth: tuple(self._items(x, where, depth)),
            "$map": self._map,
            "$odict": lambda x, where, depth: OrderedDict(self._map(x, where, depth)),
            "$counter": lambda x, where, depth: Counter(self._map(x, where, depth)),
            "$set": lambda x, where, depth: set(_spread(self._items(x, where, depth))),
            "$frozenset": lambda x, where, depth: frozenset(_spread(self._items(x, where, depth))),
            "$float": lambda x, where, depth: _from_float(x),
            "$complex": self._complex,
            "$int": lambda x, where, depth: int(_expect(x, str), 16),
            "$bytes": lambda x, where, depth: _from_base64(x),
            "$ndarray": lambda x, where, depth: _from_numpy(x, x["shape"]),
            "$npscalar": lambda x, where, depth: _from_numpy(x, [])[()],
            "$dtype": _from_dtype,
            "$size": lambda x, where, depth: _torch(where).Size([_dim(n) for n in _expect(x, list)]),
            "$type": self._typed,
        }
        if ref_type is not None:
            self._tags["$ref"] = lambda x, where, depth: ref_type(self._once(_expect(x, str), where))
        self._named: set[str] = set()

    def decode(self, x: Any, where: str, depth: int) -> Any:
        kind = type(x)
        if x is None or kind in (bool, int, float, str):
            return x
        if depth > DEPTH_LIMIT:
            raise FormatError(f"{where} is nested too deep for an encoded value", where=where)
        if kind is list:
            return self._items(x, where, depth)
        if kind is not dict or not all(type(k) is str for k in x):
            raise FormatError(f"{where} is no encoded value: {kind.__name__}", where=where)
        tag = next((k for k in x if k.startswith("$")), None)
        if tag is None:
            # Cut: a long name before many children would be copied once for each.
            return {k: self.decode(v, f"{where:.300}.{k:.80}", depth + 1) for k, v in x.items()}
        if len(x) != 1 or tag not in self._tags:
            raise FormatError(
                f"{where}: {[k[:40] for k in sorted(x)[:5]]} is no tag this resilio knows; it may be of a newer one",
                where=where,
                newer=True,
            )
        return self._tags[tag](x[tag], where, depth)

    def _items(self, x: Any, where: str, depth: int) -> list[Any]:
        return [self.decode(item, f"{where:.300}[{i}]", depth + 1) for i, item in enumerate(_expect(x, list))]

    def _once(self, key: str, where: str) -> str:
        if key in self._named:
            raise FormatError(f"{where:.300}: {key[:80]!r} is a leaf of it twice", where=where)
        self._named.add(key)
        return key

    def _map(self, x: Any, where: str, depth: int) -> dict[Any, Any]:
        pairs = [self._items(_expect(pair, list), where, depth) for pair in _expect(x, list)]
        _spread([key for key, _ in pairs])  # a pair of another length is a ValueError
        return dict(pairs)

    def _complex(self, x: Any, where: str, depth: int) -> complex:
        real, imag = self._items(x, where, depth)
        return complex(_expect(real, float), _expect(imag, float))

    def _typed(self, x: Any, where: str, depth: int) -> Any:
        name, data = _expect(x, list)
        safe = safe_types.named(_expect(name, str))
        if safe is None:
            raise UnknownTypeError(
                f"{where} is of the type {name[:200]!r}, which is not registered here, and nothing is imported because "
                "a checkpoint says so. Register it with resilio.safe_types.register before, or leave it out",
                where=where,
                type=name[:200],
            )
        value = self.decode(data, where, depth + 1)
        try:
            made = safe.decode(value)
            if safe.cls is not None and type(made) is not safe.cls:
                raise TypeError(f"what is registered made a {type(made).__name__}")
        except Exception as error:
            said = f"{where} is no {name}: {str(error)[:300]}"
            if safe.fixed:
                raise FormatError(said, where=where) from error
            # Saved by another version of the job sooner than damaged: an older checkpoint must not take its place.
            raise UnknownTypeError(
                f"{said}. It may have been saved by another version of the job, or of torch: go back to that, register "
                "what reads both, or leave it out",
                where=where,
                type=name,
            ) from error
        return made


def _plain(safe: safe_types.SafeType, x: Any, where: str) -> Any:
    try:
        return safe.encode(x)
    except Exception as error:
        raise CaptureError(f"{where}: a {safe.name} cannot be saved: {str(error)[:300]}", where=where) from error


def _spread(items: list[Any]) -> list[Any]:
    """`items`, as keys that a hash table can take in a time that grows with their number alone."""
    if len(items) - len({hash(item) for item in items}) > _SAME_HASH:
        raise ValueError("its keys share one hash, or are the same")
    return items


def _canonical(x: Any) -> Any:
    if type(x) is list:
        return [_canonical(item) for item in x]
    if type(x) is dict:
        if len(x) == 1 and ("$map" in x or "$counter" in x):
            ((tag, pairs),) = x.items()
            # by the whole pair: keys that are equal in Python but not here (two nans) still get one order
            return {tag: sorted(map(_canonical, pairs), key=msgspec.json.encode)}
        return {k: _canonical(x[k]) for k in sorted(x)}
    return x


def _brief(key: Any) -> str:
    """A dict's key for an error's path; its repr may be long, or an error of its own."""
    if type(key) in (str, float, bool) or (type(key) is int and key in _INT64):
        return repr(key)[:50]
    return type(key).__name__


def _text(x: str, where: str) -> str:
    try:
        x.encode()
    except UnicodeEncodeError as error:
        raise CaptureError(f"{where}: text that is not Unicode cannot be saved: {x!r}", where=where) from error
    return x


def _float(x: float) -> Any:
    if math.isfinite(x):
        return x
    bits = int.from_bytes(struct.pack(">d", x), "big")
    return {"$float": f"{bits:016x}" if math.isnan(x) and bits != _NAN_BITS else str(x)}


def _from_float(x: Any) -> float:
    if x in ("nan", "inf", "-inf"):
        return float(x)
    if len(_expect(x, str)) != 16:
        raise ValueError(f"$float of {x!r}")
    return float(struct.unpack(">d", bytes.fromhex(x))[0])


def _base64(raw: bytes) -> str:
    return base64.b64encode(raw).decode("ascii")


def _from_base64(x: Any) -> bytes:
    return base64.b64decode(_expect(x, str), validate=True)


def _from_numpy(x: Any, shape: Any) -> Any:
    import numpy as np  # only needed by those who have such values; `resilio ls` has none

    dtype = np.dtype(_expect(_expect(x, dict)["dtype"], str))
    if dtype.kind not in _NUMPY_KINDS or dtype.hasobject:
        raise ValueError(f"dtype {dtype}")
    dims = [_expect(n, int) for n in _expect(shape, list)]
    raw = _from_base64(x["data"])
    if min(dims, default=0) < 0 or math.prod(dims) * dtype.itemsize != len(raw) or len(raw) > _ARRAY_LIMIT:
        raise ValueError(f"{len(raw)} bytes for shape {dims} of {dtype}")
    array = np.empty(dims, dtype.newbyteorder("<"))
    if raw:
        array.reshape(-1).view(np.uint8)[:] = np.frombuffer(raw, np.uint8)
    return array.astype(dtype, copy=False)  # native and writable


def _from_dtype(x: Any, where: str, depth: int) -> Any:
    torch = _torch(where)
    found = vars(torch).get(_expect(x, str))  # getattr would import some of torch's modules by their names
    said = f"{where}: this torch has no dtype {x[:40]!r}"
    if found is None:
        raise UnknownTypeError(f"{said}; take the one that saved it, or leave it out", where=where, type="torch.dtype")
    if type(found) is not torch.dtype:
        raise FormatError(said, where=where)
    return found


def _dim(x: Any) -> int:
    if not 0 <= _expect(x, int) < 1 << 63:
        raise ValueError("a size is out of bounds")
    return int(x)


def _torch(where: str) -> Any:
    torch = sys.modules.get("torch")  # no import: this room answers without torch
    if torch is None:
        raise FormatError(f"{where} is a torch value; import torch before it is read", where=where)
    return torch


def _expect(x: Any, kind: type) -> Any:
    if type(x) is not kind:
        raise TypeError(f"{kind.__name__} expected, got {type(x).__name__}")
    return x
