"""Objects as rows of one SQLite file: ``sqlite:///abs/path.db``."""

from __future__ import annotations

import io
import sqlite3
from collections.abc import Iterable, Iterator, Sequence
from contextlib import closing, contextmanager
from pathlib import Path

from resilio import errors
from resilio.storage import Buffer, Capabilities, ObjectInfo, Storage, Writer, byte_view, check_key, check_prefix

TABLE = "CREATE TABLE IF NOT EXISTS objects (key TEXT PRIMARY KEY, data BLOB NOT NULL)"


class SqliteStorage(Storage):
    """Each object is a row; a create is an INSERT, which has exactly one winner."""

    def __init__(self, path: str) -> None:
        if not Path(path).is_absolute():
            raise errors.ConfigError(f"sqlite://{path}: give an absolute path, as in sqlite:///data/run-17.db")
        self.path = path
        self.url = f"sqlite://{path}"
        self.capabilities = Capabilities(concurrency=1)  # SQLite has one writer at a time

    @contextmanager
    def _db(self, key: str, *, write: bool = False) -> Iterator[sqlite3.Connection]:
        # A connection for each call: nothing to pickle, nothing that threads share, nothing that crosses a fork.
        there = write or Path(self.path).exists()  # reading a run that is not there finds nothing, and makes nothing
        try:
            with closing(sqlite3.connect(self.path if there else ":memory:", timeout=60)) as db, db:
                db.execute(TABLE)
                yield db
        except sqlite3.Error as error:  # translated at the border, so that retries and messages fit
            text = str(error)
            kind = errors.TransientError if "locked" in text else errors.StorageError
            kind = errors.OutOfSpaceError if "full" in text else kind
            raise kind(f"{self.url}: {key!r}: {text}", key=key, url=self.url) from error

    def put(self, key: str, data: Buffer, *, if_absent: bool = False) -> ObjectInfo:
        """See `Storage.put`."""
        check_key(key)
        view = byte_view(data)  # bytes, whatever its items are
        insert = "INSERT" if if_absent else "INSERT OR REPLACE"
        with self._db(key, write=True) as db:
            try:
                db.execute(f"{insert} INTO objects VALUES (?, ?)", (key, view))
            except sqlite3.IntegrityError as error:
                message = f"{self.url}: there is {key!r} already"
                raise errors.AlreadyExistsError(message, key=key, url=self.url) from error
        return ObjectInfo(key, len(view))

    @contextmanager
    def writer(self, key: str, *, size_hint: int | None = None) -> Iterator[Writer]:
        """See `Storage.writer`."""
        check_key(key)
        out = io.BytesIO()  # one for large objects would pass on what it is given
        yield out  # an exception in the block comes up here, and nothing is published
        self.put(key, out.getbuffer(), if_absent=True)

    def read_into(self, key: str, ranges: Sequence[tuple[int, memoryview]]) -> None:
        """See `Storage.read_into`."""
        with self._db(check_key(key)) as db:
            for offset, buffer in ranges:
                sql = "SELECT substr(data, ?, ?) FROM objects WHERE key = ?"
                row = db.execute(sql, (offset + 1, len(buffer), key)).fetchone()
                if row is None:
                    raise errors.NotFoundError(f"{self.url}: no object {key!r}", key=key, url=self.url)
                found = row[0] or b""  # NULL where there is nothing
                if len(found) != len(buffer):  # never a short answer
                    raise errors.IntegrityError(f"{self.url}: {key!r} ends too early", key=key, url=self.url)
                buffer[:] = found

    def list(self, prefix: str) -> Iterator[ObjectInfo]:
        """See `Storage.list`."""
        check_prefix(prefix)
        sql = "SELECT key, length(data) FROM objects WHERE substr(key, 1, ?) = ? ORDER BY key"  # LIKE has patterns
        with self._db(prefix) as db:
            return iter([ObjectInfo(*row) for row in db.execute(sql, (len(prefix), prefix))])

    def delete(self, keys: Iterable[str]) -> None:
        """See `Storage.delete`."""
        doomed = [(check_key(key),) for key in keys]  # all are looked at before the first goes
        with self._db("", write=True) as db:
            db.executemany("DELETE FROM objects WHERE key = ?", doomed)
