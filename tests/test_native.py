"""Loops in C: compiled once on a machine, kept where nobody else can write, and never needed."""

from __future__ import annotations

import logging
import os
from pathlib import Path
from typing import Any

import pytest

from resilio import native

SOURCE = "int answer(void) { return 42; }"


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: Any) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    if native.compiled("probe", SOURCE) is None:
        pytest.skip("no C compiler here")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "own"))
    return tmp_path / "own" / "resilio"


@pytest.fixture
def without_compiler(monkeypatch: Any) -> Any:
    def take_away() -> None:
        monkeypatch.setenv("PATH", "/nowhere")
        monkeypatch.setenv("CC", "no-such-compiler")

    return take_away


def test_what_was_compiled_once_needs_no_compiler_again(cache: Path, without_compiler: Any) -> None:
    first = native.compiled("answer", SOURCE)
    assert first is not None and first.answer() == 42
    [kept] = cache.iterdir()
    assert kept.stat().st_mode & 0o777 == 0o600 and cache.stat().st_mode & 0o777 == 0o700
    without_compiler()
    again = native.compiled("answer", SOURCE)
    assert again is not None and again.answer() == 42
    assert native.compiled("answer", SOURCE.replace("42", "43")) is None  # another source, another library


def test_without_a_compiler_there_is_none_and_a_log_says_so(without_compiler: Any, caplog: Any) -> None:
    without_compiler()
    with caplog.at_level(logging.DEBUG, "resilio"):
        assert native.compiled("answer", SOURCE) is None
    assert "no C compiler: answer is computed in Python" in caplog.text


def test_a_source_that_does_not_compile_is_none(cache: Path) -> None:
    assert native.compiled("answer", "int answer(void) { return") is None
    assert not cache.exists()


@pytest.mark.parametrize("who", ["folder", "file"])
def test_what_others_may_write_to_is_not_loaded(cache: Path, without_compiler: Any, who: str) -> None:
    native.compiled("answer", SOURCE)
    [kept] = cache.iterdir()
    (cache if who == "folder" else kept).chmod(0o777)
    without_compiler()
    assert native.compiled("answer", SOURCE) is None


def test_a_link_in_its_place_is_not_followed(cache: Path, without_compiler: Any) -> None:
    native.compiled("answer", SOURCE)
    [kept] = cache.iterdir()
    kept.rename(cache / "elsewhere")
    kept.symlink_to(cache / "elsewhere")
    without_compiler()
    assert native.compiled("answer", SOURCE) is None


def test_what_cannot_be_loaded_is_compiled_anew(cache: Path) -> None:
    native.compiled("answer", SOURCE)
    [kept] = cache.iterdir()
    kept.write_bytes(b"of another system")
    again = native.compiled("answer", SOURCE)
    assert again is not None and again.answer() == 42
    assert kept.stat().st_size > 1000


@pytest.mark.parametrize("home", ["relative/path", "/dev/null/none"])
def test_without_a_place_to_keep_it_it_is_compiled_each_time(monkeypatch: Any, home: str) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", home)
    found = native.compiled("answer", SOURCE)
    assert found is not None and found.answer() == 42
    assert not os.path.exists("relative")
