r"""The path of the incremental SVM in torch, for M machines at once (Cauwenberghs and Poggio; Diehl and Cauwenberghs).

The machines share n samples and their kernel matrix K. Each machine has its own labels y, upper bounds C, coefficients alpha
and bias b. With Q_ij = y_i y_j K_ij, the conditions of the optimum divide the samples of a machine into the margin vectors S,
the error vectors E and the reserve R. The equations keep the numbers of Cauwenberghs and Poggio:

    g_i = sum_j Q_ij alpha_j + y_i b - 1     > 0 in R (alpha = 0), = 0 in S, < 0 in E (alpha = C)                          (2)
    h   = sum_j y_j alpha_j = 0                                                                                          (3)

Diehl and Cauwenberghs move several coefficients together. The coefficients of the samples that are learned or unlearned move at
rates d while a parameter p goes from 0 to 1. The bias b and the coefficients of S move so that (2) and (3) hold for all other
samples. With slot 0 for b,

    A = [[0, y_S^T], [y_S, Q_SS]],  R = A^-1                                                                              (7)
    beta = -R [sum y d; Q_S: d]                        rates of b and alpha_S                                            (10)
    gamma_i = Q_i: d + Q_iS beta_S + y_i beta_0        rate of g_i                                                       (12)
    i enters S:  R <- R + v v^T / gamma_i, v = [beta_i; 1]                                                               (13)
    k leaves S:  R <- R - R_:k R_k: / R_kk                                                                               (14)

An *event* moves a sample from one set to another. Between events all rates are constant, so each step of the algorithm moves
every machine to its next event, at the cost of one synchronisation of host and device. All machines have the same number of
slots for margin vectors, of which unused ones are zero and masked. All numbers are float64, on any device.

Example:
    >>> x = torch.tensor([[-2.0], [-1.0], [1.0], [2.0]], dtype=torch.float64)
    >>> y = torch.tensor([[-1.0, -1.0, 1.0, 1.0], [-1.0, 1.0, 1.0, 1.0]], dtype=torch.float64)
    >>> machines = learn(Machines(x @ x.T, y, torch.full((2, 4), 10.0, dtype=torch.float64)))
    >>> machines.alpha.tolist(), machines.b.tolist(), machines.optimal().tolist()
    ([[0.0, 0.5, 0.5, 0.0], [2.0, 2.0, 0.0, 0.0]], [0.0, 3.0], [True, True])
"""

from __future__ import annotations

import torch
from torch import Tensor

EPS = 2.0**-52
"""The distance of 1.0 to the next float64."""
RATE_ROUNDING_UNITS = 32.0
"""A rate counts as zero if it is smaller than this many rounding errors of its terms."""
DEPENDENT_SHARE = 1e-12
"""gamma_i counts as zero below this share of the squared size of its terms. Sample i then lies in the span of S."""
SIMULTANEOUS_STEP = 1e-14
"""Events count as simultaneous if the step between them is at most this long, in units of p."""
AT_BOUND_SHARE = 1e-13
"""If all coefficients of S are within this share of u from a bound, they count as being at the bound."""
MAX_ROUNDING_UNITS = 256.0
"""How far g_i may be on the wrong side, in units of rounding, EPS (sum_j |Q_ij| alpha_j + |b| + 1). One unit is the effect of
rounding every term once. The rounding error of a sum of a thousand terms, in any order, stays within a hundred units."""


