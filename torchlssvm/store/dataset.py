"""The samples of a store as a torch dataset."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any, cast

from torch import Tensor
from torch.utils.data import Dataset

from torchlssvm.store.database import DATABASE_FILE, Database
from torchlssvm.store.sample_table import SampleTable


class StoreDataset(Dataset[tuple[Tensor, Tensor]]):
    """(x, y) of every sample that the store held when this was made; RemovalError for one that was erased since.

    Each process opens the file for itself, so a DataLoader may use any number of workers.
    """

    def __init__(self, path: Path, ids: list[str]):
        self.path, self.ids = path, ids
        self._owner, self._table = 0, cast("SampleTable | None", None)

    def __len__(self) -> int:
        return len(self.ids)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        return self.__getitems__([index])[0]

    def __getitems__(self, indices: list[int]) -> list[tuple[Tensor, Tensor]]:
        """A batch at once, which is how a DataLoader asks."""
        if self._table is None or self._owner != os.getpid():
            self._table = SampleTable(Database(self.path / DATABASE_FILE, False, readonly=True))
            self._owner = os.getpid()
        wanted = [self.ids[i] for i in indices]
        with self._table.db.view():
            self._table.load_codec()
            rows = self._table.read(self._table.find(wanted), wanted)
        return list(zip(rows.x, rows.y, strict=True))

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"_owner": 0, "_table": None}
