"""The tableau that paths start from, as far as they look at it; the derivation is in :mod:`torchlssvm.functional.svm_tableau`.

Paths look at the support vectors and the nearest reserve vectors only. Where a path ends, everything is checked: if (2) and (3)
hold for all samples, that makes it the solution, whatever happened on the way, or by rounding.
"""

from __future__ import annotations

import torch
from torch import Tensor

from torchlssvm.functional import svm_tableau
from torchlssvm.machines.svm_margin import Margin
from torchlssvm.machines.svm_samples import Samples

ENDLESS = float("inf")
SHARE = 4  # the nearest quarter of the reserve vectors is looked at
LEAST = 64  # and not fewer than so many
LOOSE, SURE = 1e-6, 1e-10
"""A path is left to the sequential walk if it ends with margin vectors whose g is beyond the one, or with others that it has
looked at whose g is on the wrong side by more than the other."""
PART = 4096  # samples checked at a time


class Tableau:
    """Columns of the tableau, as rows of T. Index 0 is b, then come the m - 1 margin vectors, then the others looked at."""

    def __init__(self, samples: Samples, margin: Margin, eager: int):
        self.eager = eager  # as long as no more are looked at, every column is there
        self.samples, self.device = samples, samples.device
        slots = margin.members()
        used = torch.cat([slots.new_zeros(1), slots])
        self.m = self.rows = len(used)
        self.R = margin.R[used][:, used]
        self.QS = margin.QS[used][:, : samples.n]  # (m, n): y, then rows of Q
        self.seen = margin.at[slots]  # (N - 1,) position of index 1..
        self.index = torch.full((samples.n,), -1, dtype=torch.int64, device=self.device)  # of each position
        self.index[self.seen] = torch.arange(1, self.m, device=self.device)
        self.Z = self.X = self.R[:, :0]  # (m, N - m), M_PO and R M_PO
        self.T, self.of = self.R, torch.arange(self.m, device=self.device)  # (rows or more, N); the index of each row
        self.row = self.of  # (N,) row of each index, or -1
        self.size = torch.zeros(self.m, dtype=torch.float64, device=self.device)  # terms of u_k[k], added up by size
        u = torch.cat([self.R.new_full((1,), ENDLESS), samples.u[self.seen]])
        a = margin.a[used]
        self.start = torch.stack([a, margin.lower[used], margin.upper[used], a, u])  # (5, N): x, its bounds, alpha, u
        self.far = (self.index < 0).nonzero()[:, 0]  # positions not looked at
        self.see(self._nearest())

    def _nearest(self) -> Tensor:
        """Positions of the error vectors, and of the nearest reserve vectors."""
        s = self.samples
        slack = torch.where(s.sign[self.far] > 0, s.slack[self.far], -1.0)
        error = int((slack < 0).sum())
        return self.far[slack.argsort()[: error + max(LEAST, (len(slack) - error) // SHARE)]]

    @property
    def N(self) -> int:
        """b, and the samples looked at."""
        return self.T.shape[1]

    def see(self, new: Tensor) -> None:  # (k,) positions, of far
        """Look at more samples: new entries of every column."""
        s, m, N, rows = self.samples, self.m, self.N, self.rows
        Z = self.QS.gather(1, new.expand(m, -1))
        X = svm_tableau.inner(self.R, Z)
        wide = N + len(new)
        T = self.R.new_empty(wide if self.eager >= wide else len(self.T), wide)
        T[:rows, :N] = self.T[:rows]
        T[:m, N:] = X
        if rows > m:
            k = self.of[m:]
            T[m:rows, N:] = svm_tableau.outer(s.block(self.seen[k - 1], new), self.Z[:, k - m], X)
        self.T, self.Z, self.X = T, torch.cat([self.Z, Z], 1), torch.cat([self.X, X], 1)
        self.seen = torch.cat([self.seen, new])
        self.index[new] = torch.arange(N, self.N, device=self.device)
        self.row = torch.cat([self.row, torch.full_like(new, -1)])
        error, g, u = s.sign[new] < 0, s.sign[new] * s.slack[new], s.u[new]
        lower, upper = torch.where(error, -ENDLESS, 0.0), torch.where(error, 0.0, ENDLESS)
        alpha = torch.where(error, u, 0.0)
        self.start = torch.cat([self.start, torch.stack([g, lower.to(g), upper.to(g), alpha, u])], 1)
        self.far = (self.index < 0).nonzero()[:, 0]
        if self.eager >= self.N:
            self.need(torch.arange(m, self.N, device=self.device))

    def need(self, k: Tensor) -> None:
        """Have these columns."""
        k = torch.unique(k[self.row[k] < 0])
        if not len(k):
            return
        m, rows, more = self.m, self.rows, self.rows + len(k)
        if more > len(self.T):
            T = self.R.new_empty(min(self.N, 2 * more), self.N)
            T[:rows] = self.T[:rows]
            self.T = T
        X, Z = self.X[:, k - m], self.Z[:, k - m]
        Q = self.samples.block(self.seen[k - 1], self.seen[m - 1 :])
        size = Q.gather(1, (k - m)[:, None])[:, 0] + (X * Z).abs().sum(0)
        self.T[rows:more, :m] = -X.T
        self.T[rows:more, m:] = svm_tableau.outer(Q, Z, self.X)
        self.size, self.of = torch.cat([self.size, size]), torch.cat([self.of, k])
        self.row[k] = torch.arange(rows, more, device=self.device)
        self.rows = more

    def ends(self, c: Tensor, moved: Tensor, beta: Tensor) -> tuple[Tensor, Tensor]:  # (B,), (B, N) twice -> (B,), (k,)
        """g_c where paths end, and positions not looked at that have come to the wrong side there.

        Both from how far the coefficients have moved; beta is beta_c at the end, zero outside P. Let r be what has become of
        (3) and g_S, which should be 0: moving a by -R r mends that, and changes g_c by beta_c^T r. nan: r is not small, or a
        sample is on the wrong side.
        """
        s, m = self.samples, self.m
        rows = (c >= m).nonzero()[:, 0]  # paths of error vectors: what leaves has a row of Q for itself
        own, alone = self.seen[c[rows] - 1], moved[rows, c[rows], None]
        rest = moved[:, m:].clone()
        rest[rows, c[rows] - m] = 0.0
        used = rest.any(0).nonzero()[:, 0]
        rest, others = rest[:, used], self.seen[used + m - 1]
        g = torch.empty_like(moved)
        g[:, 0] = moved[:, 1:] @ s.y[self.seen]
        wrong, found = torch.zeros_like(c, dtype=torch.bool), [self.far[:0]]
        for first in range(0, s.n, PART):
            at = torch.arange(first, min(s.n, first + PART), device=self.device)
            part = torch.addmm(s.g[at], moved[:, :m], self.QS[:, first : first + PART])
            part.addmm_(rest, s.block(others, at))
            part.index_add_(0, rows, s.block(own, at).mul_(alone))
            index = self.index[at]
            near = (index > 0).nonzero()[:, 0]
            g.scatter_(1, index[near].expand(len(g), -1), part.gather(1, near.expand(len(g), -1)))
            bad = (part < -1e-13 * s.scale) & (index < 0)
            wrong |= bad.any(1)
            found.append(at[bad.any(0)])
        out = g.gather(1, c[:, None])[:, 0]
        outside = beta == 0
        r = g.masked_fill(outside, 0.0)
        out += (beta * r).sum(1)
        r[:, 0] /= moved[:, 1:].abs().amax(1)
        wrong |= r.abs_().amax(1) > LOOSE
        error = moved + self.start[3] > 0.5 * self.start[4]
        off = (torch.where(error, g, -g) > SURE).logical_and_(outside).scatter_(1, c[:, None], False)
        return out.masked_fill_(wrong | off[:, 1:].any(1), torch.nan), torch.cat(found)
