"""The solution of one least-squares system, as a cache that changes are folded into.

Coordinates: a sample is the row v = [phi (, 1)] / sqrt(rho), so that A / rho = I + sum d v v^T =: B, P = B^-1 and the
weights are w sqrt(rho). A free intercept is a coordinate of its own, orthogonal to the others when rows are centred on the
mean of what the base holds; then f(x) = (v - mu) w + beta. See :mod:`torchlssvm.functional.theorem1`.

The *base* is a solved state: a Cholesky factor from statistics, or P itself, or nothing at all (B = I, no samples). On top
of it lie *pending* signed rows, not yet part of it. Reading the weights applies Theorem 1 to the pending rows, at a cost of
2 J^2 per row, once; reading P moves the base forward. On an empty base Theorem 1 is the dual form, w = V^T (V V^T + I)^-1 y.
"""

from __future__ import annotations

import torch
from torch import Tensor

from torchlssvm.functional import checks, theorem1
from torchlssvm.functional.system import Factor


class NotPositiveDefinite(Exception):
    """The pending rows cannot be what they claim: without them the system would not be positive definite."""


class TooInaccurate(Exception):
    """The pending removals are legitimate but nearly all that the system rests on: Theorem 1 would lose digits."""


class Solution:
    """State: ``w`` (D, K), ``beta`` (K,), ``mu`` (D,), ``n`` of the base; pending rows V (L, D), targets (L, K), signs d (L,)."""

    def __init__(self, D: int, K: int, centred: bool, device: torch.device):
        """The solution without any sample."""
        self.D, self.K, self.centred, self.device = D, K, centred, device
        self.least_pivot = 0.0
        self.columns = 0  # updates of P since it was last computed from scratch
        self.reset()

    def reset(self) -> None:
        """Forget everything: B = I."""
        zeros = {"dtype": torch.float64, "device": self.device}
        self.set_base(torch.zeros(self.D, self.K, **zeros), torch.zeros(self.K, **zeros), torch.zeros(self.D, **zeros), 0.0)

    def set_base(
        self, w: Tensor, beta: Tensor, mu: Tensor, n: float, factor: Factor | None = None, scale: Tensor | float = 1.0,
        P: Tensor | None = None,
    ) -> None:  # fmt: skip
        """A solved state. ``factor`` is of a matrix A' with A'^-1 = scale^-1 P scale^-1; n is 0 for the empty state."""
        self.w, self.beta, self.mu, self.n = w, beta, mu, n
        self.factor, self.scale, self.P = factor, scale, P
        self._clear()

    def _clear(self) -> None:
        self.pending = self._done = 0
        self._V: Tensor | None = None
        self._read: tuple[Tensor, Tensor, Tensor] | None = None

    def drop_pending(self) -> None:
        """Forget the pending rows: a solve from statistics is due."""
        self._clear()

    @property
    def empty(self) -> bool:
        """Whether the base holds no sample."""
        return self.n == 0

    def rebuildable(self) -> bool:
        """Whether updates can be made from this base: it knows its inverse in some form."""
        return self.empty or self.factor is not None or self.P is not None

    def settle(self) -> None:
        """Drop the pending rows but keep the weights they give: what is left holds no sample."""
        if self.pending:
            self.set_base(*self.weights(), self.n)
            self.n = float("nan")  # neither empty nor rebuildable: the next change solves anew

    # -- pending rows --------------------------------------------------------------------------------------------------

    def append(self, rows: Tensor, y: Tensor, d: Tensor, capacity: int) -> None:
        """Add pending rows (B, D) with targets (B, K) and signed weights d (B,); ``capacity`` is the most there will be."""
        if self._V is None or self._V.shape[0] < self.pending + len(rows):
            room = max(capacity, self.pending + len(rows))
            grow = [torch.empty(room, size, dtype=torch.float64, device=self.device) for size in (self.D, self.D, self.K)]
            d_new = torch.empty(room, dtype=torch.float64, device=self.device)
            G_new = torch.empty(room, room, dtype=torch.float64, device=self.device)
            if self._V is not None:
                n = self.pending
                for new, old in zip(grow, (self._V, self._U, self._y), strict=True):
                    new[:n] = old[:n]
                d_new[:n], G_new[:n, :n] = self._d[:n], self._G[:n, :n]
            (self._V, self._U, self._y), self._d, self._G = grow, d_new, G_new
        a, b = self.pending, self.pending + len(rows)
        self._V[a:b], self._y[a:b], self._d[a:b] = rows, y, d
        if self.centred and not self.empty:
            self._V[a:b] -= self.mu
        self.pending, self._read = b, None

    def apply_inverse(self, V: Tensor) -> Tensor:
        """P v for rows V (B, D), as rows."""
        if self.P is not None:
            return V @ self.P
        if self.factor is not None:
            return self.factor.solve((V * self.scale).mT).mT * self.scale
        return V

    def _change(self) -> tuple[theorem1.Change, Tensor, Tensor, Tensor, Tensor, Tensor]:
        """T factored and, by Theorem 1: U (L, D), w (D, K), beta (K,), the mean these are centred on, and the signs' sum."""
        L = self.pending
        assert self._V is not None
        V, d, y = self._V[:L], self._d[:L], self._y[:L]
        mu, beta, total = self.mu, self.beta, d.sum()
        if self.empty:
            if self.centred:
                mu, beta = d @ V / total, d @ y / total
                V = V - mu
            U, G, r = V, V @ V.mT, beta - y
        else:
            a = self._done
            if a < L:
                self._U[a:L] = self.apply_inverse(V[a:])
                self._G[a:L, :L] = V[a:] @ self._U[:L].mT
                self._G[:a, a:L] = self._G[a:L, :a].mT
                self._done = L
            U, G, r = self._U[:L], self._G[:L, :L], V @ self.w + (beta - y)
            if self.centred:
                G = G + 1.0 / self.n
        removes = d < 0
        adds = L if checks.is_fake(d) else L - int(removes.sum())  # a host read: the blocks' sizes are shapes
        if 0 < adds < L:
            order = torch.argsort(removes.to(torch.int8), stable=True)
            U, G, r, d = U[order], G[order][:, order], r[order], d[order]
        change = theorem1.factor_change(G, d, adds)
        host = checks.to_host(change.info, change.pivot)
        if host is not None and host[0][0] != 0:
            raise NotPositiveDefinite
        if host is not None and host[1][0] < self.least_pivot:
            raise TooInaccurate(host[1][0])
        z = theorem1.solve_change(change, r)
        if self.centred and not self.empty:
            beta = beta - z.sum(0) / self.n
        return change, U, self.w - U.mT @ z, beta, mu, total

    def weights(self) -> tuple[Tensor, Tensor, Tensor]:
        """w (D, K) and beta (K,), pending rows included, and the mean (D,) that rows are centred on for them."""
        if not self.pending:
            return self.w, self.beta, self.mu
        if self._read is None:
            self._read = self._change()[2:5]
        return self._read

    def inverse(self) -> Tensor:
        """P (D, D), pending rows included; the base moves forward to them."""
        if self.pending:
            self.advance()
        if self.P is None:
            if self.factor is not None:
                P, s = self.factor.inverse(), self.scale
                self.P = P.mul_(s * s) if isinstance(s, float) else P.mul_(s).mul_(s[:, None])
                self.columns = 0
            else:
                self.P = torch.eye(self.D, dtype=torch.float64, device=self.device)
        return self.P

    def advance(self) -> None:
        """Fold the pending rows into the base: P by Theorem 1, in place."""
        change, U, w, beta, mu, signs = self._change()
        L, V, d = self.pending, self._V, self._d
        assert V is not None
        n = 1.0
        if self.centred:
            n = self.n + (1.0 if checks.is_fake(signs) else float(signs))
            if not self.empty:
                step = d[:L] @ V[:L] / n  # how far the mean moves
                mu, beta = mu + step, beta + step @ w
        self.pending = 0
        P = theorem1.update_inverse_(self.inverse(), change, U)
        self.set_base(w, beta, mu, n, P=P)
        self.columns += L

    def shift_targets(self, rows: Tensor, dy: Tensor) -> None:
        """Targets of samples held change by dy (B, K): the right-hand side moves, P does not. rows: (B, D)."""
        V = rows - self.mu if self.centred else rows
        step = self.apply_inverse(V).mT @ dy if len(V) <= self.K else self.apply_inverse((V.mT @ dy).mT).mT
        self.w = self.w + step
        if self.centred:
            self.beta = self.beta + dy.sum(0) / self.n
        self._read = None
