"""Whatever the bytes of a record, of metadata, of a value, a URL or a policy are, what comes is what was there or an
error of ours. ``RESILIO_FUZZ=10`` tries ten times as many."""

from __future__ import annotations

import json
import os
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hostile.hostile_store import Run, copy, make_plain, make_run
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from resilio.engine.foreign_metadata import read_foreign_metadata
from resilio.errors import ConfigError, FormatError, IntegrityError, UnknownSchemeError
from resilio.hooks import open_storage
from resilio.policies import parse
from resilio.records import digests, keys, schema
from resilio.records.catalog import discover
from resilio.records.commits import find_commit, list_pins, read_pin
from resilio.records.manifest import load_manifest
from resilio.records.quarantine import quarantined
from resilio.records.values import decode_value
from resilio.records.verify import verify_checkpoint
from resilio.state.flat import Ref
from resilio.storage.registry import StorageRegistry, to_url, without_credentials
from resilio.types import CheckpointRef

TIMES = int(os.environ.get("RESILIO_FUZZ", "1"))  # how many times as many examples
SEALED = (
    *(schema.RunRecord, schema.GenerationRecord, schema.CommitRecord, schema.PinRecord, schema.LeaseRecord),
    schema.QuarantineRecord,
)
KINDS: tuple[type[msgspec.Struct], ...] = (*SEALED, schema.Manifest, schema.ManifestPart)


def fuzz(count: int) -> Callable[[Any], Any]:
    """`count` examples, always the same ones, of functions that tests may give fixtures."""
    quiet = [HealthCheck.function_scoped_fixture, HealthCheck.too_slow, HealthCheck.data_too_large]
    return settings(
        max_examples=count * TIMES, derandomize=True, deadline=None, suppress_health_check=quiet, database=None
    )


@pytest.fixture(scope="module")
def good(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("fuzz")
    make_run(folder / "run")
    make_plain(folder / "plain")
    return folder


@pytest.fixture(scope="module")
def records(good: Path) -> dict[type[msgspec.Struct], bytes]:
    """One good record of each kind, without its check."""
    run = Run(copy(good / "run", good / "records"))
    held = run.quarantine(problems=[{"where": "a", "what": "b"}])
    paths = (run.run, run.generation, run.commit, run.pin, run.lease, held, run.file("manifest.json"))
    found = {kind: path.read_bytes() for kind, path in zip(KINDS, (*paths, run.file("manifest-0.json")), strict=True)}
    return {
        kind: data[: data.rindex(b',"check"')] + b"}" if issubclass(kind, schema.Sealed) else data
        for kind, data in found.items()
    }


NUMBERS = st.one_of(
    st.integers(-3, 70), st.sampled_from([1 << 31, (1 << 63) - 1, 1 << 63, 1 << 64, -(1 << 63), 1 << 200]), st.floats()
)
TEXTS = st.one_of(
    st.text(max_size=12),
    st.sampled_from(
        ["../x", "/etc/passwd", "a\\b", "\0", "xxh3_128:00", "md5:00", "$ref", "$tuple", "model.weight", "\ud800"]
    ),
)
JSON = st.recursive(
    st.one_of(st.none(), st.booleans(), NUMBERS, TEXTS),
    lambda below: st.one_of(st.lists(below, max_size=4), st.dictionaries(TEXTS, below, max_size=4)),
    max_leaves=12,
)


@st.composite
def mutated(draw: st.DrawFn, data: bytes) -> bytes:
    """A few bytes changed, taken out, put in or taken twice."""
    out = bytearray(data)
    for _ in range(draw(st.integers(1, 4))):
        at = draw(st.integers(0, max(0, len(out) - 1)))
        end = min(len(out), at + draw(st.integers(0, 12)))
        what = draw(st.sampled_from(["flip", "cut", "put", "twice", "end"]))
        if what == "flip" and out:
            out[at] ^= draw(st.integers(1, 255))
        elif what == "cut":
            del out[at:end]
        elif what == "put":
            out[at:at] = draw(
                st.one_of(st.binary(max_size=6), st.sampled_from([b"[" * 2000, b"-1", b"1e999", b'"', b"\x00"]))
            )
        elif what == "twice":
            out[end:end] = out[at:end]
        else:
            del out[at:]
    return bytes(out)


@st.composite
def rebuilt(draw: st.DrawFn, data: bytes) -> bytes:
    """The record with the right shape, and something else at a few of its places."""
    record = json.loads(data)
    for _ in range(draw(st.integers(1, 3))):
        node, places = record, []
        while isinstance(node, dict | list) and node:
            place = draw(st.sampled_from(sorted(node) if isinstance(node, dict) else range(len(node))))
            places.append((node, place))
            node = node[place]
            if draw(st.booleans()) and draw(st.booleans()):
                break
        if places:
            holder, place = places[-1]
            holder[place] = draw(JSON)
    return json.dumps(record).encode()


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.__name__)
@fuzz(120)
@given(data=st.data())
def test_a_record_of_any_bytes_is_read_or_refused(records: Any, kind: Any, data: st.DataObject) -> None:
    way = data.draw(st.sampled_from([mutated, rebuilt]))
    body = data.draw(way(records[kind]))
    if issubclass(kind, schema.Sealed):
        body = schema.seal(body)
    try:
        record = schema.decode(body, kind, "here")
    except FormatError as error:
        assert len(str(error)) < 5000
    else:
        assert type(record) is kind


