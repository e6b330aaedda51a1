"""What a restore has found out about checkpoints it passed over, written down for those who come after it."""

from __future__ import annotations

import logging

from ..clock import Clock
from ..errors import ResilioError
from ..events import Quarantined
from ..records import keys
from ..records.quarantine import quarantine
from ..storage.base import Storage
from ..types import Damage
from .telling import Teller

__all__ = ["quarantine_findings"]

_log = logging.getLogger("resilio")


def quarantine_findings(storage: Storage, findings: list[Damage], clock: Clock, teller: Teller) -> None:
    """Quarantine the checkpoints that a restore found damaged, once it has restored another one. Never raises.

    Had nothing been intact, the way to the store may have been the cause, so nothing would be written.

    Ranks: rank 0.
    """
    for damage in findings:
        ref, error_text = damage.facts["ref"], damage.what
        try:
            problems = _seen_from_here(storage, damage)
            if problems is None:
                _log.warning("not quarantined, what other ranks miss is here: %s %s", ref, error_text)
                continue
            record = quarantine(
                storage,
                ref,
                f"found damaged by a restore at {len(problems) + damage.facts.get('more', 0)} place(s)",
                problems,
                more=damage.facts.get("more", 0),
                found_by="restore",
                attempt=damage.facts.get("attempt"),
                clock=clock,
            )
        except (ResilioError, OSError) as error:
            _log.warning("not quarantined: %s url=%s error=%s", ref, storage.url, error)
            continue
        if record is not None:
            _log.warning("quarantined %s because=%r url=%s", ref, record.because, storage.url)
            teller.tell(Quarantined, ref=ref, because=record.because, problems=tuple(problems))


def _seen_from_here(storage: Storage, damage: Damage) -> list[Damage] | None:
    """The problems, without objects that only another rank misses: its mount is another one. None if none is left."""
    problems: list[Damage] = damage.facts.get("problems") or [Damage(damage.where, damage.what)]
    left = [
        one
        for one in problems
        if not (one.facts.get("missing") and keys.split_attempt_key(one.where) and storage.exists(one.where))
    ]
    return left or None
