"""A checkpoint as the live state looks at it: renamed, selected, each key used once."""

from __future__ import annotations

import copy
import fnmatch
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch

from ..errors import ConfigError, FormatError, MismatchError
from .flat import Ref, SavedState, TensorSpec, Unread
from .flat_shard import FlatShard
from .scratch import Scratch
from .tensors import local
from .tree import build, refs

__all__ = [
    "Problems",
    "Rename",
    "SavedView",
    "Selection",
    "is_optimizer",
    "patterns",
    "prefixes",
    "refuse_loose_ends",
]

Rename = Mapping[str, str] | Callable[[str], str]
_SHOWN = 8


def patterns(given: Iterable[str] | str | None, name: str) -> tuple[str, ...] | None:
    """What was given as `only` or `exclude`, so that it can be read more than once.

    Raises:
        ConfigError: it is no text and no texts.
    """
    if given is None or isinstance(given, str):
        return None if given is None else (given,)
    found: tuple[Any, ...] = tuple(given) if isinstance(given, Iterable) else (given,)
    if not all(isinstance(pattern, str) for pattern in found):
        raise ConfigError(f"{name}={given!r}: give names of components or patterns of keys, such as ['model']")
    return found


def prefixes(rename: Rename | None) -> Rename | None:
    """`rename` if it can be one.

    Raises:
        ConfigError: it is neither a function nor a mapping of texts.
    """
    texts = isinstance(rename, Mapping) and all(isinstance(text, str) for pair in rename.items() for text in pair)
    if rename is not None and not texts and not callable(rename):
        raise ConfigError(f"rename={rename!r}: give a mapping of name prefixes, saved to live, or a function of keys")
    return rename


class Selection:
    """Which keys a restore is asked for.

    Args:
        only: patterns of what is wanted; None is all.
        exclude: patterns of what is not.
        absent: the same, of what need not be there.
    """

    def __init__(
        self, only: Iterable[str] | str | None, exclude: Iterable[str] | str | None, absent: Iterable[str] = ()
    ) -> None:
        self.only = patterns(only, "only")
        self._asked = (*(self.only or ()), *(patterns(exclude, "exclude") or ()))
        self.exclude = (*(patterns(exclude, "exclude") or ()), *absent)
        self._used: set[str] = set()

    def __call__(self, key: str, component: str, *also: str) -> bool:
        """Whether `key`, of the part `component`, is wanted; `also` are other names of it."""
        hits = {
            pattern
            for pattern in (*(self.only or ()), *self.exclude)
            if any(_matches(pattern, name, component) for name in (key, *also))
        }
        self._used |= hits
        return (self.only is None or not hits.isdisjoint(self.only)) and hits.isdisjoint(self.exclude)

    def unused(self) -> list[str]:
        """Patterns of `only` and `exclude` that matched nothing."""
        return [pattern for pattern in self._asked if pattern not in self._used]


def _matches(pattern: str, key: str, component: str) -> bool:
    if pattern in (component, component.partition(".")[0], key) or key.startswith(pattern + "."):
        return True
    return fnmatch.fnmatchcase(key, pattern)


class Problems:
    """All that speaks against a restore, so that one error can name it all."""

    def __init__(self) -> None:
        self.missing: list[str] = []
        self.unexpected: list[str] = []
        self.shapes: dict[str, str] = {}
        self.dtypes: dict[str, str] = {}
        self.others: list[str] = []

    def raise_if_any(self, step: int) -> None:
        """Raise what was found.

        Raises:
            MismatchError: lists it; the facts hold all of it.
        """
        parts = [
            _listed("not in the checkpoint", self.missing, "leave them out with exclude=, or pass strict=False"),
            _listed(
                "in the checkpoint but not in the live state",
                self.unexpected,
                "leave them out with exclude= or only=, map them with rename=, or pass strict=False",
            ),
            _listed("other shape", [f"{key} ({what})" for key, what in self.shapes.items()], ""),
            _listed(
                "other dtype",
                [f"{key} ({what})" for key, what in self.dtypes.items()],
                "nothing is cast; give the live state the saved dtype",
            ),
            *self.others,
        ]
        lines = [part for part in parts if part]
        if lines:
            raise MismatchError(
                f"the checkpoint of step {step} does not fit the live state; nothing was changed.\n  "
                + "\n  ".join(lines),
                missing=self.missing,
                unexpected=self.unexpected,
                shapes=self.shapes,
                dtypes=self.dtypes,
                others=self.others,
            )


