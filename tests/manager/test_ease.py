"""What people see: one line for each object, and a bar on a terminal while a long restore reads."""

from __future__ import annotations

import logging
import os
import pty
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import resilio
from resilio import CheckpointManager, RestoreReport, TrainingState, keep_last, open_storage, save_every
from resilio.errors import SaveError
from resilio.manager import progress
from resilio.manager.progress import ReadProgress
from resilio.storage import retrying
from resilio.testing.worlds import run_world
from resilio.types import CheckpointInfo, CheckpointRef, Damage


def one_line(thing: object) -> str:
    text = repr(thing)
    assert "\n" not in text and not re.search(r"0x[0-9a-f]{4}", text), text
    return text


def test_what_is_printed_is_one_line_that_says_what_it_is(tmp_path):
    url = f"file://{tmp_path}/run"
    state = TrainingState(model=torch.nn.Linear(2, 2), epoch=3)
    assert one_line(state) == "<TrainingState model, epoch, rng>"
    ckpt = CheckpointManager(url, state)
    assert one_line(ckpt) == f"<CheckpointManager {url} async, rank 0 of 1, next step 1>"
    assert one_line(ckpt.restore()) == "<RestoreReport no checkpoint: a new run>"
    handle = ckpt.save(4, metrics={"loss": 0.25, "acc\n": float("nan")})
    assert one_line(handle).startswith("<SaveHandle step 4 ")
    handle.result()
    assert one_line(handle) == "<SaveHandle step 4 committed>"
    assert one_line(ckpt) == f"<CheckpointManager {url} async, rank 0 of 1, <SaveHandle step 4 committed>>"
    assert one_line(ckpt.restore()) == "<RestoreReport step 4 (generation 1), model exact, epoch exact, rng exact>"
    (info,) = ckpt.checkpoints()
    assert one_line(info) == (
        f"<CheckpointInfo step 4 (generation 1), 1 rank(s), {info.size_bytes:,} bytes, 'loss': 0.25, 'acc\\n': nan>"
    )
    ckpt.close()
    assert one_line(ckpt) == f"<CheckpointManager {url} async, rank 0 of 1, closed>"


def test_a_failed_handle_a_branch_left_behind_and_a_report_of_damage_say_so(tmp_path):
    resilio.failpoints.arm("save.data_written=raise")
    try:
        with CheckpointManager(f"file://{tmp_path}", {"n": {"x": 1}}) as ckpt:
            handle = ckpt.save(1)
            assert isinstance(handle.exception(), SaveError)
            assert one_line(handle) == "<SaveHandle step 1 failed>"
            with pytest.raises(SaveError):
                ckpt.close()
    finally:
        resilio.failpoints.disarm()
    info = CheckpointInfo(CheckpointRef(2, 7), "a", 0.0, 4, on_lineage=False)
    assert one_line(info) == "<CheckpointInfo step 7 (generation 2), 4 rank(s), off the lineage>"
    report = RestoreReport(info, passed_over=(Damage("a", "b"), Damage("c", "d")))
    assert one_line(report) == "<RestoreReport step 7 (generation 2), 2 passed over>"


def test_storages_say_kind_and_url(tmp_path):
    local = open_storage(f"file://{tmp_path}/x")
    assert f"file://{tmp_path}/x" in one_line(local)
    assert f"file://{tmp_path}/x" in one_line(retrying(local))
    assert one_line(open_storage("memory://ease")).endswith("memory://ease>")


CHILD = """
import sys, torch
from resilio import CheckpointManager
from resilio.manager import progress
live = torch.zeros(300_000)
with CheckpointManager(sys.argv[1], {"live": live}) as ckpt:
    ckpt.restore()
    print("rich.progress" in sys.modules)
    progress.AFTER_S = 0.0
    ckpt.restore()
assert live.sum() == 300_000
"""


def test_a_long_restore_draws_a_bar_on_a_terminal_and_a_short_one_does_not_even_import_it(run_url):
    leader, follower = pty.openpty()
    try:
        done = subprocess.run(
            [sys.executable, "-c", CHILD, run_url],
            stdout=subprocess.PIPE,
            stderr=follower,
            timeout=120,
            env={**os.environ, "TERM": "xterm"},
        )
        os.write(follower, b"|")
        seen = b""
        while not seen.endswith(b"|"):
            seen += os.read(leader, 65536)
    finally:
        os.close(leader)
        os.close(follower)
    assert (done.returncode, done.stdout) == (0, b"False\n"), seen
    assert b"restoring step 12" in seen
    assert seen.endswith(b"\x1b[2K|")  # it is taken away again


