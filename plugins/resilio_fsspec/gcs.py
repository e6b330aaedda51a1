"""Google Cloud Storage, with gcsfs's session and credentials: the calls of the JSON API, one by one.

gcsfs repeats each of its own calls up to six times, and a create that is repeated after a lost answer finds its own
object there. So only what it sets up is used here.
"""

from __future__ import annotations

import json
import secrets
from collections.abc import Callable, Coroutine, Iterator, Sequence
from contextlib import suppress
from datetime import datetime
from typing import Any, NamedTuple
from urllib.parse import quote, urlencode

from resilio.errors import ConfigError, IntegrityError, StorageError
from resilio.storage import Capabilities

from .errors import HttpAnswerError
from .place import Place, flag
from .store import AsyncCalls, Listed, Range, Store, Upload, concurrently, copy_into, pieces

__all__ = ["GcsStore"]

_CONNECT_S, _READ_S = 10, 60
_CONCURRENT = 8

_BYTES = "application/octet-stream"

OPTIONS = ("project", "endpoint_url", "anon", "requester_pays")


class _Answer(NamedTuple):
    status: int
    headers: Any
    body: bytes


class GcsStore(Store):
    """A folder of a bucket.

    What a killed writer has sent cannot be listed: Google forgets it after a week, and charges nothing for it.
    """

    @classmethod
    def capabilities(cls, place: Place) -> Capabilities:
        """See `Store.capabilities`."""
        return Capabilities(concurrency=_CONCURRENT)

    @classmethod
    def check(cls, place: Place) -> None:
        """See `Store.check`."""
        import gcsfs  # noqa: F401

        if not place.host:
            raise ConfigError(f"{place.url}: name a bucket: gs://bucket/run-17", url=place.url)
        flag(place, "anon")
        flag(place, "requester_pays")

    def __init__(self, place: Place) -> None:
        super().__init__(place)
        from gcsfs import GCSFileSystem

        options = place.options
        self._fs = GCSFileSystem(
            **({"project": options["project"]} if "project" in options else {}),
            token="anon" if flag(place, "anon") else None,
            requester_pays=flag(place, "requester_pays"),
            endpoint_url=options.get("endpoint_url"),
            use_listings_cache=False,
            skip_instance_cache=True,
        )
        self._run = AsyncCalls(self._fs.loop)
        self._bucket = f"/storage/v1/b/{quote(place.host, safe='')}/o"

    async def ask(
        self, method: str, path: str, *, data: bytes | None = None, headers: dict[str, str] | None = None, **params: str
    ) -> _Answer:
        """One request. `path` may be a whole URL.

        Raises:
            HttpAnswerError: the answer is a no.
        """
        from aiohttp import ClientTimeout
        from yarl import URL

        fs = self._fs
        await fs._set_session()
        url = path if path.startswith("http") else f"{fs._location}{path}"
        if query := urlencode(fs._get_params(params)):
            url += f"{'&' if '?' in url else '?'}{query}"
        async with fs.session.request(
            method,
            URL(url, encoded=True),  # quoted already; a second opinion on that would change names
            data=data,
            headers=fs._get_headers(headers),
            timeout=ClientTimeout(total=None, sock_connect=_CONNECT_S, sock_read=_READ_S),
            allow_redirects=False,  # 308 is no redirect here
        ) as response:
            body = await response.read()
            if response.status >= 400:
                raise HttpAnswerError(response.status, "", _message(body))
            return _Answer(response.status, response.headers, body)

    def call(self, method: str, path: str, *, data: bytes | None = None, **more: Any) -> _Answer:
        """`ask`, and wait for the answer."""
        return self._run(self.ask(method, path, data=data, **more), len(data or b""))

    def _object(self, name: str) -> str:
        return f"{self._bucket}/{quote(name, safe='')}"

    def put(self, name: str, data: bytes, *, if_absent: bool) -> float | None:
        """See `Store.put`."""
        create = {"ifGenerationMatch": "0"} if if_absent else {}
        mark = secrets.token_hex(16)  # is in none of our objects
        head = "Content-Type: application/json; charset=UTF-8\r\n\r\n" + json.dumps({"name": name})
        body = f"--{mark}\r\n{head}\r\n--{mark}\r\nContent-Type: {_BYTES}\r\n\r\n".encode()
        body += data + f"\r\n--{mark}--\r\n".encode()
        kind = {"Content-Type": f"multipart/related; boundary={mark}"}
        with self._bucket_exists():
            answer = self.call(
                "POST", f"/upload{self._bucket}", data=body, headers=kind, uploadType="multipart", **create
            )
        return _seconds(json.loads(answer.body))

    def upload(self, name: str) -> Upload:
        """See `Store.upload`."""
        with self._bucket_exists():
            answer = self.call(
                "POST", f"/upload{self._bucket}", data=b"", uploadType="resumable", name=name, ifGenerationMatch="0"
            )
        return _Resumable(self, answer.headers["Location"])

    def read(self, name: str, ranges: Sequence[Range]) -> None:
        """See `Store.read`."""

        def job(offset: int, buffer: memoryview) -> Callable[[], Coroutine[Any, Any, None]]:
            return lambda: self._fetch(name, offset, buffer)

        wanted = sum(len(buffer) for _, buffer in ranges)
        self._run(concurrently((job(*piece) for piece in pieces(ranges)), _CONCURRENT), wanted)

    async def _fetch(self, name: str, offset: int, buffer: memoryview) -> None:
        asked = {"Range": f"bytes={offset}-{offset + len(buffer) - 1}"}
        answer = await self.ask("GET", f"/download{self._object(name)}", headers=asked, alt="media")
        if answer.status != 206:
            raise StorageError("the store ignores the range of a read, and sends something else")
        copy_into(buffer, answer.body, offset)

    def get(self, name: str) -> bytes:
        """See `Store.get`."""
        return self.call("GET", f"/download{self._object(name)}", alt="media").body

    def stat(self, name: str) -> Listed | None:
        """See `Store.stat`. By a listing: for an object of a missing bucket the answer would be the same "no"."""
        with self._bucket_exists():
            page = json.loads(self.call("GET", self._bucket, prefix=name, maxResults="1").body)
        return next((_listed(item) for item in page.get("items", []) if item["name"] == name), None)

    def list(self, prefix: str) -> Iterator[Listed]:
        """See `Store.list`."""
        more: dict[str, Any] = {}
        while True:
            with self._bucket_exists():
                page = json.loads(self.call("GET", self._bucket, prefix=prefix, **more).body)
            yield from map(_listed, page.get("items", []))
            if not page.get("nextPageToken"):
                return
            more = {"pageToken": page["nextPageToken"]}

    def delete(self, names: Sequence[str]) -> None:
        """See `Store.delete`."""

        async def gone(name: str) -> None:
            try:
                await self.ask("DELETE", self._object(name))
            except HttpAnswerError as error:
                if error.status != 404:
                    raise

        def job(name: str) -> Callable[[], Coroutine[Any, Any, None]]:
            return lambda: gone(name)

        for at in range(0, len(names), 1000):  # each batch has its own time limit
            self._run(concurrently(map(job, names[at : at + 1000]), _CONCURRENT))

    def close(self) -> None:
        """See `Store.close`."""
        session = self._fs.session
        if session is not None:
            self._run(session.close())

    @staticmethod
    def _bucket_exists() -> _NoBucket:
        return _NoBucket()


