"""Exact products of gridded rows with integers of any size, at the speed of float64 products.

A large integer is written in limbs of 16 bits, W = sum_l limb_l 2^(16 l), each limb with the sign of W. Rows are integers of at
most 2^26, so a product of 2^11 columns with one limb stays within 2^53 and float64 computes it exactly; the limbs of the
result are put together again as Python's integers.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

LIMB_BITS = 16
"""Bits of a limb: with rows of 26 bits, 2^11 products fit into the 53 bits of float64."""

BLOCK_TERMS = 2**11
"""Terms of one exact sum: 2^11 products of 26 and 16 bits are at most 2^53."""

Integers = NDArray[Any]
"""An array of Python integers (dtype object)."""


def to_integers(values: Tensor, exponent: int) -> Integers:
    """Round values times 2^exponent to integers. values: (n,) float64."""
    out = np.empty(len(values), dtype=object)
    for i, v in enumerate(values.tolist()):
        numerator, denominator = v.as_integer_ratio()  # the denominator is a power of two
        out[i] = (numerator << exponent) // denominator
    return out


def to_floats(values: Integers, denominator: int) -> NDArray[np.float64]:
    """Divide integers by one integer; each quotient is rounded once. values: (n,)."""
    return np.array([int(v) / denominator for v in values], dtype=np.float64)


def split_limbs(values: Integers) -> Tensor:
    """Write integers in limbs (n, L), float64. values: (n,)."""
    sign = np.array([-1.0 if v < 0 else 1.0 for v in values])
    size = np.array([abs(v) for v in values], dtype=object)
    count = max(1, -(-max((int(v).bit_length() for v in size), default=1) // LIMB_BITS))
    limbs = np.empty((len(values), count))
    for index in range(count):
        limbs[:, index] = (size & (2**LIMB_BITS - 1)).astype(np.float64) * sign
        size = size >> LIMB_BITS
    return torch.from_numpy(limbs)


def join_limbs(limbs: NDArray[np.int64]) -> Integers:
    """Put integers together from sums of limbs. limbs: (n, L)."""
    total = np.zeros(len(limbs), dtype=object)
    for index in range(limbs.shape[1]):
        total = total + (limbs[:, index].astype(object) << (LIMB_BITS * index))
    return total


def sum_products(left: Tensor, limbs: Tensor) -> NDArray[np.int64]:
    """Multiply exactly: left @ limbs as int64. left: (m, n) integers up to 2^26 as float64; limbs: (n, L)."""
    total = torch.zeros(left.shape[0], limbs.shape[1], dtype=torch.int64, device=left.device)
    limbs = limbs.to(left.device)
    for a in range(0, left.shape[1], BLOCK_TERMS):
        total += (left[:, a : a + BLOCK_TERMS] @ limbs[a : a + BLOCK_TERMS]).to(torch.int64)
    out: NDArray[np.int64] = total.cpu().numpy()
    return out
