"""The samples of a store as a torch dataset."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import Dataset

from torchlssvm.errors import StoreError
from torchlssvm.store.database import DATABASE_FILE, Database
from torchlssvm.store.sample_table import SampleTable


class StoreDataset(Dataset[tuple[Tensor, Tensor]]):
    """(x, y) of every sample that the store held when this was made.

    A sample erased since is an error, and so is a compaction after an erasure, which numbers the rows again.
    Each process opens the file for itself, so a DataLoader may use any number of workers.
    """

    def __init__(self, path: Path):
        self.path = path
        self._owner = 0
        self._open: SampleTable | None = None
        with self._table().db.view():
            found = self._table().db.all("SELECT seq FROM samples ORDER BY seq")
            self._renumbered = self._table().db.get("renumbered", 0)
        self._seqs = torch.tensor([r[0] for r in found], dtype=torch.int64)

    def _table(self) -> SampleTable:
        if self._open is None or self._owner != os.getpid():
            table = SampleTable(Database(self.path / DATABASE_FILE, False, readonly=True))
            table.load_codec()
            self._owner, self._open = os.getpid(), table
        return self._open

    def __len__(self) -> int:
        return len(self._seqs)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        if not -len(self) <= index < len(self):
            raise IndexError(f"index {index} is out of range for {len(self)} samples")
        return self.__getitems__([index])[0]

    def __getitems__(self, indices: list[int]) -> list[tuple[Tensor, Tensor]]:
        """A batch at once, which is how a DataLoader asks."""
        try:
            table = self._table()
            with table.db.view():
                table.load_codec()
                if table.db.get("renumbered", 0) != self._renumbered:
                    raise StoreError(f"{self.path} was compacted")
                rows = table.read(self._seqs[indices].tolist())
        except StoreError as error:
            raise StoreError(f"{error}. A sample of this dataset may have been erased since it was made.") from error
        return list(zip(rows.x, rows.y, strict=True))

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"_owner": 0, "_open": None}
