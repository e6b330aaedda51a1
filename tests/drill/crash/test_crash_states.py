"""Which states a crash may leave: all that POSIX and object stores allow, and no other."""

from __future__ import annotations

from random import Random

import pytest

from resilio.drill.crash.log import (
    Begin,
    Create,
    Delete,
    Entry,
    Known,
    Link,
    Mkdir,
    Put,
    Replace,
    Sync,
    SyncFolder,
    Unlink,
    Write,
)
from resilio.drill.crash.objects import ObjectStates
from resilio.drill.crash.posix import PosixStates
from resilio.drill.crash.states import State, subsets
from resilio.types import CheckpointRef

TEMP = "run/.tmp-1-0123456789abcdef-key"


def posix(*calls: object, exhaustive: int = 6) -> set[State]:
    entries = [Entry(call, Known()) for call in (Mkdir("run"), SyncFolder("."), *calls)]
    return {found.state for found in PosixStates(entries, "run/", 0, exhaustive)}


def objects(*calls: object, exhaustive: int = 6) -> set[State]:
    return {found.state for found in ObjectStates([Entry(call, Known()) for call in calls], 0, exhaustive)}


def contents(states: set[State], key: str = "key") -> set[bytes | None]:
    return {state.objects.get(key) for state in states}


PUBLISHED = (Create(TEMP, 1), Write(1, b"12345678"), Sync(1), Link(TEMP, "run/key"), Unlink(TEMP), SyncFolder("run"))


def test_a_published_file_is_whole_or_not_there() -> None:
    states = posix(*PUBLISHED)
    assert contents(states) == {None, b"12345678"}
    assert {state.uploads for state in states if "key" not in state.objects} == {frozenset(), frozenset({"key"})}


def test_without_its_fsync_it_may_be_empty_cut_short_or_zeroed() -> None:
    states = posix(*(call for call in PUBLISHED if not isinstance(call, Sync)))
    assert contents(states) == {None, b"", b"1234", bytes(8), b"12345678"}


def last(*calls: object) -> set[bytes | None]:
    """What may be there after the last call, when the job has been told."""
    entries = [Entry(call, Known()) for call in (Mkdir("run"), SyncFolder("."), *calls)]
    entries.append(Entry(None, Known(newest=CheckpointRef(1, 1))))
    return contents({found.state for found in PosixStates(entries, "run/", 0, 6) if found.known.newest})


def test_a_name_is_certain_when_its_folder_was_fsynced_and_no_earlier() -> None:
    assert last(*PUBLISHED) == {b"12345678"}
    assert last(*PUBLISHED[:-1]) == {None, b"12345678"}
    assert last(*PUBLISHED, Unlink("run/key")) == {None, b"12345678"}
    assert last(*PUBLISHED, Unlink("run/key"), SyncFolder("run")) == {None}


def test_a_folder_takes_all_that_is_in_it_along_until_its_own_parent_was_fsynced() -> None:
    inside = (Mkdir("run/a"), Create("run/a/key", 1), Write(1, b"x"), Sync(1), SyncFolder("run/a"))
    assert {frozenset(state.objects) for state in posix(*inside)} == {frozenset(), frozenset({"a/key"})}


def test_changes_of_different_names_come_in_any_order_those_of_one_name_in_theirs() -> None:
    two = (Create("run/a", 1), Sync(1), Create("run/b", 2), Sync(2))
    there = {frozenset(state.objects) for state in posix(*two)}
    assert there == {frozenset(), frozenset("a"), frozenset("b"), frozenset("ab")}
    again = (Create("run/key", 1), Write(1, b"old"), Sync(1), Unlink("run/key"), Create("run/key", 2), Write(2, b"new"))
    assert last(*again, Sync(2), Sync(1)) == {None, b"old", b"new"}
    assert last(*again, Sync(2), Unlink("run/key"), SyncFolder("run")) == {None}


def test_a_rename_is_one_step() -> None:
    over = (Create(TEMP, 2), Write(2, b"new"), Sync(2), Replace(TEMP, "run/key"), SyncFolder("run"))
    states = posix(*PUBLISHED, *over)
    assert contents(states) == {None, b"12345678", b"new"}
    assert not [state for state in states if state.objects.get("key") == b"new" and "key" in state.uploads]


def test_what_was_in_a_folder_that_is_gone_for_certain_is_not_asked_any_more() -> None:
    calls = [Mkdir("run/a"), *(Create(f"run/a/{n}", n) for n in range(9)), *(Unlink(f"run/a/{n}") for n in range(9))]
    gone = [*calls, Unlink("run/a", folder=True), SyncFolder("run")]
    source = PosixStates([Entry(call, Known()) for call in (Mkdir("run"), SyncFolder("."), *gone)], "run/", 0, 6)
    states = [*source]
    sampled = source.sampled
    more = PosixStates(
        [Entry(c, Known()) for c in (Mkdir("run"), SyncFolder("."), *gone, Create("run/b", 99))], "run/", 0, 6
    )
    assert [found.state.objects for found in more][-2:] == [{}, {"b": b""}]
    assert more.sampled == sampled > 0
    assert states


def test_a_put_is_there_or_not_and_an_upload_shows_only_when_complete() -> None:
    assert objects(Put("key", b"x")) == {State({}), State({"key": b"x"})}
    assert objects(Begin("key"), Put("key", b"x", True)) == {
        State({}),
        State({}, frozenset({"key"})),
        State({"key": b"x"}),
    }


def test_requests_of_several_ranks_are_cut_at_any_place_each() -> None:
    lanes = (Put("a1", b"", lane=0), Put("b1", b"", lane=1), Put("a2", b"", lane=0), Put("b2", b"", lane=1))
    there = {frozenset(state.objects) for state in objects(*lanes)}
    assert len(there) == 9
    assert frozenset({"b1", "b2"}) in there
    assert frozenset({"a2"}) not in there
    alone = {frozenset(state.objects) for state in objects(Put("a1", b""), Put("b1", b""))}
    assert alone == {frozenset(), frozenset({"a1"}), frozenset({"a1", "b1"})}


def test_a_deletion_of_several_may_have_deleted_any() -> None:
    states = objects(Put("a", b""), Put("b", b""), Put("c", b""), Delete(("a", "b", "c")), Put("d", b""))
    there = {frozenset(state.objects) for state in states}
    assert frozenset("b") in there
    assert not [one for one in there if "d" in one and one != frozenset("d")]


def test_a_request_without_an_answer_comes_at_any_later_moment_or_never() -> None:
    late = Put("key", b"late", late=True)
    assert contents(objects(late, Put("a", b""), Put("key", b"mine"))) == {None, b"late", b"mine"}
    states = objects(Put("key", b"late", if_absent=True, late=True), Put("key", b"mine"), Put("b", b""))
    assert {state.objects["key"] for state in states if "b" in state.objects} == {b"mine"}


@pytest.mark.parametrize("count", [0, 1, 3])
def test_of_few_things_every_subset(count: int) -> None:
    found = [*subsets(range(count), 3, Random(0), pytest.fail)]
    assert len(found) == len(set(found)) == 2**count


def test_of_many_a_choice_and_it_is_told() -> None:
    told: list[int] = []
    found = [*subsets(range(30), 4, Random(0), lambda: told.append(1))]
    assert told == [1]
    assert len(found) == len(set(found)) < 120
    assert {(), tuple(range(30)), (7,), tuple(n for n in range(30) if n != 7), (0, 1, 2, 3, 4)} <= set(found)
    assert found == [*subsets(range(30), 4, Random(0), lambda: None)]
