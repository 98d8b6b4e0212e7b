"""Q^-1 of a kernel machine, Q = K + offset 1 1^T + I/C over the rows held, kept up to date as rows come and go.

U (capacity, capacity) is the inverse in slots; a slot without a sample counts as zero, whatever stands there. Terms of low rank
wait in V (:data:`cost.DEFERRED` rows) until there are enough for one matrix product: the inverse in use is U + V^T diag(s) V.
``h`` (capacity, m) is the product of that inverse with the targets t (m - 1 columns of y, one of ones), always up to date.

After a bulk change there is only the Cholesky factor, which is all that ``h`` needs; the inverse follows when a row is to be
added or removed by update, or when its diagonal is asked for.
"""

from __future__ import annotations

import warnings

import torch
from torch import Tensor
from torch.nn.functional import pad

from torchlssvm.errors import NumericalWarning
from torchlssvm.functional import block_inverse, checks, cost, system, triangular
from torchlssvm.kernels import Kernel
from torchlssvm.machines.rows import Rows

PROBES = 16
"""Rows whose residual is looked at whenever terms are folded in."""

DRIFT, ALARM = 2e-11, 1e-9
"""Relative errors of the solution, as bounded from a few residuals: beyond the first the inverse is computed anew, beyond the
second this is said too. An ill-conditioned matrix, which gives no such accuracy even when solved afresh, is allowed more."""


