"""The paper's compact form: only w and P (and the means for a free intercept) are kept, each call is Theorem 1."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from torchlssvm.functional import checks, cost
from torchlssvm.functional.system import factor_
from torchlssvm.heads.engines import Options, code_labels, real_weights, scaled_rows, signed_weights
from torchlssvm.heads.solution import NotPositiveDefinite, Solution
from torchlssvm.statistics.batch import Batch, Choices

DEFER = 64
"""Terms of P that wait to be folded in together: single samples then cost one pass over P, not three."""


class Compact:
    """w and P carried from call to call. Features are used as given, or snapped to an explicit grid."""

    stamp = 0  # weights are always computed the same way

    def __init__(self, J: int, K: int, options: Options, device: torch.device):
        """The state without any sample."""
        self.J, self.K, self.options, self.device = J, K, options, device
        self.reset()

    def reset(self) -> None:
        """Forget everything."""
        self.solution = Solution(self.J + (self.options.intercept == "penalized"), self.K, self.options.intercept == "free", self.device)
        self.counts = torch.zeros(self.K, dtype=torch.float64, device=self.device)
        self.choices = Choices()
        self.n = 0.0

    @property
    def empty(self) -> bool:
        """Whether no sample is held."""
        return self.choices.kind is None

    def _rows(self, batch: Batch, sign: int) -> tuple[Tensor, Tensor, Tensor]:
        """Rows, targets and signed weights in the solution's coordinates."""
        grid, target = batch.choices.grid, batch.choices.target_grid
        phi = batch.x.to(torch.float64) if grid is None else grid.snap(batch.x)
        if batch.labels is not None:
            y = code_labels(batch.labels, self.K)
        else:
            assert batch.targets is not None
            y = batch.targets * (target.resolution if target else 1.0)
        weight = self.options.class_weight if isinstance(self.options.class_weight, Tensor) else None
        rows, d = scaled_rows(phi, 1.0, self.options), signed_weights(batch, sign, weight)
        if batch.mult is not None:
            keep = d != 0
            rows, y, d = rows[keep], y[keep], d[keep]
        return rows, y, d

    def _counts_after(self, changes: list[tuple[Batch, int]]) -> Tensor:
        counts = self.counts
        for batch, sign in changes:
            one = torch.ones(len(batch), dtype=torch.float64, device=self.device) if batch.mult is None else batch.mult
            if batch.labels is not None:
                counts = counts.index_add(0, batch.labels, one, alpha=sign)
            else:
                counts = counts + sign * one.sum()
        return counts

    def apply(self, changes: list[tuple[Batch, int]]) -> None:
        """Theorem 1 on checked batches, all or none; RemovalError if the result cannot be."""
        changes = [(b, s) for b, s in changes if len(b)]
        if not changes:
            return
        removes = any(s < 0 for _, s in changes)
        if removes and self.empty and all(s < 0 for _, s in changes):
            raise checks.removal_error("the machine is empty")
        counts = self._counts_after(changes)
        if removes:
            host = checks.to_host(counts)
            if host is not None and min(host[0]) < -1e-9:
                raise checks.removal_error(f"a count would fall to {min(host[0]):g}")
        parts = [self._rows(b, s) for b, s in sorted(changes, key=lambda c: -c[1])]
        rows, y, d = (torch.cat(column) for column in zip(*parts, strict=True))
        n = self.n + sum(b.size * s for b, s in changes)
        if removes and abs(n) < 1e-9:
            self._check_all_removed(rows, y, d)
            self.reset()
            return
        self._update(rows, y, d, removes)
        self.counts, self.choices, self.n = counts, changes[0][0].choices, n

    def _check_all_removed(self, rows: Tensor, y: Tensor, d: Tensor) -> None:
        """Removing the last samples: P must come back to I."""
        s = self.solution
        V = rows - s.mu if s.centred else rows
        inner = V * d.abs().sqrt()[:, None]
        host = checks.to_host((inner @ s.inverse() @ inner.mT).diagonal().amax() if len(V) else torch.zeros(1))
        del y
        if host is not None and host[0][0] > 1 + 1e-6:
            raise checks.removal_error("the last samples held are others")

    def _update(self, rows: Tensor, y: Tensor, d: Tensor, removes: bool) -> None:
        size, s = cost.batch_size(self.J), self.solution
        if s.empty and not removes and len(rows) > size:
            return self._train(rows, y, d)
        backup = None
        if removes and len(rows) > size:
            backup = (s.w, s.beta, s.mu, s.n, s.inverse().clone())
        try:
            for a in range(0, len(rows), size):
                s.append(rows[a : a + size], y[a : a + size], d[a : a + size])
                s.take_in()
                if s.deferred > DEFER:
                    s.inverse()
        except NotPositiveDefinite:
            s.drop_pending()
            if backup is not None:
                s.set_base(*backup[:4], P=backup[4])
            raise checks.removal_error("without these samples the system would not be positive definite") from None
        return None

    def _train(self, rows: Tensor, y: Tensor, d: Tensor) -> None:
        """The initial training: solve once instead of updating from nothing."""
        s = self.solution
        n, mu, beta = 1.0, s.mu, s.beta
        if s.centred:
            total = d.sum()
            n = 1.0 if checks.is_fake(total) else float(total)
            mu, beta = d @ rows / total, d @ y / total
            rows, y = rows - mu, y - beta
        weighted = rows * d[:, None]
        B = weighted.mT @ rows
        B.diagonal().add_(1.0)
        factor = factor_(B, s.D)
        s.set_base(factor.solve(weighted.mT @ y), beta, mu, n, P=factor.inverse())

    def relabel(self, old: Batch, new: Batch) -> None:
        """Targets change, P does not."""
        if self.empty:
            raise checks.removal_error("the machine is empty")
        host = checks.to_host(self._counts_after([(old, -1)]))
        if host is not None and min(host[0]) < 0:
            raise checks.removal_error(f"a count would fall to {min(host[0]):g}")
        rows, before, d = self._rows(old, 1)
        _, after, _ = self._rows(new, 1)
        self.solution.shift_targets(rows, (after - before) * d[:, None])
        self.counts = self._counts_after([(old, -1), (new, 1)])

    def set_rho(self, rho: float) -> None:
        """Change rho exactly: with P = Q diag(p) Q^T the matrix A has the eigenvalues rho / p, and A + (rho' - rho) I follows."""
        s, old = self.solution, self.options.rho
        if self.options.intercept == "penalized" or not self.empty:
            p, Q = torch.linalg.eigh(s.inverse())
            a = old / p.clamp(min=torch.finfo(p.dtype).tiny)
            a_new = a - old + rho
            w = Q @ ((a / a_new)[:, None] * (Q.mT @ s.w)) * math.sqrt(rho / old)
            s.set_base(w, s.beta, s.mu * math.sqrt(old / rho), s.n, P=(Q * (rho / a_new)) @ Q.mT)
        self.options.rho = rho

    def weights(self, unverified: bool = False) -> tuple[Tensor, Tensor]:
        """w (J, K) and b (K,)."""
        del unverified  # nothing ever is
        return real_weights(self.solution, self.options, self.J)

    def settle(self) -> None:
        """Fold everything into P."""
        self.solution.inverse()

    def inverse(self, unverified: bool = False) -> Tensor:
        """P (D, D)."""
        del unverified
        return self.solution.inverse()
