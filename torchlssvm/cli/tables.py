"""CSV tables. A file that cannot be read is a ValueError that names it and the line."""

from __future__ import annotations

import csv
import gzip
import zlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np


def is_table(path: Path) -> bool:
    """Tell a CSV file by its name."""
    return path.name.lower().endswith((".csv", ".csv.gz"))


@contextmanager
def lines_of(path: Path) -> Iterator[Iterator[str]]:
    """Open the lines of a text file, gzipped or not."""
    opener: Any = gzip.open if path.suffix == ".gz" else open
    try:
        with opener(path, "rt", encoding="utf-8-sig", newline="") as file:
            yield file
    except (EOFError, zlib.error, gzip.BadGzipFile, UnicodeDecodeError, csv.Error) as error:
        raise ValueError(f"{path} cannot be read as text: {error}") from None


class CSVTable:
    """A table of numbers, and of labels, ids or subjects in columns that are named.

    The first row is a header if it holds one of the names, or if a cell of it that should be a feature is not a number.
    """

    def __init__(self, path: Path, named: Sequence[str | None]):
        self.path = path
        with lines_of(path) as lines:
            first = [cell.strip() for cell in next(csv.reader(lines), [])]
        if not first:
            raise ValueError(f"{path} is empty")
        self.width = len(first)
        self.header: list[str] | None = None
        others = {self.find(value) for value in named}
        has_name = any(value in first and not is_number(value) for value in named if value is not None)
        if has_name or not all(is_number(cell) for i, cell in enumerate(first) if i not in others):
            self.header = first

    def find(self, value: str | None) -> int | None:
        """Find a column by name or by number (from 0, or from the end if negative); None if there is none."""
        if value is None:
            return None
        if self.header is not None and value in self.header:
            return self.header.index(value)
        try:
            index = int(value)
        except ValueError:
            return None
        return index % self.width if -self.width <= index < self.width and not Path(value).exists() else None

    def rows(self) -> Iterator[tuple[int, list[str]]]:
        """Yield line number and cells of each row, all of the same length."""
        with lines_of(self.path) as lines:
            reader = csv.reader(lines)
            for i, row in enumerate(reader):
                if not row or (i == 0 and self.header is not None):
                    continue
                if len(row) != self.width:
                    raise ValueError(f"{self.path}, line {reader.line_num}: {len(row)} columns instead of {self.width}")
                yield reader.line_num, row

    def numbers(self, rows: Sequence[tuple[int, list[str]]], columns: Sequence[int]) -> np.ndarray[Any, Any]:
        """Convert the cells of some columns to float64 (rows, columns)."""
        try:
            return np.array([[float(row[c]) for c in columns] for _, row in rows]).reshape(len(rows), len(columns))
        except ValueError:
            line, column, cell = next((n, c, r[c]) for n, r in rows for c in columns if not is_number(r[c]))
        name = repr(self.header[column]) if self.header is not None else str(column)
        raise ValueError(
            f"{self.path}, line {line}, column {name}: {cell[:40]!r} is not a number. A column that is no feature is named "
            "with --labels, --ids or --subjects."
        )


def is_number(cell: str) -> bool:
    """Tell if a cell is a number."""
    try:
        float(cell)
    except ValueError:
        return False
    return True


def values_by_id(table: CSVTable, name: str) -> dict[str, str]:
    """Read the column of a name, by id; ValueError when an id stands there twice."""
    assert table.header is not None
    key, value = table.header.index("id"), table.header.index(name)
    out: dict[str, str] = {}
    for line, row in table.rows():
        if row[key].strip() in out:
            raise ValueError(f"{table.path}, line {line}: the id {row[key].strip()!r} stands there twice")
        out[row[key].strip()] = row[value].strip()
    return out
