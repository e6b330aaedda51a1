"""Plugins come in by the entry-point group; a broken one is named; `open_storage` finds the storage for a URL."""

from __future__ import annotations

import re
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest
import typer

import resilio.hooks
from resilio.cli.app import app
from resilio.errors import ConfigError, UnknownSchemeError
from resilio.hooks import Command, Host, PluginInfo, hookimpl, open_storage
from resilio.hooks.names import OWN_COMMANDS
from resilio.policies import keep_last
from resilio.storage import LocalStorage, MemoryStorage, RegisterStorage
from resilio.storage.retrying import RetryingStorage


class Installed:
    """A folder on `sys.path` to which distributions with plugins are installed."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def add(self, dist: str, name: str, source: str) -> None:
        module = dist.replace("-", "_") + "_module"
        self.module(module, source)
        info = self.folder / f"{dist.replace('-', '_')}-1.2.dist-info"
        info.mkdir()
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {dist}\nVersion: 1.2\n")
        (info / "entry_points.txt").write_text(f"[resilio]\n{name} = {module}\n")

    def module(self, name: str, source: str) -> None:
        (self.folder / f"{name}.py").write_text(textwrap.dedent(source))


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
    with pytest.raises(ConfigError, match=r"plugin 'same' of one-dist 1\.2 and plugin 'same' of two-dist 1\.2"):
        Host()


EVERYTHING = """
    import resilio

    @resilio.hookimpl
    def resilio_register_storage(register):
        register("every", print)

    @resilio.hookimpl
    def resilio_register_policies(register):
        from resilio import policies
        register("keep_prime", lambda n: policies.keep_last(n))

    @resilio.hookimpl
    def resilio_register_drills(register):
        register("tiny-gpt", "every.loops:make")

    @resilio.hookimpl
    def resilio_add_commands(commands):
        commands("every", "every.cli:app", help="All of it.")
