"""Compute the statistics of a head as a map-reduce job on Spark, with the same digest as with torch.distributed.

Each partition is summed by a :class:`~torchlssvm.Statistics` on its worker, so workers need this package too. Needs pyspark
(``pip install torchlssvm[spark]``) and Java.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor

from torchlssvm.errors import GridError
from torchlssvm.functional.grid import FixedPoint, GridOption, as_grid
from torchlssvm.functional.row_normalization import normalized
from torchlssvm.statistics import Statistics

__all__ = ["statistics_from"]

BATCH_ROWS = 1024
"""Number of single samples that are summed at a time."""


def statistics_from(
    data: Any, in_features: int, num_classes: int, *, grid: GridOption, per_class: bool = False,
    columns: tuple[str, str] = ("features", "label"), depth: int = 2, normalize: str | None = None, scale: str | None = None,
) -> Statistics:  # fmt: skip
    """Sum all samples of a Spark data set: ``map`` sums each partition, ``reduce`` adds the sums.

    To add the result to a head, call ``merge(head, Delta(result))``. It equals, bit for bit, the result of ``Statistics.add``
    on the same samples. Raises ValueError for a null, a row of the wrong length or a value that is not a number.

    Args:
        data: an RDD of samples (x (J,), label) or of blocks (x (B, J), labels (B,)), or a DataFrame with the two ``columns``.
        in_features: J.
        num_classes: K.
        grid: the grid of the head: a :class:`~torchlssvm.FixedPoint`, a number (the limit) or ``"auto"``, which needs an extra
            pass.
        per_class: as in the head. Set to True with class weights.
        columns: names of two columns of a DataFrame: the features (an array or a vector) and the label.
        depth: the depth of the tree in which partial sums are added.
        normalize: as in the head.
        scale: as in the head.
    """
    grid = as_grid(grid)
    if grid is None:
        raise ValueError("sums of several machines need a grid: a number, a FixedPoint or 'auto'; got None")
    samples = data.select(*columns).rdd.map(tuple) if hasattr(data, "select") else data
    if not isinstance(grid, FixedPoint):
        found = samples.mapPartitions(partial(_largest, J=in_features, normalize=normalize)).collect()
        for one in found:
            if isinstance(one, Exception):
                raise one
        grid = FixedPoint.auto(max(found))
    empty = Statistics(in_features, num_classes, grid=grid, per_class=per_class, normalize=normalize, scale=scale)
    total = samples.mapPartitions(partial(_sum, empty=empty)).treeReduce(_add, depth)
    if isinstance(total, Exception):
        raise total
    return total  # type: ignore[no-any-return]


def _blocks(samples: Iterable[Any], J: int) -> Iterator[tuple[Tensor, Tensor]]:
    """Blocks of single samples (x (J,), label), or blocks (x (B, J), labels (B,)) as they come."""
    rows: list[Any] = []
    labels: list[Any] = []
    for x, y in samples:
        x, y = _numbers(x, "features"), _numbers(y, "label")
        if x.ndim not in (1, 2) or x.shape[-1] != J:
            raise ValueError(f"a sample has features of shape {tuple(x.shape)}, expected ({J},): in_features is {J}")
        if x.ndim == 2:
            yield _tensors(x, y)
            continue
        rows.append(x)
        labels.append(y)
        if len(rows) == BATCH_ROWS:
            yield _tensors(np.stack(rows), labels)
            rows, labels = [], []
    if rows:
        yield _tensors(np.stack(rows), labels)


def _numbers(value: Any, name: str) -> np.ndarray[Any, Any]:
    """The value of a column as an array; ValueError for a null, and for anything else that is not a number."""
    try:
        found = np.asarray(value.toArray() if hasattr(value, "toArray") else value)
    except ValueError:  # lists of different lengths
        found = np.asarray(None)
    if found.dtype.kind not in "fiub":
        what = "a null" if value is None else repr(value)[:80]
        raise ValueError(
            f"the {name} of a sample must be numbers, got {what}: drop such rows first, e.g. frame.dropna()"
        )
    return found


def _tensors(x: Any, y: Any) -> tuple[Tensor, Tensor]:
    """A block as tensors; labels that are whole numbers in a column of floats are integers."""
    y = np.asarray(y)
    if y.dtype.kind == "f" and (y == np.floor(y)).all():
        y = y.astype(np.int64)
    return torch.tensor(x), torch.tensor(y)


def _largest(samples: Iterable[Any], J: int, normalize: str | None) -> list[float | Exception]:
    """The largest finite magnitude in a partition, or the error that its samples cause."""
    found = 0.0
    try:
        for x, _ in _blocks(samples, J):
            x = normalized(x.to(torch.float64), normalize).abs() if x.numel() else x
            found = max(found, float(torch.where(x.isfinite(), x, 0.0).max()) if x.numel() else 0.0)
    except ValueError as error:
        return [error]
    return [found]


def _sum(samples: Iterable[Any], empty: Statistics) -> list[Statistics | Exception]:
    """The sums of a partition, or the error that its samples cause."""
    stats = empty.copy()
    try:
        for x, y in _blocks(samples, stats.in_features):
            stats.add(x, y)
    except (GridError, ValueError) as error:
        return [error]
    return [stats]


def _add(a: Statistics | Exception, b: Statistics | Exception) -> Statistics | Exception:
    """Add the sums of two partitions, or return the first error."""
    if isinstance(a, Exception) or isinstance(b, Exception):
        return a if isinstance(a, Exception) else b
    try:
        return a + b
    except GridError as error:  # int64 could overflow
        return error
