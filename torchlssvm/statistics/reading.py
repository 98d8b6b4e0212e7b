"""The sums themselves, and how to read them."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from torchlssvm.functional import checks, gram
from torchlssvm.functional.grid import FixedPoint
from torchlssvm.functional.system import Sums
from torchlssvm.statistics.accumulator import Accumulator
from torchlssvm.statistics.batch import Choices
from torchlssvm.statistics.integrity import Integrity

if TYPE_CHECKING:
    from torchlssvm.statistics.marking import Base

LIMIT = 2**62
"""Sums are refused past this bound, so that int64 never overflows (one bit is kept for centring)."""


class Reading:
    """State and read access of :class:`~torchlssvm.Statistics`."""

    def __init__(
        self,
        in_features: int,
        num_classes: int,
        *,
        grid: FixedPoint | str | None = "auto",
        target_grid: FixedPoint | str | None = "auto",
        per_class: bool = False,
        folds: int = 0,
        device: torch.device | str | None = None,
    ):
        """Start at zero."""
        for name, value, least in (
            ("in_features", in_features, 1),
            ("num_classes", num_classes, 1),
            ("folds", folds, 0),
        ):
            if isinstance(value, bool) or not isinstance(value, int) or value < least:
                raise ValueError(f"{name} must be an int >= {least}, got {value!r}")
        for name, option in (("grid", grid), ("target_grid", target_grid)):
            if not isinstance(option, FixedPoint):
                checks.one_of(option, f"{name} (or a FixedPoint)", ("auto", None))
        self.in_features, self.num_classes, self.per_class, self.folds = (
            in_features,
            num_classes,
            bool(per_class),
            folds,
        )
        self.exact = grid is not None
        self.device = torch.empty(0, device=device).device
        self._wanted = Choices(
            None,
            grid if isinstance(grid, FixedPoint) else None,
            target_grid if isinstance(target_grid, FixedPoint) and self.exact else None,
        )
        self._base: Base | None = None
        self.integrity = Integrity()
        self._reset()

    def _reset(self) -> None:
        """Zero, with everything that the data decided open again."""
        self._choices = Choices()
        self._gross = self._n = 0.0  # known on the host, so that reading them never waits for a device
        self._hashes: dict[int, bytes] = {}
        dtype = torch.int64 if self.exact else torch.float64
        F, K = max(1, self.folds), self.num_classes
        self._side = torch.zeros(F, K, dtype=dtype, device=self.device)  # counts (labels); (F, K+1, K+1) for values
        self._sums: Accumulator | None = None

    def _decide(self, choices: Choices) -> Accumulator:
        """Take over the first batch's choices."""
        if self._sums is None:
            self._choices = choices
            F, K, J = max(1, self.folds), self.num_classes, self.in_features
            groups, R = F, K
            if choices.kind == "values":
                R = K + 1
                self._side = torch.zeros(F, R, R, dtype=self._side.dtype, device=self.device)
            elif self.per_class:
                groups, R = F * K, 1
            grid = choices.grid
            self._sums = Accumulator(
                J, R, groups, self.exact, self.device, self._copy if grid is None else grid.quantize,
                None if self._base is None else self._base.sums,
            )  # fmt: skip
        return self._sums

    def check_whole(self) -> None:
        """InterruptedUpdateError if a change of the sums was interrupted."""
        self.integrity.check()
        if self._sums is not None:
            self._sums.integrity.check()

    @staticmethod
    def _copy(x: Tensor, out: Tensor, scratch: Tensor | None) -> Tensor:
        del scratch
        return out.copy_(x)

    @property
    def kind(self) -> str | None:
        """What is held: "labels", "values", or None while empty."""
        return self._choices.kind

    @property
    def grid(self) -> FixedPoint | None:
        """The grid in use; None while it is open (``grid="auto"``, no data yet) or without a grid."""
        return self._choices.grid or self._wanted.grid

    @property
    def target_grid(self) -> FixedPoint | None:
        """The grid of float targets in use."""
        return self._choices.target_grid or self._wanted.target_grid

    @property
    def counts(self) -> Tensor:
        """Samples per class (K,); for float targets the number of samples, K times."""
        if self._side.ndim == 2:
            return self._side.sum(0)
        return self._side[:, 0, 0].sum().expand(self.num_classes).clone()

    @property
    def n(self) -> int | float:
        """The number of samples (their total weight)."""
        return int(self._n) if self.exact else self._n

    @property
    def empty(self) -> bool:
        """Whether nothing is held (all sums zero)."""
        return self._sums is None

    @property
    def drained(self) -> bool:
        """Whether no weight is left, whatever the sums are; real weights may end a little beside zero."""
        return abs(self._n) <= self._slack()

    def _slack(self) -> float:
        """Integers have none; float64 sums may end a little below zero."""
        return 0.0 if self.exact else 1e-9 * max(1.0, float(self.n))

    def class_sums(self, folds: list[int] | None = None) -> tuple[Tensor, Tensor]:
        """Side sums V (R, J) and side moments: class sums with counts (K,), or for values [1, t] sums with (K+1, K+1)."""
        self.check_whole()
        keep = range(max(1, self.folds)) if folds is None else folds
        K, J = self.num_classes, self.in_features
        side = self._side[list(keep)].sum(0)
        if self._sums is None:
            return torch.zeros(K, J, dtype=self._side.dtype, device=self.device), side
        if self.per_class:
            parts = [torch.cat([self._view(f * K + c) for c in range(K)]) for f in keep]
        else:
            parts = [self._view(f) for f in keep]
        return (parts[0] if len(parts) == 1 else torch.stack(parts).sum(0)), side

    def _view(self, group: int) -> Tensor:
        assert self._sums is not None
        self._sums.settle()
        if group not in self._sums.sums:
            return torch.zeros(self._sums.R, self.in_features, dtype=self._sums.dtype, device=self.device)
        return gram.side_view(self._sums.sums[group], self.in_features, self._sums.R)

    def packed(self, label: int | None = None, folds: list[int] | None = None) -> Tensor:
        """The packed M of one class, or of everything; over the given folds or all. Do not write to it."""
        assert self._sums is not None
        keep = range(max(1, self.folds)) if folds is None else folds
        K = self.num_classes
        if not self.per_class:
            groups = list(keep)
        elif label is None:
            groups = [f * K + c for f in keep for c in range(K)]
        else:
            groups = [f * K + label for f in keep]
        self._sums.settle()
        present = [self._sums.sums[g] for g in groups if g in self._sums.sums]
        if not present:
            return self._sums.total(groups[0])
        total = present[0]
        for i, part in enumerate(present[1:]):
            total = total + part if i == 0 else total.add_(part)
        return total

    def sums(self, label: int | None = None, weight: float | None = None, folds: list[int] | None = None) -> Sums:
        """M, m and n of one class or of everything, for :mod:`torchlssvm.functional.system`."""
        if label is not None and self.per_class:  # one class: not a copy of what all have
            keep = list(range(max(1, self.folds)) if folds is None else folds)
            m = torch.stack([self._view(f * self.num_classes + label)[0] for f in keep]).sum(0)
            return Sums(weight, self.packed(label, folds), m, self._side[keep, label].sum())
        V, side = self.class_sums(folds)
        if side.ndim == 2:
            return Sums(weight, self.packed(None, folds), V[0], side[0, 0])
        if label is None:
            return Sums(weight, self.packed(None, folds), V.sum(0), side.sum())
        return Sums(weight, self.packed(label, folds), V[label], side[label])

    def largest_square(self) -> float:
        """The largest diagonal entry of M: for sums of actual samples a bound on every entry."""
        host = None if self._sums is None else checks.to_host(self._sums.diag.sum(0).amax())
        return float(LIMIT) if host is None else host[0][0]

    @property
    def M(self) -> Tensor:
        """Sum of [q; 1] [q; 1]^T in grid units: (J+1, J+1), or (K, J+1, J+1) per class."""
        J = self.in_features
        if self._sums is None:
            shape = (self.num_classes, J + 1, J + 1) if self.per_class else (J + 1, J + 1)
            return torch.zeros(shape, dtype=self._side.dtype, device=self.device)
        out = []
        for label in range(self.num_classes) if self.per_class else [None]:
            s = self.sums(label)
            full = torch.cat([gram.unpack(s.packed, J), s.m[None]])
            out.append(torch.cat([full, torch.cat([s.m, s.n[None]])[:, None]], 1))
        return torch.stack(out) if self.per_class else out[0]

    @property
    def V(self) -> Tensor:
        """Sum of [q; 1] t^T, t = -1/+1 for labels and in steps of the target grid for values: (J+1, K)."""
        V, side = self.class_sums()
        if side.ndim == 2:
            return torch.cat([V[1:], side[0, 1:, None]], 1).mT
        both = torch.cat([V, side[:, None]], 1)  # class sums of [q; 1], (K, J+1)
        return (2 * both - both.sum(0)).mT

    @property
    def T(self) -> Tensor:
        """Sum of t^2 (K,), in steps of the target grid squared."""
        side = self._side.sum(0)
        return side.diagonal()[1:].clone() if side.ndim == 2 else side.sum().expand(self.num_classes).clone()
