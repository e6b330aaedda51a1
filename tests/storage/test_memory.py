"""What is special about memory."""

from __future__ import annotations

import pickle
import time

import pytest

from resilio.errors import AlreadyExistsError, ConfigError
from resilio.storage import MemoryStorage
from resilio.storage.memory import open_memory


def test_equal_names_share_a_store_and_others_do_not() -> None:
    open_memory("memory://shared/by-name").put("key", b"x")
    assert MemoryStorage("shared/by-name").get("key") == b"x"
    assert not MemoryStorage("shared").exists("key")


def test_a_pickle_carries_the_name_only() -> None:
    storage = MemoryStorage("pickled")
    storage.put("key", b"secret bytes" * 100)
    assert b"secret" not in pickle.dumps(storage)
    assert len(pickle.dumps(storage)) < 500
    assert not storage.capabilities.shared


def test_equal_bytes_at_the_same_instant_are_still_two_objects(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(time, "time", lambda: 1.0)
    storage = MemoryStorage("instant")
    storage.put("key", b"x", if_absent=True)
    with pytest.raises(AlreadyExistsError):
        storage.put("key", b"x", if_absent=True)


def test_a_name_is_needed() -> None:
    with pytest.raises(ConfigError, match="name"):
        open_memory("memory://")
