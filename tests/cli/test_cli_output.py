"""How the command writes sizes, times and texts, and which exit code ends which error."""

from __future__ import annotations

import json
import math
import sys

import pytest

from resilio import errors
from resilio.cli.errors import exit_code, report
from resilio.cli.output import ago, clean, emit_json, emit_page, iso, size
from resilio.cli.tables import Table


@pytest.mark.parametrize(
    ("size_bytes", "text"),
    [
        (None, "?"),
        (0, "0 B"),
        (1023, "1023 B"),
        (1024, "1.0 KiB"),
        (1536, "1.5 KiB"),
        (1024**2 - 1, "1.0 MiB"),
        (1_490_000_000, "1.4 GiB"),
        (2**63 - 1, "8.0 EiB"),
    ],
)
def test_sizes(size_bytes: int | None, text: str) -> None:
    assert size(size_bytes) == text


@pytest.mark.parametrize(
    ("passed_s", "text"),
    [
        (0, "just now"),
        (-30, "just now"),
        (-3600, "in the future"),
        (59, "59 s ago"),
        (60, "1 min ago"),
        (7199, "119 min ago"),
        (7200, "2 h ago"),
        (86400, "24 h ago"),
        (200_000, "2 d ago"),
        (math.nan, "in the future"),
    ],
)
def test_relative_times(passed_s: float, text: str) -> None:
    assert ago(1e9 - passed_s, 1e9) == text


def test_times_are_utc_and_never_raise() -> None:
    assert iso(1_700_000_000.9) == "2023-11-14T22:13:20Z"
    assert [iso(bad) for bad in (math.nan, math.inf, 1e300, -1e300)] == ["?"] * 4


def test_control_characters_never_reach_the_terminal() -> None:
    assert clean("läuft \x1b]0;evil\x07\n") == "läuft \\x1b]0;evil\\x07\\n"


def test_markup_in_texts_is_shown_as_it_is(capsys: pytest.CaptureFixture[str]) -> None:
    emit_page("[red]x[/] :smile:")
    assert capsys.readouterr().out == "[red]x[/] :smile:\n"


def test_a_table_is_aligned_by_what_a_terminal_shows_and_has_no_blanks_at_the_ends() -> None:
    table = Table("step", "name", "then")
    table.add_row("1", "läuft", "")
    table.add_row("1000", "検査", "x", style="dim")
    table.add_row("20", "e\u0301", "y")
    assert list(table.lines()) == ["step  name   then", "   1  läuft", "1000  検査   x", "  20  e\u0301      y"]
    assert list(table.lines(styled=True))[2] == "\x1b[2m1000  検査   x\x1b[0m"
    bare = Table()
    bare.add_row("a", "b")
    assert list(bare.lines()) == ["a  b"]


def test_colour_is_for_terminals_that_want_it(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    table = Table("x")
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.delenv("NO_COLOR", raising=False)
    emit_page(table)
    assert capsys.readouterr().out == "x\n"
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    emit_page(table)
    assert capsys.readouterr().out == "\x1b[1mx\x1b[0m\n"
    for name, value in (("NO_COLOR", "1"), ("TERM", "dumb")):
        monkeypatch.setenv(name, value)
        emit_page(table)
        assert capsys.readouterr().out == "x\n"


def test_json_has_no_nan_literals_and_sorted_keys(capsys: pytest.CaptureFixture[str]) -> None:
    emit_json({"b": math.nan, "a": [math.inf, (-math.inf,)], "c": {1: 0.5}})
    text = capsys.readouterr().out
    assert json.loads(text, parse_constant=pytest.fail) == {"a": ["inf", ["-inf"]], "b": "nan", "c": {"1": 0.5}}
    assert text.index('"a"') < text.index('"b"') < text.index('"c"')


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (errors.IntegrityError("x"), 1),
        (errors.FormatError("x"), 1),
        (errors.ConfigError("x"), 2),
        (errors.UnknownSchemeError("x"), 2),
        (errors.NewerFormatError("x"), 3),
        (errors.NoCheckpointError("x"), 4),
        (errors.NotFoundError("x"), 5),
        (errors.AccessDeniedError("x"), 5),
        (errors.TransientError("x"), 5),
        (errors.InternalError("x"), 5),
        (OSError(5, "x"), 5),
        (ZeroDivisionError("x"), 5),
        (KeyboardInterrupt(), 130),
    ],
)
def test_exit_codes(error: BaseException, code: int, capsys: pytest.CaptureFixture[str]) -> None:
    """1 means "checked and found wanting" and nothing else, so no accident of ours may end with it."""
    assert exit_code(error) == code
    assert report(error, as_json=True, debug=False) == code
    told = json.loads(capsys.readouterr().err)["error"]
    assert told["exit_code"] == code
    assert told["type"] == type(error).__name__
    assert told["message"]


def test_an_error_is_one_line_unless_debug_asks(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("RESILIO_DEBUG", raising=False)
    report(errors.NoCheckpointError("nothing at \x1b[31m here"), as_json=False, debug=False)
    assert capsys.readouterr().err == "resilio: nothing at \\x1b[31m here\n"
    report(ZeroDivisionError("x"), as_json=False, debug=False)
    assert "report it" in capsys.readouterr().err
    report(errors.NoCheckpointError("x"), as_json=False, debug=True)
    assert "NoCheckpointError: x" in capsys.readouterr().err
    monkeypatch.setenv("RESILIO_DEBUG", "1")
    report(errors.NoCheckpointError("x"), as_json=False, debug=False)
    assert "NoCheckpointError: x" in capsys.readouterr().err