class Machines:
    """M machines on n shared samples.

    Attributes:
        K: (n, n) kernel matrix.
        y: (M, n) labels -1 and +1; 0 where a machine does not have the sample.
        u: (M, n) upper bounds of alpha.
        alpha, g, b: (M, n), (M, n), (M,).
        side: (M, n) +1 in R, -1 in E, 0 in S and where a machine does not have the sample.
        at, used: (M, s) the sample in each slot, and whether the slot is in use.
        R: (M, s + 1, s + 1), slot 0 for b.
        failed: (M,) machines whose path could not be followed.
    """

    def __init__(self, K: Tensor, y: Tensor, u: Tensor):
        M = len(y)
        self.K, self.y, self.u = K, y, u * (y != 0)
        self.alpha, self.b, self.side = torch.zeros_like(y), y.new_zeros(M), (self.u > 0).to(y.dtype)
        self.g = -y.abs()
        self.at = torch.zeros(M, 8, dtype=torch.long, device=y.device)
        self.used = torch.zeros(M, 8, dtype=torch.bool, device=y.device)
        self.R = y.new_zeros(M, 9, 9)
        self.failed = torch.zeros(M, dtype=torch.bool, device=y.device)
        self.root = K.diagonal().clamp(min=0).sqrt()
        self.every = torch.arange(M, device=y.device)

    def Q(self, v: Tensor) -> Tensor:  # (M, n) -> (M, n)
        """Return Q v of each machine, Q_ij = y_i y_j K_ij."""
        return self.y * ((self.y * v) @ self.K)

    def row(self, i: Tensor) -> Tensor:  # (M,) -> (M, n)
        """Return row i of each machine's Q."""
        return self.y * self.K[i] * self.y[self.every, i][:, None]

    def in_slots(self, values: Tensor) -> Tensor:  # (M, n) -> (M, s)
        """Return the values of the margin vectors."""
        return values.gather(1, self.at) * self.used

    def from_slots(self, values: Tensor) -> Tensor:  # (M, s) -> (M, n)
        """Put values of the margin vectors in their places."""
        return torch.zeros_like(self.y).scatter_add(1, self.at, values * self.used)

    def compute_g(self) -> None:
        """Compute every g by (2)."""
        self.g = self.Q(self.alpha) + self.y * self.b[:, None] - self.y.abs()

    def optimal(self) -> Tensor:  # -> (M,)
        """Tell which machines are optimal: alpha is within its bounds and (2) and (3) hold, each up to its own rounding."""
        size = self.alpha @ self.K.abs() + self.b.abs()[:, None] + 1.0
        off = torch.where(self.side == 0, self.g.abs() * (self.u > 0), -self.side * self.g)
        box = ((self.alpha >= 0) & (self.alpha <= self.u)).all(1)
        balance = (self.y * self.alpha).sum(1).abs() <= MAX_ROUNDING_UNITS * EPS * self.alpha.sum(1)
        return box & balance & (off <= MAX_ROUNDING_UNITS * EPS * size).all(1) & ~self.failed

    def add_slots(self) -> None:
        """Double the number of slots."""
        s = self.at.shape[1]
        pad = torch.nn.functional.pad
        self.at, self.used, self.R = pad(self.at, (0, s)), pad(self.used, (0, s)), pad(self.R, (0, s, 0, s))

    # -- events, in the machines of a mask ``which`` (M,) ---------------------------------------------------------------------

    def sensitivities(self, i: Tensor) -> tuple[Tensor, Tensor, Tensor]:  # (M,) -> (M, s + 1), (M,), (M,)
        """Return beta_i (10), gamma_i (12) for a unit of alpha_i alone, and whether gamma_i is more than rounding."""
        own, h = self.K[i, i], torch.cat([self.y[self.every, i][:, None], self.in_slots(self.row(i))], 1)
        A = self.A()
        beta = -(self.R @ h[:, :, None])[:, :, 0]
        beta = beta - (self.R @ (h + (A @ beta[:, :, None])[:, :, 0])[:, :, None])[:, :, 0]
        gamma = own + (h * beta).sum(1)  # = |X_i + sum_j beta_j X_j|^2 (20)
        size = self.root[i] + (self.in_slots(self.root.expand_as(self.y)) * beta[:, 1:].abs()).sum(1)
        return beta, gamma, gamma > DEPENDENT_SHARE * size.square()

    def A(self) -> Tensor:  # -> (M, s + 1, s + 1)
        """Return [[0, y_S^T], [y_S, Q_SS]] (7), zero in free slots."""
        y = self.in_slots(self.y)
        Q = self.K[self.at[:, :, None], self.at[:, None, :]] * y[:, :, None] * y[:, None, :]
        A = torch.nn.functional.pad(Q, (1, 0, 1, 0))
        A[:, 0, 1:], A[:, 1:, 0] = y, y
        return A

    def enter(self, which: Tensor, i: Tensor, beta: Tensor, gamma: Tensor) -> None:
        """Let sample i enter S, with the coefficient it has (13)."""
        M, own, y = self.every, self.K[i, i], self.y[self.every, i]
        slot = self.used.to(torch.int8).argmin(1)
        first = ~self.used.any(1)
        v = beta.clone()
        v[M, slot + 1] = 1.0
        new = self.R + v[:, :, None] * v[:, None, :] / gamma[:, None, None]
        alone = torch.zeros_like(self.R)  # R of S = {i}: the inverse of [[0, y], [y, Q_ii]]
        alone[M, 0, 0], alone[M, 0, slot + 1], alone[M, slot + 1, 0] = -own, y, y
        new = torch.where(first[:, None, None], alone, new)
        self.R = torch.where(which[:, None, None], new, self.R)
        self.at[M, slot] = torch.where(which, i, self.at[M, slot])
        self.used[M, slot] |= which
        self.side[M, i] = torch.where(which, 0.0, self.side[M, i])

    def leave(self, which: Tensor, slot: Tensor, up: Tensor) -> None:
        """Take the margin vector in a slot, which is at its upper bound or at 0, out of S (14)."""
        M, k = self.every, self.at[self.every, slot]
        column = self.R[M, :, slot + 1]
        pivot = column[M, slot + 1]
        new = self.R - column[:, :, None] * column[:, None, :] / pivot[:, None, None]
        last = self.used.sum(1) == 1
        self.failed |= which & ~last & ~(pivot > 0)  # 1 / R_kk is a squared distance: only rounding makes it negative
        keep = torch.ones_like(self.R[:, 0])
        keep[M, slot + 1] = 0.0
        new = torch.where(last[:, None, None], 0.0, new) * keep[:, :, None] * keep[:, None, :]
        self.R = torch.where(which[:, None, None], new, self.R)
        self.alpha[M, k] = torch.where(which, torch.where(up, self.u[M, k], 0.0), self.alpha[M, k])
        self.side[M, k] = torch.where(which, torch.where(up, -1.0, 1.0), self.side[M, k])
        self.used[M, slot] &= ~which

    def invert(self) -> None:
        """Compute R from A (7), scaled to a unit diagonal. This discards the rounding errors that events have accumulated."""
        free = torch.cat([~self.used.any(1, keepdim=True), ~self.used], 1)
        D = torch.where(self.used, 1.0 / self.root.expand_as(self.y).gather(1, self.at).clamp(min=1e-150), 0.0)
        D = torch.cat([1.0 / D.amax(1, keepdim=True).clamp(min=1e-150), D], 1)
        scaled = self.A() * D[:, :, None] * D[:, None, :] + torch.diag_embed(free.to(self.y.dtype))
        R, info = torch.linalg.inv_ex(scaled)
        self.failed |= info != 0
        self.R = torch.where(free[:, :, None] | free[:, None, :], 0.0, R * D[:, :, None] * D[:, None, :])

    def correct(self) -> None:
        """Compute R, take Newton steps on S, compute every g. Without margin vectors, set b to the middle of its interval."""
        self.invert()
        for _ in range(3):  # each step corrects the rounding of the one before
            self.compute_g()
            r = torch.cat([(self.y * self.alpha).sum(1)[:, None], self.in_slots(self.g)], 1)
            delta = -(self.R @ r[:, :, None])[:, :, 0]
            self.b = self.b + delta[:, 0]
            self.alpha = torch.minimum((self.alpha + self.from_slots(delta[:, 1:])).clamp(min=0), self.u)
        a, u = self.in_slots(self.alpha), self.in_slots(self.u)
        empty = ~(torch.minimum(a, u - a) > AT_BOUND_SHARE * u).any(1, keepdim=True)  # no margin vector fixes b
        leaves, up = (self.from_slots(self.used * empty.to(a.dtype)) > 0), self.alpha > 0.5 * self.u
        self.alpha = torch.where(leaves, torch.where(up, self.u, 0.0), self.alpha)
        self.side = torch.where(leaves, torch.where(up, -1.0, 1.0), self.side)
        self.used = self.used & ~empty
        self.R = torch.where(empty[:, :, None], 0.0, self.R)
        self.compute_g()
        pull, where = self.y * self.side, -self.y * self.g  # b may rise to ``where`` if pull < 0, and fall to it if > 0
        low = torch.where(pull > 0, where, -torch.inf).amax(1)
        high = torch.where(pull < 0, where, torch.inf).amin(1)
        middle = torch.where(low.isinf(), high, torch.where(high.isinf(), low, 0.5 * (low + high)))
        self.b = torch.where(self.used.any(1) | middle.isinf(), self.b, self.b + middle)
        self.compute_g()
        self.failed |= ~self.g.isfinite().all(1)


