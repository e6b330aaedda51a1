"""From text to policy: reads what a policy prints, for configuration files and command lines. Nothing is evaluated.

The text is parsed as Python and walked: only calls of known names with numbers and strings, joined by `|` and `&`.
"""

from __future__ import annotations

import ast
import functools
import keyword
import operator
from collections.abc import Callable
from typing import Any, NoReturn

from ..errors import ConfigError
from ..registry import Registry
from .keep import KeepPolicy, keep_all, keep_best, keep_every, keep_healthy, keep_last, keep_within
from .save import SavePolicy, save_at, save_every, save_on_signal

__all__ = ["PolicyFactory", "PolicyRegistry", "parse", "parse_keep", "parse_save"]

PolicyFactory = Callable[..., SavePolicy | KeepPolicy]

_OURS: tuple[PolicyFactory, ...] = (
    keep_all,
    keep_best,
    keep_every,
    keep_healthy,
    keep_last,
    keep_within,
    save_at,
    save_every,
    save_on_signal,
)
_LENGTH_MAX = 4096
_DEPTH_MAX = 32
_SHOWN_MAX = 60


class PolicyRegistry(Registry[PolicyFactory]):
    """Names of policies and what makes them; knows ours from the start. A name has one owner."""

    def __init__(self) -> None:
        ours = {make.__name__: make for make in _OURS}
        super().__init__("a policy called {}", "no name for a policy", r"[A-Za-z_][A-Za-z0-9_]*", ours=ours)

    def register(self, name: str, make: PolicyFactory, *, owner: str) -> None:
        """Add a policy.

        Args:
            name: as the policy prints itself, for example ``save_at_dawn``.
            make: takes numbers and strings, returns the policy; raises `ConfigError` or `TypeError` for wrong ones.
            owner: how messages name who brings it.

        Raises:
            ConfigError: it is no name, it makes nothing, or it has an owner already; both are named.
        """
        if isinstance(name, str) and keyword.iskeyword(name):
            raise ConfigError(f"{owner} registers {name!r}, which is no name for a policy", owner=owner)
        if not callable(make):
            raise ConfigError(f"{owner} registers {name!r:.80}: give a function that returns a policy", owner=owner)
        self.add(name, make, owner=owner)

    def names(self) -> dict[str, str]:
        """Each known name and its owner, sorted."""
        return self.owners()

    def parse(self, text: str) -> SavePolicy | KeepPolicy:
        """The policy that `text` says, as in ``keep_last(3) | keep_best(2, 'loss')``: what a policy prints.

        Raises:
            ConfigError: it says none, or more than that; says at which column, and which names are known.
        """
        if not isinstance(text, str):
            raise ConfigError(f"a policy is read from text, not from {type(text).__name__}.")
        text = text.strip()
        if len(text) > _LENGTH_MAX:
            raise ConfigError(f"a policy has at most {_LENGTH_MAX} characters, not {len(text)}.")
        if "\n" in text or "\r" in text:
            raise ConfigError(f"a policy is one line: {text!r}")
        try:
            body = ast.parse(text, mode="eval").body
        except SyntaxError as error:
            _refuse(f"this is no policy ({error.msg})", text, (error.offset or 1) - 1, self.names())
        except (ValueError, RecursionError, MemoryError) as error:  # a null, a surrogate; nested without end
            _refuse(f"this is no policy ({error})", text, 0, self.names())
        return _Walk(text, self).whole(body)

    def parse_save(self, text: str) -> SavePolicy:
        """`parse` for what is passed as `save`.

        Raises:
            ConfigError: it says no policy, or one for keeping.
        """
        policy = self.parse(text)
        if not isinstance(policy, SavePolicy):
            raise ConfigError(f"{text!r} says which checkpoints to keep, not when to save: pass it as keep")
        return policy

    def parse_keep(self, text: str) -> KeepPolicy:
        """`parse` for what is passed as `keep`.

        Raises:
            ConfigError: it says no policy, or one for saving.
        """
        policy = self.parse(text)
        if not isinstance(policy, KeepPolicy):
            raise ConfigError(f"{text!r} says when to save, not which checkpoints to keep: pass it as save")
        return policy


def parse(text: str) -> SavePolicy | KeepPolicy:
    """The policy of ours that `text` says: ``parse(repr(policy)) == policy``. See `PolicyRegistry.parse`.

    Raises:
        ConfigError: it says none.
    """
    return PolicyRegistry().parse(text)


