"""Adding, removing, relabelling, and going back."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from torchlssvm.errors import GridError, RemovalError
from torchlssvm.functional import checks
from torchlssvm.functional.grid import FixedPoint
from torchlssvm.functional.modes import exactly
from torchlssvm.statistics.accumulator import Accumulator
from torchlssvm.statistics.batch import Batch, Choices, check_batch
from torchlssvm.statistics.reading import LIMIT, Reading
from torchlssvm.statistics.signed_rows import Rows, runs

if TYPE_CHECKING:
    from typing_extensions import Self


class Changing(Reading):
    """Changes of :class:`~torchlssvm.Statistics`, each all or nothing."""

    def check(self, x: Any, y: Any, weight: Any = None, ids: Any = None, like: Batch | None = None) -> Batch:
        """A checked batch for :meth:`change`. ``like``: a batch that goes in together with this one and decides first."""
        choices = self._choices if like is None or self._sums is not None else like.choices
        if choices.kind is None and self._base is not None:
            choices = self._base.choices  # emptied since the mark: what was agreed stays decided
        batch = check_batch(
            x, y, weight, ids, J=self.in_features, K=self.num_classes, folds=self.folds, device=self.device,
            exact=self.exact, choices=choices, wanted=self._wanted,
        )  # fmt: skip
        if self.per_class and batch.choices.kind == "values":
            raise ValueError("statistics per class need labels (B,), got float targets")
        return batch

    @exactly
    def add(self, x: Any, y: Any, weight: Any = None, ids: Any = None) -> Self:
        """Add samples. x: (B, J); y: (B,) labels or (B, K) targets; weight: (B,) multiplicities."""
        self.change([(self.check(x, y, weight, ids), 1)])
        return self

    @exactly
    def remove(self, x: Any, y: Any, weight: Any = None, ids: Any = None) -> Self:
        """Subtract samples, whether or not they were added: statistics are a group, a delta may be negative."""
        self.change([(self.check(x, y, weight, ids), -1)])
        return self

    def change(
        self, changes: list[tuple[Batch, int]], held: bool = False, rough: bool = False, proven: bool = False
    ) -> list[Tensor] | None:
        """Apply checked batches with their signs, all or none; an interrupted change leaves the statistics unusable.

        With ``held`` the sums must stay those of actual samples: a count or a diagonal below zero is a RemovalError, unless
        what is removed is ``proven`` to be held. ``rough`` lets diagonals pass, for samples that are only roughly those held.
        Returns the rows in grid units, one (B, J) view per batch that lives until the next change, or None for many rows.
        """
        changes = [(b, s) for b, s in changes if len(b)]
        if not changes:
            return []
        self.check_whole()
        first = changes[0][0]
        if held and self._sums is None and all(s < 0 for _, s in changes):
            raise checks.removal_error("the machine is empty")
        gross = sum(b.gross for b, _ in changes)
        removed = sum(b.gross for b, s in changes if s < 0) if held else 0.0
        self._reserve(gross - removed, removed)
        side = self._side_after(changes, first.choices)
        fresh = self._sums is None
        if held and not proven and any(s < 0 for _, s in changes):
            counts = side if side.ndim == 2 else side[:, 0, 0]
            host = checks.to_host(counts)
            if host is not None and min(host[0]) < -self._slack():
                which = (
                    f"the count of class {host[0].index(min(host[0])) % self.num_classes}"
                    if side.ndim == 2
                    else "the count"
                )
                raise checks.removal_error(f"{which} would fall to {min(host[0]):g}")
        rows = [self._rows(b, s) for b, s in changes]
        with self.integrity:
            sums = self._decide(first.choices)
            try:
                views = self._sum(sums, rows, held and not rough and not proven)
            except RemovalError:
                if fresh:
                    self._reset()
                raise
            self._side = side
            self._gross += gross
            self._n += sum(b.size * s for b, s in changes)
            if self._base is not None:
                self._base.shrunk |= any(s < 0 for _, s in changes)
        return views

    def _sum(self, sums: Accumulator, rows: list[Rows], held: bool) -> list[Tensor] | None:
        shrinks = held and any(r.sign < 0 for r in rows)
        if sums.fits_tail(rows):
            views, diag = sums.stage(rows)
            if shrinks:
                self._check_diagonal(diag)
            sums.commit(rows, diag)
            return views
        undo = None
        if shrinks and not self.exact:
            sums.settle()
            undo = {k: v.clone() for k, v in sums.sums.items()}
        for r in rows:
            sums.push(r)
        if shrinks:
            try:
                self._check_diagonal(sums.diag)
            except RemovalError:
                if undo is None:
                    for r in rows:  # integers: the opposite change undoes it exactly
                        sums.push(replace(r, sign=-r.sign))
                else:
                    sums.settle()
                    sums.sums = undo
                    sums.refresh_diagonals()
                raise
        return None

    def _check_diagonal(self, diag: Tensor) -> None:
        host = checks.to_host(diag.amin())
        if host is not None and host[0][0] < -self._slack():
            raise checks.removal_error("a sum of squares would fall below zero")

    def _side_after(self, changes: list[tuple[Batch, int]], choices: Choices) -> Tensor:
        F, K = max(1, self.folds), self.num_classes
        dtype = self._side.dtype
        if choices.kind == "labels":
            side = self._side.reshape(-1)
            for b, s in changes:
                assert b.labels is not None
                one = torch.ones(len(b), dtype=dtype, device=self.device) if b.mult is None else b.mult.to(dtype)
                side = side.index_add(0, b.labels if b.folds is None else b.folds * K + b.labels, one, alpha=s)
            return side.view(F, K)
        side = (
            self._side.clone()
            if self._side.ndim == 3
            else torch.zeros(F, K + 1, K + 1, dtype=dtype, device=self.device)
        )
        for b, s in changes:
            z = self._values(b)
            scaled = z if b.mult is None else z * b.mult[:, None]
            for start, stop in runs(b.bounds):
                part, by = z[start:stop], scaled[start:stop]
                for fold in range(F):
                    one = part if b.folds is None else part * (b.folds[start:stop] == fold)[:, None]
                    side[fold] += (one.mT @ by).to(dtype) * s
        return side

    @staticmethod
    def _values(batch: Batch) -> Tensor:
        assert batch.targets is not None
        return torch.nn.functional.pad(batch.targets, (1, 0), value=1.0)

    def _rows(self, b: Batch, sign: int) -> Rows:
        K = self.num_classes
        gross = b.gross if self.exact else float(len(b))
        if b.labels is None:
            return Rows(b.x, self._values(b), b.folds, b.mult, b.bounds, gross, sign)
        if self.per_class:
            codes = b.labels if b.folds is None else b.folds * K + b.labels
            ones = torch.ones(1, 1, dtype=torch.float64, device=self.device).expand(len(b), 1)
            return Rows(b.x, ones, codes, b.mult, b.bounds, gross, sign)
        return Rows(b.x, b.labels, b.folds, b.mult, b.bounds, gross, sign)

    def _reserve(self, bound: float, removed: float = 0.0) -> None:
        """Refuse before int64 can overflow. ``removed``: of samples held, which shrink the sums; 2^63 if they are others."""
        if not self.exact or self._gross + bound + removed <= LIMIT:
            return
        if self._sums is not None:  # adds and removes cancel: look at the sums themselves
            self._sums.settle()
            tops = [torch.maximum(v.amax(), -v.amin()) for v in self._sums.sums.values()]
            host = checks.to_host(*tops, self._side.abs().amax())
            if host is not None:
                self._gross = float(max(h[0] for h in host)) * len(self._sums.sums)
        if self._gross + bound > LIMIT or removed >= LIMIT:
            raise GridError(
                f"int64 sums could overflow: bound {self._gross:.3g} held plus {bound + removed:.3g} changed exceeds "
                f"{float(LIMIT):.3g}. Nothing was changed. "
                f"Use a coarser grid, e.g. FixedPoint(limit={self.grid.limit if self.grid else 1.0!r}, bits=16)."
            )

    def relabel(self, old: Batch, new: Batch, proven: bool = False) -> Tensor:
        """One group, labels: move checked samples from their old class to a new one; M is not touched. Returns the rows.

        ``proven``: the samples are known to be held.
        """
        assert old.labels is not None
        assert new.labels is not None
        self.check_whole()
        if self._sums is None:
            raise checks.removal_error("the machine is empty")
        self._reserve(0.0, old.gross)
        side = self._side_after([(old, -1), (new, 1)], self._choices)
        host = None if proven else checks.to_host(self._side_after([(old, -1)], self._choices))
        if host is not None and min(host[0]) < 0:
            raise checks.removal_error(
                f"the count of class {host[0].index(min(host[0])) % self.num_classes} would fall below zero"
            )
        with self.integrity:
            rows = self._sums.move_side(old.x, old.labels, new.labels, old.mult, old.bounds)
            self._side = side
            self._gross += old.gross
        return rows

    def decide(self, kind: str, grid: FixedPoint | None, target_grid: FixedPoint | None = None) -> None:
        """Fix what the first batch would decide, when the samples to come were on a grid before. Needs empty statistics."""
        if self._sums is not None:
            raise ValueError("the statistics hold samples: their grid is decided")
        self._decide(Choices(kind, grid, target_grid))

    def add_classes(self, k: int) -> None:
        """Make room for k more classes (labels), or targets, which are 0 for the samples held."""
        checks.natural(k, "k")
        old, K = self.num_classes, self.num_classes + k
        if self._sums is not None:
            self._sums.settle()
        with self.integrity:
            self._grow_base(K)
            if self._sums is None:
                self.num_classes = K
                self._reset()
                return
            sums, R = self._sums.sums, self._sums.R
            side = self._side
            self.num_classes, self._sums, self._hashes = K, None, {}
            fresh = self._decide(self._choices)
            if self.per_class:
                fresh.sums = {(g // old) * K + g % old: v for g, v in sums.items()}
            else:
                grown = (fresh.R - R) * self.in_features
                fresh.sums = {g: torch.nn.functional.pad(v, (0, grown)) for g, v in sums.items()}
            fresh.refresh_diagonals()
            self._side = torch.nn.functional.pad(side, (0, k) if side.ndim == 2 else (0, k, 0, k))

    def forget_class(self, label: int) -> None:
        """Subtract all samples of one class, without them."""
        if not self.per_class:
            raise ValueError("forgetting a class needs statistics per class: use per_class=True")
        checks.label(label, self.num_classes)
        if self._sums is None:
            return
        self._sums.settle()
        with self.integrity:
            for fold in range(max(1, self.folds)):
                self._sums.protect(fold * self.num_classes + label)
                self._sums.sums.pop(fold * self.num_classes + label, None)
            self._sums.refresh_diagonals()
            if self._base is not None:
                self._base.shrunk = True
            keep = torch.arange(self.num_classes, device=self.device) != label
            gone = checks.to_host(self._side[:, label].sum())
            self._n -= gone[0][0] if gone else 0.0
            self._side = self._side * keep

    def _grow_base(self, K: int) -> None:
        """The mark, if there is one, for K classes: see :mod:`torchlssvm.statistics.marking`."""
