"""A test that a device multiplies integers exactly in float64, which exact integer sums require.

Some hardware has few float64 units, and its libraries may emulate large float64 products with fewer bits. The test computes
M = Q^T Q on the device for a matrix Q (4096 x 1024) of integers up to 2^20 in magnitude. The entries of M are at most 2^52, so
float64 can represent all of them exactly. The host then checks M by Freivalds' test: M r must equal Q^T (Q r) for random
vectors r of 64-bit integers, computed modulo 2^64. With one vector, a wrong M passes with a probability of at most d / 2^64,
where d is the largest power of two that divides all errors of M. Since each error is below 2^53, so is d.
"""

from __future__ import annotations

from functools import lru_cache

import numpy as np
import torch
from torch import Tensor

from torchlssvm.errors import InexactDeviceError

PROBE_ROWS, PROBE_COLUMNS = 4096, 1024
"""Shape of the factor of the test product: large enough for libraries to emulate float64, if they ever do."""


def products_are_exact(device: torch.device) -> bool:
    """Multiply on the device and check on the host."""
    random = np.random.default_rng(0)
    # 2**20: features on a grid of 20 bits; 4,096 squares sum to at most 2^52
    Q = random.integers(-(2**20), 2**20, (PROBE_ROWS, PROBE_COLUMNS), endpoint=True)
    rows = torch.from_numpy(Q).to(device).to(torch.float64)
    M = read_exactly(rows.mT @ rows)
    if M is None:
        return False
    r = random.integers(-(2**63), 2**63 - 1, (PROBE_COLUMNS, 2), endpoint=True)
    with np.errstate(over="ignore"):  # modulo 2^64
        return bool(np.array_equal(M @ r, Q.T @ (Q @ r)))


def read_exactly(M: Tensor) -> np.ndarray[tuple[int, ...], np.dtype[np.int64]] | None:
    """Return a product as integers on the host; None if an entry is not an integer, or too large."""
    values = M.cpu().numpy()
    whole = np.isfinite(values).all() and (np.abs(values) < 2.0**53).all() and (values == np.floor(values)).all()
    return values.astype(np.int64) if whole else None


@lru_cache(maxsize=64)
def require_exact_products(device: torch.device) -> None:
    """Raise InexactDeviceError unless float64 products of the device are exact. Tested once for each process and device."""
    if not products_are_exact(device):
        raise InexactDeviceError(
            f"float64 products on {device} are not exact: a product of integers of {PROBE_ROWS} x {PROBE_COLUMNS} differs from "
            "the one computed in integers. Sums on a grid would be wrong there. Switch the emulation of float64 off in the "
            "device's libraries, keep the head on the CPU, or use grid=None, which accepts rounding and has no digest."
        )
