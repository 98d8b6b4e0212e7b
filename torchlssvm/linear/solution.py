"""The solution of one least-squares system, a cache that is updated when samples change.

A sample is represented by the row v = [phi (, 1)] / sqrt(rho). In these coordinates, the matrix of the system is B = A / rho =
I + sum d v v^T, its inverse is P, and the weights are w sqrt(rho). A free intercept is one more coordinate. It is orthogonal
to the others if rows are centred on the mean mu of the current samples, and then f(x) = (v - mu) w + beta. See
:mod:`torchlssvm.functional.theorem1`.

To make updates cheap, P is kept as a *base* minus deferred terms Z^T S Z, where each changed sample adds one row to Z and one
sign to S. The base is a Cholesky factor from statistics, or P itself, or empty if B = I. Updating w by Theorem 1 then takes 2
J^2 operations per sample and does not change the base. The terms are added to the base only when P is read. On an empty base,
this is the dual form, w = V^T (V V^T + I)^-1 y.
"""

from __future__ import annotations

import torch
from torch import Tensor

from torchlssvm.functional import checks, cost, theorem1
from torchlssvm.functional.system import Factor
from torchlssvm.functional.whitened import Whitened, from_inverse, inverse_lower


class TooInaccurate(Exception):
    """The pending removals take away most of the system, or more than it holds, so Theorem 1 would lose digits."""


