"""Sums over sparse rows, computed entry by entry without converting the rows to dense.

Sparse rows are coalesced COO tensors: their entries are sorted by row, then by column, and no position occurs twice. Sparse
sums pay only for rows with few entries: a row with m entries adds m (m + 1) / 2 products to the packed sums of
:mod:`torchlssvm.functional.gram`, and a dense row of J features adds J^2 / 2. One sparse product takes as long as about a
thousand dense ones, so this pays only for rows with few entries. Products of integers are added as int64, so the sums have the
same bits as sums over dense rows.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise

import torch
from torch import Tensor

from torchlssvm.functional import gram


def with_values(rows: Tensor, values: Tensor) -> Tensor:
    """Return rows with other values at the same positions. rows: (B, J), coalesced; values: (entries,)."""
    return torch.sparse_coo_tensor(rows.indices(), values, rows.shape, is_coalesced=True, check_invariants=False)


def pick(rows: Tensor, index: slice | Tensor) -> Tensor:
    """Take some rows, dense or sparse. rows: (B, J); index: a slice, numbers (b,) or a mask (B,)."""
    if not rows.is_sparse:
        return rows[index]
    if not isinstance(index, Tensor) or index.dtype == torch.bool:
        index = torch.arange(rows.shape[0], device=rows.device)[index]
    return rows.index_select(0, index).coalesce()


def dense_parts(rows: Tensor, size: int) -> Iterator[tuple[slice, Tensor]]:
    """Yield blocks of ``size`` rows, each as a slice and its dense form (b, J). rows: (B, J), coalesced."""
    (index, columns), values, B = rows.indices(), rows.values(), rows.shape[0]
    starts = [*range(0, B, size), B]
    places = torch.searchsorted(index, torch.tensor(starts, device=rows.device)).tolist()
    for (a, b), (first, last) in zip(pairwise(starts), pairwise(places), strict=True):
        part = torch.zeros(b - a, rows.shape[1], dtype=rows.dtype, device=rows.device)
        part[index[first:last] - a, columns[first:last]] = values[first:last]
        yield slice(a, b), part


def row_largest(rows: Tensor) -> Tensor:
    """Return the largest magnitude of each row (B,), or NaN if the row contains NaN."""
    largest = torch.zeros(rows.shape[0], dtype=rows.dtype, device=rows.device)
    return largest.scatter_reduce_(0, rows.indices()[0], rows.values().abs(), "amax")


def add_products_(
    total: Tensor, index: Tensor, columns: Tensor, q: Tensor, scaled: Tensor, z: Tensor, J: int, R: int
) -> None:
    """Add the sum over rows of [q; z] q^T to total, in place.

    total: packed sums, in strips to keep; index, columns, q (entries,): row, column and value of each entry, in order; scaled
    (entries,): the values times the multiplicity and sign of their rows; z: side columns (B, R), or labels (B,), which stand
    for one-hot columns.
    """
    q, scaled = q.to(total.dtype), scaled.to(total.dtype)
    side = gram.side_view(total, J, R)
    if z.ndim == 1:
        side.view(-1).index_add_(0, z[index] * J + columns, scaled)
    else:
        for r in range(R):
            side[r].index_add_(0, columns, scaled * z[index, r].to(total.dtype))
    if not len(q):
        return
    place = torch.cat(
        [torch.arange(a, b, device=q.device).sub_(a).mul_(b).add_(o) for a, b, o in gram.strips(J)]
    )  # (J,)
    number = torch.arange(len(q), device=q.device)
    first = torch.searchsorted(index, index)  # the first entry of each one's row
    count = number - first + 1  # products of each entry: one with every entry of its row up to itself
    end = count.cumsum(0)
    shift = first - (end - count)  # from the number of a product to that of the other entry
    start, done = 0, 0
    while start < len(q):
        # 2**19: products of two entries computed at a time: 4 MiB of values and 4 MiB of positions
        stop = max(start + 1, int(torch.searchsorted(end, done + 2**19, right=True)))
        left = torch.repeat_interleave(number[start:stop], count[start:stop])
        right = shift[left] + torch.arange(done, done + len(left), device=q.device)
        total.index_add_(0, place[columns[left]] + columns[right], q[left] * scaled[right])
        start, done = stop, done + len(left)
    for a, b, view in gram.strip_views(total, J):  # the squares on the diagonal are kept whole
        square = view[:, a:b]
        square.copy_(square.tril() + square.tril(-1).mT)
