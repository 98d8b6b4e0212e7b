r"""Drop groups of columns from a ridge system one after the other, judged by generalized cross-validation at one rho.

A = G + rho I over the columns kept, U = A^-1, W = U R with the right-hand side R (D, K), and over K outputs

    rss = T - tr W^T R - rho |W|^2,    dof = D - rho tr U (+ 1 for a free intercept),    gcv = n rss / (n - dof)^2.

Without the columns g, with U_gg = L L^T and Z = L^-1 U_g (|g|, D), U becomes U - Z^T Z and W becomes W - Z^T L^-1 W_g (their
rows and columns g come out as zero). What the error needs of that is known before anything is dropped: with V = L^-1 W_g,

    tr U - |Z|^2,    tr W^T R - |V|^2,    |W|^2 - 2 <Z W, V> + |Z^T V|^2.

So all groups are judged from one inverse, and the one with the least error without it is dropped, down to the last. With m
equal groups of D columns in all this takes 4/3 D^3 operations beside the factor and the inverse, which take D^3.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from torchlssvm.functional.threads import threads_for


def eliminate(
    G: Tensor, R: Tensor, T: float, groups: Sequence[Tensor], rho: float, n: float, centred: bool
) -> list[tuple[tuple[int, ...], float]]:
    """Return the groups kept, by their numbers, and the error of each step, from all groups to the last one.

    Args:
        G: (D, D) without the ridge; overwritten.
        R: (D, K).
        T: sum of squared targets, the mean over outputs.
        groups: columns of each group, none in two of them; columns in no group always stay.
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
