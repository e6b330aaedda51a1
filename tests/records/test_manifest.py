from __future__ import annotations

import pickle
from collections.abc import Callable
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from records.fake_store import FakeStore, commit, forged, manager, save, write_attempt

from resilio.errors import FormatError, IntegrityError, NewerFormatError, NoCheckpointError
from resilio.records import keys, schema
from resilio.records.catalog import discover
from resilio.records.digests import Digester, digest_of
from resilio.records.manifest import LoadedManifest, load_manifest
from resilio.records.tiling import tiling_problem
from resilio.records.verify import verify_checkpoint
from resilio.types import CheckpointRef

REF = CheckpointRef(1, 1)


@pytest.fixture
def store() -> FakeStore:
    store = FakeStore()
    save(store, manager(store), 1)
    return store


def load(store: FakeStore) -> LoadedManifest:
    return load_manifest(store, discover(store).read(REF))


def folder(store: FakeStore) -> str:
    return discover(store).read(REF).attempt


def forge(store: FakeStore, name: str, change: Callable[[dict[str, Any]], None]) -> None:
    """Edit a record and make the chain of digests above it right again, as an adversary would."""
    attempt = folder(store)

    def rewrite(key: str, change: Callable[[dict[str, Any]], None]) -> tuple[int, str]:
        data = msgspec.json.decode(store.objects[key])
        change(data)
        store.objects[key] = forged(data) if key == keys.commit_key(REF) else msgspec.json.encode(data)
        return len(store.objects[key]), digest_of(store.objects[key])

    if name != "manifest.json":
        size, digest = rewrite(f"{attempt}/{name}", change)

        def change_root(root: dict[str, Any]) -> None:
            for part in root["parts"]:
                if part["name"] == name:
                    part.update(size_bytes=size, digest=digest)

        change = change_root
    size, digest = rewrite(f"{attempt}/manifest.json", change)
    rewrite(keys.commit_key(REF), lambda record: record.update(manifest_size_bytes=size, manifest_digest=digest))


def test_the_parts_of_all_ranks_become_one_view(store: FakeStore):
    manifest = load(store)
    assert (manifest.step, manifest.world, manifest.attempt) == (1, 2, folder(store))
    assert set(manifest.tensors) == {"model.weight", "rank.0.rng", "rank.1.rng"}
    weight = manifest.tensors["model.weight"]
    assert (weight.dtype, weight.shape, weight.order, weight.size_bytes) == ("float32", (20, 2), None, 160)
    assert [(p.rank, p.piece.offsets, p.piece.sizes) for p in weight.pieces] == [
        (0, [0, 0], [10, 2]),
        (1, [10, 0], [10, 2]),
    ]
    piece = weight.pieces[1]
    assert piece.key == f"{manifest.attempt}/__1_0.distcp"
    assert piece.digests_key == f"{manifest.attempt}/__1_0.digests"
    assert manifest.values == {"step": 1, "lr": 0.5}
    assert manifest.ties == {"head.weight": "model.weight"}
    assert manifest.tree == {
        "model": {"weight": {"$ref": "model.weight"}},
        "rank": {"0": {"rng": {"$ref": "rank.0.rng"}}, "1": {"rng": {"$ref": "rank.1.rng"}}},
    }
    assert len(manifest.objects) == 5
    assert manifest.read_object(store, piece.digests_key) == store.objects[piece.digests_key]
    assert pickle.loads(pickle.dumps(manifest)) == manifest