"""


def test_the_other_registries_are_filled(installed: Installed) -> None:
    installed.add("every-dist", "every", EVERYTHING)
    host = Host()
    owner = "plugin 'every' of every-dist 1.2"
    assert host.policies.parse_keep("keep_prime(3) | keep_last(2)") == keep_last(3) | keep_last(2)
    assert dict(host.drills) == {"tiny-gpt": "every.loops:make"}
    assert dict(host.commands) == {"every": Command("every.cli:app", "All of it.", owner)}
    assert [one for one in host.plugins() if one.name == "every"] == [
        PluginInfo(
            "every",
            "entry point",
            "every_dist_module",
            "every-dist",
            "1.2",
            hooks=(
                "resilio_add_commands",
                "resilio_register_drills",
                "resilio_register_policies",
                "resilio_register_storage",
            ),
            schemes=("every",),
            policies=("keep_prime",),
            drills=("tiny-gpt",),
            commands=("every",),
        )
    ]


@pytest.mark.parametrize("hook", ["storage", "policies", "drills", "commands"])
def test_every_kind_of_name_has_one_owner(installed: Installed, hook: str) -> None:
    """Of two plugins that claim it both are named, and nothing of the second one stays."""
    names = {"storage": '"every", print', "policies": '"keep_prime"', "drills": '"tiny-gpt"', "commands": '"every", "'}
    other = EVERYTHING.replace("every", "other").replace("_prime", "_other").replace("tiny", "other")
    changed = {
        "storage": '"other", print',
        "policies": '"keep_other"',
        "drills": '"other-gpt"',
        "commands": '"other", "',
    }
    installed.add("one-dist", "one", EVERYTHING)
    installed.add("two-dist", "two", other.replace(changed[hook], names[hook]))
    both = r"both plugin 'one' of one-dist 1\.2 and plugin 'two' of two-dist 1\.2 offer .*RESILIO_DISABLE_PLUGINS"
    with pytest.raises(ConfigError, match=both):
        Host()
    host = Host(lenient=True)
    one, two = (info for info in host.plugins() if info.name in ("one", "two"))
    assert one.active and not two.active and re.match(both, str(two.error))
    registered = [*host.storages, *host.policies, *host.drills, *host.commands]
    assert not [name for name in registered if "other" in name]
    assert (two.schemes, two.policies, two.drills, two.commands) == ((), (), (), ())


@pytest.mark.parametrize("name", OWN_COMMANDS)
def test_resilio_keeps_its_own_commands(installed: Installed, name: str) -> None:
    installed.add("every-dist", "every", EVERYTHING.replace('commands("every"', f'commands("{name}"'))
    with pytest.raises(ConfigError, match=rf"both resilio and plugin 'every' of every-dist 1\.2 offer .*{name}"):
        Host()


def test_the_commands_there_are_are_reserved() -> None:
    click = typer.main.get_command(app)
    assert set(click.commands) <= set(OWN_COMMANDS)  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    ("was", "now"),
    [
        ('"every", print', '"every", None'),
        ('"every", print', '"e" * 65, print'),
        ('"every", print', "3, print"),
        ('"keep_prime", lambda', '"keep prime", lambda'),
        ('"keep_prime", lambda n: policies.keep_last(n)', '"keep_prime", 3'),
        ('"tiny-gpt"', '"Tiny"'),
        ('"every.loops:make"', '"every.loops"'),
        ('"every.loops:make"', '"every.loops:make()"'),
        ('"every.loops:make"', '"e" * 250 + ".loops:make"'),
        ('"every.loops:make"', "print"),
        ('"every", "every.cli:app"', '"every one", "every.cli:app"'),
        ('"every.cli:app"', '".cli:app"'),
        ('"All of it."', '"two\\nlines"'),
        ('"All of it."', '"x" * 201'),
        ('"All of it."', "None"),
    ],
)
def test_names_and_places_are_checked(installed: Installed, was: str, now: str) -> None:
    assert was in EVERYTHING
    installed.add("every-dist", "every", EVERYTHING.replace(was, now))
    with pytest.raises(
        ConfigError, match=r"plugin 'every' of every-dist 1\.2 registers .*DISABLE_PLUGINS=every"
    ) as told:
        Host()
    assert len(str(told.value)) < 500


@pytest.mark.parametrize(
    ("source", "why"),
    [
        ("x = 1", "has no hook"),
        ("import resilio\n@resilio.hookimpl(wrapper=True)\ndef resilio_pins(checkpoints):\n  yield", "wrapper"),
        ("import resilio\n@resilio.hookimpl\nasync def resilio_on_event(event): pass", "async"),
        ("import resilio\n@resilio.hookimpl\ndef resilio_on_event(event): yield", "generator"),
        ("import sys; sys.exit('no')", "SystemExit"),
    ],
)
def test_what_would_never_run_is_refused(installed: Installed, source: str, why: str) -> None:
    installed.add("bad-dist", "bad", source)
    with pytest.raises(ConfigError, match=rf"plugin 'bad' of bad-dist 1\.2.*{why}.*RESILIO_DISABLE_PLUGINS=bad"):
        Host()


def test_arguments_may_be_left_out_or_have_defaults(installed: Installed) -> None:
    source = (
        GOOD.replace("(register):", "(register=None):")
        + """
    @resilio.hooks.hookimpl
    def resilio_add_commands():
        pass

    @resilio.hooks.hookimpl
    def resilio_verify(storage):
        yield
"""
    )
    installed.add("good-dist", "good", source)
    assert "good" in Host().storages


def test_an_unknown_hook_that_says_it_may_be_unknown_is_let_be(installed: Installed) -> None:
    source = (
        GOOD
        + """
    @resilio.hooks.hookimpl(optionalhook=True)
    def resilio_of_a_later_release(x):
        pass
