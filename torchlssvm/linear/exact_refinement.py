"""The solution of one class on its active set, refined with exact integer residuals until it is exact to 30 digits.

The point is held as integers: weights W / 2^S in grid units and an intercept B / 2^S. Its half gradient on the active set A,

    g = (rho / h^2) W + sum_{i in A} c_i q_i (q_i^T W + B - y_i 2^S),      g_b = sum_{i in A} c_i (q_i^T W + B - y_i 2^S),

is exact, since rows, rho, the step h and the weights c are rational numbers. With standardised features rho / h^2 is rho times
the variance of the column, and q_i stands for q_i - m / n. Both are rational numbers too. The known inverse, in float64, turns
the gradient into a correction. Each correction gains as many digits as float64 has beyond the condition of the system. The
refinement ends when the bound of :mod:`torchlssvm.functional.squared_hinge` on the margin of the longest row is below the width
of a tie. So neither a side nor a bit of the rounded weights depends on the starting point of the refinement.

Products of rows with large integers run at the speed of float64, because each integer is split into signed limbs of 16 bits.
Rows are integers of at most 2^26, so a product of 2^11 columns with one limb stays within 2^53, where float64 is exact.
"""

from __future__ import annotations

import math
from fractions import Fraction
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from torchlssvm.errors import ConvergenceError
from torchlssvm.functional.gram import exact_products
from torchlssvm.linear.active_sums import row_weights
from torchlssvm.linear.grid_rows import GridRows
from torchlssvm.linear.row_scale import RowScale
from torchlssvm.linear.solution import Solution

LARGEST_GRADIENT = 1e150
"""Norm of the gradient from which the corrections count as divergent. The square of this number is finite in float64."""

LONGEST_ROWS = 1e13
"""Length of all active samples, in roots of the ridge, up to which a QR decomposition of them still has the ridge."""

BOUND_ROUNDING_FACTOR = 1.0 + 2.0**-20
"""Factor on a bound that is computed in float64, which covers the rounding of up to 2^30 terms."""

LIMB_BITS, BLOCK_ROWS = 16, 2**11
"""Bits of a limb, and rows that are read at a time. The sum of 2^11 products of 26 and 16 bits fits into 53 bits."""

Integers = NDArray[Any]
"""An array of Python integers (dtype object)."""


