"""Arrays, tensors, columns and CSV tables from files. Whatever is wrong with a file is a ValueError that names it."""

from __future__ import annotations

import csv
import gzip
import zlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from torchlssvm.backbones import load_pt


def load_npy(path: Path, mapped: bool) -> np.ndarray[Any, Any]:
    """An array; ``mapped``: read from the disk as it is needed."""
    path.stat()  # a missing file is an OSError that says so
    try:
        if mapped:
            return np.lib.format.open_memmap(path, mode="r")
        with open(path, "rb") as file:
            return np.lib.format.read_array(file, allow_pickle=False)
    except OSError:
        raise
    except Exception as error:  # numpy's parser of the header has many
        raise ValueError(f"{path} is no .npy file, or not all of one: {error}") from None


def to_features(part: np.ndarray[Any, Any] | Tensor) -> Tensor:
    """Rows of an array or a tensor as a tensor of floats."""
    if isinstance(part, Tensor):
        return part
    usual = part.dtype.kind == "f" and part.dtype.itemsize in (2, 4, 8)
    return torch.from_numpy(np.array(part, dtype=part.dtype.newbyteorder("=") if usual else np.float64))


def load_matrix(path: Path) -> np.ndarray[Any, Any] | Tensor:
    """Features (n, J) from a .npy file, which stays on the disk, or a .pt file."""
    values: Any = load_npy(path, True) if path.suffix == ".npy" else load_pt(path)
    if isinstance(values, Tensor):
        real = values.layout == torch.strided and not values.is_complex() and not values.is_quantized
    else:
        real = isinstance(values, np.ndarray) and values.dtype.kind in "fiub"
    if not real:
        kind = getattr(values, "dtype", type(values).__name__)
        raise ValueError(f"{path} must hold one array of real numbers, it holds {kind}")
    if values.ndim != 2:
        raise ValueError(f"{path} must hold features of shape (n, J), it has shape {tuple(values.shape)}")
    return values  # type: ignore[no-any-return]


# -- text --------------------------------------------------------------------------------------------------------------


def is_table(path: Path) -> bool:
    """Whether a file is a CSV, by its name."""
    return path.name.lower().endswith((".csv", ".csv.gz"))


@contextmanager
def lines_of(path: Path) -> Iterator[Iterator[str]]:
    """The lines of a text file, packed or not."""
    opener: Any = gzip.open if path.suffix == ".gz" else open
    try:
        with opener(path, "rt", encoding="utf-8-sig", newline="") as file:
            yield file
    except (EOFError, zlib.error, gzip.BadGzipFile, UnicodeDecodeError, csv.Error) as error:
        raise ValueError(f"{path} cannot be read as text: {error}") from None


class CSV:
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
        """The column that is meant by a name or a number (from 0, or from the end if negative); None if there is none."""
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
        """Line number and cells of each row, all of the same length."""
        with lines_of(self.path) as lines:
            reader = csv.reader(lines)
            for i, row in enumerate(reader):
                if not row or (i == 0 and self.header is not None):
                    continue
                if len(row) != self.width:
                    raise ValueError(f"{self.path}, line {reader.line_num}: {len(row)} columns instead of {self.width}")
                yield reader.line_num, row

    def numbers(self, rows: Sequence[tuple[int, list[str]]], columns: Sequence[int]) -> np.ndarray[Any, Any]:
        """The cells of some columns as float64."""
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
    """Whether a cell is a number."""
    try:
        float(cell)
    except ValueError:
        return False
    return True


# -- one value for each sample -----------------------------------------------------------------------------------------


class Column:
    """One value for each sample: labels, ids or subjects.

    From a .npy or .pt file (``array``) or the lines of a text file, in the order of the samples; or from a CSV with a header
    that has a column ``id`` and one with the name asked for, in any order.
    """

    def __init__(self, path: Path, name: str):
        self.path, self.name = path, name
        self.by_id: dict[str, str] | None = None
        self.values: list[str] | Tensor = []
        self.array = path.suffix in (".npy", ".pt")
        if path.suffix == ".npy":
            self.values = as_column(load_npy(path, False), path)
        elif path.suffix == ".pt":
            self.values = as_column(load_pt(path), path)
        else:
            table = CSV(path, ("id", name)) if is_table(path) else None
            if table is not None and table.header is not None and {"id", name} <= set(table.header):
                self.by_id = pairs(table, name)
            elif table is not None and table.width > 1:
                raise ValueError(
                    f"{path} has {table.width} columns and not the header it needs: its first line must name the columns "
                    f"id and {name}, e.g. 'id,{name}'"
                )
            else:
                with lines_of(path) as lines:
                    self.values = [line.strip() for line in lines]

    def check(self, total: int, source: Path, by_position: bool) -> None:
        """ValueError when there are not as many values as samples, or when they have no ids and may be in any order."""
        if self.by_id is None and not by_position:
            raise ValueError(
                f"{self.path} is a list without ids: give a CSV with the header id,{self.name}, or say with --by-position that "
                "its order is that of the samples"
            )
        if self.by_id is None and len(self.values) != total:
            raise ValueError(
                f"{self.path} has {len(self.values)} values of {self.name} for {total} samples of {source}"
            )

    def take(self, start: int, ids: Sequence[str]) -> list[str] | Tensor:
        """The values of some samples that follow each other."""
        if self.by_id is None:
            return self.values[start : start + len(ids)]
        missing = next((i for i in ids if i not in self.by_id), None)
        if missing is not None:
            raise ValueError(f"{self.path} has no {self.name} for the id {missing!r}")
        return [self.by_id[i] for i in ids]


def pairs(table: CSV, name: str) -> dict[str, str]:
    """The column of a name, by id; ValueError when an id stands there twice."""
    assert table.header is not None
    key, value = table.header.index("id"), table.header.index(name)
    out: dict[str, str] = {}
    for line, row in table.rows():
        if row[key].strip() in out:
            raise ValueError(f"{table.path}, line {line}: the id {row[key].strip()!r} stands there twice")
        out[row[key].strip()] = row[value].strip()
    return out


def as_column(values: Any, path: Path) -> list[str] | Tensor:
    """Values of a .npy or .pt file: numbers as a tensor (n,) or (n, K), texts as a list."""
    if isinstance(values, list | tuple) and all(isinstance(v, str | int) for v in values):
        return [str(v) for v in values]
    if isinstance(values, np.ndarray) and values.dtype.kind in "US" and values.ndim == 1:
        return [v.decode() if isinstance(v, bytes) else str(v) for v in values.tolist()]
    if isinstance(values, np.ndarray) and values.dtype.kind in "fiub":
        values = torch.from_numpy(
            values.astype(np.int64 if values.dtype.kind in "iu" else values.dtype.newbyteorder("="))
        )
    if not isinstance(values, Tensor) or values.ndim not in (1, 2):
        raise ValueError(f"{path} must hold one value for each sample, it holds {describe(values)}")
    return values


def describe(values: Any) -> str:
    """What a file holds, in a few words."""
    if isinstance(values, Tensor | np.ndarray):
        return f"{values.dtype} of shape {tuple(values.shape)}"
    return type(values).__name__
