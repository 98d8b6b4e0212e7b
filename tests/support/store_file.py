"""The file of a store as another program sees it: read, and locked."""

from __future__ import annotations

import sqlite3
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any


def read(folder: Path | str, sql: str) -> list[tuple[Any, ...]]:
    """The rows of a query, through a connection of its own."""
    with closing(sqlite3.connect(Path(folder) / "samples.sqlite")) as db:
        return db.execute(sql).fetchall()


@contextmanager
def write_locked(folder: Path | str) -> Iterator[None]:
    """A context in which another writer holds the lock."""
    with closing(sqlite3.connect(Path(folder) / "samples.sqlite", isolation_level=None)) as db:
        db.execute("BEGIN IMMEDIATE")
        yield
        db.execute("ROLLBACK")
