"""The SQLite file of a store: its schema, its durability guarantees and its errors.

All changes are written in transactions to a write-ahead log, which is synced before a call returns (``synchronous=FULL``).
Deleted data is overwritten (``secure_delete``). SQLite keeps no checksums, so every record here carries its own, and a bit
that flips on the disk is detected when the record is read.
"""

from __future__ import annotations

import json
import logging
import os
import shutil
import sqlite3
import threading
import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

from torchlssvm.canonical_json import loads
from torchlssvm.errors import StoreBusyError, StoreDiskError, StoreError
from torchlssvm.files import replacement
from torchlssvm.schema import check
from torchlssvm.untrusted import check_regular

log = logging.getLogger("torchlssvm.store")

WITNESS_FILE = "acknowledged"
"""File of a store with the last position that was acknowledged to a caller."""

NOTE_PREFIX = "note/"
"""Names of records that are notes of callers begin with this."""

NETWORK_NOTE = "network"
"""The note that describes the network which the features come from."""

SETTINGS_NOTE = "cli"
"""The note from which the command line loads the network: its name, its weights, and options of ``attach``."""

DEFAULT_WEIGHTS = "default"
"""Stands for the published weights in ``SETTINGS_NOTE``, where another value is a file or folder."""

ADAPTED_NOTE = "adapted"
"""The note with the ids and subjects of the samples that the network was trained on."""

WAITING_NOTE_PREFIX = "waiting/"
"""Names of the notes of events that wait for samples, or watch their subject, begin with this."""

STORE_APPLICATION_ID = 0x746C7376
"""The letters "tlsv": they mark an SQLite file as that of a store."""

FORMAT = 2
"""Format number of the file, kept as SQLite's user_version. Files with another number are refused."""

PRAGMAS = {
    "synchronous": "FULL",
    "secure_delete": "ON",
    "foreign_keys": "OFF",
    "trusted_schema": "OFF",
    "wal_autocheckpoint": "4096",
}

STORE_TABLES = """
CREATE TABLE meta (name TEXT PRIMARY KEY, value TEXT NOT NULL, checksum INTEGER NOT NULL) WITHOUT ROWID;
CREATE TABLE samples (
    seq INTEGER PRIMARY KEY,
    id TEXT NOT NULL UNIQUE,
    subject TEXT,
    label INTEGER,
    target BLOB,
    position INTEGER NOT NULL,
    added REAL NOT NULL,
    nonce BLOB NOT NULL,
    checksum INTEGER NOT NULL,
    features BLOB NOT NULL
);
CREATE INDEX by_subject ON samples (subject) WHERE subject IS NOT NULL;
CREATE TABLE subjects (subject TEXT PRIMARY KEY, samples INTEGER NOT NULL) WITHOUT ROWID;
CREATE TABLE journal (
    position INTEGER PRIMARY KEY,
    event_id TEXT NOT NULL UNIQUE,
    kind TEXT NOT NULL,
    time TEXT NOT NULL,
    samples INTEGER NOT NULL,
    commitments BLOB NOT NULL,
    mac BLOB,
    chain BLOB NOT NULL
);
"""


def fields(**kinds: Any) -> dict[str, Any]:
    """Schema of an object with these fields, each described by a type or a schema. Additional fields are allowed."""
    rules = {name: kind if isinstance(kind, dict) else {"type": kind} for name, kind in kinds.items()}
    return {"type": "object", "required": list(rules), "properties": rules}


