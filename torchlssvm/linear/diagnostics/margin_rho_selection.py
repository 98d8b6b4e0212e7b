"""The choice of rho for a :class:`~torchlssvm.MarginHead`: by k-fold or by exact leave-one-out, on the samples it holds."""

from __future__ import annotations

import copy
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from torchlssvm.functional import checks
from torchlssvm.linear.diagnostics.margin_changes import leave_one_out
from torchlssvm.linear.diagnostics.rho_selection import RhoPath, best_of, check_rhos
from torchlssvm.linear.solvers import code_labels

if TYPE_CHECKING:
    from torchlssvm.linear.margin_head import MarginHead

DEFAULT_RHO_SHARES = tuple(10.0 ** (-i / 2) for i in range(9))
"""Values of rho that are tried by default, in units of the mean eigenvalue of the centred features: 1 down to 1e-4."""

GCV_REFUSAL = (
    'method="gcv" is not for a MarginHead: generalized cross-validation needs scores that are linear in the targets, and an '
    'active set is not. Use method="kfold" or "loo"'
)
"""Answer to a choice by generalized cross-validation."""


def rho_path(head: MarginHead, rhos: Any, method: str, score: str, folds: int) -> RhoPath:
    """Errors for every value; see :meth:`torchlssvm.MarginHead.select_rho`."""
    if method == "gcv":
        raise ValueError(GCV_REFUSAL)
    checks.one_of(method, "method", ("kfold", "loo"))
    checks.one_of(score, "score", ("accuracy", "squared"))
    if isinstance(folds, bool) or not isinstance(folds, int) or folds < 2:
        raise ValueError(f"folds must be an integer >= 2, got {folds!r}")
    head._fitted_weights()  # NotFittedError without samples
    values = check_values(head, rhos)
    errors = fold_errors(head, values, score, folds) if method == "kfold" else left_out_errors(head, values, score)
    return RhoPath(best_of(values, errors), values, errors, None, method)


def check_values(head: MarginHead, rhos: Any) -> Tensor:
    """rhos (r,): finite and > 0. None: nine values below the mean eigenvalue of the features."""
    if rhos is None:
        return torch.tensor(
            [mean_eigenvalue(head) * share for share in DEFAULT_RHO_SHARES], dtype=torch.float64, device=head.device
        )
    return check_rhos(rhos, head.device)


def mean_eigenvalue(head: MarginHead) -> float:
    """Mean eigenvalue of the Gram matrix of the centred features, as they are solved with."""
    stats = head.statistics
    if stats.scale is not None:
        return float(stats.n)
    assert stats.accumulator is not None
    assert stats.grid is not None
    V, counts = stats.class_sums()
    m, n = V.sum(0).to(torch.float64), float(counts.sum())
    spread = float((stats.accumulator.diag.sum(0).to(torch.float64) - m.square() / n).sum()) * stats.grid.resolution**2
    return max(spread / stats.in_features, 1e-12)


def fold_errors(head: MarginHead, values: Tensor, score: str, folds: int) -> Tensor:
    """Errors (r,) of the samples of each fold by a head that learned the others; each value starts from the one before."""
    rows, grid = head.samples, head.grid
    assert grid is not None
    fold = rows.folds(folds)
    errors, order = torch.zeros_like(values), values.argsort(descending=True).tolist()
    for f in range(folds):
        out = fold == f
        if not bool(out.any()):
            continue
        if bool(out.all()):
            raise ValueError(f"all samples are in one of {folds} folds: there are too few to choose by")
        part = type(head).from_config(head.config(), device=head.device)
        part.statistics.decide("labels", grid)
        rest = grid.dequantize(rows.q[~out]), rows.labels[~out], rows.copies[~out]
        part._apply_changes([(part.statistics.check(*rest, gridded=True), 1)])
        q, y, copies = rows.q[out].to(torch.float64) * grid.resolution, rows.labels[out], rows.copies[out]
        for i in order:
            part.rho = float(values[i])
            w, b = part.solve()
            errors[i] += mistakes(q @ w + b, y, score) @ copies
    return errors / float(rows.copies.sum())


def left_out_errors(head: MarginHead, values: Tensor, score: str) -> Tensor:
    """Errors (r,) of all samples, each by the head that never saw it."""
    twin, rows = copy.deepcopy(head), head.samples
    errors = torch.zeros_like(values)
    for i in values.argsort(descending=True).tolist():
        twin.rho = float(values[i])
        errors[i] = mistakes(left_out_scores(twin), twin.samples.labels, score) @ twin.samples.copies
    return errors / float(rows.copies.sum())


def left_out_scores(head: MarginHead) -> Tensor:
    """Leave-one-out scores (n, K) of all rows held, in their order."""
    grid = head.grid
    assert grid is not None
    return leave_one_out(head, grid.dequantize(head.samples.q), head.samples.labels, None, None, gridded=True)


def mistakes(scores: Tensor, y: Tensor, score: str) -> Tensor:
    """Wrong predictions (n,), or the squared hinge of each sample, its mean over the classes. scores: (n, K); y: (n,)."""
    if score == "accuracy":
        return (scores.argmax(1) != y).to(torch.float64)
    return (1.0 - code_labels(y, scores.shape[1]) * scores).clamp(min=0.0).square().mean(1)
