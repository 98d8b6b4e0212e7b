"""The sides of samples whose margins are too close to 1 for float64: the solution refined with exact integer residuals.

The point is held as integers: weights W / 2^S in grid units and an intercept B / 2^S. Its half gradient on the active set A,

    g = (rho / h^2) W + sum_{i in A} c_i q_i (q_i^T W + B - y_i 2^S),      g_b = sum_{i in A} c_i (q_i^T W + B - y_i 2^S),

is exact, since rows, rho, the step h and the weights c are rational numbers. With standardised features rho / h^2 is rho times
the variance of the column, and q_i stands for q_i - m / n: rational numbers too. The inverse at hand, in float64, turns it
into a correction; each one gains as many digits as float64 has beyond the condition of the system. A margin further from 1
than the bound of :mod:`torchlssvm.functional.squared_hinge` is decided; what is 1 to 1e-30 with a bound as small is a tie.
"""

from __future__ import annotations

import math
from fractions import Fraction
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from torchlssvm.errors import ConvergenceError
from torchlssvm.functional.exact_integers import (
    BLOCK_TERMS,
    Integers,
    join_limbs,
    split_limbs,
    sum_products,
    to_floats,
    to_integers,
)
from torchlssvm.linear.active_sums import WeightGroups
from torchlssvm.linear.grid_rows import GridRows
from torchlssvm.linear.row_scale import RowScale
from torchlssvm.linear.solution import Solution

FRACTION_BITS = 176
"""Binary places of the point: rows of 2^37 in the sum of magnitudes leave 1e-41 for a margin."""

TIE = 1e-30
"""A margin within this of 1 counts as 1."""

MAX_CORRECTIONS = 60
"""Corrections before giving up: each gains at least one bit, or the system is too ill-conditioned."""

SAFETY = 1.0 + 2.0**-20
"""Covers the rounding of a bound that is itself computed in float64."""


class Sides(NamedTuple):
    """Decided samples: active (m,), and which of the inactive ones are ties (m,)."""

    active: Tensor
    ties: Tensor


