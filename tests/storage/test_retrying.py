"""What is retried, for how long, and what a retry may conclude."""

from __future__ import annotations

import pickle
import random
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from resilio.clock import FakeClock
from resilio.errors import (
    AccessDeniedError,
    AlreadyExistsError,
    AuthExpiredError,
    ConfigError,
    IntegrityError,
    NotFoundError,
    OutOfSpaceError,
    StorageError,
    ThrottledError,
    TransientError,
)
from resilio.storage import Buffer, Incomplete, LocalStorage, MemoryStorage, ObjectInfo, Storage, retrying
from resilio.storage.retrying import RetryingStorage


@dataclass
class WaitingClock(FakeClock):
    """Remembers the waits."""

    waits_s: list[float] = field(default_factory=list)

    def sleep(self, seconds: float) -> None:
        self.waits_s.append(seconds)
        super().sleep(seconds)


class Faulty(MemoryStorage):
    """Fails each call with the next of `before`, or does it and then fails with the next of `after`."""

    def __init__(self, name: str) -> None:
        super().__init__(name)
        self.before: list[Exception] = []
        self.after: list[Exception] = []
        self.calls: list[str] = []

    def _do(self, verb: str, deed: Callable[[], object]) -> object:
        self.calls.append(verb)
        if self.before:
            raise self.before.pop(0)
        result = deed()
        if self.after:
            raise self.after.pop(0)
        return result

    def put(self, key: str, data: Buffer, *, if_absent: bool = False) -> ObjectInfo:
        return self._do("put", lambda: super(Faulty, self).put(key, data, if_absent=if_absent))  # type: ignore[return-value]

    def read_into(self, key: str, ranges: Sequence[tuple[int, memoryview]]) -> None:
        self._do("read_into", lambda: super(Faulty, self).read_into(key, ranges))

    def list(self, prefix: str) -> Iterator[ObjectInfo]:
        yield from super().list(prefix)
        self._do("list", lambda: None)  # fails when the first page was given out already

    def delete(self, keys: Iterable[str]) -> None:
        self._do("delete", lambda: super(Faulty, self).delete(keys))

    def get(self, key: str) -> bytes:
        return self._do("get", lambda: super(Faulty, self).get(key))  # type: ignore[return-value]

    def stat(self, key: str) -> ObjectInfo:
        return self._do("stat", lambda: super(Faulty, self).stat(key))  # type: ignore[return-value]

    def exists(self, key: str) -> bool:
        return bool(self._do("exists", lambda: super(MemoryStorage, self).exists(key)))

    def incomplete(self, prefix: str) -> Iterator[Incomplete]:
        return iter(self._do("incomplete", lambda: [Incomplete("key", "token")]))  # type: ignore[call-overload, no-any-return]

    def abort(self, item: Incomplete) -> None:
        self._do("abort", lambda: None)

    def close(self) -> None:
        self.calls.append("close")


@pytest.fixture
def faulty(tmp_path: Path) -> Faulty:
    return Faulty(str(tmp_path))


@pytest.fixture
def clock() -> WaitingClock:
    return WaitingClock()


@pytest.fixture
def storage(faulty: Faulty, clock: WaitingClock) -> Storage:
    return retrying(faulty, total_s=60, first_wait_s=1, longest_wait_s=8, clock=clock)


VERBS: dict[str, Callable[[Storage], object]] = {
    "put": lambda s: s.put("key", b"x"),
    "read_into": lambda s: s.read_into("there", [(0, memoryview(bytearray(2)))]),
    "list": lambda s: [*s.list("")],
    "delete": lambda s: s.delete(iter(["key"])),
    "get": lambda s: s.get("there"),
    "stat": lambda s: s.stat("there"),
    "exists": lambda s: s.exists("there"),
    "incomplete": lambda s: [*s.incomplete("")],
    "abort": lambda s: s.abort(Incomplete("key", "token")),
}


@pytest.mark.parametrize("kind", [TransientError, ThrottledError])
@pytest.mark.parametrize("verb", VERBS)
def test_what_may_pass_is_repeated_by_every_verb(
    storage: Storage, faulty: Faulty, clock: WaitingClock, verb: str, kind: type[Exception]
) -> None:
    faulty.put("there", b"ok")
    faulty.calls.clear()
    expected = VERBS[verb](faulty)
    faulty.before = [kind("1"), kind("2"), kind("3")]
    result = VERBS[verb](storage)
    assert faulty.calls.count(verb) == 1 + 4
    assert len(clock.waits_s) == 3
    if verb != "put":  # its time differs
        assert result == expected


@pytest.mark.parametrize(
    "kind",
    [
        NotFoundError,
        AlreadyExistsError,
        AccessDeniedError,
        OutOfSpaceError,
        StorageError,
        IntegrityError,
        ConfigError,
        OSError,
        KeyboardInterrupt,
    ],
)
def test_nothing_else_is_repeated(storage: Storage, faulty: Faulty, clock: WaitingClock, kind: type[Exception]) -> None:
    error = kind("no")
    faulty.before = [error]
    with pytest.raises(kind) as caught:
        storage.get("key")
    assert caught.value is error
    assert (faulty.calls, clock.waits_s) == (["get"], [])


def test_expired_credentials_are_fetched_anew_before_the_next_try(storage: Storage, faulty: Faulty) -> None:
    faulty.before = [AuthExpiredError("expired")]
    storage.put("key", b"x")
    assert faulty.calls == ["put", "close", "put"]


