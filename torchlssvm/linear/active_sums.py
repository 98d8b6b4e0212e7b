"""The ridge system of one class on its active samples, from integer sums over them or from their rows."""

from __future__ import annotations

import torch
from torch import Tensor

from torchlssvm.functional.moving_active_set import LEAST_ACTIVE_PIVOT
from torchlssvm.functional.system import Centre, Factor
from torchlssvm.linear import normal_equations as normal
from torchlssvm.linear.grid_rows import GridRows
from torchlssvm.linear.row_scale import RowScale
from torchlssvm.linear.solution import Solution
from torchlssvm.statistics import Statistics

SUMMED_ROWS = 4096
"""Rows that are read at a time: 42 MB as float64 at 1,280 features."""


def row_weights(rows: GridRows, weights: Tensor | None, slots: Tensor | slice = slice(None)) -> Tensor:
    """Class weight times copies of the rows at ``slots`` (m,). weights: (K,), or None for ones."""
    copies = rows.copies[slots]
    return copies.clone() if weights is None else weights[rows.labels[slots]] * copies


def change_sums(sums: Statistics, rows: GridRows, slots: Tensor, sign: int) -> None:
    """Add rows of the head to sums, or take them away (sign -1). slots: (c,) places."""
    grid = sums.grid
    assert grid is not None
    for part in slots.split(SUMMED_ROWS) if len(slots) else ():
        copies = rows.copies[part]
        batch = sums.check(
            grid.dequantize(rows.q[part]),
            rows.labels[part],
            None if bool((copies == 1).all()) else copies,
            gridded=True,
        )
        sums.change([(batch, sign)])


def solve_sums(sums: Statistics, scale: RowScale, weights: Tensor | None, label: int) -> normal.SolvedSystem:
    """Solve for one class against the rest. weights: (K,) by class, or None for ones."""
    units = normal.Units(scale.step, 1.0, scale.rho)
    problem = normal.head_problem(sums, units, scale.intercept, weights, None, scale.standard)

    def targets(centre: Centre | None) -> tuple[Tensor, Tensor]:
        rhs, y = problem.targets(centre)
        return rhs[label : label + 1], y[label : label + 1]

    return normal.solve_problem(problem._replace(targets=targets))


def solve_active(
    sums: Statistics, rows: GridRows, scale: RowScale, weights: Tensor | None, label: int, active: Tensor,
    by_rows: bool = False,
) -> tuple[Solution, bool]:  # fmt: skip
    """The ridge solution of a class on its active rows, and whether float64 had the digits for it. active: (n,).

    The solution is computed from the sums alone, so its bits do not depend on the way the rows were summed. If float64 does
    not have enough digits for this (or with ``by_rows``), the solution is computed from the rows instead, in the order in
    which they are saved.
    """
    solution = Solution(scale.width(rows.in_features), 1, scale.intercept == "free", rows.device, LEAST_ACTIVE_PIVOT)
    if sums.n == 0:
        return solution, True
    w, beta, mu, n, factor, units, share = solve_sums(sums, scale, weights, label)
    # 1e-7: least share of a column's square that the columns before it do not explain: at 1e-7 half of the digits are lost
    sound = share >= 1e-7
    if by_rows or not sound:
        w, factor = solve_rows(rows, scale, weights, label, torch.nonzero(active)[:, 0], mu, beta)
        units = 1.0
    solution.set_base(w, beta, mu, n, factor, units)
    return solution, sound


def solve_rows(
    rows: GridRows, scale: RowScale, weights: Tensor | None, label: int, slots: Tensor, mu: Tensor, beta: Tensor
) -> tuple[Tensor, Factor]:
    """w' (D, 1) and the factor of I + V^T V by a QR decomposition of the rows V and of I, not of their squares.

    slots: (m,) places of the rows; mu: (D,) and beta: (1,), the means that a free intercept takes off.
    """
    D, centred = scale.width(rows.in_features), scale.intercept == "free"
    slots = slots[rows.saved_order(slots)]
    R = torch.zeros(0, D + 1, dtype=torch.float64, device=rows.device)
    for part in slots.split(SUMMED_ROWS):
        q, root = rows.q[part].to(torch.float64), row_weights(rows, weights, part).sqrt()[:, None]
        y = torch.where(rows.labels[part] == label, 1.0, -1.0).to(torch.float64)[:, None]
        if not centred:
            v = scale.rows(q)
        elif scale.standard is None:
            v = (q - mu / scale.factor) * scale.factor  # rounds the spread of the rows, not their distance from zero
        else:
            v = scale.rows(q) - mu
        R = torch.linalg.qr(torch.cat([R, torch.cat([v, y - beta], 1) * root]), mode="r")[1]
    ridge = torch.eye(D, D + 1, dtype=torch.float64, device=rows.device)
    R = torch.linalg.qr(torch.cat([R, ridge]), mode="r")[1][:D]
    R = R * torch.where(R.diagonal() < 0, -1.0, 1.0)[:, None]
    w = torch.linalg.solve_triangular(R[:, :D], R[:, D:], upper=True)
    info = torch.zeros((), dtype=torch.int32, device=rows.device)
    return w, Factor(R[:, :D].mT.contiguous(), D, info)
