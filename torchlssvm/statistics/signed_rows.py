"""Signed rows on their way into the sums, and the runs of rows that are summed exactly."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from torchlssvm.functional import gram
from torchlssvm.statistics.batch import RowObserver

PRODUCT_ROWS = 1024
"""Rows that wait at most, and that one product takes at least where it is exact: enough for the speed of large products."""


@dataclass
class SignedRows:
    """Signed rows on their way in: x (B, J) and side columns z (B, R).

    One-hot side columns may be given as the labels z (B,) they stand for. Group codes (B,), or None for one group;
    multiplicities (B,), or None.

    ``bounds`` (B,), on the host, are the largest squares of each row times its multiplicity, ``gross`` their sum; ``sign`` is
    +1 or -1. ``observer``: sees the rows on the grid. ``host_codes`` (B,): the group codes on the host.
    """

    x: Tensor
    z: Tensor
    codes: Tensor | None
    mult: Tensor | None
    bounds: NDArray[np.float64]
    gross: float
    sign: int
    observer: RowObserver | None = None
    host_codes: NDArray[np.int64] | None = None

    def write_side(self, out: Tensor, pick: slice | Tensor) -> None:
        """Write the side columns of some rows. out: (b, R)."""
        z = self.z[pick]
        if z.ndim == 2:
            out.copy_(z)
        else:
            out.zero_().scatter_(1, z[:, None], 1.0)

    @property
    def scale(self) -> Tensor | float:
        """The multiplicities times the sign."""
        return float(self.sign) if self.mult is None else self.mult * self.sign


def split_runs(bounds: NDArray[np.float64], chunk: int = PRODUCT_ROWS) -> list[tuple[int, int]]:
    """Split rows into runs of at most 1,024, or as given, whose products sum exactly. bounds: (B,)."""
    out: list[tuple[int, int]] = []
    stack = [(a, min(a + chunk, len(bounds))) for a in range(0, len(bounds), chunk)][::-1]
    while stack:
        a, b = stack.pop()
        if b - a > 1 and float(bounds[a:b].sum()) > gram.LARGEST_EXACT_INTEGER:
            middle = (a + b) // 2
            stack += [(middle, b), (a, middle)]
        else:
            out.append((a, b))
    return out
