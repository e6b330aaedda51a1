"""What a restore has found out about checkpoints it passed over, written down for those who come after it."""

from __future__ import annotations

import logging

from ..clock import Clock
from ..errors import AccessDeniedError, FormatError
from ..events import Quarantined
from ..records.commits import find_commit
from ..records.quarantine import quarantine
from ..records.second_look import still_there
from ..storage.base import Storage
from ..types import Damage
from .telling import Teller

__all__ = ["quarantine_findings"]

_log = logging.getLogger("resilio")


def quarantine_findings(storage: Storage, findings: list[Damage], clock: Clock, teller: Teller) -> None:
    """Quarantine the checkpoints that a restore found damaged, once it has restored another one. Never raises.

    Had nothing been intact, the way to the store may have been the cause, so nothing would be written; and so it may
    have been where a second look finds nothing.

    Ranks: rank 0.
    """
    for damage in findings:
        ref, error_text = damage.facts["ref"], damage.what
        try:
            problems = _seen_again(storage, damage)
            if not problems:
                _log.warning("not quarantined, a second look finds nothing: %s %s", ref, error_text)
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
        except Exception as error:  # noqa: BLE001  live state is another by now, so the restore did not fail
            _log.warning("not quarantined: %s url=%s error=%s", ref, storage.url, error)
            continue
        if record is not None:
            _log.warning("quarantined %s because=%r url=%s", ref, record.because, storage.url)
            teller.tell(Quarantined, ref=ref, because=record.because, problems=tuple(problems))


def _seen_again(storage: Storage, damage: Damage) -> list[Damage]:
    """The problems that rank 0 sees as well, now: not what went wrong on the way to another rank, or for once."""
    facts = damage.facts
    problems: list[Damage] = facts.get("problems") or [
        Damage(str(facts.get("where", damage.where)), damage.what, facts)
    ]
    try:
        commit = find_commit(storage, facts["ref"])
    except (FormatError, AccessDeniedError):  # which may be the finding
        return problems
    return still_there(storage, commit, problems)
