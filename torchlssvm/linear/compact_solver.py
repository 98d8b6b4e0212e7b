"""The paper's compact form: only w and P (and the means for a free intercept) are kept, each call is Theorem 1."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from torchlssvm.functional import checks, cost
from torchlssvm.functional.system import factor_
from torchlssvm.functional.whitened import Whitened
from torchlssvm.linear.solution import NotPositiveDefinite, Solution
from torchlssvm.linear.solvers import SolverOptions, real_targets, real_weights, scaled_rows, weighted_rows
from torchlssvm.statistics.batch import GridChoices, SampleBatch

DEFERRED_COLUMNS = 64
"""Changed samples whose terms wait to be added to P together: single samples then cost one pass over P, not three."""

WeightedRows = tuple[Tensor, Tensor, Tensor, int]
"""Rows (B, D), targets (B, K), signed weights (B,) and their sign."""

COUNT_ROUNDING = 1e-9
"""Rounding of sums of real weights, of usual size around 1: less than this is no sample."""


class CompactSolver:
    """w and P carried from call to call. Features are used as given, or snapped to an explicit grid."""

    stamp = 0  # weights are always computed the same way

    def __init__(self, J: int, K: int, options: SolverOptions, device: torch.device):
        """The state without any sample."""
        self.J, self.K, self.options, self.device = J, K, options, device
        self.reset()

    def reset(self) -> None:
        """Forget all samples, their counts and the grids."""
        self.solution = Solution(
            self.J + (self.options.intercept == "penalized"), self.K, self.options.intercept == "free", self.device
        )
        self.counts = torch.zeros(self.K, dtype=torch.float64, device=self.device)
        self.choices = GridChoices()
        self.n = 0.0

    @property
    def empty(self) -> bool:
        """True while no sample is held."""
        return self.choices.kind is None

    def _rows(self, batch: SampleBatch, sign: int) -> tuple[Tensor, Tensor, Tensor]:
        """Rows, targets and signed weights in the solution's coordinates."""
        grid = batch.choices.grid
        phi = batch.x.to(torch.float64) if grid is None else grid.snap(batch.x)
        y = real_targets(batch, self.K)
        return weighted_rows(batch, sign, scaled_rows(phi, 1.0, self.options), y, self.options)

    def _counts_after(self, changes: list[tuple[SampleBatch, int]]) -> Tensor:
        counts = self.counts
        for batch, sign in changes:
            one = torch.ones(len(batch), dtype=torch.float64, device=self.device) if batch.mult is None else batch.mult
            if batch.labels is not None:
                counts = counts.index_add(0, batch.labels, one, alpha=sign)
            else:
                counts = counts + sign * one.sum()
        return counts

    def release(self, rows: int) -> None:
        """Do nothing: there are no statistics to solve from."""

    def changed(self, changes: list[tuple[SampleBatch, int]], rows: list[Tensor] | None = None) -> None:
        """Apply Theorem 1 to checked batches, all or none; RemovalError if the result cannot be."""
        del rows  # the features are used as given
        changes = [(b, s) for b, s in changes if len(b)]
        if not changes:
            return
        removes = any(s < 0 for _, s in changes)
        if removes and self.empty and all(s < 0 for _, s in changes):
            raise checks.removal_error("the machine is empty")
        counts = self._counts_after(changes)
        if removes:
            host = checks.to_host(counts)
            if host is not None and min(host[0]) < -COUNT_ROUNDING:
                raise checks.removal_error(f"a count would fall to {min(host[0]):g}")
        parts = [(*self._rows(b, s), s) for b, s in sorted(changes, key=lambda c: -c[1])]
        n = self.n + sum(b.size * s for b, s in changes)
        if removes and abs(n) < COUNT_ROUNDING:
            self._check_last(parts)
            self.reset()
            return
        self._update(parts, removes)
        self.counts, self.choices, self.n = counts, changes[0][0].choices, n

    def _check_last(self, parts: list[WeightedRows]) -> None:
        """Refuse last samples that cannot be those held: each must have a leverage below one."""
        s = self.solution
        for rows, _, d, sign in parts:
            V = (rows - s.mu if s.centred else rows) * d.abs().sqrt()[:, None]
            host = checks.to_host((s.apply_inverse(V) * V).sum(1).amax()) if sign < 0 and rows.shape[0] else None
            if host is not None and host[0][0] > 1 + 1e-6 and len(parts) == 1:
                raise checks.removal_error("the last samples held are others")

    def _update(self, parts: list[WeightedRows], removes: bool) -> None:
        """One joint step if the rows are few, else batches of the best size, additions first."""
        size, s = cost.batch_size(self.J), self.solution
        count = sum(part[0].shape[0] for part in parts)
        if s.empty and not removes and count > size:
            return self._train(*parts[0][:3])
        backup = (s.w, s.beta, s.mu, s.n, s.inverse().clone()) if removes and count > size else None
        try:
            for rows, y, d, sign in parts:
                for a in range(0, rows.shape[0], size):
                    s.append(rows[a : a + size], y[a : a + size], d[a : a + size], sign)
                    if count > size:
                        self._take_in()
            self._take_in()
        except NotPositiveDefinite:
            s.drop_pending()
            if backup is not None:
                s.set_base(*backup[:4], P=backup[4])
            raise checks.removal_error("without these samples the system would not be positive definite") from None
        return None

    def _take_in(self) -> None:
        self.solution.take_in()
        if self.solution.deferred > DEFERRED_COLUMNS:
            self.solution.inverse()

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
        s.set_base(factor.solve(y.mT @ weighted).mT, beta, mu, n, P=factor.inverse())

    def state(self) -> dict[str, Tensor]:
        """The weights in the solution's own coordinates."""
        return {"w": self.solution.w, "beta": self.solution.beta, "mu": self.solution.mu}

    def copy_from(self, other: CompactSolver, solution: dict[str, Tensor], P: Tensor) -> None:
        """Copy the state of another solver, whose tensors were copied to this device."""
        self.counts, self.choices, self.n = other.counts.to(self.device), other.choices, other.n
        self.solution.set_base(solution["w"], solution["beta"], solution["mu"], other.solution.n, P=P)

    def relabelled(self, old: SampleBatch, new: SampleBatch, rows: Tensor | None = None) -> None:
        """Take in other targets of the same samples: P stays."""
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
        """Change rho exactly: with P = Q diag(p) Q^T, A has the eigenvalues rho / p, and A + (rho' - rho) I follows."""
        s, old = self.solution, self.options.rho
        if self.options.intercept == "penalized" or not self.empty:
            p, Q = torch.linalg.eigh(s.inverse())
            a = old / p.clamp(min=torch.finfo(p.dtype).tiny)
            a_new = a - old + rho
            w = Q @ ((a / a_new)[:, None] * (Q.mT @ s.w)) * math.sqrt(rho / old)
            s.set_base(w, s.beta, s.mu * math.sqrt(old / rho), s.n, P=(Q * (rho / a_new)) @ Q.mT)
        self.options.rho = rho

    def weights(self, doubtful: bool = False) -> tuple[Tensor, Tensor]:
        """w (J, K) and b (K,)."""
        del doubtful  # each change was tested when it was made
        return real_weights(self.solution, self.options, self.J)

    def whitened(self) -> Whitened:
        """The system, whitened by a factor of P."""
        return self.solution.whitened()

    def drop_raw_samples(self) -> None:
        """Add all changes to P, so that no raw sample is kept."""
        self.solution.inverse()

    def inverse(self) -> Tensor:
        """P (D, D), with all changes added."""
        return self.solution.inverse()
