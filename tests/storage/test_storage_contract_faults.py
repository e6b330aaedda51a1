"""The contract sees what it is there to see: for each of its tests there are storages that break one promise."""

from __future__ import annotations

import inspect
from pathlib import Path
from typing import Any

import faulty_storages as faulty
import pytest

from resilio.storage import LocalStorage, MemoryStorage, Storage
from resilio.testing import StorageContract

FAULTS: dict[str, list[tuple[Any, ...]]] = {
    "put_then_get_gives_the_same_bytes": [(faulty.WritesText,)],
    "an_object_without_bytes_is_an_object": [(faulty.ListsNoEmptyObject,), (faulty.StoresNothingForNoBytes,)],
    "put_without_if_absent_replaces": [(faulty.OverwritesTheBeginning,)],
    "a_large_object_written_in_odd_pieces_is_whole": [(faulty.LosesTheLastPart,)],
    "a_size_hint_may_be_wrong": [(faulty.TrustsTheHint,)],
    "every_kind_of_buffer_is_taken": [(faulty.TakesBytesOnly, memoryview)],
    "lengths_are_in_bytes_whatever_the_items_are": [(faulty.CountsItems,)],
    "buffers_may_be_reused_at_once": [(faulty.KeepsViews,)],
    "create_if_absent_refuses_what_is_there": [
        (faulty.CreatesTheSameAgain,),
        (faulty.TakesEmptyForAbsent,),
        (faulty.RaisesItsOwn,),
        (faulty.SaysNotWhich,),
        (faulty.RaisesWhatDoesNotPickle,),
    ],
    "create_if_absent_has_exactly_one_winner": [(faulty.LooksThenPuts,)],
    "one_process_of_many_wins_a_create": [(faulty.LocksThisProcess,)],
    "a_writer_does_not_replace_an_object": [(faulty.LastWriterWins,), (faulty.PublishesOnError,)],
    "of_two_writers_of_one_key_one_wins": [(faulty.LastWriterWins,), (faulty.LooksOnlyAtTheBeginning,)],
    "an_object_is_not_visible_before_the_block_ends": [(faulty.PublishesAtOpen,), (faulty.PublishesLargeOnesEarly,)],
    "an_exception_in_the_block_publishes_nothing": [
        (faulty.PublishesOnError, RuntimeError, 10),
        (faulty.PublishesAtOpen, RuntimeError, 0),
        (faulty.AbortsOnExceptionOnly, KeyboardInterrupt, 10),
        (faulty.SwallowsTheException, RuntimeError, 10),
        (faulty.LeavesItsUploads, RuntimeError, 10),
        (faulty.PublishesLargeOnesEarly, RuntimeError, None),
        (faulty.DeletesWhatItFailedToWrite, RuntimeError, 10),
    ],
    "readers_see_all_of_an_object_or_nothing": [(faulty.PutsHalfFirst,)],
    "readers_see_the_old_or_the_new": [(faulty.DeletesThenPuts,)],
    "writers_side_by_side_keep_apart": [(faulty.OneBufferForAll,), (faulty.OneFailureIsAll,)],
    "a_killed_writer_leaves_no_object": [(faulty.WritesUnderTheFinalName,), (faulty.AbortsNothingTwice,)],
    "abort_removes_what_it_is_given_and_nothing_else": [(faulty.AbortsAllOfTheKey,), (faulty.AbortsByPrefix,)],
    "every_range_is_filled_exactly": [(faulty.EndsOneEarly,)],
    "a_range_beyond_the_end_is_refused": [
        (faulty.ReadsShort, 9, 2),
        (faulty.FillsUpWithZeros, 0, 11),
        (faulty.CallsTheEndMissing, 10, 1),
        (faulty.ReadsShort, 500, 1),
    ],
    "a_missing_object_is_not_found": [(faulty.ReadsNothingFromNothing,), (faulty.HasAFolderForAnObject,)],
    "threads_may_read_one_object_at_once": [(faulty.SharesOnePosition,)],
    "listing_is_complete_and_sorted_by_key": [
        (faulty.WalksFolderByFolder,),
        (faulty.SortsNumbersAsPeopleDo,),
        (faulty.ListsNoEmptyObject,),
        (faulty.ListsOneLevel,),
    ],
    "more_objects_than_a_page_holds": [(faulty.GivesOnePage,), (faulty.DeletesOnePage,)],
    "a_prefix_is_a_string": [(faulty.TakesThePrefixForAFolder,), (faulty.ListsOneLevel,)],
    "list_takes_prefixes_to_the_letter": [
        (faulty.Globs, "run[1]/x", "run1/x"),
        (faulty.Globs, "exp*", "exp-good"),
        (faulty.Globs, "lr=1e-4?a", "lr=1e-4xa"),
        (faulty.Globs, "a/**", "a/b"),
        (faulty.UsesLike, "50%", "50 percent"),
        (faulty.UsesLike, "step_1", "step-1"),
        (faulty.UsesLike, "Run", "run"),
        (faulty.UsesRegex, "a.b", "a-b"),
        (faulty.FoldsUnicode, "\u00e9", "e\u0301"),
    ],
    "listing_shows_every_change_at_once": [(faulty.RemembersTheListing,), (faulty.RemembersWhatWasMissing,)],
    "times_are_unix_seconds_or_not_told": [(faulty.CountsMilliseconds,)],
    "delete_takes_keys_to_the_letter": [
        (faulty.Globs, "run[1]/x", "run1/x"),
        (faulty.Globs, "exp*", "exp-good"),
        (faulty.UsesLike, "step_1", "step-1"),
        (faulty.UsesLike, "Run", "run"),
        (faulty.UsesRegex, "a.b", "a-b"),
        (faulty.FoldsUnicode, "\u00e9", "e\u0301"),
        (faulty.DeletesByPrefix, "step-1", "step-10"),
    ],
    "delete_does_not_go_into_what_looks_like_a_folder": [(faulty.DeletesFolders,)],
    "delete_takes_many_and_missing_ones": [(faulty.MissesWhatIsMissing,), (faulty.GoesThroughKeysTwice,)],
    "any_legal_key_works": [
        (faulty.NormalisesKeys,),
        (faulty.FoldsCase,),
        (faulty.UnquotesKeys,),
        (faulty.HidesDotFiles,),
    ],
    "illegal_keys_are_refused_by_every_verb": [
        (faulty.DeletesAnyKey, "../up"),
        (faulty.DeletesAnyKey, "a//b"),
        (faulty.DeletesBeforeItLooks, "/abs"),
    ],
    "prefixes_that_no_key_has_are_refused": [(faulty.ListsAnyPrefix, "../")],
    "threads_may_share_one_storage": [(faulty.OneBufferForAll,)],
    "a_pickled_copy_is_the_same_store": [(faulty.HoldsALock,), (faulty.PicklesAnotherStore,)],
    "a_change_by_one_is_seen_by_the_other_at_once": [(faulty.WritesBackLater,), (faulty.KeepsAReadCache,)],
    "a_storage_works_on_both_sides_of_a_fork": [(faulty.ConnectsOnce,), (faulty.SaysGoodbyeForAll,)],
    "processes_may_use_one_storage_at_once": [(faulty.UsesOneTemporaryFile,), (faulty.ConnectsOnce,)],
    "close_is_idempotent_and_not_the_end": [(faulty.ClosesForGood,), (faulty.ClosesOnceOnly,)],
    "close_of_a_copy_is_nothing_to_the_other": [(faulty.ClosesTheOthers,)],
    "the_url_shows_no_credentials": [(faulty.ShowsThePassword,)],
    "capabilities_make_sense": [(faulty.HasNoConcurrency,)],
    "free_bytes_is_a_number_or_not_told": [(faulty.HasNegativeSpace,), (faulty.CannotTellTheSpace,)],
    "local_path_holds_the_objects_as_files": [(faulty.PromisesAFolder,)],
}

