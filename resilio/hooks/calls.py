"""The hooks of a manager or a command, called one plugin at a time: what one of them breaks stays its own."""

from __future__ import annotations

import json
import logging
import math
import threading
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from copy import deepcopy
from typing import Any, TypeVar

from ..errors import ConfigError
from ..events import Event
from ..storage import Storage
from ..types import CheckpointInfo, CheckpointRef, Damage, Scalar
from .host import Host
from .info import PluginInfo
from .reading import ReadOnly
from .specs import SaveFacts

__all__ = ["Calls"]

_log = logging.getLogger("resilio")

T = TypeVar("T")

_SAY_AGAIN = 100  # calls; a plugin that fails at each of them must neither flood the log nor be forgotten
# Of what plugins say about a save: a commit record, which `resilio ls` reads of each checkpoint, stays small.
_ENTRIES_MAX = 64
_NAME_MAX = 128
_TEXT_MAX = 4096
_PLUGIN_BYTES_MAX = 32 << 10
_ALL_BYTES_MAX = 256 << 10
_INT_MAX = 2**63
_WHY_MAX = 200


class Calls:
    """Calls the hooks of `host`'s plugins, in the order of `Host.plugins`.

    Each is given copies: what it does to them others do not see, the keep policy least of all. An exception of a plugin
    goes nowhere else; only a Ctrl-C in the main thread does. No plugin hears from two threads at once, but for
    `verify`, which may take long.

    Args:
        host: whose plugins.
    """

    def __init__(self, host: Host) -> None:
        self._host = host
        self._lock = threading.RLock()  # a hook may ask the manager something that tells of an event
        self._thread = threading.local()
        self._failures: Counter[tuple[str, str]] = Counter()

    @property
    def inside(self) -> bool:
        """Whether this thread is in a hook just now."""
        return getattr(self._thread, "depth", 0) > 0

    def tell(self, event: Event) -> None:
        """Let all plugins hear of `event`. Never raises; a plugin that does is logged."""
        with self._lock:
            for info, _, error in self._each("resilio_on_event", lambda answer: None, lambda: {"event": event}):
                if error is not None:
                    self._log(info, f"resilio_on_event({type(event).__name__})", error)

    def describe(self, facts: SaveFacts) -> dict[str, dict[str, Scalar]]:
        """What plugins say of a save: plugin -> name -> value. Never raises; what cannot be stored is logged."""
        about: dict[str, dict[str, Scalar]] = {}
        size_bytes = 0
        with self._lock:
            for info, said, error in self._each("resilio_describe", _described, lambda: {"context": deepcopy(facts)}):
                if said:
                    size_bytes += _size_bytes({info.name: said})
                    if size_bytes <= _ALL_BYTES_MAX:
                        about.setdefault(info.name, {}).update(said)
                        continue
                    error = ConfigError(f"with it, all plugins say more than {_ALL_BYTES_MAX} bytes")
                if error is not None:
                    self._log(info, "resilio_describe", error)
        return about

    def pins(self, checkpoints: Sequence[CheckpointInfo]) -> dict[CheckpointRef, list[str]]:
        """What plugins keep, and why.

        Args:
            checkpoints: all of the run, off the lineage first, then oldest to newest.

        Raises:
            ConfigError: a plugin failed, so what it keeps is not known. Names it.
        """
        kept: dict[CheckpointRef, list[str]] = {}
        with self._lock:
            for info, named, error in self._each(
                "resilio_pins", _pinned, lambda: {"checkpoints": _copied(checkpoints)}
            ):
                if error is not None:
                    raise ConfigError(
                        f"{info.owner} was to say in resilio_pins what it keeps, and failed, so nothing is deleted: "
                        f"{type(error).__name__}: {error}. {info.way_out}",
                        plugin=info.name,
                    ) from error
                for ref, why in (named or {}).items():
                    kept.setdefault(ref, []).append(f"{why} (plugin {info.name})")
        return kept

    def verify(self, checkpoint: CheckpointInfo, storage: Storage) -> list[Damage]:
        """What plugins find wrong with a checkpoint whose digests were compared. Each finding names its plugin.

        One that fails is a finding as well, with the fact ``inconclusive``.

        Args:
            checkpoint: which.
            storage: the run's; plugins can only read it.
        """
        found: list[Damage] = []
        own: list[Damage] = []

        def read(answer: Any) -> None:
            for damage in () if answer is None else answer:
                if not isinstance(damage, Damage):
                    raise ConfigError(f"it returned {damage!r:.200} among its findings, which is no resilio Damage")
                own.append(damage)

        for info, _, error in self._each(
            "resilio_verify", read, lambda: {"checkpoint": _copied([checkpoint])[0], "storage": ReadOnly(storage)}
        ):
            if error is not None:
                what = f"could not be judged: {type(error).__name__}: {error}"
                own.append(Damage(checkpoint.attempt, what, {"inconclusive": True}))
            for one in own:
                found.append(Damage(one.where, f"{one.what} ({info.owner})", {**one.facts, "plugin": info.name}))
            own.clear()
        return found

    def _each(
        self, hook: str, read: Callable[[Any], T], arguments: Callable[[], Mapping[str, Any]]
    ) -> Iterator[tuple[PluginInfo, T | None, BaseException | None]]:
        """Each plugin's answer as `read` takes it, or why there is none."""
        for info, implementation in self._host.implementations(hook):
            answer: T | None = None
            failure: BaseException | None = None
            self._thread.depth = getattr(self._thread, "depth", 0) + 1
            try:
                answer = read(implementation.call(arguments()))
            except BaseException as error:  # a SystemExit of a plugin must not end training either
                if isinstance(error, KeyboardInterrupt) and threading.current_thread() is threading.main_thread():
                    raise
                failure = error
            finally:
                self._thread.depth -= 1
            yield info, answer, failure

    def _log(self, info: PluginInfo, what: str, error: BaseException) -> None:
        self._failures[info.name, what] += 1
        times = self._failures[info.name, what]
        level = logging.WARNING if times % _SAY_AGAIN == 1 else logging.DEBUG
        said = "%s failed in %s, which changes nothing else times=%d error=%s: %s"
        _log.log(level, said, info.owner, what, times, type(error).__name__, error)
        _log.debug("%s", info.owner, exc_info=error)


