"""Many removals in lockstep: they start from one inverse, and a step of all of them is a few matrix products.

Path b removes sample c_b. Its inverse is R_b = R + sum_e s_e v_e v_e^T, a pair (s, v) for each of its events: (13) and (14)
are both of that form. Slots are shared: slot 0 for b, then every sample that is a margin vector in any path.

The paths look at the support vectors and the nearest reserve vectors only. Where a path ends, the others are checked: if none
is on the wrong side, (2) and (3) hold for all samples, and that makes it the solution, whatever happened on the way.
"""

from __future__ import annotations

import torch
from torch import Tensor

from torchlssvm.functional.svm_path import EPS
from torchlssvm.machines.svm_margin import DEPENDENT, Margin
from torchlssvm.machines.svm_samples import Samples

ENDLESS = float("inf")
MOST = 64  # events of a path before it is left to the sequential walk
SHARE = 4  # the nearest quarter of the reserve vectors is looked at


STATE = ("path", "c", "g", "p", "a", "moved", "upper", "lower", "inside", "sign", "slack", "rate", "force", "balance")
STATE += ("V", "s", "beta")  # type: ignore[assignment]
"""What each path has a row of."""


class Lockstep:
    """The paths of samples c (B,) leaving, none of which changes the machine."""

    def __init__(self, samples: Samples, margin: Margin, c: Tensor, stop_below: float):
        self.samples, self.margin, self.stop_below = samples, margin, stop_below
        self.device = samples.device
        B, n = len(c), samples.n
        self._look(n)
        slots = margin.members()
        used = torch.cat([slots.new_zeros(1), slots])
        self.m = len(used)  # slots in use
        self.at = self.column[margin.at[slots]]  # column of each shared slot, without b's
        self.place = torch.full(
            (len(self.seen),), -1, dtype=torch.int64, device=self.device
        )  # slot of each column, or -1
        self.place[self.at] = torch.arange(1, self.m, device=self.device)
        self.Q = torch.zeros(len(self.seen), self.m + 96, dtype=torch.float64, device=self.device)
        self.Q[:, : self.m] = margin.QSn[self.seen][:, used]  # (columns, slots): y, then columns of Q
        self.R = margin.R[used][:, used].contiguous()
        self.path = torch.arange(B, device=self.device)  # of each row below, the path it belongs to
        self.leaving, self.c = c, self.column[c]
        self.g = samples.g[c].clone()  # (B,) g of the sample leaving
        self.p = torch.zeros_like(self.g)
        self.a = margin.a[used].expand(B, -1).clone()
        self.moved = torch.zeros_like(self.a)  # how far each slot has gone
        self.upper, self.lower = margin.upper[used].expand(B, -1).clone(), margin.lower[used].expand(B, -1).clone()
        self.inside = torch.ones_like(self.a)
        self.sign, self.slack = (v[self.seen].expand(B, -1).clone() for v in (samples.sign, samples.slack))
        rows = torch.arange(B, device=self.device)
        self.sign[rows, self.c], self.slack[rows, self.c] = 0.0, ENDLESS
        self.rate = -samples.alpha[c]  # (B,) d_c
        self.force = samples.block(c, self.seen) * self.rate[:, None]  # (B, columns)
        self.balance = self.rate * samples.y[c]
        self.V = self.a.new_zeros(B, 0, self.m)
        self.s = self.a.new_zeros(B, 0)
        self.result = torch.full_like(self.g, torch.nan)  # g at alpha_c = 0; nan: left to the sequential walk
        self.ended: list[tuple[Tensor, Tensor, Tensor]] = []  # paths that have ended, their p and what they have moved
        self.events = 0
        self._begin()

    def _look(self, n: int) -> None:
        """The columns: samples looked at (seen), those not (far), and the column of each position."""
        s = self.samples
        slack = torch.where(s.sign > 0, s.slack, -1.0)
        count = int((slack < 0).sum())
        order = slack.argsort()
        self.seen, self.far = order.split([k := min(n, count + max(64, (n - count) // SHARE)), n - k])
        self.column = torch.full((n,), -1, dtype=torch.int64, device=self.device)
        self.column[self.seen] = torch.arange(k, device=self.device)

    def run(self) -> Tensor:
        """g_c when c is gone (B,), below ``stop_below`` where the path ended early; nan where it has to be walked alone."""
        for _ in range(MOST):
            if not len(self.path):
                break
            self._step()
        self._check_far()
        return self.result

    def _check_far(self) -> None:
        """Samples that were not looked at must be on their side where a path ended: those where they are not are undone."""
        if not len(self.far) or not self.ended:
            return
        s, B = self.samples, len(self.result)
        p, moved = self.g.new_zeros(B), self.g.new_zeros(B, self.m)
        for path, at, by in self.ended:
            p[path] = at
            moved[path, : by.shape[1]] = by
        positions = self.seen[self.at]
        for part in self.far.split(4096):
            g = s.slack[part] + (p * -s.alpha[self.leaving])[:, None] * s.block(self.leaving, part)
            g += moved[:, :1] * s.y[part] + moved[:, 1:] @ s.block(positions, part)
            self.result[(g < -1e-13 * s.scale).any(1)] = torch.nan

    def _begin(self) -> None:
        """Margin vectors leave their slots, by (14), before they are driven."""
        own = self.place[self.c]
        mine = own > 0
        v = self.R[own.clamp(min=0)]
        pivot = v.gather(1, own.clamp(min=0)[:, None])[:, 0]
        scale = torch.where(mine, -1.0 / pivot, 0.0)
        self.V, self.s = v[:, None, :], scale[:, None]
        self._free(mine.nonzero()[:, 0], own[mine])
        alone = mine & ~(pivot > 0) if self.R.shape[0] > 2 else mine
        h = torch.cat([self.balance[:, None], self.force[:, self.at]], 1) * self.inside  # (B, m), of (6)
        self.beta = -(h @ self.R) - scale[:, None] * v * (v * h).sum(1, keepdim=True)
        self.beta *= self.inside
        if self.R.shape[0] <= 2:
            alone = torch.ones_like(mine)
        self._keep(~alone)

    def _free(self, rows: Tensor, slot: Tensor) -> None:
        self.inside[rows, slot] = 0.0
        self.a[rows, slot] = 0.0
        self.lower[rows, slot], self.upper[rows, slot] = -ENDLESS, ENDLESS

    def _keep(self, keep: Tensor) -> None:
        if bool(keep.all()):
            return
        index = keep.nonzero()[:, 0]
        for name in STATE:
            setattr(self, name, getattr(self, name).index_select(0, index))

    # -- a step of every path ------------------------------------------------------------------------------------------

    def _step(self) -> None:
        gamma = torch.addmm(self.force, self.beta, self.Q[:, : self.m].T)  # (B, columns), (12)
        still = EPS * self.beta.abs().amax(1, keepdim=True)
        bound = torch.where(self.beta > 0, self.upper, self.lower)
        inner = torch.where(self.beta.abs() > still, (bound - self.a).abs() / self.beta.abs(), ENDLESS)
        rate = gamma * self.sign
        quotient, i = (rate / self.slack.clamp(min=1e-200)).min(1)
        t_in, slot = inner.min(1)
        t_out = torch.where(quotient < 0, -1.0 / quotient, ENDLESS)
        t = torch.minimum(torch.minimum(t_in, t_out), 1.0 - self.p)
        rows = torch.arange(len(t), device=self.device)
        own = gamma[rows, self.c]
        floor = 16 * EPS * self.samples.scale * (self.beta.abs().sum(1) + self.rate.abs())
        doubtful = (torch.minimum(t_in, t_out) < 1e-12) | ((t_out <= t) & (rate[rows, i] >= -floor))
        g = self.g + t * own
        early = ~doubtful & (g < self.stop_below)
        done = ~doubtful & ~early & (t >= 1.0 - self.p)
        self.a.addcmul_(t[:, None], self.beta)
        self.moved.addcmul_(t[:, None], self.beta)
        self.slack.addcmul_(t[:, None], rate)
        self.g, self.p = g, self.p + t
        over = early | done
        self.result[self.path[over]] = g[over]
        self.ended.append((self.path[over], self.p[over], self.moved[over]))
        go = ~(doubtful | over)
        self.events += int(go.sum())
        entering = go & (t_out <= t_in)
        gamma_i = gamma[rows, i]
        self._keep(go)
        slot, i, entering, gamma_i, up = (
            slot[go],
            i[go],
            entering[go],
            gamma_i[go],
            (self.beta.gather(1, slot[go][:, None]) > 0)[:, 0],
        )
        if not len(self.path):
            return
        place = self._places(i[entering])
        v = torch.zeros_like(self.a)
        s = torch.zeros_like(self.g)
        good = torch.ones_like(entering)
        self._leave(~entering, slot, up, v, s, good)
        self._enter(entering, i, place, gamma_i, v, s, good)
        self.V, self.s = torch.cat([self.V, v[:, None]], 1), torch.cat([self.s, s[:, None]], 1)
        self._keep(good)

    def _inverse(self, rows: Tensor, q: Tensor) -> Tensor:  # (k,), (k, m) -> (k, m)
        """R_b q_b for these rows."""
        out = torch.zeros_like(q)
        m = self.R.shape[0]
        out[:, :m] = q[:, :m] @ self.R
        V, s = self.V[rows], self.s[rows]
        return out + torch.einsum("ke,kem->km", s * torch.einsum("kem,km->ke", V, q), V)

    def _leave(self, which: Tensor, slot: Tensor, up: Tensor, v: Tensor, s: Tensor, good: Tensor) -> None:
        """Margin vectors at a bound leave: v = R_b[:, k], s = -1 / v_k (14)."""
        rows = which.nonzero()[:, 0]
        if not len(rows):
            return
        k = slot[rows]
        unit = torch.zeros_like(v[rows])
        unit.scatter_(1, k[:, None], 1.0)
        column = self._inverse(rows, unit)
        pivot = column.gather(1, k[:, None])[:, 0]
        good[rows] = (pivot > 0) & (self.inside[rows].sum(1) > 2.5)  # b, k and one more at least
        v[rows], s[rows] = column, -1.0 / pivot
        share = self.beta[rows].gather(1, k[:, None]) / pivot[:, None]
        column_of = self.at[k - 1]
        self._free(rows, k)
        self.beta[rows] = (self.beta[rows] - column * share) * self.inside[rows]
        self.sign[rows, column_of] = torch.where(up[rows], -1.0, 1.0).to(self.sign.dtype)
        self.slack[rows, column_of] = 0.0

    def _enter(self, which: Tensor, i: Tensor, place: Tensor, rate: Tensor, v: Tensor, s: Tensor, good: Tensor) -> None:
        """Samples at the margin enter: v = [beta_i; 1], s = 1 / gamma_i (13), from the slots of each path."""
        rows = which.nonzero()[:, 0]
        if not len(rows):
            return
        j = i[rows]
        q = self.Q[j, : self.m] * self.inside[rows]
        column = -self._inverse(rows, q) * self.inside[rows]
        own = self.Q[j, place]
        gamma = own + (q * column).sum(1)
        good[rows] = gamma > 1e3 * DEPENDENT * (own + (q * column).abs().sum(1))
        column.scatter_(1, place[:, None], 1.0)
        v[rows], s[rows] = column, 1.0 / gamma
        self.beta[rows] = self.beta[rows] - column * (rate[rows] / gamma)[:, None]
        self.inside[rows, place] = 1.0
        u = self.samples.u[self.seen[j]]
        self.a[rows, place] = torch.where(self.sign[rows, j] < 0, u, 0.0)
        self.lower[rows, place], self.upper[rows, place] = 0.0, u
        self.sign[rows, j], self.slack[rows, j] = 0.0, ENDLESS

    def _places(self, i: Tensor) -> Tensor:
        """Shared slots of these positions; new ones get a slot, and everything grows."""
        new = torch.unique(i[self.place[i] < 0])
        if len(new):
            m, k = self.m, len(new)
            if m + k > self.Q.shape[1]:
                self.Q = torch.cat([self.Q, self.Q.new_zeros(len(self.Q), m + k)], 1)
            self.Q[:, m : m + k] = self.samples.block(self.seen[new], self.seen).T
            self.m = m + k
            self.at = torch.cat([self.at, new])
            self.place[new] = torch.arange(m, m + k, device=self.device)
            pad = self.a.new_zeros(len(self.path), k)
            for name in ("a", "moved", "inside", "beta"):
                setattr(self, name, torch.cat([getattr(self, name), pad], 1))
            self.upper = torch.cat([self.upper, pad + ENDLESS], 1)
            self.lower = torch.cat([self.lower, pad - ENDLESS], 1)
            self.V = torch.cat([self.V, self.V.new_zeros(*self.V.shape[:2], k)], 2)
        return self.place[i]