class _NoBucket:
    """Here "not found" means the bucket: not the same as no object, for a run in it must not look new."""

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: object, error: object, trace: object) -> None:
        if isinstance(error, HttpAnswerError) and error.status == 404:
            raise StorageError(f"there is no such bucket ({error.text})") from error


class _Resumable(Upload):
    def __init__(self, store: GcsStore, where: str) -> None:
        self._store, self._where, self._sent = store, where, 0

    def part(self, data: bytearray) -> None:
        self._send(memoryview(data), "*")

    def publish(self, data: bytearray) -> None:
        total = self._sent + len(data)
        if self._send(memoryview(data), str(total)) == 308:
            raise StorageError(f"the store did not take all of {total} bytes")

    def _send(self, view: memoryview, total: str) -> int:
        while True:
            end = self._sent + len(view)
            part = f"{self._sent}-{end - 1}" if len(view) else "*"
            answer = self._store.call(
                "PUT", self._where, data=bytes(view), headers={"Content-Range": f"bytes {part}/{total}"}
            )
            if answer.status != 308:
                self._sent = end
                return answer.status
            kept = answer.headers.get("Range")  # it may keep less than it was sent
            taken = (int(kept.rpartition("-")[2]) + 1 if kept else 0) - self._sent
            if not 0 <= taken <= len(view):
                raise IntegrityError(f"the store says that it has bytes {kept}, of {end}")
            self._sent += taken
            if taken == len(view) or not taken:
                if taken < len(view):
                    raise StorageError("the store takes none of the bytes that it is sent")
                return answer.status
            view = view[taken:]

    def abort(self) -> None:
        with suppress(HttpAnswerError):  # 499 is the right answer
            self._store.call("DELETE", self._where)


def _listed(item: dict[str, Any]) -> Listed:
    return Listed(item["name"], int(item["size"]), _seconds(item))


def _seconds(item: dict[str, Any]) -> float | None:
    made = item.get("timeCreated")
    return datetime.fromisoformat(_with_micros(made)).timestamp() if made else None


def _with_micros(stamp: str) -> str:
    """RFC 3339 as Python 3.10 reads it: six digits of a second, no Z."""
    whole, _, rest = stamp.rstrip("Z").partition(".")
    digits = "".join(char for char in rest[:9] if char.isdigit())
    return f"{whole[:19]}.{digits:0<6.6}+00:00"


def _message(body: bytes) -> str:
    try:
        error = json.loads(body)["error"]
        return str(error["message"] if isinstance(error, dict) else error)
    except (ValueError, KeyError, TypeError):
        return body[:200].decode("utf-8", "replace")
