"""Policies are read back from what they print, and from nothing else."""

from __future__ import annotations

import contextlib
import sys
from dataclasses import dataclass
from functools import reduce
from operator import and_, or_
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from resilio.errors import ConfigError
from resilio.policies import (
    PolicyRegistry,
    SaveContext,
    SavePolicy,
    keep_all,
    keep_best,
    keep_every,
    keep_healthy,
    keep_last,
    keep_within,
    parse,
    save_at,
    save_every,
    save_on_signal,
)

numbers = st.integers(1, 10**12)
units = st.dictionaries(
    st.sampled_from(["days", "hours", "minutes", "seconds"]),
    st.one_of(st.integers(1, 10**6), st.floats(1e-6, 1e300)),
    min_size=1,
)


def tree(leaves: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    return st.recursive(
        leaves,
        lambda inner: st.builds(reduce, st.sampled_from([or_, and_]), st.lists(inner, min_size=1, max_size=3)),
        max_leaves=12,
    )


save_policies = tree(
    st.one_of(
        numbers.map(save_every),
        units.map(lambda said: save_every(**said)),
        st.lists(numbers, min_size=1, max_size=4).map(lambda steps: save_at(*steps)),
        st.sets(st.sampled_from(["SIGTERM", "SIGINT", "SIGUSR1"]), min_size=1).map(lambda n: save_on_signal(*n)),
    )
)
keep_policies = tree(
    st.one_of(
        st.just(keep_all()),
        numbers.map(keep_last),
        numbers.map(keep_healthy),
        numbers.map(keep_every),
        units.map(lambda said: keep_every(**said)),
        units.map(lambda said: keep_within(**said)),
        st.builds(keep_best, numbers, st.text(min_size=1, max_size=20), mode=st.sampled_from(["min", "max"])),
    )
)


@settings(deadline=None)
@given(save_policies | keep_policies)
def test_what_a_policy_prints_is_read_back_as_its_equal(policy: Any) -> None:
    again = parse(repr(policy))
    assert again == policy
    assert hash(again) == hash(policy)
    assert repr(again) == repr(policy)


@pytest.mark.parametrize(
    ("text", "policy"),
    [
        ("save_every(500)", save_every(500)),
        ("  ( save_every( 1_000 ) )  ", save_every(1000)),
        ('save_on_signal("SIGTERM", "SIGUSR1")', save_on_signal("SIGUSR1", "SIGTERM")),
        ("save_every(hours=1, minutes=30)", save_every(minutes=90)),
        ("save_at(1) | save_at(2) & save_at(3)", save_at(1) | (save_at(2) & save_at(3))),
        ("(save_at(1) | save_at(2)) & save_at(3)", (save_at(1) | save_at(2)) & save_at(3)),
        ("keep_last(n=3) | keep_best(2, metric='#', mode='max')", keep_last(3) | keep_best(2, "#", mode="max")),
        (" | ".join(["keep_all()"] * 300), reduce(or_, [keep_all()] * 300)),
    ],
)
def test_people_write_it_so(text: str, policy: Any) -> None:
    assert parse(text) == policy


@pytest.mark.parametrize(
    ("text", "message", "column"),
    [
        ("", "no policy", 1),
        ("5", "a policy is a call", 1),
        ("save_every", "a policy is a call", 1),
        ("save_every(500", "no policy", 11),
        ("save_every(500) save_at(3)", "no policy", None),
        ("save_evry(500)", "no such policy", 1),
        ("keep_best(2, 'é') | keep_lst(3)", "no such policy", 21),
        ("save_every(500) | save_every(0)", "at least 1, not 0", 19),
        ("save_every(-5)", "not -5", 1),
        ("save_every(--5)", "number or a string", 12),
        ("save_every(+5)", "number or a string", 12),
        ("keep_best(2, -'x')", "number or a string", 14),
        ("save_every(minutes=1e999)", "finite", 1),
        ("save_every(steps=True)", "number or a string", 18),
        ("save_every(None)", "number or a string", 12),
        ("keep_best(2, b'loss')", "number or a string", 14),
        ("keep_best(2, f'loss')", "number or a string", 14),
        ("save_every(2 * 3)", "number or a string", 12),
        ("save_every(int('5'))", "number or a string", 12),
        ("save_at(*[1, 2])", "number or a string", 9),
        ("save_every(**{'minutes': 1})", "one by one", 14),
        ("save_every(minutes=1, minutes=2)", "each once", 31),
        ("save_every(weeks=2)", "weeks", 1),
        ("keep_last()", "keep_last", 1),
        ("save_every(1)(2)", "no such policy", 1),
        ("a.save_every(1)", "no such policy", 1),
        ("__import__('os').abort()", "no such policy", 1),
        ("save_every(1) + save_every(2)", "a policy is a call", 1),
        ("save_every(1) or save_every(2)", "a policy is a call", 1),
        ("~save_every(1)", "a policy is a call", 1),
        ("lambda: save_every(1)", "a policy is a call", 1),
        ("[keep_all() for keep_all in ()]", "a policy is a call", 1),
        ("keep_all() | save_every(1) | keep_last(3)", "cannot be joined", 1),
        ("keep_last(3) # | keep_all()", "comment", 13),
        ("keep_last(3)\x00", "no policy", 1),
        ("keep_best(2, '\ud800')", "no policy", 1),
        ("(" * 300, "no policy", None),
        ("-" * 4095 + "1", "no policy", None),
        ("keep_all() & (keep_all() | " * 20 + "keep_all()" + ")" * 20, "nested", None),
    ],
)
def test_anything_else_is_refused_where_it_is(text: str, message: str, column: int | None) -> None:
    with pytest.raises(ConfigError, match=message) as caught:
        parse(text)
    assert column in (None, caught.value.column)  # type: ignore[attr-defined]
    assert str(caught.value).endswith("Known policies: " + ", ".join(PolicyRegistry().names()) + ".")
    assert len(str(caught.value)) < 500


@pytest.mark.parametrize(
    "text", ["keep_all()\n| keep_last(3)", "keep_all()" + " " * 5000 + "|keep_all()", None, 3, b"keep_all()"]
)
def test_it_is_one_line_of_bounded_text(text: Any) -> None:
    with pytest.raises(ConfigError, match="a policy"):
        parse(text)


def test_trees_are_bounded_and_chains_are_not() -> None:
    policy = keep_last(1)
    for n in range(40):
        policy = (policy & keep_last(2)) if n % 2 else (policy | keep_last(3))
    with pytest.raises(ConfigError, match="deep"):
        parse(repr(policy))


@settings(deadline=None)
@given(st.text(max_size=60) | st.text("savekp_lt(1)|& ,='-\"", max_size=60))
def test_no_text_does_more_than_be_refused(text: str) -> None:
    with contextlib.suppress(ConfigError):
        parse(text)


@dataclass(frozen=True)
class save_prime(SavePolicy):
    least: int = 2

    def reason(self, context: SaveContext) -> str | None:
        return None


def test_others_register_theirs() -> None:
    registry = PolicyRegistry()
    registry.register("save_prime", save_prime, owner="plugin 'prime'")
    policy = save_every(5) | save_prime(7)
    assert registry.parse(repr(policy)) == policy
    assert registry.names()["save_prime"] == "plugin 'prime'"
    with pytest.raises(ConfigError, match="no such policy"):
        parse(repr(policy))  # a registry of its own
    with pytest.raises(ConfigError, match=r"most.*at column 1"):
        registry.parse("save_prime(1, most=2)")


@pytest.mark.parametrize("name", ["save_every", "save_prime"])
def test_a_name_has_one_owner(name: str) -> None:
    registry = PolicyRegistry()
    registry.register("save_prime", save_prime, owner="first")
    with pytest.raises(ConfigError, match=r"both (first|resilio) and second offer"):
        registry.register(name, save_prime, owner="second")


@pytest.mark.parametrize("name", ["", "save prime", "a.b", "class", "ﬁ", "3"])
def test_a_name_is_one_that_can_be_written(name: str) -> None:
    with pytest.raises(ConfigError, match="no name"):
        PolicyRegistry().register(name, save_prime, owner="me")


def test_what_makes_no_policy_is_named() -> None:
    registry = PolicyRegistry()
    registry.register("save_broken", lambda: sys, owner="plugin 'broken'")  # type: ignore[arg-type,return-value]
    with pytest.raises(ConfigError, match=r"save_broken of plugin 'broken' made module"):
        registry.parse("save_broken()")