def mismatch(message: str) -> MismatchError:
    """A `MismatchError` about no single key."""
    return MismatchError(message, missing=[], unexpected=[], shapes={}, dtypes={}, others=[message])


def _listed(what: str, items: list[str], advice: str) -> str:
    if not items:
        return ""
    more = f" and {len(items) - _SHOWN} more" if len(items) > _SHOWN else ""
    return f"{what}: {', '.join(items[:_SHOWN])}{more}" + (f" ({advice})" if advice else "")


def refuse_loose_ends(saved: SavedState) -> SavedState:
    """`saved`, if each leaf of its tree is there.

    Raises:
        FormatError: names the first that is not.
    """
    for key in refs(saved.tree):
        if key not in saved.values and saved.ties.get(key, key) not in saved.tensors:
            raise FormatError(f"the tree of step {saved.step} names {key!r}, which was not saved", where=key)
    return saved


class SavedView:
    """The saved state under the names of the live one.

    Attributes:
        saved: the checkpoint.
        nodes: live-side path -> node of the saved tree; leaves and containers.
        leaves: live-side flat key -> saved flat key.
        scratch: what is to be filled.
        taken: saved flat keys that are put somewhere.

    Args:
        saved: the checkpoint.
        rename: saved names -> live names.
        problems: what speaks against a restore is added here.
        lent: live-side flat key -> memory to be used for scratch.
    """

    def __init__(
        self,
        saved: SavedState,
        rename: Rename | None,
        problems: Problems,
        lent: Mapping[str, torch.Tensor] | None = None,
    ) -> None:
        self.saved = saved
        self.nodes: dict[str, Any] = {}
        self.leaves: dict[str, str] = {}
        self.scratch = Scratch(lent)
        self.taken: set[str] = set()
        self._problems = problems
        self._claimed: set[str] = set()
        self._live: dict[str, str] = {}  # saved flat key of each leaf -> live-side one
        self._used: set[str] = set()
        self._states: set[str] = set()  # paths of what holds an optimizer's state by parameter
        self._rename = _as_function(prefixes(rename), self._used)
        self._prefixes = tuple(rename) if isinstance(rename, Mapping) else ()
        self._index("", saved.tree, None)

    def rename(self, key: str) -> str:
        """What the live side calls a saved key."""
        new = self._live.get(key) or self._rename(key)
        if not isinstance(new, str):
            raise ConfigError(f"rename gave {new!r} for {key!r}; it must give text", key=key)
        return new

    def rename_parameter(self, name: str) -> str:
        """What the live side calls a saved parameter: as `model.<name>` is renamed."""
        new = self.rename(f"model.{name}")
        return new.removeprefix("model.") if new.startswith("model.") else name

    def unused_renames(self) -> list[str]:
        """Prefixes of `rename` with which nothing saved begins."""
        return [prefix for prefix in self._prefixes if prefix not in self._used]

    def _index(self, path: str, node: Any, live: str | None) -> None:
        """`live`: what the live side calls `path`, where the names of a model decide."""
        if path:
            new = live or self.rename(path)
            if isinstance(node, Ref):
                # After a mark against two keys of one name the saved key is longer than its path.
                new = self.rename(node.key) if live is None else live + node.key.removeprefix(path)
                if new in self.leaves:
                    raise ConfigError(
                        f"rename maps both {self.leaves[new]!r} and {node.key!r} to {new!r}; map the one that is not "
                        "wanted to a name that nothing has, and leave it out with only= or strict=False",
                        key=new,
                    )
                self.leaves[new] = node.key
                self._live[node.key] = new
            self.nodes.setdefault(new, node)
        if isinstance(node, Mapping):
            for key, below in node.items():
                name = f"{path}.{key}" if path else str(key)
                self._index(name, below, self._named_like_a_model(path, node, key, live))
        elif isinstance(node, (list, tuple, set, frozenset)):
            for i, below in enumerate(node):
                self._index(f"{path}.{i}", below, None if live is None else f"{live}.{i}")

    def _named_like_a_model(self, path: str, node: Any, key: Any, live: str | None) -> str | None:
        """The live-side name of what stands below `key`, if it is that of a parameter or buffer of a model."""
        if live is not None:
            return f"{live}.{key}"
        if path.partition(".")[0] == "buffers_np" and isinstance(node[key], Ref):
            return f"buffers_np.{self.rename_parameter(f'{path}.{key}'.removeprefix('buffers_np.'))}"
        if path in self._states and isinstance(key, str):
            return f"{self.rename(path)}.{self.rename_parameter(key)}"
        if is_optimizer(node):
            self._states.add(f"{path}.state")
        return None

    def take(self, tree: Any) -> None:
        """Note that all leaves of `tree` are put somewhere.

        Raises:
            UnknownTypeError: one is a value that cannot be made here.
        """
        for key in refs(tree):
            self._refuse_unread(key)
            self.taken.add(key)

    def claim(self, tree: Any) -> None:
        """Note that all leaves of `tree` are accounted for."""
        self._claimed.update(refs(tree))

    def unclaimed(self) -> list[str]:
        """Live-side keys of leaves that nobody asked for."""
        return [new for new, key in self.leaves.items() if key not in self._claimed]

    def source(self, key: str) -> str:
        """The saved key under which the bytes of `key` lie."""
        return self.saved.ties.get(key, key)

    def spec(self, key: str) -> TensorSpec | None:
        """What is known of a saved tensor; None if `key` is a value."""
        return self.saved.tensors.get(self.source(key))

    def want(
        self,
        key: str,
        like: torch.Tensor | None,
        *,
        order: tuple[int, ...] | None = None,
        device: torch.device | None = None,
    ) -> torch.Tensor:
        """The scratch tensor for a saved tensor, made if new; see `allocate`."""
        source = self.source(key)
        new = self.scratch.make(source, self.rename(source), self.saved.tensors[source], like, order, device)
        known = self.scratch.tensors[source]
        if known is not new and not _lie_alike(known, new):
            self._problems.others.append(
                f"{key} was saved tied to another tensor, but the two lie on ranks differently now; tie them, or place "
                "them alike"
            )
        del new
        return known

    def leaf(self, key: str) -> Any:
        """The tensor (filled scratch) or a copy of the value of a saved key."""
        if self.spec(key) is not None:
            return self.scratch.hand(self.source(key))
        self._refuse_unread(key)
        return copy.deepcopy(self.saved.values[key])

    def _refuse_unread(self, key: str) -> None:
        value = self.saved.values.get(key)
        if isinstance(value, Unread):
            raise value.error

    def value(self, node: Any) -> Any:
        """Nested state built from a node."""
        return build(node, self.leaf)

    def check(self, key: str, saved_key: str, live: torch.Tensor) -> bool:
        """Compare a saved tensor with the live one that has its place; note what differs."""
        spec = self.spec(saved_key)
        if spec is None:
            self._problems.others.append(f"{key} is a tensor here and a value in the checkpoint")
            return False
        if spec.shape != tuple(live.shape):
            self._problems.shapes[key] = f"saved {list(spec.shape)}, live {list(live.shape)}"
        if spec.dtype != live.dtype:
            self._problems.dtypes[key] = f"saved {_short(spec.dtype)}, live {_short(live.dtype)}"
        return spec.shape == tuple(live.shape) and spec.dtype == live.dtype