class Solution:
    """w (D, K), beta (K,), mu (D,), n and, implicitly, P of the samples taken in, and a list of pending rows."""

    def __init__(self, D: int, K: int, centred: bool, device: torch.device, least_pivot: float = 0.0):
        """The solution without any sample. Updates that would fall below ``least_pivot`` are refused as TooInaccurate."""
        self.D, self.K, self.centred, self.device, self.least_pivot = D, K, centred, device, least_pivot
        w, beta, mu = (torch.zeros(size, dtype=torch.float64, device=device) for size in ((D, K), (K,), (D,)))
        self.set_base(w, beta, mu, 0.0)

    def set_base(
        self, w: Tensor, beta: Tensor, mu: Tensor, n: float, factor: Factor | None = None, units: Tensor | float = 1.0,
        P: Tensor | None = None, share: float | None = None,
    ) -> None:  # fmt: skip
        """A solved state. ``factor`` is of a matrix A' with A'^-1 = units^-1 P units^-1; n is 0 for the empty state.

        ``share`` is that of the factor, as in :class:`~torchlssvm.linear.normal_equations.SolvedSystem`, if it is known.
        """
        self.w, self.beta, self.mu, self.n, self._share = w, beta, mu, n, share
        self._factor, self._units, self._P = factor, units, P
        self._Z: Tensor | None = None
        self._plus = self._minus = 0  # rows of Z from both ends: samples added, samples removed
        self.columns = 0  # changes since P was last computed from scratch
        self.drop_pending()

    def drop_pending(self) -> None:
        """Forget the pending rows, so that the next read must solve from statistics."""
        self._pending: list[tuple[Tensor, Tensor, Tensor, int, float]] = []
        self.pending = 0

    @property
    def empty(self) -> bool:
        """True while no sample has been taken in."""
        return self.n == 0

    @property
    def updatable(self) -> bool:
        """True when P is known in some form, so that changes can be taken in."""
        return self.empty or self._factor is not None or self._P is not None or self._Z is not None

    def update_pays(self, features: int, rows: int) -> bool:
        """Whether Theorem 1 is cheaper than a solve from statistics for this many more rows."""
        new = self.pending + rows
        dear = cost.solve_is_cheaper(features, self.deferred + new, self.columns + new, self.holds_inverse)
        return self.updatable and not dear

    @property
    def deferred(self) -> int:
        """The number of changed samples whose terms are not added to the base."""
        return self._plus + self._minus

    @property
    def holds_inverse(self) -> bool:
        """True when the base is P itself."""
        return self._P is not None

    @property
    def uses_factor(self) -> bool:
        """True when the base is a Cholesky factor."""
        return self._factor is not None

    @property
    def factored(self) -> tuple[Factor, Tensor | float] | None:
        """Factor of the whole system and its units, as in :meth:`set_base`; None once changes were taken in, or without one."""
        return None if self._factor is None or self.deferred or self.pending else (self._factor, self._units)

    def forget_inverse(self) -> None:
        """Keep only the weights, so that the next change needs a solve."""
        self.set_base(self.w, self.beta, self.mu, self.n)

    def append(self, rows: Tensor, y: Tensor, d: Tensor, sign: int, total: float | None = None) -> None:
        """Put rows (B, D) with targets (B, K) and weights d (B,), all of one sign, on the pending list. total: the sum of d."""
        if rows.shape[0] == 0:
            return
        if total is None:
            total = float(d.sum())
        self._pending.append((rows, y, d, sign, total))
        self.pending += rows.shape[0]

    def pending_cancels(self) -> bool:
        """True if the rows pending for addition and for removal are equal, with the same order, targets and weights."""
        sides = []
        for sign in (1, -1):
            parts = [torch.cat([V, y, d.abs()[:, None]], 1) for V, y, d, s, _ in self._pending if s == sign]
            sides.append(torch.cat(parts) if parts else None)
        come, go = sides
        return come is not None and go is not None and torch.equal(come, go)

    # -- P -------------------------------------------------------------------------------------------------------------

    def apply_inverse(self, V: Tensor) -> Tensor:
        """P v for rows V (B, D), as rows."""
        U = V
        if self._P is not None:
            U = V @ self._P
        elif self._factor is not None:
            U = self._factor.solve(V, self._units)
        for Z, sign in self._terms():
            U = torch.addmm(U, V @ Z.mT, Z, alpha=-sign)
        return U

    def _terms(self) -> list[tuple[Tensor, float]]:
        """The deferred terms: P = base - Za^T Za + Zr^T Zr."""
        if self._Z is None:
            return []
        terms = [(self._Z[: self._plus], 1.0), (self._Z[self._Z.shape[0] - self._minus :], -1.0)]
        return [(Z, sign) for Z, sign in terms if Z.shape[0]]

    def _defer(self, Za: Tensor, Zr: Tensor) -> None:
        """Keep the terms of a change, additions from the front of Z and removals from its end."""
        need = self._plus + self._minus + Za.shape[0] + Zr.shape[0]
        if self._Z is None or self._Z.shape[0] < need:
            grown = torch.empty(max(64, need + need // 4), self.D, dtype=torch.float64, device=self.device)
            for Z, sign in self._terms():
                (grown[: self._plus] if sign > 0 else grown[grown.shape[0] - self._minus :]).copy_(Z)
            self._Z = grown
        self._Z[self._plus : self._plus + Za.shape[0]] = Za
        self._plus += Za.shape[0]
        end = self._Z.shape[0] - self._minus
        self._Z[end - Zr.shape[0] : end] = Zr
        self._minus += Zr.shape[0]

    def inverse(self) -> Tensor:
        """P (D, D) of the samples taken in, with the deferred terms added; the working array, not a copy."""
        if self._P is None and self._factor is not None:
            P, s = self._factor.inverse(), self._units
            self._P = P.mul_(s * s) if isinstance(s, float) else P.mul_(s).mul_(s[:, None])
            self._factor = None
        elif self._P is None:
            self._P = torch.eye(self.D, dtype=torch.float64, device=self.device)
        for Z, sign in self._terms():
            self._P.addmm_(Z.mT, Z, alpha=-sign)
        self._Z, self._plus, self._minus = None, 0, 0
        return self._P

    def whitened(self) -> Whitened:
        """The system of the samples taken in, whitened by the factor of the last solve or, after changes, by one of P."""
        if self.factored is None:
            F, share = from_inverse(self.inverse()), 1.0
        else:
            factor, units = self.factored
            L, known = factor.L[: self.D, : self.D], self._share
            share = float((L.diagonal() / L.tril().norm(dim=1)).square().amin()) if known is None else known
            F = inverse_lower(L).mul_(units)
        return Whitened(F, self.mu, self.w, self.beta, self.n if self.centred else 0.0, share)

    def train(self, V: Tensor, y: Tensor, d: Tensor) -> None:
        """Take in the first samples by one solve. V: (n, D); y: (n, K); d: (n,) > 0."""
        n, mu, beta = 1.0, self.mu, self.beta
        if self.centred:
            n, mu, beta = float(d.sum()), d @ V / d.sum(), d @ y / d.sum()
        weighted = (V - mu) * d[:, None]
        B = weighted.mT @ (V - mu)
        B.diagonal().add_(1.0)
        L = torch.linalg.cholesky(B)
        w, P = torch.cholesky_solve(weighted.mT @ (y - beta), L), torch.cholesky_inverse(L)
        self.set_base(w, beta, mu, n, P=P)

    # -- Theorem 1 -----------------------------------------------------------------------------------------------------

    def take_in(self) -> None:
        """Apply all pending rows in one update. Raises TooInaccurate and changes nothing if that would lose digits."""
        if not self.pending:
            return
        parts = sorted(self._pending, key=lambda part: -part[3])  # additions first
        V, y, d = (
            parts[0][:3] if len(parts) == 1 else (torch.cat(column) for column in list(zip(*parts, strict=True))[:3])
        )
        adds = sum(part[0].shape[0] for part in parts if part[3] > 0)
        mu, beta, n = self.mu, self.beta, self.n
        total = n + sum(part[4] for part in parts) if self.centred else 1.0
        if self.centred:
            if self.empty:
                mu, beta = d @ V / total, d @ y / total
            V = V - mu
        U = self.apply_inverse(V)
        G = V @ U.mT
        if self.centred and not self.empty:
            G += 1.0 / n
        change = theorem1.factor_change(G, d, adds)
        (info,), (pivot,) = checks.to_host(change.info, change.pivot)
        if info != 0 or pivot < self.least_pivot:
            raise TooInaccurate
        Za, Zr = theorem1.halves(change, U)
        r = V @ self.w + (beta - y)
        ra, rr = theorem1.halves(change, r)
        w = self.w
        for Z, B, sign in ((Za, ra, 1.0), (Zr, rr, -1.0)):
            w = torch.addmm(w, Z.mT, B, alpha=-sign) if Z.shape[0] else w
        if self.centred and not self.empty:
            halves = theorem1.halves(change, torch.ones_like(d)[:, None])
            step = d @ V / total  # how far the mean moves
            beta = torch.addmv(beta, w.mT, step)
            for one, B, sign in zip(halves, (ra, rr), (1.0, -1.0), strict=True):
                beta = torch.addmv(beta, B.mT, one[:, 0], alpha=-sign / n) if B.shape[0] else beta
            mu = mu + step
        self._defer(Za, Zr)
        self.w, self.beta, self.mu, self.n = w, beta, mu, total
        self.columns += self.pending
        self.drop_pending()

    def shift_targets(self, rows: Tensor, dy: Tensor) -> None:
        """Change the targets of samples by dy (B, K). The right-hand side changes, P does not. rows: (B, D)."""
        V = rows - self.mu if self.centred else rows
        few = V.shape[0] <= self.K
        self.w = self.w + (self.apply_inverse(V).mT @ dy if few else self.apply_inverse((V.mT @ dy).mT).mT)
        if self.centred:
            self.beta = self.beta + dy.sum(0) / self.n


def relative_distance(values: Tensor, exact: Tensor) -> float:
    """Largest deviation of values from exact values of the same shape, relative to the largest exact value."""
    return float((values - exact).abs().max() / exact.abs().max().clamp(min=torch.finfo(exact.dtype).tiny))
