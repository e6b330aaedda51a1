"""What a crash can leave in a file system that promises what POSIX does, and not a bit more.

The bytes of a file are certain once it was fsynced; before, it may be empty, cut short, zeroed or whole. A name in a
folder (made, linked, renamed, removed) is certain once that folder was fsynced; before, each change is there or not, in
any combination, whatever was asked for first. Only changes of one name keep their order.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import product
from random import Random

from ...storage.files import final_name, is_temp
from .log import Create, DiskCall, Entry, Known, Link, Mkdir, Replace, Sync, SyncFolder, Unlink, Write
from .states import Found, State, subsets

__all__ = ["PosixStates"]

_TORN = 16  # combinations of torn files at one moment


@dataclass(eq=False)
class _File:
    now: bytes = b""
    certain: bytes | None = None  # None: not even that it is empty

    def after_crash(self) -> list[bytes]:
        if self.certain == self.now:
            return [self.now]
        known = self.certain or b""
        half = self.now[: (len(known) + len(self.now)) // 2]
        return list(dict.fromkeys([self.now, known, half, known + bytes(len(self.now) - len(known))]))


@dataclass(eq=False)
class _Folder:
    now: dict[str, _Node] = field(default_factory=dict)
    certain: dict[str, _Node] = field(default_factory=dict)


_Node = _File | _Folder


@dataclass(eq=False)
class _Change:
    """Of names in one folder, all at once: what each is to be, None: nothing."""

    folder: _Folder
    names: dict[str, _Node | None]
    what: str


class PosixStates:
    """The states that a crash at each moment of a log can leave.

    Args:
        entries: of the log.
        prefix: the folder whose content is the store; ends with a slash.
        seed: of the choice among too many.
        exhaustive: up to how many changes at once every subset of them is tried.

    Attributes:
        operations: number of calls in the log.
        sampled: moments at which not every state was made.
    """

    def __init__(self, entries: Sequence[Entry], prefix: str, seed: int, exhaustive: int) -> None:
        self._entries = [
            (at, entry) for at, entry in enumerate(entries) if entry.call is None or isinstance(entry.call, DiskCall)
        ]
        self._prefix = prefix
        self._rng, self._exhaustive = Random(seed), exhaustive
        self._root = _Folder()
        self._files: dict[int, _File] = {}
        self._pending: list[_Change] = []
        self.operations = sum(entry.call is not None for _, entry in self._entries)
        self.sampled = 0

    def __iter__(self) -> Iterator[Found]:
        for at, entry in self._entries:
            told = "once the job was told"
            if isinstance(entry.call, DiskCall):
                self._do(entry.call)
                told = f"after {_name(entry.call)}"
                if isinstance(entry.call, Sync | SyncFolder):
                    continue  # makes certain what could have been before: nothing new
            yield from self._crash(entry.known, at, told)

    def _do(self, call: DiskCall) -> None:
        if isinstance(call, Write):
            self._files[call.file].now += call.data
        elif isinstance(call, Sync):
            self._files[call.file].certain = self._files[call.file].now
        elif isinstance(call, SyncFolder):
            folder = self._folder(call.path)
            for change in self._pending:
                if change.folder is folder:
                    _apply(change, folder.certain)
            self._pending = [change for change in self._pending if change.folder is not folder]
            if self._pending:
                there = self._perhaps_there()  # names in a folder that is gone for certain do not matter any more
                self._pending = [change for change in self._pending if id(change.folder) in there]
        elif isinstance(call, Create):
            self._files[call.file] = _File()
            self._change(call.path, self._files[call.file], call)
        elif isinstance(call, Mkdir):
            self._change(call.path, _Folder(), call)
        elif isinstance(call, Link):
            self._change(call.new, self._node(call.path), call)
        elif isinstance(call, Replace):
            parent, old, new = call.path.rpartition("/")[0], call.path.rpartition("/")[2], call.new.rpartition("/")[2]
            folder = self._folder(parent)
            self._add(_Change(folder, {old: None, new: folder.now[old]}, _name(call)))
        else:
            self._change(call.path, None, call)

    def _perhaps_there(self) -> set[int]:
        """Ids of the folders that a crash may leave."""
        found: set[int] = set()
        todo: list[_Node] = [self._root]
        while todo:
            node = todo.pop()
            if isinstance(node, _Folder) and id(node) not in found:
                found.add(id(node))
                todo += node.certain.values()
                todo += [n for c in self._pending if c.folder is node for n in c.names.values() if n is not None]
        return found

    def _change(self, path: str, node: _Node | None, call: DiskCall) -> None:
        parent, _, name = path.rpartition("/")
        self._add(_Change(self._folder(parent), {name: node}, _name(call)))

    def _add(self, change: _Change) -> None:
        _apply(change, change.folder.now)
        self._pending.append(change)

    def _node(self, path: str) -> _Node:
        node: _Node = self._root
        for part in path.split("/") if path not in ("", ".") else ():
            assert isinstance(node, _Folder)
            node = node.now[part]
        return node

    def _folder(self, path: str) -> _Folder:
        node = self._node(path)
        assert isinstance(node, _Folder)
        return node

    def _crash(self, known: Known, at: int, told: str) -> Iterator[Found]:
        for kept in subsets(self._pending, self._exhaustive, self._rng, self._note):
            tree = self._tree(kept)
            torn = [name for name, file in tree.items() if not is_temp(name.rpartition("/")[2]) and _uncertain(file)]
            ways = list(product(*(tree[name].after_crash() for name in torn)))
            if len(ways) > _TORN:
                self._note()
                ways = [ways[0], *self._rng.sample(ways[1:], _TORN - 1)]
            for way in ways:
                how = told
                lost = [change.what for change in self._pending if change not in kept]
                cut = [name for name, data in zip(torn, way, strict=True) if data != tree[name].now]
                if lost:
                    how += f"; lost: {', '.join(lost[:4])}{' …' if len(lost) > 4 else ''}"
                if cut:
                    how += f"; torn: {', '.join(cut[:4])}"
                yield Found(self._state(tree, dict(zip(torn, way, strict=True))), known, at, how)

    def _tree(self, kept: Sequence[_Change]) -> dict[str, _File]:
        """Path -> file, of all that hangs together if of the pending changes just these are there."""
        changes: dict[int, list[_Change]] = {}
        for change in kept:
            changes.setdefault(id(change.folder), []).append(change)
        found: dict[str, _File] = {}
        todo = [("", self._root)]
        while todo:
            base, folder = todo.pop()
            names = folder.certain
            if id(folder) in changes:
                names = dict(names)
                for change in changes[id(folder)]:
                    _apply(change, names)
            for name, node in names.items():
                if isinstance(node, _File):
                    found[base + name] = node
                else:
                    todo.append((f"{base}{name}/", node))
        return found

    def _state(self, tree: dict[str, _File], torn: dict[str, bytes]) -> State:
        objects, uploads = {}, set()
        for path, file in tree.items():
            key = path.removeprefix(self._prefix)
            folder, slash, name = key.rpartition("/")
            if is_temp(name):
                uploads.add(folder + slash + final_name(name))
            else:
                objects[key] = torn.get(path, file.now)
        return State(objects, frozenset(uploads))

    def _note(self) -> None:
        self.sampled += 1


def _apply(change: _Change, names: dict[str, _Node]) -> None:
    for name, node in change.names.items():
        if node is None:
            names.pop(name, None)
        else:
            names[name] = node


def _uncertain(file: _File) -> bool:
    return file.certain != file.now


def _name(call: DiskCall) -> str:
    if isinstance(call, Write | Sync):
        return f"{type(call).__name__.lower()} of file {call.file}"
    if isinstance(call, Link | Replace):
        return f"{type(call).__name__.lower()} to {call.new}"
    verb = "rmdir" if isinstance(call, Unlink) and call.folder else type(call).__name__.lower()
    return f"{verb} {call.path}"