def steps_to_bounds(m: Machines, beta: Tensor) -> Tensor:  # (M, s) -> (M, s)
    """Return the step after which each margin vector is at a bound; infinite if its rate is zero or only rounding."""
    a, u, speed = m.in_slots(m.alpha), m.in_slots(m.u), beta.abs()
    room = torch.where(beta > 0, u - a, a).clamp(min=0)
    moving = m.used & (speed > RATE_ROUNDING_UNITS * EPS * speed.amax(1, keepdim=True))
    return torch.where(moving, room / speed, torch.inf)


def follow(m: Machines, d: Tensor) -> int:  # (M, n)
    """Move coefficients at rates d as p goes from 0 to 1, and the others so that (2) and (3) hold. Return the step count."""
    M, n = d.shape
    d, p, stalled = d.clone(), d.new_zeros(M), torch.zeros(M, dtype=torch.long, device=d.device)
    force, size = m.Q(d), d.abs() @ m.root
    live = d.any(1) & ~m.failed
    for count in range(200 + 20 * n):
        if count % 16 == 15:  # R is computed from A again
            m.invert()
        more, full = torch.stack([live.any(), m.used.all(1).any()]).tolist()  # the one synchronisation
        if full:
            m.add_slots()
        if not more:
            return count
        # -- the rates (10), (12), corrected once; without margin vectors and balance, b alone moves
        balance = (m.y * d).sum(1)
        shift = ~m.used.any(1) & (balance.abs() > SIMULTANEOUS_STEP * d.abs().sum(1))
        drive = (live & ~shift).to(d.dtype)[:, None]
        gamma, beta = force * drive, torch.zeros_like(m.R[:, 0])
        for _ in range(2):
            r_0 = balance[:, None] * drive + m.in_slots(m.y).mul(beta[:, 1:]).sum(1, keepdim=True)
            r = torch.cat([r_0, m.in_slots(gamma)], 1)
            change = -(m.R @ r[:, :, None])[:, :, 0]
            beta = beta + change
            gamma = gamma + m.Q(m.from_slots(change[:, 1:])) + m.y * change[:, :1]
        beta[:, 0] += shift * balance.sign()
        gamma = (gamma + m.y * (shift * balance.sign())[:, None]) * live[:, None]
        beta = beta * live[:, None]
        # -- the next event
        t_out = steps_to_bounds(m, beta[:, 1:])
        total = m.in_slots(m.root.expand(M, n)).mul(beta[:, 1:].abs()).sum(1) + size
        noise = RATE_ROUNDING_UNITS * EPS * (m.root * total[:, None] + beta[:, :1].abs())
        falling = -gamma * m.side
        slack = (m.side * m.g).clamp(min=0)
        t_in = torch.where((falling > noise) & (m.u > 0), slack / falling, torch.inf)
        t_end = torch.where(shift, torch.inf, 1.0 - p)
        t_event = torch.cat([t_out, t_in], 1)
        t = torch.minimum(t_event.amin(1), t_end)
        slots = t_out.shape[1]
        tied = t_event <= t[:, None] + SIMULTANEOUS_STEP  # one of them by lot: any fixed choice may cycle
        number = torch.arange(slots + n, device=d.device, dtype=d.dtype)
        lot = (12.9898 * number + 78.233 * count).sin().mul(43758.5453).frac()
        event = torch.where(tied, lot.abs(), -1.0).argmax(1)
        enters, slot, i = event >= slots, event.clamp(max=slots - 1), (event - slots).clamp(min=0)
        lost = live & t.isinf()
        done = (d.abs() * (1.0 - p)[:, None] <= SIMULTANEOUS_STEP * m.u.amax(1, keepdim=True)).all(1)
        m.failed |= lost & ~done
        live = live & ~lost
        # -- the step
        t = torch.where(live, t, 0.0)
        p = p + t * ~shift
        m.alpha = m.alpha + t[:, None] * (d * drive + m.from_slots(beta[:, 1:]))
        m.b = m.b + t * beta[:, 0]
        m.g = m.g + t[:, None] * gamma
        stalled = torch.where(t <= SIMULTANEOUS_STEP, stalled + 1, 0)
        m.failed |= live & (stalled > 200)  # steps of length zero in a row: its events cycle
        live = live & (t < t_end) & ~m.failed
        # -- the event; a sample in the span of S moves along its null vector first, until it or a margin vector is at a bound
        entering, leaving = live & enters, live & ~enters
        beta_i, gamma_i, independent = m.sensitivities(i)
        dependent = entering & ~independent & m.used.any(1)
        sign = torch.where(m.side[m.every, i] > 0, 1.0, torch.where(d[m.every, i] != 0, 1.0, -1.0))
        t_null, null_slot = steps_to_bounds(m, beta_i[:, 1:] * sign[:, None]).min(1)
        alpha_i, u_i = m.alpha[m.every, i], m.u[m.every, i]
        room = torch.where(sign > 0, u_i - alpha_i, alpha_i)
        step = torch.where(dependent, torch.minimum(t_null, room), 0.0) * sign
        m.alpha = m.alpha + step[:, None] * m.from_slots(beta_i[:, 1:])
        m.alpha[m.every, i] += step
        m.b = m.b + step * beta_i[:, 0]
        flips = dependent & (room <= t_null)
        m.alpha[m.every, i] = torch.where(flips, torch.where(sign > 0, u_i, 0.0), m.alpha[m.every, i])
        m.side[m.every, i] = torch.where(flips, -sign, m.side[m.every, i])
        exchanged = dependent & ~flips
        slot = torch.where(leaving, slot, null_slot)
        rate = torch.where(leaving, beta[m.every, slot + 1], sign * beta_i[m.every, slot + 1])
        m.leave(leaving | exchanged, slot, rate > 0)
        beta_i, gamma_i, independent = m.sensitivities(i)
        m.failed |= entering & ~flips & ~independent & m.used.any(1)
        stops = entering & (d[m.every, i] != 0)
        m.enter(entering & ~flips, i, beta_i, gamma_i)
        force = force - (stops * d[m.every, i])[:, None] * m.row(i)
        d[m.every, i] = torch.where(stops, 0.0, d[m.every, i])
        m.g = torch.where((m.side == 0) & (m.from_slots(m.used.to(d.dtype)) > 0), 0.0, m.g)
        live = live & ~m.failed & d.any(1)
    m.failed |= live
    return count


