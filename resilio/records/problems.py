"""Every problem of a damaged checkpoint in one error: of many threads and ranks, each once, in one order, bounded."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from ..errors import IntegrityError, ResilioError
from ..types import Damage

__all__ = ["PROBLEMS_MAX", "bad_blocks_of", "joined", "listed", "merged", "problems_of"]

PROBLEMS_MAX = 1000  # carried by one error; of a checkpoint that is gone altogether, more would help nobody
_SHOWN = 10  # in its message
_BLOCKS_MAX = 100  # numbers of blocks told of one piece
_BLOCKS_SHOWN = 8


def bad_blocks_of(where: str, tensor: str, at: int, blocks: Iterable[int]) -> Damage:
    """The finding that these blocks of the piece of `tensor` that begins at byte `at` of the object `where` differ."""
    found = sorted(blocks)
    told, some = found[:_BLOCKS_MAX], ", ".join(map(str, found[:_BLOCKS_SHOWN]))
    more = ", …" if len(found) > _BLOCKS_SHOWN else ""
    facts = {"tensor": tensor, "at": at, "blocks": told}
    return Damage(where, f"tensor {tensor!r} is damaged in block{'s' * (len(found) > 1)} {some}{more}", facts)


def problems_of(error: ResilioError) -> list[Damage]:
    """What an error lists, or the one problem that it is."""
    told = error.facts.get("problems")
    if told:
        return list(told)
    facts = {name: value for name, value in error.facts.items() if name not in ("where", "problems", "more")}
    return [Damage(str(error.facts.get("where", "")), str(error), facts)]


def merged(problems: Iterable[Damage]) -> list[Damage]:
    """Each once, by place. What several ranks saw of one piece is one problem."""
    seen: dict[tuple[object, ...], Damage] = {}
    for one in problems:
        tensor, at = one.facts.get("tensor"), one.facts.get("at")
        if "blocks" not in one.facts:
            seen.setdefault((one.where, one.what), one)
            continue
        key = (one.where, tensor, at)
        known = set(seen[key].facts["blocks"]) if key in seen else set()
        seen[key] = bad_blocks_of(one.where, str(tensor), int(at or 0), known | set(one.facts["blocks"]))
    return sorted(seen.values(), key=lambda one: (one.where, one.facts.get("at", -1), one.what))


def joined(errors: Sequence[ResilioError], where: str, limit: int = PROBLEMS_MAX) -> ResilioError:
    """One error for all of `errors`, of which there is at least one: with the attribute `problems`, a list of `Damage`.

    Args:
        errors: what went wrong; those that list problems themselves count for all of these.
        where: the checkpoint, for the message.
        limit: of the list; attribute `more` says how many there are besides.
    """
    problems = merged(problem for error in errors for problem in problems_of(error))
    count = len(problems) + sum(error.facts.get("more", 0) for error in errors)
    if count == 1 and (len(errors) == 1 or "blocks" not in problems[0].facts):
        first = errors[0]
        return type(first)(str(first), **{**first.facts, "problems": problems})
    what = str(problems[0]) if count == 1 else f"{count} problems:{listed(problems, count)}"
    told = problems[:limit]
    return IntegrityError(f"{where}: {what}", where=problems[0].where, problems=told, more=count - len(told))


def listed(problems: Sequence[Damage], count: int) -> str:
    """The first of them, one a line, and how many more of `count` there are."""
    lines = [f"\n    {one.what if one.where in one.what else one}" for one in problems[:_SHOWN]]
    rest = count - len(lines)
    return "".join(lines) + (f"\n    and {rest} more" if rest else "")
