"""A suppression list: a file that tells, to the holder of its key only, who was erased on request.

An entry is HMAC-SHA-256(key, "torchlssvm-suppression-1" || 0 || kind || 0 || name), where kind is "id" or "subject" and the
name is in Unicode's form NFC, so that one that was typed on another machine is the same. Without the key it confirms no guess;
the order of the file says nothing about the order of erasures. Several stores may share a list. It is not part of a store, so
that a copy of a store that is put back does not bring an old list along.
"""

from __future__ import annotations

import hmac
import os
import secrets
import sqlite3
import unicodedata
from collections.abc import Iterable, Iterator, Sequence
from contextlib import closing, contextmanager
from pathlib import Path

from torchlssvm.errors import StoreError
from torchlssvm.store.database import store_error
from torchlssvm.store.snapshots import sync_folder
from torchlssvm.store.suppression_key import refuse_in_store
from torchlssvm.untrusted import check_regular

LIST_FORMAT = "torchlssvm-suppression-1"
LIST_APPLICATION_ID = 0x746C7370
"""The letters "tlsp": they mark an SQLite file as a suppression list."""

LIST_TABLES = """
CREATE TABLE list (name TEXT PRIMARY KEY, value TEXT NOT NULL) WITHOUT ROWID;
CREATE TABLE entries (tag BLOB PRIMARY KEY) WITHOUT ROWID;
"""
SUM_MODULUS = 2**256
"""An entry is a number below it."""

TAGS_PER_QUERY = 500
"""Entries asked for in one query (SQLite allows 999 variables in old versions)."""

WRITER_SECONDS = 30.0
"""Seconds to wait for another process that writes; an entry takes milliseconds."""


