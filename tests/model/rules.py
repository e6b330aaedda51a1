"""The protocol's rules: each may be left out of a model, which then does what somebody might have written instead."""

from __future__ import annotations

__all__ = ["ECONOMY", "RULES", "Rules"]

# Name -> what is done without it. Without any of these a promise breaks.
RULES = {
    "create if absent": "a generation record is put over whatever is there",
    "compare nonces": "a generation that exists is taken for one's own",
    "own nonce is success": "a generation that exists is taken for another's",
    "the newest was seen": "nobody asks whether the newest commit was there at restore",
    "who never restored has seen nothing": "a save without a restore goes on over whatever is there",
    "test again after the generation": "the newest is tested before the generation record is made, not after",
    "generation before commit": "the generation record is made after the first commit",
    "look after the commit": "a save is acknowledged as soon as its record is there",
    "counts from first commit": "the newest generation counts, whether it has a commit or not",
    "lineage": "the newest is the one of the highest step",
    "settle before the next": "a commit without an answer is forgotten when the next save begins",
    "behind the unanswered a branch": "who restores its own last commit goes on, whatever it has sent since",
    "going back ends a generation": "a restore of an older step goes on in the same generation",
    "a number is asked for once": "a branch takes the number of a generation whose record may still be on its way",
    "record last": "the commit record is written before manifest and data",
    "record first": "manifest and data are deleted before the commit record",
    "manifest before data": "data is deleted before the manifest",
    "heed holds": "a sweep does not look at pins and leases",
    "look again before the manifest": "a sweep looks for holds before it deletes the record, not after",
    "leases before pins": "a sweep lists pins, then leases",
    "lease, then look": "a reader looks for record and manifest, then leases",
    "pin under a lease": "a pin is written after a look, without a lease",
    "an unanswered pin keeps its lease": "who gets no answer for a pin releases its lease",
    "hold until the first commit": "a manager lets its lease go when it has restored",
    "commits before generations": "discovery lists generations, then commits, and counts the generations it listed",
    "look anew when one is gone": "a restore goes on to the next older one when one has gone since it was listed",
    "sweep after the first commit": "a manager sweeps as soon as its generation record is there",
    "spare the newest": "a policy decides on the newest checkpoint too",
    "fenced sweeps stop": "a sweep does not look for newer generations",
    "old enough": "what is off the lineage is deleted as soon as the branch has two commits",
    "two commits": "what is off the lineage is deleted after a week, however few commits the branch has",
    "own attempts may be under way": "an attempt without a record is garbage, whose ever it is",
}

# Rules that are redundant: they spare work or leave less behind, and no promise breaks without them.
ECONOMY = {
    "look before the commit": "a manager that is fenced writes its record all the same",
    "test before the generation": "the newest is tested only after the generation record was made",
    "trim ancestors": "a generation record names ancestors that are gone",
    "sent is never garbage": "an attempt whose commit got no answer counts as failed",
    "attempts before commits": "a sweep lists commits, then attempts",
}


class Rules:
    """Which rules are kept."""

    def __init__(self, without: frozenset[str] = frozenset()) -> None:
        assert without <= RULES.keys() | ECONOMY.keys(), f"no such rule: {without}"
        self._kept = (RULES.keys() | ECONOMY.keys()) - without

    def __contains__(self, rule: str) -> bool:
        assert rule in RULES or rule in ECONOMY, f"no such rule: {rule}"
        return rule in self._kept
