"""Between nested state and flat keys.

Flat keys and paths are those that plain DCP's own flattening gives: mappings are entered, a list only if there is a
tensor or a mapping in it, everything else is one value. Two things go further, so that nothing is lost: tuples and sets
are entered if there is a tensor in them, and the tree keeps what a dotted key cannot: which container stood there and
the type of its keys.
"""

from __future__ import annotations

import copy
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch

from ..errors import CaptureError
from ..records.values import DEPTH_LIMIT, encode_value
from .flat import FlatState, Kind, Path, Ref
from .tensors import refusal

__all__ = ["Flattener", "alike", "build", "refs", "state_of", "text_of"]

_IMMUTABLE = frozenset((type(None), bool, int, float, str, bytes, complex))


def _has_tensor(value: Any) -> bool:
    if type(value) in _IMMUTABLE:
        return False
    if isinstance(value, torch.Tensor):
        return True
    if isinstance(value, Mapping):
        return any(map(_has_tensor, value.values()))
    return isinstance(value, (list, tuple, set, frozenset)) and any(map(_has_tensor, value))


def _entered(value: list[Any]) -> bool:
    for item in value:
        if type(item) in _IMMUTABLE:
            continue
        if isinstance(item, (torch.Tensor, Mapping)) or _has_tensor(item):
            return True
        if isinstance(item, list) and _entered(item):
            return True
    return False


def _dotted(path: Path) -> str:
    return ".".join(map(str, path))


def _endless(path: Path, value: Any, above: tuple[int, ...]) -> str | None:
    """What is wrong with state that was too deep to be walked through, and where."""
    if not isinstance(value, (Mapping, list, tuple, set, frozenset)):
        return None
    if id(value) in above:
        return f"{_dotted(path)} holds itself: a container that it is in stands there; leave it out"
    if len(above) == DEPTH_LIMIT:
        return f"{_dotted(path)} is nested deeper than {DEPTH_LIMIT}; flatten it, or leave it out"
    for key, below in value.items() if isinstance(value, Mapping) else enumerate(value):
        found = _endless((*path, str(key)), below, (*above, id(value)))
        if found is not None:
            return found
    return None


def text_of(error: BaseException) -> str:
    """Type and message of an error, for a message of ours; many an `assert` has no message."""
    return ": ".join(filter(None, (type(error).__name__, str(error))))


def state_of(holder: Any, what: str) -> Any:
    """What `holder.state_dict()` returns.

    Args:
        holder: somebody's object.
        what: its name in the state, for the error.

    Raises:
        CaptureError: whatever it raised.
    """
    try:
        return holder.state_dict()
    except (KeyboardInterrupt, SystemExit):
        raise
    except BaseException as error:  # DCP's own is no Exception, and a part of the state may well use DCP
        raise CaptureError(f"{what}: state_dict() raised {text_of(error)}", key=what) from error


