"""The margin vectors in their slots: coefficients, the Jacobian A, its inverse R, and their columns of Q."""

from __future__ import annotations

import heapq
from typing import Any

import numpy as np
import torch
from torch import Tensor

from torchlssvm.errors import ConvergenceError
from torchlssvm.functional import svm_path
from torchlssvm.machines.svm_samples import as_tensor
from torchlssvm.machines.svm_slots import ENDLESS, Slots, room

DEPENDENT = 1e-12
"""gamma below this share of the terms it is the difference of: a sample in the span of the margin vectors."""
DRIFT = 1e-7
"""A residual of R above this is answered by a new inverse; refinement takes care of what lies below."""
MILD = 1e3
"""R, and beta carried along, is trusted over a change of S as long as no Q_ii is more than so many times its gamma."""
NEAR = 1e-11
"""A coefficient this near to a bound, as a share of u, may be there."""
STEADY = 1e-12
"""With a residual of R below this, R needs no help: refinement is left out between checks."""
_NONE = np.empty(0)


def _longer(values: Any) -> Any:  # (k,) -> (k + 1,)
    """With a zero at the end."""
    out = values.new_zeros(len(values) + 1) if isinstance(values, Tensor) else np.zeros(len(values) + 1)
    out[:-1] = values
    return out


