"""A checked batch of samples, ready to be summed with either sign."""

from __future__ import annotations

import itertools
import warnings
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from torchlssvm.errors import NumericalWarning
from torchlssvm.functional import checks
from torchlssvm.functional.gram import LARGEST_EXACT_INTEGER
from torchlssvm.functional.grid import FixedPoint
from torchlssvm.functional.row_normalization import normalized
from torchlssvm.functional.sample_identity import fold_of
from torchlssvm.functional.sparse_rows import pick as pick_rows
from torchlssvm.functional.sparse_rows import with_values
from torchlssvm.functional.threads import PASS_WORK, threads_for

if TYPE_CHECKING:
    from torchlssvm.statistics.statistics import Statistics

LARGEST_FLOAT_VALUE = 2.0**450
"""Largest value accepted without a grid, so that sums of squares stay finite."""

PAIR_NUMBERS = 2**23
"""Features (at most 64 MiB) that are copied at a time for the pairs of a row and a label."""

RowObserver = Callable[[slice | Tensor, Tensor], None]
"""Takes rows of a batch, by their index, and the same rows on the grid (b, J) float64, while they are being summed."""


@dataclass(frozen=True)
class GridChoices:
    """The choices made from the first batch: labels or values, and the grids."""

    kind: str | None = None
    grid: FixedPoint | None = None
    target_grid: FixedPoint | None = None