class Inverse:
    """The inverse, and the solution h, for the samples in ``rows``."""

    def __init__(self, kernel: Kernel, rows: Rows, C: float, offset: float = 0.0):
        self.kernel, self.rows, self.C, self.offset = kernel, rows, C, offset
        self.U: Tensor | None = None
        self.factor: system.Factor | None = None  # of the rows in slots 0..n-1
        self.V = rows.x.new_zeros(cost.DEFERRED, rows.capacity)
        self.s = rows.x.new_zeros(cost.DEFERRED)
        self.waiting = 0
        self.h = rows.x.new_zeros(rows.capacity, rows.y.shape[1] + 1)
        self.floor, self.warned = DRIFT, False

    # -- reading -------------------------------------------------------------------------------------------------------

    def targets(self) -> Tensor:
        """t (top, m): y and ones, zero where no sample is."""
        top = self.rows.top
        return torch.cat([self.rows.y[:top], self.rows.mask[:top, None]], 1)

    def inverse_rows(self, slots: Tensor) -> Tensor:
        """Rows (k, top) of the inverse."""
        U, V, s, top = self._inverse(), self.V[: self.waiting], self.s[: self.waiting], self.rows.top
        R = U[slots, :top]
        if self.waiting:
            R.addmm_((V[:, slots] * s[:, None]).mT, V[:, :top])
        return R.mul_(self.rows.mask[:top])

    def product(self, v: Tensor) -> Tensor:
        """(k, top): rows v (k, top), zero where no sample is, times the inverse."""
        U, V, s, top = self._inverse(), self.V[: self.waiting], self.s[: self.waiting], self.rows.top
        out = torch.mv(U[:top, :top], v[0])[None] if len(v) == 1 else v @ U[:top, :top]
        if self.waiting:
            out.addmm_((v @ V[:, :top].mT) * s, V[:, :top])
        return out.mul_(self.rows.mask[:top])

    def diagonal(self) -> Tensor:
        """The diagonal (top,) of the inverse. With Q = L L^T it is the sum of squares of the columns of L^-1."""
        if self.U is None and self.factor is not None:
            return triangular.inverse_lower(self.factor.L).square_().sum(0)[: self.rows.top]
        U, V, s, top = self._inverse(), self.V[: self.waiting], self.s[: self.waiting], self.rows.top
        return (U.diagonal()[:top] + (V[:, :top].square() * s[:, None]).sum(0)) * self.rows.mask[:top]

    def gram(self, x1: Tensor, x2: Tensor) -> Tensor:
        """K + offset for prepared rows."""
        K = self.kernel.tiled(x1, x2)
        return K + self.offset if self.offset else K

    def drift(self, slots: Tensor) -> Tensor:
        """C max |Q h - t| / max |h| over these slots: since |Q^-1| <= C, a bound of the relative error of h there."""
        top, h = self.rows.top, self.h[: self.rows.top]
        Qh = (
            self.kernel.tiled_product(self.rows.x[slots], self.rows.x[:top], h)
            + self.offset * h.sum(0)
            + h[slots] / self.C
        )
        return self.C * (Qh - self.targets()[slots]).abs().max() / h.abs().max()

    # -- changing ------------------------------------------------------------------------------------------------------

    def change(self, removed: list[int], x: Tensor, y: Tensor) -> list[int]:
        """Take out rows by id and take in rows x (k, J) with targets y (k, K); returns their ids. All of it, or an error."""
        k, r = len(x), len(removed)
        if not cost.block_update_pays(len(self.rows), k, r, self.U is not None):
            return self._change_and_solve(removed, x, y)
        if self.waiting + k + r > cost.DEFERRED:
            self.settle()
        out = self._add(x, y) if k else []  # first: it alone can be refused
        if r:
            slots = self.rows.index(self.rows.slot_of[i] for i in removed)
            term = block_inverse.removal(self.inverse_rows(slots), slots, self.h[: self.rows.top])
            if self._failed(term.info):
                self._change_and_solve(removed, x[:0], y[:0])
                return out
            self.rows.drop(removed)
            self._take(term)
        if k > cost.DEFERRED or r > cost.DEFERRED:
            self._watch()
        return out

    def _add(self, x: Tensor, y: Tensor) -> list[int]:
        rows, before = self.rows, self.rows.top
        Qc = self.gram(x, rows.x[:before]).mul_(rows.mask[:before])  # (k, top)
        Qcc = self.gram(x, x)
        Qcc.diagonal().add_(1.0 / self.C)
        B = self.product(Qc)
        places = rows.places(len(x))
        top = max(before, max(places) + 1)
        at, more = rows.index(places), (0, top - before)
        t = pad(self.targets(), (0, 0, *more))
        t[at] = torch.cat([y, y.new_ones(len(y), 1)], 1)
        term = block_inverse.addition(pad(B, more), pad(Qc, more), Qcc, at, t)
        if self._failed(term.info):
            return self._change_and_solve([], x, y)
        self._grow(top)
        if places[0] < before:  # what a removed sample left there
            U = self._inverse()
            U[at], U[:, at], self.V[:, at] = 0.0, 0.0, 0.0
        out = rows.put(x, y, places)
        self._take(term)
        return out

    def retarget(self, ids: list[int], y: Tensor) -> None:
        """Give rows other targets (k, K): the inverse stays as it is."""
        at = self.rows.index(self.rows.slot_of[i] for i in ids)
        change = y - self.rows.y[at]
        self.rows.y[at] = y
        if self.factor is not None:
            self._solution_from(self.factor)
        else:
            self.h[: self.rows.top, :-1] += self.inverse_rows(at).mT @ change

    def solve(self) -> None:
        """Factor the matrix of the rows held anew."""
        self._change_and_solve([], self.rows.x[:0], self.rows.y[:0])

    def settle(self) -> None:
        """Fold in the terms that wait, look at the residual, free the slots of what was removed, close gaps if many."""
        if self.U is None:
            return
        rows, top = self.rows, self.rows.top
        if self.waiting:
            V = self.V[: self.waiting, :top]
            self.U[:top, :top].addmm_((V * self.s[: self.waiting, None]).mT, V)
            self.waiting = 0
            self.h[:top] = (self.U[:top, :top] @ self.targets()).mul_(rows.mask[:top, None])
            if self._watch():
                return
        rows.release()
        if 4 * len(rows.free) > rows.top:
            self._compact()

    def tidy(self) -> None:
        """Before the state is written out: fold in what waits, and leave nothing of what was removed."""
        self.settle()
        if not self.rows.orderly:
            if self.U is None:
                self.solve()
            else:
                self._compact()
        self.V.zero_()

    def to(self, device: torch.device) -> None:
        """Move."""
        self.rows.to(device)
        self.U = None if self.U is None else self.U.to(device)
        self.V, self.s, self.h = self.V.to(device), self.s.to(device), self.h.to(device)
        if self.factor is not None:
            self.factor = system.Factor(self.factor.L.to(device), self.factor.J, self.factor.info.to(device))

    # -- inside --------------------------------------------------------------------------------------------------------

    def _inverse(self) -> Tensor:
        if self.U is None:
            n, factor = len(self.rows), self.factor
            if factor is None:  # just loaded, hence without gaps
                factor, _ = self.factor_of(self.rows.x[:n])
            self.U = self._room(self.rows.capacity)
            self.U[:n, :n] = factor.inverse()
            self.factor = None
        return self.U

    def _room(self, capacity: int) -> Tensor:
        # A leading dimension that is no power of two: products on aliased rows are slower.
        return self.rows.x.new_zeros(capacity, capacity + system.PAD)[:, :capacity]

    def _failed(self, info: Tensor) -> bool:
        host = checks.to_host(info)
        return host is not None and host[0][0] != 0

    def _take(self, term: block_inverse.Term) -> None:
        top, k, waiting = self.rows.top, len(term.Z), self.waiting
        self.h[:top].addmm_(term.Z.mT, term.v, alpha=term.sign).mul_(self.rows.mask[:top, None])
        if k > cost.DEFERRED:  # nothing waits: change() saw to that
            self._inverse()[:top, :top].addmm_(term.Z.mT, term.Z, alpha=term.sign)
            self.rows.release()
        else:
            self.V[waiting : waiting + k].zero_()
            self.V[waiting : waiting + k, :top] = term.Z
            self.s[waiting : waiting + k] = float(term.sign)
            self.waiting += k

    def _watch(self) -> bool:
        """Solve anew if a few equations are no longer fulfilled; whether that was needed. Warns once, if it was bad."""
        rows = self.rows
        every = list(rows.slot_of.values())
        host = checks.to_host(self.drift(rows.index(every[:: max(1, len(every) // PROBES)])))
        if host is None or host[0][0] <= self.floor:
            return False
        allowed = ALARM / DRIFT * self.floor
        if host[0][0] > allowed and not self.warned:
            warnings.warn(
                f"the inverse of the kernel matrix has drifted (error up to {host[0][0]:.1e}, expected {allowed:.1e}) "
                "and was computed anew. Expect this after many updates at a large C; it is said once.",
                NumericalWarning,
                stacklevel=2,
            )
            self.warned = True
        self.solve()
        return True

    def _change_and_solve(self, removed: list[int], x: Tensor, y: Tensor) -> list[int]:
        rows, gone = self.rows, set(removed)
        kept = rows.index(slot for i, slot in rows.slot_of.items() if i not in gone)
        X = torch.cat([rows.x[kept], x])
        if len(X):
            factor, scale = self.factor_of(X)
        rows.drop(removed)
        rows.compact()
        out = []
        if len(x):
            rows.grow(rows.top + len(x))
            out = rows.put(x, y, rows.places(len(x)))
        self.U, self.factor, self.waiting = None, None, 0
        self.V = rows.x.new_zeros(cost.DEFERRED, rows.capacity)
        self.h = rows.x.new_zeros(rows.capacity, self.h.shape[1])
        if len(X):
            self.factor = factor
            self._solution_from(factor)
            self.floor = max(DRIFT, 1e3 * torch.finfo(X.dtype).eps * self.C * scale)
        return out

    def factor_of(self, X: Tensor) -> tuple[system.Factor, float]:
        """The factor of Q for rows X (n, J), with the help of eigenvalues if rounding spoils it; and Q's largest entry."""
        n, work = len(X), self._system(X)
        largest = work.diagonal()[:n].amax()
        factor = system.factor_(work, n)
        host = checks.to_host(factor.info, largest)
        if host is None or host[0][0] == 0:
            return factor, 1.0 if host is None else host[1][0]
        work = self._system(X)
        factor, least = system.clamped_factor(work, n, torch.full_like(largest, 1.0 / self.C))
        if float(least) < -1e-12 * n * host[1][0]:
            raise ValueError(
                f"the kernel matrix is not positive semidefinite: K + I/C has the eigenvalue {float(least):.3g}. "
                "Use a valid kernel. Nothing was changed."
            )
        warnings.warn(
            f"K + I/C is singular to machine precision at C = {self.C:g}; its eigenvalues were raised to 1/C, where they "
            "belong. A smaller C is solved to more digits.",
            NumericalWarning,
            stacklevel=2,
        )
        return factor, host[1][0]

    def _system(self, X: Tensor) -> Tensor:
        n = len(X)
        work = system.workspace(n, X.device)
        work[:n, :n] = self.gram(X, X)
        work.diagonal()[:n].add_(1.0 / self.C)
        work[n:].zero_()
        work[:, n:].zero_()
        work.diagonal()[n:].fill_(1.0)
        return work

    def _solution_from(self, factor: system.Factor) -> None:
        self.h.zero_()
        self.h[: self.rows.top] = factor.solve(self.targets().mT).mT

    def _grow(self, slots: int) -> None:
        before, top = self.rows.capacity, self.rows.top
        self.rows.grow(slots)
        if self.rows.capacity > before:
            U = self._room(self.rows.capacity)
            U[:top, :top] = self._inverse()[:top, :top]
            self.U = U
            self.V = pad(self.V, (0, self.rows.capacity - before))
            self.h = pad(self.h, (0, 0, 0, self.rows.capacity - before))

    def _compact(self) -> None:
        U, keep = self._inverse(), self.rows.compact()
        n = len(keep)
        self.U = self._room(self.rows.capacity)
        self.U[:n, :n] = U[keep][:, keep]
        h, self.h = self.h[keep], self.h.new_zeros(self.rows.capacity, self.h.shape[1])
        self.h[:n] = h
        self.V = self.V.new_zeros(cost.DEFERRED, self.rows.capacity)
