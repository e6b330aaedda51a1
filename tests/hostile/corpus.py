"""Hostile and damaged stores, each made from a good one by a function: its name, what a restore does with it, and a
word of the reason.

`expects` is one of

- ``older``: step 2 is damage, and the restore goes on to step 1 and names the reason;
- ``held``: step 2 is in quarantine: passed over with the reason, and given as it was saved to who asks for it;
- ``refused``: the restore is refused, whatever it asks for;
- ``whole``: what was done does no harm, and step 2 comes back as it was saved.

Payloads make the file that the variable ``CANARY`` names, if anything ever runs them.
"""

from __future__ import annotations

import io
import json
import os
import pickle
import struct
import zipfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import torch
from hostile.hostile_store import PlainDcp, Run, put
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex

__all__ = ["VARIANTS", "Variant"]

GIB = 1 << 30
_Store = TypeVar("_Store", Run, PlainDcp)


@dataclass(frozen=True)
class Variant:
    """One of the corpus."""

    name: str
    store: type[Run] | type[PlainDcp]
    make: Callable[[Any], Any]
    expects: str
    word: str  # a pattern


VARIANTS: dict[str, Variant] = {}


def _add(name: str, store: type[_Store], make: Callable[[_Store], Any], expects: str, word: str = "") -> None:
    assert name not in VARIANTS, name
    VARIANTS[name] = Variant(name, store, make, expects, word)


def run(name: str, expects: str, word: str = "") -> Callable[[Callable[[Run], Any]], None]:
    """A variant of the run."""
    return lambda make: _add(f"run: {name}", Run, make, expects, word)


def plain(name: str, expects: str, word: str = "") -> Callable[[Callable[[PlainDcp], Any]], None]:
    """A variant of the plain folder."""
    return lambda make: _add(f"plain: {name}", PlainDcp, make, expects, word)


class Payload:
    """Pickles as a call that makes the canary."""

    def __init__(self, call: Callable[..., Any], *args: Any) -> None:
        self.call, self.args = call, args

    def __reduce__(self) -> Any:
        return self.call, self.args


def canary() -> str:
    """A shell command."""
    return f"touch {os.environ['CANARY']}"


# ------------------------------------------------------------------------------------- each file of a run, each damage


def _cut(path: Path, size: int) -> None:
    put(path, path.read_bytes()[:size])


def _flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 0x10
    put(path, bytes(data))


def _huge(path: Path) -> None:
    """3 GiB that take no room; reading them would."""
    with path.open("r+b") as file:
        file.truncate(3 * GIB)


def _elsewhere(path: Path) -> Path:
    """What was at `path`, now outside of the store."""
    outside = Path(os.environ["OUTSIDE"], f"{path.parent.name}-{path.name}")
    path.rename(outside)
    return outside


def _fifo(path: Path) -> None:
    path.unlink()
    os.mkfifo(path)


def _folder_there(path: Path) -> None:
    path.unlink()
    path.mkdir()


