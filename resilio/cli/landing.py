"""Files that appear whole or not at all: written beside their place, then renamed."""

from __future__ import annotations

import os
import shutil
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from ..errors import ConfigError

__all__ = ["landing"]


@contextmanager
def landing(target: Path, *, folder: bool, force: bool, ours: Callable[[str], bool]) -> Iterator[Path]:
    """A new file, or an empty folder, that takes the name `target` when the block ends cleanly, and else is removed.

    Args:
        target: where to.
        folder: whether it is to be a folder.
        force: whether what is there may be replaced. A folder only if all in it is `ours`, by name: this is no tool to
            delete other things with.
        ours: which names in a folder may go.

    Raises:
        ConfigError: something is there.
    """
    if os.path.lexists(target):
        if not force:
            raise ConfigError(f"{target} is there already. Choose another --to, or replace it with --force.")
        if target.is_dir() != folder or target.is_symlink():
            raise ConfigError(f"{target} is no {'folder' if folder else 'file'}, and is not replaced.")
        strange = sorted(name.name for name in target.iterdir() if not ours(name.name)) if folder else []
        if strange:
            raise ConfigError(f"{target} holds what no export wrote ({', '.join(strange[:3])}), and is not replaced.")
    target.parent.mkdir(parents=True, exist_ok=True)
    part = target.parent / f".{target.name}.{uuid.uuid4().hex[:8]}.partial"
    try:
        if folder:
            part.mkdir()
        yield part
        for path in [*part.iterdir(), part] if folder else [part]:
            _sync(path)
        if folder and target.exists():
            old = part.with_suffix(".old")
            target.rename(old)
            part.rename(target)
            shutil.rmtree(old)
        else:
            part.replace(target)
        _sync(target.parent)
    finally:
        if folder:
            shutil.rmtree(part, ignore_errors=True)
        else:
            part.unlink(missing_ok=True)


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
