"""The choice of rho for a :class:`~torchlssvm.MarginHead`: by k-fold or by exact leave-one-out, on the samples it holds."""

from __future__ import annotations

import copy
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from torchlssvm.errors import NotFittedError
from torchlssvm.functional import checks
from torchlssvm.linear.diagnostics.margin_changes import leave_one_out
from torchlssvm.linear.diagnostics.rho_selection import RhoPath, best_of, check_rhos
from torchlssvm.linear.hinge_descent import DescentPoint, HingeDescent
from torchlssvm.linear.normal_equations import class_weights
from torchlssvm.linear.solvers import code_labels

if TYPE_CHECKING:
    from torchlssvm.linear.margin_head import MarginHead

DEFAULT_RHO_SHARES = tuple(10.0 ** (-i / 2) for i in range(9))
"""Values of rho that are tried by default, in units of the mean eigenvalue of the centred features: 1 down to 1e-4."""


def rho_path(head: MarginHead, rhos: Any, method: str, score: str, folds: int) -> RhoPath:
    """Errors for every value; see :meth:`torchlssvm.MarginHead.select_rho`."""
    if method == "gcv":
        raise ValueError(
            'method="gcv" is not for a MarginHead: generalized cross-validation needs scores that are linear in the targets, '
            'and an active set is not. Use method="kfold" or "loo"'
        )
    checks.one_of(method, "method", ("kfold", "loo"))
    checks.one_of(score, "score", ("accuracy", "squared"))
    if isinstance(folds, bool) or not isinstance(folds, int) or folds < 2:
        raise ValueError(f"folds must be an integer >= 2, got {folds!r}")
    if head.statistics.empty:
        raise NotFittedError("the head holds no samples: call add(x, y) first")
    values = check_values(head, rhos)
    if method == "kfold":
        errors = fold_errors(head, values, score, folds, rhos is not None)
    else:
        errors = left_out_errors(head, values, score)
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
    spread = float((stats.diagonal().sum(0).to(torch.float64) - m.square() / n).sum()) * stats.grid.resolution**2
    return max(spread / stats.in_features, 1e-12)


def fold_errors(head: MarginHead, values: Tensor, score: str, folds: int, whole: bool = True) -> Tensor:
    """Errors (r,) of the samples of each fold by weights that were learned from the other folds.

    The search runs from the largest rho to the smallest, for all folds and classes together, and starts at each rho from the
    weights for the previous one. To save time, it stops near the minimum, not exactly there. Rows are read in the order in
    which they are saved, so that the errors depend on the samples alone. With ``whole=False``, the search ends once errors
    have clearly risen twice, and the remaining errors are infinite.
    """
    rows, solver, K = head.samples, head._solver, head.num_classes
    order = rows.saved_order()
    q, labels, copies, fold = rows.q[order], rows.labels[order], rows.copies[order], rows.folds(folds)[order]
    used = fold.unique().tolist()
    if len(used) < 2:
        raise ValueError(f"all samples are in one of {folds} folds: there are too few to choose by")
    # 2000: distinct samples tested at each value. With more, only the first folds are used; the standard error is then 1 %
    used = used[: -(-2000 * len(used) // rows.n)]
    signs = code_labels(labels, K).repeat(1, len(used))
    weight = torch.empty_like(signs)
    for j, f in enumerate(used):
        mine = copies * (fold != f)
        counts = torch.zeros(K, dtype=torch.float64, device=rows.device).index_add_(0, labels, mine)
        by_class = class_weights(head.class_weight, counts)
        weight[:, j * K : (j + 1) * K] = (mine if by_class is None else mine * by_class[labels])[:, None]
    one_sign = ((signs > 0) * weight).sum(0) == 0  # no sample of the class is in the other folds
    tested = torch.stack([fold == f for f in used], 1)
    number = float((tested * copies[:, None]).sum())
    errors, risen, scale = torch.full_like(values, torch.inf), 0, solver.scale
    point: DescentPoint | None = None
    for i in values.argsort(descending=True).tolist():
        before, scale = scale, replace(solver.scale, rho=float(values[i]))
        descent = HingeDescent(solver, q, scale, signs, weight)
        if point is None:
            point = descent.start()
        else:
            point.w[: scale.width(rows.in_features)] *= scale.root / before.root  # the same weights
        for _ in range(2):  # Newton steps, from the weights at the value before
            descent.lower(point)
        found = torch.where(one_sign, -1.0, point.margins * signs).reshape(rows.n, len(used), K)[tested]
        of = labels[:, None].expand_as(tested)[tested]
        times = copies[:, None].expand_as(tested)[tested]
        errors[i] = mistakes(found, of, score) @ times / number
        best = float(errors.amin())
        # 2: standard errors of the best value by which an error has clearly risen
        risen = risen + 1 if float(errors[i]) > best + 2 * (best / number) ** 0.5 else 0
        if risen == 2 and not whole:
            break
    return errors


def left_out_errors(head: MarginHead, values: Tensor, score: str) -> Tensor:
    """Errors (r,) of all samples, each by the head that never saw it."""
    twin, rows = copy.deepcopy(head), head.samples
    errors = torch.zeros_like(values)
    for i in values.argsort(descending=True).tolist():
        twin.rho = float(values[i])
        errors[i] = mistakes(left_out_scores(twin), twin.samples.labels, score) @ twin.samples.copies
    return errors / float(rows.copies.sum())


def left_out_scores(head: MarginHead) -> Tensor:
    """Leave-one-out scores (n, K) of all rows, in their order."""
    grid = head.grid
    assert grid is not None
    return leave_one_out(head, grid.dequantize(head.samples.q), head.samples.labels, None, None, gridded=True)


def mistakes(scores: Tensor, y: Tensor, score: str) -> Tensor:
    """Wrong predictions (n,), or the squared hinge of each sample, its mean over the classes. scores: (n, K); y: (n,)."""
    if score == "accuracy":
        return (scores.argmax(1) != y).to(torch.float64)
    return (1.0 - code_labels(y, scores.shape[1]) * scores).clamp(min=0.0).square().mean(1)
