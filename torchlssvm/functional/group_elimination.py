r"""Backward elimination of groups of columns from a ridge system, by generalized cross-validation at a fixed rho.

Over the columns that are kept, let A = G + rho I, U = A^-1 and W = U R with the right-hand side R (D, K). Over K outputs,

    rss = T - tr W^T R - rho |W|^2,    dof = D - rho tr U (+ 1 for a free intercept),    gcv = n rss / (n - dof)^2.

To drop the columns g, let U_gg = L L^T, Z = L^-1 U_g (|g|, D) and V = L^-1 W_g. U becomes U - Z^T Z and W becomes W - Z^T V,
which sets their rows and columns g to zero. The three terms that the error needs are known before the columns are dropped:

    tr U - |Z|^2,    tr W^T R - |V|^2,    |W|^2 - 2 <Z W, V> + |Z^T V|^2.

So one inverse is enough to judge all groups. Each step drops the group without which the error is least, until one group is
left. With m equal groups of D columns in all, the steps take 4/3 D^3 operations, besides D^3 for the factor and the inverse.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from torchlssvm.functional.threads import threads_for


def eliminate(
    G: Tensor, R: Tensor, T: float, groups: Sequence[Tensor], rho: float, n: float, centred: bool
) -> list[tuple[tuple[int, ...], float]]:
    """Return the numbers of the groups that are kept, and the error of each step, from all groups to the last one.

    Args:
        G: (D, D) without the ridge; overwritten.
        R: (D, K).
        T: sum of squared targets, the mean over outputs.
        groups: the columns of each group; groups do not overlap, and columns in no group always stay.
        rho: the ridge.
        n: number of samples.
        centred: True for a free intercept.
    """
    D, K = R.shape
    label = torch.full((D,), -1, dtype=torch.int64, device=G.device)  # the group of each column
    for i, columns in enumerate(groups):
        label[columns] = i
    with threads_for(D**3):
        G.diagonal().add_(rho)
        U = torch.cholesky_inverse(torch.linalg.cholesky(G))
        W = U @ R
        fit, trace = float((W * R).sum()), float(U.diagonal().sum())

        def error(fit: float, size: float, trace: float, columns: int) -> float:
            left = n - columns + rho * trace - centred
            return n * max(T - (fit + rho * size) / K, 0.0) / left**2

        kept = list(range(len(groups)))
        steps = [(tuple(kept), error(fit, float(W.square().sum()), trace, D))]
        while len(kept) > 1:
            trials = []
            for i in kept:
                at = (label == i).nonzero()[:, 0]
                rows = U[at]
                L = torch.linalg.cholesky(rows[:, at])
                Z = torch.linalg.solve_triangular(L, rows, upper=False)
                V = torch.linalg.solve_triangular(L, W[at], upper=False)
                less = Z.mT @ V
                numbers = (fit - V.square().sum(), trace - Z.square().sum(), (W - less).square().sum())
                smaller, left, size = torch.stack(numbers).tolist()
                trials.append((error(smaller, size, left, len(U) - len(at)), i, smaller, left))
                del rows, Z
            least, dropped, fit, trace = min(trials)
            at, rest = (label == dropped).nonzero()[:, 0], (label != dropped).nonzero()[:, 0]
            rows = U[at]
            L = torch.linalg.cholesky(rows[:, at])
            Z = torch.linalg.solve_triangular(L, rows[:, rest], upper=False)
            W = W[rest] - Z.mT @ torch.linalg.solve_triangular(L, W[at], upper=False)
            U = U[rest][:, rest].addmm_(Z.mT, Z, alpha=-1.0)
            label = label[rest]
            kept.remove(dropped)
            steps.append((tuple(kept), least))
    return steps
