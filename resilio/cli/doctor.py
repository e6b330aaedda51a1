"""`resilio doctor`: is everything here that resilio needs, and is this store fit to hold a run?"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import TYPE_CHECKING, Annotated

import typer

from .errors import Exit
from .options import Debug, Json
from .tables import Table

if TYPE_CHECKING:
    from ..hooks import Host
    from .probes import Check

__all__ = ["doctor"]

_PATIENCE_S = 15.0  # whoever asks a doctor waits for an answer
_OURS = "resilio-ckpt"


def doctor(
    url: Annotated[
        str | None,
        typer.Argument(metavar="[URL]", help="A run, or where one is to be. Default: no store.", show_default=False),
    ] = None,
    read_only: Annotated[bool, typer.Option("--read-only", help="Try nothing that writes.")] = False,
    as_json: Json = False,
    debug: Debug = False,
) -> int:
    """Look at this installation and its plugins; with a URL, try what a store must promise, in a scratch folder.

    The scratch folder is removed again; a run that lies there is not touched.

    Exit codes: 0 all is well, or with warnings; 1 something is wanting; 2 also: nobody offers this kind of URL; 5 the
    store cannot be reached.
    """
    from ..storage import retrying
    from . import output
    from .extra import plugin_host
    from .probes import Check, Probes

    found = plugin_host()
    versions = _versions(found)
    checks = [*_installation(versions), *_plugins(found)]
    probes = None
    if url is not None:
        storage = found.open_storage(url, retry=False)
        with retrying(storage, total_s=_PATIENCE_S) as patient:
            checks.append(Check("storage", "ok", f"{type(storage).__name__}, of {_owner(found, storage.url)}"))
            probes = Probes(patient, write=not read_only)
            checks += probes.run()
    code = Exit.WANTING if any(check.state == "failed" for check in checks) else Exit.GOOD
    if probes is not None and not probes.reachable:
        code = Exit.STORAGE
    if as_json:
        output.emit_json(
            {
                "url": probes.storage.url if probes else None,
                "good": code == Exit.GOOD,
                "versions": versions,
                "checks": [vars(check) for check in checks],
                "latency_s": probes.latency_s if probes else {},
            }
        )
    else:
        output.emit_page(*_page(checks))
    return code


def _page(checks: list[Check]) -> list[Table | str]:
    from .output import clean, count

    shown = Table("", "check", "")
    for check in checks:
        shown.add_row(
            check.state if check.state != "failed" else "FAILED",
            clean(check.name),
            clean(check.said),
            style=None if check.state == "ok" else "bold",
        )
        if check.todo:
            shown.add_row("", "", f"-> {clean(check.todo)}")
    worst = [check.name for check in checks if check.state == "failed"]
    warned = sum(check.state == "warning" for check in checks)
    said = f"wanting: {', '.join(worst)}" if worst else "all is well"
    return [shown, "", clean(said + (f", with {count(warned, 'warning')}" if warned else ""))]


def _versions(found: Host) -> dict[str, str | None]:
    """Each distribution that resilio or a plugin asks for, and its version; None where a needed one is missing."""
    from importlib import metadata
    from platform import python_version

    versions: dict[str, str | None] = {"python": python_version()}
    asked = [_OURS, *(info.distribution for info in found.plugins() if info.distribution)]
    for distribution in dict.fromkeys(asked):
        for name, needed in [(distribution, True), *_requirements(distribution)]:
            try:
                versions.setdefault(name, metadata.version(name))
            except metadata.PackageNotFoundError:
                if needed:
                    versions.setdefault(name, None)
    return versions


def _requirements(distribution: str) -> Iterator[tuple[str, bool]]:
    """Name, and whether it is needed in any case: what has a marker may not be meant for here."""
    from importlib import metadata

    try:
        lines = metadata.requires(distribution) or []
    except metadata.PackageNotFoundError:
        return
    for line in lines:
        name, _, marker = line.partition(";")
        found = re.match(r"[A-Za-z0-9][A-Za-z0-9._-]*", name)
        if found and not re.search(r"extra\s*==\s*.(dev|test|docs)", marker):
            yield found[0].lower(), not marker


def _installation(versions: dict[str, str | None]) -> Iterator[Check]:
    from .probes import Check

    there = [f"{name} {version}" for name, version in versions.items() if version]
    yield Check("versions", "ok", ", ".join(there))
    missing = [name for name, version in versions.items() if version is None]
    if missing:
        yield Check("libraries", "failed", f"missing: {', '.join(missing)}", f"pip install {' '.join(missing)}")


def _plugins(found: Host) -> Iterator[Check]:
    from .output import count
    from .probes import Check

    infos = found.plugins()
    active = [info for info in infos if info.active]
    yield Check("plugins", "ok", f"{count(len(active), 'plugin')}: {', '.join(info.name for info in active)}")
    for info in infos:
        if info.error:
            yield Check(f"plugin {info.name}", "failed", info.error.removesuffix(f". {info.way_out}"), info.way_out)
        elif info.disabled:
            yield Check(f"plugin {info.name}", "ok", f"{info.owner} is disabled")


def _owner(found: Host, url: str) -> str:
    scheme = url.partition("://")[0]
    return found.storages.schemes().get(scheme, "an unknown plugin")