@pytest.fixture(scope="module")
def run_url(tmp_path_factory: pytest.TempPathFactory) -> str:
    path: Path = tmp_path_factory.mktemp("ease")
    with CheckpointManager(f"file://{path}", {"live": torch.ones(300_000)}) as ckpt:
        ckpt.save(12)
    return f"file://{path}"


class Terminal:
    """A stream, looked at by people or not."""

    def __init__(self, terminal: bool = True) -> None:
        self.text, self.terminal = "", terminal

    def isatty(self) -> bool:
        return self.terminal

    def write(self, text: str) -> int:
        self.text += text
        return len(text)

    def flush(self) -> None:
        pass


@pytest.mark.parametrize("readonly", [False, True], ids=["manager", "restore"])
@pytest.mark.parametrize(
    ("shown", "terminal", "drawn"),
    [(None, True, True), (None, False, False), (False, True, False), (True, False, True)],
    ids=["terminal", "no-terminal", "switched-off", "asked-for"],
)
def test_the_bar_can_be_asked_for_and_switched_off(monkeypatch, run_url, shown, terminal, drawn, readonly):
    screen = Terminal(terminal)
    monkeypatch.setattr(sys, "stderr", screen)
    monkeypatch.setattr(progress, "AFTER_S", 0.0)
    live = torch.zeros(300_000)
    if readonly:
        resilio.restore(run_url, {"live": live}, progress=shown)
    else:
        with CheckpointManager(run_url, {"live": live}, progress=shown) as ckpt:
            assert ckpt.restore().read_bytes >= 1_200_000
    assert ("restoring step 12" in screen.text) == drawn


def restore_on_all(rank: int, world: int, url: str) -> str:
    sys.stderr = screen = Terminal()  # type: ignore[assignment]
    progress.AFTER_S = 0.0
    resilio.restore(url, {"live": torch.zeros(300_000)}, progress=True)
    return screen.text


def test_of_several_ranks_only_the_first_draws(run_url):
    first, second = run_world(restore_on_all, 2, run_url)
    assert "restoring step 12" in first
    assert second == ""


def test_bytes_are_counted_and_the_bar_goes_when_the_read_fails(monkeypatch):
    screen = Terminal()
    monkeypatch.setattr(sys, "stderr", screen)
    monkeypatch.setattr(progress, "AFTER_S", 0.0)
    reading = ReadProgress("restoring", 10, None)
    with pytest.raises(ZeroDivisionError), reading:
        reading(4)
        assert sys.stderr is screen  # the training's streams stay its own
        reading(7)  # more than was planned is no error
        raise ZeroDivisionError
    assert reading.done_bytes == 11
    assert "\x1b[?25h" in screen.text  # the cursor is back
    length = len(screen.text)
    reading(1)  # a thread that was late draws nothing any more
    assert len(screen.text) == length


def test_other_ranks_and_processes_without_stderr_draw_nothing(monkeypatch):
    monkeypatch.setattr(progress, "AFTER_S", 0.0)
    monkeypatch.setattr(sys, "stderr", None)
    for shown in (None, False):
        with ReadProgress("restoring", 10, shown) as reading:
            reading(10)
        assert reading.done_bytes == 10


def logged(rank: int, world: int, url: str) -> list[str]:
    records: list[logging.LogRecord] = []

    class Kept(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            records.append(record)

    logging.getLogger("resilio").setLevel(logging.INFO)
    logging.getLogger("resilio").addHandler(Kept())
    with CheckpointManager(url, {"n": {"x": 1}}, keep=keep_last(1), save=save_every(1), mode="sync") as ckpt:
        ckpt.restore()
        ckpt.step(1)
        ckpt.step(2)
        ckpt.restore()
    return [f"{record.levelname} {record.getMessage()}" for record in records]


def test_each_deed_is_one_line_at_info_on_rank_0_alone(tmp_path):
    told, silent = run_world(logged, 2, f"file://{tmp_path}")
    assert silent == []
    assert all("\n" not in line for line in told)
    patterns = [
        r"INFO saved step=1 generation=1 world=2 seconds=\d+\.\d+ size_bytes=\d+ reason='every 1 steps?'",
        r"INFO saved step=2 .*",
        r"INFO swept checkpoints=\[1\] leftovers=0 failed=\[\]",
        r"INFO restored step=2 generation=1 saved_world=2 world=2 seconds=\d+\.\d+ read_bytes=\d+ passed_over=0",
    ]
    assert len(told) == len(patterns)
    for line, pattern in zip(told, patterns, strict=True):
        assert re.fullmatch(pattern, line)