DAMAGES: dict[str, Callable[[Path], Any]] = {
    "cut to nothing": lambda path: _cut(path, 0),
    "cut to half": lambda path: _cut(path, path.stat().st_size // 2),
    "short of one byte": lambda path: _cut(path, path.stat().st_size - 1),
    "a bit flipped": _flip,
    "garbage of the same size": lambda path: put(path, bytes(i * 37 % 256 for i in range(path.stat().st_size))),
    "3 GiB and empty": _huge,
    "a link to its bytes outside": lambda path: path.symlink_to(_elsewhere(path)),
    "a link to itself": lambda path: (path.unlink(), path.symlink_to(path)),
    "a pipe": _fifo,
    "a folder": _folder_there,
}
FILES: dict[str, tuple[Callable[[Run], Path], str, str]] = {
    "the commit record": (lambda store: store.commit, "older", "commits/|step 2|is listed"),
    "the generation record": (lambda store: store.generation, "refused", "generations/"),
    "manifest.json": (lambda store: store.file("manifest.json"), "older", r"manifest\.json"),
    "manifest-0.json": (lambda store: store.file("manifest-0.json"), "older", r"manifest-0\.json"),
    "a digests object": (lambda store: store.file("__0_0.digests"), "older", r"__0_0\.digests"),
    "a data object": (lambda store: store.file("__0_0.distcp"), "older", r"__0_0\.distcp"),
    ".metadata": (lambda store: store.file(".metadata"), "older", r"\.metadata"),
    "resilio.json": (lambda store: store.run, "whole", ""),
    "the pin": (lambda store: store.pin, "whole", ""),
    "the lease": (lambda store: store.lease, "whole", ""),
}
for _what, (_where, _expects, _word) in FILES.items():
    for _how, _damage in DAMAGES.items():
        if (_what, _how) == ("the commit record", "a folder"):
            continue  # a folder is no object: the record is gone, and the pin stands in
        if (_what, _how) == ("a data object", "a bit flipped"):
            continue  # it lies in no tensor, see below
        _add(f"run: {_what}, {_how}", Run, lambda store, d=_damage, w=_where: d(w(store)), _expects, _word)


@run("a bit flipped in a tensor", "older", "damaged in block 0")
def _(store: Run) -> None:
    at = json.loads(store.file("manifest-0.json").read_bytes())["tensors"]["model.weight"]["pieces"][0]["at"]
    data = bytearray(store.file("__0_0.distcp").read_bytes())
    data[at + 3] ^= 1
    put(store.file("__0_0.distcp"), bytes(data))


@run("a bit flipped between the tensors, which only verify reads", "whole")
def _(store: Run) -> None:
    _flip(store.file("__0_0.distcp"))


@run("a hard link to a record", "whole")
def _(store: Run) -> None:
    os.link(store.commit, store.root / "commits" / "other-name.json")


@run("the folder of an attempt is a link out of the store", "older", "symbolic link")
def _(store: Run) -> None:
    folder = store.folder
    folder.symlink_to(_elsewhere(folder))


@run("commits/ is a link out of the store", "refused", "symbolic link|link")
def _(store: Run) -> None:
    folder = store.root / "commits"
    folder.symlink_to(_elsewhere(folder))


@run("generations/ is a file", "refused", "generations")
def _(store: Run) -> None:
    _elsewhere(store.root / "generations")
    (store.root / "generations").write_bytes(b"")


@run("many names that are nobody's", "whole")
def _(store: Run) -> None:
    odd = [
        b"\xff\xfe",
        b"\x1b[2J.json",
        b"000000003-g000001.json\n",
        "０００000003-g000001.json".encode(),
    ]
    for name in [*odd, b"-rf", b"000000000-g000000.json", b"999999999-g000001.json.tmp", "a\u202eb".encode()]:
        Path(os.fsdecode(os.path.join(os.fsencode(store.root / "commits"), name))).write_bytes(b"{}")


# ------------------------------------------------------------------------------------------- records that lie, sealed


def _fields(name: str, expects: str, word: str, *, of: Callable[[Run], Path], **fields: Any) -> None:
    _add(f"run: {name}", Run, lambda store: store.sealed(of(store), lambda r: r.update(fields)), expects, word)


def _commit(store: Run) -> Path:
    return store.commit


def _generation(store: Run) -> Path:
    return store.generation


NUMBERS: dict[str, Any] = {"negative": -1, "2**64": 1 << 64, "a text": "1", "a fraction": 1.5, "null": None}
for _name, _number in NUMBERS.items():
    _fields(f"step of a commit is {_name}", "older", "CommitRecord", of=_commit, step=_number)
    _fields(f"size of a manifest is {_name}", "older", "CommitRecord", of=_commit, manifest_size_bytes=_number)
    _fields(f"a generation is {_name}", "refused", "GenerationRecord", of=_generation, generation=_number)
    _add(f"run: where a piece begins is {_name}", Run, lambda s, n=_number: s.piece(at=n), "older", "readable|leave")
_fields("another checkpoint's commit", "older", "not what its name says", of=_commit, step=1)
_fields("the manifest is said to have 2 GiB", "older", "too many", of=_commit, manifest_size_bytes=2 * GIB)
_fields("a folder that leaves the store", "older", "not what its name says", of=_commit, attempt="../../etc")
_fields("an absolute folder", "older", "not what its name says", of=_commit, attempt="/etc")
_fields(
    "digits of another script", "older", "not what its name says", of=_commit, attempt="step-00000000２-g000001-7f3a"
)
_fields("a world of ten million", "older", "world", of=_commit, world=10_000_000)
_fields("a digest nobody knows", "older", "does not know", of=_commit, manifest_digest="md5:00")
_fields("a digest that is none", "older", "CommitRecord", of=_commit, manifest_digest="../x")
_fields("a metric that is no number", "older", "metric", of=_commit, metrics={"loss": "__import__('os')"})
_fields("a metric with terminal escapes", "whole", "", of=_commit, metrics={"\x1b]0;owned\x07\u202e": 1.0})
_fields("reasons with terminal escapes", "whole", "", of=_commit, reasons=["\x1b[2J\u202egpj.exe"])
_fields("a format of the future", "refused", "Upgrade", of=_commit, format=99)
_fields("a format that is none", "older", "CommitRecord", of=_commit, format=0)
_fields(
    "a generation after itself",
    "refused",
    "later generations",
    of=_generation,
    ancestors=[{"generation": 9, "step": 1}],
)
_fields("a parent of its own generation", "refused", "later", of=_generation, parent={"generation": 1, "step": 1})
_fields("an ancestor without numbers", "refused", "GenerationRecord", of=_generation, ancestors=[{}])
_fields("a run of the future", "refused", "Upgrade", of=lambda store: store.run, format=99)
_fields("a lease for ever", "whole", "", of=lambda store: store.lease, ttl_s=1e300)
_fields("a pin of another checkpoint", "whole", "", of=lambda store: store.pin, step=1)
_fields("a pin with another's commit", "whole", "", of=lambda store: store.pin, commit="{}")
for _token in (b"1e400", b"NaN", b"-Infinity", b"1e99999999"):
    _add(
        f"run: a time of {_token.decode()}",
        Run,
        lambda s, t=_token: s.sealed_text(s.commit, lambda b: b.replace(b'"time_s":', b'"time_s":' + t + b',"z":', 1)),
        "older",
        "CommitRecord",
    )


@run("a commit record with a key twice, the second another's", "older", "not what its name says")
def _(store: Run) -> None:
    store.sealed_text(store.commit, lambda body: body[:-1] + b',"step":1}')


@run("a commit record nested without end", "older", "CommitRecord")
def _(store: Run) -> None:
    store.sealed_text(store.commit, lambda body: body[:-1] + b',"about":' + b"[" * 100_000 + b"]" * 100_000 + b"}")


@run("a commit record with an unknown field nested without end", "older", "CommitRecord")
def _(store: Run) -> None:
    store.sealed_text(store.commit, lambda body: body[:-1] + b',"z":' + b"[" * 100_000 + b"]" * 100_000 + b"}")


@run("a commit record that is no UTF-8", "older", "CommitRecord")
def _(store: Run) -> None:
    store.sealed_text(store.commit, lambda body: body.replace(b'"nonce":"', b'"nonce":"\xff\xfe'))


@run("a commit record whose pin says something else", "older", "not a readable CommitRecord")
def _(store: Run) -> None:
    store.sealed(store.pin, lambda record: record.update(commit=record["commit"].replace("sha", "x")))
    put(store.commit, b"{}")


# ------------------------------------------------------------------------------------------------------ quarantine

for _how, _damage in DAMAGES.items():
    _add(
        f"run: a quarantine record, {_how}",
        Run,
        lambda store, d=_damage: d(store.quarantine()),
        "whole" if _how == "a folder" else "held",  # which is no object
        "" if _how == "a folder" else "its quarantine record cannot be read",
    )
_CLAIMS: tuple[tuple[str, dict[str, Any], str], ...] = (
    ("of another checkpoint", {"step": 1}, "not what its name says"),
    ("of the future", {"format": 99}, "Upgrade"),
    ("with a reason that is none", {"because": ["x"]}, "QuarantineRecord"),
    ("with a reason without end", {"because": "x" * 500_000}, "QuarantineRecord"),
    ("with terminal escapes", {"because": "\x1b]0;owned\x07\u202egpj.exe"}, "owned"),
    ("with problems that are none", {"problems": [[]]}, "QuarantineRecord"),
    ("with a path that leaves the run", {"problems": [{"where": "../../x", "what": "y"}], "attempt": "../.."}, "x: y"),
    ("with 1e200 more problems", {"more": 10**200}, "QuarantineRecord"),
)
for _what, _claim, _word in _CLAIMS:
    _add(f"run: a quarantine {_what}", Run, lambda store, c=_claim: store.quarantine(**c), "held", _word)


@run("a quarantine of all there is", "refused", "none of the 2.*resilio release")
def _(store: Run) -> None:
    store.quarantine(1)
    store.quarantine(2)


@run("a quarantine of names that are about nothing", "whole")
def _(store: Run) -> None:
    folder = store.quarantine().parent
    for path in folder.iterdir():
        path.unlink()
    for name in ("x", "2-g1.json", "000000002-g000000.json", "\uff10" * 9 + "-g000001.json", "000000002"):
        put(folder / name, b"{}")
    (folder / "000000002-g000001").mkdir()
    put(folder / "000000002-g000001" / "000000002-g000001.json", b"{}")


@run("a quarantine written 300 times under names of any kind", "held", "and 290 more reasons")
def _(store: Run) -> None:
    folder = store.quarantine().parent
    for number in range(299):
        put(folder / f"000000002-g000001 {number}.é.bak", b"[" * 1000)


# ------------------------------------------------------------------------------------------------------ the manifest


@run("a manifest with 1e5 brackets", "older", "Manifest")
def _(store: Run) -> None:
    store.manifest_bytes(b"[" * 100_000)


@run("a manifest of another attempt", "older", "folder")
def _(store: Run) -> None:
    store.manifest(lambda root: root.update(attempt="step-000000002-g000001-ffff"))


@run("a manifest of two ranks with one part", "older", "parts?|ranks|world")
def _(store: Run) -> None:
    store.manifest(lambda root: root.update(world=2))


@run("a part of another name", "older", "is called")
def _(store: Run) -> None:
    store.manifest(lambda root: root["parts"][0].update(name="../manifest-0.json"))


@run("the same part twice", "older", "one part of each")
def _(store: Run) -> None:
    store.manifest(lambda root: root["parts"].append(root["parts"][0]))


for _name in (
    "../../x",
    "/etc/passwd",
    "a\\..\\b",
    "a\0b",
    "a//b",
    ".",
    "..",
    "\x1b[2J",
    "a/../b",
    "x" * 1024,
    "\x9b2J",
):
    _add(
        f"run: an object called {_name[:20]!r}",
        Run,
        lambda s, n=_name: s.manifest(lambda root: root["objects"][0].update(name=n)),
        "older",
        r"own folder|missing|\.metadata",
    )
for _name in ("../__0_0.distcp", "__0_0.distcp/../x", "__０_0.distcp", "__0_0.DISTCP", "__00_0.distcp"):
    _add(
        f"run: a data object called {_name!r}",
        Run,
        lambda s, n=_name: s.part(lambda part: part["objects"][0].update(name=n)),
        "older",
        "data objects",
    )


@run("a tie to itself", "older", "tied to")
def _(store: Run) -> None:
    store.manifest(lambda root: root.update(ties={"model.z": "model.z"}))


@run("ties in a circle", "older", "tied to")
def _(store: Run) -> None:
    store.manifest(lambda root: root.update(ties={"a": "b", "b": "c", "c": "a"}))


@run("a digest that is unknown, in a part", "older", "does not know")
def _(store: Run) -> None:
    store.part(lambda part: part["objects"][0].update(digest="md5:00"))


@run("a wrong digest with the right size", "older", "damaged|digest")
def _(store: Run) -> None:
    put(store.file(".metadata"), bytes(store.file(".metadata").stat().st_size))


@run("an object named twice", "older", "named twice")
def _(store: Run) -> None:
    store.part(lambda part: part["objects"].extend(part["objects"]))


@run("an object of 2**63-1 bytes", "older", "bytes")
def _(store: Run) -> None:
    store.part(lambda part: part["objects"][0].update(size_bytes=(1 << 63) - 1))


@run("a digests object of 3 GiB that is there", "older", "digests|too many")
def _(store: Run) -> None:
    _huge(store.file("__0_0.digests"))
    store.part(lambda part: part["objects"][1].update(size_bytes=3 * GIB))


# ------------------------------------------------------------------------------------------------- tensors and pieces


@run("a shape of 2**40 by 2**40", "older", "leave")
def _(store: Run) -> None:
    store.tensor(lambda tensor: tensor.update(shape=[1 << 40, 1 << 40]))


@run("a shape without elements in 64 dims of 2**62", "refused", "other shape")
def _(store: Run) -> None:
    dims = [0, *([1 << 62] * 63)]
    store.tensor(
        lambda t: t.update(shape=dims, pieces=[{**t["pieces"][0], "offsets": [0] * 64, "sizes": dims, "size_bytes": 0}])
    )


@run("a shape of 65 dims", "older", "ManifestPart")
def _(store: Run) -> None:
    store.tensor(lambda tensor: tensor.update(shape=[1] * 65))


@run("a shape with a negative dim", "older", "ManifestPart")
def _(store: Run) -> None:
    store.tensor(lambda tensor: tensor.update(shape=[-3, -4]))


@run("a negative offset", "older", "ManifestPart")
def _(store: Run) -> None:
    store.piece(offsets=[-1, 0])


@run("a piece that leaves its tensor", "older", "leaves the shape")
def _(store: Run) -> None:
    store.piece(offsets=[1, 0])


@run("a piece that leaves its object", "older", "leave the object")
def _(store: Run) -> None:
    store.piece(at=1 << 20)


@run("a piece in no object", "older", "no data object")
def _(store: Run) -> None:
    store.piece(object=1 << 40)


@run("a piece in the digests", "older", "no data object")
def _(store: Run) -> None:
    store.piece(object=1)


@run("block digests that are not there", "older", "leave their object")
def _(store: Run) -> None:
    store.piece(block=1 << 40)


@run("a piece of too many bytes", "older", "bytes are not")
def _(store: Run) -> None:
    store.piece(size_bytes=1 << 40)


@run("a piece twice", "older", "overlap")
def _(store: Run) -> None:
    store.tensor(lambda tensor: tensor["pieces"].append(tensor["pieces"][0]))


@run("bytes of two tensors that overlap", "older", "overlap")
def _(store: Run) -> None:
    store.part(lambda part: part["tensors"].update({"model.w": part["tensors"]["model.weight"]}))


@run("a hole", "older", "leave .* out")
def _(store: Run) -> None:
    store.piece(sizes=[2, 4], size_bytes=32)


@run("no pieces", "older", "not there")
def _(store: Run) -> None:
    store.tensor(lambda tensor: tensor.update(pieces=[]))


@run("an order that is none", "older", "order")
def _(store: Run) -> None:
    store.tensor(lambda tensor: tensor.update(order=[0, 0]))


for _dtype in ("load", "float31", "__class__", "float32\n", "Float32"):
    _add(
        f"run: the dtype {_dtype!r}",
        Run,
        lambda s, d=_dtype: s.tensor(lambda tensor: tensor.update(dtype=d)),
        "older",
        "dtype|ManifestPart",
    )


# ---------------------------------------------------------------------------------------------------- values and tree


VALUES: dict[str, tuple[Any, str]] = {
    "an unknown tag": ({"$import": "os"}, "no tag"),
    "a tag beside a key": ({"$tuple": [], "x": 1}, "no tag"),
    "two tags": ({"$tuple": [], "$set": []}, "no tag"),
    "a tuple that is a text": ({"$tuple": "abc"}, "no encoded value"),
    "a pair of three": ({"$map": [[1, 2, 3]]}, "no encoded value"),
    "a key that has no hash": ({"$map": [[[1], 2]]}, "no encoded value"),
    "a set of lists": ({"$set": [[1]]}, "no encoded value"),
    "a float of words": ({"$float": "os.system"}, "no encoded value"),
    "an int of words": ({"$int": "0xZZ"}, "no encoded value"),
    "bytes that are no base64": ({"$bytes": "%%%"}, "no encoded value"),
    "an array of objects": ({"$ndarray": {"dtype": "|O", "shape": [1], "data": "AAAAAAAAAAA="}}, "no encoded value"),
    "an array of records": ({"$ndarray": {"dtype": "i4,O", "shape": [0], "data": ""}}, "no encoded value"),
    "an array of a huge shape": ({"$ndarray": {"dtype": "<f4", "shape": [1 << 40, 1 << 40], "data": ""}}, "no encoded"),
    "an empty array of a huge shape": ({"$ndarray": {"dtype": "<f4", "shape": [0, 1 << 70], "data": ""}}, "no encoded"),
    "an array of a huge item": ({"$ndarray": {"dtype": "S2147483647", "shape": [0], "data": ""}}, ""),
    "a negative shape": ({"$ndarray": {"dtype": "<f4", "shape": [-1, -1], "data": "AAAAAA=="}}, "no encoded value"),
    "a shape of texts": ({"$ndarray": {"dtype": "<f4", "shape": ["1"], "data": "AAAAAA=="}}, "no encoded value"),
    "an array without anything": ({"$ndarray": {}}, "no encoded value"),
    "a dtype that is code": ({"$ndarray": {"dtype": "__import__('os')", "shape": [0], "data": ""}}, "no encoded value"),
    "a torch dtype that is a function": ({"$dtype": "load"}, "no dtype"),
    "a size of texts": ({"$size": ["x"]}, "no encoded value"),
    "a size beyond numbers": ({"$size": [1 << 64]}, "no encoded value|readable"),
    "a reference out of the tree": ({"$ref": "n.x"}, "no tag"),
    "a complex of texts": ({"$complex": ["1", "2"]}, "no encoded value"),
}
for _name, (_value, _word) in VALUES.items():
    _add(f"run: a value that is {_name}", Run, lambda s, v=_value: s.value(v), "older" if _word else "whole", _word)


def _deep(depth: int, leaf: Any) -> Any:
    for _ in range(depth):
        leaf = [leaf]
    return leaf


@run("a value nested 65 deep", "older", "too deep")
def _(store: Run) -> None:
    store.value(_deep(66, 0))


@run("a part nested without end", "older", "ManifestPart")
def _(store: Run) -> None:
    data = store.file("manifest-0.json").read_bytes()
    store.part_bytes(data.replace(b'"values":{', b'"values":{"z":' + b"[" * 100_000 + b"]" * 100_000 + b",", 1))


@run("a map whose keys all have one hash", "older", "keys")
def _(store: Run) -> None:
    store.value({"$map": [[{"$int": hex(i * ((1 << 61) - 1))}, 0] for i in range(1 << 10, (1 << 10) + 100_000)]})


@run("a value below a name of a megabyte, many times", "older", "tag")
def _(store: Run) -> None:
    store.value({"k" * (1 << 20): {**{f"a{i}": 0 for i in range(200_000)}, "last": {"$no": 1}}})


@run("an int of a million digits", "whole")
def _(store: Run) -> None:
    store.value({"$int": "0x" + "f" * 1_000_000})


@run("a value with terminal escapes", "whole")
def _(store: Run) -> None:
    store.value("\x1b]0;owned\x07\u202e")


@run("a key of a value twice", "whole")
def _(store: Run) -> None:
    data = store.file("manifest-0.json").read_bytes()
    store.part_bytes(data.replace(b'"values":{', b'"values":{"n.x":1,', 1))


@run("a tensor that is a value as well", "older", "something else|twice")
def _(store: Run) -> None:
    store.part(lambda part: part["values"].update({"model.weight": 1}))


@run("a tree with a leaf that leads nowhere", "older", "n.y")
def _(store: Run) -> None:
    store.part(lambda part: part["tree"].update({"n": {"x": {"$ref": "n.y"}}}))


@run("a tree with one leaf twice", "older", "twice")
def _(store: Run) -> None:
    store.part(lambda part: part["tree"].update({"n": {"x": {"$ref": "n.x"}, "y": {"$ref": "n.x"}}}))


@run("a tree with a million leaves of one tensor", "older", "twice")
def _(store: Run) -> None:
    store.part(lambda part: part["tree"].update({"n": [{"$ref": "model.weight"}] * 1_000_000}))


@run("a tree nested 65 deep", "older", "too deep")
def _(store: Run) -> None:
    store.part(lambda part: part["tree"].update({"n": _deep(66, {"$ref": "n.x"})}))


@run("a tree of another rank's state", "older", "other state")
def _(store: Run) -> None:
    store.part(lambda part: part["tree"].update({"rank": {"7": {}}}))


@run("a tree that is a list", "older", "tree|other state")
def _(store: Run) -> None:
    store.part(lambda part: part.update(tree=[1]))


@run("a pickle in the place of .metadata, with right digests", "whole")
def _(store: Run) -> None:
    data = pickle.dumps(Payload(os.system, canary()))
    put(store.file(".metadata"), data)
    from resilio.records.digests import digest_of

    store.manifest(lambda root: root["objects"][0].update(size_bytes=len(data), digest=digest_of(data)))


@run("a part with a count of values that no memory holds", "older", "too many")
def _(store: Run) -> None:
    # 192 MiB of text that would be 67 million lists: more than 4 GiB of Python's memory.
    data = store.file("manifest-0.json").read_bytes()
    many = b'"values":{"z":[' + b"[]," * (64 << 20) + b"[]],"
    store.part_bytes(data.replace(b'"values":{', many, 1))


# -------------------------------------------------------------------------------------------- a plain folder: .metadata


for _how, _damage in DAMAGES.items():
    if _how not in ("a folder", "a link to itself", "a pipe", "a link to its bytes outside"):
        _add(f"plain: .metadata, {_how}", PlainDcp, lambda store, d=_damage: d(store.metadata), "refused", "metadata")
    elif "link" in _how or "pipe" in _how:
        _add(f"plain: .metadata, {_how}", PlainDcp, lambda store, d=_damage: d(store.metadata), "refused", "link|pipe")
    # Plain DCP has no digests: a bit is only found where it breaks the archive, and what lies behind the data is not.
    _harmless = _how in ("3 GiB and empty", "a bit flipped")
    _add(
        f"plain: the data, {_how}",
        PlainDcp,
        lambda store, d=_damage: d(store.data),
        "whole" if _harmless else "refused",
        "" if _harmless else "__0_0|cannot be read",
    )


def _pickle(name: str, code: Callable[[], bytes], word: str) -> None:
    _add(f"plain: metadata that is {name}", PlainDcp, lambda store: put(store.metadata, code()), "refused", word)


_pickle("a call of os.system", lambda: pickle.dumps(Payload(os.system, canary())), "system")
_pickle(
    "a call of builtins.eval", lambda: pickle.dumps(Payload(eval, f"__import__('os').system({canary()!r})")), "eval"
)
_pickle("a call of builtins.exec", lambda: pickle.dumps(Payload(exec, "import this"), protocol=2), "exec")
_pickle("a call of torch.load", lambda: pickle.dumps(Payload(torch.load, "/etc/passwd")), "load")
_pickle("a call of getattr", lambda: pickle.dumps(Payload(getattr, str, "join")), "getattr")
_pickle("a global with a dotted name", lambda: b"\x80\x04\x8c\x05torch\x8c\x0bhub.load\x20\x20\x20\x93.", "hub")
_pickle("an object of protocol 0", lambda: f"cos\nsystem\n(S'{canary()}'\ntR.".encode(), "system")
_pickle("INST", lambda: f"(S'{canary()}'\nios\nsystem\n.".encode(), "STRING|INST")
_pickle("OBJ", lambda: b"(cos\nsystem\no.", "system|OBJ")
_pickle("an extension", lambda: b"\x80\x02\x82\x01.", "EXT1")
_pickle("a persistent id", lambda: b"\x80\x02\x8c\x01xQ.", "BINPERSID")
_pickle("a global made of a number", lambda: b"\x80\x04K\x01K\x02\x93.", "global")
_pickle("an int of 2 GiB", lambda: b"\x80\x02\x8b\xff\xff\xff\x7f.", "damaged|LONG4")
_pickle("a text of an exbyte", lambda: b"\x80\x04\x8d\xff\xff\xff\xff\xff\xff\xff\x0f.", "damaged")
_pickle("a memo of four thousand million places", lambda: b"\x80\x04]r\xff\xff\xff\xffa.", "metadata")
_pickle("frames that lie", lambda: b"\x80\x04\x95\xff\xff\xff\xff\xff\xff\xff\x7f}.", "metadata")
_pickle(
    "a tower of tuples as a key",
    lambda: b"\x80\x04})\x94" + b"".join(b"h" + bytes([i]) + b"\x86\x94" for i in range(60)) + b"Ns.",
    "key of a dict",
)
_pickle("a tower of lists", lambda: b"\x80\x04" + b"]" * 2000 + b"a" * 1999 + b".", "metadata")
_pickle("too many instructions", lambda: b"\x80\x04" + b"]" * (80 << 20) + b".", "instructions or more, too many")
_pickle("no end of marks", lambda: b"\x80\x04" + b"(" * 1_000_000 + b".", "metadata")


def _meta(name: str, word: str) -> Callable[[Callable[[Any], Any]], None]:
    return lambda change: _add(
        f"plain: metadata with {name}",
        PlainDcp,
        lambda store: store.change(lambda m: (change(m), None)[1]),
        "refused",
        word,
    )


def _of(metadata: Any, key: str) -> Any:
    return next(place for index, place in metadata.storage_data.items() if index.fqn == key)


def _set(target: Any, name: str, value: Any) -> None:
    object.__setattr__(target, name, value)


for _path in ("../x", "/etc/passwd", "a/../../x", "a\\b", "a\0b", "", ".", "\x1b[2J"):
    _meta(f"the file {_path!r}", "inside the folder|characters")(
        lambda m, p=_path: _set(_of(m, "model.weight"), "relative_path", p)
    )
for _name, _number in {"-1": -1, "2**63": 1 << 63, "2**5000": 1 << 5000, "True": True, "1.5": 1.5, "'1'": "1"}.items():
    for _field in ("offset", "length"):
        _meta(f"{_field} {_name}", "metadata")(lambda m, f=_field, n=_number: _set(_of(m, "model.weight"), f, n))
_meta("a huge shape", "out of bounds|leave")(
    lambda m: _set(m.state_dict_metadata["model.weight"], "size", torch.Size([1 << 40, 1 << 40]))
)
_meta("a negative shape", "out of bounds")(
    lambda m: _set(m.state_dict_metadata["model.weight"], "size", torch.Size([-3, 4]))
)
_meta("an unknown field", "unknown field")(lambda m: _set(m, "hook", 1))
_meta("a payload in storage_meta", "system")(lambda m: _set(m, "storage_meta", Payload(os.system, canary())))
_meta("a payload in planner_data", "system")(lambda m: _set(m, "planner_data", Payload(os.system, canary())))
_meta("a list of a thousand million places", "places|list")(
    lambda m: (
        m.planner_data.update({"n.x": ("n", 10**9)}),
        m.state_dict_metadata.update({f"n.{10**9}": m.state_dict_metadata.pop("n.x")}),
        m.storage_data.update({MetadataIndex(f"n.{10**9}"): _of(m, "n.x")}),
        m.planner_data.update({f"n.{10**9}": ("n", 10**9)}),
    )
)
_meta("chunks laid crosswise", "crosswise")(
    lambda m, n=2000: (
        _set(m.state_dict_metadata["model.weight"], "size", torch.Size([n, n, n])),
        _set(
            m.state_dict_metadata["model.weight"],
            "chunks",
            [ChunkStorageMetadata(torch.Size([i, 0, i]), torch.Size([n - i, n, n - i])) for i in range(n)],
        ),
    )
)


# ---------------------------------------------------------------------------------------------- a plain folder: objects


def _saved(value: Any) -> bytes:
    stream = io.BytesIO()
    torch.save(value, stream)
    return stream.getvalue()


def _with_pickle(code: bytes, value: Any = None, **records: bytes) -> bytes:
    """What `torch.save` would write, with another pickle inside."""
    source, target = zipfile.ZipFile(io.BytesIO(_saved(torch.zeros(3) if value is None else value))), io.BytesIO()
    with zipfile.ZipFile(target, "w", zipfile.ZIP_STORED) as out:
        for name in source.namelist():
            data = code if name.endswith("data.pkl") else source.read(name)
            out.writestr(name, records.get(name.rpartition("/")[2], data))
    return target.getvalue()


def _value(name: str, data: Callable[[], bytes], word: str, expects: str = "refused") -> None:
    _add(f"plain: a value that is {name}", PlainDcp, lambda store: store.point("n.x", data()), expects, word)


def _tower(height: int) -> bytes:
    """A pickle of twice a tuple of twice a tuple …, as the key of a dict."""
    levels = b"".join(
        b"j" + struct.pack("<I", i) + b"j" + struct.pack("<I", i) + b"\x86r" + struct.pack("<I", i + 1)
        for i in range(height)
    )
    return b"\x80\x02})r\x00\x00\x00\x00" + levels + b"K\x01s."


_value("a call of os.system", lambda: _saved(Payload(os.system, canary())), "system")
_value("a call of eval", lambda: _saved(Payload(eval, f"__import__('os').system({canary()!r})")), "eval")
_value("a call of torch.load", lambda: _saved(Payload(torch.load, "x")), "load")
_value("a class of ours", lambda: _saved(Payload(Path.touch, Path("x"))), "athlib|Path")
_value("a bare pickle, without a zip", lambda: pickle.dumps(Payload(os.system, canary())), "cannot be read")
_value("a tensor of the old format", lambda: _legacy(), "cannot be read")
_value("compressed", lambda: _deflated(), "compressed")
_value("one whose directory is elsewhere for others", lambda: _two_directories(), "directory")
_value("one whose records overlap", lambda: _overlapping(), "overlap|more than")
_value("a tower of tuples as a key", lambda: _with_pickle(_tower(60)), "n.x")
_value("a tower of tuples", lambda: _with_pickle(_tower(60)[:-4].replace(b"\x80\x02}", b"\x80\x02") + b"."), "n.x")
_value(
    "a bytearray of 8 GiB",
    lambda: _with_pickle(b"\x80\x02cbuiltins\nbytearray\n\x8a\x05\x00\x00\x00\x00\x02\x85R."),
    "n.x",
)
_value("a list nested without end", lambda: _with_pickle(b"\x80\x02" + b"]" * 100_000 + b"a" * 99_999 + b"."), "n.x")
_value("a list that holds itself", lambda: _with_pickle(b"\x80\x02]q\x00h\x00a."), "n.x")
_value("an int of 2 GiB", lambda: _with_pickle(b"\x80\x02\x8b\xff\xff\xff\x7f."), "n.x")
_value("a storage that is too short", lambda: _with_pickle(_pkl(torch.zeros(3)), None, **{"0": b"abc"}), "n.x")


def _pkl(value: Any) -> bytes:
    source = zipfile.ZipFile(io.BytesIO(_saved(value)))
    return source.read(next(name for name in source.namelist() if name.endswith("data.pkl")))


def _legacy() -> bytes:
    stream = io.BytesIO()
    torch.save(1, stream, _use_new_zipfile_serialization=False)
    return stream.getvalue()


def _deflated() -> bytes:
    """A few kilobytes that would be 64 MiB."""
    source, target = zipfile.ZipFile(io.BytesIO(_saved(1))), io.BytesIO()
    with zipfile.ZipFile(target, "w", zipfile.ZIP_DEFLATED) as out:
        for name in source.namelist():
            out.writestr(name, source.read(name) + bytes(1 << 26))
    return target.getvalue()


def _two_directories() -> bytes:
    """One directory where Python looks, another where the end record says, which is where others look."""
    hidden, shown = _deflated(), bytearray(_saved(1))
    end = shown.rindex(b"PK\x05\x06")
    start = hidden.rindex(b"PK\x05\x06")
    size, offset = struct.unpack("<II", hidden[start + 12 : start + 20])
    del size
    shown[end + 16 : end + 20] = struct.pack("<I", offset)
    return hidden[:start] + bytes(shown)


def _overlapping() -> bytes:
    """Forty records that are one and the same megabyte."""
    target = io.BytesIO()
    with zipfile.ZipFile(target, "w", zipfile.ZIP_STORED) as out:
        for name in ("archive/data.pkl", "archive/version", "archive/byteorder"):
            out.writestr(
                name, {"data.pkl": _pkl(1), "version": b"3\n", "byteorder": b"little"}[name.rpartition("/")[2]]
            )
        out.writestr("archive/data/0", bytes(1 << 20))
        first = out.infolist()[-1]
        for i in range(1, 40):
            twin = zipfile.ZipInfo(f"archive/data/{i}")
            for field in ("header_offset", "file_size", "compress_size", "CRC", "compress_type"):
                setattr(twin, field, getattr(first, field))
            out.filelist.append(twin)
            out.NameToInfo[twin.filename] = twin
        out._didModify = True
    return target.getvalue()


def _directory_of(entries: int) -> bytes:
    """An archive whose directory is most of it: each entry is 47 bytes, and an object in whoever lists them."""
    one = struct.pack("<4s6H3L5H2L", b"PK\1\2", 20, 20, 0, 0, 0, 0, 0, 0, 0, 1, 0, 0, 0, 0, 0, 0) + b"x"
    size = len(one) * entries
    wide = struct.pack("<4sQ2H2L4Q", b"PK\6\6", 44, 45, 45, 0, 0, entries, entries, size, 0)
    wide += struct.pack("<4sLQL", b"PK\6\7", 0, size, 1)
    return one * entries + wide + struct.pack("<4s4H2LH", b"PK\5\6", 0, 0, 0xFFFF, 0xFFFF, size, 0, 0)


_value("one whose directory has half a gigabyte", lambda: _directory_of(10_000_000), "too many")


@plain("sixty values that are the same 64 MiB", "refused", "same bytes")
def _(store: PlainDcp) -> None:
    store.point("n.x", _saved("x" * (64 << 20)))

    def change(metadata: Any) -> None:
        place, entry = _of(metadata, "n.x"), metadata.state_dict_metadata["n.x"]
        for i in range(60):
            metadata.storage_data[MetadataIndex(f"n.y{i}")] = place
            metadata.state_dict_metadata[f"n.y{i}"] = entry
            metadata.planner_data[f"n.y{i}"] = ("n", f"y{i}")

    store.change(change)


@plain("a value of 3 GiB that is not there to read", "refused", "too many|n.x")
def _(store: PlainDcp) -> None:
    store.change(lambda m: (_set(_of(m, "n.x"), "offset", 0), _set(_of(m, "n.x"), "length", 3 * GIB), None)[2])
    _huge(store.data)


@plain("a tensor stored in 3 GiB", "refused", "too many|model.weight")
def _(store: PlainDcp) -> None:
    store.change(
        lambda m: (_set(_of(m, "model.weight"), "offset", 0), _set(_of(m, "model.weight"), "length", 3 * GIB), None)[2]
    )
    _huge(store.data)


@plain("a tensor that is a payload", "refused", "model.weight.*system")
def _(store: PlainDcp) -> None:
    store.point("model.weight", _saved([Payload(os.system, canary()), torch.zeros(64)]))


@plain("a tensor that is a view of nothing", "refused", "model.weight")
def _(store: PlainDcp) -> None:
    store.point("model.weight", _saved(torch.zeros(1).expand(1 << 40)) + b"")


@plain("a tensor that is a sparse one", "refused", "model.weight")
def _(store: PlainDcp) -> None:
    store.point("model.weight", _saved(torch.eye(30).to_sparse()))


@plain("a tensor on a device without memory", "refused", "model.weight")
def _(store: PlainDcp) -> None:
    store.point("model.weight", _saved([torch.empty(3, 4, device="meta"), "x" * 100]))