"""
    )
    installed.add("good-dist", "good", source)
    assert next(one for one in Host().plugins() if one.name == "good").hooks == ("resilio_register_storage",)


def test_a_lenient_host_lists_the_broken_with_their_errors(
    installed: Installed, monkeypatch: pytest.MonkeyPatch
) -> None:
    installed.add("bad-dist", "bad", "import no_such_library_at_all")
    installed.add("good-dist", "good", GOOD)
    installed.add("off-dist", "off", "import no_such_library_at_all")
    monkeypatch.setenv("RESILIO_DISABLE_PLUGINS", "off")
    monkeypatch.setenv("RESILIO_PLUGINS", "no_such_module")
    host = Host(lenient=True)
    told = {one.name: one for one in host.plugins()}
    assert "no_such_library_at_all" in str(told["bad"].error)
    assert (told["bad"].version, told["bad"].active) == ("1.2", False)
    assert "no_such_module" in str(told["no_such_module"].error)
    assert (told["good"].error, told["good"].schemes, told["good"].active) == (None, ("good",), True)
    assert (told["off"].error, told["off"].disabled, told["off"].active) == (None, True, False)
    assert {"file", "memory", "good"} <= set(host.storages)
    assert "off_dist_module" not in sys.modules


def test_an_environment_variable_names_modules_that_are_plugins(
    installed: Installed, monkeypatch: pytest.MonkeyPatch
) -> None:
    installed.module("mine", GOOD)
    installed.module("other", GOOD.replace('"good"', '"other"'))
    monkeypatch.setenv("RESILIO_PLUGINS", "mine, other,,mine")
    assert open_storage("good://x", retry=False).url.startswith("memory://")
    mine = next(one for one in resilio.hooks.host().plugins() if one.name == "mine")
    assert (mine.source, mine.where, mine.distribution, mine.schemes) == ("RESILIO_PLUGINS", "mine", None, ("good",))
    assert resilio.hooks.host().storages.schemes()["other"] == "plugin 'other' of RESILIO_PLUGINS"
    monkeypatch.setenv("RESILIO_DISABLE_PLUGINS", "mine")
    assert "good" not in Host().storages


@pytest.mark.parametrize(
    ("listed", "why"),
    [
        ("no.such", "No module named 'no'"),
        ("mine:Plugin", "no name of a module"),
        ("json", "has no hook"),
        ("good_dist_module", "plugin 'good' of good-dist 1.2 and plugin 'good_dist_module' of RESILIO_PLUGINS"),
    ],
)
def test_what_the_variable_names_wrongly_is_told_with_the_variable(
    installed: Installed, monkeypatch: pytest.MonkeyPatch, listed: str, why: str
) -> None:
    installed.add("good-dist", "good", GOOD)
    monkeypatch.setenv("RESILIO_PLUGINS", listed)
    with pytest.raises(ConfigError, match="RESILIO_PLUGINS") as told:
        Host()
    assert why in str(told.value)


class Mine:
    """A plugin object."""

    def __init__(self, scheme: str = "mine") -> None:
        self.scheme = scheme

    @hookimpl
    def resilio_register_storage(self, register: RegisterStorage) -> None:
        register(self.scheme, lambda url: MemoryStorage("mine"))


def test_a_host_with_more_plugins_leaves_the_first_as_it_is() -> None:
    first = Host()
    second = first.with_plugins([Mine(), Mine("more")])
    assert [one.name for one in second.plugins()[-2:]] == ["Mine", "Mine-2"]
    assert {"file", "mine", "more"} <= set(second.storages)
    assert second.open_storage("more://x").url == "memory://mine"
    assert "mine" not in first.storages and len(first.plugins()) == len(second.plugins()) - 2
    with pytest.raises(ConfigError, match=r"both plugin 'Mine' and plugin 'Mine-2' offer storage for mine"):
        first.with_plugins([Mine(), Mine()])


@pytest.mark.parametrize(
    ("plugins", "why"),
    [
        ("mine", "give a list"),
        (Mine(), "give a list"),
        ({"mine": Mine()}, "give a list"),
        ([None], "is no plugin: give an instance, or a module"),
        (["mine"], "is no plugin: give an instance, or a module"),
        ([Mine], "the class Mine is no plugin: give an instance"),
        ([object()], "object has no hook: mark"),
        ([sys], "module sys has no hook: mark"),
        ([ONE := Mine(), ONE], "are the same"),
        ([Mine("FILE")], "no URL scheme"),
    ],
)
def test_what_is_no_plugin_is_told_what_to_give(plugins: Any, why: str) -> None:
    with pytest.raises(ConfigError, match="plugins=") as told:
        Host(entry_points=[]).with_plugins(plugins)
    assert why in str(told.value)


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
    with pytest.raises(UnknownSchemeError, match=r"Known: .*file, fsspec\+…, .*memory.*plugin that offers nope"):
        open_storage("nope://bucket/run")


def test_opening_a_storage_imports_neither_torch_nor_pytest() -> None:
    script = (
        "import sys, resilio.hooks, resilio.testing; resilio.hooks.open_storage('memory://x').put('key', b'x')\n"
        "print([name for name in ('torch', 'numpy', 'fsspec', 'pytest') if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
