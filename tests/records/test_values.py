from __future__ import annotations

import enum
import math
import random
import struct
from collections import Counter, OrderedDict, namedtuple
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from resilio.errors import CaptureError, FormatError
from resilio.records import schema
from resilio.records.values import (
    DEPTH_LIMIT,
    canonical_bytes,
    decode_metrics,
    decode_value,
    encode_metrics,
    encode_value,
)
from resilio.state.flat import Ref


def same(a: Any, b: Any) -> bool:
    """Equal in type, order and bits, all the way down."""
    if type(a) is not type(b):
        return False
    if isinstance(a, float):
        return struct.pack(">d", a) == struct.pack(">d", b)
    if isinstance(a, complex):
        return same(a.real, b.real) and same(a.imag, b.imag)
    if isinstance(a, (list, tuple)):
        return len(a) == len(b) and all(map(same, a, b))
    if isinstance(a, dict):
        return same(list(a.items()), list(b.items()))
    if isinstance(a, (set, frozenset)):
        # by canonical bytes of the elements: a nan is never equal to another
        return sorted(canonical_bytes(encode_value(x, "x")) for x in a) == sorted(
            canonical_bytes(encode_value(x, "x")) for x in b
        )
    if isinstance(a, np.ndarray):
        return a.dtype.str == b.dtype.str and a.shape == b.shape and a.tobytes() == b.tobytes()
    if isinstance(a, np.generic):
        return a.dtype == b.dtype and a.tobytes() == b.tobytes()
    return bool(a == b)


def through_storage(value: Any, ref_type: type | None = None) -> Any:
    """Encoded, stored in a manifest part, read back, decoded."""
    part = schema.ManifestPart(
        format=1, rank=0, objects=[], tensors={}, values={"x": encode_value(value, "x", ref_type)}
    )
    back = schema.decode(schema.encode(part), schema.ManifestPart, "part").values["x"]
    return decode_value(back, "x", ref_type)


bits = st.integers(0, 2**64 - 1).map(lambda n: struct.unpack(">d", n.to_bytes(8, "big"))[0])
text = st.text(st.characters(exclude_categories=["Cs"]), max_size=8)
floats = st.one_of(bits, st.floats())
hashables = st.recursive(
    st.one_of(st.none(), st.booleans(), st.integers(), floats, text, st.binary(max_size=9), st.complex_numbers()),
    lambda inner: st.one_of(st.tuples(inner, inner), st.frozensets(inner, max_size=3)),
    max_leaves=4,
)
arrays = st.builds(
    lambda dtype, shape, seed: np.frombuffer(
        random.Random(seed).randbytes(int(np.prod(shape)) * np.dtype(dtype).itemsize), dtype
    ).reshape(shape),
    st.sampled_from(["<f4", ">f8", "<i8", "u1", "<c8", ">u2", "<f2", "<M8[ns]"]),
    st.lists(st.integers(0, 3), max_size=3),
    st.integers(0, 999),
)
values = st.recursive(
    st.one_of(hashables, st.sets(hashables, max_size=3), arrays),
    lambda inner: st.one_of(
        st.lists(inner, max_size=3),
        st.lists(inner, max_size=3).map(tuple),
        st.dictionaries(text, inner, max_size=3),
        st.dictionaries(st.sampled_from(["$", "$ref", "$tuple", "$map", "a"]), inner, max_size=2),
        st.dictionaries(hashables, inner, max_size=3),
        st.dictionaries(hashables, inner, max_size=3).map(OrderedDict),
        st.dictionaries(hashables, st.integers(), max_size=3).map(Counter),
    ),
    max_leaves=12,
)


@settings(max_examples=150, deadline=None)
@given(values)
def test_every_value_comes_back_in_type_order_and_bits(value: Any):
    assert same(value, through_storage(value))


