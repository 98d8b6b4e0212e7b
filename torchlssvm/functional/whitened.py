r"""A solved system in whitened coordinates, where leave-one-out, influence and leverage are dot products.

Let A = L L^T be the matrix of the normal equations, v the row of a sample, and mu the mean of the n samples. The *whitened* row
of the sample is u = L^-1 (v - mu). A free intercept appends the entry 1 / sqrt(n), because in centred features the intercept is
a separate coordinate with the diagonal entry n. For any two samples i and z, with centred rows,

    g(z, i) = v_z^T A^-1 v_i + 1/n = u_z . u_i,        f(z) = v_z^T w,

so dot products of whitened rows give the effect of every change of samples. Let the samples i in a set I change their weights
by Delta = diag(delta) and the right-hand side by V_I^T c. For a sample of weight d and target y, a removal is delta = -d and
c = -d y, an addition is delta = d and c = d y, and a relabelling is delta = d' - d and c = d' y' - d y. The new matrix is
A + V_I^T Delta V_I. By the push-through identity, for every z,

    f'(z) = f(z) + G_zI T,       T = (I + Delta G_II)^-1 (c - Delta f_I),       G = U U^T.

For one sample, T = (c - delta f_i) / (1 + delta g_ii). For the score of a removed sample itself, this is the leave-one-out
formula y_i - f'(x_i) = (y_i - f(x_i)) / (1 - d g_ii), with leverage h_i = d g_ii. All results are exact, without refitting.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from torchlssvm.functional.gram import strips

WHITENED_ROWS = 1024
"""Number of rows that are whitened at a time, small enough for the rows to stay in the cache from strip to strip."""


class Whitened(NamedTuple):
    """F = L^-1 (D, D) lower triangular; mu (D,); w (D, K) and beta (K,) with f = (v - mu) w + beta; n, or 0 if not centred.

    ``share`` is the least share of a column's square in A that the columns before it do not explain, so that eps / share
    estimates the relative error of products with A^-1.
    """

    F: Tensor
    mu: Tensor
    w: Tensor
    beta: Tensor
    n: float
    share: float = 1.0

    @property
    def extra(self) -> float:
        """The square of the coordinate of a free intercept, 1/n."""
        return 1.0 / self.n if self.n else 0.0

    def centred(self, v: Tensor) -> Tensor:
        """Return v - mu (B, D), the input of the methods below; in place. v: (B, D) float64."""
        return v.sub_(self.mu) if self.n else v

    def scores(self, v: Tensor) -> Tensor:
        """Compute f (B, K). v: (B, D), centred."""
        return v @ self.w + self.beta if self.n else v @ self.w

    def leverages(self, v: Tensor) -> Tensor:
        """Return g(z, z) (B,), the squared length of whitened rows, one strip at a time. v: (B, D), centred."""
        out = torch.full((v.shape[0],), self.extra, dtype=torch.float64, device=v.device)
        for a, b, _ in strips(self.F.shape[0], product=True):  # the triangle spares half of the product
            u = v[:, :b] @ self.F[a:b, :b].mT
            out += torch.einsum("ij,ij->i", u, u)
        return out

    def rows(self, v: Tensor) -> Tensor:
        """Return the whitened rows U (B, D) or (B, D + 1). v: (B, D), centred."""
        D = self.F.shape[0]
        out = torch.empty(v.shape[0], D + (self.n > 0), dtype=torch.float64, device=v.device)
        for a, b, _ in strips(D, product=True):
            out[:, a:b] = v[:, :b] @ self.F[a:b, :b].mT
        if self.n:
            out[:, D] = self.extra**0.5
        return out


def inverse_lower(L: Tensor) -> Tensor:
    """Invert a lower triangular L (n, n) in n^3 / 3 flops. Entries above the diagonal of L are not read.

    [[A, 0], [B, D]]^-1 = [[A^-1, 0], [-D^-1 B A^-1, D^-1]].
    """
    n = len(L)
    # 256: rows up to which one triangular solve with the identity is faster than two halves
    if n <= 256:
        inverse: Tensor = torch.linalg.solve_triangular(L, torch.eye(n, dtype=L.dtype, device=L.device), upper=False)
        return inverse
    W, h = torch.zeros_like(L), n // 2
    W[:h, :h], W[h:, h:] = inverse_lower(L[:h, :h]), inverse_lower(L[h:, h:])
    below = torch.linalg.solve_triangular(L[h:, h:], L[h:, :h], upper=False)
    W[h:, :h] = torch.linalg.solve_triangular(L[:h, :h], below, upper=False, left=False).neg_()
    return W


def from_inverse(P: Tensor) -> Tensor:
    """Return a lower triangular F with F^T F = P. P: (D, D) positive definite."""
    flipped = torch.linalg.cholesky(P.flip(0, 1))  # P = J C C^T J with the flip J, and F = J C^T J is lower triangular
    lower: Tensor = flipped.mT.flip(0, 1).contiguous()
    return lower


def joint_change(U: Tensor, delta: Tensor, c: Tensor, f: Tensor) -> Tensor:
    """Compute T (L, K) for samples that change together. U: (L, D); delta: (L,); c, f: (L, K); or batches of such groups.

    For one sample this is only a division. If L > D, it is cheaper to solve a (D, D) system instead, with r = c - Delta f: T =
    r - Delta U (I + U^T Delta U)^-1 U^T r.
    """
    L, D = U.shape[-2:]
    right = c - delta[..., None] * f
    if L == 1:
        share = 1.0 + delta * U.square().sum(-1)  # above 0 for a sample that was added, except for rounding
        return right / share.clamp(min=torch.finfo(U.dtype).eps)[..., None]
    if L <= D:
        system = delta[..., None] * (U @ U.mT)
        system.diagonal(dim1=-2, dim2=-1).add_(1.0)
        few: Tensor = torch.linalg.solve(system, right)
        return few
    inner = U.mT @ (delta[..., None] * U)
    inner.diagonal(dim1=-2, dim2=-1).add_(1.0)
    many: Tensor = right - delta[..., None] * (U @ torch.linalg.solve(inner, U.mT @ right))
    return many


def moved_scores(Z: Tensor, U: Tensor, T: Tensor) -> Tensor:
    """G_ZI T (..., V, K), the change of scores at Z, in the cheaper order. Z: (..., V, D); U: (..., L, D); T: (..., L, K)."""
    (V, D), (L, K) = Z.shape[-2:], T.shape[-2:]
    return (Z @ U.mT) @ T if V * L * (D + K) <= D * K * (L + V) else Z @ (U.mT @ T)


def margins(scores: Tensor, y: Tensor) -> Tensor:
    """Compute the score of the label minus the best other score (B,), which is negative if the prediction is wrong.

    scores: (B, K), K >= 2; y: (B,) labels.

    >>> margins(torch.tensor([[0.5, -1.0, 0.0]]), torch.tensor([2])).tolist()
    [-0.5]
    """
    own = scores.gather(1, y[:, None])
    return (own - scores.scatter(1, y[:, None], -torch.inf).amax(1, keepdim=True))[:, 0]


def error_rate(scores: Tensor, y: Tensor) -> float:
    """Return the share of samples whose highest score is not that of their label. scores: (B, K); y: (B,)."""
    return float((scores.argmax(1) != y).to(torch.float64).mean())
