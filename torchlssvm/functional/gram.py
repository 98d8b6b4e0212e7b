"""Packed Gram matrices: the lower triangle of sums of q q^T, computed at the speed of a matrix product.

M = sum q q^T (J x J) is symmetric, so only its lower triangle is stored. It is cut into *strips*, groups of neighbouring rows:
a strip holds rows a to b and columns 0 to b of M as a contiguous (b - a, b) matrix, so that one matrix product updates it.
With about eight strips, the products do 9/16 of the work of the full product. A few side columns z (one-hot labels, a
constant, targets) may accompany each row q. The rows of V = sum z q^T are appended to the last strip, so that its product
computes V as well.

If J is large, two layouts are used, because tall strips make products fast, but short strips waste less memory above the
diagonal. Products are computed in about eight tall strips, while sums that are kept (for example one per class) are stored in
strips of 24 rows. At J = 1024, strips of 24 rows take 2 % more memory than the triangle alone, and eight strips take 14 %
more. :func:`carry_` adds sums in the first layout to sums in the second.

With integers q, a float64 product is exact as long as the sum over all rows of their largest square stays below 2^53.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from functools import lru_cache

import torch
from torch import Tensor
from torch.nn.functional import linear

from torchlssvm.functional.threads import share_out

LARGEST_EXACT_INTEGER = 2**53
"""Integers up to here are exact in float64."""


def product_strip_rows(J: int) -> int:
    """Return the height of strips for products: about J / 8, in multiples of 48 to match the tiles of a float64 product."""
    return 48 * max(1, round(J / 384))


@lru_cache(maxsize=256)
def strips(J: int, product: bool = False) -> tuple[tuple[int, int, int], ...]:
    """(first row, last row + 1, offset in the packed vector) of each strip of a J x J matrix."""
    # 24: the height of the strips of kept sums, if the strips for products are taller than 48 rows
    height = product_strip_rows(J) if product or product_strip_rows(J) == 48 else 24
    out, offset = [], 0
    for a in range(0, J, height):
        b = min(a + height, J)
        out.append((a, b, offset))
        offset += (b - a) * b
    return tuple(out)


def packed_size(J: int, R: int, product: bool = False) -> int:
    """Return the length of the packed vector: the strips of M (J x J), then V (R x J)."""
    a, b, offset = strips(J, product)[-1]
    return offset + (b - a) * b + R * J


def strip_views(packed: Tensor, J: int, product: bool = False) -> list[tuple[int, int, Tensor]]:
    """The strips as (a, b, matrix (b - a, b)) views of the packed vector."""
    return [(a, b, packed.narrow(-1, o, (b - a) * b).view(b - a, b)) for a, b, o in strips(J, product)]


def side_view(packed: Tensor, J: int, R: int, product: bool = False) -> Tensor:
    """V (R, J), a view of the packed vector."""
    return packed.narrow(-1, packed_size(J, 0, product), R * J).view(R, J)


def accumulate_(packed: Tensor, rows: Tensor, J: int, scaled: Tensor | None = None, alpha: float = 1.0) -> None:
    """Add alpha * sum over rows of [q; z] q^T to packed, in place.

    packed: float64, in strips for products; rows: (n, J + R) float64, features then side columns; scaled: (n, J + R), the rows
    times their multiplicities, or None if these are all one. Threads process the strips in parallel, the largest first.
    """
    right = rows if scaled is None else scaled
    R = rows.shape[1] - J

    def add(some: Iterable[tuple[int, int, int]]) -> None:
        for a, b, offset in some:
            last = R if b == J else 0  # the side rows are part of the last strip's product
            view = packed.narrow(0, offset, (b + last - a) * b).view(b + last - a, b)
            view.addmm_(rows[:, a : b + last].mT, right[:, :b], alpha=alpha)

    parts = strips(J, product=True)[::-1]
    if len(parts) > 1:
        share_out(add, parts, packed.device)
    else:
        add(parts)


def carry_(total: Tensor | None, packed: Tensor, J: int, R: int, dtype: torch.dtype) -> Tensor:
    """Add packed to total, in place if there is a total. packed: float64, in strips for products; total: in strips to keep."""
    if strips(J) == strips(J, product=True):
        part = packed.to(dtype, copy=total is None)
        return part if total is None else total.add_(part)
    fresh = total is None
    out = torch.empty(packed_size(J, R), dtype=dtype, device=packed.device) if total is None else total
    pairs = [(side_view(out, J, R), side_view(packed, J, R, product=True))]
    source = iter(strip_views(packed, J, product=True))
    c, d, strip = next(source)
    for a, b, view in strip_views(out, J):
        if a >= d:
            c, d, strip = next(source)
        pairs.append((view, strip[a - c : b - c, :b]))
    for view, part in pairs:
        if fresh:
            view.copy_(part)
        else:
            view.add_(part.to(dtype))
    return out


def diagonal(packed: Tensor, J: int) -> Tensor:
    """The diagonal of M (J,), a copy."""
    return torch.cat([view[:, a:b].diagonal() for a, b, view in strip_views(packed, J)])


def pack(M: Tensor, V: Tensor) -> Tensor:
    """The packed vector of a symmetric M (J, J) and V (R, J)."""
    J, R = M.shape[0], V.shape[0]
    out = torch.empty(packed_size(J, R), dtype=M.dtype, device=M.device)
    for a, b, view in strip_views(out, J):
        view.copy_(M[a:b, :b])
    side_view(out, J, R).copy_(V)
    return out


def unpack(packed: Tensor, J: int) -> Tensor:
    """The whole symmetric M (J, J)."""
    full = torch.zeros(J, J, dtype=packed.dtype, device=packed.device)
    for a, b, view in strip_views(packed, J):
        full[a:b, :b] = view
    return full.tril_() + full.tril(-1).mT


def add_products_(total: Tensor, rows: Tensor, J: int, scaled: Tensor | None = None, alpha: float = 1.0) -> None:
    """Add alpha * sum over rows of [q; z] q^T to total, a few strips at a time, for sums too large to be held in memory twice.

    total: in strips to keep; rows, scaled: as for :func:`accumulate_`. The products of these rows must be exact.
    """
    right = rows if scaled is None else scaled
    R, kept = rows.shape[1] - J, strip_views(total, J)
    # 2**21: the largest number of entries (16 MiB) that one product computes before they are added to the sums
    some = max(1, 2**21 // (J * (kept[0][1] - kept[0][0])))  # strips in a product
    for start in range(0, len(kept), some):
        part = kept[start : start + some]
        first, last = part[0][0], part[-1][1]
        product = (rows[:, first:last].mT @ right[:, :last]).mul_(alpha)
        for a, b, view in part:
            view.add_(product[a - first : b - first, :b].to(total.dtype))
    if R:
        side_view(total, J, R).add_((rows[:, J:].mT @ right[:, :J]).mul_(alpha).to(total.dtype))


def exact_products(rows: Tensor, vectors: Tensor) -> Tensor:
    """Compute rows @ vectors^T (B, m) exactly, as int64.

    rows: (B, J), dense or coalesced; vectors: (m, J). Both hold integers as float64, of at most 2^26 and 2^16 in magnitude.
    """
    out = torch.zeros(rows.shape[0], len(vectors), dtype=torch.int64, device=rows.device)
    if rows.is_sparse:  # at most 2^42 for an entry: no number of columns leaves 64 bits
        index, columns = rows.indices()
        parts = rows.values().to(torch.int64)[:, None] * vectors.to(torch.int64).mT[columns]  # (entries, m)
        return out.index_add_(0, index, parts)
    size = 2**11  # columns whose products of 2^26 and 2^16 sum to at most 2^53, where float64 is exact
    for a in range(0, rows.shape[1], size):
        out += linear(rows[:, a : a + size], vectors[:, a : a + size]).to(torch.int64)
    return out


def lower_bytes(packed: Tensor, J: int, R: int) -> Iterator[bytes]:
    """Return the canonical bytes, strip by strip: the lower triangle of M by rows, then V by rows, as little-endian int64."""
    for a, b, view in strip_views(packed, J):
        lower = torch.ones(b - a, b, dtype=torch.bool, device=view.device).tril_(a)
        yield view.masked_select(lower).cpu().numpy().astype("<i8", copy=False).tobytes()
    yield side_view(packed, J, R).cpu().numpy().astype("<i8", copy=False).tobytes()
