"""Azure Blob Storage, with adlfs's client and credentials: the calls of the Blob API, one by one."""

from __future__ import annotations

import re
import secrets
from collections.abc import Callable, Coroutine, Iterator, Sequence
from typing import Any

from resilio.errors import ConfigError
from resilio.storage import Capabilities

from .errors import says_exists
from .place import Place, flag
from .store import AsyncCalls, Listed, Range, Store, Upload, concurrently, copy_into, pieces

__all__ = ["AzureStore"]

_CONCURRENT = 8
MARK = "resilio_create"  # in the metadata of a blob that was created: by which call
# `resilio.storage.retrying` is the only layer that retries.
_ONCE: dict[str, Any] = {"retry_total": 0, "connection_timeout": 10, "read_timeout": 60}
_ACCOUNT = re.compile(r"(?P<container>[^@]+)@(?P<account>[^.@]+)\.(?:dfs|blob)\.(?P<cloud>[\w.-]+)")

OPTIONS = ("account_name", "account_host", "anon")


class AzureStore(Store):
    """A folder of a container.

    What a killed writer has sent cannot be listed as such: Azure forgets blocks that nobody committed after a week.
    """

    @classmethod
    def capabilities(cls, place: Place) -> Capabilities:
        """See `Store.capabilities`."""
        return Capabilities(concurrency=_CONCURRENT)

    @classmethod
    def check(cls, place: Place) -> None:
        """See `Store.check`."""
        import adlfs  # noqa: F401

        if not place.host or ("@" in place.host and not _ACCOUNT.fullmatch(place.host)):
            raise ConfigError(
                f"{place.url}: name a container: abfs://container/run-17, or "
                "abfs://container@account.dfs.core.windows.net/run-17",
                url=place.url,
            )
        flag(place, "anon")

    def __init__(self, place: Place) -> None:
        super().__init__(place)
        from adlfs import AzureBlobFileSystem

        options = {name: place.options[name] for name in ("account_name", "account_host") if name in place.options}
        self._container = place.host
        if found := _ACCOUNT.fullmatch(place.host):
            self._container = found["container"]
            options["account_name"] = found["account"]
            options.setdefault("account_host", f"{found['account']}.blob.{found['cloud']}")
        self._fs = AzureBlobFileSystem(
            **options,
            **({"anon": True} if flag(place, "anon") else {}),
            use_listings_cache=False,
            skip_instance_cache=True,
        )
        self._client = self._fs.service_client
        self.run = AsyncCalls(self._fs.loop)

    def blob(self, name: str) -> Any:
        """The client of one blob."""
        return self._client.get_blob_client(self._container, name)

    def put(self, name: str, data: bytes, *, if_absent: bool) -> float | None:
        """See `Store.put`."""
        if not if_absent:
            put = self.blob(name).upload_blob(data, length=len(data), overwrite=True, **_ONCE)
            return _seconds(self.run(put, len(data)))
        mark = secrets.token_hex(8)
        put = self.blob(name).upload_blob(data, length=len(data), metadata={MARK: mark}, overwrite=False, **_ONCE)
        try:
            return _seconds(self.run(put, len(data)))
        except Exception as error:
            if not says_exists(error):
                raise
            found = self.mark_of(name)
            if found is None:
                # Only blocks that a writer left: a list of others may still be committed, for there is no blob yet.
                self.upload(name).publish(bytearray(data))
            elif found != mark:
                raise
        return None

    def mark_of(self, name: str) -> str | None:
        """Which call created the blob: "" if that is not known, None if there is no blob.

        A create that is told "exists", though the blob is its own, has succeeded: below us aiohttp repeats a PUT whose
        connection broke before the answer, as a proxy may, and if the first had been carried out the second is refused.
        """
        found = self._properties(name)
        return None if found is None else str((found.metadata or {}).get(MARK, ""))

    def upload(self, name: str) -> Upload:
        """See `Store.upload`."""
        return _Blocks(self, name)

    def read(self, name: str, ranges: Sequence[Range]) -> None:
        """See `Store.read`."""

        def job(offset: int, buffer: memoryview) -> Callable[[], Coroutine[Any, Any, None]]:
            return lambda: self._fetch(name, offset, buffer)

        wanted = sum(len(buffer) for _, buffer in ranges)
        self.run(concurrently((job(*piece) for piece in pieces(ranges)), _CONCURRENT), wanted)

    async def _fetch(self, name: str, offset: int, buffer: memoryview) -> None:
        stream = await self.blob(name).download_blob(offset=offset, length=len(buffer), **_ONCE)
        copy_into(buffer, await stream.readall(), offset)

    def get(self, name: str) -> bytes:
        """See `Store.get`."""

        async def whole() -> bytes:
            stream = await self.blob(name).download_blob(**_ONCE)
            data: bytes = await stream.readall()
            return data

        return self.run(whole())

    def stat(self, name: str) -> Listed | None:
        """See `Store.stat`."""
        found = self._properties(name)
        return None if found is None or _folder(found) else Listed(name, found.size, found.last_modified.timestamp())

    def _properties(self, name: str) -> Any | None:
        from azure.core.exceptions import ResourceNotFoundError

        try:
            return self.run(self.blob(name).get_blob_properties(**_ONCE))
        except ResourceNotFoundError as error:
            if _code(error) == "BlobNotFound":
                return None
            raise

    def list(self, prefix: str) -> Iterator[Listed]:
        """See `Store.list`."""
        container = self._client.get_container_client(self._container)
        pages = container.list_blobs(name_starts_with=prefix, include=["metadata"], **_ONCE).by_page()

        async def page() -> list[Any] | None:
            try:
                return [blob async for blob in await pages.__anext__()]
            except StopAsyncIteration:
                return None

        while (blobs := self.run(page())) is not None:
            for blob in blobs:
                if not _folder(blob):
                    yield Listed(blob.name, blob.size, blob.last_modified.timestamp())

    def delete(self, names: Sequence[str]) -> None:
        """See `Store.delete`."""
        from azure.core.exceptions import ResourceNotFoundError

        async def gone(name: str) -> None:
            try:
                await self.blob(name).delete_blob(**_ONCE)
            except ResourceNotFoundError as error:
                if _code(error) != "BlobNotFound":
                    raise

        def job(name: str) -> Callable[[], Coroutine[Any, Any, None]]:
            return lambda: gone(name)

        for at in range(0, len(names), 1000):  # each batch has its own time limit
            self.run(concurrently(map(job, names[at : at + 1000]), _CONCURRENT))

    def close(self) -> None:
        """See `Store.close`."""
        self.run(self._client.close())
        if hasattr(self._fs.credential, "close"):
            self.run(self._fs.credential.close())