@fuzz(150)
@given(data=st.data())
def test_a_run_with_a_forged_record_is_read_or_refused(good: Path, tmp_path_factory: Any, data: st.DataObject) -> None:
    """Commit, manifest and its part, right digests all the way: down to `verify`, which reads the data."""
    run = Run(copy(good / "run", tmp_path_factory.mktemp("one") / "run"))
    part = run.file("manifest-0.json")
    which = data.draw(st.sampled_from(["part", "manifest", "commit", "digests", "data"]))
    if which == "part":
        run.part_bytes(data.draw(rebuilt(part.read_bytes())))
    elif which == "manifest":
        run.manifest_bytes(data.draw(rebuilt(run.file("manifest.json").read_bytes())))
    elif which == "commit":
        forged = data.draw(rebuilt(run.commit.read_bytes()))
        run.sealed_text(run.commit, lambda _: forged)
    else:
        name = "__0_0.digests" if which == "digests" else "__0_0.distcp"
        run.object(name, data.draw(mutated(run.file(name).read_bytes())))
    storage = open_storage(str(run.root))
    try:
        catalog = discover(storage)
        catalog.checkpoints()
        for ref in catalog.lineage:
            manifest = load_manifest(storage, find_commit(storage, ref))
            for key, value in manifest.values.items():
                decode_value(value, key)
            decode_value(manifest.tree, "tree", ref_type=Ref)
            verify_checkpoint(storage, ref)
        for pin in list_pins(storage):
            read_pin(storage, pin)
        quarantined(storage)
    except (FormatError, IntegrityError):
        pass


@fuzz(400)
@given(data=st.data())
def test_metadata_of_any_bytes_is_read_or_refused_and_runs_nothing(good: Path, data: st.DataObject) -> None:
    changed = data.draw(mutated((good / "plain" / ".metadata").read_bytes()))
    try:
        read_foreign_metadata(changed, "here")
    except FormatError as error:
        assert len(str(error)) < 5000


@fuzz(300)
@given(fields=st.dictionaries(st.sampled_from(["offset", "length", "relative_path", "transform_descriptors"]), JSON))
def test_metadata_with_any_places_is_read_or_refused(good: Path, fields: dict[str, Any]) -> None:
    metadata = pickle.loads((good / "plain" / ".metadata").read_bytes())
    place = next(iter(metadata.storage_data.values()))
    for name, value in fields.items():
        object.__setattr__(place, name, value)
    try:
        changed = pickle.dumps(metadata)
    except UnicodeEncodeError:
        return
    try:
        read = read_foreign_metadata(changed, "here")
    except FormatError:
        return
    for one in read.storage_data.values():
        assert one.offset >= 0 and one.length >= 0 and ".." not in one.relative_path.split("/")


PLAIN_TAGS = ("tuple", "map", "odict", "counter", "set", "frozenset", "float", "complex", "int", "bytes", "no")
TAGS = st.sampled_from([*PLAIN_TAGS, "ndarray", "npscalar", "dtype", "size", "ref"])


@fuzz(600)
@given(
    st.recursive(
        JSON,
        lambda below: st.one_of(st.lists(below, max_size=3), st.builds(lambda t, x: {f"${t}": x}, TAGS, below)),
        max_leaves=8,
    )
)
def test_a_value_of_any_json_is_decoded_or_refused(value: Any) -> None:
    for ref_type in (None, Ref):
        try:
            decode_value(value, "here", ref_type)
        except FormatError as error:
            assert len(str(error)) < 5000


@fuzz(200)
@given(st.binary(max_size=40), st.one_of(TEXTS, st.from_regex(r"[a-z0-9_]{1,9}:[0-9a-f]{1,40}", fullmatch=True)))
def test_a_digest_of_any_text_fits_or_is_refused(data: bytes, text: str) -> None:
    with pytest.raises((FormatError, IntegrityError)):
        digests.check_digest(data, text, "here")
    with pytest.raises(IntegrityError):
        digests.verify_blocks(data + b"x", text.encode("utf-8", "replace")[:5], "here")


