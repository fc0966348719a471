"""A tier for tierstate that keeps everything in one SQLite file."""

from __future__ import annotations

import socket
import sqlite3
import threading
import time
import uuid
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import numpy as np

from tierstate import AccessDenied, AlreadyExists, Damaged, NotFound, Tier, TierError, TierFull, TierUnavailable
from tierstate.manifest.chunk import Buffer, view
from tierstate.tiers.base import ObjectWriter, Range, Release, Traits, check_key
from tierstate.tiers.units import Seconds, Size

PIECE = 1 << 20
"""Bytes of one row: a range is read without the rest of its object, and no row is long."""

ABANDONED = 24 * 3600
"""Seconds after which what an unfinished writer has staged is taken for a dead one's."""

SCHEMA = """
CREATE TABLE IF NOT EXISTS uploads (id TEXT PRIMARY KEY, begun REAL NOT NULL) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS pieces (id TEXT, number INTEGER, data BLOB NOT NULL, PRIMARY KEY (id, number));
CREATE TABLE IF NOT EXISTS objects (key TEXT PRIMARY KEY, id TEXT NOT NULL, size INTEGER NOT NULL) WITHOUT ROWID;
"""

ERRORS: dict[int, tuple[type[TierError], str]] = {
    sqlite3.SQLITE_FULL: (TierFull, "free some space, raise 'capacity', or keep fewer versions"),
    sqlite3.SQLITE_READONLY: (AccessDenied, "make the file and its folder writable"),
    sqlite3.SQLITE_PERM: (AccessDenied, "make the file and its folder writable"),
    sqlite3.SQLITE_CANTOPEN: (AccessDenied, "give a file in a folder that exists and is writable"),
    sqlite3.SQLITE_BUSY: (TierUnavailable, "another process holds the file's lock; try again, or raise 'timeout'"),
    sqlite3.SQLITE_LOCKED: (TierUnavailable, "another process holds the file's lock; try again, or raise 'timeout'"),
    sqlite3.SQLITE_IOERR: (TierUnavailable, "look at the disk"),
    sqlite3.SQLITE_NOTADB: (TierError, "give the path of a SQLite file, or of one to be made"),
    sqlite3.SQLITE_CORRUPT: (TierError, "restore the file from a copy"),
}


class SqliteTier(Tier):
    """Objects in one SQLite file, on a disk of this host.

    The keyword-only parameters, with their annotations, are the keys that a policy may have beside ``type: sqlite``.

    Args:
        path: the file; made when first used.
        capacity: bytes that the file may take; None for as many as the disk has.
        timeout: how long to wait for another process that writes.
    """

    persistent = True

    def __init__(self, *, path: Path, capacity: Size | None = None, timeout: Seconds = 30.0) -> None:
        self.path = Path(path).absolute()
        self._capacity, self._timeout = capacity, timeout
        # One connection, one thread at a time: SQLite has one writer at a time anyway.
        self._lock = threading.RLock()
        self._connection: sqlite3.Connection | None = None

    @property
    def traits(self) -> Traits:
        return Traits(
            persistent=True,
            shared="host",
            failure_domain=f"host:{socket.gethostname()}",
            part_size=PIECE,
            parallelism=1,
            capacity=self._capacity,
            conditional_create=True,
        )

    def put(self, key: str, data: Buffer) -> None:
        with self.writer(key) as writer:
            writer.append(data)

    def read(self, key: str, ranges: Sequence[Range]) -> None:
        check_key(key)
        with self.transaction(key) as db:
            name, size = self._find(db, key)
            for offset, out in ranges:
                if offset < 0 or offset + out.numel() > size:
                    raise Damaged(f"{self.name}: {key}: has {size} bytes, {out.numel()} from {offset} were asked for")
            for offset, out in ranges:
                self._fill(db, key, name, offset, out)

    def _fill(self, db: sqlite3.Connection, key: str, name: str, offset: int, out: Buffer) -> None:
        into, done = out.numpy(), 0
        while done < len(into):
            number, skip = divmod(offset + done, PIECE)
            wanted = min(PIECE - skip, len(into) - done)
            query = "SELECT substr(data, ?, ?) FROM pieces WHERE id = ? AND number = ?"
            row = db.execute(query, (skip + 1, wanted, name, number)).fetchone()
            if row is None or len(row[0]) != wanted:
                raise Damaged(f"{self.name}: {key}: piece {number} is missing or short")
            np.copyto(into[done : done + wanted], np.frombuffer(row[0], np.uint8))
            done += wanted

    def list(self, prefix: str) -> Iterator[str]:
        with self.transaction(prefix) as db:
            query = "SELECT key FROM objects WHERE key >= ?1 AND substr(key, 1, length(?1)) = ?1 ORDER BY key"
            return iter([key for (key,) in db.execute(query, (prefix,))])

    def size(self, key: str) -> int:
        check_key(key)
        with self.transaction(key) as db:
            return self._find(db, key)[1]

    def _find(self, db: sqlite3.Connection, key: str) -> tuple[str, int]:
        row = db.execute("SELECT id, size FROM objects WHERE key = ?", (key,)).fetchone()
        if row is None:
            raise NotFound(f"{self.name}: {key}: there is no such object", tier=self.name, key=key)
        return row[0], row[1]

    def delete(self, key: str) -> None:
        check_key(key)
        with self.transaction(key, write=True) as db:
            db.execute("DELETE FROM pieces WHERE id = (SELECT id FROM objects WHERE key = ?)", (key,))
            db.execute("DELETE FROM objects WHERE key = ?", (key,))

    def writer(self, key: str, size_hint: int | None = None) -> SqliteWriter:
        check_key(key)
        with self.transaction(key) as db:
            if db.execute("SELECT 1 FROM objects WHERE key = ?", (key,)).fetchone():
                raise AlreadyExists(f"{self.name}: {key}: exists already", tier=self.name, key=key)
        return SqliteWriter(self, key)

    def close(self) -> None:
        with self._lock:
            if self._connection is not None:
                self._connection.close()
                self._connection = None

    @contextmanager
    def transaction(self, key: str, *, write: bool = False) -> Iterator[sqlite3.Connection]:
        """A transaction: all of it takes effect, or nothing. SQLite's errors become the tier's."""
        try:
            with self._lock:
                db = self._open()
                db.execute("BEGIN IMMEDIATE" if write else "BEGIN")
                try:
                    yield db
                    db.execute("COMMIT")
                except BaseException:
                    if db.in_transaction:
                        db.execute("ROLLBACK")
                    raise
        except sqlite3.Error as error:
            # The low byte is the error, the others say which kind of it.
            code = getattr(error, "sqlite_errorcode", 0) & 0xFF
            kind, remedy = ERRORS.get(code, (TierError, "see SQLite's documentation"))
            raise kind(f"{self.name}: {key}: {self.path}: {error}; {remedy}", tier=self.name, key=key) from error

    def _open(self) -> sqlite3.Connection:
        if self._connection is None:
            db = sqlite3.connect(self.path, timeout=self._timeout, isolation_level=None, check_same_thread=False)
            try:
                self._prepare(db)
            except BaseException:
                db.close()
                raise
            self._connection = db
        return self._connection

    def _prepare(self, db: sqlite3.Connection) -> None:
        # Readers go on while somebody writes; a commit returns once the log is on the disk.
        db.execute("PRAGMA journal_mode = WAL")
        db.execute("PRAGMA synchronous = FULL")
        if self._capacity is not None:
            (page,) = db.execute("PRAGMA page_size").fetchone()
            db.execute(f"PRAGMA max_page_count = {max(1, self._capacity // page)}")
        db.executescript(SCHEMA)
        # By this host's clock, which is the only one that has the file.
        db.execute("DELETE FROM uploads WHERE begun < ?", (time.time() - ABANDONED,))
        db.execute("DELETE FROM pieces WHERE id NOT IN (SELECT id FROM objects) AND id NOT IN (SELECT id FROM uploads)")


