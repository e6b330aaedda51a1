"""What a contract says to the author whose storage breaks it, and what it finds out about forked processes."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from resilio.testing import _contract_tools as tools

BROKEN = """
from resilio.storage import MemoryStorage
from resilio.testing import StorageContract

class Broken(MemoryStorage):
    def delete(self, keys):
        super().delete([info.key for key in keys for info in self.list(key)])

class TestBroken(StorageContract):
    def make_storage(self, tmp_path):
        return Broken(str(tmp_path))
"""


def test_a_broken_promise_is_quoted_with_its_place(tmp_path: Path) -> None:
    """In a pytest of its own, as an author sees it."""
    (tmp_path / "test_broken.py").write_text(BROKEN)
    pytest_ = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-k", "letter and step", str(tmp_path)]
    done = subprocess.run(pytest_, cwd=tmp_path, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 1
    said = re.sub(r"\n *E? *", "\n", done.stdout)
    assert (
        "resilio.testing.BrokenPromise: Broken breaks a promise of resilio.storage.Storage.delete:\n"
        '"Keys are literal, never patterns; a missing object is no error."\n'
        "Tried: No patterns, no prefixes: a sibling run must survive.\n"
        "Seen: AssertionError: assert [] == ['step-10']\n"
    ) in said
    assert "keys_of(storage) == [sibling]" in said  # and the line itself


def test_forked_processes_answer_each_for_itself() -> None:
    here = os.getpid()
    answers = tools.in_children(os.getpid, lambda: here, lambda: os.kill(os.getpid(), signal.SIGKILL))
    assert answers[0] not in (here, None)
    assert answers[1:] == [here, -signal.SIGKILL]


def test_what_a_forked_process_raises_is_told() -> None:
    with pytest.raises(AssertionError, match=r"(?s)in a forked process .*ZeroDivisionError"):
        tools.in_children(lambda: 1, lambda: 1 // 0)


def test_a_forked_process_that_hangs_is_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tools, "_CHILD_S", 0.2)
    with pytest.raises(AssertionError, match="a forked process hangs"):
        tools.in_children(lambda: time.sleep(3600))


def test_a_large_answer_does_not_hang() -> None:
    """Larger than a pipe holds."""
    assert tools.in_children(lambda: "x" * 1_000_000, lambda: "y" * 1_000_000) == ["x" * 1_000_000, "y" * 1_000_000]
