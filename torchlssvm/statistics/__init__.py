"""Sufficient statistics of a least-squares head: the truth from which every weight is derived.

For features phi on a grid (integers q) and targets t the statistics are

    M = sum [q; 1] [q; 1]^T      V = sum [q; 1] t^T      T = sum t^2

in total or per class. They are integers, so sums do not depend on order, batch size, device or the number of machines,
and removing a sample gives, bit for bit, the state that never saw it. Labels are targets -1/+1; what is stored for them
are class sums and counts, from which any coding follows.

The digest (SHA-256) is over bytes anybody can rebuild from the samples:

    digest  = SHA256(header || hash of group 0 || hash of group 1 || ...)
    header  = UTF-8 JSON, sorted keys, separators "," and ":", of
              {"bits","classes","features","folds","format":"torchlssvm-statistics-1","headroom","kind","limit","per_class"
              [,"target_bits","target_headroom","target_limit"]}; limits as float.hex(); kind "labels", "values" or "empty"
    group   = fold * (classes if per_class else 1) + (class if per_class else 0)
    hash    = SHA256(little-endian int64 of: the lower triangle of sum q q^T row by row (J (J+1) / 2 numbers);
              sum z q^T row by row; sum z z^T row by row)
    z       = one-hot label (K), in total; 1, per class; [1, target steps] (K + 1) for values

Samples of weight m count m times. With folds, a sample belongs to fold blake2b-64(str(id)) mod folds (big-endian).
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from torchlssvm.errors import GridError
from torchlssvm.functional import checks, gram
from torchlssvm.functional.grid import FixedPoint
from torchlssvm.functional.modes import exactly
from torchlssvm.functional.system import Sums
from torchlssvm.statistics.accumulator import Accumulator, Rows, runs
from torchlssvm.statistics.batch import Batch, Choices, check_batch

__all__ = ["FixedPoint", "Statistics"]

LIMIT = 2**62
"""Sums are refused past this bound, so that int64 never overflows (one bit is kept for centring)."""

FORMAT = "torchlssvm-statistics-1"


class Statistics:
    """Exact sums over samples; a group under ``+`` and ``-``.

    Args:
        in_features: J.
        num_classes: K, the number of classes or of targets.
        grid: a :class:`FixedPoint`, ``"auto"`` (a power of two from the first batch) or None (float64 sums: the same
            interface, ``exact`` is False, and there is no digest).
        target_grid: the same for float targets.
        per_class: keep M for each class.
        folds: keep everything for each of so many folds; samples then need ids.
        device: where the sums live.

    >>> import torch
    >>> x, y = torch.randn(100, 8), torch.randint(3, (100,))
    >>> everything = Statistics(8, 3, grid=FixedPoint(8.0)).add(x, y)
    >>> rest = Statistics(8, 3, grid=FixedPoint(8.0)).add(x[10:], y[10:])
    >>> everything.remove(x[:10], y[:10]) == rest, everything.digest() == rest.digest()
    (True, True)
    """

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
        self._saved: tuple[Tensor, float, float] | None = None

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
                J, R, groups, self.exact, self.device, self._copy if grid is None else grid.quantize
            )
        return self._sums

    @staticmethod
    def _copy(x: Tensor, out: Tensor, scratch: Tensor | None) -> Tensor:
        del scratch
        return out.copy_(x)

    # -- reading -------------------------------------------------------------------------------------------------------

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

    def class_sums(self, folds: list[int] | None = None) -> tuple[Tensor, Tensor]:
        """Side sums V (R, J) and side moments: class sums with counts (K,), or for values [1, t] sums with (K+1, K+1)."""
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
        return gram.side_view(self._sums.total(group), self.in_features, self._sums.R)

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

    # -- changing ------------------------------------------------------------------------------------------------------

    def check(self, x: Any, y: Any, weight: Any = None, ids: Any = None, like: Batch | None = None) -> Batch:
        """A checked batch for :meth:`change`. ``like``: a batch that goes in together with this one and decides first."""
        choices = self._choices if like is None or self._sums is not None else like.choices
        batch = check_batch(
            x, y, weight, ids, J=self.in_features, K=self.num_classes, folds=self.folds, device=self.device,
            exact=self.exact, choices=choices, wanted=self._wanted,
        )  # fmt: skip
        if self.per_class and batch.choices.kind == "values":
            raise ValueError("statistics per class need labels (B,), got float targets")
        return batch

    @exactly
    def add(self, x: Any, y: Any, weight: Any = None, ids: Any = None) -> Statistics:
        """Add samples. x: (B, J); y: (B,) labels or (B, K) targets; weight: (B,) multiplicities."""
        self.change([(self.check(x, y, weight, ids), 1)])
        return self

    @exactly
    def remove(self, x: Any, y: Any, weight: Any = None, ids: Any = None) -> Statistics:
        """Subtract samples, whether or not they were added: statistics are a group, a delta may be negative."""
        self.change([(self.check(x, y, weight, ids), -1)])
        return self

    def change(self, changes: list[tuple[Batch, int]], held: bool = False) -> list[Tensor] | None:
        """Apply checked batches with their signs, all or none.

        With ``held`` the sums must stay those of actual samples: a count or a diagonal below zero is a RemovalError.
        Returns the rows in grid units, one (B, J) view per batch that lives until the next change, or None for many rows.
        """
        changes = [(b, s) for b, s in changes if len(b)]
        if not changes:
            return []
        first = changes[0][0]
        if held and self._sums is None and all(s < 0 for _, s in changes):
            raise checks.removal_error("the machine is empty")
        self._reserve(sum(b.gross for b, _ in changes))
        side = self._side_after(changes, first.choices)
        fresh = self._sums is None
        if held and any(s < 0 for _, s in changes):
            counts = side if side.ndim == 2 else side[:, 0, 0]
            host = checks.to_host(counts)
            if host is not None and min(host[0]) < -self._slack():
                which = (
                    f"the count of class {host[0].index(min(host[0])) % self.num_classes}"
                    if side.ndim == 2
                    else "the count"
                )
                raise checks.removal_error(f"{which} would fall to {min(host[0]):g}")
        sums = self._decide(first.choices)
        rows = [self._rows(b, s) for b, s in changes]
        try:
            views = self._sum(sums, rows, held)
        except Exception:
            if fresh:
                self._reset()
            raise
        self._side = side
        self._gross += sum(b.gross for b, _ in changes)
        self._n += sum(b.size * s for b, s in changes)
        return views

    def _sum(self, sums: Accumulator, rows: list[Rows], held: bool) -> list[Tensor] | None:
        shrinks = held and any(r.sign < 0 for r in rows)
        if sums.fits_tail(rows):
            views, diag = sums.stage(rows)
            if shrinks:
                self._check_diagonal(diag)
            sums.commit(rows, diag)
            return views
        undo = {k: v.clone() for k, v in sums.sums.items()} if shrinks and not self.exact else None
        for r in rows:
            sums.push(r)
        if shrinks:
            try:
                self._check_diagonal(sums.diag)
            except Exception:
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

    def _slack(self) -> float:
        """Integers have none; float64 sums may end a little below zero."""
        return 0.0 if self.exact else 1e-9 * max(1.0, float(self.n))

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
            ones = torch.ones(len(b), 1, dtype=torch.float64, device=self.device)
            return Rows(b.x, ones, codes, b.mult, b.bounds, gross, sign)
        z = torch.nn.functional.one_hot(b.labels, K).to(torch.float64)
        return Rows(b.x, z, b.folds, b.mult, b.bounds, gross, sign)

    def _reserve(self, bound: float) -> None:
        """Refuse before int64 can overflow."""
        if not self.exact or self._gross + bound <= LIMIT:
            return
        if self._sums is not None:  # adds and removes cancel: look at the sums themselves
            self._sums.settle()
            tops = [torch.maximum(v.amax(), -v.amin()) for v in self._sums.sums.values()]
            host = checks.to_host(*tops, self._side.abs().amax())
            if host is not None:
                self._gross = float(max(h[0] for h in host)) * len(self._sums.sums)
        if self._gross + bound > LIMIT:
            raise GridError(
                f"int64 sums could overflow: bound {self._gross:.3g} held plus {bound:.3g} new exceeds {float(LIMIT):.3g}. "
                f"Nothing was changed. Use a coarser grid, e.g. FixedPoint(limit={self.grid.limit if self.grid else 1.0!r}, bits=16)."
            )

    def relabel(self, old: Batch, new: Batch) -> Tensor:
        """One group, labels: move checked samples from their old class to a new one; M is not touched. Returns the rows."""
        assert old.labels is not None
        assert new.labels is not None
        if self._sums is None:
            raise checks.removal_error("the machine is empty")
        self._reserve(2 * old.gross)
        side = self._side_after([(old, -1), (new, 1)], self._choices)
        host = checks.to_host(self._side_after([(old, -1)], self._choices))
        if host is not None and min(host[0]) < 0:
            raise checks.removal_error(
                f"the count of class {host[0].index(min(host[0])) % self.num_classes} would fall below zero"
            )
        rows = self._sums.move_side(old.x, old.labels, new.labels, old.mult, old.bounds)
        self._side = side
        self._gross += 2 * old.gross
        return rows

    def add_classes(self, k: int) -> None:
        """Make room for k more classes (labels), or targets, which are 0 for the samples held."""
        if isinstance(k, bool) or not isinstance(k, int) or k < 0:
            raise ValueError(f"k must be an int >= 0, got {k!r}")
        old, K = self.num_classes, self.num_classes + k
        if self._sums is None:
            self.num_classes = K
            return self._reset()
        self._sums.settle()
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
        return None

    def forget_class(self, label: int) -> None:
        """Subtract all samples of one class, without them."""
        if not self.per_class:
            raise ValueError("forgetting a class needs statistics per class: use per_class=True")
        if isinstance(label, bool) or not isinstance(label, int) or not 0 <= label < self.num_classes:
            raise ValueError(f"label {label!r} is outside 0..{self.num_classes - 1}")
        if self._sums is not None:
            self._sums.settle()
            for fold in range(max(1, self.folds)):
                self._sums.sums.pop(fold * self.num_classes + label, None)
            self._sums.refresh_diagonals()
            keep = torch.arange(self.num_classes, device=self.device) != label
            self._n -= float(self._side[:, label].sum())
            self._side = self._side * keep

    # -- the group -----------------------------------------------------------------------------------------------------

    def compatible(self, other: Statistics) -> None:
        """Raise ValueError naming the first difference that keeps two statistics from being added."""
        for name in ("in_features", "num_classes", "per_class", "folds", "exact", "device"):
            mine, theirs = getattr(self, name), getattr(other, name)
            if mine != theirs:
                raise ValueError(f"cannot combine statistics: {name} is {mine!r} here and {theirs!r} there")
        if self.kind and other.kind and self._choices != other._choices:
            raise ValueError(
                f"cannot combine statistics on different grids: {self._choices} here and {other._choices} there"
            )
        for mine, theirs in ((self, other), (other, self)):
            if mine._wanted.grid and theirs.kind and theirs.grid != mine._wanted.grid:
                raise ValueError(
                    f"cannot combine statistics: the grid is {mine.grid} in one and {theirs.grid} in the other"
                )

    def merge(self, other: Statistics, sign: int = 1, held: bool = False) -> None:
        """self += sign * other; with ``held``, RemovalError if counts or diagonals would fall below zero."""
        self.compatible(other)
        if other._sums is None:
            return
        if held and sign < 0 and self._sums is None:
            raise checks.removal_error("the machine is empty")
        other._sums.settle()
        self._reserve(other._gross)
        if self._sums is not None:
            self._sums.settle()
        side = (
            self._side if self._side.ndim == other._side.ndim else torch.zeros_like(other._side)
        ) + sign * other._side
        diag = sign * other._sums.diag + (0 if self._sums is None else self._sums.diag)
        if held and sign < 0:
            counts = checks.to_host(side if side.ndim == 2 else side[:, 0, 0])
            if counts is not None and min(counts[0]) < -self._slack():
                raise checks.removal_error(f"a count would fall to {min(counts[0]):g}")
            self._check_diagonal(diag)
        mine = self._decide(other._choices)
        mine.protect()
        for group, theirs in other._sums.sums.items():
            if group in mine.sums:
                mine.sums[group].add_(theirs, alpha=sign)
            else:
                mine.sums[group] = sign * theirs
            mine.touched.add(group)
        mine.diag, self._side = diag, side
        self._gross += other._gross
        self._n += sign * other._n

    def copy(self) -> Statistics:
        """An independent copy."""
        return self._combined(self.zero(), 1, 1)

    def zero(self) -> Statistics:
        """The neutral element."""
        out = object.__new__(Statistics)
        for name in ("in_features", "num_classes", "per_class", "folds", "exact", "device", "_wanted"):
            setattr(out, name, getattr(self, name))
        out._reset()
        return out

    @exactly
    def _combined(self, other: Statistics, first: int, second: int) -> Statistics:
        out = self.zero()
        out.merge(self, first)
        out.merge(other, second)
        out.canonicalize()
        return out

    def __add__(self, other: Statistics) -> Statistics:
        """The statistics of both sets of samples."""
        return self._combined(other, 1, 1)

    def __sub__(self, other: Statistics) -> Statistics:
        """The statistics of these samples without the others."""
        return self._combined(other, 1, -1)

    def __neg__(self) -> Statistics:
        """The delta that removes these samples."""
        return self._combined(self.zero(), -1, 1)

    def __eq__(self, other: object) -> bool:
        """Whether all sums, shapes and grids are the same."""
        if not isinstance(other, Statistics):
            return NotImplemented
        self.canonicalize()
        other.canonicalize()
        if self.header() != other.header() or self.device != other.device:
            return False
        if self._sums is None or other._sums is None:
            return self._sums is other._sums
        if not torch.equal(self._side, other._side):
            return False
        groups = set(self._sums.sums) | set(other._sums.sums)
        return all(torch.equal(self._sums.total(g), other._sums.total(g)) for g in groups)

    __hash__ = None  # type: ignore[assignment]

    @exactly
    def canonicalize(self) -> None:
        """Bring all rows into the sums; sums that are all zero go back to the state before any data."""
        if self._sums is None:
            return
        self._sums.settle()
        if checks.is_fake(self._side) or abs(self._n) > self._slack() or not self._small(self._side):
            return
        for group in [g for g, v in self._sums.sums.items() if self._small(v)]:
            del self._sums.sums[group]
        if not self._sums.sums:
            self._reset()

    def _small(self, sums: Tensor) -> bool:
        """Whether sums are zero: exactly on a grid, else up to rounding of what went through them."""
        return not bool(sums.any()) if self.exact else bool(sums.abs().amax() <= 1e-9 * self._gross)

    # -- digest and state ----------------------------------------------------------------------------------------------

    def header(self) -> bytes:
        """The canonical description of shape and grid that the digest starts with."""
        meta: dict[str, Any] = {
            "format": FORMAT,
            "features": self.in_features,
            "classes": self.num_classes,
            "folds": self.folds,
            "per_class": self.per_class,
            "kind": self.kind or "empty",
        }
        for prefix, grid in (("", self.grid), ("target_", self.target_grid)):
            if grid is not None:
                meta |= {
                    f"{prefix}limit": grid.limit.hex(),
                    f"{prefix}bits": grid.bits,
                    f"{prefix}headroom": grid.headroom,
                }
        return json.dumps(meta, sort_keys=True, separators=(",", ":")).encode()

    def digest(self) -> str:
        """SHA-256, as hex, of the canonical bytes: the same on every machine, for every order of the same samples."""
        if not self.exact:
            raise ValueError(
                "no digest without a grid: float64 sums depend on the order of the samples; use grid='auto'"
            )
        self.canonicalize()
        outer = hashlib.sha256(self.header())
        if self._sums is not None:
            for group in self._sums.touched:
                self._hashes.pop(group, None)
            self._sums.touched.clear()
            for group in range(self._sums.groups):
                if group not in self._hashes:
                    inner = hashlib.sha256(gram.lower_bytes(self._sums.total(group), self.in_features, self._sums.R))
                    inner.update(self._side_bytes(group))
                    self._hashes[group] = inner.digest()
                outer.update(self._hashes[group])
        return outer.hexdigest()

    def _side_bytes(self, group: int) -> bytes:
        """Sum z z^T of a group: the counts on a diagonal, one count, or the moments of [1, t]."""
        if self.per_class:
            part = self._side[group // self.num_classes, group % self.num_classes][None]
        else:
            part = self._side[group] if self._side.ndim == 3 else torch.diag(self._side[group])
        return part.cpu().numpy().astype("<i8", copy=False).tobytes()

    def state(self) -> dict[str, Tensor]:
        """Everything, as flat tensors: what is saved. Holds no raw sample."""
        self.canonicalize()
        meta = json.loads(self.header()) | {"exact": self.exact, "gross": self._gross, "n": self._n}
        out = {"counts": self._side.clone()}
        if self._sums is not None:
            groups = sorted(self._sums.sums)
            meta["groups"] = groups
            if groups:
                out["sums"] = torch.stack([self._sums.sums[g] for g in groups])
        return out | {"meta": torch.frombuffer(bytearray(json.dumps(meta).encode()), dtype=torch.uint8).clone()}

    @exactly
    def load(self, state: dict[str, Tensor]) -> None:
        """Replace the sums by saved ones; ValueError, with nothing changed, when they do not fit or are damaged."""
        try:
            meta = json.loads(bytes(state["meta"].cpu().to(torch.uint8).numpy()).decode())
            mine = json.loads(self.header())
            for name in ("format", "features", "classes", "folds", "per_class", "exact"):
                here = self.exact if name == "exact" else mine[name]
                if meta[name] != here:
                    raise ValueError(f"{name} is {meta[name]!r} in the saved statistics and {here!r} here")
            out = self.zero()
            if meta["kind"] != "empty":
                grids = []
                for prefix in ("", "target_"):
                    known = f"{prefix}limit" in meta
                    numbers = (meta.get(f"{prefix}{n}") for n in ("bits", "headroom"))
                    grids.append(FixedPoint(float.fromhex(meta[f"{prefix}limit"]), *numbers) if known else None)
                if self._wanted.grid is not None and grids[0] != self._wanted.grid:
                    raise ValueError(f"the grid is {grids[0]} in the saved statistics and {self._wanted.grid} here")
                sums = out._decide(Choices(meta["kind"], *grids))
                size, groups = gram.packed_size(self.in_features, sums.R), meta["groups"]
                saved = state["sums"] if groups else torch.zeros(0, size, dtype=sums.dtype)
                for name, tensor, shape in (
                    ("sums", saved, (len(groups), size)),
                    ("counts", state["counts"], out._side.shape),
                ):
                    if tuple(tensor.shape) != tuple(shape) or tensor.dtype != sums.dtype:
                        raise ValueError(
                            f"{name} has shape {tuple(tensor.shape)} and dtype {tensor.dtype}, not {tuple(shape)}"
                        )
                sums.sums = {int(g): v.to(self.device, copy=True) for g, v in zip(groups, saved, strict=True)}
                if any(not 0 <= g < sums.groups for g in sums.sums):
                    raise ValueError(f"unknown groups {groups}")
                sums.refresh_diagonals()
                out._side = state["counts"].to(self.device, copy=True)
                out._gross, out._n = float(meta["gross"]), float(meta["n"])
        except (KeyError, TypeError, UnicodeDecodeError) as error:
            raise ValueError(f"the saved statistics are damaged: {error!r}") from error
        self.__dict__.update(out.__dict__)

    def to(self, device: torch.device | str) -> Statistics:
        """These statistics on another device (itself when it is there already)."""
        target = torch.empty(0, device=device).device
        if target == self.device:
            return self
        out = self.zero()
        out.device = target
        out._reset()
        out.load({k: v.to(target) for k, v in self.state().items()})
        return out

    def __getstate__(self) -> dict[str, Any]:
        """For pickling and copying: no raw rows, no scratch."""
        fixed = ("in_features", "num_classes", "per_class", "folds", "exact", "device", "_wanted")
        return {name: getattr(self, name) for name in fixed} | {"state": self.state()}

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Undo :meth:`__getstate__`."""
        saved = state.pop("state")
        self.__dict__.update(state)
        self._reset()
        self.load(saved)

    def __repr__(self) -> str:
        """Shape, grid and count."""
        split = ", per_class=True" if self.per_class else ""
        return f"Statistics({self.in_features}, {self.num_classes}, n={self.n}, grid={self.grid}{split}, device={self.device})"

    # -- going back ----------------------------------------------------------------------------------------------------

    def guard(self) -> None:
        """Remember this state until :meth:`release`. Cheap: copies are made only when the sums are about to change."""
        if self._saved is None:
            self._saved = (self._side, self._gross, self._n)
            if self._sums is not None:
                self._sums.guard()

    def release(self) -> None:
        """Accept everything since :meth:`guard`."""
        self._saved = None
        if self._sums is not None:
            self._sums.release()

    def restore(self) -> None:
        """Return to the state at :meth:`guard`."""
        saved = self._saved
        if saved is None:
            return
        if self._sums is None or not self._sums.guarded:
            self._reset()
        else:
            self._sums.restore()
            self._side, self._gross, self._n = saved
        self._saved = None