class SqliteWriter(ObjectWriter):
    """Stages pieces under an id that nothing names, and names them when closed. After an error it has given up."""

    def __init__(self, tier: SqliteTier, key: str) -> None:
        self._tier, self._key, self._id = tier, key, uuid.uuid4().hex
        self._number = self._size = 0
        self._rest = bytearray()
        self._open, self._begun = True, False
        self._failure: BaseException | None = None

    def append(self, buffer: Buffer, release: Release | None = None) -> None:
        try:
            with self._giving_up():
                self._rest += view(buffer)
                self._size += buffer.numel()
                if len(self._rest) >= PIECE:
                    with self._tier.transaction(self._key, write=True) as db:
                        self._stage(db, len(self._rest) - len(self._rest) % PIECE)
        finally:
            # The bytes are copied: the caller may have its buffer back.
            if release is not None:
                release()

    def close(self) -> None:
        if self._failure is not None:
            raise self._failure
        if not self._open:
            return
        with self._giving_up(), self._tier.transaction(self._key, write=True) as db:
            self._stage(db, len(self._rest))
            try:
                db.execute("INSERT INTO objects VALUES (?, ?, ?)", (self._key, self._id, self._size))
            except sqlite3.IntegrityError as error:
                name = self._tier.name
                raise AlreadyExists(f"{name}: {self._key}: exists already", tier=name, key=self._key) from error
            if not db.execute("DELETE FROM uploads WHERE id = ?", (self._id,)).rowcount:
                raise TierUnavailable(f"{self._tier.name}: {self._key}: took so long that it was taken for abandoned")
        self._open = False

    def abort(self) -> None:
        if self._open:
            self._open = False
            self._discard()

    def _stage(self, db: sqlite3.Connection, nbytes: int) -> None:
        """Write so many bytes, as pieces; only the last one of an object may be short."""
        if not self._begun:
            db.execute("INSERT INTO uploads VALUES (?, ?)", (self._id, time.time()))
            self._begun = True
        for at in range(0, nbytes, PIECE):
            piece = bytes(self._rest[at : min(at + PIECE, nbytes)])
            db.execute("INSERT INTO pieces VALUES (?, ?, ?)", (self._id, self._number, piece))
            self._number += 1
        del self._rest[:nbytes]

    @contextmanager
    def _giving_up(self) -> Iterator[None]:
        if not self._open:
            raise ValueError(f"{self._tier.name}: {self._key}: the writer is closed or was given up")
        try:
            yield
        except BaseException as error:
            self._open, self._failure = False, error
            self._discard()
            raise

    def _discard(self) -> None:
        self._rest = bytearray()
        if self._begun:
            with self._tier.transaction(self._key, write=True) as db:
                db.execute("DELETE FROM pieces WHERE id = ?", (self._id,))
                db.execute("DELETE FROM uploads WHERE id = ?", (self._id,))