class ExactRefinement:
    """The solution of one class on its active set: call :meth:`refine`, then read sides and weights."""

    def __init__(self, rows: GridRows, weights: Tensor | None, scale: RowScale, label: int, active: Tensor):
        """Refine on the rows where ``active`` (n,) is True. weights: (K,) by class, or None for ones."""
        self.rows, self.scale, self.label = rows, scale, label
        self.slots = torch.nonzero(active)[:, 0]
        rho, step, standard = Fraction(scale.rho), Fraction(scale.step), scale.standard
        squares = [1 / step**2] * rows.in_features if standard is None else standard.exact_squares()
        values = {Fraction(1)} if weights is None else {Fraction(v) for v in weights.tolist()}
        fractions = {rho, *(rho * v for v in set(squares)), *values}
        self.denominator = math.lcm(*(v.denominator for v in fractions))
        self.ridge = np.array([int(rho * v * self.denominator) for v in squares], dtype=object)
        self.constant = int(rho * self.denominator)
        # sums of all rows and their number, where rows are taken about the mean
        self.mean: tuple[Integers, int] | None = None
        if standard is not None and scale.intercept != "free":
            self.mean = np.array(standard.exact_sums(), dtype=object), int(standard.centre.n)
        of_row = torch.ones_like(rows.norms) if weights is None else weights[rows.labels]
        self.factors = np.array(  # weight times copies of each active row, over the common denominator
            [
                int(Fraction(v) * self.denominator) * int(c)
                for v, c in zip(of_row[self.slots].tolist(), rows.copies[self.slots].tolist(), strict=True)
            ],
            dtype=object,
        )
        self.total = sum(self.factors.tolist())
        lengths = scale.lengths(rows.q[self.slots], rows.norms[self.slots])
        weight = row_weights(rows, weights, self.slots)
        self.spread = float(weight @ lengths.square())
        finest = float(torch.as_tensor(scale.factor).min())
        growth = (1.0 + self.spread) * (1.0 + self.spread**0.5) * rows.in_features / min(1.0, finest)
        # 1e-30: largest distance from 1 at which a margin counts as 1 (a tie). Among samples whose squared length is s ridges
        # it is below 1e-10 / s^3, so that residuals of the order 1/s and 1/s^2, which matter to other samples, are not ties.
        self.tie = min(1e-30, 1e-10 / (1.0 + min(self.spread, LONGEST_ROWS**3)) ** 3)
        # 176: binary places of the point, at least: rows of 2^37 in the sum of magnitudes leave 1e-41 for a margin
        # 16: binary places beyond those that rounding of the point takes on its way to a margin
        self.bits = max(176, math.ceil(math.log2(min(growth, LARGEST_GRADIENT)) - math.log2(self.tie)) + 16)
        self.signs = np.where((rows.labels[self.slots] == label).cpu().numpy(), 1, -1).astype(object)

    def refine(self, solution: Solution) -> None:
        """Move from a nearby solution to the minimum on the active set. Raises ConvergenceError on divergence."""
        W, B = self._start(solution)
        rows, scale = self.rows, self.scale
        longest = float(scale.lengths(rows.q, rows.norms).amax() + scale.reach(solution.mu)) * BOUND_ROUNDING_FACTOR
        best, stale = math.inf, 0
        # 200: corrections before giving up; two to ten are usual
        for _ in range(200):
            gradient, size, size_b = self._scaled(*self._gradient(W, B), solution)
            bound = longest * size + size_b
            if bound <= self.tie / 2:
                self.W, self.B = W, B
                return
            best, stale = (bound, 0) if bound < best / 2 else (best, stale + 1)
            step = solution.apply_inverse(gradient[None])[0]
            # 24: corrections in a row that may leave the gradient where it is: of an ill-conditioned system it rises and
            # falls on its way
            if stale > 24 or not bound < LARGEST_GRADIENT or not bool(step.isfinite().all()):
                break
            W, B = self._corrected(W, B, step, solution)
        raise self._too_long(bound)

    def sides(self, slots: Tensor) -> Tensor:
        """Which rows have a margin below 1 (m,), after :meth:`refine`. A tie counts as not below. slots: (m,) places."""
        one = 1 << self.bits
        signs = np.where((self.rows.labels[slots] == self.label).cpu().numpy(), 1, -1)
        distance = to_floats(self._scores(slots, self.W, self.B) * signs - one, one)
        return torch.from_numpy(distance < -self.tie).to(slots.device)

    def weights(self) -> tuple[Tensor, Tensor]:
        """w (J,) and b () for the original features, after :meth:`refine`. Each number is rounded once."""
        one = 1 << self.bits
        w = torch.from_numpy(to_floats(self.W, one)) / self.scale.step
        b = torch.tensor((self.B - self._shift(self.W)) / one, dtype=torch.float64)
        return w.to(self.rows.device), b.to(self.rows.device)

    def _start(self, solution: Solution) -> tuple[Integers, int]:
        """The point of a solution."""
        scale = self.scale
        w, b = scale.weights(solution.w, solution.beta, solution.mu)
        if self.mean is not None:  # the intercept is that of standardised rows
            b = solution.w[-1] / scale.root if scale.intercept == "penalized" else torch.zeros_like(b)
        if not bool(w.isfinite().all() & b.isfinite().all()):
            raise self._too_long(math.inf)
        return to_integers(w[:, 0].cpu() * scale.step, self.bits), int(to_integers(b.cpu(), self.bits)[0])

    def _too_long(self, bound: float) -> ConvergenceError:
        least = self.scale.rho * self.spread / LONGEST_ROWS**2
        return ConvergenceError(
            f"the weights of class {self.label} cannot be found: margins are known to {bound:.1e} only, because the active "
            f"samples are {self.spread**0.5:.1e} times as long as the square root of rho, and float64 has 16 digits. Use a rho "
            f"of at least {least:.1e}, or scale the features. The samples are still held."
        )

    def _gradient(self, W: Integers, B: int) -> tuple[Integers, int]:
        """The half gradient times 2^S and the common denominator."""
        t = self._scores(self.slots, W, B) - self.signs * (1 << self.bits)
        t = t * self.factors
        g = W * self.ridge
        limbs = split_limbs(t)
        total = np.zeros((self.rows.in_features, limbs.shape[1]), dtype=np.int64)
        parts: Integers = np.zeros(self.rows.in_features, dtype=object)
        for i, (some, part) in enumerate(zip(self.slots.split(BLOCK_ROWS), limbs.split(BLOCK_ROWS), strict=True)):
            block = self.rows.q[some].to(torch.float64)
            total += exact_products(block.mT, part.mT.to(block.device)).cpu().numpy()
            if i % 512 == 511:  # sums of 2^53 in int64
                parts, total = parts + join_limbs(total), np.zeros_like(total)
        g = g + parts + join_limbs(total)
        g_b = int(t.sum()) if len(t) else 0
        if self.mean is not None:
            g = g - self.mean[0] * g_b // self.mean[1]
        if self.scale.intercept == "penalized":
            g_b += B * self.constant
        return g, g_b

    def _scores(self, slots: Tensor, W: Integers, B: int) -> Integers:
        """Scores of rows times 2^S, rounded down where the mean is a fraction."""
        return self._products(slots, W) + (B - self._shift(W))

    def _shift(self, W: Integers) -> int:
        """Score of the mean that rows are taken about, times 2^S."""
        return 0 if self.mean is None else int(self.mean[0] @ W) // self.mean[1]

    def _products(self, slots: Tensor, W: Integers) -> Integers:
        limbs = split_limbs(W).mT.to(slots.device)
        blocks = [self.rows.q[some].to(torch.float64) for some in slots.split(BLOCK_ROWS)]
        return join_limbs(torch.cat([exact_products(block, limbs) for block in blocks]).cpu().numpy())

    def _scaled(self, g: Integers, g_b: int, solution: Solution) -> tuple[Tensor, float, float]:
        """The gradient in the coordinates of the solution (D,), its norm, and a bound on the error of a free intercept."""
        unit, scale = self.denominator << self.bits, self.scale
        flat = torch.from_numpy(to_floats(g, unit)).to(solution.device) * scale.factor
        gb = g_b / unit
        if scale.intercept == "penalized":
            flat = torch.cat([flat, torch.tensor([gb / scale.root], dtype=torch.float64, device=flat.device)])
        if scale.intercept != "free":
            return flat, float(flat.norm()), 0.0
        mean = self._mean(solution)
        rounding = 2.0**-50 * (float(flat.norm()) + float(mean.norm()) * abs(gb))
        self._gb = gb
        centred = flat - mean * gb
        return centred, float(centred.norm()) + rounding, abs(gb) / (self.total / self.denominator)

    def _mean(self, solution: Solution) -> Tensor:
        """Mean of the active rows q factor (J,)."""
        return solution.mu if self.scale.offset is None else solution.mu + self.scale.offset

    def _corrected(self, W: Integers, B: int, step: Tensor, solution: Solution) -> tuple[Integers, int]:
        """The point after a step (D,) in the coordinates of the solution."""
        J, scale = self.rows.in_features, self.scale
        if scale.intercept == "penalized":
            change, db = step[:J] * scale.factor, float(step[J]) / scale.root
        elif scale.intercept == "none":
            change, db = step * scale.factor, 0.0
        else:
            weight = self.total / self.denominator
            change, db = step * scale.factor, self._gb / weight - float(self._mean(solution) @ step)
        db_integer = int(to_integers(torch.tensor([db], dtype=torch.float64), self.bits)[0])
        return W - to_integers(change.cpu(), self.bits), B - db_integer


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
