"""A random projection that is the same to the bit on every machine, device, thread count and batch size.

The projection is computed in integers, without rounding errors, so that the features of a sample do not depend on the batch
that contains it: a sample that was added in one batch can be removed in another. Each row x is scaled by a power of two and
rounded to integers of 20 bits, and the weights are integers of 13 bits. A product then has 33 bits, and a sum of up to 2^20
products has 53 bits, so a float64 matrix product is exact in every order of summation.
"""

from __future__ import annotations

import torch
from torch import Tensor

WEIGHT_SCALE = 2.0**10
"""Weights are multiples of 1/1024, of magnitude below 8: 13 bits."""

MOST_FEATURES = 2**20
"""The largest number of input features. The sum of their products is less than 2^53, which is exact in float64."""


def weights(shape: tuple[int, int], seed: int) -> Tensor:
    """Standard normal weights as whole numbers of 1/1024, int16."""
    generator = torch.Generator().manual_seed(seed)
    g = torch.randn(*shape, dtype=torch.float64, generator=generator)
    largest = 2.0**13 - 1
    return (g * WEIGHT_SCALE).round().clamp(-largest, largest).to(torch.int16)


def sign_weights(shape: tuple[int, int], seed: int) -> Tensor:
    """Random signs (J, M), int8: -1 or +1."""
    generator = torch.Generator().manual_seed(seed)
    return (2 * torch.randint(2, shape, generator=generator) - 1).to(torch.int8)


def project(x: Tensor, w: Tensor) -> Tensor:
    """Return x w (B, M), exact, float64, for x rounded to 20 bits of its row's largest entry. x: (B, J); w: (J, M) integers."""
    x = x.to(torch.float64)
    bits = 20  # to which a row is rounded; float32 has 24
    exponent = torch.frexp(x.abs().amax(1, keepdim=True)).exponent  # |x| < 2^exponent
    q = torch.ldexp(x, bits - exponent).round()
    return torch.ldexp(q @ w.to(torch.float64), exponent - bits)
