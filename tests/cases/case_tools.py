"""What the tests of reported bugs share: a first save, a place to hold a background save at, a look at all files."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from resilio import CheckpointManager, failpoints
from resilio.cli import main


def save_first(url: str, state: Any, step: int = 1) -> None:
    """The first checkpoint of a new run."""
    with CheckpointManager(url, state, mode="sync") as ckpt:
        assert ckpt.restore().found is None
        ckpt.save(step)


class Held:
    """A place in the saving thread where it stands until it is let go."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def wait(self) -> None:
        """Until the thread is there."""
        while not self.path.exists():
            pass

    def let_go(self) -> None:
        """Wait for it, then let it go on."""
        self.wait()
        self.path.unlink()


@contextmanager
def held_at(place: str, path: Path, nth: int) -> Iterator[Held]:
    """Stop the saving thread at the failpoint `place`, the n-th time it comes there."""
    failpoints.arm(f"{place}=hold:{path}#{nth}")
    try:
        yield Held(path)
    finally:
        failpoints.disarm()
        path.unlink(missing_ok=True)  # a failed test must not leave the thread waiting


def files(folder: Path) -> dict[str, bytes]:
    """Every file below `folder` and its content."""
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def command(*words: str) -> int:
    """Run `resilio` with these words; its exit code."""
    with pytest.raises(SystemExit) as left:
        main(list(words))
    assert isinstance(left.value.code, int)
    return left.value.code
