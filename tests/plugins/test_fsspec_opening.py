"""Which URLs are opened, what they show, what errors become, and how parts grow."""

from __future__ import annotations

import errno
import pickle
import subprocess
import sys
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
from botocore.exceptions import ClientError, EndpointConnectionError, NoCredentialsError, ReadTimeoutError

import resilio_fsspec
from resilio import open_storage
from resilio.errors import (
    AccessDeniedError,
    AlreadyExistsError,
    AuthExpiredError,
    ConfigError,
    IntegrityError,
    NotFoundError,
    OutOfSpaceError,
    ResilioError,
    StorageError,
    ThrottledError,
    TransientError,
    UnknownSchemeError,
)
from resilio.storage.registry import without_credentials
from resilio_fsspec import azure, s3, ssh
from resilio_fsspec.errors import HttpAnswerError, translate
from resilio_fsspec.opening import OFFERS
from resilio_fsspec.storage import _Parts
from resilio_fsspec.store import Store, Upload


def test_the_plugin_imports_no_client_library() -> None:
    """Every process that opens any storage imports every plugin."""
    heavy = {"fsspec", "s3fs", "gcsfs", "adlfs", "paramiko", "torch"}
    code = f"import resilio_fsspec, sys; print(*{heavy!r} & set(sys.modules))"
    assert subprocess.check_output([sys.executable, "-c", code], text=True).strip() == ""


@pytest.mark.parametrize(
    ("url", "library", "hint"),
    [
        ("s3://bucket/run", "s3fs", "resilio-ckpt[s3]"),
        ("gs://bucket/run", "gcsfs", "resilio-ckpt[gs]"),
        ("abfs://container/run", "adlfs", "resilio-ckpt[abfs]"),
        ("sftp://host/run", "paramiko", "resilio-ckpt[sftp]"),
        ("fsspec+smb://host/share/run", "smbprotocol", "client library"),
    ],
)
def test_a_missing_library_is_named_with_what_to_install(
    url: str, library: str, hint: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, library, None)
    monkeypatch.delitem(sys.modules, "fsspec.implementations.smb", raising=False)
    with pytest.raises(UnknownSchemeError, match="library is missing") as caught:
        open_storage(url)
    assert hint in str(caught.value)


@pytest.mark.parametrize(
    "url",
    [
        "gs:///run",
        "gs://bucket/run?location=x",
        "abfs:///run",
        "abfs://container@account/run",
        "sftp://host",
        "sftp://host:port/run",
        "sftp://user:very-secret@host/run",
        "abfs://container/run?sas_token=very-secret",
        "fsspec+nonsense://x",
        "fsspec+memory://x::simplecache",
        "fsspec+smb://user:very-secret@host/share",
        "fsspec+ftp://host/run?password=very-secret",
    ],
)
def test_a_url_that_cannot_be_right_is_refused_and_shows_no_secret(url: str) -> None:
    with pytest.raises((ConfigError, UnknownSchemeError)) as caught:
        open_storage(url)
    assert "very" not in str(caught.value)


@pytest.mark.parametrize(
    "url",
    [
        "s3://bucket/a folder/100%20?region=eu-north-1&addressing=path",
        "gs://bucket",
        "abfss://container@account.dfs.core.windows.net/run",
        "sftp://user@host:2222/data/run?known_hosts=/etc/ssh/known",
        "fsspec+memory://run",
        "fsspec+s3://bucket/run",
    ],
)
def test_opening_connects_to_nothing_and_shows_the_url_as_it_was_given(url: str) -> None:
    storage = resilio_fsspec.open_fsspec(url)
    assert storage.url == url == without_credentials(url)
    assert url in repr(storage) and pickle.loads(pickle.dumps(storage)).url == url
    storage.close()


def test_only_memory_promises_a_create_with_one_winner_of_the_general_way(tmp_path: Path) -> None:
    for url, create, shared in (("memory://x", True, False), (f"file://{tmp_path}", False, True)):
        can = resilio_fsspec.open_fsspec(f"fsspec+{url}").capabilities
        assert (can.create_if_absent, can.shared, can.local_path) == (create, shared, None)


def test_two_memories_of_one_name_are_one_store() -> None:
    one, other = (resilio_fsspec.open_fsspec("fsspec+memory://one-store") for _ in range(2))
    one.put("key", b"x", if_absent=True)
    with pytest.raises(AlreadyExistsError):
        other.put("key", b"y", if_absent=True)
    other.delete(["key"])


# -------------------------------------------------------------------------------------------------------------- errors


def answer(code: str, status: int) -> ClientError:
    return ClientError(
        {"Error": {"Code": code, "Message": "no"}, "ResponseMetadata": {"HTTPStatusCode": status}}, "PutObject"
    )


def wrapped(error: Exception) -> Exception:
    """As s3fs raises it."""
    outer = OSError(errno.EINVAL, "no")
    outer.__cause__ = error
    return outer


class HttpError(Exception):
    """As gcsfs has it."""

    def __init__(self, code: int) -> None:
        super().__init__(f"message, {code}")
        self.code = code