def test_waits_double_with_jitter_up_to_the_longest(storage: Storage, faulty: Faulty, clock: WaitingClock) -> None:
    faulty.before = [TransientError(str(n)) for n in range(7)]
    storage.put("key", b"x")
    for wait_s, longest_s in zip(clock.waits_s, [1, 2, 4, 8, 8, 8, 8], strict=True):
        assert longest_s / 2 <= wait_s <= longest_s
    assert len(set(clock.waits_s)) == 7


def test_one_deadline_ends_it_with_the_last_error_and_the_number_of_tries(
    storage: Storage, faulty: Faulty, clock: WaitingClock
) -> None:
    faulty.before = [TransientError(f"fault {n}", key="key", url="u") for n in range(1000)]
    begin_s = clock.monotonic_s()
    with pytest.raises(TransientError, match=r"gave up after \d+ tries in 60 s") as caught:
        storage.put("key", b"x")
    assert clock.monotonic_s() - begin_s == pytest.approx(60)
    tries = faulty.calls.count("put")
    facts = vars(caught.value)
    assert (facts["key"], facts["url"], facts["tries"]) == ("key", "u", tries)
    assert f"fault {tries - 1} " in str(caught.value)


def test_time_spent_in_the_calls_themselves_counts(faulty: Faulty, clock: WaitingClock) -> None:
    """A call that hangs for half the time leaves half of it."""

    class Slow(Faulty):
        def _do(self, verb: str, deed: Callable[[], object]) -> object:
            clock.advance(30)
            return super()._do(verb, deed)

    slow = Slow(faulty.name)
    slow.before = [TransientError("slow")] * 10
    with pytest.raises(TransientError):
        retrying(slow, total_s=60, clock=clock).get("key")
    assert slow.calls == ["get"] * 2 or slow.calls == ["get"] * 3


def test_the_training_s_random_state_is_left_alone(storage: Storage, faulty: Faulty) -> None:
    faulty.before = [TransientError("1"), TransientError("2")]
    before = random.getstate()
    storage.put("key", b"x")
    assert random.getstate() == before


# ---- a create whose answer was lost


def test_a_create_whose_answer_was_lost_is_ours_if_the_bytes_are(storage: Storage, faulty: Faulty) -> None:
    for data in (b"with our nonce", bytearray(b"with our nonce"), memoryview(b"with our nonce")):
        faulty.after = [TransientError("reset by peer")]
        info = storage.put("key", data, if_absent=True)
        assert (info.key, info.size_bytes) == ("key", 14)
        assert faulty.get("key") == b"with our nonce"
        faulty.delete(["key"])


def test_a_create_whose_answer_was_lost_is_not_ours_if_the_bytes_differ(storage: Storage, faulty: Faulty) -> None:
    faulty.put("key", b"somebody else's")
    faulty.before = [TransientError("reset by peer")]
    with pytest.raises(AlreadyExistsError):
        storage.put("key", b"with our nonce", if_absent=True)
    assert faulty.get("key") == b"somebody else's"


@pytest.mark.parametrize("first", [None, ThrottledError("slow down"), AuthExpiredError("expired")])
def test_equal_bytes_are_no_proof_where_no_answer_was_lost(
    storage: Storage, faulty: Faulty, first: Exception | None
) -> None:
    """A refused request was not carried out, so the object there is not from it."""
    faulty.put("key", b"same")
    faulty.before = [first] if first else []
    with pytest.raises(AlreadyExistsError):
        storage.put("key", b"same", if_absent=True)


def test_the_look_at_what_is_there_is_repeated_too(storage: Storage, faulty: Faulty) -> None:
    """Put done and lost; get fails; then all is well."""
    faulty.after = [TransientError("put lost"), TransientError("get lost"), TransientError("stat lost")]
    storage.put("key", b"ours", if_absent=True)
    assert faulty.get("key") == b"ours"


def test_an_object_gone_again_is_still_not_ours(storage: Storage, faulty: Faulty) -> None:
    faulty.put("key", b"somebody else's")
    faulty.before = [TransientError("lost")]

    def get(key: str) -> bytes:
        faulty.delete([key])
        return MemoryStorage.get(faulty, key)

    faulty.get = get  # type: ignore[method-assign]
    with pytest.raises(AlreadyExistsError):
        storage.put("key", b"ours", if_absent=True)


# ---- the wrapper itself


def test_a_writer_block_is_passed_through(storage: Storage, faulty: Faulty) -> None:
    faulty.before = [TransientError("at the end of the block")]
    with pytest.raises(TransientError), storage.writer("key") as out:
        out.write(b"gone by now")
    assert faulty.calls == ["put"]


def test_it_shows_what_it_wraps_and_never_wraps_twice(tmp_path: Path) -> None:
    local = LocalStorage(tmp_path)
    storage = retrying(retrying(local), total_s=1)
    assert isinstance(storage, RetryingStorage)
    assert storage.inner is local
    assert (storage.url, storage.capabilities) == (local.url, local.capabilities)
    copy = pickle.loads(pickle.dumps(storage))
    assert copy.url == local.url


@pytest.mark.parametrize("times", [{"total_s": -1}, {"first_wait_s": 0}, {"first_wait_s": 9, "longest_wait_s": 8}])
def test_times_that_make_no_sense_are_refused(faulty: Faulty, times: dict[str, float]) -> None:
    with pytest.raises(ConfigError):
        retrying(faulty, **times)  # type: ignore[arg-type]
