"""What is shown of plain DCP folders. Keys of the JSON are for ever, as those of `pages`."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

from ..storage.base import Storage
from . import output, pages, plain, tensor_pages
from .errors import Exit
from .output import ago, clean, iso, size
from .plain import UNPROVEN, PlainFolder
from .tables import Table

__all__ = ["ls", "show", "verify"]


def ls(storage: Storage, found: Sequence[PlainFolder], *, as_json: bool) -> int:
    """`resilio ls` of a tree of them, newest first."""
    found = list(reversed(found))
    if as_json:
        output.emit_json(
            {
                "url": storage.url,
                "checkpoints": [],
                "damaged": [],
                "plain": [_json(one) for one in found],
                "unproven": UNPROVEN,
            }
        )
        return Exit.GOOD
    shown = Table("step", "folder", "stored", "", "files", "size", right=frozenset({"files"}))
    for one in found:
        at = one.modified_s
        when = ("?", "") if at is None else (iso(at), ago(at, time.time()))
        step = "?" if one.step is None else str(one.step)
        shown.add_row(step, clean(one.name or "."), *when, str(len(one.sizes)), size(one.size_bytes))
    output.emit_page(shown, "", f"note: {UNPROVEN}")
    return Exit.GOOD


def show(storage: Storage, one: PlainFolder, *, listed: bool, match: str | None, as_json: bool) -> int:
    """`resilio show` of one."""
    below, checkpoint = plain.open_one(storage, one)
    if below is not storage:
        below.close()
    tensors, values = plain.rows(checkpoint)
    totals = pages.totals_json(tensors)
    chosen = tensor_pages.matching(tensors, match) if listed else None
    if as_json:
        page: dict[str, Any] = {"url": storage.url, "plain": _json(one), "unproven": UNPROVEN}
        page["tensors"] = {**totals, "listed": chosen} if chosen is not None else totals
        page["values"] = {"count": sum(values.values()), "components": values}
        output.emit_json(page)
    elif chosen is not None:
        output.emit_page(*tensor_pages.listing(chosen, len(tensors)))
    else:
        head = Table()
        for name, text in (
            ("checkpoint", f"of plain torch.distributed.checkpoint, {one.name or 'the folder itself'}"),
            ("files", f"{len(one.sizes)}, {size(one.size_bytes)}"),
            ("values", f"{sum(values.values())}: {pages.counts(values)}"),
        ):
            head.add_row(name, clean(text))
        output.emit_page(head, *pages.tensor_tables(totals), "", f"note: {UNPROVEN}")
    return Exit.GOOD


def verify(storage: Storage, found: Sequence[PlainFolder], *, read: bool, as_json: bool) -> int:
    """`resilio verify`: what is damaged for sure is named; that all is well cannot be said."""
    results = []
    for one in found:
        with output.progress_bar(one.name or "checkpoint") as progress:
            damage = plain.check(storage, one, read=read, progress=progress)
        looked = "can be read, CRC-32 fit" if read else "files are there, no data was read"
        results.append({**_json(one), "damage": [pages.damage_json(bad) for bad in damage], "looked": looked})
        if not as_json:
            lines = [pages.damage_line(bad) for bad in damage] or [f"NOT PROVEN  {looked}; no digests"]
            output.emit("".join(clean(f"{one.name or '.'}  {line}") + "\n" for line in lines))
    if as_json:
        output.emit_json({"url": storage.url, "good": False, "checkpoints": [], "plain": results, "unproven": UNPROVEN})
    else:
        output.emit_page("", f"note: {UNPROVEN}")
    return Exit.WANTING if any(result["damage"] for result in results) else Exit.INCONCLUSIVE


def _json(one: PlainFolder) -> dict[str, Any]:
    return {
        "name": one.name,
        "step": one.step,
        "size_bytes": one.size_bytes,
        "files": len(one.sizes),
        "time_s": one.modified_s,
    }
