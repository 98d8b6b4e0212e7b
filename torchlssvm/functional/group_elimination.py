r"""Backward elimination of groups of columns from a ridge system, by generalized cross-validation at a fixed rho.

Let D be the number of columns that are kept, A = G + rho I, U = A^-1, and W = U R for the right-hand side R (D, K). With n
samples, K outputs and the sum T of the squared targets, the residual sum of squares, the degrees of freedom and the error are

    rss = T - tr W^T R - rho |W|^2,    dof = D - rho tr U (+ 1 for a free intercept),    gcv = n rss / (n - dof)^2.

To drop the columns g, let U_gg = L L^T, Z = L^-1 U_g (|g|, D) and V = L^-1 W_g. U becomes U - Z^T Z and W becomes W - Z^T V,
which sets the rows and columns g to zero. The three terms of the new error follow from Z and V, without computing the new U:

    tr U - |Z|^2,    tr W^T R - |V|^2,    |W|^2 - 2 <Z W, V> + |Z^T V|^2.

One inverse is therefore enough to compare all groups. Each step drops the group whose removal gives the smallest error, until
one group is left. With m groups of equal size and D columns at the start, the steps take 4/3 D^3 operations, in addition to D^3
for the factor and the inverse.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from torchlssvm.functional.threads import threads_for


def eliminate(
    G: Tensor, R: Tensor, T: float, groups: Sequence[Tensor], rho: float, n: float, centred: bool
) -> list[tuple[tuple[int, ...], float]]:
    """Return, for each step from all groups to the last one, the indices of the groups that are kept and the error.

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