@pytest.mark.parametrize(
    ("error", "kind"),
    [
        (answer("NoSuchKey", 404), NotFoundError),
        (answer("404", 404), NotFoundError),
        (answer("NoSuchBucket", 404), StorageError),
        (answer("PreconditionFailed", 412), AlreadyExistsError),
        (answer("412", 412), AlreadyExistsError),
        (answer("ConditionalRequestConflict", 409), TransientError),
        (answer("AccessDenied", 403), AccessDeniedError),
        (answer("SignatureDoesNotMatch", 403), AccessDeniedError),
        (answer("ExpiredToken", 400), AuthExpiredError),
        (answer("SlowDown", 503), ThrottledError),
        (answer("TooManyRequests", 429), ThrottledError),
        (answer("Unheard", 429), ThrottledError),
        (answer("InternalError", 500), TransientError),
        (answer("Unheard", 502), TransientError),
        (answer("Unheard", 507), OutOfSpaceError),
        (answer("InvalidRange", 416), IntegrityError),
        (answer("NotImplemented", 501), StorageError),
        (answer("Unheard", 400), StorageError),
        (EndpointConnectionError(endpoint_url="http://x"), TransientError),
        (ReadTimeoutError(endpoint_url="http://x"), TransientError),
        (NoCredentialsError(), AccessDeniedError),
        (HttpAnswerError(404, "", ""), NotFoundError),
        (HttpAnswerError(412, "", ""), AlreadyExistsError),
        (HttpAnswerError(401, "", ""), AuthExpiredError),
        (HttpError(429), ThrottledError),
        (TimeoutError(), TransientError),
        (ConnectionResetError(), TransientError),
        (EOFError(), TransientError),
        (RuntimeError("Session is closed"), TransientError),
        (RuntimeError("something else"), StorageError),
        (OSError(errno.ENOSPC, "full"), OutOfSpaceError),
        (OSError(errno.EACCES, "no"), AccessDeniedError),
        (FileNotFoundError("x"), NotFoundError),
        (FileExistsError("x"), AlreadyExistsError),
        (ValueError("x"), StorageError),
    ],
)
def test_every_error_becomes_one_of_ours(error: Exception, kind: type[ResilioError]) -> None:
    """Bare and as s3fs wraps it, with key and URL, and through a pickle."""
    for one in (error, wrapped(error)) if isinstance(error, ClientError) else (error,):
        found = translate(one, "put", key="a/key", url="s3://bucket")
        assert type(found) is kind
        copy: Any = pickle.loads(pickle.dumps(found))
        assert (type(copy), str(copy), copy.key, copy.url) == (kind, str(found), "a/key", "s3://bucket")
        assert "a/key" in str(found) and "s3://bucket" in str(found)


@pytest.mark.parametrize(
    "text",
    [
        "GET https://host/c/b?sv=1&sig=very-secret&se=2",
        "Authorization: Bearer very-secret",
        "aws_secret_access_key=very-secret",
        "SharedAccessSignature: very-secret",
        "session token=very-secret, more",
    ],
)
def test_what_a_server_says_is_passed_on_without_secrets(text: str) -> None:
    assert "very-secret" not in str(translate(ValueError(text), "put", key="k", url="u"))


# --------------------------------------------------------------------------------------------------------------- parts


class _Counted(Upload):
    def __init__(self) -> None:
        self.sizes: list[int] = []

    def part(self, data: bytearray) -> None:
        self.sizes.append(len(data))

    def publish(self, data: bytearray) -> None:
        self.part(data)

    def abort(self) -> None:
        pass


@pytest.mark.parametrize("hint", [0, 10**9, 5 * 2**40])
def test_no_object_has_more_parts_than_s3_allows(hint: int) -> None:
    """Whatever the hint said: 10,000 parts of at most 5 GiB hold the 5 TiB that S3 takes."""
    storage = resilio_fsspec.open_fsspec("fsspec+memory://parts")
    parts, size_bytes = _Parts(storage, "key", hint), 0
    while size_bytes < 5 * 2**40:
        part = parts._part_bytes()
        assert part % (256 * 2**10) == 0 and part <= 5 * 2**30
        size_bytes += part
        parts._sent += 1
    assert parts._sent <= 10_000


def test_parts_are_equal_and_the_last_is_what_is_left(monkeypatch: pytest.MonkeyPatch) -> None:
    """Some stores insist on it. And no more than one is held."""
    storage, upload = resilio_fsspec.open_fsspec("fsspec+memory://equal"), _Counted()
    monkeypatch.setattr(type(storage._store), "upload", lambda self, name: upload)
    with storage.writer("key") as out:
        for _ in range(5):
            out.write(bytes(5 * 2**20))
    step = Store.part_bytes
    assert upload.sizes == [step, step, step, 25 * 2**20 - 3 * step]


# ---------------------------------------------------------------------------------------------------------------- docs


def test_the_page_about_storage_names_every_scheme_and_every_option() -> None:
    page = (Path(__file__).resolve().parents[2] / "docs/storage.md").read_text("utf-8")
    for scheme, offer in OFFERS.items():
        if scheme.startswith("fsspec+"):
            continue
        assert f"`{scheme}://" in page
        options = import_module(f"resilio_fsspec.{offer.kind.partition(':')[0]}").OPTIONS
        assert all(f"| `{option}` |" in page for option in options), scheme
        extra = offer.hint.partition("[")[2].partition("]")[0]
        assert f"`resilio-ckpt[{extra}]`" in page
    assert ssh.PASSWORD in page and s3.MARK in page and azure.MARK in page
