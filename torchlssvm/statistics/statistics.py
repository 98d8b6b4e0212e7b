"""Exact sums over samples: :class:`Statistics`."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Sequence
from enum import Enum, auto
from typing import Any, Self

import torch
from torch import Tensor

from torchlssvm.canonical_json import canonical
from torchlssvm.errors import GridError, InterruptedUpdateError, TorchLSSVMError
from torchlssvm.functional import checks, gram
from torchlssvm.functional.byte_tensors import bytes_to_tensor, tensor_to_bytes
from torchlssvm.functional.definite import is_semidefinite
from torchlssvm.functional.grid import FixedPoint, GridOption, as_grid, grid_from_fields, grid_to_fields
from torchlssvm.functional.memory import require_memory
from torchlssvm.functional.modes import exactly
from torchlssvm.functional.row_normalization import ROW_NORMALIZATIONS
from torchlssvm.functional.system import GroupSums
from torchlssvm.functional.threads import PASS_WORK, threads_for
from torchlssvm.statistics.accumulator import TAIL_ROWS, Accumulator, bound_sums, split_runs
from torchlssvm.statistics.batch import GridChoices, SampleBatch, check_batch

DIGEST_FORMAT = "torchlssvm-statistics-1"
"""Format of the bytes that a digest covers. The number changes when these bytes do."""

ROW_OPTIONS = ("normalize", "scale", "targets")
"""Options that the digest's header includes if they are set."""

LARGEST_SUM = 2**62
"""Sums are refused past this bound, so that int64 never overflows (one bit is kept for centring)."""

RELATIVE_ROUNDING = 1e-9
"""Float64 sums count as zero below this share of the total that was added and removed."""

TARGETS = (None, "multilabel", "regression")
"""Values of the option ``targets``."""

LABEL_GRID = FixedPoint(1.0, bits=1)
"""The grid of several labels per sample: -1 and +1 are -2 and 2 steps, and a store can keep 0 and 1 on it too."""

MATCHING_ATTRIBUTES = (
    "in_features", "num_classes", "per_class", "folds", "normalize", "scale", "targets", "exact", "device",
)  # fmt: skip
"""The attributes in which statistics must be equal to be added."""


class Evidence(Enum):
    """How to check that samples to be removed are held."""

    NONE = auto()
    """No check, because statistics form a group and a delta may be negative."""

    PROVEN = auto()
    """No check is needed, because the rows were recognised, or a store has them."""

    SUMS = auto()
    """Check by the sums: no count may fall below zero, and some samples must be able to have these sums."""

    COUNTS = auto()
    """Check by counts, and roughly by the sums, because the samples only approximate those held."""


class Integrity:
    """A context in which a state is changed in place. It sets a mark on entry and clears the mark on exit.

    If the change is interrupted (by Ctrl-C, or because memory runs out), the mark stays set, and every later use of the state
    is refused. Errors of this library clear the mark, because they are raised only if nothing was changed or after everything
    was restored.
    """

    def __init__(self) -> None:
        self.torn = False

    def check(self) -> None:
        """Raise InterruptedUpdateError if a change was interrupted."""
        if self.torn:
            raise InterruptedUpdateError(
                "an update was interrupted while its sums were being changed, so the state is neither that before nor that "
                "after it. Load a saved state (head.load_state_dict(...)), or bring it back from its store (store.restore())."
            )

    def __enter__(self) -> None:
        self.check()
        self.torn = True

    def __exit__(self, kind: type[BaseException] | None, *rest: object) -> None:
        if kind is None or issubclass(kind, TorchLSSVMError):
            self.torn = False