HEX = {"type": "string", "pattern": "^([0-9a-fA-F]{2})*$"}
OPTIONAL_TEXT = ["string", "null"]
TEXTS = {"type": "array", "items": {"type": "string"}}
RECORDS: dict[str, dict[str, Any]] = {
    "state": fields(position="integer", digest=OPTIONAL_TEXT, samples="integer", chain=HEX),
    "head": fields(type="string"),
    "rows": fields(
        features="integer", targets="integer", plain="boolean", grid=["array", "null"], target_grid=["array", "null"]
    ),
    "opening": fields(key={"type": "string", "pattern": "^[0-9a-f]{64}$"}),
    "suppression": fields(path="string", list="string", head=HEX, clean="string"),
    "compacted": {"type": "integer"},
    "created": {"type": "string"},
    "fingerprint": {"type": "string"},
    "chosen": {"type": "object"},
    "classes": TEXTS,
    "calibrate": fields(method=OPTIONAL_TEXT, groups=OPTIONAL_TEXT),
    "checkpoints": {"type": "object", "additionalProperties": {"type": "integer"}},
    "request": fields(
        id="string", received="string", due={"type": "string", "pattern": r"^\d{4}-\d\d-\d\d$"}, reason="string",
        operator="string", answer="string", events=TEXTS,
        steps={"type": "object", "additionalProperties": {"type": "string"}},
        names={"type": "array", "items": fields(kind="string", name=OPTIONAL_TEXT, nonce=OPTIONAL_TEXT, commitment=HEX)},
    ),
    "receipt": fields(request=OPTIONAL_TEXT, position="integer", ids=TEXTS, nonces=TEXTS, written="boolean"),
}  # fmt: skip
"""Schemas of the records of the meta table, by the part of their name before a slash; notes of callers may be any JSON."""

NO_DEFAULT: Any = object()
"""Stands for "no default given" in :meth:`Database.get`, where None is a valid default."""

BUSY_CODES, DISK_CODES, INTERRUPT_CODE = (5, 6), (8, 10, 13, 14), 9
"""SQLite's primary result codes: BUSY and LOCKED; READONLY, IOERR, FULL and CANTOPEN; INTERRUPT (a query was stopped)."""

VARIABLES_PER_QUERY = 500
"""Values asked for in one query (SQLite allows 999 variables in old versions)."""


def checksum(values: tuple[Any, ...], blob: Any = b"") -> int:
    """CRC-32 of a record, computed over the ASCII form of its values in Python, followed by the bytes of a large value.

    The checksum detects flipped bits. Deliberate changes are detected by the digest, the commitments and the hash chain.
    """
    return zlib.crc32(blob, zlib.crc32(ascii(values).encode()))


def rows_in(query: Callable[[str, Sequence[Any]], Iterable[Any]], sql: str, wanted: Sequence[Any]) -> Iterator[Any]:
    """Yield the rows of a query that ends with the name of a column, where this column has one of the wanted values."""
    for start in range(0, len(wanted), VARIABLES_PER_QUERY):
        part = wanted[start : start + VARIABLES_PER_QUERY]
        yield from query(f"{sql} IN ({','.join('?' * len(part))})", part)


def store_error(error: sqlite3.Error, path: Path, what: str) -> StoreError:
    """Convert an SQLite error to a StoreError according to its result code. ``what`` is the expected kind of file."""
    code = getattr(error, "sqlite_errorcode", 0) & 0xFF  # the primary code; errors of sqlite3 itself have no code
    if code in BUSY_CODES:
        return StoreBusyError(f"{path} is in use by another process or reader ({error}); try again")
    if code in DISK_CODES:
        return StoreDiskError(f"{path}: {error}")
    if code == INTERRUPT_CODE:
        return StoreError(f"{path}: it is damaged: a query takes more steps than its size explains")
    if isinstance(error, sqlite3.OperationalError):
        return StoreError(f"{path}: {error}")
    return StoreError(f"{path} is damaged or no {what}: {error}")


