"""Hashes of samples, by which a removal without a store is compared with what was added."""

from __future__ import annotations

import hashlib
from typing import Any

import numpy as np
import torch
from torch import Tensor

__all__ = ["SAMPLE_HASH_BYTES", "hash_samples"]

SAMPLE_HASH_BYTES = 16
"""Bytes of a hash: 128 bits, so that two of 2^40 samples share one with a probability below 2^-48."""


def hash_samples(x: Tensor, y: Tensor) -> list[bytes]:
    """Hash each sample to 16 bytes: BLAKE2b of its numbers, as float32 where that holds every one of the row, else as float64.

    So the same numbers have the same hash whatever dtype they come in, and float32, the usual one, is hashed as it is.
    """
    given, targets = _numbers(x), _numbers(y).astype(np.float64).reshape(len(y), -1)
    with np.errstate(over="ignore"):
        rows: Any = given.astype(np.float32, copy=False)
    if given.dtype not in (np.float32, np.float16):
        whole = given.astype(np.float64, copy=False)
        rows = [r if (r == w).all() else w for r, w in zip(rows, whole, strict=True)]
    return [
        hashlib.blake2b(r.tobytes() + t.tobytes(), digest_size=SAMPLE_HASH_BYTES).digest()
        for r, t in zip(rows, targets, strict=True)
    ]


def _numbers(t: Tensor) -> Any:
    """Convert to a NumPy array, cheaper than a tensor for few numbers; bfloat16, which NumPy lacks, as float32."""
    t = t.detach().cpu()
    return (t.float() if t.dtype == torch.bfloat16 else t).numpy()