class SuppressionList:
    """The entries of one file, read and written under the controller's key. Nothing stays open between two calls.

    Args:
        path: the file; :meth:`create` makes it.
        key: 32 bytes (:func:`~torchlssvm.store.suppression_key.suppression_key`). A wrong one is a StoreError.

    >>> import tempfile
    >>> listed = SuppressionList.create(Path(tempfile.mkdtemp()) / "erased.list", bytes(32))
    >>> tags = [listed.tag("subject", "u42"), listed.tag("id", "photo-7")]
    >>> listed.enter(tags[:1]), len(listed), [tag in listed.find(tags) for tag in tags]
    (1, 1, [True, False])
    """

    def __init__(self, path: str | os.PathLike[str], key: bytes):
        self.path, self._key = Path(path).absolute(), key
        with self._connected() as connection:
            found = dict(connection.execute("SELECT name, value FROM list").fetchall())
        if found.get("format") != LIST_FORMAT or not {"list", "check", "entries", "changes", "sum"} <= set(found):
            raise StoreError(f"{self.path} is damaged, or a suppression list of another version")
        if not hmac.compare_digest(found["check"], self._check_value()):
            raise StoreError(f"this is not the key of the suppression list {self.path}: nothing can be told with it")
        self.name: str = found["list"]
        """The random name of the list, by which a store knows it."""

    @classmethod
    def create(cls, path: str | os.PathLike[str], key: bytes) -> SuppressionList:
        """Make an empty list; StoreError if there is a file already, ValueError inside the folder of a store."""
        place = Path(path).absolute()
        refuse_in_store(place)
        if os.path.lexists(place):
            raise StoreError(f"{place} is there already: a suppression list is not written over")
        temporary = place.with_name(place.name + ".tmp")
        temporary.unlink(missing_ok=True)
        os.close(os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600))
        made = cls.__new__(cls)
        made.path, made._key = temporary, key
        values = {"format": LIST_FORMAT, "list": secrets.token_hex(16), "check": made._check_value()}
        with made._connected(new=True) as connection:
            connection.execute(f"PRAGMA application_id = {LIST_APPLICATION_ID}")
            connection.executescript(LIST_TABLES)
            rows = (values | {"entries": "0", "changes": "0", "sum": "0"}).items()
            connection.executemany("INSERT INTO list VALUES (?, ?)", rows)
        os.replace(temporary, place)
        sync_folder(place.parent)
        return cls(place, key)

    @contextmanager
    def _connected(self, new: bool = False) -> Iterator[sqlite3.Connection]:
        """Open the file for one piece of work; SQLite's errors come out as StoreErrors that name it."""
        try:
            check_regular(self.path)
        except ValueError as error:
            raise StoreError(f"{error}: this is no suppression list") from None
        if not self.path.exists():
            raise StoreError(
                f"the suppression list {self.path} is not there: without it nobody can tell who was erased. Put it back, or "
                "say where it is now: torchlssvm suppression STORE --list FILE"
            )
        try:
            uri = f"{self.path.as_uri()}?mode=rw"
            with closing(sqlite3.connect(uri, uri=True, timeout=WRITER_SECONDS, isolation_level=None)) as connection:
                connection.execute("PRAGMA synchronous = EXTRA")  # FULL does not sync the folder when a log is deleted
                connection.execute("PRAGMA secure_delete = ON")
                connection.execute("PRAGMA trusted_schema = OFF")
                if not new and connection.execute("PRAGMA application_id").fetchone()[0] != LIST_APPLICATION_ID:
                    raise StoreError(f"{self.path} is no suppression list")
                yield connection
        except sqlite3.Error as error:
            raise store_error(error, self.path, "suppression list") from error

    def _check_value(self) -> str:
        return hmac.digest(self._key, f"{LIST_FORMAT}\0check".encode(), "sha256").hex()

    def tag(self, kind: str, name: str) -> bytes:
        """The entry of an id or a subject."""
        text = f"{LIST_FORMAT}\0{kind}\0{unicodedata.normalize('NFC', name)}"
        return hmac.digest(self._key, text.encode(), "sha256")

    # -- reading -------------------------------------------------------------------------------------------------------

    def __len__(self) -> int:
        return self._number("entries")

    @property
    def changes(self) -> int:
        """The number of entries that were ever made or withdrawn: an older copy of the file has fewer."""
        return self._number("changes")

    def _number(self, name: str) -> int:
        with self._connected() as connection:
            return self._counted(connection, name)

    def _counted(self, connection: sqlite3.Connection, name: str) -> int:
        return int(connection.execute("SELECT value FROM list WHERE name = ?", (name,)).fetchone()[0])

    def find(self, tags: Sequence[bytes]) -> set[bytes]:
        """Those of some entries that are on the list."""
        found: set[bytes] = set()
        with self._connected() as connection:
            for start in range(0, len(tags), TAGS_PER_QUERY):
                part = tags[start : start + TAGS_PER_QUERY]
                marks = ",".join("?" * len(part))
                found.update(r[0] for r in connection.execute(f"SELECT tag FROM entries WHERE tag IN ({marks})", part))
        return found

    def check_structure(self) -> None:
        """StoreError when the file is cut short, a page of it is damaged, or an entry is missing or altered."""
        with self._connected() as connection:
            connection.execute("BEGIN")  # of one state, whoever writes meanwhile
            found = connection.execute("PRAGMA integrity_check(1)").fetchone()[0]
            tags = [row[0] for row in connection.execute("SELECT tag FROM entries")]
            size = connection.execute("PRAGMA page_count").fetchone()[0]
            size *= connection.execute("PRAGMA page_size").fetchone()[0]
            whole = self.path.stat().st_size == size
            entries, total = self._counted(connection, "entries"), self._counted(connection, "sum")
        if found != "ok" or not whole or len(tags) != entries or sum_of(tags) != total:
            raise StoreError(
                f"{self.path} is damaged: of {entries} entries {len(tags)} are there, or some are altered"
                f"{'' if whole else '; the file is cut short'}; structure: {found}. Put a copy back that is whole."
            )

    @property
    def mark(self) -> tuple[int, int, int]:
        """Marks the file as it is now: another one, or a change, gives another mark."""
        found = self.path.stat()
        return found.st_ino, found.st_size, found.st_mtime_ns

    # -- writing -------------------------------------------------------------------------------------------------------

    def enter(self, tags: Iterable[bytes]) -> int:
        """Make entries, durable when this returns; returns :attr:`changes`."""
        return self._change("INSERT OR IGNORE INTO entries VALUES (?)", 1, tags)

    def withdraw(self, tags: Iterable[bytes]) -> int:
        """Take entries off the list; returns :attr:`changes`."""
        return self._change("DELETE FROM entries WHERE tag = ?", -1, tags)

    def _change(self, sql: str, sign: int, tags: Iterable[bytes]) -> int:
        with self._connected() as connection:
            connection.execute("BEGIN IMMEDIATE")
            changed = [tag for tag in tags if connection.execute(sql, (tag,)).rowcount]
            numbers = {"entries": sign * len(changed), "changes": len(changed), "sum": sign * sum_of(changed)}
            for name, more in numbers.items():
                value = (self._counted(connection, name) + more) % SUM_MODULUS
                connection.execute("UPDATE list SET value = ? WHERE name = ?", (str(value), name))
            total = self._counted(connection, "changes")
            connection.execute("COMMIT")
            return total


def sum_of(tags: Iterable[bytes]) -> int:
    """The sum of entries, by which an altered one is noticed."""
    return sum(int.from_bytes(tag, "big") for tag in tags) % SUM_MODULUS
