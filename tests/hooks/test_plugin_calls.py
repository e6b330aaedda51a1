"""Each plugin is called by itself: what one breaks, returns or does to what it was given stays its own."""

from __future__ import annotations

import dataclasses
import logging
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from resilio.errors import ConfigError
from resilio.events import Event, SaveStarted
from resilio.hooks import Calls, Host, SaveFacts, hookimpl
from resilio.records import schema
from resilio.storage import MemoryStorage, Storage
from resilio.types import CheckpointInfo, CheckpointRef, Damage

REF = CheckpointRef(1, 10)
INFO = CheckpointInfo(REF, "step-000000010-g000001-aaaa", 0.0, 1, metrics={"loss": 1.0})
EVENT = SaveStarted(url="memory://x", time_s=0.0, step=1, world=1, reason="")
FACTS = SaveFacts("memory://x", 1, 1)


class Answers:
    """Returns what it was told to, from each hook, or raises it."""

    def __init__(self, answer: Any = None) -> None:
        self.answer = answer
        self.heard: list[Any] = []

    def _answer(self, given: Any) -> Any:
        self.heard.append(given)
        if isinstance(self.answer, BaseException):
            raise self.answer
        return self.answer(given) if callable(self.answer) else self.answer

    @hookimpl
    def resilio_on_event(self, event: Event) -> None:
        self._answer(event)

    @hookimpl
    def resilio_describe(self, context: SaveFacts) -> Any:
        return self._answer(context)

    @hookimpl
    def resilio_pins(self, checkpoints: list[CheckpointInfo]) -> Any:
        return self._answer(checkpoints)

    @hookimpl
    def resilio_verify(self, checkpoint: CheckpointInfo, storage: Storage) -> Any:
        return self._answer((checkpoint, storage))


def calls(*plugins: object) -> Calls:
    return Calls(Host(entry_points=[]).with_plugins(plugins))


BROKEN = [ValueError("broken"), SystemExit("broken"), ConfigError("broken"), GeneratorExit("broken")]


@pytest.mark.parametrize("error", BROKEN, ids=lambda error: type(error).__name__)
def test_an_observer_that_raises_is_logged_and_silences_nobody(
    error: BaseException, caplog: pytest.LogCaptureFixture
) -> None:
    before, after = Answers(), Answers()
    with caplog.at_level(logging.WARNING, "resilio"):
        calls(before, Answers(error), after).tell(EVENT)
    assert before.heard == after.heard == [EVENT]
    assert [record.getMessage() for record in caplog.records] == [
        "plugin 'Answers-2' failed in resilio_on_event(SaveStarted), which changes nothing else times=1 "
        f"error={type(error).__name__}: broken"
    ]


def test_a_plugin_that_always_raises_is_said_once_and_each_hundredth_time(caplog: pytest.LogCaptureFixture) -> None:
    told = calls(Answers(ValueError("broken")))
    with caplog.at_level(logging.WARNING, "resilio"):
        for _ in range(201):
            told.tell(EVENT)
    with caplog.at_level(logging.DEBUG, "resilio"):
        told.describe(FACTS)
    loud = [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]
    assert [f"times={n} " in line for n, line in zip((1, 101, 201, 1), loud, strict=True)] == [True] * 4
    assert "resilio_describe" in loud[3]
    assert any(record.exc_info for record in caplog.records)


def test_a_ctrl_c_is_the_loop_s_and_in_another_thread_a_plugin_s_mistake() -> None:
    told = calls(Answers(KeyboardInterrupt()))
    with pytest.raises(KeyboardInterrupt):
        told.tell(EVENT)
    assert not told.inside
    with ThreadPoolExecutor(1) as pool:
        assert pool.submit(told.tell, EVENT).exception() is None


