"""Many findings in one error: each once, in one order, and no more than can be carried."""

from __future__ import annotations

import pickle

from resilio.errors import FormatError, IntegrityError
from resilio.records.digests import BLOCK_SIZE, append_block_digests, bad_blocks
from resilio.records.problems import bad_blocks_of, joined, merged, problems_of
from resilio.types import Damage


def missing(key: str) -> IntegrityError:
    return IntegrityError(f"memory://x: {key} is missing", where=key, missing=True)


def test_one_problem_stays_the_error_that_it_is():
    error = joined([FormatError("no such record", where="a")], "run")
    assert type(error) is FormatError
    assert (str(error), error.where) == ("no such record", "a")
    assert error.problems == [Damage("a", "no such record")]


def test_several_are_listed_each_once_by_place_with_their_facts_and_pickle():
    error = joined([missing("b"), missing("a"), missing("b"), IntegrityError("c is cut", where="c")], "run")
    assert isinstance(error, IntegrityError)
    assert [(one.where, one.facts.get("missing")) for one in error.problems] == [("a", True), ("b", True), ("c", None)]
    assert str(error).splitlines()[0] == "run: 3 problems:"
    assert "a is missing" in str(error) and "c is cut" in str(error)
    again = pickle.loads(pickle.dumps(error))
    assert (str(again), again.problems) == (str(error), error.problems)


def test_joined_again_as_ranks_do_it_nothing_is_lost_or_told_twice():
    first = joined([missing("a"), missing("b")], "run")
    assert [one.where for one in joined([first, missing("b"), missing("c")], "run").problems] == ["a", "b", "c"]


def test_blocks_of_one_piece_that_ranks_saw_apart_are_one_problem():
    one, other = bad_blocks_of("k", "w", 64, [3, 1]), bad_blocks_of("k", "w", 64, [2])
    elsewhere = bad_blocks_of("k", "w", 0, [0])
    found = merged([one, other, elsewhere])
    assert [(one.facts["at"], one.facts["blocks"]) for one in found] == [(0, [0]), (64, [1, 2, 3])]
    assert "blocks 1, 2, 3" in found[1].what
    errors = [IntegrityError(str(part), where="k", problems=[part]) for part in (one, other)]
    assert "blocks 1, 2, 3" in str(joined(errors, "run"))


def test_what_is_carried_and_shown_is_bounded_and_the_rest_is_counted():
    part = [missing(f"{number:05d}") for number in range(700)]
    two = [joined(part[:600], "run", 500), joined(part[400:], "run", 500)]
    assert [(len(error.problems), error.more) for error in two] == [(500, 100), (300, 0)]
    both = joined(two, "run", 100)
    assert len(both.problems) == 100 and both.more >= 600 and len(str(both)) < 2000
    assert str(both).splitlines()[-1].strip().startswith("and ")
    assert len(bad_blocks_of("k", "w", 0, range(10_000)).facts["blocks"]) == 100


def test_an_error_without_a_list_is_its_own_problem():
    assert problems_of(missing("a")) == [Damage("a", "memory://x: a is missing", {"missing": True})]


def test_every_bad_block_is_found_and_no_other():
    data = bytearray(3 * BLOCK_SIZE + 5)
    digests = bytearray()
    append_block_digests(digests, data)
    assert bad_blocks(data, digests) == []
    data[BLOCK_SIZE] ^= 1
    data[-1] ^= 1
    assert bad_blocks(data, digests) == [1, 3]