class _Blocks(Upload):
    """Blocks wait at the blob's name until a list of them is committed; they are nobody's who lists others."""

    def __init__(self, store: AzureStore, name: str) -> None:
        self._store, self._name, self._blob = store, name, store.blob(name)
        self._mark = secrets.token_hex(8)  # blocks of two writers of one name lie side by side
        self._ids: list[str] = []

    def part(self, data: bytearray) -> None:
        block = f"{self._mark}-{len(self._ids):06}"
        self._store.run(self._blob.stage_block(block, bytes(data), length=len(data), **_ONCE), len(data))
        self._ids.append(block)

    def publish(self, data: bytearray) -> None:
        from azure.core import MatchConditions
        from azure.storage.blob import BlobBlock

        if data:
            self.part(data)
        blocks = [BlobBlock(block_id=block) for block in self._ids]
        commit = self._blob.commit_block_list(
            blocks, metadata={MARK: self._mark}, match_condition=MatchConditions.IfMissing, **_ONCE
        )
        try:
            self._store.run(commit)
        except Exception as error:
            if not says_exists(error) or self._store.mark_of(self._name) != self._mark:
                raise

    def abort(self) -> None:
        pass


def _folder(blob: Any) -> bool:
    """An account with real folders lists them as blobs, marked so."""
    return str((blob.metadata or {}).get("hdi_isfolder", "")).lower() == "true"


def _seconds(answer: dict[str, Any]) -> float | None:
    found = answer.get("last_modified")
    return None if found is None else float(found.timestamp())


def _code(error: Exception) -> str:
    """Azure's word for what is wrong; not found may be the container as well."""
    return str(getattr(error, "error_code", ""))
