"""A store as another program sees its file, read and locked; and the head that its rows give."""

from __future__ import annotations

import sqlite3
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

from torchlssvm import LSSVMHead
from torchlssvm.store import SampleStore


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


def relearned(store: SampleStore) -> LSSVMHead:
    """A head that learned the rows of a store, in another order, on the grids that the store's head has."""
    config, stats = store.head.config(), store.head.statistics
    if stats.exact:
        for name, grid in (("grid", stats.grid), ("target_grid", stats.target_grid)):
            config[name] = [grid.limit.hex(), grid.bits, grid.headroom] if grid is not None else "auto"
    head = LSSVMHead.from_config(config)
    for part in list(store.batches(size=7))[::-1]:
        head.add(part.x, part.y, ids=part.ids if stats.folds else None)
    return head
