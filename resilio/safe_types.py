"""Types that a value in a checkpoint may be of, beyond Python's plain ones: a name on storage, and two functions.

Nothing is ever imported or called because a stored name says so: a name that is not registered here is an error that
names it. Register what a stranger's data may safely be made into: `decode` is given whatever stands there.

::

    class Phase(enum.Enum):
        WARMUP = "warmup"
        DECAY = "decay"

    resilio.safe_types.register(Phase, name="myjob.Phase")

Registered types are also taken from checkpoints of plain DCP and files of `torch.save`, where they lie as pickles:
there making one calls the class, and sets its state, with whatever stands there.
"""

from __future__ import annotations

import argparse
import dataclasses
import datetime
import decimal
import enum
import pathlib
import sys
import uuid
from collections import defaultdict, deque
from collections.abc import Callable
from typing import Any, NamedTuple, TypeVar

from .errors import ConfigError

__all__ = ["classes", "find", "named", "names", "register"]

T = TypeVar("T")
_NAME_LIMIT = 200  # characters


class SafeType(NamedTuple):
    """A registered type: see `register`."""

    name: str
    cls: type[Any] | None  # None: one of torch's, which is not imported for it
    encode: Callable[[Any], Any]
    decode: Callable[[Any], Any]

    @property
    def fixed(self) -> bool:
        """Whether it is made of the same data in every process: it changes with no release of a job or of torch."""
        return self.cls is not None and self.name in _OURS


def register(
    cls: type[T],
    *,
    name: str | None = None,
    encode: Callable[[T], Any] | None = None,
    decode: Callable[[Any], T] | None = None,
) -> type[T]:
    """Let values of exactly the type `cls` be saved and restored, in this process; call it on every rank.

    Enums are stored by the name of the member, namedtuples and dataclasses by their fields; for other types give
    `encode` and `decode`. Registering the same class again replaces it.

    Args:
        cls: the class; subclasses are other types. Importable by its name, since plain DCP's copy of a value is a
            pickle.
        name: what it is called on storage, for ever; by default its module and name. Give one where those may change
            (``__main__``).
        encode: from an instance to plain Python values, or values of other registered types.
        decode: from those to an instance. It is given data from outside: it raises for what is none.

    Returns:
        `cls`, so that it can be a decorator.

    Raises:
        ConfigError: another class has that name, or `cls` is stored by resilio itself, or it is none to register.
    """
    if not isinstance(cls, type) or "<locals>" in cls.__qualname__:
        raise ConfigError(f"{cls!r:.200}: register a class that lies in a module, where pickle finds it by its name")
    said = f"{cls.__module__}.{cls.__qualname__}"
    name = said if name is None else name
    if not isinstance(name, str) or not 0 < len(name) <= _NAME_LIMIT or not name.isprintable():
        raise ConfigError(f"{name!r:.100} is no name for {said}: give 1 to {_NAME_LIMIT} printable characters")
    if encode is None and decode is None:
        encode, decode = _by_fields(cls, said)
    if not callable(encode) or not callable(decode):
        raise ConfigError(f"{said}: give both encode and decode")
    owner, known = named(name), find(cls)
    if cls in _PLAIN or (known is not None and known.name in _OURS):
        raise ConfigError(f"{said} is stored by resilio itself; nothing needs to be registered for it")
    if name in _OURS or (owner is not None and owner.cls is not cls):
        whose = f"{owner.cls.__module__}.{owner.cls.__qualname__}" if owner and owner.cls else "resilio"
        raise ConfigError(f"both {whose} and {said} would be stored as {name!r}: give another name=", name=name)
    if known is not None:
        del _by_name[known.name]
    _by_name[name] = _by_type[cls] = SafeType(name, cls, encode, decode)
    return cls


def find(cls: type[Any]) -> SafeType | None:
    """How values of exactly this type are stored; None if it is not registered."""
    found = _by_type.get(cls)
    if found is None and cls.__module__ == "torch":  # by name, so that torch is not imported for it
        found = _by_name.get(f"torch.{cls.__qualname__}")
    return found


def named(name: str) -> SafeType | None:
    """The type that is stored under `name`; None if nothing of that name is registered."""
    return _by_name.get(name)


def names() -> tuple[str, ...]:
    """The names of all registered types, sorted; those of resilio are among them."""
    return tuple(sorted(_by_name))


def classes() -> tuple[type[Any], ...]:
    """The classes that may be made of what is in somebody else's pickle."""
    return (*_by_type, uuid.SafeUUID)


# ------------------------------------------------------------------------------------------------------- by themselves


def _by_fields(cls: type[Any], said: str) -> tuple[Callable[[Any], Any], Callable[[Any], Any]]:
    if issubclass(cls, enum.Enum):
        if issubclass(cls, enum.Flag):
            return lambda x: x.value, lambda data: cls(_a(data, int))
        return lambda x: x.name, lambda data: cls.__members__[_a(data, str)]
    if issubclass(cls, tuple) and hasattr(cls, "_fields"):
        return lambda x: dict(zip(cls._fields, x, strict=True)), lambda data: cls(**_exactly(data, cls._fields))
    if dataclasses.is_dataclass(cls):
        fields = tuple(field.name for field in dataclasses.fields(cls))
        if all(field.init for field in dataclasses.fields(cls)):
            return lambda x: {key: getattr(x, key) for key in fields}, lambda data: cls(**_exactly(data, fields))
    raise ConfigError(
        f"{said} is no enum, namedtuple or dataclass all of whose fields are arguments: give encode= and decode="
    )