def _ends_a_name(key: str, at: int) -> bool:
    """Whether a prefix of this length is made of whole names: `model.1` is none of `model.10.weight`."""
    return at in (0, len(key)) or "." in key[at - 1 : at + 1]


def _lie_alike(a: torch.Tensor, b: torch.Tensor) -> bool:
    if isinstance(a, FlatShard) and isinstance(b, FlatShard):
        return a.lies_like(b)
    return type(a) is type(b) and local(a).shape == local(b).shape


def is_optimizer(node: Any) -> bool:
    """Whether this is what `capture_optimizer` makes of an optimizer, or plain DCP of one by parameter names."""
    return isinstance(node, dict) and isinstance(node.get("param_groups"), list) and isinstance(node.get("state"), dict)


def _short(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _as_function(rename: Rename | None, used: set[str]) -> Callable[[str], str]:
    if rename is None:
        return lambda key: key
    if not isinstance(rename, Mapping):
        return rename
    pairs = sorted(rename.items(), key=lambda pair: -len(pair[0]))  # the longest that fits decides

    def by_prefix(key: str) -> str:
        fits = [(old, new) for old, new in pairs if key.startswith(old) and _ends_a_name(key, len(old))]
        used.update(old for old, _ in fits)
        return fits[0][1] + key[len(fits[0][0]) :] if fits else key

    return by_prefix