@pytest.mark.parametrize(
    "value",
    [
        -0.0,
        0.0,
        1,
        1.0,
        True,
        float("nan"),
        -float("nan"),
        math.inf,
        -math.inf,
        struct.unpack(">d", bytes.fromhex("7ff0000000000001"))[0],
        5e-324,
        1e308,
        2**63 - 1,
        -(2**63),
        2**63,
        -(2**63) - 1,
        2**64,
        10**5000,
        -(10**5000),
        "",
        b"",
        [],
        (),
        {},
        set(),
        frozenset(),
        OrderedDict(),
        Counter(),
        [[], ((),), {"a": {}}],
        {"b": 1, "a": 2},
        {1: "x", "1": "y"},
        {True: 1},
        {(1, 2): 3},
        {None: 0},
        {"$tuple": [1]},
        {"$": 1},
        Counter({30: 1, 80: 2}),
        OrderedDict([("z", 1), ("a", 2)]),
        complex(float("nan"), -0.0),
        np.float32(1.5),
        np.int64(-3),
        np.bool_(True),
        np.array(7.0),
        np.zeros((0, 3), np.int16),
        np.array(["a", "bcd"]),
        np.asfortranarray(np.arange(6.0).reshape(2, 3)),
        np.datetime64("2026-01-02"),
        np.array([np.nan, -0.0], np.float16),
        "\x00\u2028😀",
    ],
    ids=lambda value: type(value).__name__,
)
def test_values_that_are_easily_lost_come_back(value: Any):
    assert same(value, through_storage(value))


def test_generator_states_come_back():
    for state in (random.getstate(), np.random.get_state(), np.random.default_rng(3).bit_generator.state):
        assert same(state, through_storage(state))


def test_torch_dtypes_and_sizes_come_back():
    value = {"dtype": torch.bfloat16, "shape": torch.Size([2, 3])}
    back = through_storage(value)
    assert back["dtype"] is torch.bfloat16
    assert type(back["shape"]) is torch.Size
    assert back == value


def test_arrays_come_back_writable():
    back = through_storage(np.arange(3))
    back[0] = 9
    assert back[0] == 9


def test_trees_have_leaves_of_the_type_the_caller_names():
    tree = {"model": {"w": Ref("model.w")}, "list": [Ref("a"), (Ref("b"),)]}
    assert encode_value(tree, "t", ref_type=Ref)["model"] == {"w": {"$ref": "model.w"}}
    assert through_storage(tree, ref_type=Ref) == tree
    with pytest.raises(CaptureError, match="Ref"):
        encode_value(tree, "t")
    with pytest.raises(FormatError):
        decode_value({"$ref": "a"}, "t")


class Color(enum.IntEnum):
    RED = 1


class MyStr(str):
    pass


Point = namedtuple("Point", "x y")


@pytest.mark.parametrize(
    ("value", "kind"),
    [
        (Color.RED, "Color"),
        (MyStr("x"), "MyStr"),
        (Point(1, 2), "Point"),
        (lambda: 0, "function"),
        (object(), "object"),
        (bytearray(b"x"), "bytearray"),
        (np.array([object()]), "object"),
        (np.zeros(2, [("a", "f4")]), "a"),
        (np.str_("x"), "U"),
        (torch.zeros(2), "Tensor"),
        (memoryview(b"x"), "memoryview"),
    ],
    ids=lambda v: type(v).__name__,
)
def test_other_types_are_refused_by_name_and_path(value: Any, kind: str):
    with pytest.raises(CaptureError, match=kind) as caught:
        encode_value({"foo": [0, (1, 2, value)]}, "scheduler")
    assert str(caught.value).startswith("scheduler.foo[1][2]: ")


def test_a_structure_that_holds_itself_is_refused():
    loop: list[Any] = []
    loop.append(loop)
    with pytest.raises(CaptureError, match="holds itself"):
        encode_value(loop, "x")