def learn(m: Machines, rounds: int = 8) -> Machines:
    """Learn every sample whose g is on the wrong side, until no machine has such a sample; returns the machines."""
    y = m.y * (m.u > 0)
    alone = y.amax(1) * y.amin(1) >= 0  # one class: alpha = 0, and b puts every sample on its margin
    m.b = torch.where(alone, y.sum(1).sign(), m.b)
    m.compute_g()
    for _ in range(rounds):
        size = m.alpha @ m.K.abs() + m.b.abs()[:, None] + 1.0
        wrong = (m.side * m.g < -0.25 * MAX_ROUNDING_UNITS * EPS * size) & ~alone[:, None] & ~m.failed[:, None]
        if not bool(wrong.any()):
            return m
        m.side = torch.where(wrong, -m.side, m.side)
        follow(m, torch.where(wrong, torch.where(m.side < 0, m.u, 0.0) - m.alpha, 0.0))
        at_bound = wrong & (m.side != 0)
        m.alpha = torch.where(at_bound, torch.where(m.side < 0, m.u, 0.0), m.alpha)
        m.correct()
    return m


def unlearn(m: Machines, gone: Tensor) -> Machines:  # (M, n) bool
    """Remove samples from the machines that have them (u becomes 0). Return the machines, with g also for removed samples."""
    gone = gone & (m.u > 0)
    inside = m.from_slots(m.used.to(m.y.dtype)) > 0
    while bool((gone & inside).any()):  # out of S, with the coefficients they have
        slot = (m.used & gone.gather(1, m.at)).to(torch.int8).argmax(1)
        which = (gone & inside).any(1)
        i, alpha = m.at[m.every, slot], m.alpha.clone()
        m.leave(which, slot, which)
        m.alpha = alpha
        inside[m.every, i] &= ~which
    m.side = torch.where(gone, 0.0, m.side)
    bounds, m.u = m.u, m.u.clone()
    follow(m, torch.where(gone, -m.alpha, 0.0))
    m.alpha, m.u = torch.where(gone, 0.0, m.alpha), torch.where(gone, 0.0, bounds)
    m.correct()
    return learn(m)
