"""S3 and what speaks its language, through s3fs's client: the calls of the S3 API, one by one."""

from __future__ import annotations

import secrets
from collections.abc import Callable, Coroutine, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from email.utils import parsedate_to_datetime
from typing import Any

from resilio.errors import ConfigError, IntegrityError, StorageError
from resilio.storage import Capabilities

from .errors import S3_CODES, HttpAnswerError, says_exists
from .place import Place, flag
from .store import AsyncCalls, Begun, Listed, Range, Store, Upload, concurrently, copy_into, pieces

__all__ = ["S3Store"]

_CONNECT_S, _READ_S = 10, 60
_DELETE_AT_ONCE = 1000  # the API's limit
_CONCURRENT = 8
MARK = "resilio-create"  # in the metadata of an object that was created: by which call

OPTIONS = ("endpoint_url", "region", "profile", "anon", "addressing", "requester_pays")


class S3Store(Store):
    """A folder of a bucket."""

    @classmethod
    def capabilities(cls, place: Place) -> Capabilities:
        """See `Store.capabilities`."""
        return Capabilities(concurrency=_CONCURRENT)

    @classmethod
    def check(cls, place: Place) -> None:
        """See `Store.check`."""
        import s3fs  # noqa: F401

        if not place.host:
            raise ConfigError(f"{place.url}: name a bucket: s3://bucket/run-17", url=place.url)
        if place.options.get("addressing", "auto") not in ("auto", "path", "virtual"):
            raise ConfigError(f"{place.url}: addressing is path or virtual", url=place.url)
        flag(place, "anon")
        flag(place, "requester_pays")

    def __init__(self, place: Place) -> None:
        super().__init__(place)
        from s3fs import S3FileSystem

        options = place.options
        self._fs = S3FileSystem(
            anon=flag(place, "anon"),
            requester_pays=flag(place, "requester_pays"),
            endpoint_url=options.get("endpoint_url"),
            client_kwargs={"region_name": options["region"]} if "region" in options else {},
            config_kwargs={
                "connect_timeout": _CONNECT_S,
                "read_timeout": _READ_S,
                "max_pool_connections": 4 * _CONCURRENT,
                "retries": {"total_max_attempts": 1},
                "s3": {"addressing_style": options.get("addressing", "auto")},
            },
            use_listings_cache=False,
            skip_instance_cache=True,
            **({"profile": options["profile"]} if "profile" in options else {}),
        )
        self._fs.retries = 1  # `resilio.storage.retrying` is the only layer that retries
        self._run = AsyncCalls(self._fs.loop)

    async def _ask(self, method: str, **arguments: Any) -> dict[str, Any]:
        answer: dict[str, Any] = await self._fs._call_s3(method, Bucket=self.place.host, **arguments)
        return answer

    def call(self, method: str, size_bytes: int = 0, **arguments: Any) -> dict[str, Any]:
        """One request."""
        return self._run(self._ask(method, **arguments), size_bytes)

    def put(self, name: str, data: bytes, *, if_absent: bool) -> float | None:
        """See `Store.put`."""
        if not if_absent:
            return _date(self.call("put_object", len(data), Key=name, Body=data))
        mark, answer = secrets.token_hex(8), dict[str, Any]()
        with self.ours_if_marked(name, mark):
            answer = self.call("put_object", len(data), Key=name, Body=data, Metadata={MARK: mark}, IfNoneMatch="*")
        return _date(answer)

    @contextmanager
    def ours_if_marked(self, name: str, mark: str) -> Iterator[None]:
        """A create that is told "exists", though the object is its own, has succeeded.

        Below us aiohttp repeats a PUT whose connection broke before the answer, as a proxy may, and if the first had
        been carried out the second is refused.
        """
        try:
            yield
        except OSError as error:
            if not says_exists(error):
                raise
            with suppress(FileNotFoundError):
                if self.call("head_object", Key=name).get("Metadata", {}).get(MARK) == mark:
                    return
            raise

    def upload(self, name: str) -> Upload:
        """See `Store.upload`."""
        return _Multipart(self, name)

    def read(self, name: str, ranges: Sequence[Range]) -> None:
        """See `Store.read`."""

        def job(offset: int, buffer: memoryview) -> Callable[[], Coroutine[Any, Any, None]]:
            return lambda: self._fetch(name, offset, buffer)

        wanted = sum(len(buffer) for _, buffer in ranges)
        self._run(concurrently((job(*piece) for piece in pieces(ranges)), _CONCURRENT), wanted)

    async def _fetch(self, name: str, offset: int, buffer: memoryview) -> None:
        answer = await self._ask("get_object", Key=name, Range=f"bytes={offset}-{offset + len(buffer) - 1}")
        async with answer["Body"] as body:
            if not str(answer.get("ContentRange", "")).startswith(f"bytes {offset}-"):
                raise StorageError("the store ignores the range of a read, and sends something else")
            copy_into(buffer, await body.read(), offset)

    def get(self, name: str) -> bytes:
        """See `Store.get`."""

        async def whole() -> bytes:
            answer = await self._ask("get_object", Key=name)
            async with answer["Body"] as body:
                data: bytes = await body.read()
            if len(data) != answer["ContentLength"]:
                raise IntegrityError(f"of {answer['ContentLength']} bytes {len(data)} came")
            return data

        return self._run(whole())

    def stat(self, name: str) -> Listed | None:
        """See `Store.stat`. By a listing: the answer to a HEAD has no body, so none that says why it is a no."""
        found = self.call("list_objects_v2", Prefix=name, MaxKeys=1).get("Contents", [])
        return next((_listed(item) for item in found if item["Key"] == name), None)

    def list(self, prefix: str) -> Iterator[Listed]:
        """See `Store.list`."""
        more: dict[str, Any] = {}
        while True:
            page = self.call("list_objects_v2", Prefix=prefix, **more)
            yield from map(_listed, page.get("Contents", []))
            if not page.get("IsTruncated"):
                return
            more = {"ContinuationToken": page["NextContinuationToken"]}

    def delete(self, names: Sequence[str]) -> None:
        """See `Store.delete`."""
        for at in range(0, len(names), _DELETE_AT_ONCE):
            doomed = [{"Key": name} for name in names[at : at + _DELETE_AT_ONCE]]
            answer = self.call("delete_objects", Delete={"Objects": doomed, "Quiet": True})
            for error in answer.get("Errors", []):
                if error.get("Code") != "NoSuchKey":
                    raise HttpAnswerError(0, str(error.get("Code", "")), str(error.get("Message", "")), S3_CODES)

    def incomplete(self, prefix: str) -> Iterable[Begun]:
        """See `Store.incomplete`."""
        more: dict[str, Any] = {}
        while True:
            page = self.call("list_multipart_uploads", Prefix=prefix, **more)
            for item in page.get("Uploads", []):
                yield Begun(item["Key"], item["UploadId"], item["Initiated"].timestamp())
            if not page.get("IsTruncated"):
                return
            more = {"KeyMarker": page["NextKeyMarker"], "UploadIdMarker": page["NextUploadIdMarker"]}

    def abort(self, name: str, token: str) -> None:
        """See `Store.abort`."""
        with suppress(FileNotFoundError):
            self.call("abort_multipart_upload", Key=name, UploadId=token)

    def close(self) -> None:
        """See `Store.close`."""
        creator = getattr(self._fs, "_s3creator", None)
        if creator is not None:
            self._run(creator.__aexit__(None, None, None))