SOUND = (faulty.SharedMemory, MemoryStorage, LocalStorage)


def promise(test: str) -> Any:
    return getattr(StorageContract(), f"test_{test}")


def keeps(test: str, storage: Storage, *arguments: Any) -> bool:
    try:
        promise(test)(storage, *arguments)
    except pytest.skip.Exception as skipped:
        raise AssertionError(f"not tried: {skipped}") from skipped
    except AssertionError as broken:
        said = str(broken)
        assert said.startswith(f"{type(storage).__name__} breaks a promise of resilio.storage.")
        assert promise(test).promise[1] in said
        assert "\nTried: " in said
        assert "\nSeen: " in said
        return False
    return True


@pytest.mark.parametrize(
    ("test", "broken", "arguments"),
    [(test, broken, arguments) for test, faults in FAULTS.items() for broken, *arguments in faults],
    ids=lambda value: getattr(value, "__name__", None),
)
def test_the_contract_fails_a_storage_that_breaks_it(
    tmp_path: Path, test: str, broken: type[MemoryStorage], arguments: list[Any]
) -> None:
    """It says whose promise that is, in the promise's own words."""
    sound = next(kind for kind in SOUND if issubclass(broken, kind))
    if sound is MemoryStorage and test == "local_path_holds_the_objects_as_files":
        sound = LocalStorage
    assert keeps(test, sound(f"{tmp_path}/sound"), *arguments)
    assert not keeps(test, broken(f"{tmp_path}/broken"), *arguments)


def test_there_is_a_fault_for_each_promise() -> None:
    tests = {name.removeprefix("test_") for name in dir(StorageContract) if name.startswith("test_")}
    assert tests == set(FAULTS)


@pytest.mark.parametrize("test", FAULTS)
def test_the_promise_is_written_where_the_failure_says(test: str) -> None:
    where, words = promise(test).promise
    assert words in " ".join((inspect.getdoc(where) or "").split())


@pytest.mark.timeout(60)
def test_where_pytest_shows_all_of_a_difference_a_broken_promise_is_still_told_at_once(monkeypatch: Any) -> None:
    """In CI it does, and for the 100 KB of this storage that took minutes."""
    monkeypatch.setenv("CI", "true")
    with pytest.raises(AssertionError, match=r"Seen: AssertionError: 300000 bytes came back .* from byte 0 on"):
        promise("buffers_may_be_reused_at_once")(faulty.KeepsViews("memory://views"))
