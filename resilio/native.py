"""Inner loops in C, where there is a compiler. What they compute is there in Python as well: only the speed differs.

Compiled for the machine that they run on, so nothing is shipped; kept in the user's cache folder, since a process that
looks at one checkpoint would be through before its compiler.
"""

from __future__ import annotations

import ctypes
import hashlib
import logging
import os
import platform
import shutil
import stat
import subprocess
import tempfile
from contextlib import suppress
from pathlib import Path

__all__ = ["compiled"]

_log = logging.getLogger("resilio")
_TIMEOUT_S = 60.0


def compiled(name: str, source: str) -> ctypes.CDLL | None:
    """The library that C source makes, or None where there is none to be had. Never raises an `Exception`.

    Args:
        name: of the files, for whoever finds them.
        source: of functions that are called without the interpreter's lock.

    Blocks: for some tenths of a second, the first time on a machine.
    """
    try:
        kept = _kept(name, source)
        if kept is not None and _ours(kept):
            with suppress(OSError):  # of another system that shares the folder
                return ctypes.CDLL(str(kept))
        compiler = next(filter(None, map(shutil.which, (os.environ.get("CC") or "cc", "gcc", "clang"))), None)
        if compiler is None:
            _log.debug("no C compiler: %s is computed in Python", name)
            return None
        with tempfile.TemporaryDirectory(prefix=f"resilio-{name}-") as folder:
            built = _compile(compiler, Path(folder) / f"{name}.c", source)
            if kept is not None:
                with suppress(OSError):  # no home, a full disk: then the next process compiles again
                    _keep(built, kept)
            return ctypes.CDLL(str(built))  # stays loaded when the file is gone
    except Exception as error:  # noqa: BLE001  the plain way is there
        _log.debug("%s is computed in Python: %s: %s", name, type(error).__name__, error)
        return None


def _compile(compiler: str, path: Path, source: str) -> Path:
    path.write_text(source)
    built = path.with_suffix(".so")
    command = [compiler, "-O3", "-shared", "-fPIC", "-o", str(built), str(path)]
    try:
        _run([*command, "-march=native"])
    except subprocess.CalledProcessError:  # not every compiler knows its machine
        _run(command)
    return built


def _run(command: list[str]) -> None:
    subprocess.run(
        command,
        check=True,
        timeout=_TIMEOUT_S,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )


def _kept(name: str, source: str) -> Path | None:
    """Where the library of this source for this machine is kept. Homes are shared by machines of many kinds."""
    home = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")  # noqa: PTH111  raises without a home
    if not os.path.isabs(home):  # noqa: PTH117
        return None
    machine = [platform.machine(), platform.system(), *platform.libc_ver()]
    with suppress(OSError), Path("/proc/cpuinfo").open(encoding="utf-8") as file:
        machine += [line for line in file.read(65536).split("\n\n")[0].splitlines() if _names_a_kind(line)]
    key = hashlib.sha256("\n".join([source, *machine]).encode()).hexdigest()[:32]
    return Path(home) / "resilio" / f"{name}-{key}.so"


def _names_a_kind(line: str) -> bool:
    return line.split("\t")[0].strip() in ("model name", "flags", "Features", "CPU part", "isa")


def _ours(path: Path) -> bool:
    """Whether nobody else can have put it there."""
    for one, is_kind in ((path.parent, stat.S_ISDIR), (path, stat.S_ISREG)):
        try:
            found = one.lstat()
        except OSError:
            return False
        if not is_kind(found.st_mode) or found.st_uid != os.geteuid() or found.st_mode & 0o022:
            return False
    return True


def _keep(built: Path, kept: Path) -> None:
    kept.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    fd, temp = tempfile.mkstemp(prefix=f".{kept.name}-", dir=kept.parent)
    try:
        with os.fdopen(fd, "wb") as file:
            file.write(built.read_bytes())
            file.flush()
            os.fsync(file.fileno())  # a library that is half there can end the process that loads it
        os.replace(temp, kept)  # noqa: PTH105
    except BaseException:
        with suppress(OSError):
            os.unlink(temp)  # noqa: PTH108
        raise