def parse_save(text: str) -> SavePolicy:
    """The policy of ours that `text` says, for what is passed as `save`. See `PolicyRegistry.parse_save`.

    Raises:
        ConfigError: it says no policy, or one for keeping.
    """
    return PolicyRegistry().parse_save(text)


def parse_keep(text: str) -> KeepPolicy:
    """The policy of ours that `text` says, for what is passed as `keep`. See `PolicyRegistry.parse_keep`.

    Raises:
        ConfigError: it says no policy, or one for saving.
    """
    return PolicyRegistry().parse_keep(text)


class _Walk:
    """One text's tree, from its leaves to a policy."""

    def __init__(self, text: str, policies: PolicyRegistry) -> None:
        self.text = text
        self.policies = policies
        self.known = policies.names()

    def whole(self, body: ast.expr) -> SavePolicy | KeepPolicy:
        made = self.policy(body, 1)
        rest = self.text.encode()[body.end_col_offset :].decode()
        if rest.strip(" \t\f)"):  # a comment: Python would skip it without a word
            _refuse("nothing follows a policy, not even a comment", self.text, len(self.text) - len(rest), self.known)
        return made

    def policy(self, node: ast.expr, depth: int) -> SavePolicy | KeepPolicy:
        if depth > _DEPTH_MAX:
            self.refuse(f"policies are nested more than {_DEPTH_MAX} deep", node)
        if isinstance(node, ast.BinOp) and isinstance(node.op, ast.BitOr | ast.BitAnd):
            return self.joined(node, depth)
        if isinstance(node, ast.Call):
            return self.call(node)
        return self.refuse("a policy is a call, such as save_every(500), or several joined by | and &", node)

    def joined(self, node: ast.BinOp, depth: int) -> SavePolicy | KeepPolicy:
        # A chain of one operator leans to the left; it counts as one level, however long it is.
        nodes = [node.right]
        left = node.left
        while isinstance(left, ast.BinOp) and type(left.op) is type(node.op):
            nodes.append(left.right)
            left = left.left
        policies: list[Any] = [self.policy(part, depth + 1) for part in (left, *reversed(nodes))]
        if len({isinstance(policy, SavePolicy) for policy in policies}) > 1:
            self.refuse("policies for saving and for keeping cannot be joined", node)
        made: SavePolicy | KeepPolicy = functools.reduce(
            operator.or_ if isinstance(node.op, ast.BitOr) else operator.and_, policies
        )
        return made

    def call(self, node: ast.Call) -> SavePolicy | KeepPolicy:
        if not isinstance(node.func, ast.Name) or node.func.id not in self.policies:
            self.refuse("there is no such policy", node.func)
        args = [self.plain(arg) for arg in node.args]
        named: dict[str, Any] = {}
        for argument in node.keywords:
            if argument.arg is None or argument.arg in named:
                self.refuse("arguments are given one by one, each once", argument.value)
            named[argument.arg] = self.plain(argument.value)
        try:
            made: Any = self.policies[node.func.id](*args, **named)  # of whoever brings it
        except (TypeError, ValueError) as error:  # ConfigError is one
            self.refuse(str(error).rstrip("."), node)
        if not isinstance(made, SavePolicy | KeepPolicy):
            owner = self.policies.owner(node.func.id)
            self.refuse(f"{node.func.id} of {owner} made {type(made).__name__}, which is no policy", node)
        policy: SavePolicy | KeepPolicy = made
        return policy

    def plain(self, node: ast.expr) -> int | float | str:
        negative = isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub)
        inner = node.operand if isinstance(node, ast.UnaryOp) and negative else node
        value = inner.value if isinstance(inner, ast.Constant) else None
        if isinstance(value, int | float) and not isinstance(value, bool):
            return -value if negative else value
        if isinstance(value, str) and not negative:
            return value
        return self.refuse("an argument is a number or a string", node)

    def refuse(self, what: str, node: ast.expr) -> NoReturn:
        # The tree counts bytes.
        column = len(self.text.encode()[: node.col_offset].decode())
        _refuse(what, self.text, column, self.known)


def _refuse(what: str, text: str, column: int, known: dict[str, str]) -> NoReturn:
    here = text[column : column + _SHOWN_MAX] + ("…" if len(text) > column + _SHOWN_MAX else "")
    raise ConfigError(
        f"{what}: at column {column + 1} of the policy, {here!r}. Known policies: {', '.join(known)}.",
        text=text,
        column=column + 1,
        known=tuple(known),
    )
