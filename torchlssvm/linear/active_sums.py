"""Exact sums over the active samples of one class, and the ridge system they make."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from torchlssvm.functional import gram
from torchlssvm.functional.moving_active_set import LEAST_ACTIVE_PIVOT
from torchlssvm.functional.system import Centre, Factor, GroupSums, clamped_factor
from torchlssvm.linear.grid_rows import GridRows
from torchlssvm.linear.normal_equations import RidgeProblem, SolvedSystem, Units, check_finite, solve_problem
from torchlssvm.linear.row_scale import RowScale
from torchlssvm.linear.solution import Solution
from torchlssvm.statistics import Statistics

SIDE_COLUMNS = 2
"""Columns beside the features: ones, for the sum of the rows, and ones where the class is, for the sum of its own."""

CHUNK_ROWS = 4096
"""Rows of one product, at most: 42 MB as float64 at 1,280 features."""


@dataclass(frozen=True)
class WeightGroups:
    """Classes by their weight: ``values`` in ascending order, and for each class the place of its weight there (K,)."""

    values: tuple[float, ...]
    of_class: tuple[int, ...]

    @classmethod
    def of(cls, weights: Tensor | None, K: int) -> WeightGroups:
        """Group classes of equal weight. weights: (K,), or None for ones."""
        numbers = [1.0] * K if weights is None else weights.tolist()
        values = tuple(sorted(set(numbers)))
        return cls(values, tuple(values.index(v) for v in numbers))

    def by_row(self, labels: Tensor) -> Tensor:
        """The weight of each row (n,). labels: (n,)."""
        table = torch.tensor([self.values[g] for g in self.of_class], dtype=torch.float64, device=labels.device)
        return table[labels]


class ActiveSums:
    """Integer sums over some of the rows held, for one class against the rest and for each weight.

    The packed sum of q q^T is stored for each weight. Below it are the sums of q over all rows and over the rows of the class.
    """

    def __init__(self, rows: GridRows, groups: WeightGroups, label: int):
        self.rows, self.groups, self.label = rows, groups, label
        length = gram.packed_size(rows.in_features, SIDE_COLUMNS)
        self.packed: list[Tensor | None] = [None] * len(groups.values)
        self._length = length
        self.counts = [[0, 0] for _ in groups.values]  # copies in all, and of the class

    @classmethod
    def of_all(cls, rows: GridRows, groups: WeightGroups, label: int, stats: Statistics) -> ActiveSums:
        """Sums over all rows, taken from the statistics."""
        out, J = cls(rows, groups, label), rows.in_features
        V, counts = stats.class_sums()
        bare = gram.packed_size(J, 0)
        for g in range(len(groups.values)):
            members = [c for c, group in enumerate(groups.of_class) if group == g]
            number = int(counts[members].sum())
            if not number:
                continue
            packed = torch.empty(out._length, dtype=torch.int64, device=rows.device)
            if len(groups.values) == 1:
                packed[:bare] = stats.packed()[:bare]
            else:
                packed[:bare] = sum(stats.packed(c)[:bare] for c in members if int(counts[c]))
            side = gram.side_view(packed, J, SIDE_COLUMNS)
            side[0] = V[members].sum(0)
            side[1] = V[label] if label in members else 0
            out.packed[g] = packed
            out.counts[g] = [number, int(counts[label]) if label in members else 0]
        return out

    def change(self, slots: Tensor, sign: int) -> None:
        """Add rows, or take them away (sign -1). slots: (c,) places."""
        if not len(slots):
            return
        rows, J = self.rows, self.rows.in_features
        labels = rows.labels[slots]
        of_row = torch.tensor(self.groups.of_class, device=rows.device)[labels]
        for g in range(len(self.groups.values)):
            mine = slots if len(self.groups.values) == 1 else slots[of_row == g]
            if not len(mine):
                continue
            copies, own = rows.copies[mine], rows.labels[mine] == self.label
            bounds = copies * rows.peaks[mine].clamp(min=1.0).square()
            plain = bool((copies == 1).all())
            scratch: Tensor | None = None
            for part in chunks(bounds):
                index = mine[part]
                block = torch.empty(len(index), J + SIDE_COLUMNS, dtype=torch.float64, device=rows.device)
                block[:, :J] = rows.q[index]
                block[:, J] = 1.0
                block[:, J + 1] = own[part]
                scaled = None if plain else block * copies[part, None]
                size = gram.packed_size(J, SIDE_COLUMNS, product=True)
                if scratch is None:
                    scratch = torch.empty(size, dtype=torch.float64, device=rows.device)
                scratch.zero_()
                gram.accumulate_(scratch, block, J, scaled, float(sign))
                self.packed[g] = gram.carry_(self.packed[g], scratch, J, SIDE_COLUMNS, torch.int64)
            self.counts[g][0] += sign * int(copies.sum())
            self.counts[g][1] += sign * int(copies[own].sum())

    @property
    def empty(self) -> bool:
        """True if there is no row."""
        return not any(n for n, _ in self.counts)

    def solve(self, scale: RowScale, small: bool, active: Tensor, by_rows: bool = False) -> tuple[Solution, bool]:
        """The ridge solution on these rows, and whether float64 had the digits for it. active: (n,), True for the rows.

        The solution is computed from the sums alone, so its bits do not depend on the way the rows were summed. If float64
        lacks the digits (or with ``by_rows``), it is computed from the rows, in the order in which they are saved.
        """
        solution = Solution(
            scale.width(self.rows.in_features), 1, scale.intercept == "free", self.rows.device, LEAST_ACTIVE_PIVOT
        )
        if self.empty:
            return solution, True
        w, beta, mu, n, factor, units, share = solve_sums(self, scale, small)
        # 1e-7: least share of a column's square that the columns before it do not explain: at 1e-7 half of the digits are lost
        sound = share >= 1e-7
        if by_rows or not sound:
            w, factor = self._solve_rows(scale, torch.nonzero(active)[:, 0], mu, beta)
            units = 1.0
        solution.set_base(w, beta, mu, n, factor, units)
        return solution, sound

    def _solve_rows(self, scale: RowScale, slots: Tensor, mu: Tensor, beta: Tensor) -> tuple[Tensor, Factor]:
        """w' (D, 1) and the factor of I + V^T V by a QR decomposition of the rows V and of I, not of their squares.

        slots: (m,) places of the rows; mu: (D,) and beta: (1,), the means that a free intercept takes off.
        """
        rows, D, centred = self.rows, scale.width(self.rows.in_features), scale.intercept == "free"
        slots = slots[rows.saved_order(slots)]
        R = torch.zeros(0, D + 1, dtype=torch.float64, device=rows.device)
        for part in slots.split(CHUNK_ROWS):
            labels, q = rows.labels[part], rows.q[part].to(torch.float64)
            root = (self.groups.by_row(labels) * rows.copies[part]).sqrt()[:, None]
            y = torch.where(labels == self.label, 1.0, -1.0).to(torch.float64)[:, None]
            if not centred:
                v = scale.rows(q)
            elif scale.standard is None:
                v = (
                    q - mu / scale.factor
                ) * scale.factor  # rounds the spread of the rows, not their distance from zero
            else:
                v = scale.rows(q) - mu
            R = torch.linalg.qr(torch.cat([R, torch.cat([v, y - beta], 1) * root]), mode="r")[1]
        ridge = torch.eye(D, D + 1, dtype=torch.float64, device=rows.device)
        R = torch.linalg.qr(torch.cat([R, ridge]), mode="r")[1][:D]
        R = R * torch.where(R.diagonal() < 0, -1.0, 1.0)[:, None]
        w = torch.linalg.solve_triangular(R[:, :D], R[:, D:], upper=True)
        info = torch.zeros((), dtype=torch.int32, device=rows.device)
        return w, Factor(R[:, :D].mT.contiguous(), D, info)


def chunks(bounds: Tensor) -> list[slice]:
    """Runs of rows whose products stay exact in float64. bounds: (n,), bounds on the squares."""
    host = bounds.cpu().numpy()
    out, start, total = [], 0, 0.0
    for i, bound in enumerate(host.tolist()):
        if i > start and (total + bound > gram.LARGEST_EXACT_INTEGER or i - start >= CHUNK_ROWS):
            out.append(slice(start, i))
            start, total = i, 0.0
        total += bound
    out.append(slice(start, len(host)))
    return out


def solve_sums(sums: ActiveSums, scale: RowScale, small: bool) -> SolvedSystem:
    """Solve for the class of some sums.

    If rounding has removed the ridge from the sums, eigenvalues are raised to the ridge, which is good enough to start a
    search. The ``info`` of the factor is then not 0.
    """
    J, device = sums.rows.in_features, sums.rows.device
    weights, groups, sides = [], [], []
    for weight, packed, (number, own) in zip(sums.groups.values, sums.packed, sums.counts, strict=True):
        if packed is not None and number:
            total, mine = gram.side_view(packed, J, SIDE_COLUMNS)[:2]
            weights.append((weight, 2 * own - number))
            groups.append(GroupSums(weight, packed, total, torch.tensor(number, device=device)))
            sides.append(2 * mine - total)

    def targets(centre: Centre | None) -> tuple[Tensor, Tensor]:
        rhs = torch.zeros(1, J, dtype=torch.float64, device=device)
        for (weight, y), side in zip(weights, sides, strict=True):
            rhs[0] += weight * (side if centre is None else side - y * centre.c).to(torch.float64)
        return rhs, rhs.new_tensor([sum(weight * y for weight, y in weights)])

    units = Units(scale.step, 1.0, scale.rho)
    return solve_problem(
        RidgeProblem(groups, targets, J, units, scale.intercept, small, scale.standard), raised_to_ridge
    )


def raised_to_ridge(work: Tensor, D: int, floor: float) -> Factor:
    """A factor of the system with its eigenvalues raised to the ridge. Its ``info`` reports that they were raised."""
    check_finite(work, D, floor)
    factor = clamped_factor(work, D, work.new_tensor(floor))[0]
    return factor._replace(info=torch.ones_like(factor.info))
