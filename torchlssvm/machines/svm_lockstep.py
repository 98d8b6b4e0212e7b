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
SPARE = 96  # slots added at a time
BLOCK = 16  # events that room is made for at a time
STILL = 1e-200  # the slack of a sample that has just left the margin set


STATE = ("path", "c", "own", "p", "a", "inside", "sign", "slack", "rate", "force", "beta", "s")
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
        self.m = self.m0 = m = len(used)  # slots in use, and in use at the start
        self.at = self.column[margin.at[slots]]  # column of each shared slot, without b's
        self.place = torch.full_like(self.seen, -1)  # slot of each column, or -1
        self.place[self.at] = torch.arange(1, m, device=self.device)
        self.Q = self._new(len(self.seen), m + SPARE)  # (columns, slots): y, then columns of Q
        self.Q[:, :m] = margin.QSn[self.seen][:, used]
        self.R = margin.R[used][:, used].contiguous()
        self.lower, self.upper = margin.lower[used], margin.upper[used]  # (m,)
        self.start = margin.a[used]
        self.path = torch.arange(B, device=self.device)  # of each row below, the path it belongs to
        self.leaving, self.c = c, self.column[c]
        self.own = samples.g[c].clone()  # (B,) g of the sample leaving
        self.result = torch.full_like(self.own, torch.nan)  # g at alpha_c = 0; nan: left to the sequential walk
        self.p = torch.zeros_like(self.own)
        self.a = self.start.expand(B, -1).clone()
        self.inside = torch.ones_like(self.a)
        self.sign, self.slack = (v[self.seen].expand(B, -1).clone() for v in (samples.sign, samples.slack))
        rows = torch.arange(B, device=self.device)
        self.sign[rows, self.c], self.slack[rows, self.c] = 0.0, ENDLESS
        self.slack.clamp_(min=STILL)
        self.rate = -samples.alpha[c]  # (B,) d_c
        self.force = samples.block(c, self.seen) * self.rate[:, None]  # (B, columns)
        self.V: list[Tensor] = []  # (B, BLOCK, slots) each, of each path and not of each row: v of its events
        self.s = self._new(B, MOST)
        self.steps = 0
        self.ended: list[tuple[Tensor, Tensor, Tensor]] = []  # paths that have ended, their p and what they have moved
        self.events = 0
        self._begin()

    def _new(self, *shape: int) -> Tensor:
        return torch.zeros(*shape, dtype=torch.float64, device=self.device)

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
        while len(self.path) and self.steps < MOST:
            self._step()
        self._check_far()
        return self.result

    def _check_far(self) -> None:
        """Samples that were not looked at must be on their side where a path ended: those where they are not are undone."""
        if not len(self.far) or not self.ended:
            return
        s, B = self.samples, len(self.result)
        p, moved = self._new(B), self._new(B, self.m)
        for path, at, by in self.ended:
            p[path] = at
            moved[path, : by.shape[1]] = by
        slots = self.margin.members()
        later = self.seen[self.at[self.m0 - 1 :]]
        for part in self.far.split(4096):
            g = s.slack[part] + (p * -s.alpha[self.leaving])[:, None] * s.block(self.leaving, part)
            g += moved[:, :1] * s.y[part]
            g.addmm_(moved[:, 1 : self.m0], self.margin.QS[slots][:, part])
            g.addmm_(moved[:, self.m0 :], s.block(later, part))
            self.result[(g < -1e-13 * s.scale).any(1)] = torch.nan

    def _begin(self) -> None:
        """Margin vectors leave their slots, by (14), before they are driven."""
        slot = self.place[self.c]
        mine = slot > 0
        v = self.R[slot.clamp(min=0)]
        pivot = v.gather(1, slot.clamp(min=0)[:, None])[:, 0]
        scale = torch.where(mine, -1.0 / pivot, 0.0)
        self._append(v, scale)
        rows = mine.nonzero()[:, 0]
        self.inside[rows, slot[rows]] = 0.0
        balance = self.rate * self.samples.y[self.leaving]
        h = torch.cat([balance[:, None], self.force[:, self.at]], 1) * self.inside  # (B, m), of (6)
        self.beta = -(h @ self.R) - scale[:, None] * v * (v * h).sum(1, keepdim=True)
        self.beta *= self.inside
        alone = mine & ~(pivot > 0) if self.m > 2 else torch.ones_like(mine)
        self._keep(~alone)

    def _keep(self, keep: Tensor) -> None:
        index = keep.nonzero()[:, 0]
        if len(index) < len(keep):
            for name in STATE:
                setattr(self, name, getattr(self, name).index_select(0, index))

    # -- a step of every path ------------------------------------------------------------------------------------------

    def _step(self) -> None:
        beta, m = self.beta, self.m
        gamma = torch.addmm(self.force, beta, self.Q[:, :m].T)  # (B, columns), (12)
        size = beta.abs()
        inner = (torch.where(beta > 0, self.upper, self.lower) - self.a).div_(beta).abs_()
        t_in, slot = inner.masked_fill_(size <= EPS * size.amax(1, keepdim=True), ENDLESS).min(1)
        own_rate = gamma.gather(1, self.c[:, None])[:, 0]
        gamma *= self.sign  # the rate of the slack
        quotient, i = self._first(gamma, 16 * EPS * self.samples.scale * (size.sum(1) + self.rate.abs()))
        t_out = torch.where(quotient < 0, -1.0 / quotient, ENDLESS)
        first = torch.minimum(t_in, t_out)
        doubtful = first < 1e-12  # a tie: left to the sequential walk
        t = torch.minimum(first, 1.0 - self.p)
        own = self.own + t * own_rate
        over = ~doubtful & ((own < self.stop_below) | (t >= 1.0 - self.p))
        self.a.addcmul_(t[:, None], beta)
        self.slack.addcmul_(t[:, None], gamma).clamp_(min=STILL)
        self.own, self.p = own, self.p + t
        self._end(over)
        go = ~(doubtful | over)
        gamma_i = (gamma.gather(1, i[:, None]) * self.sign.gather(1, i[:, None]))[:, 0]
        index = go.nonzero()[:, 0]
        self._keep(go)
        if not len(index):
            return
        self.events += len(index)
        entering, slot, i, gamma_i = (v[index] for v in (t_out <= t_in, slot, i, gamma_i))
        self._change(entering, slot, i, gamma_i)

    def _first(self, rate: Tensor, floor: Tensor) -> tuple[Tensor, Tensor]:  # (B, columns), (B,) -> (B,), (B,)
        """For each path the sample whose slack comes to 0 first, and its rate / slack, negative if any does.

        Rates up to the floor are rounding: a sample in the span of S, such as a duplicate, has no events.
        """
        quotient, i = (rate / self.slack).min(1)
        if bool((rate.gather(1, i[:, None])[:, 0] >= -floor).logical_and_(quotient < 0).any()):
            quotient, i = torch.where(rate < -floor[:, None], rate / self.slack, ENDLESS).min(1)
        return quotient, i

    def _end(self, over: Tensor) -> None:
        """These paths have ended: their result, and how far every slot has moved."""
        rows = over.nonzero()[:, 0]
        if not len(rows):
            return
        path = self.path[rows]
        self.result[path] = self.own[rows]
        if len(self.far):
            self.ended.append((path, self.p[rows], self.a[rows] - self.start))

    def _change(self, entering: Tensor, slot: Tensor, i: Tensor, rate: Tensor) -> None:  # (B,) each
        """Every path has an event. A sample enters: v = [beta_i; 1], s = 1 / gamma_i (13). One leaves: v = R_b[:, k], (14)."""
        rows = torch.arange(len(i), device=self.device)
        place = self._places(i, entering)
        slot = torch.where(entering, place, slot)
        enters = entering.to(rate.dtype)
        # q: [y_i; Q_Si] of what enters, the unit vector of what leaves; then R_b q
        q = self.Q[i, : self.m] * (self.inside * enters[:, None])
        q[rows, slot] = 1.0 - enters
        direction = 1.0 - 2.0 * enters
        column = self._inverse(q) * direction[:, None]
        terms = q * column
        diagonal = self.Q[i, slot]
        pivot = enters * diagonal + terms.sum(1)  # gamma_i, or R_kk
        sound = pivot > 1e3 * DEPENDENT * (diagonal + terms.abs().sum(1))
        good = torch.where(entering, sound, (pivot > 0) & (self.inside.sum(1) > 2.5))  # b, k and one more at least
        own = column[rows, slot]
        column[rows, slot] = torch.where(entering, 1.0, own)
        self._append(column, -direction / pivot)
        # beta after (13) and after (14)
        share = torch.where(entering, rate, self.beta[rows, slot]) / pivot
        self.inside[rows, slot] = enters
        self.beta = (self.beta - column * share[:, None]) * self.inside
        # g was negative, with alpha = u, where it rises to 0; what leaves at u goes to E
        up = torch.where(entering, rate > 0, self.a[rows, slot] > 0.5 * self.upper[slot])
        self.a[rows, slot] = torch.where(up, self.upper[slot], 0.0)
        at = torch.where(entering, i, self.at[slot - 1])
        self.sign[rows, at] = (1.0 - enters) * (1.0 - 2.0 * up.to(rate.dtype))
        self.slack[rows, at] = torch.where(entering, ENDLESS, STILL + 0.0 * rate)
        self._keep(good)

    def _inverse(self, q: Tensor) -> Tensor:  # (B, m) -> (B, m)
        """R_b q_b for every row."""
        out = torch.zeros_like(q)
        out[:, : self.m0] = q[:, : self.m0] @ self.R
        for k, block in enumerate(self.V):
            first = k * BLOCK
            count = min(BLOCK, self.steps - first)
            V = block[:, :count, : self.m].index_select(0, self.path)
            parts = torch.bmm(V, q[:, :, None])[:, :, 0] * self.s[:, first : first + count]
            out += torch.bmm(parts[:, None], V)[:, 0]
        return out

    def _append(self, v: Tensor, s: Tensor) -> None:  # (B, m), (B,)
        """R_b += s v v^T for every row."""
        k, at = divmod(self.steps, BLOCK)
        if k == len(self.V):
            self.V.append(self._new(len(self.result), BLOCK, self.Q.shape[1]))
        self.V[k][self.path, at, : self.m] = v
        self.s[:, self.steps] = s
        self.steps += 1

    def _places(self, i: Tensor, entering: Tensor) -> Tensor:
        """Shared slots of these columns; new ones that enter get a slot, and everything grows."""
        new = torch.unique(i[entering & (self.place[i] < 0)])
        if len(new):
            m, k = self.m, len(new)
            if m + k > self.Q.shape[1]:
                self.Q = torch.cat([self.Q, self._new(len(self.Q), k + SPARE)], 1)
                self.V = [torch.cat([V, self._new(*V.shape[:2], k + SPARE)], 2) for V in self.V]
            self.Q[:, m : m + k] = self.samples.block(self.seen[new], self.seen).T
            self.m = m + k
            self.at = torch.cat([self.at, new])
            self.place[new] = torch.arange(m, m + k, device=self.device)
            u = self.samples.u[self.seen[new]]
            self.upper, self.lower = torch.cat([self.upper, u]), torch.cat([self.lower, torch.zeros_like(u)])
            bound = torch.where(self.samples.sign[self.seen[new]] < 0, u, 0.0)  # none of them was inside at the start
            self.start = torch.cat([self.start, bound])
            pad = self._new(len(self.path), k)
            self.inside, self.beta = torch.cat([self.inside, pad], 1), torch.cat([self.beta, pad], 1)
            self.a = torch.cat([self.a, bound.expand_as(pad)], 1)
        return self.place[i].clamp(min=0)
