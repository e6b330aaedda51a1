"""Every interleaving of a few programs over one shared store, breadth first: an explicit-state model checker.

A program is a generator. It yields an operation on the store and is sent the answer, so it reads like the code it
stands for; between two operations any other program may do any number of its own. A program that stops for ever is a
process that crashed: as every state is looked at, also those in which one program never moves again, crashes need no
transition of their own.

A program's state is where it stands and what its variables hold; generators cannot be copied, so one that is needed
again is brought there by sending it the same answers once more. A loop that spans an operation must therefore keep
its place in a variable (``while todo``, not ``for``): the place of a ``for`` is seen by nobody.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Generator, Hashable, Iterable
from dataclasses import dataclass
from typing import Any, Protocol

__all__ = ["Actor", "Explored", "Program", "System", "explore"]

Program = Generator[Any, Any, None]  # yields operations, is sent answers
_BITS = 20  # of the number of a program's state, or of a store
_MASK = (1 << _BITS) - 1


class Actor(Protocol):
    """One program and the object that holds what outlives a call."""

    name: str

    def run(self) -> Program:
        """The program."""

    def state(self) -> Hashable:
        """All that the object holds."""

    def view(self) -> Hashable:
        """What promises are checked on; None if there is nothing now."""


@dataclass(frozen=True)
class System:
    """What is explored.

    Attributes:
        store: where it starts.
        actors: makes a new actor, for each.
        apply: (store, operation) -> each way it may end: answer to the program, and the store afterwards.
        happen: store -> what may happen to it without anybody's doing: a name, and the store afterwards.
        check_store: which promise a store breaks, None if none.
        check_view: which promise to one actor is broken: of a store and what its `Actor.view` shows.
        check_together: which promise is broken by what several show; those that show nothing are left out.
        show: an operation, for people.
    """

    store: Hashable
    actors: tuple[Callable[[], Actor], ...]
    apply: Callable[[Any, Any], Iterable[tuple[Any, Any]]]
    happen: Callable[[Any], Iterable[tuple[str, Any]]]
    check_store: Callable[[Any], str | None]
    check_view: Callable[[Any, Any], str | None]
    check_together: Callable[[list[Any]], str | None]
    show: Callable[[Any], str] = str


@dataclass(frozen=True)
class Explored:
    """What came of it.

    Attributes:
        states: how many different states were reached.
        broken: the promise that is broken, None if all hold.
        trace: the shortest way there, one step a line.
        complete: whether all states within the bounds were seen.
    """

    states: int
    broken: str | None
    trace: tuple[str, ...]
    complete: bool

    def __str__(self) -> str:
        if self.broken is None:
            return f"{self.states} states, all promises hold"
        return "\n".join([f"broken: {self.broken} (after {self.states} states)", *self.trace])


class _Programs:
    """Numbers for the states of programs, and where each goes on each answer."""

    def __init__(self, actors: tuple[Callable[[], Actor], ...]) -> None:
        self._actors = actors
        self._numbers: dict[Hashable, int] = {}
        self._histories: list[tuple[int, tuple[Any, ...]]] = []  # actor, answers it was sent
        self._next: dict[tuple[int, Any], int] = {}
        self.operations: list[Any] = []  # what it does next, None at its end
        self.views: list[Any] = []
        self.names: list[str] = []

    def start(self, actor: int) -> int:
        return self._enter(actor, ())

    def step(self, number: int, answer: Any) -> int:
        found = self._next.get((number, answer))
        if found is None:
            actor, answers = self._histories[number]
            found = self._next[number, answer] = self._enter(actor, (*answers, answer))
        return found

    def _enter(self, index: int, answers: tuple[Any, ...]) -> int:
        actor = self._actors[index]()
        program = actor.run()
        try:
            operation = next(program)
            for answer in answers:
                operation = program.send(answer)
            key: Hashable = (index, _where(program), actor.state())
        except StopIteration:
            operation, key = None, (index, None, actor.view())
        number = self._numbers.get(key)
        if number is None:
            number = self._numbers[key] = len(self.operations)
            self._histories.append((index, answers))
            self.operations.append(operation)
            self.views.append(actor.view())
            self.names.append(actor.name)
        assert self.operations[number] == operation, "a program's state does not say what it does next"
        return number


def _where(program: Any) -> Hashable:
    """Where a generator stands, through all that it waits for, and what its variables hold."""
    found = []
    while program is not None:
        frame = program.gi_frame
        held = tuple((name, value) for name, value in frame.f_locals.items() if name != "self")
        found.append((frame.f_code.co_name, frame.f_lasti, held))
        program = program.gi_yieldfrom
    return tuple(found)


class _Search:
    """A state is one number: that of the store, and above it, `_BITS` each, those of the programs."""

    def __init__(self, system: System) -> None:
        self.system = system
        self.programs = _Programs(system.actors)
        self.shifts = [_BITS * (i + 1) for i in range(len(system.actors))]
        self.stores: list[Any] = []
        self.verdicts: list[str | None] = []  # on stores
        self._numbers: dict[Any, int] = {}
        self._moves: dict[int, tuple[list[tuple[Any, int, int]], str | None]] = {}
        self._happened: dict[int, list[tuple[str, int]]] = {}

    def number(self, store: Any) -> int:
        found = self._numbers.get(store)
        if found is None:
            found = self._numbers[store] = len(self.stores)
            self.stores.append(store)
            self.verdicts.append(self.system.check_store(store))
        return found

    def moves(self, store: int, program: int) -> tuple[list[tuple[Any, int, int]], str | None]:
        """Of one program on one store: each answer and what it adds to store and program; and the verdict."""
        key = store << _BITS | program
        found = self._moves.get(key)
        if found is None:
            there, operation, view = self.stores[store], self.programs.operations[program], self.programs.views[program]
            moves = []
            for answer, after in () if operation is None else self.system.apply(there, operation):
                moves.append((answer, self.number(after) - store, self.programs.step(program, answer) - program))
            verdict = None if view is None else self.system.check_view(there, view)
            found = self._moves[key] = moves, verdict
        return found

    def happen(self, store: int) -> list[tuple[str, int]]:
        found = self._happened.get(store)
        if found is None:
            found = self._happened[store] = [
                (name, self.number(after) - store) for name, after in self.system.happen(self.stores[store])
            ]
        return found

    def visit(self, state: int) -> tuple[str | None, list[int]]:
        """Which promise is broken in `state`; and all states one step from it."""
        store = state & _MASK
        verdict = self.verdicts[store]
        after = [state + added for _, added in self.happen(store)]
        views = []
        for shift in self.shifts:
            program = state >> shift & _MASK
            moves, broken = self.moves(store, program)
            verdict = verdict or broken
            view = self.programs.views[program]
            if view is not None:
                views.append(view)
            after += [state + to_store + (to_program << shift) for _, to_store, to_program in moves]
        if len(views) > 1:
            verdict = verdict or self.system.check_together(views)
        return verdict, after

    def label(self, before: int, state: int) -> str:
        """The step from one to the other, for people."""
        store = before & _MASK
        for name, added in self.happen(store):
            if before + added == state:
                return f"(nobody): {name}"
        for shift in self.shifts:
            program = before >> shift & _MASK
            for answer, to_store, to_program in self.moves(store, program)[0]:
                if before + to_store + (to_program << shift) == state:
                    shown = self.system.show(self.programs.operations[program])
                    return f"{self.programs.names[program]}: {shown} -> {self.system.show(answer)}"
        raise AssertionError("no step leads there")


def explore(system: System, limit: int = 2_000_000) -> Explored:
    """All states, or all up to the first that breaks a promise; at most `limit`."""
    search = _Search(system)
    start = search.number(system.store)
    for i, shift in enumerate(search.shifts):
        start |= search.programs.start(i) << shift
    came_from = {start: -1}
    queue = deque([start])
    while queue:
        state = queue.popleft()
        verdict, reached = search.visit(state)
        if verdict is not None:
            return Explored(len(came_from), verdict, tuple(_trace(search, came_from, state)), False)
        if len(came_from) >= limit:
            return Explored(len(came_from), None, (), False)
        for after in reached:
            if after not in came_from:
                came_from[after] = state
                queue.append(after)
    return Explored(len(came_from), None, (), True)


def _trace(search: _Search, came_from: dict[int, int], state: int) -> list[str]:
    lines = []
    while came_from[state] >= 0:
        lines.append(search.label(came_from[state], state))
        state = came_from[state]
    return [f"{i + 1:3}. {line}" for i, line in enumerate(reversed(lines))]
