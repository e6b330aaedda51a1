"""`resilio quarantine` and `resilio release`, and what the other commands say of what is in quarantine."""

from __future__ import annotations

import json
from typing import Any

import pytest

from resilio.records.quarantine import quarantine, quarantined
from resilio.storage import LocalStorage
from resilio.types import CheckpointRef

FOUR, THREE = CheckpointRef(2, 400), CheckpointRef(2, 300)


def test_it_is_there_with_its_reason_until_it_is_released(resilio: Any, branched: Any) -> None:
    said = ("quarantine", branched.url, "400", "--because", "nan\x1b here")
    assert resilio(*said) == (0, "in quarantine: 000000400-g000002: nan\\x1b here\n", "")
    assert resilio(*said)[:2] == (0, "in quarantine (as before): 000000400-g000002: nan\\x1b here\n")
    (record,) = quarantined(branched.storage)[FOUR].records
    assert (record.because, record.found_by, record.problems) == ("nan\x1b here", "person", [])
    code, out, _ = resilio("release", branched.url, "400")
    assert (code, out) == (0, "released 000000400-g000002: 1 record removed: nan\\x1b here\n")
    assert quarantined(branched.storage) == {}


def test_json_has_every_field(resilio: Any, branched: Any) -> None:
    which = {"url": branched.url, "name": "000000400-g000002", "step": 400, "generation": 2}
    said = ("quarantine", branched.url, "400", "--because", "x", "--json")
    assert json.loads(resilio(*said)[1]) == {**which, "because": "x", "new": True}
    assert json.loads(resilio(*said)[1]) == {**which, "because": "x", "new": False}
    page = json.loads(resilio("release", branched.url, "000000400-g000002", "--json")[1])
    assert page == {**which, "records": 1, "because": "x"}


@pytest.mark.parametrize(
    ("args", "code", "says"),
    [
        (("quarantine", "400"), 2, "--because"),
        (("quarantine", "400", "--because", "  "), 2, "a quarantine says why"),
        (("quarantine", "7", "--because", "x"), 4, "newest steps"),
        (("release", "400"), 4, "is not in quarantine"),
        (("release", "7"), 4, "no checkpoint of step 7"),
        (("release", "000000100-g000009"), 4, "is not in quarantine"),
    ],
)
def test_what_cannot_be_done_is_refused_and_nothing_is_written(
    resilio: Any, branched: Any, args: tuple[str, ...], code: int, says: str
) -> None:
    found = resilio(args[0], branched.url, *args[1:])
    assert found[0] == code and says in found[2]
    assert quarantined(branched.storage) == {}


def test_one_that_cannot_be_read_counts_and_can_be_released(resilio: Any, branched: Any) -> None:
    branched.storage.put("quarantine/000000400-g000002.json", b"{}")
    (newest, *_) = json.loads(resilio("ls", branched.url, "--json")[1])["checkpoints"]
    assert "cannot be read, and counts all the same" in newest["quarantined"]
    assert resilio("release", branched.url, "400")[0] == 0
    assert quarantined(branched.storage) == {}


def test_every_command_that_tells_of_a_checkpoint_tells_of_its_quarantine(
    resilio: Any, branched: Any, tmp_path: Any
) -> None:
    plain = resilio("ls", branched.url)[1]
    assert "quarantine" not in plain
    quarantine(
        branched.storage, FOUR, "the loss is nan from here on, and it is so in each of the runs that began with it"
    )
    out = resilio("ls", branched.url)[1]
    lines = out.splitlines()
    assert "quarantine" in lines[0] and "the loss is nan from here on" in lines[1] and "…" in lines[1]
    assert not any("the loss" in line for line in lines[2:])
    infos = json.loads(resilio("ls", branched.url, "--json")[1])["checkpoints"]
    assert [bool(info["quarantined"]) for info in infos] == [True] + [False] * (len(infos) - 1)
    assert "began with it" in infos[0]["quarantined"]
    assert (
        "began with it" in resilio("show", branched.url)[1]
        and "quarantine" not in resilio("show", branched.url, "300")[1]
    )
    assert (
        json.loads(resilio("show", branched.url, "--json")[1])["checkpoint"]["quarantined"] == infos[0]["quarantined"]
    )
    code, out, _ = resilio("verify", branched.url)
    assert code == 0 and "000000400-g000002  good\n000000400-g000002  in quarantine: the loss" in out
    assert json.loads(resilio("verify", branched.url, "--json")[1])["checkpoints"][0]["quarantined"]
    assert "(in quarantine: the loss" in resilio("forget", branched.url, "--keep", "keep_all()")[1]
    planned = ("plan", branched.url, "--save", "save_every(100)", "--steps", "100", "--keep", "keep_last(2)")
    code, out, _ = resilio(*planned)
    assert "note: step 400 is in quarantine" in out
    page = json.loads(resilio(*planned, "--json")[1])
    assert [one["step"] for one in page["end"]] == [300, 400, 500]  # two that can be resumed from
    code, out, _ = resilio("export", branched.url, "--to", str(tmp_path / "out.safetensors"))
    assert code == 0 and "000000400-g000002 is in quarantine" in out


def test_verify_quarantines_what_it_finds_damaged_if_asked_to_and_nothing_else(resilio: Any, branched: Any) -> None:
    path = next(branched.folder.glob("step-000000300-g000002-*/__0_0.distcp"))
    data = bytearray(path.read_bytes())
    data[70_000] ^= 1
    path.unlink()
    path.write_bytes(data)
    assert resilio("verify", branched.url, "--all")[0] == 1
    assert quarantined(branched.storage) == {}
    for _ in range(2):
        code, out, _ = resilio("verify", branched.url, "--all", "--quarantine")
        assert (
            code == 1 and "000000300-g000002  in quarantine: found damaged by `resilio verify` at 1 place(s): " in out
        )
        assert list(quarantined(branched.storage)) == [THREE]
        (record,) = quarantined(branched.storage)[THREE].records
        assert record.found_by == "verify" and "64 KiB blocks" in record.problems[0].what
    page = json.loads(resilio("verify", branched.url, "--all", "--json")[1])
    assert [bool(one["quarantined"]) for one in page["checkpoints"]].count(True) == 1


def test_verify_does_not_quarantine_what_a_newer_resilio_wrote(resilio: Any, branched: Any) -> None:
    from records.fake_store import edited

    path = next(branched.folder.glob("commits/000000300-g000002*"))
    data = edited(path.read_bytes(), b'"format":1', b'"format":2')
    path.unlink()
    path.write_bytes(data)
    code, out, _ = resilio("verify", branched.url, "300", "--quarantine")
    assert code == 3 and "NOT JUDGED" in out and "DAMAGED" not in out
    assert quarantined(branched.storage) == {}


def test_what_verify_finds_once_and_not_again_is_told_and_not_quarantined(
    resilio: Any, branched: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = LocalStorage.read_into
    noisy = [True]

    def read_into(self: LocalStorage, key: str, ranges: Any) -> None:
        whole(self, key, ranges)
        if noisy and key.endswith(".distcp"):
            noisy.clear()
            (_, buffer) = ranges[0]
            buffer[70_000] ^= 1

    monkeypatch.setattr(LocalStorage, "read_into", read_into)
    code, out, _ = resilio("verify", branched.url, "300", "--quarantine")
    assert code == 1 and "64 KiB blocks" in out and "in quarantine" not in out
    assert quarantined(branched.storage) == {}
