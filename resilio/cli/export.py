"""`resilio export`: a checkpoint as files that need no resilio."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable
from enum import Enum
from fnmatch import fnmatchcase
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from .errors import Exit
from .options import Debug, Json, Trust, Url, Which

if TYPE_CHECKING:
    from ..records.tensors import Reads
    from .safetensors_file import Entry

__all__ = ["export"]

_SUFFIX = ".safetensors"
_INDEX = "model.safetensors.index.json"
_VALUES = "values.json"
_UNITS = {"": 1, "K": 1 << 10, "M": 1 << 20, "G": 1 << 30, "T": 1 << 40}

Progress = Callable[[int, int], None]


class Format(str, Enum):
    """What files."""

    safetensors = "safetensors"
    torch = "torch"


def export(
    url: Url,
    which: Which = None,
    to: Annotated[
        str, typer.Option(metavar="PATH", help="A folder, or a file (x.safetensors, x.pt).", show_default=False)
    ] = ...,  # type: ignore[assignment]
    form: Annotated[Format, typer.Option("--format", help="What to write.")] = Format.safetensors,
    only: Annotated[
        list[str] | None,
        typer.Option(metavar="GLOB", help="Names to write, e.g. 'model.*'; may be said again.", show_default=False),
    ] = None,
    strip_prefix: Annotated[
        str, typer.Option(metavar="TEXT", help="What to take off the begin of names, e.g. 'model.'.")
    ] = "",
    shard_size: Annotated[str, typer.Option(metavar="SIZE", help="The largest file of a folder.")] = "5G",
    force: Annotated[bool, typer.Option("--force", help="Replace an earlier export.")] = False,
    trust: Trust = False,
    as_json: Json = False,
    debug: Debug = False,
) -> int:
    """Write a checkpoint's tensors as safetensors, or its state by torch.save; bytes are checked as they are read.

    Nothing stands under the final name before all of it does.

    Exit codes: 0 written; 1 the checkpoint is damaged or holds a value that is refused, nothing was written; 4
    there is no such checkpoint.
    """
    from ..errors import ConfigError
    from . import look, output, pages
    from .safetensors_file import Entry

    target = Path(to)
    limit = _size(shard_size)
    with look.reading(url, which, lambda name: _wanted(name, only), trust) as (reader, said, info):
        manifest = reader.manifest
        held = {} if info is None else look.in_quarantine(reader.storage)
        chosen = [name for name in sorted({*manifest.tensors, *manifest.ties, *manifest.values}) if _wanted(name, only)]
        names = {name: name.removeprefix(strip_prefix) for name in chosen}
        if not chosen or len(set(names.values())) < len(names) or not all(names.values()):
            raise ConfigError(
                f"nothing is called {' or '.join(only or ())}; `resilio show --tensors` shows what there is."
                if not chosen
                else f"without {strip_prefix!r} two names would be the same, or empty. Say --only what has that prefix."
            )
        entries = []
        for name, new in names.items():
            key = manifest.ties.get(name, name)
            if key in manifest.tensors:
                entries.append(Entry(new, key, manifest.tensors[key]))
        values = {names[name]: manifest.values[name] for name in chosen if name in manifest.values}
        with output.progress_bar("exporting") as progress:
            told = progress or (lambda done, total: None)
            if form is Format.torch:
                from .export_torch import export_torch

                files = export_torch(target, reader, names, flat=bool(strip_prefix), force=force, progress=told)
            else:
                about = {"format": "pt", "resilio_checkpoint": said["name"]}
                files = _export_safetensors(target, reader, entries, values, about, limit, force, told)
    size_bytes = sum(entry.tensor.size_bytes for entry in entries)
    page = {
        "url": said["url"],
        "checkpoint": None if info is None else pages.info_json(info, held),
        "name": said["name"],
        "to": str(target),
        "format": form.value,
        "files": files,
        "tensors": len(entries),
        "values": len(values),
        "size_bytes": size_bytes,
    }
    if as_json:
        output.emit_json(page)
    else:
        what = f"{output.count(len(entries), 'tensor')}, {output.size(size_bytes)}"
        if info is not None and info.ref in held:
            output.emit(output.clean(f"{said['name']} is in quarantine: {held[info.ref]}") + "\n")
        output.emit_page(output.clean(f"{said['name']}  ->  {target}: {what}, in {output.count(len(files), 'file')}"))
    return Exit.GOOD


def _export_safetensors(
    target: Path,
    reader: Reads,
    entries: list[Entry],
    values: dict[str, Any],
    about: dict[str, str],
    limit: int,
    force: bool,
    progress: Progress,
) -> list[str]:
    from .landing import landing
    from .safetensors_file import plan_shards, write_file

    single = target.suffix == _SUFFIX
    total = sum(entry.tensor.size_bytes for entry in entries)
    shards = plan_shards(entries, total + 1 if single else limit)
    done = 0

    def write(path: Path, shard: list[Entry]) -> None:
        nonlocal done
        with path.open("xb") as out:
            for size_bytes in write_file(out, shard, reader, about):
                done += size_bytes
                progress(done, total)

    if single:
        beside = target.with_suffix(".values.json")
        with (
            landing(beside, folder=False, force=force, ours=_ours) as part_of_values,
            landing(target, folder=False, force=force, ours=_ours) as part,
        ):
            write(part, shards[0])
            part_of_values.write_text(json.dumps(values, indent=2, ensure_ascii=False), "utf-8")
        return [target.name, beside.name]
    files = ["model.safetensors"]
    if len(shards) > 1:
        files = [f"model-{i:05d}-of-{len(shards):05d}.safetensors" for i in range(1, len(shards) + 1)]
    with landing(target, folder=True, force=force, ours=_ours) as part:
        for name, shard in zip(files, shards, strict=True):
            write(part / name, shard)
        if len(shards) > 1:
            where = {entry.name: name for name, shard in zip(files, shards, strict=True) for entry in shard}
            index = {"metadata": {"total_size": total}, "weight_map": dict(sorted(where.items()))}
            (part / _INDEX).write_text(json.dumps(index, indent=2, ensure_ascii=False), "utf-8")
            files.append(_INDEX)
        (part / _VALUES).write_text(json.dumps(values, indent=2, ensure_ascii=False), "utf-8")
    return [*files, _VALUES]


def _ours(name: str) -> bool:
    """Whether a file in a folder may be one that an export wrote."""
    return name in (_INDEX, _VALUES) or bool(re.fullmatch(r"model(-\d{5,}-of-\d{5,})?\.safetensors", name))


def _wanted(name: str, only: Iterable[str] | None) -> bool:
    return not only or any(fnmatchcase(name, glob) for glob in only)


def _size(text: str) -> int:
    from ..errors import ConfigError

    found = re.fullmatch(r"([0-9]{1,15})([KMGT]?)(?:i?B)?", text)
    if not found or not int(found[1]):
        raise ConfigError(f"{text!r} is no size; say 5G, or 500M.")
    return int(found[1]) * _UNITS[found[2]]
