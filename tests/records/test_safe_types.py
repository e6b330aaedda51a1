"""Types beyond Python's plain ones: stored under a name, made again only by what is registered in this process."""

from __future__ import annotations

import argparse
import dataclasses
import datetime
import decimal
import enum
import pathlib
import sys
import uuid
from collections import defaultdict, deque, namedtuple
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from resilio import safe_types
from resilio.errors import CaptureError, ConfigError, FormatError, UnknownTypeError
from resilio.records.values import canonical_bytes, decode_value, encode_value

Point = namedtuple("Point", "x y")


class Phase(enum.Enum):
    WARMUP = "warmup"
    DECAY = ("a", 1)


class Bits(enum.IntFlag):
    ONE = 1
    TWO = 2


class Level(enum.IntEnum):
    LOW = 1


@dataclasses.dataclass
class Config:
    lr: float
    betas: tuple[float, float]
    phase: Phase = Phase.WARMUP


@dataclasses.dataclass
class Derived:
    a: int
    b: int = dataclasses.field(init=False, default=0)


class Box:
    def __init__(self, inside: Any) -> None:
        self.inside = inside


@pytest.fixture(autouse=True)
def registered_types(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each test has what is there from the start."""
    monkeypatch.setattr(safe_types, "_by_name", dict(safe_types._by_name))
    monkeypatch.setattr(safe_types, "_by_type", dict(safe_types._by_type))


def through(value: Any) -> Any:
    import msgspec

    return decode_value(msgspec.json.decode(msgspec.json.encode(encode_value(value, "v"))), "v")


def same(a: Any, b: Any) -> bool:
    """In type and in all that a repr tells, which of these is everything but whether a UUID is safe."""
    if isinstance(a, uuid.UUID):
        return a == b and a.is_safe is b.is_safe
    return type(a) is type(b) and repr(a) == repr(b)


zones = st.one_of(
    st.none(),
    st.just(datetime.timezone.utc),
    st.builds(
        datetime.timezone,
        st.timedeltas(datetime.timedelta(hours=-23), datetime.timedelta(hours=23)),
        st.text(st.characters(exclude_categories=["Cs"]), max_size=4),
    ),
)
decimals = st.one_of(
    st.decimals(), st.sampled_from(["sNaN12", "-NaN7", "-0", "-0E-99", "1E+999999", "0.10"]).map(decimal.Decimal)
)
paths = st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\0"), max_size=12)
values = st.one_of(
    st.dates(),
    st.builds(lambda at, fold: at.replace(fold=fold), st.datetimes(timezones=zones), st.integers(0, 1)),
    st.builds(lambda at, fold: at.replace(fold=fold), st.times(timezones=zones), st.integers(0, 1)),
    st.timedeltas(),
    decimals,
    st.builds(
        lambda n, safe: uuid.UUID(int=n, is_safe=safe), st.integers(0, 2**128 - 1), st.sampled_from(uuid.SafeUUID)
    ),
    st.builds(range, st.integers(), st.integers(), st.integers(1, 9)),
    paths.map(pathlib.PurePosixPath),
    paths.map(pathlib.Path),
    paths.map(pathlib.PureWindowsPath),
)
nested = st.recursive(
    st.one_of(values, st.integers(), st.none()),
    lambda below: st.one_of(
        st.lists(below, max_size=3),
        st.builds(deque, st.lists(below, max_size=3), st.one_of(st.none(), st.integers(0, 4))),
        st.builds(
            defaultdict,
            st.sampled_from([None, int, list, dict, set, float]),
            st.dictionaries(st.one_of(st.text("ab$", max_size=3), st.dates()), below, max_size=3),
        ),
        st.builds(
            lambda items: argparse.Namespace(**items), st.dictionaries(st.text("ab$", max_size=3), below, max_size=3)
        ),
    ),
    max_leaves=6,
)


@settings(max_examples=200, deadline=None, derandomize=True, database=None)
@given(nested)
def test_what_is_there_from_the_start_comes_back_in_type_and_bits(value: Any) -> None:
    back = through(value)
    assert same(back, value), back
    assert canonical_bytes(encode_value(back, "v")) == canonical_bytes(encode_value(value, "v"))


@pytest.mark.parametrize(
    "value",
    [torch.device("cuda:3"), torch.device("cpu"), torch.strided, torch.sparse_coo, torch.channels_last, slice(1, None)],
    ids=str,
)
def test_those_of_torch_come_back(value: Any) -> None:
    assert type(through([value])[0]) is type(value) and through(value) == value


def test_what_cannot_come_back_as_it_was_is_refused_by_name() -> None:
    class MyDate(datetime.date):
        pass

    for value, said in (
        (defaultdict(lambda: 0), "default_factory"),
        (MyDate(2026, 1, 1), "MyDate"),
        (deque([object()]), "object"),
        (argparse.Namespace(model=torch.zeros(1)), "Tensor"),
        (pathlib.PurePosixPath("\udc80"), "Unicode"),
        (Phase.DECAY, "safe_types.register"),
    ):
        with pytest.raises(CaptureError, match=said):
            encode_value({"args": value}, "extra")


@pytest.mark.parametrize(
    "data",
    [
        ["datetime.date", [2026, 13, 1]],
        ["datetime.date", [2026, 1]],
        ["datetime.date", "2026"],
        ["datetime.datetime", [2026, 1, 1, 0, 0, 0, 0, 0, "UTC"]],
        ["datetime.datetime", [2026, 1, 1, 0, 0, 0, 0, 7, None]],
        ["datetime.timedelta", [10**12, 0, 0]],
        ["datetime.timezone", ["UTC"]],
        ["decimal.Decimal", "1.5x"],
        ["decimal.Decimal", 1.5],
        ["uuid.UUID", ["zz", 0]],
        ["uuid.UUID", ["0" * 32, 9]],
        ["collections.deque", [1, [1, 2]]],
        ["collections.deque", [-1, []]],
        ["collections.deque", [None, "abc"]],
        ["collections.defaultdict", ["os.system", {}]],
        ["collections.defaultdict", ["__import__", {}]],
        ["collections.defaultdict", [["int"], {}]],
        ["collections.defaultdict", ["int", []]],
        ["argparse.Namespace", [["a", 1]]],
        ["builtins.range", [1, 2, 0]],
        ["builtins.range", ["1", 2, 3]],
        ["pathlib.PosixPath", ["/", "etc"]],
        ["torch.device", "no such device"],
        ["torch.layout", "load"],
        ["torch.layout", "hub"],
        ["torch.memory_format", "float32"],
        ["datetime.date"],
        "datetime.date",
        [7, []],
    ],
    ids=repr,
)
def test_data_that_makes_none_is_a_format_error(data: Any) -> None:
    with pytest.raises(FormatError, match="v"):
        decode_value({"$type": data}, "v")


@pytest.mark.parametrize("name", ["os.system", "this.s", "antigravity.x", "torch.hub", "Phase", ""])
def test_a_name_that_nobody_registered_is_an_error_that_names_it_and_nothing_is_imported(name: str) -> None:
    before = set(sys.modules)
    with pytest.raises(UnknownTypeError, match=r"safe_types\.register") as caught:
        decode_value([{"$type": [name, "touch /tmp/x"]}], "extra")
    assert caught.value.facts == {"where": "extra[0]", "type": name}
    assert set(sys.modules) == before


def test_enums_tuples_with_names_and_dataclasses_need_no_functions() -> None:
    for cls in (Phase, Level, Bits, Point, Config):
        assert safe_types.register(cls) is cls
    value = {"a": [Phase.DECAY, Level.LOW, Bits.ONE | Bits.TWO], Phase.WARMUP: Point(1, (2,)), "c": Config(0.1, (1, 2))}
    back = through(value)
    assert back == value and type(back["c"]) is Config and type(back["a"][2]) is Bits
    assert encode_value(Phase.DECAY, "v") == {"$type": [f"{__name__}.Phase", "DECAY"]}
    for data in (["test.Phase", "DECAY"], [f"{__name__}.Phase", "GONE"], [f"{__name__}.Phase", "__class__"]):
        with pytest.raises(FormatError):
            decode_value({"$type": data}, "v")
    with pytest.raises(FormatError, match="fields"):
        decode_value({"$type": [f"{__name__}.Config", {"lr": 1.0, "__class__": 1}]}, "v")


def test_a_type_of_ones_own_is_stored_under_the_name_it_was_given() -> None:
    safe_types.register(Box, name="mine.Box", encode=lambda box: box.inside, decode=Box)
    assert encode_value(Box((1, 2)), "v") == {"$type": ["mine.Box", {"$tuple": [1, 2]}]}
    assert through(Box(deque([1]))).inside == deque([1])
    assert "mine.Box" in safe_types.names()
    safe_types.register(Box, name="mine.Box2", encode=lambda box: box.inside, decode=Box)
    assert "mine.Box" not in safe_types.names()
    safe_types.register(Box, encode=lambda box: box.inside, decode=lambda data: data)
    with pytest.raises(FormatError, match="made a int"):
        through(Box(1))


def test_a_function_that_fails_is_told_with_the_place() -> None:
    safe_types.register(Box, encode=lambda box: 1 / 0, decode=lambda data: Box(1 / 0))
    with pytest.raises(CaptureError, match=r"extra\.a.*division"):
        encode_value({"a": Box(1)}, "extra")
    with pytest.raises(FormatError, match=r"extra\.a.*division"):
        decode_value({"a": {"$type": [f"{__name__}.Box", 1]}}, "extra")
    loop = Box(None)
    loop.inside = loop
    safe_types.register(Box, encode=lambda box: [box.inside], decode=Box)
    with pytest.raises(CaptureError, match="holds itself"):
        encode_value(loop, "extra")


def test_what_cannot_be_registered_is_refused_and_says_why() -> None:
    class Local(enum.Enum):
        A = 1

    safe_types.register(Phase, name="phase")
    for call, said in (
        (lambda: safe_types.register(Local), "lies in a module"),
        (lambda: safe_types.register("Phase"), "lies in a module"),  # type: ignore[arg-type]
        (lambda: safe_types.register(Box), "encode= and decode="),
        (lambda: safe_types.register(Derived), "encode= and decode="),
        (lambda: safe_types.register(Box, encode=repr), "both"),
        (lambda: safe_types.register(Level, name="phase"), r"both .*Phase and .*Level"),
        (lambda: safe_types.register(Level, name="datetime.date"), "both resilio|both datetime"),
        (
            lambda: safe_types.register(datetime.date, encode=str, decode=datetime.date.fromisoformat),
            "by resilio itself",
        ),
        (lambda: safe_types.register(dict, encode=str, decode=eval), "by resilio itself"),
        (lambda: safe_types.register(torch.device, encode=str, decode=torch.device), "by resilio itself"),
        (lambda: safe_types.register(Level, name="a\n"), "no name"),
        (lambda: safe_types.register(Level, name="x" * 201), "no name"),
        (lambda: safe_types.register(Level, name=""), "no name"),
    ):
        with pytest.raises(ConfigError, match=said):
            call()