class ExactRefinement:
    """The solution of one class on its active set, refined until samples are decided."""

    def __init__(self, rows: GridRows, groups: WeightGroups, scale: RowScale, label: int, active: Tensor):
        """Refine on the rows where ``active`` (n,) is True."""
        self.rows, self.scale, self.label = rows, scale, label
        self.slots = torch.nonzero(active)[:, 0]
        rho, step, standard = Fraction(scale.rho), Fraction(scale.step), scale.standard
        squares = (
            [1 / step**2] * rows.in_features if standard is None else standard.exact_squares(_column_squares(rows))
        )
        self.weights = [Fraction(v) for v in groups.values]
        fractions = {rho, *(rho * v for v in set(squares)), *self.weights}
        self.denominator = math.lcm(*(v.denominator for v in fractions))
        self.ridge = np.array([int(rho * v * self.denominator) for v in squares], dtype=object)
        self.constant = int(rho * self.denominator)
        self.mean: tuple[Integers, int] | None = (
            None  # sums of all rows and their number, where rows are taken about the mean
        )
        if standard is not None and scale.intercept != "free":
            self.mean = np.array(standard.exact_sums(), dtype=object), int(standard.centre.n)
        group = torch.tensor(groups.of_class, device=rows.device)[rows.labels[self.slots]].cpu().numpy()
        self.factors = np.array(  # weight times copies of each active row, over the common denominator
            [
                int(self.weights[g] * self.denominator) * int(c)
                for g, c in zip(group.tolist(), rows.copies[self.slots].tolist(), strict=True)
            ],
            dtype=object,
        )
        self.total = sum(self.factors.tolist())
        self.signs = np.where((rows.labels[self.slots] == label).cpu().numpy(), 1, -1).astype(object)

    def decide(self, solution: Solution, near: Tensor) -> Sides:
        """Sides of the rows in ``near`` (m,), places; ConvergenceError if the corrections find no end."""
        J, scale, one = self.rows.in_features, self.scale, 1 << FRACTION_BITS
        w, b = scale.weights(solution, J)
        if self.mean is not None:  # the intercept is that of standardised rows
            b = solution.w[J] / scale.root if scale.intercept == "penalized" else torch.zeros_like(b)
        W, B = to_integers(w[:, 0].cpu() * scale.step, FRACTION_BITS), int(to_integers(b.cpu(), FRACTION_BITS)[0])
        signs = np.where((self.rows.labels[near] == self.label).cpu().numpy(), 1, -1)
        lengths = self._lengths(near, solution)
        last = math.inf
        for _ in range(MAX_CORRECTIONS):
            g, g_b = self._gradient(W, B)
            gradient, size = self._scaled(g, g_b, solution)
            bound = (lengths * size[0] + size[1]) * SAFETY + 2.0**-100
            f = self._scores(near, W, B)
            distance = to_floats(f * signs - one, one)
            undecided = np.abs(distance) <= bound
            ties = undecided & (bound <= TIE) & (np.abs(distance) <= TIE)
            if not (undecided & ~ties).any():
                active = torch.from_numpy((distance < 0) & ~ties)
                return Sides(active.to(near.device), torch.from_numpy(ties).to(near.device))
            if size[0] + size[1] > last / 2 and size[0] + size[1] > 2.0**-140:
                break
            last = size[0] + size[1]
            W, B = self._corrected(W, B, gradient, solution)
        raise ConvergenceError(
            f"{int((undecided & ~ties).sum())} margin(s) of class {self.label} lie within {float(bound.max()):.1e} of 1 and "
            "cannot be told apart from it: the system is too ill-conditioned for float64. Use a larger rho, or scale the "
            "features."
        )

    def _gradient(self, W: Integers, B: int) -> tuple[Integers, int]:
        """The half gradient times 2^S and the common denominator."""
        t = self._scores(self.slots, W, B) - self.signs * (1 << FRACTION_BITS)
        t = t * self.factors
        g = W * self.ridge
        limbs = split_limbs(t)
        total = np.zeros((self.rows.in_features, limbs.shape[1]), dtype=np.int64)
        parts: Integers = np.zeros(self.rows.in_features, dtype=object)
        for a in range(0, len(self.slots), BLOCK_TERMS):
            block = self.rows.q[self.slots[a : a + BLOCK_TERMS]].to(torch.float64)
            total += sum_products(block.mT, limbs[a : a + BLOCK_TERMS])
            if a // BLOCK_TERMS % 512 == 511:  # sums of 2^53 in int64
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
        shift = 0 if self.mean is None else int(self.mean[0] @ W) // self.mean[1]
        return self._products(slots, W) + (B - shift)

    def _products(self, slots: Tensor, W: Integers) -> Integers:
        limbs = split_limbs(W)
        out = [
            sum_products(self.rows.q[slots[a : a + BLOCK_TERMS]].to(torch.float64), limbs)
            for a in range(0, len(slots), BLOCK_TERMS)
        ]
        return join_limbs(np.concatenate(out)) if out else np.zeros(0, dtype=object)

    def _scaled(self, g: Integers, g_b: int, solution: Solution) -> tuple[Tensor, tuple[float, float]]:
        """The gradient in the coordinates of the solution (D + 1,), the intercept last, and bounds on both parts."""
        unit, scale = self.denominator << FRACTION_BITS, self.scale
        flat = torch.from_numpy(to_floats(g, unit)).to(solution.device) * scale.factor
        gb = g_b / unit
        if scale.intercept == "penalized":
            flat = torch.cat([flat, torch.tensor([gb / scale.root], dtype=torch.float64, device=flat.device)])
            return flat, (float(flat.norm()), 0.0)
        if scale.intercept == "none":
            return flat, (float(flat.norm()), 0.0)
        mean = self._mean(solution)
        rounding = 2.0**-50 * (float(flat.norm()) + float(mean.norm()) * abs(gb))
        centred = flat - mean * gb
        weight = self.total / self.denominator
        self._gb = gb
        return centred, (float(centred.norm()) + rounding, abs(gb) / weight)

    def _mean(self, solution: Solution) -> Tensor:
        """Mean of the active rows q factor (J,)."""
        return solution.mu if self.scale.offset is None else solution.mu + self.scale.offset

    def _lengths(self, near: Tensor, solution: Solution) -> NDArray[np.float64]:
        """Lengths of rows v (m,), less the mean with a free intercept."""
        out = [
            (self.scale.rows(self.rows.q[near[a : a + BLOCK_TERMS]]) - solution.mu).norm(dim=1)
            for a in range(0, len(near), BLOCK_TERMS)
        ]
        lengths: NDArray[np.float64] = torch.cat(out).cpu().numpy() * SAFETY
        return lengths

    def _corrected(self, W: Integers, B: int, gradient: Tensor, solution: Solution) -> tuple[Integers, int]:
        J, scale = self.rows.in_features, self.scale
        step = solution.apply_inverse(gradient[None])[0]
        if scale.intercept == "penalized":
            change, db = step[:J] * scale.factor, float(step[J]) / scale.root
        elif scale.intercept == "none":
            change, db = step * scale.factor, 0.0
        else:
            weight = self.total / self.denominator
            change, db = step * scale.factor, self._gb / weight - float(self._mean(solution) @ step)
        db_integer = int(to_integers(torch.tensor([db], dtype=torch.float64), FRACTION_BITS)[0])
        return W - to_integers(change.cpu(), FRACTION_BITS), B - db_integer


def _column_squares(rows: GridRows) -> list[int]:
    """Sums of q^2 over all rows and copies (J,)."""
    total = torch.zeros(rows.in_features, dtype=torch.int64, device=rows.device)
    for a in range(0, rows.n, BLOCK_TERMS):
        q, copies = rows.q[a : a + BLOCK_TERMS].to(torch.int64), rows.copies[a : a + BLOCK_TERMS].to(torch.int64)
        total += (q * q * copies[:, None]).sum(0)
    return [int(v) for v in total.tolist()]
