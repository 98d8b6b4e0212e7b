"""The operations of the incremental SVM on its state: change, correct, solve; the module around it validates and saves."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import torch
from torch import Tensor

from torchlssvm.errors import ConvergenceError
from torchlssvm.functional import checks
from torchlssvm.kernels import Kernel
from torchlssvm.machines.svm_drive import Drive, Event
from torchlssvm.machines.svm_samples import places
from torchlssvm.machines.svm_solve import Pivoting, balanced, nearly
from torchlssvm.machines.svm_state import ENDLESS, State

WALKED = 32
"""So many new samples on the wrong side are pivoted, a quarter of it where steps are not compiled; fewer walk."""
FEW = 200
"""With fewer samples a whole row of the kernel costs as much as a part of it."""


class Engine(State):
    """What is done with samples and margin vectors."""

    # -- adding and removing -------------------------------------------------------------------------------------------

    def change(
        self,
        x: Tensor | None,  # (B, J) prepared rows, or (B, n + B)
        ids: list[int],
        vectors: dict[str, Tensor],  # y, weight, u of the new samples
        remove: list[int],  # positions
        method: str = "auto",
    ) -> None:
        """Add and remove samples, along one parameter or by pivoting: the answer is the same."""
        s = self.samples
        new = range(s.n, s.n)
        if x is not None and len(ids):
            new = s.append(x, ids, **vectors)
            self.margin.fit_capacity()
        if checks.is_fake(s.x):
            self._dry_run(new)
        elif len(new) == 1 and not remove and len(self.margin) and self._is_reserve(new.start):
            return
        else:
            self.leaving = set(remove)
            try:
                self.surely(lambda: self._choose(new, remove, method), self.snapshot(new.start))
            finally:
                self.leaving = set()
        self.margin.moved(s.delete(remove))
        if not s.n:
            self.margin.ha[0] = 0.0

    def _choose(self, new: range, remove: list[int], method: str) -> None:
        """The planner. Few samples walk; many are pivoted, and walk if pivoting fails."""
        s = self.samples
        held = new.start - len(remove)
        many = len(new) > max(WALKED, 2 * held)
        if many and not remove and method == "auto":
            self.last = "solve"
            s.forget_rows()  # nobody fills in their columns for the new samples
            if not self._solve_all():
                self.one_by_one()
            return
        if len(new):
            self._arrive(new)
        moving = [i for i in new if s.hsign[i] < 0]
        support = [i for i in remove if float(s.halpha[i]) > 0]
        count = len(moving) + len(support)
        most = WALKED if self.margin.loops is not None else WALKED // 4
        if method == "pivot" or (method == "auto" and (len(moving) >= most or len(support) > s.n // 4)):
            if self._pivot(remove):
                self.last = "pivot"
                return
            if method == "auto" and not remove and len(moving) >= WALKED:
                self._approach(s.alpha.clone())
                self.last = "solve"
                return
            method = "joint"
        if method == "path" and count > 1:
            self.last = "path"
            for i in remove:
                self._withdraw(i)
                self._walk([], [i])
            for i in moving:
                self._walk([i], [])
            return
        for i in remove:
            self._withdraw(i)
        if count:
            self.last = "joint" if count > 1 else "path"
            self._walk(moving, support)

    def _arrive(self, new: range) -> None:
        """Samples have been appended, with alpha = 0: their g, and their rows of Q where those are kept."""
        s = self.samples
        if len(new) == 1:
            hQ = s.host(s.compute(new.start))[None]
        else:
            hQ = s.host(s.block(torch.arange(new.start, new.stop, device=s.device)))
        self.margin.appended(new, hQ)
        s.rows.extend(new.start, new.stop, hQ)
        g = hQ @ s.halpha + (s.hy[new.start :] * self.b - 1.0)
        s.hslack[new.start :] = abs(g)
        s.hsign[new.start :] = 1.0
        for i, value in zip(new, g.tolist(), strict=True):
            if value < 0:
                s.hsign[i] = -1.0
                s.rows.put(i, hQ[i - new.start], s.n)

    def _is_reserve(self, i: int) -> bool:
        """Whether sample i, the last one, is right with alpha = 0. Needs K with the support vectors, not with all."""
        s, m = self.samples, self.margin
        if s.precomputed or s.n < FEW:
            return False
        k, high = m.top, s.rows.high
        if (loops := s.loops) is not None and s.lifted:
            vectors = (s.hy, s.hsign, s.halpha, m.hat, m.hused, m.ha)
            g = loops.newcomer(s.hlift, i, s.kernel.gamma, *vectors, m.hQS, s.rows.hheld, s.rows.hrows, high)  # type: ignore
        else:
            error = places(s.hsign < 0)
            e, join = len(error), torch.cat if isinstance(error, Tensor) else np.concatenate
            values = s.host(s.compute(i, join([m.hat, error, s.rows.hheld[:high]])))
            inner = values[:k] * m.hused
            inner[0] = s.hy[i]
            g = float((inner * m.ha).sum()) + float((values[k : k + e] * s.halpha[error]).sum()) - 1.0
            if g >= 0:
                m.hQS[:k, i], s.rows.hrows[:high, i] = inner, values[k + e :]
        if g < 0:
            return False
        s.hsign[i], s.hslack[i] = 1.0, g
        return True

    def _withdraw(self, i: int) -> None:
        """Sample i is to go: its margin is nobody's concern any more."""
        s, m = self.samples, self.margin
        if i in m.slot:
            s.halpha[i], _ = m.leave(i)
        s.hsign[i], s.hslack[i] = 0.0, ENDLESS

    def _walk(self, up: Sequence[int], down: Sequence[int]) -> None:
        """alpha goes to u for ``up``, unless it comes to the margin on the way, and to 0 for ``down``."""
        s = self.samples
        up = [i for i in up if s.hsign[i] < 0 and s.halpha[i] == 0]  # still on the wrong side
        down = [i for i in down if s.halpha[i] > 0]
        if len(up) + len(down) == 1:
            drive = Drive.single(s, up[0], float(s.hu[up[0]])) if up else Drive.single(s, down[0], 0.0)
            self.walker.walk(drive)
        elif up or down:
            d, target = s.zeros(), s.zeros()
            d[up] = target[up] = s.hu[up]
            d[down] = -s.halpha[down]
            self.walker.walk(Drive(s, d, target))

    # -- all at once ---------------------------------------------------------------------------------------------------

    def _pivot(self, remove: Sequence[int] = (), side: Tensor | None = None, factor: float = 1.0) -> bool:
        """Pivot from these sets, or the present ones; samples to be removed are held at 0. factor: what u was multiplied by.

        False if it fails, and nothing has changed; from other sets than the present ones, the margin set is then of no use.
        """
        s, m = self.samples, self.margin
        old, fixed, known = self.snapshot(), None, None
        bound = s.zeros() + 1.0 - 2.0 * (s.halpha > 0.5 * s.hu)  # a product of truth values and numbers may be float32
        if side is None:
            start = s.hsign * 1.0
            # A candidate with g < 0 starts as a margin vector, unless it is far on the wrong side.
            start[(s.halpha <= 0) & (s.hsign < 0) & (s.hslack < 1.0)] = 0.0
            # g + 1 is Q alpha + y b: without the margin vectors' share, that of the coefficients at their bounds is left
            rest = s.g + 1.0 - torch.mv(m.QSn, m.a[: m.top])
            known = (s.halpha * (s.hsign != 0) * factor, s.host(rest * factor))
        else:
            start = s.host(side)
            m.clear()  # neither R nor the rows of Q there need be right
        u = s.hu * 1.0
        if len(remove):
            start[remove], s.hu[remove] = -1.0, 0.0
            fixed = s.hu == 0
        m.near.forget()
        found = Pivoting(s, m).solve(start, bound, fixed, known)
        s.hu[:] = u
        if found is None:
            if side is None:
                self.restore(old, appended=True)
            return False
        s.halpha[:], g, s.hsign[:] = found
        s.hslack[:] = g * s.hsign
        s.hslack[s.hsign == 0] = ENDLESS
        if len(remove):
            s.hsign[remove], s.hslack[remove] = 0.0, ENDLESS
        self.walker.events += 1
        return True

    def _solve_all(self) -> bool:
        """All samples at once, from the coefficients that those held have."""
        s = self.samples
        if bool((s.y > 0).any()) and bool((s.y < 0).any()):
            try:
                self._approach(s.alpha.clone())
            except ConvergenceError:
                return False
            return True
        s.alpha.zero_()  # one class only: alpha = 0, and b alone puts every sample on its margin
        s.sign.fill_(1.0)
        s.slack.zero_()
        self.margin.ha[0] = s.hy[0]
        self.margin.clear()
        return True

    def _approach(self, alpha: Tensor) -> None:  # (n,)
        """From any alpha in the box with y^T alpha = 0: near the optimum two at a time, then pivoting, or else a walk."""
        s = self.samples
        alpha, b = nearly(s, alpha)
        s.alpha.copy_(alpha)
        if not self._pivot((), (alpha <= 0).to(alpha.dtype) - (alpha >= s.u).to(alpha.dtype)):
            self.rebuild(alpha, b)

    def rebuild(self, alpha: Tensor, b: float) -> None:
        """From any alpha in the box with y^T alpha = 0, walk to the optimum: the gradient is tilted and straightened again.

        With r such that g + r satisfies (2) at this alpha, g + (1 - p) r does so all along the walk, and at p = 1 r is gone.
        """
        s, m = self.samples, self.margin
        inside = ((alpha > 0) & (alpha < s.u)).nonzero()[:, 0]
        s.alpha.copy_(alpha)
        if not m.build(inside, alpha[inside], b):
            self.walker.assemble(inside.tolist())
            alpha = s.alpha.clone()
            inside = torch.tensor(list(m.slot), dtype=torch.int64, device=s.device)
        g = s.product(alpha) + s.y * b - 1.0
        side = torch.where(alpha >= s.u, -1.0, 1.0)
        side[inside] = 0.0
        slack = g * side
        wrong = slack < 0
        slack = torch.where(wrong, -0.1 * slack, slack)  # what is wrong is put on the right side, a tenth beyond
        tilted = torch.where(side == 0, 0.0, slack * side)
        s.sign.copy_(side)
        s.slack.copy_(torch.where(side == 0, ENDLESS, slack))
        zero = torch.zeros_like(alpha)
        self.walker.walk(Drive(s, zero, zero.clone(), tilt=g - tilted, force=zero.clone()), everything=True)
        m.drifted = True  # a long way, from a rough start: where it ends is looked at

    def resolve(self) -> None:
        """Everything anew with the samples held: pivoting from the sets, walking from alpha, or one sample at a time."""
        s, m = self.samples, self.margin
        if not s.n:
            m.clear()
            return
        alpha, side = s.alpha.clone(), s.sign.clone()
        g = s.product(alpha) + s.y * self.b - 1.0
        s.slack.copy_(torch.where(side == 0, ENDLESS, g * side))
        if self._pivot((), side):
            self.last = "pivot"
        else:
            try:
                self._approach(alpha)
                self.last = "solve"
            except ConvergenceError:
                self.one_by_one()
        self.finish(True)

    # -- bounds and kernels --------------------------------------------------------------------------------------------

    def set_bounds(self, u: Tensor, method: str = "auto") -> None:  # (n,)
        """Change C: by pivoting, or along the path, on which alpha is linear between breakpoints; else one by one."""
        s, m = self.samples, self.margin
        before = self.snapshot()

        def change() -> None:
            if method == "path" or not len(m) or s.n <= FEW:
                self._walk_to(u)
                return
            factor = u / s.u
            s.u.copy_(u)
            self.last = "pivot"
            same = bool((factor == factor[0]).all())
            if not self._pivot(factor=float(factor[0]) if same else 1.0):
                self._approach(balanced(s.alpha * factor, u, s.y))
                self.last = "solve"

        self.surely(change, before, u)

    def follow_bounds(self, u: Tensor, watch: Callable[[Event], None]) -> None:  # (n,)
        """Change C along the path and report its events. ConvergenceError, and nothing changed, if it cannot be followed."""
        before, done, old = self.snapshot(), self.slowly, self.walker.watch
        try:
            self.walker.watch = watch
            try:
                self._walk_to(u)
            finally:
                self.walker.watch = old
            self.finish(True)
            if self.slowly != done:
                raise ConvergenceError("rounding has led the path away from the solution")
        except BaseException:
            self.restore(before)
            raise

    def _walk_to(self, u: Tensor) -> None:  # (n,)
        s, m = self.samples, self.margin
        rise = u - s.u
        d = torch.where(s.sign < 0, rise, 0.0)
        self.walker.walk(Drive(s, d, u.clone(), rise=rise), everything=True)
        s.u.copy_(u)
        s.alpha.copy_(torch.where(s.sign < 0, u, s.alpha))
        if len(m):
            m.upper[1 : m.top] = torch.where(m.used[1 : m.top] > 0, u[m.at[1 : m.top]], ENDLESS)
        self.last = "joint"

    def set_kernel(self, kernel: Kernel | None, x: Tensor | None = None) -> None:
        """Another kernel on the same samples: change it, then correct the violations."""
        s = self.samples
        before, old = self.snapshot(), (s.kernel, s.x)
        try:
            s.change_kernel(kernel, x)
            if s.n and not checks.is_fake(s.y):
                self.resolve()
        except BaseException:
            s.change_kernel(*old)
            self.restore(before)
            raise

    # -- keeping exact -------------------------------------------------------------------------------------------------

    def polish(self) -> None:
        """R and every g anew, corrections until they no longer help, and a walk if a sample is on the wrong side."""
        s, m = self.samples, self.margin
        if not s.n:
            return
        m.refresh()
        for _ in range(3):
            self.resync()
            if len(m):
                self.correct()
        wrong = float((-s.slack).amax())
        if wrong > 1e-11 * max(1.0, float(s.alpha.amax()) * s.scale):
            self.resolve()