class Margin(Slots):
    """The margin vectors: who is one, their sensitivities, and R."""

    # -- who is in -----------------------------------------------------------------------------------------------------

    def sensitivities(self, h: Any, refined: bool = True) -> Any:  # (top,) -> (top,)
        """beta = -R h (10), refined; R is made anew when it has drifted. A tensor, or an array where loops are compiled."""
        loops, k = self.loops, self.top
        if loops is None:
            return self._sensitivities(as_tensor(h), refined)
        out = np.empty(k)
        if not refined:
            loops.times(self.hR, k, h, -1.0, out)
            return out
        self.residual = loops.sensitivities(self.hR, self.hA, k, h, out, np.empty(k))
        if self.residual > DRIFT:
            self.refresh(drifted=True)
            loops.sensitivities(self.hR, self.hA, k, h, out, np.empty(k))
        return out

    def _sensitivities(self, h: Tensor, refined: bool) -> Tensor:  # (top,) -> (top,)
        if not refined:
            return torch.mv(self.Rk, h).neg_()
        out, residual = svm_path.sensitivities(self.Rk, self.Ak, h)
        self.residual = float(residual.abs().amax()) / max(float(h.abs().amax()), 1e-300)
        if self.residual > DRIFT:
            self.refresh(drifted=True)
            out, _ = svm_path.sensitivities(self.Rk, self.Ak, h)
        return out

    def span(self, i: int, hrow: Any, dependent: float = DEPENDENT) -> tuple[Any, float, bool]:  # (n,) -> (top,)
        """beta for a unit of alpha_i, gamma_i (12), and whether i lies in the span of the margin vectors."""
        y, q, beta = float(self.samples.hy[i]), float(hrow[i]), None
        if self.residual < STEADY and (loops := self.loops) is not None:
            h, beta = np.empty(self.top), np.empty(self.top)
            gamma = q + loops.span(self.hR, self.top, self.hat, self.hused, hrow, y, h, beta)
        else:
            h = self.gather(hrow, y)
            if self.residual < STEADY:
                beta = self.sensitivities(h, refined=False)
                gamma = q + float(h @ self.host(beta))
        self.border = h
        if beta is not None and gamma > svm_path.FAR * q:  # far from the span: no need to look more closely
            return beta, gamma, False
        beta = self.sensitivities(h)
        terms = h * self.host(beta)
        gamma = q + float(terms.sum())
        return beta, gamma, gamma <= dependent * (abs(q) + float(abs(terms).sum()))

    def enter(
        self, i: int, hrow: Any, alpha: float, beta: Any | None, gamma: float, drive: tuple[Any, float] | None = None
    ) -> Any:  # (n,), (top,) -> (top,)
        """Sample i becomes a margin vector: R grows by (13), or begins. beta, gamma: from :meth:`span`, called just before.

        drive: beta of the drive, and the rate of g_i under it. Returns what becomes of it, if R can be trusted that far.
        """
        y = float(self.samples.hy[i])
        slot = heapq.heappop(self.free) if self.free else self.top
        if slot == self.top:
            self.position.append(i)
            if slot == self.slots:
                self._allocate(room(3 * self.slots // 2))
            self._set_top()
            if beta is not None:
                beta, self.border = _longer(beta), _longer(self.border)
        self.position[slot], self.slot[i] = i, slot
        self.hat[slot], self.hused[slot], self.ha[slot] = i, 1.0, alpha
        self.hlower[slot], self.hupper[slot] = 0.0, self.samples.hu[i]
        carried = None
        if beta is None:
            svm_path.first_(self.Rk, float(hrow[i]), y, slot)
            self.border = self.hused * 0.0
            self.border[0] = y
        else:
            v = self.host(beta)
            v[slot] = 1.0
            if gamma * MILD < float(hrow[i]):
                self.residual = ENDLESS  # unknown: to be measured before R is trusted again
            elif drive is not None and self.residual < STEADY:
                carried = drive[0] if len(drive[0]) == self.top else _longer(drive[0])
            if (loops := self.loops) is not None:
                near, at = self.near.buffer()
                carry = (_NONE, 0.0) if carried is None or drive is None else (carried, drive[1])
                vectors = (hrow, self.border, v)
                loops.grow(self.hR, self.hA, self.hQS, near, self.top, slot, i, *vectors, gamma, at, *carry)
                return carried
            svm_path.grow_(self.Rk, as_tensor(beta), gamma)
            if carried is not None and drive is not None:
                carried = svm_path.after_growth(carried, v, drive[1], gamma)
        self.hAk[slot] = self.border
        self.hAk[:, slot] = self.border
        self.hAk[slot, slot] = hrow[i]
        self.hQS[slot, : self.samples.n] = hrow
        self.near.entered(slot, hrow)
        return carried

    def mild(self, slot: int) -> bool:
        """Whether a margin vector is far from the span of the others: 1 / R_kk is its gamma."""
        return 0 < float(self.hRk[slot, slot]) * float(self.hAk[slot, slot]) < MILD

    def leave(self, i: int, beta: Any = None) -> tuple[float, Any]:  # (top,) -> (), (top,)
        """Margin vector i leaves: R shrinks by (14), or ends. Returns its alpha, and what becomes of beta, if it is given."""
        if len(self.slot) > 1 and not float(self.hRk[self.slot[i], self.slot[i]]) > 0:
            self.refresh(drifted=True)  # 1 / R_kk is a squared distance: only rounding makes it anything else
            if not abs(float(self.hRk[self.slot[i], self.slot[i]])) > 0:  # (14) divides by it, whatever its sign
                raise ConvergenceError("the margin vectors have become dependent")
        if not self.mild(self.slot[i]):
            self.residual = ENDLESS
        slot = self.slot.pop(i)
        if i not in self.samples.rows:
            self.samples.rows.put(i, self.hQS[slot, : self.samples.n], self.samples.n)
        alpha = float(self.ha[slot])
        if not len(self.slot):
            self.R.zero_()
            self.A.zero_()
        elif (loops := self.loops) is not None:
            loops.shrink(self.hR, self.hA, self.top, slot, beta if beta is not None else _NONE)
        else:
            if beta is not None:
                beta = svm_path.after_shrinkage(beta, self.hRk[slot], slot)
                beta[slot] = 0.0
            svm_path.shrink_(self.Rk, slot)
            self.hAk[slot, :], self.hAk[:, slot] = 0.0, 0.0
        self.position[slot] = -1
        self.hat[slot], self.hused[slot], self.ha[slot], self.hrise[slot] = 0, 0.0, 0.0, 0.0
        self.hlower[slot], self.hupper[slot] = -ENDLESS, ENDLESS
        heapq.heappush(self.free, slot)
        if slot == self.top - 1:
            self.trim()
        return alpha, None if beta is None else beta[: self.top]

    # -- made anew -----------------------------------------------------------------------------------------------------

    def refresh(self, drifted: bool = False) -> None:
        """R from A anew."""
        self.drifted = self.drifted or drifted
        used = torch.cat([torch.zeros(1, dtype=torch.int64, device=self.device), self.members()])
        if len(used) > 1:
            try:
                self.R.copy_(svm_path.inverse(self.A, used))
            except RuntimeError as error:  # LinAlgError, which torch does not export to type checkers
                raise ConvergenceError("the margin vectors have become dependent") from error

    def build(
        self,
        positions: Tensor,  # (s,)
        alpha: Tensor,  # (s,)
        b: float,
        forced: bool = False,
    ) -> bool:
        """All at once: these margin vectors, R by one inversion. False, and no margin vectors, if they are dependent.

        forced: they are taken all the same, with an R that is not trusted.
        """
        s = len(positions)
        self._empty(room(s), b)
        self.QS[0, : self.samples.n] = self.samples.y
        if not s:
            return True
        block = self.samples.block(positions)  # (s, n)
        k = s + 1
        self.position += positions.tolist()
        self.slot = {i: t for t, i in enumerate(self.position) if t}
        self.at[1:k], self.used[1:k], self.a[1:k] = positions, 1.0, alpha
        self.lower[1:k], self.upper[1:k] = 0.0, self.samples.u[positions]
        self.QS[1:k, : self.samples.n] = block
        self._set_top()
        y = self.samples.y[positions]
        A = self.Ak
        A[0, 1:], A[1:, 0], A[1:, 1:] = y, y, block[:, positions]
        try:
            self.Rk.copy_(svm_path.inverse(A, torch.arange(k, device=self.device)))
        except RuntimeError:  # LinAlgError
            if not forced:
                self.clear()
            return forced
        # 1 / R_jj is the gamma of margin vector j with respect to the others (14): none may lie in their span.
        own = self.Rk.diagonal()[1:].reciprocal()
        good = s == 1 or bool((own > 10 * DEPENDENT * A.diagonal()[1:]).all())
        if good:
            h = A.sum(1)
            self.residual = float((A @ (self.Rk @ h) - h).abs().amax() / h.abs().amax())
            good = self.residual <= DRIFT
        if not good:
            self.residual = ENDLESS
            if not forced:
                self.clear()
        return good or forced
