"""Normalization of rows before they are rounded to the grid. A row is normalized by its own numbers, so no state is kept.

"l2" divides a row by its length (a row of zeros does not change). "sqrt" replaces each feature x by sign(x) sqrt|x|.

A row must have the same bits when it is removed as when it was added, whether it is computed alone or in a batch, from strided
memory, on another device or in numpy. The sum functions of libraries do not guarantee this, because the order in which they
add numbers is not fixed. The squares of a row are therefore added by repeated halving, s[:h] + s[h:], with elementwise
operations whose bits IEEE 754 defines. To avoid overflow, the squares are those of x / max|x|. On the CPU, numpy computes the
square roots with the processor's instruction, because the last bit of torch's square roots is wrong for 1 of 80 numbers.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor

from torchlssvm.functional.sparse_rows import row_largest, with_values

ROW_NORMALIZATIONS = (None, "l2", "sqrt")
"""Values of the option ``normalize``."""


def normalized(x: Tensor, kind: str | None, root: Callable[[Tensor], Tensor] | None = None) -> Tensor:
    """Normalize rows in the float type of x, which must be float64 for rows that are added and removed. x: (B, J).

    Pass ``torch.sqrt`` as ``root`` for gradients and for export, which need a graph but not the exact last bit.

    >>> (
    ...     normalized(torch.tensor([[3.0, -4.0], [0.0, 0.0]]), "l2").tolist(),
    ...     normalized(torch.tensor([[-9.0]]), "sqrt").tolist(),
    ... )
    ([[0.6000000238418579, -0.800000011920929], [0.0, 0.0]], [[-3.0]])
    """
    if kind is None:
        return x
    root = root or rounded_root
    if x.layout != torch.strided:
        return normalized_sparse(x.to_sparse_coo().coalesce(), kind, root)
    if kind == "sqrt":
        return x.sign() * root(x.abs())
    largest = x.abs().amax(1, keepdim=True)
    x = x / torch.where(largest == 0, torch.ones_like(largest), largest)
    length = root(sum_by_halves(x * x))
    return x / torch.where(length == 0, torch.ones_like(length), length)


def normalized_sparse(x: Tensor, kind: str, root: Callable[[Tensor], Tensor]) -> Tensor:
    """Normalize sparse rows with the same bits as dense rows, since zeros change no sum. x: (B, J), coalesced."""
    values = x.values()
    if kind == "sqrt":
        return with_values(x, values.sign() * root(values.abs()))
    (rows, columns), largest = x.indices(), row_largest(x)
    values = values / torch.where(largest == 0, torch.ones_like(largest), largest)[rows]
    sums, at, width = values * values, rows, 1 << (x.shape[1] - 1).bit_length()
    while width > 1:
        width //= 2
        keys, place = torch.unique(at * width + columns % width, return_inverse=True)
        # two at most in each
        sums = torch.zeros(len(keys), dtype=sums.dtype, device=x.device).index_add_(0, place, sums)
        at, columns = keys // width, keys % width
    length = torch.zeros_like(largest).index_add_(0, at, root(sums))
    return with_values(x, values / torch.where(length == 0, torch.ones_like(length), length)[rows])


def rounded_root(x: Tensor) -> Tensor:
    """Square roots, correctly rounded."""
    if x.device.type != "cpu":
        return x.sqrt()
    return torch.from_numpy(np.sqrt(x.detach().numpy()))


def sum_by_halves(values: Tensor) -> Tensor:
    """Sum each row (B, 1) in a fixed order. The order must not change, because it determines the bits. values: (B, J)."""
    width = 1 << (values.shape[1] - 1).bit_length()
    values = torch.nn.functional.pad(values, (0, width - values.shape[1]))
    while width > 1:
        width //= 2
        values = values[:, :width] + values[:, width:]
    return values
