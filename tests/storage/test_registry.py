"""Schemes have one owner, unknown ones an explanation, and credentials are not shown."""

from __future__ import annotations

from pathlib import Path

import pytest

from resilio.errors import ConfigError, UnknownSchemeError
from resilio.storage import MemoryStorage, Storage, StorageRegistry
from resilio.storage.registry import to_url, without_credentials


@pytest.fixture
def registry() -> StorageRegistry:
    registry = StorageRegistry()
    registry.register("mem", lambda url: MemoryStorage(url), owner="plugin 'one' of dist-one 1.0")
    return registry


def test_the_factory_gets_the_url_as_it_was_given(registry: StorageRegistry) -> None:
    storage = registry.open("mem://a/b?c#d")
    assert isinstance(storage, MemoryStorage)
    assert storage.name == "mem://a/b?c#d"


def test_a_second_owner_is_an_error_that_names_both(registry: StorageRegistry) -> None:
    with pytest.raises(ConfigError, match=r"dist-one 1\.0.*dist-two 2\.0"):
        registry.register("mem", MemoryStorage, owner="plugin 'two' of dist-two 2.0")
    assert registry.schemes() == {"mem": "plugin 'one' of dist-one 1.0"}


@pytest.mark.parametrize("scheme", ["", "S3", "s3://", "1x", "a b"])
def test_what_is_no_scheme_is_refused(registry: StorageRegistry, scheme: str) -> None:
    with pytest.raises(ConfigError, match="no URL scheme"):
        registry.register(scheme, MemoryStorage, owner="me")


def test_an_unknown_scheme_s_error_lists_the_known_ones(registry: StorageRegistry) -> None:
    with pytest.raises(UnknownSchemeError, match=r"Known: mem\.") as caught:
        registry.open("nope://x")
    facts = vars(caught.value)
    assert (facts["scheme"], facts["known"], facts["url"]) == ("nope", ("mem",), "nope://x")


def test_a_missing_library_is_explained_with_the_plugin_s_hint(registry: StorageRegistry) -> None:
    def factory(url: str) -> Storage:
        raise ModuleNotFoundError("No module named 'boto'")

    registry.register("s3", factory, owner="plugin 's3'", hint="pip install boto")
    with pytest.raises(UnknownSchemeError, match=r"plugin 's3'.*No module named 'boto'.*pip install boto"):
        registry.open("s3://key:secret@bucket")


@pytest.mark.parametrize(
    ("url", "shown"),
    [
        ("s3://bucket/run", "s3://bucket/run"),
        ("s3://AKIA:secret@bucket/run", "s3://bucket/run"),
        ("s3://AKIA:se/cr+et@bucket/run", "s3://bucket/run"),
        ("s3://AKIA:p@ss@bucket/run", "s3://bucket/run"),
        ("s3://host.local:9000/run@2", "s3://host.local:9000/run@2"),
        ("s3://localhost:9000/run@2", "s3://localhost:9000/run@2"),
        ("s3://[::1]:9000/run@2", "s3://[::1]:9000/run@2"),
        ("s3://host:9000/run", "s3://host:9000/run"),
        ("s3://AKIA:1234/5678@bucket/run", "s3://bucket/run"),
        ("s3://my.name:123456/78@bucket/run", "s3://bucket/run"),
        ("s3://AKIA%3Asecret@bucket/run", "s3://bucket/run"),
        ("s3://AKIA:secret%40bucket/run", "s3://bucket/run"),
        ("s3://AKIA%3Asecret%40bucket/run", "s3://bucket/run"),
        ("s3://AKIA:secret", "s3://AKIA:***"),
        ("s3:///AKIA:secret@bucket/run", "s3:///bucket/run"),
        ("s3://b/x?%74oken=abc&y=1", "s3://b/x?%74oken=***&y=1"),
        ("s3://b/x?endpoint_url=https://u:a/b@h/c", "s3://b/x?endpoint_url=https://h/c"),
        ("s3://b/x?endpoint_url=https://h.x:9000/c@d", "s3://b/x?endpoint_url=https://h.x:9000/c@d"),
        ("ssh://me@host:22/x", "ssh://me@host:22/x"),
        ("s3://bucket/run@2/x:y", "s3://bucket/run@2/x:y"),
        ("https://token@host/x", "https://host/x"),
        ("abfs://container@account.dfs/x", "abfs://container@account.dfs/x"),
        ("sftp://user@host/x", "sftp://user@host/x"),
        ("abfs://c@a/x?sv=1&sig=abc%2F&se=2", "abfs://c@a/x?sv=1&sig=***&se=2"),
        ("s3://b/x?aws_secret_access_key=abc", "s3://b/x?aws_secret_access_key=***"),
        ("file:///a/x:y@z?token=1", "file:///a/x:y@z?token=1"),
        ("/plain/a:b@c", "/plain/a:b@c"),
    ],
)
def test_credentials_are_taken_out_of_what_is_shown(url: str, shown: str) -> None:
    assert without_credentials(url) == shown
    assert without_credentials(shown) == shown