class Statistics:
    """Exact sums over samples; a group under ``+`` and ``-``.

    Args:
        in_features: J, the number of features.
        num_classes: K, the number of classes or of targets.
        grid: a :class:`FixedPoint`, a number (its limit), ``"auto"`` (a power of two from the first batch) or None for float64
            sums, for which ``exact`` is False and there is no digest.
        target_grid: the grid for float targets, given like ``grid``.
        per_class: keep M for each class. With ``targets="multilabel"``, keep it for the samples that have each label, beside
            that of all samples.
        folds: number of folds to keep separate sums for. Samples then require ids.
        normalize: None, ``"l2"`` (each row is divided by its length) or ``"sqrt"`` (sign(x) sqrt|x|), before the grid.
        scale: None or ``"std"``, which solves weights for standardized features. Both values give the same sums. The digest
            includes the option, and statistics with different values cannot be combined.
        targets: None (labels or float targets, as in the first batch), ``"multilabel"`` (0 and 1 for each of K labels, which
            are summed as -1 and +1) or ``"regression"`` (float targets). The digest includes this option too.
        device: device of the sums.

    >>> import torch
    >>> x, y = torch.randn(100, 8), torch.randint(3, (100,))
    >>> everything = Statistics(8, 3, grid=FixedPoint(8.0)).add(x, y)
    >>> rest = Statistics(8, 3, grid=FixedPoint(8.0)).add(x[10:], y[10:])
    >>> everything.remove(x[:10], y[:10]) == rest, everything.digest() == rest.digest()
    (True, True)
    """

    # The parts, for the modules of this package; F = max(1, folds).
    #   requested     the grids that the user asked for; None where the data decide
    #   choices       what the first batch decided
    #   accumulator   the sums of q q^T and z q^T per group; None while empty
    #   moments       counts (F, K) for labels, moments of [1, t] (F, K+1, K+1) for values
    #   bound         on every sum; known on the host, like the number of samples, so that reading it waits for no device
    #   group_hashes  hashes of groups whose sums the accumulator has not touched since

    targets: str | None = None  # heads that were pickled before this option existed do not have it

    def __init__(
        self,
        in_features: int,
        num_classes: int,
        *,
        grid: GridOption = "auto",
        target_grid: GridOption = "auto",
        per_class: bool = False,
        folds: int = 0,
        normalize: str | None = None,
        scale: str | None = None,
        targets: str | None = None,
        device: torch.device | str | None = None,
    ):
        """Start without samples; ValueError for an argument that is out of range."""
        for name, value, least in (
            ("in_features", in_features, 1),
            ("num_classes", num_classes, 1),
            ("folds", folds, 0),
        ):
            if isinstance(value, bool) or not isinstance(value, int) or value < least:
                raise ValueError(f"{name} must be an int >= {least}, got {value!r}")
        grid, target_grid = as_grid(grid), as_grid(target_grid, "target_grid")
        self.in_features, self.num_classes = in_features, num_classes
        self.normalize: str | None = checks.one_of(normalize, "normalize", ROW_NORMALIZATIONS)
        self.scale: str | None = checks.one_of(scale, "scale", (None, "std"))
        self.targets = checks.one_of(targets, "targets", TARGETS)
        if targets == "multilabel":
            if isinstance(target_grid, FixedPoint) and target_grid != LABEL_GRID:
                raise ValueError(f'target_grid is for targets="regression": labels are 0 and 1; got {target_grid}')
            target_grid = LABEL_GRID
        if targets == "regression" and per_class:
            raise ValueError(f"sums per class (per_class, class_weight) do not go with targets={targets!r}")
        self.per_class, self.folds = bool(per_class), folds
        self.exact = grid is not None
        self.device = torch.empty(0, device=device).device
        self.requested = GridChoices(
            None,
            grid if isinstance(grid, FixedPoint) else None,
            target_grid if isinstance(target_grid, FixedPoint) and self.exact else None,
        )
        self.integrity = Integrity()
        self._reset()

    def _reset(self) -> None:
        """Go back to zero, with everything that the data decided open again."""
        self.choices = GridChoices()
        self.bound = self._weight = 0.0
        self.group_hashes: dict[int, bytes] = {}
        self.moments = self.zero_moments(None)
        self.accumulator: Accumulator | None = None

    def _layout(self, kind: str | None) -> tuple[int, int, tuple[int, ...]]:
        """Return the number of groups, of side columns R, and the shape of the moments, for labels or values."""
        F, K = max(1, self.folds), self.num_classes
        if kind == "values":
            groups, R = (F * (K + 1), 1) if self.per_class else (F, K + 1)
            return groups, R, (F, K + 1, K + 1)
        return (F * K, 1, (F, K)) if self.per_class else (F, K, (F, K))

    def _decide(self, choices: GridChoices) -> Accumulator:
        """Adopt the grids that the first batch chose."""
        if self.accumulator is None:
            self.choices = choices
            groups, R, shape = self._layout(choices.kind)
            if self.moments.shape != shape:
                self.moments = self.zero_moments(choices.kind)
            self.accumulator = Accumulator(
                self.in_features, R, groups, self.per_class, self.exact, self.device,
                _copy if choices.grid is None else choices.grid.quantize,
            )  # fmt: skip
        return self.accumulator

    def decide(self, kind: str, grid: FixedPoint | None, target_grid: FixedPoint | None = None) -> None:
        """Set the grids that the first batch would choose, for samples already on a grid. The statistics must be empty."""
        if self.accumulator is not None:
            raise ValueError("the statistics hold samples: their grid is decided")
        self._decide(GridChoices(kind, grid, target_grid))

    def check_whole(self) -> None:
        """Raise InterruptedUpdateError if a change of the sums was interrupted."""
        if self.integrity.torn:
            self.integrity.check()

    # -- reading -------------------------------------------------------------------------------------------------------

    @property
    def kind(self) -> str | None:
        """The targets held: "labels", "values", or None while empty."""
        return self.choices.kind

    @property
    def grid(self) -> FixedPoint | None:
        """The grid in use; None while it is open (``grid="auto"``, no data yet) or without a grid."""
        return self.choices.grid or self.requested.grid

    @property
    def target_grid(self) -> FixedPoint | None:
        """The grid of float targets in use."""
        return self.choices.target_grid or self.requested.target_grid

    @property
    def counts(self) -> Tensor:
        """Number of samples per class (K,); for float targets, the number of samples, K times."""
        if self.moments.ndim == 2:
            return self.moments.sum(0)
        return self.moments[:, 0, 0].sum().expand(self.num_classes).clone()

    @property
    def n(self) -> int | float:
        """The number of samples (their total weight)."""
        return int(self._weight) if self.exact else self._weight

    @property
    def empty(self) -> bool:
        """True when nothing is held (all sums zero)."""
        return self.accumulator is None

    @property
    def drained(self) -> bool:
        """True when the total weight is zero, whatever the sums are; real weights are compared up to rounding."""
        return abs(self._weight) <= self._slack()

    def _slack(self) -> float:
        """Return how far below zero rounding can move a count: 0 for integers, a little for float64 sums."""
        return 0.0 if self.exact else RELATIVE_ROUNDING * max(1.0, float(self.n))

    def class_sums(self) -> tuple[Tensor, Tensor]:
        """Side sums V (R, J) and side moments: class sums with counts (K,), or for values [1, t] sums with (K+1, K+1)."""
        self.check_whole()
        moments = self.moments.sum(0)
        if self.accumulator is None:
            return self.moments.new_zeros(self.num_classes, self.in_features), moments
        if not self.per_class:
            return self.side_sums(self.groups_of(None)), moments
        V = torch.cat([self.side_sums(self.groups_of(label)) for label in range(self.num_classes)])
        if self.kind == "values":
            m = self.side_sums(self.groups_of(None))
            V = torch.cat([m, self._label_step * (2 * V - m)])
        return V, moments

    @property
    def _label_step(self) -> int:
        """The target +1 of a label, in steps of ``LABEL_GRID``."""
        return 2 if self.exact else 1

    def groups_of(self, label: int | None) -> list[int]:
        """The groups of one class or label, if sums are kept per class, or those that make up all samples (None)."""
        assert self.accumulator is not None
        groups, each = self.accumulator.groups, self._groups_per_fold
        if self.per_class and self.kind == "values":  # the first group of a fold is that of all its samples
            return list(range(0 if label is None else label + 1, groups, each))
        return list(range(label or 0, groups, 1 if label is None else each))

    @property
    def _groups_per_fold(self) -> int:
        return self._layout(self.kind)[0] // max(1, self.folds)

    def _group_counts(self) -> Tensor:
        """The number of samples (their weights) in each group (groups,)."""
        if self.kind != "values":
            return self.moments.reshape(self._layout(self.kind)[0], -1).sum(1)
        n, t = self.moments[:, 0, :1], self.moments[:, 0, 1:]
        if not self.per_class:
            return n[:, 0]
        positive = (self._label_step * n + t).div(2 * self._label_step, rounding_mode="floor" if self.exact else None)
        return torch.cat([n, positive], 1).reshape(-1)

    def of_label(self, label: int) -> Statistics:
        """Return the statistics of one label of ``targets="multilabel"`` as two classes: samples with it (0), without it (1).

        They share memory with these statistics. Do not change them.
        """
        out, sums, held = self.zero(num_classes=2, targets=None), {}, self.group_sums()
        if self.accumulator is None:
            return out
        for fold, (every, mine) in enumerate(zip(self.groups_of(None), self.groups_of(label), strict=True)):
            if mine in held:
                sums[2 * fold] = held[mine]
            if every in held:
                sums[2 * fold + 1] = held[every] - held[mine] if mine in held else held[every]
        counts = self._group_counts()
        positive = counts[self.groups_of(label)]
        moments = torch.stack([positive, counts[self.groups_of(None)] - positive], 1)
        return out.with_sums(GridChoices("labels", self.choices.grid), sums, moments, self.bound, self._weight)

    def packed(self, groups: Sequence[int]) -> Tensor:
        """Return the packed M of some groups together. Do not write to it."""
        assert self.accumulator is not None
        sums = self.group_sums()
        present = [sums[g] for g in groups if g in sums]
        if not present:
            return self.accumulator.total(groups[0])
        total = present[0]
        for i, part in enumerate(present[1:]):
            total = total + part if i == 0 else total.add_(part)
        return total

    def sums(self, groups: Sequence[int], weight: float | None = None) -> GroupSums:
        """M, m and n of some groups together, for :mod:`torchlssvm.functional.system`."""
        assert self.accumulator is not None
        V, counts = self.side_sums(groups), self._group_counts()
        m = V[0] if self.kind == "values" else V.sum(0)  # the first side column of values is 1
        n = torch.stack([counts[group] for group in groups]).sum()  # an index on the host would wait for the device
        return GroupSums(weight, self.packed(groups), m, n)

    def diagonal(self) -> Tensor:
        """Return the diagonal of M (groups, J), for each group. Do not write to it."""
        assert self.accumulator is not None
        self.group_sums()
        return self.accumulator.diag

    @property
    def M(self) -> Tensor:
        """Sum of [q; 1] [q; 1]^T in grid units: (J+1, J+1), or (K, J+1, J+1) per class."""
        J = self.in_features
        if self.accumulator is None:
            shape = (self.num_classes, J + 1, J + 1) if self.per_class else (J + 1, J + 1)
            return torch.zeros(shape, dtype=self.moments.dtype, device=self.device)
        out, classes = [], range(self.num_classes) if self.per_class else [None]
        for label in classes:
            s = self.sums(self.groups_of(label))
            full = torch.cat([gram.unpack(s.packed, J), s.m[None]])
            out.append(torch.cat([full, torch.cat([s.m, s.n[None]])[:, None]], 1))
        return torch.stack(out) if self.per_class else out[0]

    @property
    def V(self) -> Tensor:
        """Sum of [q; 1] t^T, t = -1/+1 for labels and in steps of the target grid for values: (J+1, K)."""
        V, moments = self.class_sums()
        if moments.ndim == 2:
            return torch.cat([V[1:], moments[0, 1:, None]], 1).mT
        both = torch.cat([V, moments[:, None]], 1)  # class sums of [q; 1], (K, J+1)
        return (2 * both - both.sum(0)).mT

    @property
    def T(self) -> Tensor:
        """Sum of t^2 (K,), in steps of the target grid squared."""
        moments = self.moments.sum(0)
        if moments.ndim == 2:
            return moments.diagonal()[1:].clone()
        return moments.sum().expand(self.num_classes).clone()

    # -- groups: a class, a fold, both, or everything ------------------------------------------------------------------

    def zero_moments(self, kind: str | None) -> Tensor:
        """Make the moments of no sample, for labels or values."""
        dtype = torch.int64 if self.exact else torch.float64
        return torch.zeros(self._layout(kind)[2], dtype=dtype, device=self.device)

    def packed_length(self, kind: str | None) -> int:
        """Return the length of a group's packed sums, for labels or values."""
        return gram.packed_size(self.in_features, self._layout(kind)[1])

    def group_sums(self) -> dict[int, Tensor]:
        """Return the packed sums of each group that has any. Do not write to them."""
        return {} if self.accumulator is None else self._completed(self.accumulator).sums

    def _completed(self, sums: Accumulator) -> Accumulator:
        """Sum the waiting rows. Raises InterruptedUpdateError if an earlier sum or change was interrupted."""
        if sums.incomplete or self.integrity.torn:
            with torch.inference_mode(False), torch.no_grad(), self.integrity:
                sums.complete()
        return sums

    def side_sums(self, groups: Sequence[int]) -> Tensor:
        """Return V (R, J) of some groups together."""
        assert self.accumulator is not None
        sums, R = self.group_sums(), self.accumulator.R
        out = torch.zeros(R, self.in_features, dtype=self.moments.dtype, device=self.device)
        for group in groups:
            if group in sums:
                out += gram.side_view(sums[group], self.in_features, R)
        return out

    def with_sums(
        self, choices: GridChoices, sums: dict[int, Tensor], moments: Tensor, bound: float | None, weight: float
    ) -> Statistics:
        """Return statistics of this shape that hold the given tensors, not copies: packed sums per group, and moments.

        ``bound`` is a bound on every sum; None computes it from the sums.
        """
        out = self.zero()
        out._decide(choices).replace_sums(sums)
        out.moments, out._weight = moments, weight
        out.bound = bound_sums(list(sums.values()), moments) if bound is None else bound
        return out

    @exactly
    def restricted(self, columns: Tensor, normalize: str | None, scale: str | None) -> Statistics:
        """Return the statistics of some columns (k,) of the same rows, in the order given.

        ``normalize`` and ``scale`` are options of the result. Nothing is summed again, because the sums held include those of
        the columns.
        """
        self.canonicalize()
        out = self.zero(in_features=len(columns), normalize=normalize, scale=scale)
        if self.accumulator is None:
            return out
        J, R = self.in_features, self.accumulator.R
        sums = {
            g: gram.pack(gram.unpack(v, J)[columns][:, columns], gram.side_view(v, J, R)[:, columns])
            for g, v in self.group_sums().items()
        }
        return out.with_sums(self.choices, sums, self.moments.clone(), self.bound, self._weight)

    def of_folds(self, folds: Sequence[int]) -> Statistics:
        """Return the statistics of the samples in some folds, as if nothing else had ever been added; without folds.

        >>> import torch
        >>> x, y = torch.randn(20, 3), torch.arange(20) % 2
        >>> both = Statistics(3, 2, folds=2).add(x, y, ids=range(20))
        >>> int(both.of_folds([0]).n + both.of_folds([1]).n)
        20
        """
        out = self.zero(folds=0)
        moments = self.moments[list(folds)].sum(0, keepdim=True)
        weight = checks.to_host(moments[0, 0, 0] if moments.ndim == 3 else moments.sum())[0][0]
        if self.empty or not weight:
            return out
        sums, each = self.group_sums(), self._groups_per_fold
        total: dict[int, Tensor] = {}
        for group in range(each):
            for part in (sums[g] for g in (fold * each + group for fold in folds) if g in sums):
                total[group] = total[group].add_(part) if group in total else part.clone()
        return out.with_sums(self.choices, total, moments, self.bound, weight)

    # -- changing: each change is all or nothing -----------------------------------------------------------------------

    def check(
        self, x: Any, y: Any, weight: Any = None, ids: Any = None, like: SampleBatch | Statistics | None = None,
        gridded: bool = False, sparse: bool = False,
    ) -> SampleBatch:  # fmt: skip
        """Check a batch for :meth:`change`. ``like``: a batch applied with this one, or sums, whose choices come first.

        ``gridded``: the rows are already normalized and on the grid. ``sparse``: many sparse rows stay sparse.
        """
        choices = self.choices if like is None or self.accumulator is not None else like.choices
        batch = check_batch(self, choices, x, y, weight, ids, gridded, sparse)
        if self.per_class and batch.choices.kind == "values" and self.targets is None:
            raise ValueError("statistics per class need labels (B,), got float targets")
        return batch

    def add(self, x: Any, y: Any, weight: Any = None, ids: Any = None) -> Self:
        """Add samples x (B, J) with labels y (B,) or targets (B, K), and weight (B,) as multiplicities."""
        with torch.inference_mode(False), torch.no_grad():
            self.change([(self.check(x, y, weight, ids, sparse=True), 1)])
        return self

    @exactly
    def remove(self, x: Any, y: Any, weight: Any = None, ids: Any = None) -> Self:
        """Subtract samples, whether or not they were added. Statistics form a group, so a difference may be negative."""
        self.change([(self.check(x, y, weight, ids, sparse=True), -1)])
        return self

    def change(self, changes: list[tuple[SampleBatch, int]], evidence: Evidence = Evidence.NONE) -> list[Tensor] | None:
        """Apply checked batches with their signs. Raises RemovalError if ``evidence`` asks for counts and one falls below zero.

        If ``evidence`` asks for a test of the sums, the caller makes this test afterwards (:meth:`check_possible`). An
        interrupted change leaves the statistics unusable. Returns the rows in grid units, as one (B, J) view per batch that is
        valid until the next change, or None if there are many rows.
        """
        changes = [(b, s) for b, s in changes if b.size]
        if not changes:
            return []
        self.check_whole()
        if any(s < 0 for _, s in changes):
            self.check_removable()
        first, held = changes[0][0], evidence is not Evidence.NONE
        removes = held and any(s < 0 for _, s in changes)
        if held and self.accumulator is None and all(s < 0 for _, s in changes):
            raise checks.removal_error("the machine is empty")
        gross = sum(b.gross for b, _ in changes)
        removed = sum(b.gross for b, s in changes if s < 0) if held else 0.0
        self._reserve(gross - removed, removed)
        moments = self.moments_after(changes, first.choices)
        if removes and evidence in (Evidence.SUMS, Evidence.COUNTS):
            self.check_counts(moments)
        self._require_memory({g for b, _ in changes for g in b.groups(self.per_class)}, first.choices.kind)
        parts: Iterable[tuple[SampleBatch, int]] = ((part, s) for b, s in changes for part in b.parts(self.per_class))
        views = None
        with self.integrity:
            sums = self._decide(first.choices)
            if sum(len(b) for b, _ in changes) <= TAIL_ROWS:
                parts = list(parts)
                views = sums.append(parts)
            if views is None:
                for part, sign in parts:
                    sums.push(part, sign)
            self.moments = moments
            self.bound += gross
            self._weight += sum(b.size * s for b, s in changes)
        return None if self.per_class and self.kind == "values" else views

    def check_removable(self) -> None:
        """Raise ValueError for standardized features without a grid, whose scale after a removal float64 sums do not tell."""
        if not self.exact and self.scale is not None:
            raise ValueError(
                "scale='std' with grid=None takes no removals: rounding in float64 sums cannot tell a feature that has become "
                'constant from one that varies little. Use a grid, e.g. grid="auto". Nothing was changed.'
            )

    def check_counts(self, moments: Tensor) -> None:
        """Raise RemovalError if the count of a class, or of all samples, would fall below zero. moments: as held."""
        counts = checks.to_host(moments if moments.ndim == 2 else moments[:, 0, 0])[0]
        if min(counts) < -self._slack():
            which = f" of class {counts.index(min(counts)) % self.num_classes}" if moments.ndim == 2 else ""
            raise checks.removal_error(f"the count{which} would fall to {min(counts):g}")

    def check_possible(self, groups: Iterable[int] | None = None, ridge: float = 0.0) -> None:
        """Raise RemovalError if the sums, in total or of some groups, are not semidefinite, as no samples have such sums.

        ``ridge`` is added to the sums of squares of features. The sums must be canonical and not empty.
        """
        if self.drained:
            raise checks.removal_error("no sample would be left, but the sums would not be zero")
        joint = self.exact and not ridge  # rounding in the products of features and targets has no such ridge
        if not self.exact:
            ridge = max(ridge, RELATIVE_ROUNDING * self.bound)
        if checks.to_host(self.diagonal().amin())[0][0] < -ridge:
            raise checks.removal_error("a sum of squares would fall below zero")
        if self.moments.ndim == 3:
            self._check_possible_targets(self.moments.sum(0))
        for some in [self.groups_of(None)] if groups is None else [[group] for group in sorted(groups)]:
            _, packed, m, n = self.sums(some)
            if joint and self.moments.ndim == 3:
                if not self.per_class:
                    m, n = self.side_sums(some), self.moments[some].sum(0)
                elif some == self.groups_of(None):
                    m, n = self.class_sums()
            if not is_semidefinite(packed, m, n, ridge):
                one = self.per_class and self.targets is None and groups is not None
                which = f" of class {some[0] % self.num_classes}" if one else ""
                raise checks.removal_error(f"the sums{which} would not be positive semidefinite")

    def _check_possible_targets(self, moments: Tensor) -> None:
        """Raise RemovalError if no samples have these moments of [1, t] (K+1, K+1)."""
        slack = 0.0 if self.exact else RELATIVE_ROUNDING * self.bound
        if checks.to_host(moments.diagonal()[1:].amin())[0][0] < -slack or not is_semidefinite(
            gram.pack(moments[1:, 1:], moments[:0, 1:]), moments[0, 1:], moments[0, 0], slack
        ):
            raise checks.removal_error("the sums of targets would not be positive semidefinite")

    def _require_memory(self, groups: set[int], kind: str | None) -> None:
        """Refuse a change whose new groups do not fit in memory. The first group also needs a square matrix for the solve."""
        new = groups - (set() if self.accumulator is None else set(self.accumulator.sums))
        if not new:
            return
        square = self.in_features**2 if self.accumulator is None else 0
        what = f"sums of {len(new)} classes or folds" if len(new) > 1 else "sums"
        require_memory(
            8 * (self.packed_length(kind) * len(new) + square), self.device,
            f"{what} of {self.in_features} features, to be kept and solved,",
            "Use fewer features, or no sums per class (per_class=False, no class weights, multiclass='ovr').",
        )  # fmt: skip

    def moments_after(self, changes: list[tuple[SampleBatch, int]], choices: GridChoices) -> Tensor:
        """Return the moments after a change."""
        F, K = max(1, self.folds), self.num_classes
        dtype = self.moments.dtype
        if choices.kind == "labels":
            moments = self.moments.reshape(-1)
            for b, s in changes:
                assert b.labels is not None
                one = torch.ones_like(b.labels, dtype=dtype) if b.mult is None else b.mult.to(dtype)
                moments = moments.index_add(0, b.labels if b.folds is None else b.folds * K + b.labels, one, alpha=s)
            return moments.view(F, K)
        moments = self.moments.clone() if self.moments.ndim == 3 else self.zero_moments("values")
        for b, s in changes:
            assert b.targets is not None
            z = torch.nn.functional.pad(b.targets, (1, 0), value=1.0)  # [1, t], (B, K+1)
            scaled = z if b.mult is None else z * b.mult[:, None]
            for start, stop in split_runs(b.bounds):
                part, by = z[start:stop], scaled[start:stop]
                for fold in range(F):
                    one = part if b.folds is None else part * (b.folds[start:stop] == fold)[:, None]
                    moments[fold] += (one.mT @ by).to(dtype) * s
        return moments

    def _reserve(self, bound: float, removed: float = 0.0) -> None:
        """Refuse before int64 can overflow. ``removed``: of current samples, which shrink the sums; 2^63 for other samples."""
        if not self.exact or self.bound + bound + removed <= LARGEST_SUM:
            return
        if self.accumulator is not None:  # adds and removes cancel: look at the sums themselves
            self.bound = min(self.bound, bound_sums(list(self.group_sums().values()), self.moments))
        if self.bound + bound > LARGEST_SUM or removed >= LARGEST_SUM:
            raise GridError(
                f"int64 sums could overflow: bound {self.bound:.3g} held plus {bound + removed:.3g} changed exceeds "
                f"{float(LARGEST_SUM):.3g}. Nothing was changed. "
                f"Use a coarser grid, e.g. FixedPoint(limit={self.grid.limit if self.grid else 1.0!r}, bits=16)."
            )

    def relabel(self, old: SampleBatch, new: SampleBatch, evidence: Evidence) -> Tensor:
        """Move checked samples of one group from their old class to a new one. M does not change. Returns the rows."""
        assert old.labels is not None
        assert new.labels is not None
        self.check_whole()
        if self.accumulator is None:
            raise checks.removal_error("the machine is empty")
        self._reserve(0.0, old.gross)
        moments = self.moments_after([(old, -1), (new, 1)], self.choices)
        if evidence is not Evidence.PROVEN:
            self.check_counts(self.moments_after([(old, -1)], self.choices))
        with self.integrity:
            rows = self.accumulator.move_side(old.x, old.labels, new.labels, old.mult, old.bounds)
            if new.observer is not None:
                with threads_for(PASS_WORK * rows.numel()):
                    new.observer(slice(None), rows)
            self.moments = moments
            self.bound += old.gross
        return rows

    def add_classes(self, k: int) -> None:
        """Add k classes, or k targets, which are 0 for the current samples.

        With ``targets="multilabel"``, adds k labels, which none of the current samples has.
        """
        self.take_over(self.with_classes(k))

    @exactly
    def with_classes(self, k: int) -> Statistics:
        """Return these statistics with k more classes, as :meth:`add_classes` makes them. They may share sums with these."""
        checks.natural(k, "k")
        self.check_whole()
        old, each, sums, J = self.num_classes, self._groups_per_fold, self.group_sums(), self.in_features
        square = (old + k + 1) ** 2 if self.kind == "values" else old + k
        require_memory(
            8 * (max(1, self.folds) * square + (0 if self.per_class else k * J * len(sums))), self.device,
            f"sums of {old + k} classes", "Add fewer classes.",
        )  # fmt: skip
        out = self.zero(num_classes=old + k)
        if self.accumulator is None:
            return out
        minus = -self._label_step
        moments = torch.nn.functional.pad(self.moments, (0, k) if self.moments.ndim == 2 else (0, k, 0, k))
        if self.targets == "multilabel":  # the new columns are a multiple of the constant
            moments[:, :, old + 1 :] = minus * moments[:, :, :1]
            moments[:, old + 1 :] = minus * moments[:, :1]
        if self.per_class:
            groups = out._layout(self.kind)[0] // max(1, self.folds)
            new = {(g // each) * groups + g % each: v for g, v in sums.items()}
        elif self.targets == "multilabel":
            new = {g: torch.cat([v, minus * gram.side_view(v, J, old + 1)[0].repeat(k)]) for g, v in sums.items()}
        else:
            new = {g: torch.nn.functional.pad(v, (0, k * J)) for g, v in sums.items()}
        return out.with_sums(self.choices, new, moments, self.bound, self._weight)

    def forget_class(self, label: int) -> Statistics:
        """Subtract all samples of one class, and return their statistics. You do not need to pass the samples."""
        if not self.per_class:
            raise ValueError("forgetting a class needs statistics per class: use per_class=True")
        checks.label(label, self.num_classes)
        if self.accumulator is None:
            return self.zero()
        sums = self.group_sums()
        gone = {g: v for g, v in sums.items() if g % self.num_classes == label}
        is_gone = torch.arange(self.num_classes, device=self.device) == label
        weight = float(checks.to_host(self.moments[:, label].sum())[0][0])
        out = self.with_sums(self.choices, gone, self.moments * is_gone, None if gone else 0.0, weight)
        with self.integrity:
            self.accumulator.replace_sums({g: v for g, v in sums.items() if g not in gone})
            self._weight -= weight
            self.moments = self.moments * ~is_gone
        return out

    # -- the group -----------------------------------------------------------------------------------------------------

    def compatible(self, other: Statistics) -> None:
        """Raise ValueError naming the first difference that keeps two statistics from being added."""
        for name in MATCHING_ATTRIBUTES:
            mine, theirs = getattr(self, name), getattr(other, name)
            if mine != theirs:
                raise ValueError(f"cannot combine statistics: {name} is {mine!r} here and {theirs!r} there")
        for name in ("kind", "grid", "target_grid"):  # None: still open
            mine, theirs = getattr(self, name), getattr(other, name)
            if mine and theirs and mine != theirs:
                raise ValueError(f"cannot combine statistics: the {name} is {mine} here and {theirs} there")

    def merge(self, other: Statistics, sign: int = 1, evidence: Evidence = Evidence.NONE) -> None:
        """Compute self += sign * other. ``evidence`` is as for :meth:`change`."""
        self.compatible(other)
        self.check_whole()
        other.check_whole()
        if other.accumulator is None:
            return
        if sign < 0:
            self.check_removable()
        held = evidence is not Evidence.NONE
        if held and sign < 0 and self.accumulator is None:
            raise checks.removal_error("the machine is empty")
        added = other.group_sums()
        self._reserve(*((0.0, other.bound) if held and sign < 0 else (other.bound, 0.0)))
        self.group_sums()  # sum the waiting rows first
        same = self.moments.ndim == other.moments.ndim
        moments = (self.moments if same else torch.zeros_like(other.moments)) + sign * other.moments
        if held:
            self.check_counts(moments)
        with self.integrity:
            total = self._decide(other.choices)
            for group, theirs in added.items():
                if group in total.sums:
                    total.sums[group].add_(theirs, alpha=sign)
                else:
                    total.sums[group] = sign * theirs
                total.touched.add(group)
            self.moments = moments
            self.bound += other.bound
            self._weight += sign * other.n

    def copy(self) -> Statistics:
        """Return an independent copy."""
        return self._combined(self.zero(), 1, 1)

    def zero(self, **changes: Any) -> Statistics:
        """Return empty statistics of the same shape, the neutral element, or with some attributes changed (device, folds)."""
        out = object.__new__(Statistics)
        out.__dict__.update({name: getattr(self, name) for name in (*MATCHING_ATTRIBUTES, "requested")} | changes)
        out.integrity = Integrity()
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
        """Compare all sums, shapes and grids."""
        if not isinstance(other, Statistics):
            return NotImplemented
        self.canonicalize()
        other.canonicalize()
        if self.header() != other.header() or self.device != other.device:
            return False
        if self.accumulator is None or other.accumulator is None:
            return self.accumulator is other.accumulator
        if not torch.equal(self.moments, other.moments):
            return False
        groups = set(self.accumulator.sums) | set(other.accumulator.sums)
        return all(torch.equal(self.accumulator.total(g), other.accumulator.total(g)) for g in groups)

    __hash__ = None  # type: ignore[assignment]

    def canonicalize(self) -> None:
        """Bring all rows into the sums. If all sums are zero, restore the state before any data."""
        self.check_whole()
        if self.accumulator is None:
            return
        sums = self.group_sums()
        if not self.drained or not self._is_zero(self.moments):
            return
        left = {g: v for g, v in sums.items() if not self._is_zero(v)}
        self.accumulator.sums = left
        if not left:
            with torch.inference_mode(False), self.integrity:
                self._reset()

    def _is_zero(self, sums: Tensor) -> bool:
        """Whether all sums are zero: exactly on a grid, otherwise up to rounding."""
        return not bool(sums.any()) if self.exact else bool(sums.abs().amax() <= RELATIVE_ROUNDING * self.bound)

    @exactly
    def take_over(self, other: Statistics) -> None:
        """Replace the content by that of other statistics, whose parts are used without a copy."""
        self.__dict__.update(other.__dict__)

    # -- digest --------------------------------------------------------------------------------------------------------

    def header(self) -> dict[str, Any]:
        """Return the description of shape and grid that the digest starts with, as JSON fields."""
        return (
            {
                "format": DIGEST_FORMAT,
                "features": self.in_features,
                "classes": self.num_classes,
                "folds": self.folds,
                "per_class": self.per_class,
                "kind": self.kind or "empty",
            }
            | {name: value for name in ROW_OPTIONS if (value := getattr(self, name)) is not None}
            | grid_to_fields(self.grid, self.target_grid)
        )

    def digest(self) -> str:
        """Return SHA-256, as hex, of bytes that depend only on the samples, not on their order or the machine.

            digest  = SHA256(header || hash of group 0 || hash of group 1 || ...)
            header  = UTF-8 JSON, sorted keys, separators "," and ":", of
                      {"bits","classes","features","folds","format":"torchlssvm-statistics-1","headroom","kind","limit","per_class"
                      [,"normalize"] [,"scale"] [,"targets"] [,"target_bits","target_headroom","target_limit"]}; limits as
                      float.hex();
                      kind "labels", "values" or "empty";
                      normalize "l2" or "sqrt" and scale "std", where they are used: q is then of the normalized row
                      (:mod:`torchlssvm.functional.row_normalization`), and weights are solved for standardized features;
                      targets "multilabel" or "regression"; a label is then -2 steps (no) or 2 (yes)
            group   = fold * (classes if per_class else 1) + (class if per_class else 0);
                      fold * (classes + 1), the samples of a fold, + label + 1, those that have the label, if per_class and
                      targets is "multilabel"
            hash    = SHA256(little-endian int64 of: the lower triangle of sum q q^T row by row (J (J+1) / 2 numbers);
                      sum z q^T row by row; sum z z^T row by row)
            z       = one-hot label (K), in total; 1, per class; [1, target steps] (K + 1) for values; if per_class and targets
                      is "multilabel", z is 1 in sum z q^T and in the groups of labels

        Samples of weight m count m times. With folds, a sample belongs to fold blake2b-64(str(id)) mod folds (big-endian).
        """
        if not self.exact:
            raise ValueError(
                "no digest without a grid: float64 sums depend on the order of the samples; use grid='auto'"
            )
        self.canonicalize()
        sums = self.accumulator
        if sums is None:
            return hashlib.sha256(canonical(self.header())).hexdigest()
        touched, counts = set(sums.touched), self._group_counts()
        self.group_hashes = {g: h for g, h in self.group_hashes.items() if g not in touched}
        sums.touched -= touched
        for group in range(sums.groups):
            if group not in self.group_hashes:
                inner = hashlib.sha256()
                for part in gram.lower_bytes(sums.total(group), self.in_features, sums.R):
                    inner.update(part)
                fold, place = divmod(group, self._groups_per_fold)
                if self.kind == "values":
                    moments = counts[group] if place else self.moments[fold]  # one count, or of [1, t]
                else:
                    moments = torch.diag(self.moments.reshape(sums.groups, -1)[group])
                inner.update(moments.cpu().numpy().astype("<i8", copy=False).tobytes())
                self.group_hashes[group] = inner.digest()
        hashes = b"".join(self.group_hashes[group] for group in range(sums.groups))
        return hashlib.sha256(canonical(self.header()) + hashes).hexdigest()

    def reuse_hashes(self, other: Statistics, changed: Iterable[int]) -> None:
        """Copy the group hashes of statistics that differ from these in the ``changed`` groups alone."""
        if self.accumulator is not None and other.accumulator is not None:
            stale = other.accumulator.touched | set(changed)
            self.group_hashes = {g: h for g, h in other.group_hashes.items() if g not in stale}
            self.accumulator.touched.clear()

    # -- saving --------------------------------------------------------------------------------------------------------

    def state(self) -> dict[str, Tensor]:
        """Return everything as flat tensors, to be saved. They contain no raw samples and no trace of removed ones."""
        self.canonicalize()
        sums = self.group_sums()
        # a bound on the sums held, which does not tell what else went through them
        bound = 0.0 if self.empty else bound_sums(list(sums.values()), self.moments)
        meta = self.header() | {"exact": self.exact, "gross": bound, "n": self._weight}
        out = {"counts": self.moments.clone()}
        if not self.empty:
            meta["groups"] = groups = sorted(g for g, v in sums.items() if not self.exact or bool(v.any()))
            if groups:
                out["sums"] = torch.stack([sums[g] for g in groups])
        return out | {"meta": bytes_to_tensor(json.dumps(meta).encode())}

    @exactly
    def load(self, state: dict[str, Tensor]) -> None:
        """Replace the sums by saved ones. Raises ValueError and changes nothing if they do not fit or are damaged."""
        try:
            out = self._loaded(state, json.loads(tensor_to_bytes(state["meta"]).decode()))
        except (KeyError, TypeError, UnicodeDecodeError) as error:
            raise ValueError(f"the saved statistics are damaged: {error!r}") from error
        self.__dict__.update(out.__dict__)

    def _loaded(self, state: dict[str, Tensor], meta: dict[str, Any]) -> Statistics:
        """Make statistics of this shape from a saved state and its description."""
        mine = self.header() | {"exact": self.exact}
        for name in ("format", "features", "classes", "folds", "per_class", "exact", *ROW_OPTIONS):
            saved, own = (fields.get(name) if name in ROW_OPTIONS else fields[name] for fields in (meta, mine))
            if saved != own:
                raise ValueError(f"{name} is {saved!r} in the saved statistics and {own!r} here")
        if meta["kind"] == "empty":
            return self.zero()
        choices = GridChoices(meta["kind"], grid_from_fields(meta), grid_from_fields(meta, "target_"))
        wanted = self.requested.grid
        if wanted is not None and choices.grid != wanted:
            raise ValueError(f"the grid is {choices.grid} in the saved statistics and {wanted} here")
        number, _, shape = self._layout(choices.kind)
        size, dtype, groups = self.packed_length(choices.kind), self.moments.dtype, meta["groups"]
        saved = state["sums"] if groups else torch.zeros(0, size, dtype=dtype)
        for name, tensor, right in (("sums", saved, (len(groups), size)), ("counts", state["counts"], shape)):
            if tuple(tensor.shape) != right or tensor.dtype != dtype:
                raise ValueError(f"{name} has shape {tuple(tensor.shape)} and dtype {tensor.dtype}, not {right}")
        sums = {int(g): v.to(self.device, copy=True) for g, v in zip(groups, saved, strict=True)}
        if any(not 0 <= g < number for g in sums):
            raise ValueError(f"unknown groups {groups}")
        moments = state["counts"].to(self.device, copy=True)
        return self.with_sums(choices, sums, moments, float(meta["gross"]), float(meta["n"]))

    def to(self, device: torch.device | str) -> Statistics:
        """Return these statistics on another device, or self if they are already there."""
        target = torch.empty(0, device=device).device
        if target == self.device:
            return self
        out = self.zero(device=target)
        out.load({k: v if k == "meta" else v.to(target) for k, v in self.state().items()})
        return out

    def __getstate__(self) -> dict[str, Any]:
        """State for pickling and copying, without raw rows and scratch memory."""
        return {name: getattr(self, name) for name in (*MATCHING_ATTRIBUTES, "requested")} | {"state": self.state()}

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Restore a pickled state."""
        saved = state.pop("state")
        self.__dict__.update(state)
        self.integrity = Integrity()
        self._reset()
        self.load(saved)

    def __repr__(self) -> str:
        """Shape, grid and count."""
        split = ", per_class=True" if self.per_class else ""
        return f"Statistics({self.in_features}, {self.num_classes}, n={self.n}, grid={self.grid}{split}, device={self.device})"


def _copy(x: Tensor, out: Tensor, scratch: Tensor | None) -> Tensor:
    """Write rows as they are: the counterpart of :meth:`FixedPoint.quantize` without a grid."""
    del scratch
    return out.copy_(x)
