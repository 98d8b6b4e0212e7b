"""A test of whether given sums can be sums over samples.

Let q be the rows of J features. The matrix of their sums, G = sum [q; 1] [q; 1]^T = [[M, m], [m^T, n]], is positive
semidefinite. If G is not, then a sample was removed twice, or was removed without having been added.

The test scales G to a unit diagonal, S = D^-1/2 G D^-1/2, so that features of every scale have equal influence, and then tries
a Cholesky factorization of S + t I with t = 1e-12 (J + 1). Since the backward error of the factorization is only about 1e-16
(J + 1), it succeeds for every semidefinite G, so a failure proves a wrong removal. On the other hand, the test does not detect
violations smaller than t.

The same holds for sums over [q; z] with several side columns z, such as one and the targets.
"""

from __future__ import annotations

import torch
from torch import Tensor

from torchlssvm.functional.gram import strip_views


def bordered(packed: Tensor, m: Tensor, n: Tensor) -> Tensor:
    """G (J+1, J+1) as float64, lower triangle; m: (J,); n: scalar. Of R sides: G (J+R, J+R); m: (R, J); n: (R, R)."""
    J = m.shape[-1]
    R = m.numel() // J
    G = torch.zeros(J + R, J + R, dtype=torch.float64, device=packed.device)
    for a, b, strip in strip_views(packed, J):
        G[a:b, :b] = strip
    G[J:, :J], G[J:, J:] = m, n
    return G


def is_semidefinite(packed: Tensor, m: Tensor, n: Tensor, ridge: float = 0.0) -> bool:
    """Return True if the sums of a group can be sums over samples. m, n: as for :func:`bordered`; ridge: added to M."""
    G = bordered(packed, m, n)
    G.diagonal()[: m.shape[-1]].add_(ridge)
    d = G.diagonal()
    signs = d.sign()
    scale = torch.where(d > 0, d, torch.ones_like(d)).rsqrt()
    S = G.mul_(scale).mul_(scale[:, None])
    # 1e-12, relative to the diagonal, is ten thousand times the backward error of Cholesky's factorization.
    S.diagonal().add_(1e-12 * S.shape[0])
    info: Tensor = torch.linalg.cholesky_ex(S).info
    return bool((info == 0) & (signs >= 0).all())
