"""A checked batch of samples, ready to be summed with either sign."""

from __future__ import annotations

import hashlib
import itertools
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from torchlssvm.functional import checks
from torchlssvm.functional.gram import LARGEST_EXACT_INTEGER
from torchlssvm.functional.grid import FixedPoint
from torchlssvm.functional.row_normalization import normalized
from torchlssvm.functional.sparse_rows import pick as pick_rows
from torchlssvm.functional.sparse_rows import with_values
from torchlssvm.functional.threads import PASS_WORK, threads_for

LARGEST_FLOAT_VALUE = 2.0**450
"""Without a grid values are refused past this bound, so that sums of their squares stay finite."""


RowObserver = Callable[[slice | Tensor, Tensor], None]
"""Takes rows of a batch, by their index, and the same rows on the grid (b, J) float64, while they are being summed."""


RowQuestion = Callable[[Tensor, FixedPoint], list[Tensor]]
"""Takes rows (B, J), not yet checked, and their grid; returns tensors to be read from the device together with the checks."""


@dataclass(frozen=True)
class GridChoices:
    """The choices made from the first batch: labels or values, and the grids."""

    kind: str | None = None
    grid: FixedPoint | None = None
    target_grid: FixedPoint | None = None


@dataclass(frozen=True)
class SampleBatch:
    """Checked samples: x (B, J), dense or coalesced; labels (B,) or targets (B, K); multiplicities and folds (B,), or None.

    ``ids``: of the rows, where given; ``observer``: sees the rows on the grid when they are summed. On the host: ``bounds``
    (B,) bound each row's contribution to any sum, in steps squared (ones without a grid), and ``gross`` that of all; ``size``
    is the total weight; ``host_labels`` and ``host_folds`` (B,) are labels and folds, where known; ``answer`` is that to a
    RowQuestion.
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
    answer: list[NDArray[Any]] | None = None

    def __len__(self) -> int:
        """The number of rows."""
        return int(self.x.shape[0])


def fold_of(ids: Iterable[Any], folds: int) -> list[int]:
    """Return the fold of each id: a stable hash, the same on every machine and in every run."""
    return [int.from_bytes(hashlib.blake2b(str(i).encode(), digest_size=8).digest(), "big") % folds for i in ids]


WHOLE_CHECK_ROWS = 4096
"""Batches of more rows are checked with one bound for all rows: half the passes, and nearly always enough."""


def inspect(
    x: Tensor, y: Tensor, kind: str, mult: Tensor | None, whole: bool = False, along: Sequence[Tensor] = ()
) -> list[NDArray[Any]] | None:
    """Read row maxima of x, labels or row maxima of y, weights if there are any, and ``along``: one read from the device.

    With ``whole``: one maximum for all rows of x.
    """
    if checks.is_fake(x, y, mult):
        return None
    with threads_for(PASS_WORK * x.numel()):
        return _inspect(x, y, kind, mult, whole, along)


def _inspect(
    x: Tensor, y: Tensor, kind: str, mult: Tensor | None, whole: bool, along: Sequence[Tensor]
) -> list[NDArray[Any]]:
    parts = [torch.stack(torch.aminmax(x)).abs().amax()[None] if whole else checks.row_largest(x)]
    if kind == "values":
        parts.append(checks.row_largest(y))
    parts = [p.to(torch.float64) for p in parts]
    if kind == "labels":
        parts.append(y)
    if mult is not None:
        parts.append(mult)
    return checks.read(*parts, *along)


def check_batch(
    x: Any,
    y: Any,
    weight: Any,
    ids: Any,
    *,
    J: int,
    K: int,
    folds: int,
    device: torch.device,
    exact: bool,
    choices: GridChoices,
    wanted: GridChoices,
    normalize: str | None = None,
    question: RowQuestion | None = None,
    sparse: bool = False,
) -> SampleBatch:
    """Check a batch for every kind of bad input and decide what is still open; raises with nothing changed.

    ``choices`` is what is decided already, ``wanted`` what the user asked for: a grid there that is None is taken from the
    data, if ``exact``; without it samples are summed as float64. ``normalize``: how rows are normalized before the grid.
    ``question``: asked of plain rows (labels, neither weights nor folds) whose grid is decided; its answer is in the batch.
    ``sparse``: many sparse rows stay sparse.
    """
    x = given = checks.features(x, J, device, sparse)
    if normalize is not None:
        x = normalized(with_values(x, x.values().to(torch.float64)) if x.is_sparse else x.to(torch.float64), normalize)
    y, kind = checks.targets(y, x, K)
    mult = checks.weights(weight, x)
    if choices.kind is not None and kind != choices.kind and x.shape[0]:
        raise ValueError(
            f"this machine holds {choices.kind}, got {kind}: labels (B,) and float targets (B, K) do not mix"
        )
    ids = _ids(ids, folds, x.shape[0])
    host_folds = None if ids is None or not folds else np.array(fold_of(ids, folds), dtype=np.int64)
    fold_index = None if host_folds is None else torch.from_numpy(host_folds).to(device)
    if x.shape[0] == 0:
        return SampleBatch(x, y if kind == "labels" else None, None, None, fold_index, np.zeros(0), 0.0, 0.0, choices)
    whole = exact and kind == "labels" and x.shape[0] > WHOLE_CHECK_ROWS and not x.is_sparse
    asked: list[Tensor] = []
    if question is not None and choices.grid is not None and not checks.is_fake(x, y):
        plain = kind == "labels" and mult is None and fold_index is None
        asked = question(x, choices.grid) if plain else []
    host = inspect(x, y, kind, mult, whole, asked)
    answer = host[len(host) - len(asked) :] if host is not None and asked else None
    largest_x, largest_y = (1.0, 1.0) if host is None else (float(host[0].max()), float(host[1].max()))
    if host is not None:
        _check_values(given, y, kind, mult, host, K, exact)
        if mult is not None and not host[2].all():  # a sample of weight zero is none
            keep = mult != 0
            rest = None if ids is None else list(itertools.compress(ids, keep.tolist()))
            return check_batch(
                pick_rows(x, keep),
                y[keep],
                mult[keep],
                rest,
                J=J,
                K=K,
                folds=folds,
                device=device,
                exact=exact,
                choices=choices,
                wanted=wanted,
                sparse=sparse,
            )
    size = float(x.shape[0]) if mult is None or host is None else float(host[2].sum())
    if choices.kind is None:
        choices = GridChoices(kind)
        if exact:
            grid = wanted.grid or FixedPoint.auto(largest_x)
            target_grid = None if kind == "labels" else wanted.target_grid or FixedPoint.auto(largest_y)
            choices = GridChoices(kind, grid, target_grid)
    if not exact:
        for name, largest in (("x", largest_x), ("y", largest_y)):
            if largest > LARGEST_FLOAT_VALUE:
                raise ValueError(
                    f"{name} holds a value of magnitude {largest!r}, whose square leaves the range of float64: rescale {name}"
                )
        labels, targets = (y, None) if kind == "labels" else (None, y.to(torch.float64))
        gross = max(1.0, largest_x, abs(largest_y)) ** 2 * size
        return SampleBatch(
            x, labels, targets, mult, fold_index, np.ones(x.shape[0]), size, gross, choices, ids,
            host_labels=host[1] if host is not None and labels is not None else None, host_folds=host_folds,
        )  # fmt: skip
    assert choices.grid is not None
    choices.grid.check(largest_x, "x")
    steps = np.ones(x.shape[0])
    if host is not None:
        if (
            whole
            and (largest_x / choices.grid.resolution + 1) ** 2 * max(WHOLE_CHECK_ROWS, size / 256)
            > LARGEST_EXACT_INTEGER
        ):
            host[0] = checks.row_largest(x).to(torch.float64).cpu().numpy()  # an outlier: not for all rows
        steps = np.floor(host[0] / choices.grid.resolution + 1) * steps
    targets = None
    if choices.target_grid is not None:
        choices.target_grid.check(largest_y, "y")
        targets = choices.target_grid.quantize(y)
        if host is not None:
            steps = np.maximum(steps, np.floor(host[1] / choices.target_grid.resolution + 1))
    bounds = steps * steps if mult is None or host is None else steps * steps * host[2]
    labels = y if kind == "labels" else None
    return _split_heavy(
        SampleBatch(
            x, labels, targets, mult, fold_index, bounds, size, float(bounds.sum()), choices, ids,
            host_labels=host[1] if host is not None and labels is not None else None, host_folds=host_folds, answer=answer,
        )
    )  # fmt: skip


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


def _check_values(
    x: Tensor, y: Tensor, kind: str, mult: Tensor | None, host: list[NDArray[np.float64]], K: int, exact: bool
) -> None:
    if not np.isfinite(host[0]).all():
        checks.raise_not_finite("x", x)
    if kind == "labels":
        low, high = int(host[1].min()), int(host[1].max())
        if low < 0 or high >= K:
            raise ValueError(f"label {low if low < 0 else high} is outside 0..{K - 1} (num_classes={K})")
    elif not np.isfinite(host[1]).all():
        checks.raise_not_finite("y", y)
    if mult is None:
        return
    weight = host[2]
    if not np.isfinite(weight).all():
        checks.raise_not_finite("weight", mult)
    for bad, problem in ((weight < 0, "negative"), (weight != np.floor(weight), "fractional")):
        if bad.any() and (exact or problem == "negative"):
            first = int(bad.argmax())
            hint = (
                ""
                if problem == "negative"
                else ": on a grid a weight is an integer multiplicity; use grid=None for real weights"
            )
            raise ValueError(
                f"weight holds {int(bad.sum())} {problem} value(s), the first {float(weight[first])!r} at index {first}{hint}"
            )


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
    pick = torch.from_numpy(index).to(batch.x.device)
    return replace(
        batch,
        x=pick_rows(batch.x, pick),
        labels=None if batch.labels is None else batch.labels[pick],
        targets=None if batch.targets is None else batch.targets[pick],
        folds=None if batch.folds is None else batch.folds[pick],
        mult=torch.from_numpy(share).to(batch.x.device),
        bounds=(batch.bounds / np.maximum(weight, 1))[index] * share,
        ids=None if batch.ids is None else [batch.ids[i] for i in index],
        host_labels=None if batch.host_labels is None else batch.host_labels[index],
        host_folds=None if batch.host_folds is None else batch.host_folds[index],
    )


def joint_changes(check: Callable[..., SampleBatch], add: Any, remove: Any) -> list[tuple[SampleBatch, int]]:
    """Checked batches with their signs, of samples to be added and to be removed jointly; None for no such samples.

    Each is (x, y), (x, y, weight) or (x, y, weight, ids). ``check``: of a head, with ``like`` and ``removed``.
    """
    changes: list[tuple[SampleBatch, int]] = []
    for name, samples, sign in (("add", add, 1), ("remove", remove, -1)):
        if samples is None:
            continue
        if not isinstance(samples, tuple | list) or not 2 <= len(samples) <= 4:
            raise ValueError(f"{name} must be (x, y), (x, y, weight) or (x, y, weight, ids)")
        weight, ids = (*samples[2:], None, None)[:2]
        like = changes[0][0] if changes else None
        changes.append((check(samples[0], samples[1], weight, ids, like, removed=sign < 0), sign))
    return changes
