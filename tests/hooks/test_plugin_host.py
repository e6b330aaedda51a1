"""Plugins come in by the entry-point group; a broken one is named; `open_storage` finds the storage for a URL."""

from __future__ import annotations

import subprocess
import sys
import textwrap
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path

import pytest

import resilio.hooks
from resilio.errors import ConfigError, UnknownSchemeError
from resilio.hooks import Host, hookimpl, open_storage
from resilio.storage import LocalStorage, MemoryStorage
from resilio.storage.retrying import RetryingStorage


class Installed:
    """A folder on `sys.path` to which distributions with plugins are installed."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def add(self, dist: str, name: str, source: str) -> None:
        module = dist.replace("-", "_") + "_module"
        (self.folder / f"{module}.py").write_text(textwrap.dedent(source))
        info = self.folder / f"{dist.replace('-', '_')}-1.2.dist-info"
        info.mkdir()
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {dist}\nVersion: 1.2\n")
        (info / "entry_points.txt").write_text(f"[resilio]\n{name} = {module}\n")


@pytest.fixture
def installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Installed:
    monkeypatch.syspath_prepend(tmp_path)
    resilio.hooks.host.cache_clear()
    monkeypatch.setattr(sys, "modules", sys.modules.copy())
    return Installed(tmp_path)


@pytest.fixture(autouse=True)
def _forget_the_host() -> Iterator[None]:
    yield
    resilio.hooks.host.cache_clear()


GOOD = """
    import resilio.hooks
    from resilio.storage import MemoryStorage

    @resilio.hooks.hookimpl
    def resilio_register_storage(register):
        register("good", lambda url: MemoryStorage(url), hint="none needed")
"""


def test_the_builtin_storages_come_in_by_the_entry_point_group() -> None:
    schemes = Host().storages.schemes()
    assert {"file", "memory"} <= schemes.keys()
    assert schemes["file"].startswith("plugin 'builtin' of resilio-ckpt ")
    assert Host(entry_points=[]).storages.schemes() == {}


def test_a_stranger_s_plugin_is_found_and_used(installed: Installed) -> None:
    installed.add("good-dist", "good", GOOD)
    storage = open_storage("good://place", retry=False)
    with pytest.raises(ConfigError, match="good://place"):
        open_storage("good//place")
    assert isinstance(storage, MemoryStorage)
    assert storage.name == "good://place"
    assert resilio.hooks.host().storages.schemes()["good"] == "plugin 'good' of good-dist 1.2"


@pytest.mark.parametrize(
    ("source", "why"),
    [
        ("import no_such_library_at_all", "no_such_library_at_all"),
        ("this is no python", "SyntaxError"),
        ("raise SystemError('at import')", "at import"),
        (GOOD.replace("register_storage", "register_storrage"), "resilio_register_storrage"),
        (GOOD.replace("(register):", "(register, more):"), "more"),
        (GOOD.replace('register("good"', 'register("Good"'), "Good"),
        (GOOD.replace('register("good"', '1 / 0; register("good"'), "division by zero"),
    ],
)
def test_a_broken_plugin_is_named_with_its_distribution(installed: Installed, source: str, why: str) -> None:
    installed.add("bad-dist", "bad", source)
    with pytest.raises(ConfigError) as caught:
        open_storage("memory://x")
    assert "plugin 'bad' of bad-dist 1.2" in str(caught.value)
    assert why in str(caught.value)


def test_a_plugin_can_be_disabled_by_name(installed: Installed, monkeypatch: pytest.MonkeyPatch) -> None:
    installed.add("bad-dist", "bad", "import no_such_library_at_all")
    monkeypatch.setenv("RESILIO_DISABLE_PLUGINS", "other, bad")
    assert open_storage("memory://x").url == "memory://x"


def test_two_plugins_for_one_scheme_are_both_named(installed: Installed) -> None:
    installed.add("one-dist", "one", GOOD)
    installed.add("two-dist", "two", GOOD)
    with pytest.raises(ConfigError, match=r"plugin 'one' of one-dist 1\.2 and plugin 'two' of two-dist 1\.2"):
        Host()


def test_two_plugins_of_one_name_are_refused(installed: Installed) -> None:
    installed.add("one-dist", "same", GOOD)
    installed.add("two-dist", "same", GOOD.replace('"good"', '"good2"'))
    with pytest.raises(ConfigError, match="plugin 'same' of two-dist"):
        Host()


def test_a_plugin_object_may_be_registered_in_the_process() -> None:
    class Plugin:
        @hookimpl
        def resilio_register_storage(self, register: object) -> None:
            register("mine", lambda url: MemoryStorage("mine"))  # type: ignore[operator]

    host = Host(entry_points=[])
    host.register(Plugin(), name="mine")
    assert host.storages.schemes() == {"mine": "plugin 'mine'"}


def test_an_entry_point_without_a_distribution_still_loads() -> None:
    host = Host(entry_points=[metadata.EntryPoint("builtin", "resilio.storage.builtin", "resilio")])
    assert host.storages.schemes()["file"] == "plugin 'builtin' of an unknown distribution"


def test_open_storage_takes_urls_paths_and_storages(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for where in ("run", Path("run"), str(tmp_path / "run"), f"file://{tmp_path}/run", f"FILE://{tmp_path}/run"):
        storage = open_storage(where)
        assert storage.url == f"file://{tmp_path}/run"
        assert isinstance(storage, RetryingStorage)
        assert isinstance(open_storage(where, retry=False), LocalStorage)
    mine = LocalStorage(tmp_path)
    assert open_storage(mine) is mine
    assert not (tmp_path / "run").exists()  # nothing was created


def test_open_storage_explains_an_unknown_scheme() -> None:
    with pytest.raises(UnknownSchemeError, match=r"Known: file, memory.*plugin that offers s3"):
        open_storage("s3://bucket/run")


def test_opening_a_storage_imports_neither_torch_nor_pytest() -> None:
    script = (
        "import sys, resilio.hooks, resilio.testing; resilio.hooks.open_storage('memory://x').put('key', b'x')\n"
        "print([name for name in ('torch', 'numpy', 'fsspec', 'pytest') if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
