"""Columns: one value for each sample, from a file."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from torchlssvm.backbones import load_pt
from torchlssvm.cli.arrays import load_npy
from torchlssvm.cli.tables import CSVTable, is_table, lines_of, values_by_id


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
            table = CSVTable(path, ("id", name)) if is_table(path) else None
            if table is not None and table.header is not None and {"id", name} <= set(table.header):
                self.by_id = values_by_id(table, name)
            elif table is not None and table.width > 1:
                raise ValueError(
                    f"{path} has {table.width} columns and not the header it needs: its first line must name the columns "
                    f"id and {name}, e.g. 'id,{name}'"
                )
            else:
                with lines_of(path) as lines:
                    self.values = [line.strip() for line in lines]

    def check(self, total: int, source: Path, by_position: bool) -> None:
        """Raise ValueError when there are not as many values as samples, or when they have no ids and may be in any order."""
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
        """Return the values of consecutive samples."""
        if self.by_id is None:
            return self.values[start : start + len(ids)]
        missing = next((i for i in ids if i not in self.by_id), None)
        if missing is not None:
            raise ValueError(f"{self.path} has no {self.name} for the id {missing!r}")
        return [self.by_id[i] for i in ids]


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
    """Describe the content of a file by type, dtype and shape."""
    if isinstance(values, Tensor | np.ndarray):
        return f"{values.dtype} of shape {tuple(values.shape)}"
    return type(values).__name__
