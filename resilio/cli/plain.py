"""Folders that plain `torch.distributed.checkpoint` wrote: one, or a tree of them (`step-100/.metadata`). Only read.

They carry no digests, no commit records and no lineage, so little can be proven of them, and each answer says so.
"""

from __future__ import annotations

import io
import re
import zipfile
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from ..errors import FormatError, IntegrityError, NoCheckpointError, NotFoundError
from ..records import keys
from ..storage.base import Storage
from ..types import Damage

if TYPE_CHECKING:
    from ..engine import ForeignCheckpoint

__all__ = ["UNPROVEN", "PlainFolder", "check", "choose", "folders", "open_one", "rows"]

UNPROVEN = (
    "plain torch.distributed.checkpoint saves no digests and no record that a save ended: nothing can prove that these "
    "are the bytes that were saved, nor all of them"
)
_BUFFER = 1 << 20
_OBJECTS = 200_000  # below a URL that is no run, before we stop looking: it may be a whole bucket
_ENTRIES = 1000  # of what torch.save writes for one tensor or value

Progress = Callable[[int, int], None]


@dataclass
class PlainFolder:
    """One plain DCP checkpoint, as a listing shows it.

    Attributes:
        name: of its folder below the URL; empty if it is the URL itself.
        sizes: of its objects, by key below its folder.
        modified_s: when `.metadata` was stored, Unix seconds, None where the store does not tell.
    """

    name: str
    sizes: dict[str, int] = field(default_factory=dict)
    modified_s: float | None = None

    @property
    def step(self) -> int | None:
        """The number at the end of its name, as most trainers write it."""
        found = re.search(r"([0-9]{1,18})$", self.name)
        return int(found[1]) if found else None

    @property
    def size_bytes(self) -> int:
        """Of all objects in it."""
        return sum(self.sizes.values())


def folders(storage: Storage) -> list[PlainFolder]:
    """The plain DCP checkpoints at the root of `storage` or one level below, by step; none where there is a run."""
    if storage.exists(keys.RUN) or any(True for _ in storage.list(keys.GENERATIONS)):
        return []  # its folders are attempts, and whether one counts its records say
    found: dict[str, PlainFolder] = {}
    whole: dict[str, int] = {}
    for number, info in enumerate(storage.list("")):
        if number == _OBJECTS:
            raise NoCheckpointError(
                f"{storage.url}: there is no run, and more than {_OBJECTS:,} objects. Give the URL of one checkpoint."
            )
        whole[info.key] = info.size_bytes
        name, _, rest = info.key.rpartition("/") if info.key == keys.METADATA else info.key.partition("/")
        one = found.setdefault(name, PlainFolder(name))
        one.sizes[rest] = info.size_bytes
        if rest == keys.METADATA:
            one.modified_s = info.modified_s
    if keys.METADATA in whole:
        return [PlainFolder("", whole, found[""].modified_s)]
    plain = [one for one in found.values() if keys.METADATA in one.sizes]
    return sorted(plain, key=lambda one: (-1 if one.step is None else one.step, one.name))


def choose(storage: Storage, found: list[PlainFolder], which: str | None) -> PlainFolder:
    """The folder that `which` means: None the one of the highest step, a step, or a name.

    Raises:
        NoCheckpointError: there is none, or there are several.
    """
    if which is None:
        return found[-1]
    fits = [one for one in found if one.name == which] or [
        one for one in found if which.isdecimal() and which.isascii() and one.step == int(which)
    ]
    if len(fits) == 1:
        return fits[0]
    names = ", ".join(one.name or "the folder itself" for one in (fits or found)[-10:])
    raise NoCheckpointError(
        f"{storage.url}: {'several are' if fits else 'no'} checkpoint {which!r}; there are {names}."
    )


def open_one(storage: Storage, one: PlainFolder) -> tuple[Storage, ForeignCheckpoint]:
    """Its own storage, to be closed, and its metadata, every field checked. Nothing in it is run.

    Raises:
        FormatError: `.metadata` is not what stock DCP writes.
        IntegrityError: an object is missing or too short.
    """
    from ..engine import open_foreign
    from ..hooks import open_storage

    if not one.name:
        return storage, open_foreign(storage)
    below = open_storage(f"{storage.url.rstrip('/')}/{one.name}")
    try:
        return below, open_foreign(below)
    except BaseException:
        below.close()
        raise