def _copied(checkpoints: Iterable[CheckpointInfo]) -> list[CheckpointInfo]:
    return deepcopy(list(checkpoints))


def _described(answer: Any) -> dict[str, Scalar]:
    if answer is None:
        return {}
    if not isinstance(answer, Mapping):
        raise ConfigError(f"it returned {type(answer).__name__}, which is no mapping from names to values")
    if len(answer) > _ENTRIES_MAX:
        raise ConfigError(f"it returned {len(answer)} entries, {_ENTRIES_MAX} are the most")
    said = {_text(name, _NAME_MAX, "a name"): _plain(name, value) for name, value in answer.items()}
    if _size_bytes(said) > _PLUGIN_BYTES_MAX:
        raise ConfigError(f"it returned more than {_PLUGIN_BYTES_MAX} bytes")
    return said


def _plain(name: Any, value: Any) -> Scalar:
    if value is None or isinstance(value, bool):
        return value
    if isinstance(value, str):
        return _text(value, _TEXT_MAX, f"the value of {name!r:.80}")
    if isinstance(value, int) and -_INT_MAX <= value < _INT_MAX:
        return int(value)
    if isinstance(value, float) and math.isfinite(value):
        return float(value)
    raise ConfigError(f"the value of {name!r:.80} is {value!r:.80}, which is no plain value of JSON")


def _text(text: Any, limit: int, what: str) -> str:
    if not isinstance(text, str) or not 0 <= len(text) <= limit:
        raise ConfigError(f"{what} is {text!r:.80}: give text of at most {limit} characters")
    text.encode()  # a lone surrogate cannot be stored
    return str(text)


def _pinned(answer: Any) -> dict[CheckpointRef, str]:
    if not isinstance(answer, Mapping):
        raise ConfigError(f"it returned {type(answer).__name__}: give {{checkpoint.ref: why}}, and {{}} for none")
    for ref, why in answer.items():
        if not isinstance(ref, CheckpointRef) or not isinstance(why, str):
            raise ConfigError(f"it returned {ref!r:.80}: {why!r:.80}: give {{checkpoint.ref: why}}, why in words")
    return {ref: " ".join(why.split())[:_WHY_MAX] for ref, why in answer.items()}


def _size_bytes(said: Mapping[str, Any]) -> int:
    return len(json.dumps(said, ensure_ascii=False).encode())
