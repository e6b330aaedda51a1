"""The servers that storage plugins are tested with: one of each kind for the whole session, started when needed."""

from __future__ import annotations

import functools
import time
from collections.abc import Iterator
from typing import Any

import pytest

from plugins import servers


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Of a class with a `cut`, `make test` runs the tests named there, `make test-all` all of them."""
    for item in items:
        cut = getattr(getattr(item, "cls", None), "cut", None)
        if cut is not None and getattr(item, "originalname", None) not in cut:
            item.add_marker("full")


@pytest.fixture(scope="session")
def s3_endpoint() -> Iterator[str]:
    """A real S3 server with an empty bucket ``tests``, and the environment that opens it."""
    pytest.importorskip("s3fs")
    import botocore.loaders
    import botocore.session

    with servers.seaweedfs() as endpoint, pytest.MonkeyPatch.context() as patch:
        patch.setenv("AWS_ACCESS_KEY_ID", servers.ACCESS)
        patch.setenv("AWS_SECRET_ACCESS_KEY", servers.SECRET)
        patch.setenv("AWS_DEFAULT_REGION", "us-east-1")
        patch.setenv("AWS_ENDPOINT_URL", endpoint)
        patch.setenv("AWS_EC2_METADATA_DISABLED", "true")
        # Each client reads the description of all of S3 anew, 0.2 s, and each test has a client of its own.
        patch.setattr(botocore.loaders, "create_loader", functools.cache(botocore.loaders.create_loader))
        s3_bucket("tests")
        yield endpoint


def s3_bucket(name: str) -> None:
    """Make a bucket; just after its start the server may not be able to yet."""
    client: Any = s3_client()
    try:
        for tries_left in range(200, -1, -1):
            try:
                client.call_s3("create_bucket", Bucket=name)
                client.call_s3("put_object", Bucket=name, Key="probe", Body=b"x")
                client.call_s3("delete_object", Bucket=name, Key="probe")
                return
            except OSError:
                if not tries_left:
                    raise
                time.sleep(0.1)
    finally:
        client.close_session(client.loop, client._s3creator)


def s3_client() -> Any:
    """What a test looks into the server with, by another way than the storage's."""
    from s3fs import S3FileSystem

    return S3FileSystem(skip_instance_cache=True, use_listings_cache=False)


@pytest.fixture(scope="session")
def gs_endpoint() -> Iterator[str]:
    """A server of Google's API with an empty bucket ``tests``, and the environment that opens it."""
    gcsfs = pytest.importorskip("gcsfs")
    with servers.fake_gcs() as endpoint, pytest.MonkeyPatch.context() as patch:
        patch.setenv("STORAGE_EMULATOR_HOST", endpoint)
        client = gcsfs.GCSFileSystem(project="tests", token="anon", skip_instance_cache=True)
        client.mkdir("tests")
        yield endpoint


@pytest.fixture(scope="session")
def abfs_connection() -> Iterator[str]:
    """A server of Azure's API with an empty container ``tests``, and the environment that opens it."""
    adlfs = pytest.importorskip("adlfs")
    with servers.azurite() as connection, pytest.MonkeyPatch.context() as patch:
        patch.setenv("AZURE_STORAGE_CONNECTION_STRING", connection)
        adlfs.AzureBlobFileSystem(skip_instance_cache=True).mkdir("tests")
        yield connection


@pytest.fixture(scope="session")
def sftp_url() -> Iterator[str]:
    """How to open a folder of this machine over SSH: ``sftp_url.format(folder)``."""
    pytest.importorskip("paramiko")
    with servers.sftp_server() as (port, folder):
        keys = f"known_hosts={folder}/known_hosts&identity={folder}/identity"
        yield f"sftp://tests@127.0.0.1:{port}{{}}?{keys}"
