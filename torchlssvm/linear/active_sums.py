"""Exact sums over the active samples of one class, and the ridge system they make."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from torchlssvm.functional import gram
from torchlssvm.functional.moving_active_set import LEAST_ACTIVE_PIVOT
from torchlssvm.functional.system import Centre, Factor, GroupSums
from torchlssvm.linear.grid_rows import GridRows
from torchlssvm.linear.normal_equations import RidgeProblem, SolvedSystem, Units, solve_problem
from torchlssvm.linear.row_scale import RowScale
from torchlssvm.linear.solution import Solution
from torchlssvm.statistics import Statistics
from torchlssvm.statistics.accumulator import Accumulator, SignedRows


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
    """Integer sums over some of the rows held, for one class against the rest: a group of sums for each weight.

    Each group has the sum of q q^T and, beside it, the sums of q over all rows and over the rows of the class. ``counts``
    (groups, 2) are the numbers of these rows, with copies.
    """

    def __init__(self, rows: GridRows, groups: WeightGroups, label: int):
        self.rows, self.groups, self.label = rows, groups, label
        number = len(groups.values)
        self.sums = Accumulator(rows.in_features, 2, number, True, rows.device, lambda x, out, _: out.copy_(x))
        self.counts = torch.zeros(number, 2, dtype=torch.int64, device=rows.device)

    @classmethod
    def of_all(cls, rows: GridRows, groups: WeightGroups, label: int, stats: Statistics) -> ActiveSums:
        """Sums over all rows, taken from the statistics."""
        out, J, sums = cls(rows, groups, label), rows.in_features, dict[int, Tensor]()
        V, counts = stats.class_sums()
        bare = gram.packed_size(J, 0)
        for g in range(len(groups.values)):
            members = [c for c, group in enumerate(groups.of_class) if group == g and int(counts[c])]
            if not members:
                continue
            sums[g] = packed = torch.empty(gram.packed_size(J, 2), dtype=torch.int64, device=rows.device)
            classes = [None] if len(groups.values) == 1 else members
            packed[:bare] = stats.packed([i for c in classes for i in stats.groups_of(c)])[:bare]
            own = [label] if label in members else []
            for i, some in enumerate((members, own)):
                gram.side_view(packed, J, 2)[i] = V[some].sum(0)
                out.counts[g, i] = counts[some].sum()
        out.sums.replace_sums(sums)
        return out

    def change(self, slots: Tensor, sign: int) -> None:
        """Add rows, or take them away (sign -1). slots: (c,) places."""
        rows, of_class = self.rows, torch.tensor(self.groups.of_class, device=self.rows.device)
        for part in slots.split(4096) if len(slots) else ():  # 42 MB as float64 at 1,280 features
            labels, copies = rows.labels[part], rows.copies[part]
            side = torch.stack([torch.ones_like(copies), (labels == self.label).to(copies)], 1)
            bounds = (copies * rows.peaks[part].clamp(min=1.0).square()).cpu().numpy()
            codes, times = of_class[labels], None if bool((copies == 1).all()) else copies
            self.sums.push(
                SignedRows(rows.q[part], side, codes.cpu().numpy(), times, bounds, float(bounds.sum()), sign)
            )
            self.counts.index_add_(0, codes, (side * copies[:, None]).to(torch.int64), alpha=sign)
        self.sums.complete()

    @property
    def empty(self) -> bool:
        """True if there is no row."""
        return not bool(self.counts.any())

    def solve(self, scale: RowScale, active: Tensor, by_rows: bool = False) -> tuple[Solution, bool]:
        """The ridge solution on these rows, and whether float64 had the digits for it. active: (n,), True for the rows.

        The solution is computed from the sums alone, so its bits do not depend on the way the rows were summed. If float64
        lacks the digits (or with ``by_rows``), it is computed from the rows, in the order in which they are saved.
        """
        solution = Solution(
            scale.width(self.rows.in_features), 1, scale.intercept == "free", self.rows.device, LEAST_ACTIVE_PIVOT
        )
        if self.empty:
            return solution, True
        w, beta, mu, n, factor, units, share = solve_sums(self, scale)
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
        for part in slots.split(4096):
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


def solve_sums(sums: ActiveSums, scale: RowScale) -> SolvedSystem:
    """Solve for the class of some sums."""
    J, weights, groups, sides = sums.rows.in_features, [], [], []
    for g, (weight, (number, own)) in enumerate(zip(sums.groups.values, sums.counts.tolist(), strict=True)):
        if number:
            total, mine = gram.side_view(sums.sums.total(g), J, 2)
            weights.append((weight, 2 * own - number))
            groups.append(GroupSums(weight, sums.sums.total(g), total, sums.counts[g, 0]))
            sides.append(2 * mine - total)

    def targets(centre: Centre | None) -> tuple[Tensor, Tensor]:
        rhs = torch.zeros(1, J, dtype=torch.float64, device=sums.rows.device)
        for (weight, y), side in zip(weights, sides, strict=True):
            rhs[0] += weight * (side if centre is None else side - y * centre.c).to(torch.float64)
        return rhs, rhs.new_tensor([sum(weight * y for weight, y in weights)])

    units = Units(scale.step, 1.0, scale.rho)
    return solve_problem(RidgeProblem(groups, targets, J, units, scale.intercept, scale.standard))
