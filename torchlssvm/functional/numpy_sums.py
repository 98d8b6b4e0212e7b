"""The statistics of labelled samples in numpy alone, for workers that have no torch.

The same integers as :mod:`torchlssvm.functional.gram` makes: q = round(x / resolution), sums of q q^T by float64 products
that are exact below 2^53, kept as int64. This file must import numpy only: its functions are sent to workers by value.

A partial result is a dictionary: ``groups`` (number -> (M (J, J), V (R, J)) int64), ``counts`` (K,), ``gross`` (a bound on
every sum) and ``problem`` (None, or what is wrong with the samples, with its kind). Partial results are added by :func:`add`.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import numpy as np
from numpy.typing import NDArray

LARGEST_EXACT_INTEGER = 2**53
"""Integers up to here are exact in float64; the same as in ``gram``, which workers cannot import."""

LARGEST_SUM = 2**62
"""Sums beyond are refused: int64 ends at 2^63; the same as in ``statistics``, which workers cannot import."""

BATCH_ROWS = 1024
"""Rows that are summed at a time."""


def zero(K: int) -> dict[str, Any]:
    """The sums of no sample."""
    return {"groups": {}, "counts": np.zeros(K, dtype=np.int64), "gross": 0.0, "problem": None}


def add(a: dict[str, Any], b: dict[str, Any]) -> dict[str, Any]:
    """Add the sums of two parts; the result uses the arrays of ``a`` again."""
    problem = a["problem"] or b["problem"]
    gross = a["gross"] + b["gross"]
    if problem is None and gross > LARGEST_SUM:
        problem = (
            "grid",
            f"int64 sums could overflow: the bound is {gross:.3g}; use a coarser grid, e.g. with bits=16",
        )
    groups = dict(a["groups"])
    for group, (M, V) in {} if problem else b["groups"].items():
        groups[group] = (groups[group][0] + M, groups[group][1] + V) if group in groups else (M, V)
    return {"groups": groups, "counts": a["counts"] + b["counts"], "gross": gross, "problem": problem}


def normalized(x: NDArray[Any], kind: str | None) -> NDArray[Any]:
    """Normalized rows, bit for bit those of :func:`torchlssvm.functional.row_normalization.normalized`. x: (B, J)."""
    if kind is None:
        return x
    x = np.asarray(x, dtype=np.float64)
    if kind == "sqrt":
        return np.asarray(np.sign(x) * np.sqrt(np.abs(x)))
    largest = np.abs(x).max(1, keepdims=True)
    x = x / np.where(largest == 0, 1.0, largest)
    squares = x * x
    width = 1 << (x.shape[1] - 1).bit_length()
    squares = np.pad(squares, ((0, 0), (0, width - x.shape[1])))
    while width > 1:
        width //= 2
        squares = squares[:, :width] + squares[:, width:]
    length = np.sqrt(squares)
    return np.asarray(x / np.where(length == 0, 1.0, length))


def sum_block(
    x: NDArray[Any], y: NDArray[Any], K: int, resolution: float, limit: float, per_class: bool, normalize: str | None = None
) -> dict[str, Any]:  # fmt: skip
    """The sums of a block. x: (B, J); y: (B,) labels in 0..K-1."""
    out = zero(K)
    out["problem"] = _problem(x, y, K)
    if out["problem"] is None and len(x):
        x = normalized(x, normalize)
        out["problem"] = _beyond(x, limit)
    if out["problem"] is not None or not len(x):
        return out
    q = np.rint(np.asarray(x, dtype=np.float64) / resolution)
    labels = np.asarray(y).astype(np.int64)
    out["counts"] = np.bincount(labels, minlength=K).astype(np.int64)
    bounds = (np.abs(q).max(1, initial=0.0) + 1) ** 2
    out["gross"] = float(bounds.sum())
    for group in np.unique(labels).tolist() if per_class else [0]:
        pick = labels == group if per_class else slice(None)
        rows, sizes = q[pick], bounds[pick]
        side = np.ones((len(rows), 1)) if per_class else np.eye(K)[labels]
        M, V = np.zeros((q.shape[1],) * 2, dtype=np.int64), np.zeros((side.shape[1], q.shape[1]), dtype=np.int64)
        for a, b in _runs(sizes):
            M += (rows[a:b].T @ rows[a:b]).astype(np.int64)
            V += (side[a:b].T @ rows[a:b]).astype(np.int64)
        out["groups"][group] = (M, V)
    return out


def _problem(x: NDArray[Any], y: NDArray[Any], K: int) -> tuple[str, str] | None:
    if x.ndim != 2 or y.shape != x.shape[:1]:
        return "value", f"samples are x (B, J) and y (B,), got shapes {x.shape} and {y.shape}"
    if not len(x):
        return None
    if not np.isfinite(x).all():
        return "value", f"x holds {int((~np.isfinite(x)).sum())} NaN or inf value(s): clean or drop those samples"
    if not (np.asarray(y) == np.floor(y)).all() or y.min() < 0 or y.max() >= K:
        return "value", f"labels must be integers in 0..{K - 1}, got values from {y.min()} to {y.max()}"
    return None


def _beyond(x: NDArray[Any], limit: float) -> tuple[str, str] | None:
    largest = float(np.abs(x).max(initial=0.0))
    if largest > limit:
        return (
            "grid",
            f"x holds a value of magnitude {largest!r}, beyond the grid's limit {limit!r}: choose a wider grid",
        )
    return None


def _runs(bounds: NDArray[np.float64]) -> Iterator[tuple[int, int]]:
    """Runs of rows whose products sum exactly; one row always does."""
    start = 0
    while start < len(bounds):
        total = np.cumsum(bounds[start : start + BATCH_ROWS])
        stop = start + max(1, int(np.searchsorted(total, LARGEST_EXACT_INTEGER, side="right")))
        yield start, stop
        start = stop


def blocks(samples: Iterable[Any]) -> Iterator[tuple[NDArray[Any], NDArray[Any]]]:
    """Samples (x (J,), y) in blocks, or blocks (x (B, J), y (B,)) as they come."""
    rows: list[Any] = []
    labels: list[Any] = []
    for x, y in samples:
        x = np.asarray(x.toArray() if hasattr(x, "toArray") else x)
        if x.ndim == 2:
            yield x, np.asarray(y)
            continue
        rows.append(x)
        labels.append(y)
        if len(rows) == BATCH_ROWS:
            yield np.stack(rows), np.asarray(labels)
            rows, labels = [], []
    if rows:
        yield np.stack(rows), np.asarray(labels)


def largest(samples: Iterable[Any], normalize: str | None = None) -> float:
    """The largest magnitude in a partition, from which a grid is chosen; values that are not finite are left to the sums."""
    found = 0.0
    for x, _ in blocks(samples):
        x = np.abs(normalized(x, normalize) if x.ndim == 2 and x.size else x)
        found = max(found, float(x[np.isfinite(x)].max(initial=0.0)))
    return found


def sum_samples(
    samples: Iterable[Any], J: int, K: int, resolution: float, limit: float, per_class: bool, normalize: str | None = None
) -> dict[str, Any]:  # fmt: skip
    """The sums of a partition."""
    out = zero(K)
    for x, y in blocks(samples):
        if x.shape[-1] != J:
            return out | {"problem": ("value", f"samples have {x.shape[-1]} features, not {J}")}
        out = add(out, sum_block(x, y, K, resolution, limit, per_class, normalize))
    return out
