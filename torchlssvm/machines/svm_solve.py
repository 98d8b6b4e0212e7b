"""Solving at once: block pivoting from a guess of the three sets, which two coefficients at a time have come to."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from torchlssvm.functional import svm_path
from torchlssvm.functional.svm_smo import minimize
from torchlssvm.machines.svm_exchange import SPAN, anew, exchange
from torchlssvm.machines.svm_margin import DRIFT, ENDLESS, Margin
from torchlssvm.machines.svm_samples import Samples

CLOSE = 1e-3  # the violation of (2) that the guess may have, where C is 1 or more
STEPS = 20  # for each sample, to come there
ROWS = 2**27  # bytes of kernel rows kept meanwhile
ROUNDS = 25  # pivoting ends after so many,
PATIENCE = 6  # or so many in which no fewer samples move than before
MOST = 3000  # margin vectors, beyond which it is not tried
TOLERANCE = 1e-11


class Pivoting:
    """Block pivoting on the margin set itself: R follows the sets from round to round."""

    def __init__(self, samples: Samples, margin: Margin):
        self.samples, self.margin = samples, margin

    def solve(
        self,
        side: Tensor,  # (n,) +1 R, -1 E, 0 S
        bound: Tensor,  # (n,) +1 or -1: where a sample of S goes if it lies in the span of the others
        fixed: Tensor | None = None,  # (n,) true for samples that stay where they are
        known: tuple[Tensor, Tensor] | None = None,  # (n,), (n,) coefficients, zero in S, and Q times them
    ) -> tuple[Tensor, Tensor, Tensor] | None:
        """alpha, g and the sets at the optimum, which the margin set then holds, or None if pivoting does not get there.

        With E at u and R at 0, S solves A [b; alpha_S] = [-sum_E y u; 1 - Q_SE u_E] (2), (3). A coefficient outside its box
        goes to the bound it passed; a sample with g on the wrong side goes to S; until nothing moves (primal-dual active set).
        A sample in the span of S stays at its bound. Either its g is 0 with theirs, as that of a copy, or no coefficient of
        its own can make it so (a copy with the other label): then it goes to the other bound.
        """
        s, m = self.samples, self.margin
        side = side.clone()
        # the coefficients at their bounds, and what they make of g
        held, outer = (torch.zeros_like(s.u), torch.zeros_like(s.u)) if known is None else known
        fewest, patience = s.n + 1, PATIENCE
        for _ in range(ROUNDS):
            outer, held = self._exchange(side, bound, held, outer)
            if not 1 < len(m) <= MOST:
                return None
            x = self._inner(held, outer)
            if x is None:
                return None
            g = torch.addmv(outer, m.QSn, x) - 1.0
            used = m.members()
            inside, inner = m.at[used], x[used]
            alpha = held.index_copy(0, inside, inner)
            size = TOLERANCE * (1.0 + float(alpha.abs().amax()) * s.scale)
            wrong = g * side < -size  # never in S
            if fixed is not None:
                wrong &= ~fixed
            new = torch.where(wrong, torch.where(self.spanned, -side, 0.0), side)
            u = s.u[inside]
            new[inside] = (inner <= 0).to(side.dtype) - (inner >= u).to(side.dtype)
            moved = int((new != side).sum())
            if not moved:
                return self._found(x, alpha, g, side)
            patience = PATIENCE if moved < fewest else patience - 1
            fewest = min(fewest, moved)
            if not patience:
                return None
            side = new
            bound = torch.where(side == 0, bound, side)
        return None

    def _exchange(self, side: Tensor, bound: Tensor, held: Tensor, outer: Tensor) -> tuple[Tensor, Tensor]:
        """Bring the margin set to side == 0. What cannot enter it stays at its bound (``side`` is changed), as ``spanned``.

        Returns what the coefficients at their bounds make of g, and those coefficients.
        """
        s, m = self.samples, self.margin
        want = (side == 0).nonzero()[:, 0].tolist()
        wanted = set(want)
        out, into = [i for i in m.slot if i not in wanted], [i for i in want if i not in m.slot]
        left = m.QS[[m.slot[i] for i in out], : s.n]
        rows = self._rows(into)
        rejected = exchange(m, out, into, rows) if out or into else []
        self.spanned = torch.zeros_like(side, dtype=torch.bool)
        if rejected:
            self.spanned[rejected] = True
            side[rejected] = bound[rejected]
        new = torch.where(side < 0, s.u, 0.0)
        change = new - held
        for at, block in ((out, left), (into, rows)):
            if at:
                outer = torch.addmv(outer, block.T, change[at])
                change[at] = 0.0
        if bool((change != 0).any()):
            outer = outer + s.product(change)
        return outer, new

    def _rows(self, positions: list[int]) -> Tensor:  # -> (k, n)
        """Rows of Q, from the cache as far as they are there."""
        s = self.samples
        rows = s.y.new_empty(len(positions), s.n)
        new = []
        for k, i in enumerate(positions):
            row = s.rows.get(i, s.n)
            if row is None:
                new.append(k)
            else:
                rows[k] = row
        if new:
            at = torch.tensor([positions[k] for k in new], device=s.device)
            if len(new) == len(positions):
                return s.block(at)
            rows[new] = s.block(at)
        return rows

    def _inner(self, held: Tensor, outer: Tensor) -> Tensor | None:  # -> (top,)
        """[b; alpha_S] in slots, with refinement; R is made anew if it has drifted."""
        s, m = self.samples, self.margin
        for attempt in range(2):
            right = (1.0 - outer)[m.at[: m.top]] * m.used[: m.top]
            right[0] = -(s.y @ held)
            x, residual = svm_path.sensitivities(m.Rk, m.Ak, -right)
            m.residual = float(residual.abs().amax()) / max(float(right.abs().amax()), 1e-300)
            if m.residual <= DRIFT:
                return x
            if attempt or anew(m, []):
                return None
        return None

    def _found(self, x: Tensor, alpha: Tensor, g: Tensor, side: Tensor) -> tuple[Tensor, Tensor, Tensor] | None:
        s, m = self.samples, self.margin
        # 1 / R_jj is the gamma of margin vector j with respect to the others (14): none may lie in their span.
        own, used = m.Rk.diagonal(), m.used[: m.top] > 0
        used[0] = False
        if not bool((own * m.Ak.diagonal() < 1.0 / SPAN)[used].all()):
            return None
        m.a[: m.top] = x
        m.upper[: m.top] = torch.where(used, s.u[m.at[: m.top]], ENDLESS)
        return alpha, g, side


def nearly(samples: Samples, alpha: Tensor) -> tuple[Tensor, float]:
    """alpha (n,) in its box with y^T alpha = 0, and b, near the optimum, from another such alpha.

    The steps are small and many: they are made on the host, wherever the kernel rows come from.
    """
    s = samples
    y, u, diagonal, start, Qa = (t.cpu().numpy() for t in (s.y, s.u, s.diagonal(), alpha, s.product(alpha)))
    rows: dict[int, Any] = {}
    most = max(2, ROWS // (8 * s.n))

    def row(i: int) -> Any:
        if i not in rows:
            if len(rows) >= most:
                del rows[next(iter(rows))]
            rows[i] = s.compute(i).cpu().numpy() * (y * y[i])
        return rows[i]

    close = CLOSE * min(1.0, s.scale * float(u.max()))  # small bounds: f differs little between samples
    found, b = minimize(y, u, diagonal, row, start, y - y * Qa, close, STEPS * s.n)
    return balanced(torch.from_numpy(found).to(s.device), s.u, s.y), b


def balanced(alpha: Tensor, u: Tensor, y: Tensor) -> Tensor:  # (n,) x 3 -> (n,)
    """alpha in its box with y^T alpha = 0: the heavier class gives way, its free coefficients first."""
    excess = y @ alpha
    heavy = y == excess.sign()
    free = heavy & (alpha < u)
    for giving in (free, heavy):
        total, excess = alpha[giving].sum(), (y @ alpha).abs()
        if float(excess) <= 1e-13 * float(u.amax()):
            break  # what is at its bound stays there
        share = torch.clamp(1.0 - excess / total, min=0.0) if float(total) > 0 else excess * 0.0
        alpha = torch.where(giving, alpha * share, alpha)
    return alpha
