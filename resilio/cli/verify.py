"""`resilio verify`: is every byte what was saved?"""

from __future__ import annotations

from contextlib import suppress
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from .errors import Exit
from .options import Debug, Json, Url, Which

if TYPE_CHECKING:
    from ..storage.base import Storage
    from ..types import CheckpointRef, Damage

__all__ = ["verify"]


def verify(
    url: Url,
    which: Which = None,
    every: Annotated[bool, typer.Option("--all", help="Every checkpoint, off the lineage too.")] = False,
    sample: Annotated[
        str | None,
        typer.Option(
            metavar="SAMPLE",
            help="Read some of the tensor data: the second of seven parts (2/7), a share (10%), an amount (500M).",
            show_default=False,
        ),
    ] = None,
    quick: Annotated[bool, typer.Option("--quick", help="Names and sizes of objects alone; read no data.")] = False,
    read_all: Annotated[bool, typer.Option("--read-all", help="Read every byte. The default.")] = False,
    quarantine: Annotated[
        bool, typer.Option("--quarantine", help="Let no job resume from what is damaged, until it is released.")
    ] = False,
    as_json: Json = False,
    debug: Debug = False,
) -> int:
    """Read a checkpoint whole and compare every byte with its digests; name what is damaged. Plugins may find more.

    With --sample or --quick less is read, and the answer says how much.

    Exit codes: 0 all that was read is what was saved; 1 something is not; 3 nothing is, but a plugin could not tell, a
    newer resilio wrote it, or plain DCP did, so nothing can be proven; 4 there is no such checkpoint.
    """
    from ..errors import ConfigError, FormatError, IntegrityError, NoCheckpointError, NotFoundError
    from ..hooks import Calls, host, open_storage
    from ..records import keys
    from ..records.sampling import Sample, parse_sample
    from ..records.verify import examine_checkpoint
    from . import look, output, pages, plain, plain_pages

    if every and which is not None:
        raise ConfigError("verify takes a STEP or --all, not both.")
    if (sample is not None) + quick + read_all > 1:
        raise ConfigError("verify takes one of --sample, --quick and --read-all.")
    how: Sample | Literal["all", "inventory"] = "inventory" if quick else "all"
    if sample is not None:
        how = parse_sample(sample)
    results, findings = [], []
    calls = Calls(host())
    with open_storage(url) as storage:
        catalog, folders = look.catalog_or_plain(storage)
        if catalog is None:
            if sample is not None:
                raise ConfigError("a checkpoint of plain DCP has no digests to judge a sample by; leave out --sample.")
            chosen = folders[::-1] if every else [plain.choose(storage, folders, which)]
            if quarantine:
                raise ConfigError("a folder of plain DCP is no run, and has no place for a quarantine.")
            return plain_pages.verify(storage, chosen, read=not quick, as_json=as_json)
        held = look.in_quarantine(storage)
        for ref in reversed(catalog.commits) if every else [look.choose(catalog, which)]:
            try:
                with output.progress_bar(keys.stem(ref)) as progress:
                    found = examine_checkpoint(storage, ref, how, progress=progress)
            except NoCheckpointError:
                if not every:
                    raise
                continue  # somebody's sweep took it since the listing
            with suppress(FormatError, IntegrityError, NotFoundError):  # such a record is among the damage already
                found.damage.extend(calls.verify(catalog.info(ref), storage))
            findings += found.damage
            if not as_json:
                output.emit("".join(f"{line}\n" for line in pages.verify_lines(ref, found)))
            if quarantine and _put_away(storage, ref, found.damage):
                held = look.in_quarantine(storage)
            if not as_json and ref in held:
                output.emit(output.clean(f"{keys.stem(ref)}  in quarantine: {held[ref]}") + "\n")
            results.append(pages.verify_json(ref, found, ref in catalog.lineage, held.get(ref)))
    good = all(result["good"] for result in results)
    if as_json:
        output.emit_json({"url": storage.url, "good": good, "checkpoints": results})
    if good:
        return Exit.GOOD
    return Exit.INCONCLUSIVE if all(map(pages.is_open, findings)) else Exit.WANTING


def _put_away(storage: Storage, ref: CheckpointRef, damage: list[Damage]) -> bool:
    """Quarantine a checkpoint if it is damaged itself: not what a plugin could not judge, or a newer resilio wrote."""
    from ..errors import NoCheckpointError, NotFoundError
    from ..records.commits import find_commit
    from ..records.quarantine import quarantine
    from ..records.second_look import still_there
    from .pages import is_open

    if any(one.facts.get("newer") for one in damage):
        return False
    found = [one for one in damage if not is_open(one)]
    blocks = [one for one in found if "blocks" in one.facts]
    if blocks:  # a read may go wrong for once
        try:
            seen = still_there(storage, find_commit(storage, ref), blocks)
        except NotFoundError:
            return False
        found = [one for one in found if one not in blocks] + seen
    if not found:
        return False
    because = f"found damaged by `resilio verify` at {len(found)} place(s)"
    try:
        return quarantine(storage, ref, because, found, found_by="verify") is not None
    except NoCheckpointError:
        return False  # somebody's sweep took it meanwhile
