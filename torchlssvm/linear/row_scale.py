"""Units of the rows of a head: grid, rho, intercept and, with ``scale="std"``, the standardization."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from torchlssvm.functional.squared_hinge import float_blocks
from torchlssvm.linear.standardization import Standardization


@dataclass(frozen=True)
class RowScale:
    """Coordinates in which the matrix of a system has eigenvalues of at least 1.

    Weights w' = sqrt(rho) w belong to rows v = [x (, 1)] / sqrt(rho), as in :mod:`torchlssvm.linear.solution`. Here x = q step,
    or x = (q - mean) / deviation if standardised. In steps, v = q factor - offset, and q^T w_q = (q factor)^T w' for
    w_q = factor w'.
    """

    step: float
    rho: float
    intercept: str
    standard: Standardization | None = None

    @property
    def root(self) -> float:
        """Square root of rho."""
        return math.sqrt(self.rho)

    @property
    def factor(self) -> Tensor | float:
        """One step of each feature in the coordinates v: one number, or (J,)."""
        return self.step / self.root if self.standard is None else 1.0 / (self.standard.deviation * self.root)

    @property
    def offset(self) -> Tensor | None:
        """The mean that is subtracted from standardised rows, in the coordinates v (J,); None without standardization."""
        return None if self.standard is None else self.standard.centre.mean * self.factor

    def width(self, J: int) -> int:
        """Coordinates of a row v: J, or J + 1 with a penalized intercept."""
        return J + (self.intercept == "penalized")

    def rows(self, q: Tensor) -> Tensor:
        """Rows v (B, D) of rows on the grid. q: (B, J) integers."""
        wide = q.to(torch.float64)
        rows = wide * self.factor if self.standard is None else self.standard.rows(wide) / self.root
        return torch.nn.functional.pad(rows, (0, 1), value=1.0 / self.root) if self.intercept == "penalized" else rows

    def lengths(self, q: Tensor, norms: Tensor) -> Tensor:
        """Lengths of q factor (n,). q: (n, J) integers; norms: (n,) of q."""
        if self.standard is None:
            return norms * self.factor
        factor = self.factor
        parts = [(block * factor).norm(dim=1) for _, block in float_blocks(q)]
        return torch.cat(parts) if parts else norms.clone()

    def reach(self, mu: Tensor) -> float:
        """Bound on the length by which a row v, less a mean mu (D,), differs from q factor."""
        shift = 0.0 if self.offset is None else float(self.offset.norm())
        return shift + (1.0 / self.root if self.intercept == "penalized" else float(mu.norm()))

    def weights(self, w: Tensor, beta: Tensor, mu: Tensor) -> tuple[Tensor, Tensor]:
        """Weights (J, C) and intercepts (C,) with scores x @ w + b for features as they come.

        w: (D, C), the weights w'; beta: (C,), with a free intercept the scores of the row v = mu (D,).
        """
        if self.intercept == "penalized":
            w, b = w[:-1] / self.root, w[-1] / self.root
        else:
            b = beta - mu @ w if self.intercept == "free" else beta
            w = w / self.root
        return (w, b) if self.standard is None else self.standard.weights(w, b)

    def point(self, w: Tensor, b: Tensor) -> Tensor:
        """w' (D, ...), the inverse of :meth:`weights` but for a free intercept. w: (J, ...); b: (...)."""
        out = w * (self.step / self.factor)
        if self.intercept != "penalized":
            return out
        if self.standard is not None:
            b = b + (self.standard.centre.mean * self.step) @ w
        return torch.cat([out, (b * self.root)[None]])

    def centred(self, gradient: Tensor, gradient_b: Tensor) -> Tensor:
        """Half gradients of the loss in w' (J, C), from those in w_q (J, C) and in the intercepts (C,)."""
        factor, offset = self.factor, self.offset
        out = gradient * (factor[:, None] if isinstance(factor, Tensor) else factor)
        return out if offset is None else out - offset[:, None] * gradient_b