def rows(checkpoint: ForeignCheckpoint) -> tuple[list[dict[str, Any]], dict[str, int]]:
    """Every tensor as `show --tensors` lists it, and how many values each component has."""
    tensors, values = [], []
    for key, entry in sorted(checkpoint.metadata.state_dict_metadata.items()):
        chunks = getattr(entry, "chunks", None)
        if chunks is None:
            values.append(key)
            continue
        dtype = entry.properties.dtype  # type: ignore[union-attr]
        shape = list(entry.size)  # type: ignore[union-attr]
        size_bytes = dtype.itemsize
        for length in shape:
            size_bytes *= length
        tensors.append(
            {
                "name": key,
                "dtype": str(dtype).removeprefix("torch."),
                "shape": shape,
                "size_bytes": size_bytes,
                "pieces": len(chunks),
                "tied_to": None,
            }
        )
    return tensors, dict(sorted(Counter(key.partition(".")[0] for key in values).items()))


def check(storage: Storage, one: PlainFolder, *, read: bool, progress: Progress | None = None) -> list[Damage]:
    """What can be seen to be wrong: metadata, names and sizes of files; with `read` each piece, by the CRC-32 in it.

    Never that all is well: `UNPROVEN`.
    """
    prefix = f"{one.name}/" if one.name else ""
    try:
        below, checkpoint = open_one(storage, one)
    except (FormatError, IntegrityError, NotFoundError) as error:
        return [Damage(f"{prefix}{getattr(error, 'where', None) or keys.METADATA}", str(error))]
    try:
        places = sorted(
            (
                (place.relative_path, place.offset, place.length, index.fqn)
                for index, place in checkpoint.metadata.storage_data.items()
            ),
        )
        damage, done, total = [], 0, sum(length for _, _, length, _ in places)
        for path, offset, length, name in places if read else ():
            problem = _problem(below, path, offset, length)
            if problem:
                damage.append(Damage(f"{prefix}{path}", f"{name!r} at byte {offset}: {problem}", {"tensor": name}))
            done += length
            if progress:
                progress(done, total)
        return damage
    finally:
        if below is not storage:
            below.close()


def _problem(storage: Storage, key: str, offset: int, length: int) -> str | None:
    """What is wrong with what torch.save wrote there, None if it can be read and its CRC-32 fit."""
    from ..engine import check_directory

    try:
        stream = io.BufferedReader(_Range(storage, key, offset, length), _BUFFER)
        check_directory(stream)
        with zipfile.ZipFile(stream) as inside:
            entries = inside.infolist()
            if len(entries) > _ENTRIES or any(entry.compress_type != zipfile.ZIP_STORED for entry in entries):
                return "it is not what torch.save writes"
            if sum(entry.file_size for entry in entries) > length:  # else it is read again and again
                return "its records overlap, or are said to hold more than there is"
            bad = inside.testzip()
    except NotFoundError:
        return "is missing"
    except (zipfile.BadZipFile, IntegrityError, EOFError, NotImplementedError, RuntimeError, ValueError) as error:
        return f"it cannot be read: {error}"
    return f"its CRC-32 does not fit ({bad})" if bad else None


class _Range(io.RawIOBase):
    """A part of an object as a file."""

    def __init__(self, storage: Storage, key: str, offset: int, length: int) -> None:
        self._storage, self._key, self._offset, self._length = storage, key, offset, length
        self._at = 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        base = {io.SEEK_SET: 0, io.SEEK_CUR: self._at, io.SEEK_END: self._length}[whence]
        if base + offset < 0:
            raise ValueError("before the begin")
        self._at = base + offset
        return self._at

    def readinto(self, buffer: Any) -> int:
        view = memoryview(buffer).cast("B")
        view = view[: max(0, min(len(view), self._length - self._at))]
        if len(view):
            self._storage.read_into(self._key, [(self._offset + self._at, view)])
            self._at += len(view)
        return len(view)