class _Multipart(Upload):
    def __init__(self, store: S3Store, name: str) -> None:
        self._store, self._name, self._mark = store, name, secrets.token_hex(8)
        self._token = store.call("create_multipart_upload", Key=name, Metadata={MARK: self._mark})["UploadId"]
        self._parts: list[dict[str, Any]] = []

    def part(self, data: bytearray) -> None:
        number = len(self._parts) + 1
        answer = self._store.call(
            "upload_part", len(data), Key=self._name, UploadId=self._token, PartNumber=number, Body=bytes(data)
        )
        self._parts.append({"PartNumber": number, "ETag": answer["ETag"]})

    def publish(self, data: bytearray) -> None:
        if data:
            self.part(data)
        with self._store.ours_if_marked(self._name, self._mark):
            self._store.call(
                "complete_multipart_upload",
                Key=self._name,
                UploadId=self._token,
                MultipartUpload={"Parts": self._parts},
                IfNoneMatch="*",
            )

    def abort(self) -> None:
        self._store.abort(self._name, self._token)


def _date(answer: dict[str, Any]) -> float | None:
    """When the store answered, by its own clock."""
    text = answer.get("ResponseMetadata", {}).get("HTTPHeaders", {}).get("date")
    return parsedate_to_datetime(text).timestamp() if text else None


def _listed(item: dict[str, Any]) -> Listed:
    return Listed(item["Key"], item["Size"], item["LastModified"].timestamp())