def test_no_error_shows_credentials(registry: StorageRegistry) -> None:
    registry.register("leaky", lambda url: Leaky(url), owner="plugin 'leaky'")
    for url in (
        "nope://user:secret@x",
        "leaky://user:secret@x",
        "s3:/user:secret@x",
        "s3:user:secret@x",
        "s3//user:secret@x",
        " s3://user:secret@x",
        " s3:user:secret@x",
        "3s://user:secret@x",
        "s3 ://user:secret@x",
    ):
        with pytest.raises((UnknownSchemeError, ConfigError)) as caught:
            registry.open(to_url(url))
        assert "secret" not in str(caught.value) + repr(vars(caught.value))


class Leaky(MemoryStorage):
    def __init__(self, url: str) -> None:
        super().__init__(url)
        self.url = url


def test_plain_paths_become_file_urls(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", "/home/me")
    assert to_url("runs/x") == to_url(Path("runs/x")) == to_url("./y/../runs/x/") == f"file://{tmp_path}/runs/x"
    assert to_url("/abs/x?y") == "file:///abs/x?y"
    assert to_url("~/x") == "file:///home/me/x"
    assert to_url("./s3:/x") == f"file://{tmp_path}/s3:/x"
    assert to_url("S3://Bucket/X") == "s3://Bucket/X"


@pytest.mark.parametrize("where", ["", Path("s3://bucket/run"), "s3:/bucket", b"/bytes"])
def test_what_is_neither_url_nor_path_is_refused(where: object) -> None:
    with pytest.raises(ConfigError):
        to_url(where)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("where", "instead"),
    [
        (" s3://b/r", "s3://b/r"),
        ("\ts3://b/r", "s3://b/r"),
        ("s3://b/r\n", "s3://b/r"),
        ("/data/run-17 ", "/data/run-17"),
        ("file:///data/run-17\n", "file:///data/run-17"),
        ("s3:b/r", "s3://b/r"),
        ("S3:b/r", "S3://b/r"),
        ("s3//b/r", "s3://b/r"),
        ("s3///b/r", "s3://b/r"),
        ("mine//b/r", "mine://b/r"),
        ("GS//b", "GS://b"),
        ("file:rel", "file:///cwd/rel"),
        ("file:", "file:///data/run-17"),
        ("file//rel", "file:///cwd/rel"),
        ("memory:x", "memory://x"),
        ("exp:3/run", "./exp"),
        ("3s://b/r", "scheme://"),
        ("://b/r", "scheme://"),
        ("s3 ://b/r", "scheme://"),
        ("runs/s3://b/r", "scheme://"),
        ("/data/s3://b/r", "scheme://"),
        (Path("s3:b"), "s3://b"),
    ],
)
def test_a_mistyped_url_is_no_folder_and_what_to_write_is_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, where: str | Path, instead: str
) -> None:
    """It would begin a new run below the current folder, and nobody would look for it there."""
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError) as caught:
        to_url(where, schemes=["mine"])
    assert instead.replace("/cwd", str(tmp_path)) in str(caught.value)
    assert repr(where) not in str(caught.value), "it may hold a password"


@pytest.mark.parametrize(
    ("where", "path"),
    [
        ("./s3:b", "s3:b"),
        ("./s3//b", "s3/b"),
        ("./s3://b", "s3:/b"),
        ("../{name}/exp:3", "exp:3"),
        ("runs/lr:0.1", "runs/lr:0.1"),
        ("runs//x", "runs/x"),
        ("s3/b", "s3/b"),
        ("a b", "a b"),
        ("file://{cwd}/a:b c", "a:b c"),
        ("{cwd}/s3:b", "s3:b"),
        (Path(" x "), " x "),
    ],
)
def test_a_folder_of_such_a_name_can_still_be_given(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, where: str | Path, path: str
) -> None:
    monkeypatch.chdir(tmp_path)
    if isinstance(where, str):
        where = where.format(cwd=tmp_path, name=tmp_path.name)
    assert to_url(where, schemes=["mine"]) == f"file://{tmp_path}/{path}"
