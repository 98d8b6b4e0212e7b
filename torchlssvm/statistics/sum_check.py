"""A check of statistics against samples that costs one pass over them: :class:`SumCheck`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from torchlssvm.functional.freivalds import GramCheck
from torchlssvm.functional.modes import exactly
from torchlssvm.functional.row_normalization import normalized
from torchlssvm.functional.sample_identity import fold_of

if TYPE_CHECKING:
    from torchlssvm.statistics.statistics import Statistics


class SumCheck:
    """Compares statistics on a grid with samples, batch by batch.

    Counts and class sums are summed exactly; the matrices of products, per group, and the sums with float targets are compared
    by Freivalds' test (:mod:`torchlssvm.functional.freivalds`).
    """

    def __init__(self, statistics: Statistics):
        self.statistics = statistics
        self.groups = 1 if statistics.accumulator is None else statistics.accumulator.groups
        F, K, J, device = max(1, statistics.folds), statistics.num_classes, statistics.in_features, statistics.device
        self.gram = GramCheck(J, self.groups, device)
        self.moments = torch.zeros_like(statistics.moments)
        self.class_sums = torch.zeros(F * K, J, dtype=torch.int64, device=device)  # of labels
        # The same of [1, t], as projections.
        self.target_sums = torch.zeros(F, K + 1, self.gram.T, dtype=torch.float64, device=device)

    @exactly
    def add(self, x: Tensor, y: Tensor, ids: Any = None) -> None:
        """Take in samples on the grid. x: (B, J); y: (B,) labels or (B, K) targets; ids: needed for folds."""
        s = self.statistics
        if s.grid is None or s.kind != ("labels" if y.ndim == 1 else "values"):
            raise ValueError(f"the statistics hold {s.kind or 'nothing'}, the samples are others")
        if y.ndim == 1 and len(y) and not 0 <= int(y.min()) <= int(y.max()) < s.num_classes:
            raise ValueError(f"a label is none of the {s.num_classes} classes")
        q = s.grid.quantize(x if s.normalize is None else normalized(x.to(torch.float64), s.normalize))
        low, high = torch.aminmax(q)
        largest = max(-float(low), float(high))
        folds = (
            torch.tensor(fold_of(ids, s.folds), device=q.device)
            if s.folds
            else torch.zeros(len(q), dtype=torch.int64, device=q.device)
        )
        if y.ndim == 1:
            codes = folds * s.num_classes + y
            self.moments.view(-1).add_(torch.bincount(codes, minlength=self.moments.numel()))
            self._add_class_sums(q, codes, largest)
            self._add_products(q, codes if s.per_class else folds, largest)
        else:
            self._add_products(q, folds, largest)
            self._add_targets(q, y, folds, largest)

    def _add_class_sums(self, q: Tensor, codes: Tensor, largest: float) -> None:
        rows = max(1, int(2**53 // max(1.0, largest)))  # whose sum is exact in float64
        for start in range(0, len(q), rows):
            part = torch.zeros(self.class_sums.shape, dtype=torch.float64, device=q.device)
            part.index_add_(0, codes[start : start + rows], q[start : start + rows])
            self.class_sums += part.to(torch.int64)

    def _add_products(self, q: Tensor, codes: Tensor, largest: float) -> None:
        if self.groups == 1:
            return self.gram.add(q, largest)
        for group in torch.unique(codes).tolist():
            self.gram.add(q[codes == group], largest, group)
        return None

    def _add_targets(self, q: Tensor, y: Tensor, folds: Tensor, largest: float) -> None:
        assert self.statistics.target_grid is not None
        steps = self.statistics.target_grid.quantize(y.reshape(len(y), -1))
        z = torch.cat([torch.ones_like(steps[:, :1]), steps], 1)  # (B, K + 1)
        projected, most = self.gram.project(q, largest), float(z.abs().max())
        for fold in torch.unique(folds).tolist():
            mine = folds == fold
            whole = z[mine].to(torch.int64)
            self.moments[fold] += (whole[:, :, None] * whole[:, None, :]).sum(0)
            found = self.target_sums[fold] + self.gram.sum_outer(z[mine], projected[mine], most)
            self.target_sums[fold] = torch.remainder(found, self.gram.moduli)

    @exactly
    def failure(self) -> str | None:
        """The first sum that is not that of the samples, in words; None when all agree."""
        s = self.statistics
        if not torch.equal(self.moments, s.moments):
            return "the counts are not those of the rows"
        for group in range(self.groups):
            sums = s.group_sums().get(group)
            packed = torch.zeros(s.packed_length(s.kind), dtype=torch.int64) if sums is None else sums
            if not self.gram.holds(packed, group):
                return "the sums of products are not those of the rows"
            side = s.side_sums(group) if s.accumulator is not None else packed.new_zeros(0, s.in_features)
            if s.kind == "values":
                if not self.gram.same(self.gram.project_sums(side), self.target_sums[group]):
                    return "the sums with targets are not those of the rows"
            elif not torch.equal(side, self.class_sums.view(self.groups, -1, s.in_features)[group][: len(side)]):
                return "the class sums are not those of the rows"
        return None