class Database:
    """A connection to the file of one store. Every SQLite error is raised as a StoreError that names the file.

    Several threads may share a connection, because each statement, transaction and view holds one lock. If an interrupt left a
    transaction open, it is rolled back when the next one begins. Nothing else in this process may open the file at the same
    time: closing a second handle would release the locks that this process holds on the file.
    """

    def __init__(self, path: Path, create: bool, timeout: float = 30.0, readonly: bool = False):
        self.path = path
        self.lock = threading.RLock()
        self.closed = False
        self._timeout, self._process = timeout, os.getpid()
        self._millions, self._reads_only = 0, readonly  # SQLite's steps in the current query
        self._place: list[tuple[int, int]] | None = None  # the identity of a writable file and of its log
        self._at_rest: list[tuple[int, ...]] | None = None  # the state of a file that is read without locks
        self._check_files(create)
        location = path.absolute().as_uri()
        if not readonly:
            self._break_links()
            self._connect(f"{location}?mode={'rwc' if create else 'rw'}", create)
            self._place = self._found()
            return
        try:
            self._connect(f"{location}?mode=rw")
        except StoreDiskError:  # the file may be on a read-only medium or in a read-only folder
            self._connect_at_rest(location)
        self.connection.execute("PRAGMA query_only = ON")

    def _connect(self, uri: str, create: bool = False) -> None:
        with self.errors():
            self.connection = sqlite3.connect(
                uri, uri=True, timeout=self._timeout, isolation_level=None, check_same_thread=False
            )
        try:
            with self.errors():
                if self._reads_only:
                    self._limit()
                if create:
                    self._create()
                self._check()
                for name, value in PRAGMAS.items():
                    self.connection.execute(f"PRAGMA {name} = {value}")
        except BaseException:
            self.connection.close()
            raise

    def _connect_at_rest(self, location: str) -> None:
        """Read a file that cannot be locked. Its log cannot be read without a lock, so it must be empty."""
        self._at_rest = self._states()
        if any(p.exists() and p.stat().st_size for p in self._logs()):
            raise StoreDiskError(
                f"{self.path} cannot be written, and its log is not empty: copy the folder to a place that can be written, and "
                "open the copy"
            )
        self._connect(f"{location}?mode=ro&immutable=1")

    def _logs(self) -> list[Path]:
        return [self.path.with_name(self.path.name + suffix) for suffix in ("-wal", "-journal")]

    def _states(self) -> list[tuple[int, ...]]:
        found = [p.stat() for p in (self.path, *self._logs()) if p.exists()]
        return [(s.st_dev, s.st_ino, s.st_size, s.st_mtime_ns) for s in found]

    def check_at_rest(self) -> None:
        """Raise StoreBusyError if a file that is read without locks has changed since it was opened."""
        if self._at_rest is not None and self._at_rest != self._states():
            raise StoreBusyError(
                f"{self.path} was changed while it was read, and cannot be locked from here: try again"
            )

    def _check_files(self, create: bool) -> None:
        """Refuse irregular files, and a file with a rollback journal: SQLite would delete the files that the journal names."""
        for suffix in ("", "-wal", "-shm", "-journal"):  # the files that SQLite keeps beside the database
            try:
                check_regular(f"{self.path}{suffix}")
            except ValueError as error:
                raise StoreError(f"{error}: this is not a store") from None
        if not create and Path(f"{self.path}-journal").exists():
            raise StoreError(
                f"{self.path} has a rollback journal: it was changed by another program, or never finished"
            )

    def _break_links(self) -> None:
        """Copy files that have several names (hard links), because two writers would overwrite each other's events."""
        index = Path(f"{self.path}-shm")
        if index.exists() and index.stat().st_nlink > 1:
            index.unlink()  # SQLite recreates the index from the log
        for file in (self.path, *self._logs(), self.path.with_name(WITNESS_FILE)):
            if not file.exists() or file.stat().st_nlink < 2:
                continue
            before = None
            try:
                with replacement(file) as own:
                    while before != file.stat().st_mtime_ns:  # copy again if the file was written in the meantime
                        before = file.stat().st_mtime_ns
                        shutil.copy2(file, own)
            except OSError as error:
                raise StoreDiskError(
                    f"{file} is a hard link to another file, and cannot be copied to a file of its own: {error}"
                ) from error
            log.warning("%s was a hard link to another file; it is now an independent copy", file)

    def _limit(self) -> None:
        """Limit the steps of a query and the length of a value according to the size of the file.

        Damaged or crafted pages may form a cycle. A query is therefore stopped after 50 million steps of SQLite's virtual
        machine (2 seconds) plus 100 steps for each byte, which is more than a file of that size can need.
        """
        sizes = [p.stat() for p in (self.path, self._logs()[0]) if p.exists()]
        allocated = sum(getattr(s, "st_blocks", s.st_size // 512 + 1) * 512 for s in sizes)
        millions = 50 + allocated // 10_000

        def too_many() -> bool:
            self._millions += 1
            return self._millions > millions

        self.connection.set_progress_handler(too_many, 1_000_000)
        longest = min(10**9, 2**20 + sum(s.st_size for s in sizes))
        self.connection.setlimit(sqlite3.SQLITE_LIMIT_LENGTH, longest)

    def _create(self) -> None:
        if self.connection.execute("SELECT count(*) FROM sqlite_master").fetchone()[0]:
            return
        self.connection.execute("PRAGMA journal_mode = WAL")
        self.connection.execute("BEGIN IMMEDIATE")
        made = self.connection.execute("SELECT count(*) FROM sqlite_master").fetchone()[0]
        if not made:  # no other process was faster
            for statement in STORE_TABLES.split(";"):
                self.connection.execute(statement)
            self.connection.execute(f"PRAGMA application_id = {STORE_APPLICATION_ID}")
            self.connection.execute(f"PRAGMA user_version = {FORMAT}")
        self.connection.execute("COMMIT")

    def _check(self) -> None:
        application = self.connection.execute("PRAGMA application_id").fetchone()[0]
        version = self.connection.execute("PRAGMA user_version").fetchone()[0]
        if application != STORE_APPLICATION_ID:
            raise StoreError(f"{self.path} is an SQLite file of another program (application id {application:#x})")
        if version != FORMAT:
            raise StoreError(
                f"{self.path} has format {version}; this library reads format {FORMAT}. Use the library that wrote it."
            )
        found = {r[0] for r in self.connection.execute("SELECT sql FROM sqlite_master WHERE sql IS NOT NULL")}
        if found != {statement.strip() for statement in STORE_TABLES.split(";") if statement.strip()}:
            raise StoreError(
                f"{self.path} is damaged or was changed by another program: its tables are not those of a store"
            )
        mode = self.connection.execute("PRAGMA journal_mode").fetchone()[0]
        if mode != "wal" and self._at_rest is None:  # a file at rest has neither a log nor a mode
            raise StoreError(
                f"{self.path} is not in write-ahead mode but in {mode!r}: it was changed by another program"
            )

    @contextmanager
    def errors(self) -> Iterator[None]:
        """Raise SQLite's errors as StoreErrors."""
        try:
            yield
        except sqlite3.Error as error:
            raise store_error(error, self.path, "store") from error
        except (UnicodeDecodeError, OverflowError) as error:  # damaged text, or a number beyond 64 bits
            raise StoreError(f"{self.path} is damaged or not a store: {error}") from error

    def damaged(self, what: str) -> StoreError:
        """The error for a damaged file."""
        return StoreError(f"{self.path} is damaged: {what}")

    @property
    def usable(self) -> bool:
        """False after close, and in a process that was forked after the connection was opened."""
        return not self.closed and os.getpid() == self._process

    # -- statements ----------------------------------------------------------------------------------------------------

    def all(self, sql: str, values: Iterable[Any] = ()) -> list[tuple[Any, ...]]:
        """Return all rows of a query. No cursor stays open, so a reader never blocks the truncation of the log."""
        with self.held(), self.errors():
            self._millions = 0
            return self.connection.execute(sql, tuple(values)).fetchall()

    def one(self, sql: str, values: Iterable[Any] = ()) -> tuple[Any, ...] | None:
        """The first row, or None."""
        rows = self.all(sql, values)
        return rows[0] if rows else None

    def run(self, sql: str, values: Iterable[Any] = ()) -> None:
        """Execute a statement that returns no rows."""
        self.all(sql, values)

    def many(self, sql: str, values: Iterable[Iterable[Any]]) -> None:
        """Execute a statement for each of many rows."""
        with self.held(), self.errors():
            self.connection.executemany(sql, values)  # type: ignore[arg-type]

    # -- transactions --------------------------------------------------------------------------------------------------

    @contextmanager
    def held(self) -> Iterator[None]:
        """Exclude other threads. The outermost call rolls back a transaction that an interrupt left open."""
        if os.getpid() != self._process:
            raise StoreError(f"{self.path} was opened before a fork: open it again in this process")
        first = not self.lock._is_owned()  # type: ignore[attr-defined]
        with self.lock:
            if self.closed:
                raise StoreError(f"{self.path}: the store is closed")
            if first:
                self.roll_back()
            try:
                yield
            finally:
                if first:
                    self.roll_back()

    @contextmanager
    def view(self) -> Iterator[None]:
        """Read one consistent state of the store, even while others write. A transaction sees its own changes."""
        with self.held():
            if self.connection.in_transaction:
                yield
                return
            self.run("BEGIN")
            try:
                yield
            except StoreError:
                self.check_at_rest()
                raise
            finally:
                self.roll_back()
            self.check_at_rest()

    @contextmanager
    def transaction(self) -> Iterator[None]:
        """Take the write lock. All changes inside are written together or not at all."""
        with self.held():
            self.begin()
            try:
                yield
                self.commit()
            except BaseException:
                self.roll_back()
                raise

    def begin(self) -> None:
        """Take the write lock."""
        if self.connection.in_transaction:
            raise StoreError(f"{self.path}: nothing can be written inside a view or a transaction that is open already")
        self.check_place()
        self.run("BEGIN IMMEDIATE")

    def commit(self) -> None:
        """Make the transaction durable. Raises StoreError if the file at the path was replaced in the meantime."""
        self.check_place()
        self.run("COMMIT")
        self.check_place()

    def roll_back(self) -> None:
        """Roll back the open transaction, if there is one."""
        if not self.closed and self.connection.in_transaction:
            with self.errors():
                self.connection.execute("ROLLBACK")

    def _found(self) -> list[tuple[int, int]] | None:
        """Identify the file and the log that are at the path now; None if either is missing."""
        try:
            found = [os.stat(p) for p in (self.path, self._logs()[0])]
        except OSError:
            return None
        return [(s.st_dev, s.st_ino) for s in found]

    def check_place(self) -> None:
        """Raise StoreError if the open files were deleted, moved or replaced: anything written to them would be lost."""
        if self._place is not None and self._found() != self._place:
            raise StoreError(
                f"{self.path} or its log was deleted, moved or replaced while it was open: nothing can be kept there. "
                "Open the store again."
            )

    def changes(self) -> int:
        """A number that changes whenever another connection has written."""
        row = self.one("PRAGMA data_version")
        assert row is not None
        return int(row[0])

    # -- records -------------------------------------------------------------------------------------------------------

    def get(self, name: str, default: Any = NO_DEFAULT) -> Any:
        """Return a value of the meta table. Raises StoreError if the value is missing and no default is given."""
        row = self.one("SELECT value, checksum FROM meta WHERE name = ?", (name,))
        if row is None and default is not NO_DEFAULT:
            return default
        if row is None:
            raise self.damaged(f"the record {name!r} is missing")
        if checksum((name, row[0])) != row[1]:
            raise self.damaged(f"the record {name!r} does not have its checksum")
        try:
            value = loads(row[0])
            check(value, RECORDS.get(name.partition("/")[0], {}))
        except (ValueError, TypeError) as error:
            raise self.damaged(f"the record {name!r} cannot be read: {str(error)[:200]}") from None
        return value

    def put(self, name: str, value: Any) -> None:
        """Write a value to the meta table, or delete the entry if the value is None."""
        if value is None:
            self.run("DELETE FROM meta WHERE name = ?", (name,))
            return
        text = json.dumps(value, sort_keys=True)
        self.run("INSERT OR REPLACE INTO meta VALUES (?, ?, ?)", (name, text, checksum((name, text))))

    def records(self, prefix: str) -> dict[str, Any]:
        """Values of the meta table whose names begin with a prefix, in order, keyed by the rest of the name."""
        end = prefix[:-1] + chr(ord(prefix[-1]) + 1)
        names = self.all("SELECT name FROM meta WHERE name >= ? AND name < ? ORDER BY name", (prefix, end))
        return {name.removeprefix(prefix): self.get(name) for (name,) in names}

    def check_structure(self) -> None:
        """Let SQLite check all pages and indexes. This reads the whole file."""
        found = [row[0] for row in self.all("PRAGMA integrity_check(1)")]
        if found != ["ok"]:
            raise self.damaged(found[0] if found else "it cannot be checked")

    def copy_to(self, path: Path) -> None:
        """Copy the whole file, as it is at one moment, to a new file. StoreDiskError names the new file."""
        with self.held(), self.errors(), closing(sqlite3.connect(path)) as target:
            try:
                self.connection.backup(target)
            except sqlite3.Error as error:
                failed = store_error(error, self.path, "store")
                if isinstance(failed, StoreDiskError):
                    failed = StoreDiskError(f"{path} cannot be written: {error}")
                raise failed from error

    def truncate_log(self) -> bool:
        """Move the write-ahead log into the file and truncate it. Returns False if a reader prevents this."""
        row = self.one("PRAGMA wal_checkpoint(TRUNCATE)")
        return row is not None and row[0] == 0

    def close(self) -> None:
        """Close the connection. The last connection to close removes the log."""
        with self.lock, self.errors():
            self.closed = True
            self.connection.close()