class Flattener:
    """Collects nested state into one `FlatState`."""

    def __init__(self) -> None:
        self.flat = FlatState()
        self._paths: set[Path] = set()

    def add(self, path: Path, value: Any, kind: Kind = "other", ties: dict[int, str] | None = None) -> Any:
        """Add all of `value` below `path`.

        Args:
            path: where it stands in the nested state.
            value: tensors and Python values in any nesting.
            kind: of the tensors in it.
            ties: `id` of each tensor seen so far -> its flat key; added to. One that comes again is tied to the first.

        Returns:
            its tree: the same containers with a `Ref` for each leaf.

        Raises:
            CaptureError: something in it cannot be saved exactly. Names where and what.
        """
        try:
            return self._add(path, value, kind, ties)
        except CaptureError:
            raise
        except RecursionError:
            raise CaptureError(_endless(path, value, ()) or f"{_dotted(path)} is nested too deep") from None
        except Exception as error:
            raise CaptureError(f"{_dotted(path)} cannot be looked at: {text_of(error)}") from error

    def _add(self, path: Path, value: Any, kind: Kind, ties: dict[int, str] | None) -> Any:
        if isinstance(value, torch.Tensor):
            if ties is not None and id(value) in ties:
                return self.tie(path, ties[id(value)])
            reason = refusal(value)
            key, path = self._key(path)
            if ties is not None:
                ties[id(value)] = key
            if reason is not None:
                raise CaptureError(f"{key} {reason}", key=key)
            plain = value.requires_grad or isinstance(value, torch.nn.Parameter)
            self.flat.tensors[key] = value.detach() if plain else value
            self.flat.kinds[key] = kind
            self.flat.paths[key] = path
            return Ref(key)
        kept = type(value)
        if kept is dict or kept is OrderedDict:
            return kept((k, self._add((*path, str(k)), v, kind, ties)) for k, v in value.items())
        if isinstance(value, Mapping) and _has_tensor(value):
            where = _dotted(path)
            raise CaptureError(
                f"{where} is a {kept.__module__}.{kept.__qualname__} with tensors in it, which cannot be rebuilt "
                "exactly; turn it into a dict",
                key=where,
            )
        if kept is list and _entered(value):
            return [self._add((*path, i), item, kind, ties) for i, item in enumerate(value)]
        if kept in (tuple, set, frozenset) and _has_tensor(value):
            return kept([self._add((*path, i), item, kind, ties) for i, item in enumerate(value)])
        key, path = self._key(path)
        self.flat.values[key] = _copied(value, key)
        self.flat.paths[key] = path
        return Ref(key)

    def tie(self, path: Path, key: str) -> Ref:
        """Say that the tensor at `path` is the one saved as `key`."""
        own, path = self._key(path)
        self.flat.ties[own] = key
        self.flat.paths[own] = path
        return Ref(own)

    def _key(self, path: Path) -> tuple[str, Path]:
        # `1` next to `"1"`, or `a.b` next to `b` in `a`: the later one gets a mark, so both come back.
        if path in self._paths:
            path = (*path[:-1], f"{path[-1]}~1")
            while path in self._paths:
                path = (*path[:-1], f"{path[-1]}~1")
        self._paths.add(path)
        key = _dotted(path)
        while key in self.flat.paths:
            key += "~1"
        return key, path


def _copied(value: Any, where: str) -> Any:
    """A copy that no later change of `value` reaches.

    Raises:
        CaptureError: of a type that cannot be saved.
    """
    encode_value(value, where)  # refuses by name and path; only types it knows are safe to deepcopy
    if type(value) is list and all(map(_constant, value)):
        return list(value)
    return value if _constant(value) else copy.deepcopy(value)


def _constant(value: Any) -> bool:
    """Whether nobody can change it. A copy of 625 numbers in a tuple, as python's generator has, takes long."""
    kind = type(value)
    if kind is tuple:
        return all(map(_constant, value))
    return kind in _IMMUTABLE


def alike(one: Any, other: Any) -> bool:
    """Whether trees are equal, in the same order, of the same containers."""
    if type(one) is not type(other):
        return False
    if isinstance(one, Mapping):
        return list(one) == list(other) and all(map(alike, one.values(), other.values()))
    if isinstance(one, list | tuple):
        return len(one) == len(other) and all(map(alike, one, other))
    return bool(one == other)


def refs(tree: Any) -> Iterator[str]:
    """The flat keys of all leaves of `tree`, in order."""
    if isinstance(tree, Ref):
        yield tree.key
    elif isinstance(tree, (dict, Mapping)):  # an abstract class takes long to ask
        for below in tree.values():
            yield from refs(below)
    elif isinstance(tree, (list, tuple, set, frozenset)):
        for below in tree:
            yield from refs(below)


def build(tree: Any, leaf: Callable[[str], Any]) -> Any:
    """Nested state from its tree.

    Args:
        tree: as `Flattener.add` returned it.
        leaf: gives the tensor or value of a flat key.
    """
    if isinstance(tree, Ref):
        return leaf(tree.key)
    if isinstance(tree, (dict, Mapping)):
        return type(tree)((k, build(v, leaf)) for k, v in tree.items())  # type: ignore[call-arg]
    if isinstance(tree, (list, tuple, set, frozenset)):
        return type(tree)(build(v, leaf) for v in tree)
    return tree
