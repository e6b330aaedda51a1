"""What is shown of checkpoints: as tables for people and as JSON for programs. Keys of the JSON are for ever."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from ..records import keys
from ..types import CheckpointInfo, CheckpointRef, Damage
from .output import ago, clean, iso, size
from .tables import Table

if TYPE_CHECKING:
    from ..records.manifest import LoadedManifest
    from ..records.sampling import Coverage
    from ..records.verify import Verification

__all__ = [
    "counts",
    "coverage_json",
    "damage_json",
    "damage_line",
    "health_text",
    "info_json",
    "is_open",
    "ls_table",
    "show_json",
    "show_page",
    "tensor_tables",
    "totals_json",
    "verify_json",
    "verify_lines",
]

_BIGGEST = 10
_VALUES = 20
_VALUE_WIDTH = 60


Why = Mapping[CheckpointRef, str]  # of what is in quarantine


def info_json(info: CheckpointInfo, quarantined: Why) -> dict[str, Any]:
    """A checkpoint, as `ls`, `show` and `forget` all write it."""
    return {
        "name": keys.stem(info.ref),
        "step": info.step,
        "generation": info.ref.generation,
        "on_lineage": info.on_lineage,
        "quarantined": quarantined.get(info.ref),
        "committed_at": iso(info.time_s),
        "time_s": info.time_s,
        "world": info.world,
        "size_bytes": info.size_bytes,
        "reasons": list(info.reasons),
        "metrics": info.metrics,
        "attempt": info.attempt,
        "about": info.about,
        "healthy": info.healthy,
        "non_finite": info.non_finite,
    }


def damage_json(damage: Damage) -> dict[str, Any]:
    """A finding. An inconclusive one says that something could not be judged, not that it is damaged."""
    return {"where": damage.where, "what": damage.what, "inconclusive": is_open(damage)}


def is_open(damage: Damage) -> bool:
    """Whether a finding is that nothing could be told: a plugin could not, or a newer resilio wrote it."""
    return bool(damage.facts.get("inconclusive") or damage.facts.get("newer"))


def damage_line(damage: Damage) -> str:
    """The same for people."""
    return clean(f"{'NOT JUDGED' if is_open(damage) else 'DAMAGED'}  {damage}")


def ls_table(infos: Sequence[CheckpointInfo], quarantined: Why, now_s: float) -> Table:
    """Checkpoints as one line each, in the order given. The columns "lineage", "health" and "quarantine" are left out
    where all are on it, none is known to be unhealthy, and nothing is in it.
    """
    off = any(not info.on_lineage for info in infos)
    bad = any(info.healthy is False for info in infos)
    held = any(info.ref in quarantined for info in infos)
    more = [*(["lineage"] if off else []), *(["health"] if bad else []), *(["quarantine"] if held else [])]
    shown = Table("step", "gen", "committed", "", "ranks", "size", *more, "metrics", "saved because")
    for info in infos:
        shown.add_row(
            str(info.step),
            str(info.ref.generation),
            iso(info.time_s),
            ago(info.time_s, now_s),
            str(info.world),
            size(info.size_bytes),
            *(["on" if info.on_lineage else "off"] if off else []),
            *([health_text(info.non_finite)] if bad else []),
            *([clean(_cut(quarantined.get(info.ref, "")))] if held else []),
            clean(" ".join(f"{name}={value:.4g}" for name, value in sorted(info.metrics.items()))),
            clean("; ".join(info.reasons)),
            style=None if info.on_lineage else "dim",
        )
    return shown


def health_text(non_finite: int | None) -> str:
    """Whether training can go on from its values, for people."""
    if non_finite is None:
        return "not known"
    return f"BAD: {non_finite:,} not finite" if non_finite else "good"


def show_json(info: CheckpointInfo, manifest: LoadedManifest, quarantined: Why) -> dict[str, Any]:
    """All of `show`."""
    from ..records.health import faults

    found = faults(manifest) if info.healthy is False else {}
    tensors: list[dict[str, Any]] = [
        {
            "name": name,
            "dtype": tensor.dtype,
            "shape": list(tensor.shape),
            "size_bytes": tensor.size_bytes,
            "pieces": len(tensor.pieces),
        }
        for name, tensor in manifest.tensors.items()
    ]
    values, commit = manifest.values, manifest.commit
    objects = [(keys.MANIFEST, commit.manifest_size_bytes, commit.manifest_digest)]
    objects += [(one.name, one.size_bytes, one.digest) for one in manifest.objects.values()]
    objects += [(one.name, one.size_bytes, one.digest) for one in manifest.root.parts]
    return {
        "checkpoint": info_json(info, quarantined),
        "versions": commit.versions,
        "objects": [{"name": name, "size_bytes": n, "digest": digest} for name, n, digest in sorted(objects)],
        "tensors": totals_json(tensors),
        "faults": [{"name": name, "nan": nan, "inf": inf} for name, (nan, inf) in found.items()],
        "tied": len(manifest.ties),
        "values": {
            "count": len(values),
            "components": dict(sorted(Counter(map(_component, values)).items())),
            "plain": {key: value for key, value in sorted(values.items()) if _is_plain(value)},
        },
    }


def totals_json(tensors: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """What tensors there are, in numbers, and the biggest of them."""
    biggest = sorted(tensors, key=lambda tensor: (-tensor["size_bytes"], tensor["name"]))[:_BIGGEST]
    return {
        "count": len(tensors),
        "size_bytes": sum(tensor["size_bytes"] for tensor in tensors),
        "dtypes": _totals(tensors, lambda tensor: tensor["dtype"]),
        "components": _totals(tensors, lambda tensor: _component(tensor["name"])),
        "biggest": [{key: one[key] for key in ("name", "dtype", "shape", "size_bytes", "pieces")} for one in biggest],
    }


def tensor_tables(tensors: Mapping[str, Any]) -> list[Table | str]:
    """The same for people."""
    parts: list[Table | str] = []
    for title, rows in (("component", tensors["components"]), ("dtype", tensors["dtypes"])):
        totals = Table(title, "tensors", "size")
        for name, row in rows.items():
            totals.add_row(clean(name), str(row["count"]), size(row["size_bytes"]))
        parts += ["", totals]
    biggest = Table("biggest tensors", "dtype", "shape", "size")
    for one in tensors["biggest"]:
        biggest.add_row(clean(one["name"]), one["dtype"], "×".join(map(str, one["shape"])), size(one["size_bytes"]))
    return [*parts, "", biggest]


def show_page(page: Mapping[str, Any], now_s: float) -> list[Table | str]:
    """The same for people, from what `show_json` returned."""
    info, tensors, values = page["checkpoint"], page["tensors"], page["values"]
    from ..records.health import faults_text

    head, bad = Table(), faults_text({one["name"]: (one["nan"], one["inf"]) for one in page["faults"]})
    reasons, metrics = "; ".join(info["reasons"]), sorted(info["metrics"].items())
    for name, text in (
        ("checkpoint", f"{info['name']}  (step {info['step']}, generation {info['generation']})"),
        ("lineage", "on" if info["on_lineage"] else "off: a newer branch left it behind"),
        *([("quarantine", info["quarantined"])] if info["quarantined"] else []),
        ("committed", f"{info['committed_at']}  ({ago(info['time_s'], now_s)})"),
        ("ranks", str(info["world"])),
        ("saved because", reasons or "?"),
        ("health", f"{health_text(info['non_finite'])}{': ' if bad else ''}{bad}"),
        ("metrics", "  ".join(f"{key} = {value:.6g}" for key, value in metrics) or "none"),
        ("versions", "  ".join(f"{key} {value}" for key, value in sorted(page["versions"].items())) or "?"),
        *((f"plugin {name}", _said(said)) for name, said in sorted(info["about"].items())),
        ("folder", info["attempt"]),
        ("tensors", f"{tensors['count']}, {size(tensors['size_bytes'])}, and {page['tied']} tied to one of them"),
        ("values", f"{values['count']}: {counts(values['components'])}"),
    ):
        head.add_row(clean(name), clean(text))
    parts: list[Table | str] = [head, *tensor_tables(tensors)]
    objects = Table("object", "size", "digest")
    for one in page["objects"]:
        objects.add_row(clean(one["name"]), size(one["size_bytes"]), one["digest"])
    plain = Table("value", "is")
    for key, value in list(values["plain"].items())[:_VALUES]:
        plain.add_row(clean(key), clean(_cut(repr(value))))
    parts += ["", objects, "", plain]
    if len(values["plain"]) > _VALUES:
        parts.append(f" … and {len(values['plain']) - _VALUES} more; --json has all")
    return parts


def verify_json(ref: CheckpointRef, found: Verification, on_lineage: bool, quarantined: str | None) -> dict[str, Any]:
    """What became of one checkpoint."""
    return {
        "name": keys.stem(ref),
        "step": ref.step,
        "generation": ref.generation,
        "on_lineage": on_lineage,
        "quarantined": quarantined,
        "good": not found.damage,
        "damage": [damage_json(one) for one in found.damage],
        "coverage": coverage_json(found.coverage),
    }


def coverage_json(coverage: Coverage) -> dict[str, Any]:
    """How much of it was looked at."""
    return vars(coverage)


def verify_lines(ref: CheckpointRef, found: Verification) -> list[str]:
    """The same for people. What was read in part is never called good without how much that was."""
    name = keys.stem(ref)
    if found.damage:
        return [f"{name}  {damage_line(one)}" for one in found.damage]
    return [f"{name}  good" + _coverage(found.coverage)]


def _coverage(coverage: Coverage) -> str:
    if coverage.level == "all":
        return ""
    if coverage.level == "inventory":
        return " as far as looked: every object is there at its size; no data was read"
    share = coverage.read_bytes / coverage.total_bytes if coverage.total_bytes else 1.0
    # Rounded down: what is not all of it must not look as if it were.
    percent = int(share * 1000) / 10
    return f" as far as read: {percent:g} % of the tensor data ({size(coverage.read_bytes)})"


def _totals(tensors: Sequence[Mapping[str, Any]], by: Callable[[Mapping[str, Any]], str]) -> dict[str, dict[str, int]]:
    found: dict[str, dict[str, int]] = {}
    for tensor in tensors:
        row = found.setdefault(by(tensor), {"count": 0, "size_bytes": 0})
        row["count"] += 1
        row["size_bytes"] += tensor["size_bytes"]
    return dict(sorted(found.items()))


def _component(key: str) -> str:
    """`model.wte.weight` -> model, `rank.3.rng.torch` -> rng."""
    parts = key.split(".")
    return parts[2] if parts[0] == "rank" and len(parts) > 2 else parts[0]


def _is_plain(value: Any) -> bool:
    return value is None or isinstance(value, bool | int | float | str)


def _said(said: Mapping[str, Any]) -> str:
    return "  ".join(f"{key} = {_cut(str(value))}" for key, value in sorted(said.items()))


def counts(numbers: Mapping[str, int]) -> str:
    """How many of each, for people."""
    return ", ".join(f"{name} {number}" for name, number in numbers.items()) or "none"


def _cut(text: str) -> str:
    return text if len(text) <= _VALUE_WIDTH else text[: _VALUE_WIDTH - 1] + "…"
