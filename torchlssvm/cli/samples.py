"""Samples from files, in batches. Nothing larger than a batch is copied into memory."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Protocol, TypeAlias

from torch import Tensor

from torchlssvm.cli.arrays import load_matrix, to_features
from torchlssvm.cli.columns import Column
from torchlssvm.cli.settings import Settings
from torchlssvm.cli.tables import CSVTable, is_table

Cells: TypeAlias = list[tuple[int, list[str]]]
"""Rows of a CSV with their line numbers."""


@dataclass(frozen=True)
class FileBatch:
    """Consecutive samples: x (B, J), y (B,) or (B, K) or None, and where they come from, for a message."""

    where: str
    ids: list[str]
    subjects: list[str | None] | None
    x: Tensor
    y: list[int] | Tensor | None


class SampleSource(Protocol):
    """Source of samples for ``add``. ``tolerance``: largest relative difference of a sample's features, computed again."""

    total: int
    width: int
    tolerance: float

    def batches(self, size: int) -> Iterator[FileBatch]:
        """Yield all samples, ``size`` at a time."""


class FileSamples:
    """Samples of a .npy, .pt or CSV file. Ids are ``<file name>:<row from 0>`` unless there are others.

    ``labels``, ``ids`` and ``subjects`` are files, or columns of the CSV. A CSV is read twice: before anything is added, every
    cell has been looked at.
    """

    tolerance = 0.0

    def __init__(
        self, path: Path, settings: Settings, classes: int, *, labels: str | None, ids: str | None, subjects: str | None,
        by_position: bool = False,
    ):  # fmt: skip
        self.path, self.settings, self.classes = path, settings, classes
        self.table = CSVTable(path, (labels, ids, subjects)) if is_table(path) else None
        if self.table is None and path.suffix not in (".npy", ".pt"):
            raise ValueError(f"{path}: features are read from .npy, .pt, .csv and .csv.gz files")
        self.matrix = load_matrix(path) if self.table is None else None
        named = {"label": labels, "id": ids, "subject": subjects}
        self.cells: dict[str, int] = {}
        self.columns: dict[str, Column] = {}
        for name, value in named.items():
            index = None if self.table is None else self.table.find(value)
            if index is not None:
                self.cells[name] = index
            elif value is not None:
                self.columns[name] = self._column(value, name)
        self.features = [c for c in range(self.table.width if self.table else 0) if c not in self.cells.values()]
        self.width = len(self.features) if self.matrix is None else self.matrix.shape[1]
        self.total = self._count()
        for column in self.columns.values():
            column.check(self.total, self.path, by_position or column.array)

    def _column(self, value: str, name: str) -> Column:
        if self.table is not None and not Path(value).exists():
            known = f"; its columns are {', '.join(self.table.header)[:200]}" if self.table.header else ""
            raise ValueError(f"{value!r} is neither a column of {self.path} nor a file{known}")
        return Column(Path(value), name)

    def _count(self) -> int:
        """Count the samples; every cell of a CSV is checked on the way."""
        total = 0 if self.matrix is None else len(self.matrix)
        for rows in self._rows(1024) if self.table is not None else ():
            self._labels(rows, None)
            total += len(rows)
        if not total:
            raise ValueError(f"{self.path} holds no samples")
        return total

    def _rows(self, size: int) -> Iterator[Cells]:
        assert self.table is not None
        rows = self.table.rows()
        while batch := list(islice(rows, size)):
            self.table.numbers(batch, self.features)
            yield batch

    def _labels(self, rows: Cells, values: list[str] | Tensor | None) -> list[int] | Tensor | None:
        """Read labels from the cells of a CSV, or from the values of a file."""
        if "label" in self.cells:
            return [self._label(row[self.cells["label"]], f"{self.path}, line {n}") for n, row in rows]
        if values is None or isinstance(values, Tensor):
            return values
        return [self._label(v, str(self.columns["label"].path)) for v in values]

    def _label(self, text: str, where: str) -> int:
        try:
            return self.settings.label(text, self.classes)
        except ValueError as error:
            raise ValueError(f"{where}: {error}") from None

    def _take(self, name: str, rows: Cells, start: int, ids: list[str]) -> list[str] | Tensor | None:
        """Return the values of a column of the CSV or of another file; None if there is none."""
        if name in self.cells:
            return [row[self.cells[name]].strip() for _, row in rows]
        return self.columns[name].take(start, ids) if name in self.columns else None

    def batches(self, size: int) -> Iterator[FileBatch]:
        """Yield all samples, ``size`` at a time."""
        parts: Iterator[Cells] = self._rows(size) if self.table is not None else iter([[]] * -(-self.total // size))
        start = 0
        for rows in parts:
            if self.table is not None:
                x = to_features(self.table.numbers(rows, self.features))
            else:
                assert self.matrix is not None
                x = to_features(self.matrix[start : start + size])
            default = [f"{self.path.name}:{start + i}" for i in range(len(x))]
            ids = as_texts(self._take("id", rows, start, default)) or default
            y = self._labels(rows, self._take("label", rows, start, ids))
            where = f"{self.path}, samples {start} to {start + len(x) - 1}"
            yield FileBatch(where, ids, as_subjects(self._take("subject", rows, start, ids)), x, y)
            start += len(x)


def as_texts(values: list[str] | Tensor | None) -> list[str]:
    """Convert the values of a column to texts."""
    return [str(v) for v in values.tolist()] if isinstance(values, Tensor) else values or []


def as_subjects(values: list[str] | Tensor | None) -> list[str | None] | None:
    """Convert the values of a column to subjects; an empty value is None."""
    return None if values is None else [name or None for name in as_texts(values)]
