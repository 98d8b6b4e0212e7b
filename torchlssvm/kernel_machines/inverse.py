"""The inverse of Q = K + offset 1 1^T + I/C over the samples of a kernel machine, updated as samples are added and removed.

If C differs by class, each sample uses the 1/C of its class.

The inverse exists in two forms. A bulk change computes the Cholesky factor L of Q. Each row that is added or removed later
adds a term of rank one. These terms are collected in V (:data:`cost.DEFERRED_ROWS`), so the inverse in use is (L L^T)^-1 + V^T
diag(s) V. When V is full, the explicit inverse U (capacity, capacity), in slots, replaces L, and from then on, one matrix
product adds each full V to U.

``h`` (capacity, m) is the product of the inverse in use with the targets (m - 1 columns of y and one of ones). It is always up
to date, and it is zero up to rounding in slots without a sample.
"""

from __future__ import annotations

import copy
import math
import warnings

import torch
from torch import Tensor, constant_pad_nd

from torchlssvm.errors import NumericalWarning
from torchlssvm.functional import block_inverse, checks, cost, memory, system
from torchlssvm.functional.modes import all_or_nothing
from torchlssvm.functional.whitened import inverse_lower
from torchlssvm.kernel_machines.sample_slots import SampleSlots
from torchlssvm.kernels import Kernel

SOLVE_BYTES = 16
"""Bytes of a solve for each pair of samples: the kernel matrix and its factor."""

REPAIRED_ERROR, WARNED_ERROR = 2e-11, 1e-9
"""Limits of the relative error of the solution, as bounded from the probed residuals. Beyond the first, two digits below the
promised 1e-9, the matrix is factored again. Beyond the second, a warning is given too. An ill-conditioned matrix cannot reach
this accuracy even if it is factored again, so its limits are larger."""

ROUNDING_PER_CONDITION = 2e2 * torch.finfo(torch.float64).eps
"""Relative error per unit of the condition number C max Q_ii that a fresh factorization is allowed to have."""