@fuzz(300)
@given(
    st.one_of(
        st.text(),
        st.from_regex(r"(commits/|pins/|quarantine/|step-|__)?[0-9]{0,10}[-_]g?[0-9]{0,7}(\.json|-[0-9a-f]{4})?"),
    )
)
def test_a_name_of_any_text_is_ours_or_nobody_s(name: str) -> None:
    for parse_name in (keys.parse_commit, keys.parse_attempt, keys.parse_hold, keys.parse_about):
        ref = parse_name(name)
        assert ref is None or isinstance(ref, CheckpointRef)
        assert ref is None or name.isascii() or (parse_name is keys.parse_about and keys.holds(name, ref))
    try:
        key = keys.object_key("step-000000001-g000001-7f3a", name, "here")
    except FormatError:
        return
    assert key.startswith("step-000000001-g000001-7f3a/") and ".." not in key.split("/") and "\0" not in key


@fuzz(300)
@given(
    st.one_of(
        st.text(max_size=60),
        st.lists(
            st.sampled_from(
                [
                    "keep_last",
                    "(",
                    ")",
                    "|",
                    "&",
                    "3",
                    "-1",
                    "1e999",
                    "'a'",
                    ",",
                    "__import__",
                    ".",
                    "save_every",
                    "[",
                    "\ud800",
                    "\0",
                ]
            )
        ).map("".join),
    )
)
@example("(" * 4000)
@example("keep_last(" + "9" * 4000 + ")")
@example("keep_last(3)" + "|keep_last(3)" * 300)
def test_a_policy_of_any_text_is_read_or_refused(text: str) -> None:
    try:
        policy = parse(text)
    except ConfigError:
        return
    if len(repr(policy)) <= 4096:  # it prints blanks that were not there
        assert parse(repr(policy)) == policy


SECRET = "S3cr3tV4lue"
PLACES = st.sampled_from(
    [
        "{scheme}://user:{secret}@host/run",
        "{scheme}://user:a{secret}/b+c@host/run",
        "{scheme}://user:{secret}@x@host/run",
        "{scheme}://user:x@{secret}@host/run",
        "{scheme}://user:/{secret}@host:9000/run",
        "{scheme}://user:x?{secret}@host/run",
        "{scheme}://user:x#{secret}@host/run",
        "{scheme}://user:a/b@{secret}@host/run",
        "{scheme}://:{secret}@host/run",
        "{scheme}://host/run?aws_secret_access_key={secret}",
        "{scheme}://host/run?x=1&token={secret}&y=2",
        "{scheme}://host/run?TOKEN={secret}#x",
        "{scheme}://host/run?sig={secret}",
        "{scheme}://host/run?X-Amz-Signature={secret}",
        "{scheme}://host/run?X-Amz-Credential={secret}%2Fus-east-1",
        "{scheme}://host/run?password={secret}",
        "{scheme}://host/run?passwd={secret}",
        "{scheme}://host/run?pwd={secret}",
        "{scheme}://host/run?passphrase={secret}",
        "{scheme}://host/run?auth={secret}",
        "{scheme}://host/run?Authorization=Bearer%20{secret}",
        "{scheme}://host/run?api-key={secret}",
        "{scheme}://host/run;AccountKey={secret}",
        "{scheme}://host/run?SharedAccessSignature={secret}",
        "{scheme}://host/run?endpoint_url=https://user:{secret}@other",
        "{scheme}://host/run?endpoint_url=https%3A%2F%2Fuser%3A{secret}%40other",
        "fsspec+https://{secret}@host/run",
        "https://{secret}@host/run",
        "fsspec+simplecache::https://{secret}@host/run",
        "{scheme}:/user:{secret}@host/run",
        "{scheme}:user:{secret}@host/run",
        "{scheme}//user:{secret}@host/run",
        " {scheme}://user:{secret}@host/run",
        "{scheme} ://user:{secret}@host/run",
        "runs/{scheme}://user:{secret}@host/run",
    ]
)
SCHEMES = st.sampled_from(["s3", "S3", "gs", "abfs", "sftp", "fsspec+ftp", "chaos+s3", "nope"])


@fuzz(400)
@given(PLACES, SCHEMES, st.sampled_from([SECRET, SECRET + "=", SECRET + "%2F" + SECRET, SECRET + ":" + SECRET]))
def test_a_secret_in_a_url_is_shown_nowhere(place: str, scheme: str, secret: str) -> None:
    url = place.format(scheme=scheme, secret=secret)
    shown = without_credentials(url)
    assert SECRET not in shown or "://" not in url
    assert without_credentials(shown) == shown
    registry = StorageRegistry()
    try:
        registry.open(to_url(url))
    except (ConfigError, UnknownSchemeError) as error:
        said = str(error) + repr(error) + repr(vars(error)) + str(error.__cause__)
        assert SECRET not in said
    else:
        raise AssertionError("nobody offers it")


@fuzz(200)
@given(st.text(max_size=40))
def test_a_url_of_any_text_is_one_or_is_refused(text: str) -> None:
    try:
        url = to_url(text)
    except ConfigError:
        return
    assert "://" in url
    assert without_credentials(without_credentials(url)) == without_credentials(url)