@pytest.mark.parametrize("first", range(3))
def test_no_plugin_hears_from_two_threads_at_once(first: int) -> None:
    """While the first call is in the plugin, others are made, and must not get there."""
    threads: list[threading.Thread] = []
    second = threading.Event()
    overlapped: list[bool] = []

    def hear(given: object) -> dict[Any, Any]:
        if threads:
            second.set()
            return {}
        threads.extend(threading.Thread(target=ask) for ask in asked)
        for thread in threads:
            thread.start()
        overlapped.append(second.wait(0.1))
        return {}

    told = calls(Answers(hear))
    asked: list[Callable[[], object]] = [
        lambda: told.tell(EVENT),
        lambda: told.describe(FACTS),
        lambda: told.pins([INFO]),
    ]
    asked[first]()
    for thread in threads:
        thread.join()
    assert second.is_set() and overlapped == [False]


def test_a_hook_may_tell_of_another_event() -> None:
    """As one that verifies what was saved does."""

    def hear(event: Event) -> None:
        assert told.inside
        if event is EVENT:
            told.tell(other)

    other = SaveStarted(url="memory://x", time_s=1.0, step=2, world=1, reason="")
    plugin = Answers(hear)
    told = calls(plugin)
    told.tell(EVENT)
    assert plugin.heard == [EVENT, other]
    assert not told.inside


def test_what_plugins_say_of_a_save_is_kept_under_their_names() -> None:
    said = {"commit": "a1b2", "job": 17, "share": 0.5, "dirty": False, "queue": None}
    about = calls(Answers(said), Answers({"é": "\0"}), Answers(None), Answers({})).describe(FACTS)
    assert about == {"Answers": said, "Answers-2": {"é": "\0"}}
    said["commit"] = "later"
    assert about["Answers"]["commit"] == "a1b2"


@pytest.mark.parametrize(
    ("answer", "why"),
    [
        (ValueError("broken"), "broken"),
        ([("a", 1)], "list, which is no mapping"),
        ("text", "str, which is no mapping"),
        ({"a": [1]}, "the value of 'a' is [1]"),
        ({"a": {}}, "no plain value"),
        ({"a": float("nan")}, "no plain value"),
        ({"a": 2**63}, "no plain value"),
        ({"a": b"x"}, "no plain value"),
        ({"a": "x" * 4097}, "at most 4096 characters"),
        ({"a": "\ud800"}, "surrogates"),
        ({"x" * 129: 1}, "at most 128 characters"),
        ({1: 1}, "a name is 1"),
        ({str(n): n for n in range(65)}, "65 entries, 64 are the most"),
        ({str(n): "x" * 4096 for n in range(9)}, "more than 32768 bytes"),
        ({str(n): "\0" * 4096 for n in range(2)}, "more than 32768 bytes"),  # six bytes each in JSON
    ],
)
def test_what_cannot_be_stored_is_left_out_and_logged(answer: Any, why: str, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, "resilio"):
        assert calls(Answers({"a": 1}), Answers(answer)).describe(FACTS) == {"Answers": {"a": 1}}
    assert len(caplog.records) == 1
    assert why in caplog.text and "'Answers-2'" in caplog.text and len(caplog.text) < 500


def test_no_number_of_plugins_makes_a_commit_record_too_large(caplog: pytest.LogCaptureFixture) -> None:
    much = {str(n): "x" * 4000 for n in range(8)}
    with caplog.at_level(logging.WARNING, "resilio"):
        about = calls(*(Answers(much) for _ in range(40)), Answers({"small": 1})).describe(FACTS)
    assert 6 < len(about) < 9
    assert "all plugins say more than" in caplog.text
    record = schema.CommitRecord(
        format=1, step=1, generation=1, attempt="a", manifest_size_bytes=1, manifest_digest="crc32:00", nonce="n",
        time_s=0.0, world=1, about=about,
    )  # fmt: skip
    assert schema.decode(schema.encode(record), schema.CommitRecord, "x").about == about


def test_what_a_plugin_does_to_what_a_save_is_about_others_do_not_see() -> None:
    def change(facts: SaveFacts) -> Any:
        facts.metrics["loss"] = 0.0  # type: ignore[index]

    facts = SaveFacts("u", 1, 1, {"loss": 1.0})
    second = Answers()
    assert calls(Answers(change), Answers(lambda facts: setattr(facts, "step", 5)), second).describe(facts) == {}
    assert second.heard == [facts] == [SaveFacts("u", 1, 1, {"loss": 1.0})]
    assert dataclasses.asdict(facts)["metrics"] == {"loss": 1.0}


