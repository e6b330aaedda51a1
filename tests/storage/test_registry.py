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
        ("s3://host:9000/run@2", "s3://host:9000/run@2"),
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
    for url in ("nope://user:secret@x", "leaky://user:secret@x", "s3:/user:secret@x"):
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
