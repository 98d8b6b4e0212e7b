"""The state of the incremental SVM, and what keeps it exact: corrections, recomputation, snapshots."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from torchlssvm.errors import ConvergenceError
from torchlssvm.functional import checks, svm_path
from torchlssvm.kernels import Kernel
from torchlssvm.machines.svm_drive import Drive
from torchlssvm.machines.svm_margin import NEAR, Margin
from torchlssvm.machines.svm_samples import Samples, as_tensor
from torchlssvm.machines.svm_walk import Walker

ENDLESS = float("inf")
RESYNC_EVERY = 2000  # events between recomputations of every g
WRONG = 1e-8  # of a slack, in units of g: it is not on its side


class State:
    """Samples, margin vectors and the walk, and their upkeep."""

    def __init__(self, kernel: Kernel | None, device: torch.device, cache_bytes: int):
        self.samples = Samples(kernel, device, cache_bytes)
        self.margin = Margin(self.samples)
        self.walker = Walker(self.samples, self.margin)
        self.synced = 0  # the count of events when g was last recomputed
        self.checked = -1  # the count of events at the end of the last operation
        self.slowly = 0  # how often the guaranteed way was taken
        self.next_id = 0
        self.leaving: set[int] = set()  # positions that are about to be deleted
        self.last = "none"  # how the last change was made: "path", "joint", "pivot", "solve"

    @property
    def b(self) -> float:
        """The offset."""
        return 0.0 if checks.is_fake(self.margin.a) else float(self.margin.ha[0])

    def finish(self, thoroughly: bool = False) -> None:
        """The end of an operation: b in the middle where it is free, and the rounding of the walk corrected.

        Every g is computed anew from time to time, or if ``thoroughly``.
        """
        s, m = self.samples, self.margin
        if checks.is_fake(s.x):
            return
        if not (thoroughly or not len(m) or self.walker.events != self.checked):
            return  # nothing has moved
        self.checked = self.walker.events
        inside = (NEAR * m.hupper[k] < m.ha[k] < (1.0 - NEAR) * m.hupper[k] for k in m.slot.values())
        late = self.walker.events - self.synced > RESYNC_EVERY
        thoroughly = thoroughly or late or self.walker.perturbed or m.drifted
        self.walker.perturbed = m.drifted = False
        if not any(inside):
            self._centre_b()
        else:
            if thoroughly:
                self.resync()
            if thoroughly or not self.walker.corrected:
                self.correct()
        self.walker.corrected = False
        if thoroughly and self._is_wrong():
            self.one_by_one()
            self.finish()

    def _is_wrong(self) -> bool:
        """Whether a sample is on the wrong side, by more than rounding: R had drifted further than refinement could mend."""
        s = self.samples
        return s.n > 0 and float(s.hslack.min()) < -WRONG * max(1.0, float(s.halpha.max()) * s.scale)

    def _centre_b(self) -> None:
        """No coefficient is strictly inside its box: S is empty, and b the middle of the interval it is free in."""
        s, m = self.samples, self.margin
        for i, slot in m.slot.items():
            up = float(m.ha[slot]) > 0.5 * float(s.hu[i])
            s.halpha[i] = s.hu[i] if up else 0.0
            s.hsign[i], s.hslack[i] = (-1.0 if up else 1.0), 0.0
        if len(m):
            m.clear()
        if not s.n:
            m.ha[0] = 0.0
            return
        if int((s.alpha > 0).sum()) * s.n < 4_000_000:
            self.resync()
        low, high = (float(v) for v in svm_path.b_interval(s.g, s.y, s.sign))
        ends = [v for v in (low, high) if abs(v) < ENDLESS]
        shift = sum(ends) / len(ends) if ends else 0.0
        s.slack.add_(s.sign * s.y, alpha=shift)
        if not self._is_wrong():
            s.slack.clamp_(min=0.0)
        m.ha[0] += shift

    def correct(self) -> None:
        """One Newton step on the true residual of (2) and (3) at the margin vectors: a -= R r."""
        s, m = self.samples, self.margin
        if not len(m):
            return
        delta = self.walker.newton()
        if delta is None:
            self.one_by_one()  # more than drift: what the walk believed is not so
            return
        s.hslack += s.hsign * m.host(torch.mv(m.QSn, as_tensor(delta)))

    def resync(self) -> None:
        """Every g from its definition, not from its history."""
        s = self.samples
        g = s.product(s.alpha) + s.y * self.b - 1.0
        s.slack.copy_(torch.where(s.sign == 0, ENDLESS, g * s.sign))
        self.synced = self.walker.events

    def violation(self) -> float:
        """The largest violation of (2), (3), from the definition."""
        s = self.samples
        g = s.product(s.alpha) + s.y * self.b - 1.0
        return float(svm_path.kkt_violation(s.alpha, g, s.u, s.y))

    def snapshot(self, n: int | None = None) -> dict[str, Any]:
        """What it takes to go back, of the first n samples: the others have just been appended."""
        n = self.samples.n if n is None else n
        return {"n": n, "vectors": self.samples.snapshot(n), "slots": list(self.margin.slot), "b": self.b}

    def restore(self, old: dict[str, Any], appended: bool = False) -> None:
        """Go back to a snapshot; the samples appended since are dropped, unless ``appended``, and with them what was cached."""
        s, m = self.samples, self.margin
        if not appended:
            s.forget_rows()
            s.truncate(old["n"])
        s.put_back(old["vectors"])
        inside = torch.tensor(old["slots"], dtype=torch.int64, device=s.device)
        m.fit_capacity()
        m.build(inside, s.alpha[inside], old["b"], forced=True)

    def surely(self, change: Callable[[], None], before: dict[str, Any], u: Tensor | None = None) -> None:  # (n,)
        """A change, or where rounding makes it fail the guaranteed way, or everything as before and ConvergenceError.

        u: the bounds after the change.
        """
        slowly = self.slowly
        try:
            try:
                change()
                self.finish(self.slowly != slowly)
            except ConvergenceError:
                if u is not None:
                    self.samples.u.copy_(u)
                self.one_by_one()
                self.finish(True)
        except BaseException:  # an interruption, or a callback's error
            self.restore(before)
            raise

    def one_by_one(self) -> None:
        """The guaranteed way: from nothing, one sample after the other, without those that are leaving."""
        s, m = self.samples, self.margin
        n = s.n
        self.slowly += 1
        s.alpha.zero_()
        s.sign.zero_()
        s.slack.fill_(ENDLESS)
        m.ha[0] = 0.0
        m.clear()
        for i in range(n):
            if i in self.leaving:
                continue
            self.walker.settle()
            g = float(s.q(i) @ s.alpha) + float(s.hy[i]) * self.b - 1.0
            s.hsign[i], s.hslack[i] = (-1.0 if g < 0 else 1.0), abs(g)
            if g < 0:
                self.walker.walk(Drive.single(s, i, float(s.hu[i])))
        self.last = "path"
        self._assure([i for i in range(n) if i not in self.leaving])

    def _assure(self, kept: list[int]) -> None:
        """There is no other way left: what has come out is a solution, to rounding, or an error."""
        s = self.samples
        at = torch.tensor(kept, dtype=torch.int64, device=s.device)
        g = s.product(s.alpha) + s.y * self.b - 1.0
        wrong = float(svm_path.kkt_violation(s.alpha[at], g[at], s.u[at], s.y[at]))
        if not wrong <= max(1e-9, 100 * svm_path.EPS * s.scale * float(s.alpha.sum())):
            raise ConvergenceError(
                f"rounding keeps the conditions from being met: they are violated by {wrong:.1e}, with K(x, x) up to "
                f"{s.scale:.1e}; scale or centre the features"
            )

    def _dry_run(self, new: range) -> None:
        """Without data (fake tensors) no event can be found: one step of each kind runs, for its shapes and devices."""
        s, m = self.samples, self.margin
        Q = s.block(torch.arange(s.n, device=s.device))
        m.appended(range(s.n), Q)
        beta, _ = svm_path.sensitivities(m.Rk, m.Ak, m.gather(Q[0], 1.0))
        gamma = svm_path.margin_sensitivities(m.QSn, beta, Q[0])
        svm_path.coefficient_steps(m.ha, beta, m.hlower, m.hupper)
        svm_path.margin_rates(s.slack, gamma, s.sign)
        m.R.addr_(m.a, m.a)
        s.alpha.copy_(torch.linalg.solve(Q, s.y))
        svm_path.kkt_violation(s.alpha, gamma, s.u, s.y)