def test_pins_of_all_plugins_are_joined_and_name_them() -> None:
    first = Answers({REF: "nightly\n eval", CheckpointRef(9, 9): "gone"})
    kept = calls(first, Answers({}), Answers(lambda given: {given[0].ref: "x" * 300})).pins([INFO])
    assert kept[REF] == ["nightly eval (plugin Answers)", f"{'x' * 200} (plugin Answers-3)"]


def test_what_a_plugin_does_to_its_list_others_do_not_see() -> None:
    def spoil(given: list[CheckpointInfo]) -> dict[Any, Any]:
        given[0].metrics["loss"] = -1.0
        given.clear()
        return {}

    infos, second = [INFO], Answers({})
    calls(Answers(spoil), second).pins(infos)
    assert infos == [INFO] and INFO.metrics == {"loss": 1.0}
    assert second.heard == [[INFO]]


@pytest.mark.parametrize(
    ("answer", "why"),
    [
        (ValueError("broken"), "ValueError: broken"),
        (SystemExit(3), "SystemExit: 3"),
        (None, "give {checkpoint.ref: why}, and {} for none"),
        ([REF], "give {checkpoint.ref: why}"),
        ({10: "step"}, "it returned 10: 'step'"),
        ({REF: None}, "why in words"),
    ],
)
def test_pins_that_are_not_known_are_an_error_that_names_the_plugin(answer: Any, why: str) -> None:
    with pytest.raises(ConfigError, match=r"plugin 'Answers-2' .*nothing is deleted.*plugins=") as told:
        calls(Answers({REF: "why"}), Answers(answer)).pins([INFO])
    assert why in str(told.value)


def test_each_finding_names_its_plugin_and_a_failure_is_a_finding() -> None:
    class Halfway:
        @hookimpl
        def resilio_verify(self) -> Any:
            yield Damage("model", "loss is nan", {"loss": "nan"})
            raise ValueError("broken")

    found = calls(Halfway(), Answers([]), Answers(None), Answers([3])).verify(INFO, MemoryStorage("x"))
    assert [str(one) for one in found] == [
        "model: loss is nan (plugin 'Halfway')",
        f"{INFO.attempt}: could not be judged: ValueError: broken (plugin 'Halfway')",
        f"{INFO.attempt}: could not be judged: ConfigError: it returned 3 among its findings, which is no resilio "
        "Damage (plugin 'Answers-3')",
    ]
    assert [one.facts for one in found] == [
        {"loss": "nan", "plugin": "Halfway"},
        {"inconclusive": True, "plugin": "Halfway"},
        {"inconclusive": True, "plugin": "Answers-3"},
    ]


CHANGES: list[Callable[[Storage], object]] = [
    lambda storage: storage.put("a", b"y"),
    lambda storage: storage.writer("b"),
    lambda storage: storage.delete(["a"]),
    lambda storage: storage.abort(None),  # type: ignore[arg-type]
]


@pytest.mark.parametrize("change", CHANGES)
def test_a_plugin_reads_the_store_and_cannot_change_it(change: Callable[[Storage], object]) -> None:
    def look(given: tuple[CheckpointInfo, Storage]) -> Any:
        info, storage = given
        buffer = bytearray(1)
        storage.read_into("a", [(0, memoryview(buffer))])
        assert bytes(buffer) == storage.get("a") == b"x" and storage.exists("a") and storage.stat("a").size_bytes == 1
        assert [one.key for one in storage.list("")] == ["a"] and not list(storage.incomplete(""))
        assert storage.url == "memory://looked" and storage.free_bytes() is None
        assert info == INFO and info is not INFO
        change(storage)

    storage = MemoryStorage("looked")
    storage.put("a", b"x")
    (found,) = calls(Answers(look)).verify(INFO, storage)
    assert "a plugin's hook reads a run and changes nothing in it" in found.what
    assert storage.get("a") == b"x" and not storage.exists("b")