@dataclass(frozen=True)
class SampleBatch:
    """Checked samples: x (B, J), dense or coalesced; labels (B,) or targets (B, K); multiplicities and folds (B,), or None.

    ``ids`` are the ids of the rows, if given. ``observer`` is called with the rows on the grid when they are summed. These
    values are on the host: ``bounds`` (B,) limits what each row adds to any sum, in steps squared (ones without a grid).
    ``gross`` is this limit for all rows. ``size`` is the total weight. ``host_labels`` and ``host_folds`` (B,) are labels and
    folds. There are ``classes`` of them.
    """

    x: Tensor
    labels: Tensor | None
    targets: Tensor | None
    mult: Tensor | None
    folds: Tensor | None
    bounds: NDArray[np.float64]
    size: float
    gross: float
    choices: GridChoices
    ids: list[Any] | None = None
    observer: RowObserver | None = None
    host_labels: NDArray[np.int64] | None = None
    host_folds: NDArray[np.int64] | None = None
    classes: int = 0

    def __len__(self) -> int:
        """The number of rows."""
        return int(self.x.shape[0])

    def codes(self, per_class: bool) -> NDArray[np.int64] | None:
        """The group of each row (B,) on the host: its fold, its class or both; None if there is one group."""
        if not per_class:
            return self.host_folds
        assert self.host_labels is not None
        return self.host_labels if self.host_folds is None else self.host_folds * self.classes + self.host_labels

    def groups(self, per_class: bool) -> set[int]:
        """The groups that rows are summed into."""
        if not per_class or self.targets is None:
            codes = self.codes(per_class)
            return {0} if codes is None else set(np.unique(codes).tolist())
        labels = [0, *((self.targets > 0).any(0).nonzero()[:, 0] + 1).tolist()]
        folds = [0] if self.host_folds is None else np.unique(self.host_folds).tolist()
        return {fold * (self.classes + 1) + label for fold in folds for label in labels}

    def parts(self, per_class: bool) -> Iterator[SampleBatch]:
        """The batches to sum: this one, or with sums per label its rows, then its pairs of a row and a label of the row."""
        if not per_class or self.targets is None:
            yield self
            return
        every = replace(self, host_labels=np.zeros(len(self), np.int64), classes=self.classes + 1)
        yield every
        labels, rows = (t.cpu().numpy() for t in (self.targets.mT > 0).nonzero(as_tuple=True))
        bare = replace(every, ids=None, observer=None)  # each row was observed once
        size = max(1, PAIR_NUMBERS // self.x.shape[1])
        for a in range(0, len(rows), size):
            yield replace(bare.pick(rows[a : a + size]), host_labels=labels[a : a + size] + 1)

    def pick(self, rows: NDArray[np.int64], x: Tensor | None = None) -> SampleBatch:
        """The batch of some rows, by their numbers (b,). x: (b, J), these rows, if they are at hand."""
        here, observer = torch.from_numpy(rows).to(self.x.device), self.observer
        tensors = {name: getattr(self, name) for name in ("labels", "targets", "mult", "folds")}
        arrays = {name: getattr(self, name) for name in ("bounds", "host_labels", "host_folds")}
        some: dict[str, Any] = {name: value[here] for name, value in tensors.items() if value is not None}
        some |= {name: value[rows] for name, value in arrays.items() if value is not None}
        return replace(
            self,
            x=pick_rows(self.x, here) if x is None else x,
            ids=None if self.ids is None else [self.ids[i] for i in rows],
            observer=None if observer is None else lambda part, q: observer(here[part], q),
            **some,
        )


class HostFacts(NamedTuple):
    """Facts about a batch that the checks need. One read from the device returns all of them.

    ``largest_x`` (B,); ``labels`` (B,) or ``largest_y`` (B,) for float targets; ``weight`` (B,).
    """

    largest_x: NDArray[np.float64]
    labels: NDArray[np.int64] | None
    largest_y: NDArray[np.float64] | None
    weight: NDArray[np.float64] | None

    @classmethod
    def read(cls, x: Tensor, y: Tensor, kind: str, mult: Tensor | None) -> HostFacts:
        """Read the facts from the device."""
        with threads_for(PASS_WORK * x.numel()):
            target = y if kind == "labels" else checks.row_largest(y).to(torch.float64)
            parts = [checks.row_largest(x).to(torch.float64), target]
            host = checks.read(*parts, *([] if mult is None else [mult]))
        labels, largest_y = (host[1], None) if kind == "labels" else (None, host[1])
        return cls(host[0], labels, largest_y, None if mult is None else host[2])

    def check(self, x: Tensor, y: Tensor, mult: Tensor | None, stats: Statistics) -> None:
        """Raise ValueError for values that are not finite, labels out of range and invalid weights. x, y: as given."""
        K = stats.num_classes
        if not np.isfinite(self.largest_x).all():
            checks.raise_not_finite("x", x)
        if self.labels is not None:
            low, high = int(self.labels.min()), int(self.labels.max())
            if low < 0 or high >= K:
                raise ValueError(
                    f"label {low if low < 0 else high} is outside 0..{K - 1} (num_classes={K}); add_classes adds classes"
                )
        elif not np.isfinite(self.largest_y).all():  # type: ignore[arg-type]
            if stats.targets == "multilabel":
                checks.raise_not_binary(y)
            checks.raise_not_finite("y", y)
        if self.weight is None or mult is None:
            return
        if not np.isfinite(self.weight).all():
            checks.raise_not_finite("weight", mult)
        for bad, problem, hint in (
            (self.weight < 0, "negative", ""),
            (
                stats.exact & (self.weight != np.floor(self.weight)),
                "fractional",
                ": on a grid a weight is an integer multiplicity; least-squares heads with grid=None take real weights",
            ),
        ):
            if bad.any():
                first = int(bad.argmax())
                value = float(self.weight[first])
                raise ValueError(
                    f"weight holds {int(bad.sum())} {problem} value(s), the first {value!r} at index {first}{hint}"
                )


def check_batch(
    stats: Statistics, choices: GridChoices, x: Any, y: Any, weight: Any, ids: Any, gridded: bool, sparse: bool
) -> SampleBatch:
    """Check a batch for every kind of bad input and choose the grids still open. An error changes nothing.

    ``choices`` are the grids chosen so far. ``gridded``: the rows are already normalized and on the grid. ``sparse``: many
    sparse rows stay sparse.
    """
    x = given = checks.features(x, stats.in_features, stats.device, sparse)
    if stats.normalize is not None and not gridded:
        x = with_values(x, x.values().to(torch.float64)) if x.is_sparse else x.to(torch.float64)
        x = normalized(x, stats.normalize)
    given_y, kind = checks.targets(y, x, stats.num_classes, stats.targets)
    y = checks.label_signs(given_y) if stats.targets == "multilabel" else given_y
    mult = checks.weights(weight, x)
    if choices.kind is not None and kind != choices.kind and x.shape[0]:
        raise ValueError(
            f"this machine holds {choices.kind}, got {kind}: labels (B,) and float targets (B, K) do not mix"
        )
    ids = _ids(ids, stats.folds, x.shape[0])
    if not x.shape[0]:
        return _no_samples(x, y, kind, choices)
    facts = HostFacts.read(x, y, kind, mult)
    facts.check(given, given_y, mult, stats)
    if mult is not None and facts.weight is not None and not facts.weight.all():  # drop samples of weight zero
        keep = mult != 0
        ids = None if ids is None else list(itertools.compress(ids, keep.tolist()))
        x, y, mult = pick_rows(x, keep), y[keep], mult[keep]
        if not x.shape[0]:
            return _no_samples(x, y, kind, choices)
        facts = HostFacts.read(x, y, kind, mult)
    before, choices = choices, _decide(facts, kind, stats, choices)
    if before.kind is None and stats.requested.grid is None and choices.grid is not None:
        _warn_if_coarse(x, choices.grid, stats.scale is not None)
    if stats.targets != "multilabel" and choices.target_grid is not None:
        _warn_if_targets_are_lost(y, choices.target_grid, stats)
    folds = None if ids is None or not stats.folds else np.array(fold_of(ids, stats.folds), dtype=np.int64)
    labels, targets = (y, None) if choices.kind == "labels" else (None, y.to(torch.float64))
    if choices.target_grid is not None:
        targets = choices.target_grid.quantize(y)
    size = float(x.shape[0]) if facts.weight is None else float(facts.weight.sum())
    bounds = _bounds(facts, choices) if stats.exact else np.ones(x.shape[0])
    largest = max([1.0, *(float(t.max()) for t in (facts.largest_x, facts.largest_y) if t is not None)])
    batch = SampleBatch(
        x, labels, targets, mult, None if folds is None else torch.from_numpy(folds).to(x.device), bounds, size,
        float(bounds.sum()) if stats.exact else largest**2 * size, choices, ids,
        host_labels=facts.labels, host_folds=folds, classes=stats.num_classes,
    )  # fmt: skip
    return _split_heavy(batch) if stats.exact else batch


def _no_samples(x: Tensor, y: Tensor, kind: str, choices: GridChoices) -> SampleBatch:
    labels = y if kind == "labels" else None
    return SampleBatch(x, labels, None, None, None, np.zeros(0), 0.0, 0.0, choices)


def _decide(facts: HostFacts, kind: str, stats: Statistics, choices: GridChoices) -> GridChoices:
    """Choose the grids that are still open, and check that the batch is within the grids in use."""
    x = float(facts.largest_x.max())
    y = None if facts.largest_y is None else float(facts.largest_y.max())
    wanted = stats.requested
    if choices.kind is None and stats.exact:
        choices = GridChoices(
            kind, wanted.grid or FixedPoint.auto(x), None if y is None else wanted.target_grid or FixedPoint.auto(y)
        )
    elif choices.kind is None:
        choices = GridChoices(kind)
    for name, largest, grid in (("x", x, choices.grid), ("y", y, choices.target_grid)):
        if largest is not None and grid is not None:
            grid.check(largest, name)
        elif largest is not None and largest > LARGEST_FLOAT_VALUE:
            raise ValueError(
                f"{name} holds a value of magnitude {largest!r}, whose square leaves the range of float64: rescale {name}"
            )
    return choices


def _warn_if_coarse(x: Tensor, grid: FixedPoint, standardized: bool) -> None:
    """Warn if a grid that was chosen by the largest value is too coarse for the variation of the columns. x: (B, J).

    If columns are ``standardized``, every column matters. Otherwise columns with a small deviation have little effect, so only
    the column that varies most is tested.
    """
    if x.is_sparse or len(x) < 2:
        return
    deviation = x.to(torch.float64).std(0) / grid.resolution
    worst = torch.where(deviation > 0, deviation, torch.inf).amin() if standardized else deviation.amax()
    steps = float(worst)
    # 4: deviation, in steps, from which a standardized column is accurate: rounding then adds 0.5 % to its variance.
    # 64: the same for the column that varies most, since other columns have only a fraction of its deviation.
    if 0 < steps < (4 if standardized else 64):
        what = "a feature that varies" if standardized else "the feature that varies most"
        warnings.warn(
            f"the automatic grid has steps of {grid.resolution:g} because the largest value is near {grid.limit:g}. The "
            f"standard deviation of {what} is only {steps:.2g} steps, so rounding loses much of it. Subtract the mean of each "
            f"feature or rescale the features first, or use a finer grid: grid=FixedPoint({grid.limit:g}, bits=26).",
            NumericalWarning,
            stacklevel=2,
        )


def _warn_if_targets_are_lost(y: Tensor, grid: FixedPoint, stats: Statistics) -> None:
    """Warn if rounding changes a column of targets much, in any batch. y: (B, K).

    All columns and all later batches share one grid, by default that of the largest target in the first batch. Rounding is
    compared with the variation of the column, or with the column itself if it does not vary. Of fewer than 8 rows, which may be
    alike by chance, the current samples count too.
    """
    noise = (4 * torch.finfo(y.dtype).eps) ** 2
    y = y.to(torch.float64)
    spread, mean = torch.var_mean(y, 0, correction=0)
    square = spread + mean.square()
    if len(y) < 8 and stats.moments.ndim == 3 and stats.n > 0:
        held = stats.moments.sum(0, dtype=torch.float64)  # of [1, t]
        held /= held[0, 0].clone()
        spread = torch.maximum(spread, (held.diagonal() - held[0].square())[1:] * grid.resolution**2)
    spread = torch.where(spread > noise * square, spread, square)
    lost = (y - grid.snap(y)).square().mean(0) > 0.005 * spread  # as for a standardized feature: less than 4 steps
    if bool(lost.any()):
        column = int(lost.to(torch.int8).argmax())
        warnings.warn(
            f"the grid of the targets has steps of {grid.resolution:g}, for targets up to {grid.limit:g}. Column {column} of y "
            f"varies by only {float(spread[column]) ** 0.5:.1g}, so rounding loses much of it. Subtract an offset from each "
            "column of y, rescale the columns to the same size, give a head a finer target_grid, or use grid=None.",
            NumericalWarning,
            stacklevel=2,
        )


def _bounds(facts: HostFacts, choices: GridChoices) -> NDArray[np.float64]:
    """Bound each row's contribution to any sum (B,), in steps squared."""
    assert choices.grid is not None
    steps = np.floor(facts.largest_x / choices.grid.resolution + 1)
    if choices.target_grid is not None and facts.largest_y is not None:
        steps = np.maximum(steps, np.floor(facts.largest_y / choices.target_grid.resolution + 1))
    return steps * steps if facts.weight is None else steps * steps * facts.weight


def _ids(ids: Any, folds: int, length: int) -> list[Any] | None:
    if ids is None:
        if folds and length:
            raise ValueError(f"folds={folds} needs ids: the fold of a sample is a hash of its id")
        return None
    if not isinstance(ids, Iterable):
        raise ValueError(f"ids must be a sequence, one for each row of x; got {ids!r}")
    listed: list[Any] = ids.tolist() if isinstance(ids, Tensor) else list(ids)
    if len(listed) != length:
        raise ValueError(f"x and ids differ in length: {length} rows, {len(listed)} ids")
    return listed


def _split_heavy(batch: SampleBatch) -> SampleBatch:
    """Split rows whose multiplicity alone would leave the exact range of float64 into several lighter ones."""
    if batch.mult is None or not (batch.bounds > LARGEST_EXACT_INTEGER).any():
        return batch
    weight = batch.mult.cpu().numpy()
    parts = np.maximum(np.ceil(batch.bounds / (LARGEST_EXACT_INTEGER / 2)), 1)
    if parts.sum() > 2**22:
        raise ValueError(f"weight is too large for exact sums: the largest is {float(weight.max())!r}")
    count = parts.astype(np.int64)
    index = np.repeat(np.arange(len(batch)), count)
    place = np.arange(len(index)) - (np.cumsum(count) - count)[index]
    share = weight[index] // parts[index] + (place < weight[index] % parts[index])
    bounds = (batch.bounds / np.maximum(weight, 1))[index] * share
    return replace(batch.pick(index), mult=torch.from_numpy(share).to(batch.x.device), bounds=bounds)


def signed_samples(add: Any, remove: Any, ids: bool = True) -> list[tuple[tuple[Any, ...], int]]:
    """Samples to be added (+1) and removed (-1) jointly, each given as (x, y) or (x, y, weight); None for no such samples.

    ``ids``: (x, y, weight, ids) is also allowed.
    """
    out: list[tuple[tuple[Any, ...], int]] = []
    for name, samples, sign in (("add", add, 1), ("remove", remove, -1)):
        if samples is None:
            continue
        if not isinstance(samples, tuple | list) or not 2 <= len(samples) <= (4 if ids else 3):
            raise ValueError(f"{name} must be (x, y), (x, y, weight){' or (x, y, weight, ids)' if ids else ''}")
        out.append((tuple(samples), sign))
    return out
