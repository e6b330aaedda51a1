from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from resilio.errors import ConfigError, FormatError
from resilio.records import keys
from resilio.types import CheckpointRef

REF = CheckpointRef(generation=7, step=4000)


def test_names_are_exactly_those_of_the_format():
    assert keys.commit_key(REF) == "commits/000004000-g000007.json"
    assert keys.generation_key(7) == "generations/000007.json"
    assert keys.attempt_name(4000, 7, "7f3a") == "step-000004000-g000007-7f3a"
    assert keys.data_name(3, 0) == "__3_0.distcp"
    assert keys.digests_name("__3_0.distcp") == "__3_0.digests"
    assert keys.part_name(12) == "manifest-12.json"


@given(st.integers(0, 999_999_999), st.integers(1, 999_999))
def test_every_name_parses_back(step: int, generation: int):
    ref = CheckpointRef(generation, step)
    assert keys.parse_commit(keys.commit_key(ref)) == ref
    assert keys.parse_generation(keys.generation_key(generation)) == generation
    assert keys.parse_attempt(keys.attempt_name(step, generation, "00ff00ff")) == ref


def test_listings_sort_by_step():
    names = [keys.commit_key(CheckpointRef(1, step)) for step in (9, 10, 100, 99)]
    assert sorted(names) == [keys.commit_key(CheckpointRef(1, step)) for step in (9, 10, 99, 100)]


@pytest.mark.parametrize(
    "name",
    [
        "step-9",
        "step-100.bak",
        "my-step-7",
        "step-000004000-g000007-7f3a.bak",
        "xstep-000004000-g000007-7f3a",
        "step-000004000-g000007-7f3a\n",
        "step-000004000-g000007-7F3A",
        "step-00004000-g000007-7f3a",
        "step-0000004000-g000007-7f3a",
        "step-000004000-g000000-7f3a",
        "step-٠٠٠٠٠٤٠٠٠-g000007-7f3a",
        "step-000004000-g000007",
        "STEP-000004000-g000007-7f3a",
        "",
    ],
)
def test_a_name_that_only_looks_like_an_attempt_is_not_ours(name: str):
    assert keys.parse_attempt(name) is None


@pytest.mark.parametrize("key", ["commits/4000-g7.json", "commits/000004000-g000007.json.tmp", "commits/a/b", "x"])
def test_a_name_that_only_looks_like_a_commit_is_not_ours(key: str):
    assert keys.parse_commit(key) is None


@pytest.mark.parametrize("key", ["generations/7.json", "generations/000000.json", "generations/000007.json~"])
def test_a_name_that_only_looks_like_a_generation_is_not_ours(key: str):
    assert keys.parse_generation(key) is None


@pytest.mark.parametrize(
    "call",
    [
        lambda: keys.commit_key(CheckpointRef(1, 10**9)),
        lambda: keys.commit_key(CheckpointRef(1, -1)),
        lambda: keys.generation_key(0),
        lambda: keys.generation_key(10**6),
        lambda: keys.attempt_name(1, 1, "../x"),
    ],
)
def test_what_would_break_the_fixed_width_is_refused(call):
    with pytest.raises(ConfigError):
        call()


@pytest.mark.parametrize("name", ["../x", "a/../../x", "/etc/passwd", "", ".", "a//b", "a\\b", "a\0b", "x" * 2000])
def test_an_object_outside_of_its_attempt_is_refused(name: str):
    with pytest.raises(FormatError, match="step-000004000"):
        keys.object_key("step-000004000-g000007-7f3a", name, "manifest.json")


def test_an_object_of_a_folder_that_is_no_attempt_is_refused():
    with pytest.raises(FormatError):
        keys.object_key("commits", "x", "manifest.json")


def test_a_pin_holds_the_checkpoint_whose_stem_it_begins_with():
    assert keys.holds("pins/000004000-g000007.json", REF)
    assert keys.holds("leases/000004000-g000007-abc/x/000004000-g000007-eval", REF)
    assert not keys.holds("pins/000004000-g000008.json", REF)
    assert not keys.holds("pins/x-000004000-g000007.json", REF)


def test_keys_inside_an_attempt_are_split():
    assert keys.split_attempt_key("step-000000001-g000001-abcd/a/b") == ("step-000000001-g000001-abcd", "a/b")
    assert keys.split_attempt_key("step-000000001-g000001-abcd") is None
    assert keys.split_attempt_key("step-9/manifest.json") is None
