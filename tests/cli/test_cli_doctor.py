"""`resilio doctor`: finds each promise that a store breaks, and leaves nothing behind."""

from __future__ import annotations

import json
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest

from resilio.cli.extra import plugin_host
from resilio.errors import AccessDeniedError, TransientError
from resilio.hooks import host
from resilio.records import keys
from resilio.storage import Buffer, LocalStorage, MemoryStorage, ObjectInfo, Storage


@pytest.fixture(autouse=True)
def _forget_the_hosts() -> Iterator[None]:
    yield
    host.cache_clear()
    plugin_host.cache_clear()


def looked(resilio: Any, *args: str) -> tuple[int, dict[str, dict[str, str]]]:
    code, out, err = resilio("doctor", *args, "--json")
    assert err == ""
    return code, {check["name"]: check for check in json.loads(out)["checks"]}


def test_without_a_url_it_is_about_what_is_installed(resilio: Any) -> None:
    code, out, err = resilio("doctor")
    assert (code, err) == (0, "")
    assert f"torch {version('torch')}" in out and "builtin" in out and "all is well" in out
    page = json.loads(resilio("doctor", "--json")[1])
    assert page.keys() == {"url", "good", "versions", "checks", "latency_s"}
    assert (page["url"], page["good"], page["latency_s"]) == (None, True, {})
    assert page["versions"]["resilio-ckpt"] == version("resilio-ckpt")


def test_a_good_store_is_left_as_it_was(resilio: Any, branched: Any) -> None:
    before = {path: path.read_bytes() for path in branched.folder.rglob("*") if path.is_file()}
    code, checks = looked(resilio, branched.url)
    assert code == 0
    assert {check["state"] for check in checks.values()} == {"ok"}
    assert [name for name in checks if not name.startswith("plugin ")] == [
        *("versions", "plugins", "storage", "reachable", "run", "space", "writing", "large objects"),
        *("create-if-absent", "listing", "deleting", "clock", "second process", "latency"),
    ]
    assert "LocalStorage, of plugin 'builtin' of resilio-ckpt" in checks["storage"]["said"]
    assert "run run-1, format 1, 4 checkpoints, 1 more off the lineage" in checks["run"]["said"]
    assert {path: path.read_bytes() for path in branched.folder.rglob("*") if path.is_file()} == before
    assert not [path for path in branched.folder.iterdir() if "doctor" in path.name]
    page = json.loads(resilio("doctor", branched.url, "--json")[1])
    assert page["latency_s"].keys() == {"put", "get", "list"}


def test_a_place_for_a_run_is_not_made(resilio: Any, tmp_path: Path) -> None:
    code, checks = looked(resilio, str(tmp_path / "a" / "b"))
    assert (code, checks["run"]["said"]) == (0, "none yet; the first save begins one")
    assert list(tmp_path.iterdir()) == []