@pytest.mark.parametrize("wrap", [lambda x: [x], lambda x: (x,), lambda x: {"a": x}, lambda x: {1: x}])
def test_nesting_up_to_the_limit_comes_back_and_one_deeper_is_refused(wrap):
    value: Any = float("inf")
    for _ in range(DEPTH_LIMIT):
        value = wrap(value)
    assert through_storage(value) == value
    canonical_bytes(encode_value(value, "x"))
    with pytest.raises(CaptureError):
        encode_value(wrap(value), "x")


def test_text_that_is_not_unicode_is_refused():
    for value in ("\udc80", {"\udc80": 1}):
        with pytest.raises(CaptureError, match="Unicode"):
            encode_value(value, "x")


@pytest.mark.parametrize(
    "data",
    [
        {"$pickle": "gASVAAAA"},
        {"$tuple": [1], "x": 2},
        {"$tuple": 1},
        {"$map": [[1]]},
        {"$map": [[[1], 2]]},
        {"$map": {}},
        {"$set": [[1]]},
        {"$float": "1.5"},
        {"$float": 1},
        {"$float": "zzzzzzzzzzzzzzzz"},
        {"$complex": [1.0]},
        {"$complex": [1, 2]},
        {"$int": "ten"},
        {"$int": 3},
        {"$bytes": "%%%"},
        {"$bytes": 3},
        {"$ndarray": {"dtype": "O", "shape": [1], "data": "AAAAAAAAAAA="}},
        {"$ndarray": {"dtype": "<f4", "shape": [2], "data": "AAAA"}},
        {"$ndarray": {"dtype": "<f4", "shape": [-1], "data": ""}},
        {"$ndarray": {"dtype": "<f4", "shape": [1 << 40], "data": ""}},
        {"$ndarray": {"dtype": "nonsense", "shape": [], "data": ""}},
        {"$ndarray": {"dtype": "f4,f4", "shape": [], "data": "AAAAAAAAAAA="}},
        {"$ndarray": []},
        {"$npscalar": {"dtype": "<f4"}},
        {"$dtype": "load"},
        {"$dtype": "no_such"},
        {"$size": [1.5]},
        {"$counter": [[1, 2, 3]]},
        {1: 2},
        pytest.param(object(), id="object()"),
    ],
    ids=repr,
)
def test_malformed_data_is_a_format_error(data: Any):
    with pytest.raises(FormatError, match="w"):
        decode_value(data, "w")


def test_data_nested_too_deep_is_a_format_error():
    data: Any = 1
    for _ in range(5000):
        data = [data]
    with pytest.raises(FormatError, match="deep"):
        decode_value(data, "w")


def test_canonical_bytes_follow_equality():
    def canon(value: Any) -> bytes:
        return canonical_bytes(encode_value(value, "x"))

    assert canon({"a": 1, "b": {"d": 1, "c": 2}}) == canon({"b": {"c": 2, "d": 1}, "a": 1})
    assert canon({1: 2, 3: 4}) == canon({3: 4, 1: 2})
    assert canon(Counter({1: 2, 3: 4})) == canon(Counter({3: 4, 1: 2}))
    assert canon({"s", "t", 3}) == canon({3, "t", "s"})
    assert canon(OrderedDict(a=1, b=2)) != canon(OrderedDict(b=2, a=1))
    different = [
        1,
        1.0,
        True,
        "1",
        b"1",
        None,
        [1],
        (1,),
        {1},
        frozenset({1}),
        0.0,
        -0.0,
        math.nan,
        -math.nan,
        np.float32(1),
        np.float64(1),
        np.array(1.0),
        [],
        (),
        {},
    ]
    assert len({canon(value) for value in different}) == len(different)


def test_metrics_survive_json_also_if_they_are_no_numbers():
    metrics = {"loss": math.nan, "a": math.inf, "b": -math.inf, "c": 0.25, "n": 3}
    back = decode_metrics(msgspec.json.decode(msgspec.json.encode(encode_metrics(metrics))), "x")
    assert same(back, {"loss": math.nan, "a": math.inf, "b": -math.inf, "c": 0.25, "n": 3.0})
    with pytest.raises(FormatError):
        decode_metrics({"a": "fast"}, "x")