def _exactly(data: Any, fields: tuple[str, ...]) -> dict[str, Any]:
    if set(_a(data, dict)) != set(fields):
        raise ValueError(f"the fields {sorted(data)[:9]} are not {sorted(fields)[:9]}")
    return dict(data)


def _a(data: Any, kind: type[T]) -> T:
    if type(data) is not kind:
        raise TypeError(f"{kind.__name__} expected, got {type(data).__name__}")
    return data


# ---------------------------------------------------------------------------------------- what is there from the start


def _from_torch(kind: str) -> Callable[[Any], Any]:
    def decode(data: Any) -> Any:
        torch = sys.modules.get("torch")  # no import: `resilio ls` answers without it
        if torch is None:
            raise ValueError("import torch before it is read")
        made = torch.device(_a(data, str)) if kind == "device" else vars(torch)[_a(data, str)]
        return _a(made, getattr(torch, kind))

    return decode


# What makes the values of a defaultdict that are not there. Any other function would have to be imported by a name.
_FACTORIES: dict[str, Any] = {f.__name__: f for f in (int, float, complex, bool, str, bytes, list, tuple, dict, set)}


def _factory(made: defaultdict[Any, Any]) -> str | None:
    if made.default_factory is None:
        return None
    for name, factory in _FACTORIES.items():
        if factory is made.default_factory:
            return name
    raise TypeError(f"its default_factory is {made.default_factory!r:.80}, none of {', '.join(_FACTORIES)}")


def _deque(data: Any) -> deque[Any]:
    longest, items = data
    if len(_a(items, list)) > (len(items) if longest is None else _a(longest, int)):
        raise ValueError("it has more items than it takes")
    return deque(items, longest)


def _namespace(data: Any) -> argparse.Namespace:
    made = argparse.Namespace()
    made.__dict__.update({_a(key, str): value for key, value in _a(data, dict).items()})
    return made


def _when(x: Any) -> list[Any]:
    return [x.hour, x.minute, x.second, x.microsecond, x.fold, x.tzinfo]


def _with_zone(make: Callable[..., T], numbers: int) -> Callable[[Any], T]:
    def decode(data: Any) -> T:
        *first, fold, zone = _a(data, list)
        if len(first) != numbers or not isinstance(zone, datetime.timezone | None):
            raise ValueError("it has other parts")
        return make(*(_a(one, int) for one in first), zone, fold=_a(fold, int))

    return decode


def _integers(make: Callable[..., T]) -> Callable[[Any], T]:
    return lambda data: make(*(_a(one, int) for one in _a(data, list)))


def _path(cls: type[pathlib.PurePath]) -> SafeType:
    return SafeType(f"pathlib.{cls.__name__}", cls, str, lambda data: cls(_a(data, str)))


_PLAIN = (bool, int, float, str, bytes, complex, list, tuple, dict, set, frozenset, type(None))
_OURS: dict[str, SafeType] = {
    one.name: one
    for one in (
        SafeType("argparse.Namespace", argparse.Namespace, lambda x: dict(vars(x)), _namespace),
        SafeType("builtins.range", range, lambda x: [x.start, x.stop, x.step], _integers(range)),
        SafeType("builtins.slice", slice, lambda x: [x.start, x.stop, x.step], lambda data: slice(*_a(data, list))),
        SafeType("collections.deque", deque, lambda x: [x.maxlen, list(x)], _deque),
        SafeType(
            "collections.defaultdict",
            defaultdict,
            lambda x: [_factory(x), dict(x)],
            lambda data: defaultdict(None if data[0] is None else _FACTORIES[data[0]], _a(data[1], dict)),
        ),
        SafeType("datetime.date", datetime.date, lambda x: [x.year, x.month, x.day], _integers(datetime.date)),
        SafeType("datetime.time", datetime.time, _when, _with_zone(datetime.time, 4)),
        SafeType(
            "datetime.datetime",
            datetime.datetime,
            lambda x: [x.year, x.month, x.day, *_when(x)],
            _with_zone(datetime.datetime, 7),
        ),
        SafeType(
            "datetime.timedelta",
            datetime.timedelta,
            lambda x: [x.days, x.seconds, x.microseconds],
            _integers(datetime.timedelta),
        ),
        SafeType(
            "datetime.timezone",
            datetime.timezone,
            lambda x: list(x.__getinitargs__()),
            lambda data: datetime.timezone(*_a(data, list)),
        ),
        SafeType("decimal.Decimal", decimal.Decimal, str, lambda data: decimal.Decimal(_a(data, str))),
        SafeType(
            "uuid.UUID",
            uuid.UUID,
            lambda x: [x.hex, x.is_safe.value],
            lambda data: uuid.UUID(_a(data[0], str), is_safe=uuid.SafeUUID(data[1])),
        ),
        *(_path(cls) for cls in (pathlib.PurePosixPath, pathlib.PureWindowsPath, type(pathlib.Path()))),
        *(
            SafeType(f"torch.{kind}", None, lambda x: str(x).removeprefix("torch."), _from_torch(kind))
            for kind in ("device", "layout", "memory_format")
        ),
    )
}
_by_name: dict[str, SafeType] = dict(_OURS)
_by_type: dict[type[Any], SafeType] = {one.cls: one for one in _OURS.values() if one.cls is not None}