def test_read_only_writes_nothing(resilio: Any, branched: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(self: Any, *args: Any, **named: Any) -> Any:
        raise AssertionError("it wrote")

    for name in ("put", "writer", "delete"):
        monkeypatch.setattr(LocalStorage, name, refuse)
    code, checks = looked(resilio, branched.url, "--read-only")
    assert (code, list(checks)[-1]) == (0, "space")


class Faulty(MemoryStorage):
    """A store with one fault."""

    fault = ""

    def __init__(self) -> None:
        super().__init__(f"faulty {self.fault}")
        if self.fault == "no create":
            self.capabilities = replace(self.capabilities, create_if_absent=False)
        if self.fault == "shared":
            self.capabilities = replace(self.capabilities, shared=True)

    def put(self, key: str, data: Buffer, *, if_absent: bool = False) -> ObjectInfo:
        if self.fault == "denied":
            raise AccessDeniedError("not with these \x1b credentials")
        if self.fault == "foreign":
            raise ValueError("of some library")
        if self.fault == "overwrites" or (self.fault == "loses races" and "raced" in key):
            if_absent = False
        if self.fault == "cut" and len(data) > 100:
            data = bytes(data)[:-1]
        info = super().put(key, data, if_absent=if_absent)
        return replace(info, modified_s=time.time() + (3600 if self.fault == "skewed" else 0))

    def read_into(self, key: str, ranges: Sequence[tuple[int, memoryview]]) -> None:
        super().read_into(key, ranges)
        if self.fault == "ranges" and len(ranges) > 1:
            ranges[1][1][0] ^= 1

    def list(self, prefix: str) -> Iterator[ObjectInfo]:
        if self.fault == "stale":
            return (info for info in super().list(prefix) if "listed" not in info.key)
        return super().list(prefix)

    def delete(self, which: Iterable[str]) -> None:
        which = list(which)
        if self.fault == "keeps" and any("del-2" in key for key in which):
            return
        if self.fault == "undeletable" and len(which) > 4:
            raise AccessDeniedError("may not delete")
        if self.fault == "patterns":
            which += [
                info.key for key in which for info in MemoryStorage.list(self, key.rstrip("*")) if key.endswith("*")
            ]
        super().delete(which)

    def free_bytes(self) -> int | None:
        return 100 if self.fault == "full" else None


@pytest.mark.parametrize(
    ("fault", "check", "state", "code"),
    [
        ("", "", "", 0),
        ("denied", "writing", "failed", 1),
        ("foreign", "writing", "failed", 1),
        ("cut", "writing", "failed", 1),
        ("ranges", "large objects", "failed", 1),
        ("no create", "create-if-absent", "warning", 0),
        ("overwrites", "create-if-absent", "failed", 1),
        ("loses races", "create-if-absent", "failed", 1),
        ("stale", "listing", "failed", 1),
        ("keeps", "deleting", "failed", 1),
        ("patterns", "deleting", "failed", 1),
        ("skewed", "clock", "warning", 0),
        ("shared", "second process", "failed", 1),
        ("undeletable", "cleaning up", "failed", 1),
    ],
)
def test_a_broken_promise_is_found_and_nothing_is_left(
    resilio: Any, monkeypatch: pytest.MonkeyPatch, fault: str, check: str, state: str, code: int
) -> None:
    monkeypatch.setattr(Faulty, "fault", fault)
    storage = Faulty()
    plugin_host().storages.register("faulty", lambda url: storage, owner="this test")
    ended, checks = looked(resilio, "faulty://x")
    found = {name: one["state"] for name, one in checks.items() if one["state"] != "ok"}
    wanted = {check: state} if check else {}
    if "writing" not in wanted and fault != "shared":
        wanted["second process"] = "warning"  # it serves one process
    assert (ended, found) == (code, wanted)
    if check and fault != "denied":
        assert checks[check]["todo"]
    assert len(list(MemoryStorage.list(storage, ""))) == 0 or fault in ("undeletable", "keeps")
    ended, out, _ = resilio("doctor", "faulty://x")
    assert (ended, "\x1b" in out) == (code, False)
    assert not check or ("FAILED" if state == "failed" else "warning") in out


def test_too_little_space_for_one_more_is_wanting(resilio: Any, branched: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    for free, state, code in ((100_000, "failed", 1), (300_000, "warning", 0), (500_000, "ok", 0)):
        monkeypatch.setattr(LocalStorage, "free_bytes", lambda self, free=free: free)
        ended, checks = looked(resilio, branched.url, "--read-only")
        assert (ended, checks["space"]["state"]) == (code, state)


class Unreachable(MemoryStorage):
    def list(self, prefix: str) -> Iterator[ObjectInfo]:
        raise AccessDeniedError(f"{self.url}: not with these credentials", url=self.url)


def test_a_store_that_cannot_be_reached_is_5_and_a_scheme_that_nobody_offers_2(resilio: Any) -> None:
    plugin_host().storages.register("unreachable", lambda url: Unreachable("x"), owner="this test")
    code, out, err = resilio("doctor", "unreachable://x")
    assert (code, err) == (5, "")
    assert "not with these credentials" in out and "wanting: reachable" in out
    code, out, err = resilio("doctor", "nobody://x")
    assert (code, out) == (2, "")
    assert "plugin that offers nobody://" in err


def test_a_fault_that_passes_is_waited_for_but_not_for_long(resilio: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    class Flaky(MemoryStorage):
        tries = 0

        def list(self, prefix: str) -> Iterator[ObjectInfo]:
            self.tries += 1
            if self.tries == 1:
                raise TransientError("again, please")
            return super().list(prefix)

    plugin_host().storages.register("flaky", lambda url: Flaky("x"), owner="this test")
    assert looked(resilio, "flaky://x", "--read-only")[0] == 0


def test_a_newer_run_and_a_damaged_one_are_wanting(resilio: Any, branched: Any) -> None:
    path = branched.folder / keys.RUN
    path.chmod(0o644)
    path.write_bytes(b"{}")
    code, checks = looked(resilio, branched.url, "--read-only")
    assert (code, checks["run"]["state"]) == (1, "failed")
    path.unlink()
    code, checks = looked(resilio, branched.url, "--read-only")
    assert (code, checks["run"]["state"]) == (0, "warning")


def test_a_broken_plugin_is_named_and_the_rest_is_looked_at(resilio: Any, installed: Any, branched: Any) -> None:
    installed.add("bad", "import no_such_library_at_all")
    code, checks = looked(resilio, branched.url)
    assert code == 1
    assert [name for name, one in checks.items() if one["state"] == "failed"] == ["plugin bad"]
    assert "RESILIO_DISABLE_PLUGINS=bad" in checks["plugin bad"]["todo"]


def test_a_storage_of_a_plugin_is_tried_in_a_second_process(resilio: Any, installed: Any, tmp_path: Path) -> None:
    installed.add(
        "own",
        """
        import resilio
        from resilio.storage import LocalStorage

        class Own(LocalStorage):
            broken = None

        @resilio.hookimpl
        def resilio_register_storage(register):
            register("own", lambda url: Own(url.removeprefix("own://")))
        """,
    )
    code, checks = looked(resilio, f"own://{tmp_path}/run")
    assert (code, checks["second process"]["state"]) == (0, "ok")


def test_what_cannot_be_pickled_is_found(resilio: Any, tmp_path: Path) -> None:
    def opened(url: str) -> Storage:
        storage = LocalStorage(tmp_path)
        storage.lock = open(__file__)  # type: ignore[attr-defined]  # noqa: SIM115
        return storage

    plugin_host().storages.register("held", opened, owner="this test")
    code, checks = looked(resilio, "held://x")
    assert (code, checks["second process"]["state"]) == (1, "failed")
    assert "TypeError" in checks["second process"]["said"]
