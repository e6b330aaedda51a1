"""A manifest whose digests are right and whose values cannot be read: damage like any other, on all ranks together."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import resilio
from resilio import CheckpointManager
from resilio.cli import main
from resilio.errors import FormatError
from resilio.records.digests import digest_of
from resilio.records.schema import CommitRecord, decode, encode
from resilio.testing.worlds import run_world


def save_two(root: Path) -> str:
    url = f"file://{root}/run"
    live = {"x": 0}
    with CheckpointManager(url, {"n": live}, mode="sync") as ckpt:
        for step in (1, 2):
            live["x"] = step
            ckpt.save(step)
    return url


def forge(url: str, change: Callable[[dict[str, Any]], None]) -> None:
    """Change rank 0's part of step 2 and seal it with the right digests."""
    run = Path(url.removeprefix("file://"))
    folder, commit_path = next(run.glob("step-000000002-*")), next(run.glob("commits/000000002-*"))

    def write(path: Path, data: bytes) -> tuple[int, str]:
        path.unlink()
        path.write_bytes(data)
        return len(data), digest_of(data)

    part, root = (json.loads((folder / name).read_bytes()) for name in ("manifest-0.json", "manifest.json"))
    change(part)
    size, digest = write(folder / "manifest-0.json", json.dumps(part).encode())
    root["parts"][0].update(size_bytes=size, digest=digest)
    commit = decode(commit_path.read_bytes(), CommitRecord, commit_path.name)
    commit.manifest_size_bytes, commit.manifest_digest = write(folder / "manifest.json", json.dumps(root).encode())
    write(commit_path, encode(commit))


FORGERIES: dict[str, Callable[[dict[str, Any]], None]] = {
    "n.x is no encoded value": lambda part: part["values"].update({"n.x": {"$ndarray": 3}}),
    "n.x: ['$never'] is no tag": lambda part: part["values"].update({"n.x": {"$never": 3}}),
    "the tree of step 2 names 'n.y'": lambda part: part["tree"].update({"n": {"x": {"$ref": "n.y"}}}),
    "tree is no encoded value": lambda part: part["tree"].update({"n": {"$ref": 3}}),
}


@pytest.mark.parametrize("forgery", FORGERIES)
def test_the_next_older_one_is_taken_and_what_was_passed_over_is_named(tmp_path, forgery):
    url = save_two(tmp_path)
    forge(url, FORGERIES[forgery])
    live = {"x": 0}
    with CheckpointManager(url, {"n": live}) as ckpt:
        with pytest.raises(FormatError):  # asked for by its number nothing else is given
            ckpt.restore(2)
        assert live == {"x": 0}
        report = ckpt.restore()
    assert (report.step, live) == (1, {"x": 1})
    (passed,) = report.passed_over
    assert "step 2" in str(passed) and f"FormatError: {forgery}" in str(passed)


def takes(rank: int, world: int, url: str) -> tuple[int, dict[str, int], list[str]]:
    live = {"x": 0}
    report = resilio.restore(url, {"n": live}, timeout_s=30)
    return report.step, live, [str(one) for one in report.passed_over]


def test_all_ranks_go_on_to_the_same_older_one(tmp_path):
    url = save_two(tmp_path)
    forge(url, FORGERIES["n.x is no encoded value"])
    first, second = run_world(takes, 2, url)
    assert first == second
    assert first[:2] == (1, {"x": 1})


NEWER: dict[str, Callable[[dict[str, Any]], None]] = {
    "a tag": FORGERIES["n.x: ['$never'] is no tag"],
    "an algorithm": lambda part: part["objects"][0].update(digest="blake9:00"),
    "a dtype": lambda part: part.update(tensors={"t": {"dtype": "float2", "shape": [], "pieces": []}}),
}


@pytest.mark.parametrize("what", NEWER)
def test_what_a_newer_resilio_may_know_is_no_ground_for_quarantine(tmp_path, what):
    url = save_two(tmp_path)
    forge(url, NEWER[what])
    live = {"x": 0}
    with CheckpointManager(url, {"n": live}) as ckpt:
        assert ckpt.restore().step == 1
    with pytest.raises(SystemExit):
        main(["verify", url, "--all", "--quarantine"])
    assert not (tmp_path / "run" / "quarantine").exists()