class KernelInverse:
    """The inverse, and the solution h, for the samples in ``slots``."""

    def __init__(self, kernel: Kernel, slots: SampleSlots, C: float | Tensor, offset: float = 0.0):
        self.kernel, self.slots, self.offset = kernel, slots, offset
        self.set_C(C)
        self.warned = False
        self._no_terms, self.s = slots.x.new_zeros(0, 0), slots.x.new_zeros(cost.DEFERRED_ROWS)
        self._clear()
        self.h = slots.x.new_zeros(slots.capacity, slots.K + 1)

    def _clear(self) -> None:
        self.U: Tensor | None = None
        self.factor: system.Factor | None = None  # of the first slots
        self.V = self._no_terms  # made with the first term
        self.waiting = 0
        self._loss = 0.0  # the sum of 1 / share of the updates since the residuals were last computed
        self.Q: Tensor | None = None  # Q of few samples, in slots, until one is added by update
        self._shared = False  # U is also that of a copy, and not written to

    # -- reading -------------------------------------------------------------------------------------------------------

    def inverse_rows(self, at: slice | Tensor) -> Tensor:
        """Return rows (k, top) of the inverse in use, which must not be written to. Empty slots are zero up to rounding."""
        top = self.slots.top
        self._need_base()
        if self.U is not None:
            R = self.U[at, :top]
        else:
            assert self.factor is not None
            size = self.factor.J
            unit = self.h.new_zeros(at.stop - at.start if isinstance(at, slice) else at.shape[0], top)
            if isinstance(at, slice):
                unit[:, at].fill_diagonal_(1.0)
            else:
                unit.scatter_(1, at[:, None], 1.0)
            R = constant_pad_nd(self.factor.solve(unit[:, :size]), (0, top - size))
        if self.waiting:
            V = self.V[: self.waiting, :top]
            R = torch.addmm(R, (V[:, at] * self.s[: self.waiting, None]).mT, V)
        return R

    def product(self, v: Tensor) -> Tensor:
        """Multiply rows v (k, top), zero in empty slots, by the inverse in use: (k, top), zero there up to rounding."""
        top = self.slots.top
        self._need_base()
        if self.U is not None:
            U = self.U[:top, :top]
            out = torch.mv(U, v[0])[None] if v.shape[0] == 1 else v @ U
        else:
            assert self.factor is not None
            size = self.factor.J
            out = constant_pad_nd(self.factor.solve(v[:, :size]), (0, top - size))
        if self.waiting:
            V = self.V[: self.waiting, :top]
            out = torch.addmm(out, (v @ V.mT).mul_(self.s[: self.waiting]), V)
        return out

    def diagonal(self) -> Tensor:
        """The diagonal (top,) of the inverse in use."""
        top = self.slots.top
        self._need_base()
        if self.U is not None:
            d = self.U.diagonal()[:top]
        else:
            assert self.factor is not None
            size = self.factor.J
            d = constant_pad_nd(inverse_lower(self.factor.L[:size, :size]).square_().sum(0), (0, top - size))
        if self.waiting:
            d = d + self.s[: self.waiting] @ self.V[: self.waiting, :top].square()
        return d * self.slots.mask[:top]

    def gram(self, x1: Tensor, x2: Tensor) -> Tensor:
        """K + offset for prepared rows."""
        K = self.kernel.tiled(x1, x2)
        return K + self.offset if self.offset else K

    def ridge(self, *parts: Tensor) -> Tensor | float:
        """Return 1/C for samples with these targets, parts (k, K): one number, or (k,) if C differs by class."""
        if isinstance(self.C, float):
            return 1.0 / self.C
        return self.C.reciprocal()[torch.cat(parts).argmax(1)]

    def block(self, x: Tensor, y: Tensor) -> Tensor:
        """Q (k, k) of prepared rows x (k, J) with targets y (k, K)."""
        if x.shape[0] == 1:
            return self.matrix_diagonal(x, y)[:, None]
        Q = self.gram(x, x)
        Q.diagonal().add_(self.ridge(y))
        return Q

    def matrix_diagonal(self, x: Tensor, y: Tensor) -> Tensor:
        """Q_ii (k,) of prepared rows x (k, J) with targets y (k, K)."""
        if self.kernel.deep:  # its diag() takes what is not prepared
            K = torch.cat([self.kernel.gram(part, part).diagonal() for part in x.split(64)])
        else:
            K = self.kernel.diag(x)
        return K + (self.offset + self.ridge(y))

    def drift(self, slots: Tensor) -> Tensor:
        """Return C max |Q h - t| / max |h| over these slots. Since |Q^-1| <= C, this bounds the relative error of h there."""
        top, h = self.slots.top, self.h[: self.slots.top]
        x = self.slots.x
        own = (h[slots].mT * self.ridge(self.slots.y[slots])).mT
        Qh = self.kernel.tiled_product(x[slots], x[:top], h) + self.offset * h.sum(0) + own
        return self.largest_C * (Qh - self.slots.targets[slots]).abs().max() / h.abs().max()

    # -- changing ------------------------------------------------------------------------------------------------------

    def change(self, removed: list[int], x: Tensor, y: Tensor) -> list[int]:
        """Remove samples by id, add rows x (k, J) with targets y (k, K) and return their ids. An error changes nothing."""
        k, r = x.shape[0], len(removed)
        if not cost.block_update_pays(len(self.slots), k, r, self.U is not None, self.Q is not None):
            return self._change_and_solve(removed, x, y)
        out = self._add(x, y) if k else []  # first: it alone can be refused
        if r:
            self._remove(removed)
        # Each update multiplies rounding errors by about 1 / share, which the loss adds up.
        if k > cost.DEFERRED_ROWS or r > cost.DEFERRED_ROWS or self._loss > 1e4:
            self._check_drift()
        return out

    def _remove(self, ids: list[int]) -> None:
        if self.waiting + len(ids) > cost.DEFERRED_ROWS:
            self._add_waiting()
        at = self.slots.at_ids(ids)
        Q = self.block(self.slots.x[at], self.slots.y[at])
        term = block_inverse.removal(self.inverse_rows(at), at, self.h[: self.slots.top], Q)
        if self._inaccurate(term):
            self._change_and_solve(ids, *self.slots.nothing)
            return
        self.slots.drop(ids)
        self._add_to_solution(term)
        self.h[at] = 0.0
        self._add_to_inverse(term)

    def _add(self, x: Tensor, y: Tensor) -> list[int]:
        if self.waiting and self.waiting + x.shape[0] > cost.DEFERRED_ROWS:
            self._add_waiting()
        slots, before = self.slots, self.slots.top
        Qc = self.gram(x, slots.x[:before])  # (k, top)
        if slots.has_gaps:
            Qc = Qc * slots.mask[:before]
        top, tc = before + x.shape[0], constant_pad_nd(y, (0, 1), 1.0)
        term = block_inverse.addition(
            self.product(Qc), Qc, self.block(x, y), slice(before, top), slots.targets, tc, top
        )
        if self._inaccurate(term):
            return self._change_and_solve([], x, y)
        self._grow(top)
        self.Q = None
        out = slots.put(x, y)
        self._add_to_solution(term)
        self._add_to_inverse(term)
        return out

    def retarget(self, ids: list[int], y: Tensor) -> None:
        """Give samples new targets (k, K). The inverse does not change, unless C differs by class."""
        at = self.slots.at_ids(ids)
        change = y - self.slots.y[at]
        if not isinstance(self.C, float):
            columns = self.slots.columns.clone()
            columns[at, : self.slots.K] = y
            with all_or_nothing(self.slots):
                self.slots.columns = columns
                self.set_C(self.C)
                self.solve()
        elif self.U is None:
            self.slots.columns[at, : self.slots.K] = y
            self.h[: self.slots.top] = self.product(self.slots.targets.mT).mT
        else:
            self.h[: self.slots.top, :-1] += self.inverse_rows(at).mT @ change
            self.slots.columns[at, : self.slots.K] = y

    def set_C(self, C: float | Tensor) -> None:
        """Change the penalty, a number or one for each class (K,). Call :meth:`solve` to compute the new solution."""
        self.C, self.Q = C, None
        self.largest_C = C if isinstance(C, float) else float(C.max())

    def solve(self) -> None:
        """Factor the matrix of the machine's samples again."""
        self._change_and_solve([], *self.slots.nothing)

    def compute_inverse(self) -> None:
        """Add the deferred terms to the inverse. If there is only a factor, compute the inverse first."""
        self._add_waiting()
        if len(self.slots):
            self._need_inverse()

    def _add_waiting(self) -> None:
        """Add the deferred terms to the inverse, check the residual, and close gaps."""
        slots, top = self.slots, self.slots.top
        if self.waiting:
            U, V = self._need_inverse(), self.V[: self.waiting, :top]
            U[:top, :top].addmm_((V * self.s[: self.waiting, None]).mT, V)
            self.waiting = 0
            self.h[:top] = (U[:top, :top] @ slots.targets).mul_(slots.mask[:top, None])
            if self._check_drift():
                return
        if self.U is not None and slots.has_gaps:
            self._close_gaps()

    def to(self, device: torch.device) -> None:
        """Move to another device."""
        self.slots.to(device)
        self.U = None if self.U is None else self.U.to(device)
        self.V, self._no_terms, self.s, self.h = (t.to(device) for t in (self.V, self._no_terms, self.s, self.h))
        self.Q = None if self.Q is None else self.Q.to(device)
        self.C = self.C if isinstance(self.C, float) else self.C.to(device)
        if self.factor is not None:
            self.factor = self.factor._replace(L=self.factor.L.to(device))

    def copy(self, kernel: Kernel) -> KernelInverse:
        """Return an independent copy with its own kernel. Both share the inverse until one of them has to write to it."""
        other = copy.copy(self)
        other.kernel = kernel
        other.slots, other.V, other.s, other.h = self.slots.copy(), self.V.clone(), self.s.clone(), self.h.clone()
        self._shared = other._shared = True
        return other

    # -- inside --------------------------------------------------------------------------------------------------------

    def _need_base(self) -> None:
        """Factor the matrix if there is neither a factor nor an inverse. The state was then just loaded, and has no gaps."""
        if self.U is None and self.factor is None:
            n = len(self.slots)
            self.factor = self.factor_of(self.slots.x[:n], self.ridge(self.slots.y[:n]))

    def _need_inverse(self) -> Tensor:
        """Return U for writing. It is computed from the factor if necessary, and not shared with a copy."""
        self._need_base()
        if self.U is None:
            assert self.factor is not None
            size = self.factor.J
            self.U = self._room(self.slots.capacity)
            self.U[:size, :size] = self.factor.inverse()
            self.factor = None
        elif self._shared:
            U, top = self._room(self.slots.capacity), self.slots.top
            U[:top, :top] = self.U[:top, :top]
            self.U = U
        self._shared = False
        return self.U

    def _room(self, capacity: int) -> Tensor:
        # The leading dimension is not a power of two, because products on aliased rows are slower.
        return self.slots.x.new_zeros(capacity, capacity + system.PAD_ROWS)[:, :capacity]

    def _inaccurate(self, term: block_inverse.Term) -> bool:
        share = float(term.share)
        if share >= cost.LEAST_SHARE:
            self._loss += 1.0 / share
            return False
        return True

    def _terms(self) -> Tensor:
        """Return V, which is allocated at the first call."""
        if self.V.shape[0] == 0:
            self.V = self.slots.x.new_zeros(cost.DEFERRED_ROWS, self.slots.capacity)
        return self.V

    def _add_to_solution(self, term: block_inverse.Term) -> None:
        self.h[: self.slots.top].addmm_(term.Z.mT, term.v, alpha=term.sign)

    def _add_to_inverse(self, term: block_inverse.Term) -> None:
        top, k, waiting = self.slots.top, term.Z.shape[0], self.waiting
        if k > cost.DEFERRED_ROWS:  # nothing waits: the terms were added before
            self._need_inverse()[:top, :top].addmm_(term.Z.mT, term.Z, alpha=term.sign)
            self._close_gaps()
        else:
            rows = self._terms()[waiting : waiting + k]
            rows[:, :top] = term.Z
            self.s[waiting : waiting + k] = float(term.sign)
            self.waiting += k

    def _check_drift(self) -> bool:
        """Factor again if the probed equations do not hold. Returns whether that was done; warns once if they were far off."""
        self._loss, order = 0.0, self.slots.order()
        probed = order[:: max(1, order.shape[0] // 16)]  # 16 equations: a sixteenth of a fit's kernel at n = 256
        drift, largest = (
            float(v)
            for v in checks.read(
                self.drift(probed), self.matrix_diagonal(self.slots.x[order], self.slots.y[order]).amax()
            )
        )
        allowed = max(REPAIRED_ERROR, ROUNDING_PER_CONDITION * self.largest_C * largest)
        if drift <= allowed:
            return False
        allowed *= WARNED_ERROR / REPAIRED_ERROR
        if drift > allowed and not self.warned:
            warnings.warn(
                f"the inverse of the kernel matrix has drifted (error up to {drift:.1e}, expected {allowed:.1e}) and was "
                "computed again. Expect this after many updates at a large C; you are warned once.",
                NumericalWarning,
                stacklevel=2,
            )
            self.warned = True
        self.solve()
        return True

    def _change_and_solve(self, removed: list[int], x: Tensor, y: Tensor) -> list[int]:
        """Solve directly: factor the matrix of the remaining and the new samples."""
        slots, k = self.slots, x.shape[0]
        left = slots.without(removed) if removed else slots.slot_of
        n = len(left) + k
        remedy = "Set a budget, or use random features and LSSVMHead."
        memory.require_memory(SOLVE_BYTES * n**2, x.device, f"solving for {n} samples", remedy)
        kept = slots.index(left.values()) if removed else slots.order_index()
        X = torch.cat([slots.x[kept], x]) if k else slots.x[kept]
        ridge = self.ridge(slots.y[kept], y)
        Q = self._matrix_of(X, x, kept, ridge) if 0 < n <= cost.LARGEST_KEPT_MATRIX else None
        factor = self.factor_of(X, ridge, Q) if n else None
        out = slots.rebuild(left, kept, X, x, y)
        self._clear()
        if factor is None:
            self.h = slots.x.new_zeros(slots.capacity, slots.K + 1)
        else:
            self.factor, self.Q = factor, Q
            h = factor.solve(slots.targets.mT).mT if factor.padded else torch.cholesky_solve(slots.targets, factor.L)
            self.h = constant_pad_nd(h, (0, 0, 0, slots.capacity - n))
        return out

    def _matrix_of(self, X: Tensor, x: Tensor, kept: slice | Tensor, ridge: Tensor | float) -> Tensor:
        """Return Q of rows X: the rows in slots ``kept``, followed by x (k, J). Values already computed are reused."""
        if self.Q is None:
            old, n, x = None, 0, X
        else:
            old, n = block_inverse.principal_part(self.Q, kept), X.shape[0] - x.shape[0]
            if not x.shape[0]:
                return old
        new = self.gram(x, X)
        new[:, n:].diagonal().add_(ridge if isinstance(ridge, float) else ridge[n:])
        self._check_finite(float(new.sum()))
        return new if old is None else torch.cat([torch.cat([old, new[:, :n].mT], 1), new])

    def _check_finite(self, total: float) -> None:
        if not math.isfinite(total):
            raise ValueError("the kernel gives NaN or inf for these samples: scale them. Nothing was changed.")

    def factor_of(self, X: Tensor, ridge: Tensor | float, Q: Tensor | None = None) -> system.Factor:
        """Return the factor of Q for rows X (n, J), by eigenvalues if rounding spoils it. Q: (n, n), if already computed."""
        n = X.shape[0]
        if Q is not None:
            L, info = torch.linalg.cholesky_ex(Q)
            if int(info) == 0:
                return system.Factor(L, n, info)
        work = self._system(X, ridge)
        largest, total = work.diagonal()[:n].amax(), work[:n, :n].sum()
        factor = system.factor_(work, n)
        info, most, finite = (float(v) for v in checks.read(factor.info, largest, total))
        self._check_finite(finite)
        if info == 0:
            return factor
        work = self._system(X, ridge)
        factor, least = system.clamped_factor(work, n, torch.full_like(largest, 1.0 / self.largest_C))
        if float(least) < -1e-12 * n * most:
            raise ValueError(
                f"the kernel matrix is not positive semidefinite: K + I/C has the eigenvalue {float(least):.3g}. "
                "Use a valid kernel. Nothing was changed."
            )
        warnings.warn(
            f"K + I/C is singular to machine precision at C = {self.largest_C:g}: its eigenvalues were raised to 1/C. "
            "A smaller C is solved to more digits.",
            NumericalWarning,
            stacklevel=2,
        )
        return factor

    def _system(self, X: Tensor, ridge: Tensor | float) -> Tensor:
        n = X.shape[0]
        work = system.workspace(n, X.device)
        work[:n, :n] = self.gram(X, X)
        work.diagonal()[:n].add_(ridge)
        if work.shape[0] > n:
            work[n:].zero_()
            work[:, n:].zero_()
            work.diagonal()[n:].fill_(1.0)
        return work

    def _grow(self, slots: int) -> None:
        before, top = self.slots.capacity, self.slots.top
        self.slots.grow(slots)
        more = self.slots.capacity - before
        if more:
            if self.U is not None:
                U = self._room(self.slots.capacity)
                U[:top, :top] = self.U[:top, :top]
                self.U, self._shared = U, False
            self.V = constant_pad_nd(self.V, (0, more)) if self.waiting else self._no_terms
            self.h = constant_pad_nd(self.h, (0, 0, 0, more))

    def _close_gaps(self) -> None:
        """Move samples from the last slots to the slots of removed samples."""
        U, slots, top = self._need_inverse(), self.slots, self.slots.top
        old, new = slots.close_gaps()
        n, self.V = slots.top, self._no_terms
        for array in (U, U.mT, self.h):
            array[new, :top] = array[old, :top]
            array[n:top] = 0.0
        if self.Q is not None:
            kept = torch.arange(n, device=new.device).index_copy(0, new, old)
            self.Q = block_inverse.principal_part(self.Q, kept)
        if slots.capacity < len(U):
            self.U = self._room(slots.capacity)
            self.U[:n, :n] = U[:n, :n]
            self.h = self.h[: slots.capacity].clone()
