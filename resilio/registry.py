"""Things by name, as plugins register them: a name has one owner, and a second one is refused with both named."""

from __future__ import annotations

import copy
import re
from collections.abc import Iterable, Iterator, Mapping
from typing import TypeVar

from .errors import ConfigError

__all__ = ["OURS", "Registry"]

T = TypeVar("T")
R = TypeVar("R", bound="Registry")  # type: ignore[type-arg]

OURS = "resilio"  # the owner of what is there without any plugin
NAME_MAX = 64


class Registry(Mapping[str, T]):
    """Name -> thing, sorted by name.

    Args:
        offered: what a name stands for, as in "a policy called {}".
        rule: what a name is, as in "no name for a policy": said of one that is not.
        pattern: what a name looks like.
        ours: what is there from the start; no plugin can have its name.
        reserved: names that nobody can have.
    """

    def __init__(
        self,
        offered: str,
        rule: str,
        pattern: str,
        *,
        ours: Mapping[str, T] | None = None,
        reserved: Iterable[str] = (),
    ) -> None:
        self._offered = offered
        self._rule = rule
        self._pattern = re.compile(pattern, re.ASCII)
        self._things: dict[str, T] = dict(ours or {})
        self._owners = {**dict.fromkeys(reserved, OURS), **dict.fromkeys(self._things, OURS)}

    def add(self, name: str, thing: T, *, owner: str) -> None:
        """Add `thing`.

        Args:
            name: of it.
            thing: what it stands for.
            owner: how messages name who brings it.

        Raises:
            ConfigError: it is no name, or it has an owner already; both are named.
        """
        if not isinstance(name, str) or len(name) > NAME_MAX or not self._pattern.fullmatch(name):
            shown = repr(name) if isinstance(name, str) else type(name).__name__
            raise ConfigError(
                f"{owner} registers {shown[:NAME_MAX]}, which is {self._rule}; it has 1 to {NAME_MAX} characters",
                owner=owner,
            )
        other = self._owners.get(name)
        if other is not None:
            way_out = (
                f"That name is not to be had: {owner} must take another one."
                if other == OURS
                else "Uninstall one of them, or disable it by its name in RESILIO_DISABLE_PLUGINS."
            )
            raise ConfigError(
                f"both {other} and {owner} offer {self._offered.format(name)}. {way_out}",
                name=name,
                owners=(other, owner),
            )
        self._things[name] = thing
        self._owners[name] = owner

    def owner(self, name: str) -> str:
        """How messages name who brings `name`, which is there."""
        return self._owners[name]

    def owners(self) -> dict[str, str]:
        """Each known name and its owner, sorted."""
        return {name: self._owners[name] for name in self}

    def of(self, owner: str) -> tuple[str, ...]:
        """The names that `owner` brings, sorted."""
        return tuple(name for name in self if self._owners[name] == owner)

    def drop(self, owner: str) -> None:
        """Forget all that `owner` brings."""
        for name in self.of(owner):
            del self._things[name], self._owners[name]

    def copy(self: R) -> R:
        """One with the same things, to which others can be added."""
        twin = copy.copy(self)
        twin._things, twin._owners = dict(self._things), dict(self._owners)
        return twin

    def __getitem__(self, name: str) -> T:
        return self._things[name]

    def __iter__(self) -> Iterator[str]:
        return iter(sorted(self._things))

    def __len__(self) -> int:
        return len(self._things)