@pytest.mark.parametrize("name", ["manifest.json", "manifest-0.json", "manifest-1.json"])
@pytest.mark.parametrize("how", ["flip", "cut", "longer", "gone", "swapped"])
def test_damage_in_the_chain_names_the_object(store: FakeStore, name: str, how: str):
    key = f"{folder(store)}/{name}"
    data = bytearray(store.objects[key])
    if how == "flip":
        data[len(data) // 2] ^= 1
    elif how == "cut":
        del data[-1]
    elif how == "longer":
        data += b" "
    elif how == "swapped":
        data[:] = store.objects[f"{folder(store)}/.metadata"]
    store.objects[key] = bytes(data)
    if how == "gone":
        del store.objects[key]
    with pytest.raises(IntegrityError, match=key) as caught:
        load(store)
    assert caught.value.where == key
    assert getattr(caught.value, "missing", False) is (how == "gone")
    assert [damage.where for damage in verify_checkpoint(store, REF)] == [key]


def weight(part: dict[str, Any]) -> dict[str, Any]:
    return part["tensors"]["model.weight"]


def piece(part: dict[str, Any]) -> dict[str, Any]:
    return weight(part)["pieces"][0]


FORGED: dict[str, tuple[str, Callable[[dict[str, Any]], Any]]] = {
    "another step": ("manifest.json", lambda m: m.update(step=2)),
    "another folder": ("manifest.json", lambda m: m.update(attempt="step-000000002-g000001-abcd")),
    "another world": ("manifest.json", lambda m: m.update(world=3)),
    "a part is missing": ("manifest.json", lambda m: m["parts"].pop()),
    "a part twice": ("manifest.json", lambda m: m["parts"].append(m["parts"][0])),
    "a part outside": ("manifest.json", lambda m: m["parts"][0].update(name="../x/manifest-0.json")),
    "an object outside": ("manifest.json", lambda m: m["objects"][0].update(name="../../etc/passwd")),
    "an object twice": ("manifest.json", lambda m: m["objects"].append(m["objects"][0])),
    "unknown digest": ("manifest.json", lambda m: m["objects"][0].update(digest="md5:00")),
    "unknown digest of the rest": ("manifest-1.json", lambda p: p["objects"][0].update(rest="md5:00")),
    "huge part": ("manifest.json", lambda m: m["parts"][0].update(size_bytes=2**40)),
    "tie to nothing": ("manifest.json", lambda m: m["ties"].update(a="b")),
    "tie of a tensor": ("manifest.json", lambda m: m["ties"].update({"model.weight": "rank.0.rng"})),
    "another rank": ("manifest-1.json", lambda p: p.update(rank=0)),
    "data outside": ("manifest-1.json", lambda p: p["objects"][0].update(name="../__1_0.distcp")),
    "another's data": (
        "manifest-1.json",
        lambda p: [p["objects"][0].update(name="__0_0.distcp"), p["objects"][1].update(name="__0_0.digests")],
    ),
    "digests of something else": ("manifest-1.json", lambda p: p["objects"][1].update(name="__1_1.digests")),
    "no digests": ("manifest-1.json", lambda p: p["objects"].pop()),
    "object index": ("manifest-1.json", lambda p: piece(p).update(object=2)),
    "digests as data": ("manifest-1.json", lambda p: piece(p).update(object=1)),
    "beyond the object": ("manifest-1.json", lambda p: piece(p).update(at=10**6)),
    "beyond the digests": ("manifest-1.json", lambda p: piece(p).update(block=2)),
    "bytes do not fit": ("manifest-1.json", lambda p: piece(p).update(size_bytes=79)),
    "another dtype": ("manifest-1.json", lambda p: weight(p).update(dtype="int32")),
    "unknown dtype": ("manifest-1.json", lambda p: p["tensors"]["rank.1.rng"].update(dtype="float7")),
    "another shape": ("manifest-1.json", lambda p: weight(p).update(shape=[21, 2])),
    "impossible order": ("manifest-1.json", lambda p: p["tensors"]["rank.1.rng"].update(order=[1])),
    "dims": ("manifest-1.json", lambda p: piece(p).update(offsets=[10])),
    "leaves the shape": ("manifest-1.json", lambda p: piece(p).update(offsets=[11, 0])),
    "overlap": ("manifest-1.json", lambda p: piece(p).update(offsets=[9, 0])),
    "hole": ("manifest-1.json", lambda p: piece(p).update(sizes=[9, 2], size_bytes=72)),
    "no pieces": ("manifest-1.json", lambda p: p["tensors"]["rank.1.rng"].update(pieces=[])),
    "bytes overlap": ("manifest-1.json", lambda p: p["tensors"]["rank.1.rng"]["pieces"][0].update(at=10)),
    "a value that differs": ("manifest-1.json", lambda p: p["values"].update(lr=0.25)),
    "a value that is a tensor": ("manifest-1.json", lambda p: p["values"].update({"model.weight": 1})),
    "tree of another": ("manifest-1.json", lambda p: p["tree"]["rank"].update({"0": {}})),
    "shared tree": ("manifest-1.json", lambda p: p["tree"].update(model={})),
    "tree of another type": ("manifest-1.json", lambda p: p.update(tree=[1])),
    "negative": ("manifest-1.json", lambda p: piece(p).update(at=-1)),
}


@pytest.mark.parametrize("what", FORGED)
def test_a_manifest_that_contradicts_itself_is_refused_though_its_digests_are_right(store: FakeStore, what: str):
    name, change = FORGED[what]
    load(store)
    forge(store, name, change)
    with pytest.raises(FormatError, match="manifest"):
        load(store)
    assert len(verify_checkpoint(store, REF)) == 1


def test_fields_of_later_releases_are_ignored_and_a_newer_format_is_refused(store: FakeStore):
    forge(store, "manifest-1.json", lambda p: p.update(later={"x": 1}))
    forge(store, "manifest.json", lambda m: m.update(later=[1]))
    load(store)
    forge(store, "manifest-1.json", lambda p: p.update(format=2))
    with pytest.raises(NewerFormatError, match="Upgrade"):
        load(store)


def test_the_tensor_without_elements_and_the_scalar_are_whole():
    def at(offsets: list[int], sizes: list[int]) -> schema.Piece:
        return schema.Piece(offsets=offsets, sizes=sizes, object=0, at=0, size_bytes=0, block=0)

    assert tiling_problem([], [at([], [])]) is None
    assert tiling_problem([], [at([], []), at([], [])]) == "overlap"
    assert tiling_problem([0, 3], [at([0, 0], [0, 3])]) is None
    assert tiling_problem([4], [at([0], [4]), at([4], [0])]) is None
    assert tiling_problem([4], [at([0], [0])]) == "leave 4 of its elements out"


@st.composite
def tilings(draw: st.DrawFn) -> tuple[list[int], list[schema.Piece]]:
    """A box cut again and again at random: tilings no grid has."""
    shape = draw(st.lists(st.integers(1, 6), min_size=1, max_size=3))
    boxes = [([0] * len(shape), list(shape))]
    for _ in range(draw(st.integers(0, 8))):
        offsets, sizes = boxes.pop(draw(st.integers(0, len(boxes) - 1)))
        dim = draw(st.integers(0, len(shape) - 1))
        cut = draw(st.integers(0, sizes[dim]))
        low, high = list(sizes), list(sizes)
        low[dim], high[dim] = cut, sizes[dim] - cut
        boxes += [(offsets, low), ([o + (cut if d == dim else 0) for d, o in enumerate(offsets)], high)]
    return shape, [schema.Piece(offsets=o, sizes=s, object=0, at=0, size_bytes=0, block=0) for o, s in boxes]


@settings(max_examples=80, deadline=None)
@given(tilings(), st.data())
def test_every_tiling_is_accepted_and_one_piece_moved_or_left_out_is_not(
    tiling: tuple[list[int], list[schema.Piece]], data: st.DataObject
):
    shape, pieces = tiling
    assert tiling_problem(shape, pieces) is None
    solid = [i for i, piece in enumerate(pieces) if all(piece.sizes)]
    gone = data.draw(st.sampled_from(solid))
    rest = pieces[:gone] + pieces[gone + 1 :]
    assert tiling_problem(shape, rest) is not None
    assert tiling_problem(shape, [*pieces, pieces[gone]]) == "overlap"
    assert tiling_problem(shape, [*rest, *rest][: len(pieces)]) is not None


# --- verify ---------------------------------------------------------------------------------------------------------


def test_a_whole_checkpoint_has_no_damage_and_progress_reaches_the_end(store: FakeStore):
    seen: list[tuple[int, int]] = []
    assert verify_checkpoint(store, REF, lambda done, total: seen.append((done, total))) == []
    assert seen[-1][0] == seen[-1][1] > 0
    assert [done for done, _ in seen] == sorted(done for done, _ in seen)


def test_a_checkpoint_that_is_not_there_is_no_damage_but_an_error(store: FakeStore):
    with pytest.raises(NoCheckpointError, match="step 9"):
        verify_checkpoint(store, CheckpointRef(1, 9))


@pytest.mark.parametrize("rest", [True, False])
def test_a_flipped_bit_anywhere_in_the_folder_is_named_by_object_and_tensor(store: FakeStore, rest: bool):
    """With a digest over what lies in no piece, and as it was saved before there was one."""
    if not rest:
        for rank in (0, 1):
            forge(store, f"manifest-{rank}.json", lambda part: part["objects"][0].pop("rest"))
    clean = dict(store.objects)
    attempt = folder(store)
    manifest = load(store)
    ranges = {
        (placed.key, at): name
        for name, tensor in manifest.tensors.items()
        for placed in tensor.pieces
        for at in range(placed.piece.at, placed.piece.at + placed.piece.size_bytes)
    }
    for key in [key for key in clean if key.startswith(attempt)]:
        for at in range(0, len(clean[key]), 1 if key.endswith((".distcp", ".digests")) else 7):
            data = bytearray(clean[key])
            data[at] ^= 1 << (at % 8)
            store.objects[key] = bytes(data)
            damage = verify_checkpoint(store, REF)
            assert [one.where for one in damage] == [key], (key, at)
            assert damage[0].facts.get("tensor") == ranges.get((key, at)), (key, at)
        store.objects[key] = clean[key]
    assert verify_checkpoint(store, REF) == []


def test_damage_in_the_commit_record_is_named(store: FakeStore):
    key = keys.commit_key(REF)
    store.objects[key] = store.objects[key][:-3]
    assert [damage.where for damage in verify_checkpoint(store, REF)] == [key]


def test_all_damage_is_found_with_the_blocks_it_lies_in():
    store = FakeStore()
    writer = manager(store)
    attempt = writer.begin_attempt(1)
    commit(writer, attempt, write_attempt(store, attempt, rows=80_000))  # 320 000 bytes a rank: 5 blocks
    assert verify_checkpoint(store, REF) == []
    data = bytearray(store.objects[f"{attempt}/__0_0.distcp"])
    for block in (1, 4):
        data[4 + 65536 * block] ^= 1
    data[-50] ^= 1  # the generator's state
    store.objects[f"{attempt}/__0_0.distcp"] = bytes(data)
    del store.objects[f"{attempt}/__1_0.distcp"]
    store.objects[f"{attempt}/.metadata"] += b"x"
    damage = verify_checkpoint(store, REF)
    found = [(d.where.rpartition("/")[2], d.facts.get("tensor"), d.facts.get("blocks")) for d in damage]
    assert sorted(found, key=str) == [
        (".metadata", None, None),
        ("__0_0.distcp", "model.weight", [1, 4]),
        ("__0_0.distcp", "rank.0.rng", [0]),
        ("__1_0.distcp", None, None),
    ]
    assert "missing" in next(d.what for d in damage if d.where.endswith("__1_0.distcp"))


def test_each_byte_is_digested_once_where_blocks_cover_it_and_else_under_the_whole(store: FakeStore, monkeypatch):
    taken: list[int] = []
    update = Digester.update
    monkeypatch.setattr(Digester, "update", lambda self, data: (taken.append(len(data)), update(self, data))[1])
    data = [key for key in load(store).objects if key.endswith(".distcp")]

    def digested() -> int:
        taken.clear()
        verify_checkpoint(store, REF)
        return sum(taken)

    once = digested()
    key = f"{folder(store)}/__0_0.digests"
    store.objects[key] = bytes(len(store.objects[key]))  # nothing can be told by it: back to the digest over the whole
    assert digested() == once + len(store.objects[data[0]]) - len(b"head-gap-tail")


def test_damage_in_and_between_pieces_is_told_apart(store: FakeStore):
    key = f"{folder(store)}/__0_0.distcp"
    clean = store.objects[key]
    for flipped, found in (([0], ["outside"]), ([9], ["tensor"]), ([0, 9], ["tensor", "outside"])):
        data = bytearray(clean)
        for at in flipped:
            data[at] ^= 4
        store.objects[key] = bytes(data)
        damage = verify_checkpoint(store, REF)
        assert ["tensor" if one.facts else "outside" for one in damage] == found
        assert all("lies outside of all tensors" in one.what for one in damage if not one.facts)
    store.objects[key] = b"tail" + clean[4:-4] + b"head"  # swapped
    assert len(verify_checkpoint(store, REF)) == 1


def test_a_wrong_block_digest_under_a_right_whole_digest_is_found(store: FakeStore):
    """A writer that digested other bytes than it wrote: the whole digests agree, and still reads would fail."""
    key = f"{folder(store)}/__1_0.digests"
    data = bytearray(store.objects[key])
    data[0] ^= 1
    store.objects[key] = bytes(data)
    forge(store, "manifest-1.json", lambda part: part["objects"][1].update(digest=digest_of(bytes(data))))
    damage = verify_checkpoint(store, REF)
    assert [(d.where.rpartition("/")[2], d.facts["tensor"]) for d in damage] == [("__1_0.distcp", "model.weight")]


def test_pieces_laid_crosswise_are_refused_before_each_is_compared_with_each():
    def staircase(count: int) -> str | None:
        low = [box([i, i, i], [count - i, count - i, 1]) for i in range(count)]
        return tiling_problem([count, count, count], low)

    def box(offsets: list[int], sizes: list[int]) -> schema.Piece:
        return schema.Piece(offsets=offsets, sizes=sizes, object=0, at=0, size_bytes=0, block=0)

    # Along the last dim none is abreast of another: found at once, however many there are.
    assert "leave" in (staircase(20_000) or "")
    rods = [box([i, 0, i], [1, 20_000, 20_000 - i]) for i in range(20_000)]
    rods = [box(one.offsets, [20_000 - i, one.sizes[1], one.sizes[2]]) for i, one in enumerate(rods)]
    assert "crosswise" in (tiling_problem([20_000, 20_000, 20_000], rods) or "")


def test_a_mesh_of_a_million_elements_on_many_ranks_is_no_crosswise_one():
    pieces = [
        schema.Piece(offsets=[i, j, 0], sizes=[1, 1, 4], object=0, at=0, size_bytes=0, block=0)
        for i in range(60)
        for j in range(60)
    ]
    assert tiling_problem([60, 60, 4], pieces) is None
