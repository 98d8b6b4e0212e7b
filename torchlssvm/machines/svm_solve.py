"""Solving at once: block pivoting from a guess of the three sets, which two coefficients at a time have come to."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from torchlssvm.functional import svm_path
from torchlssvm.functional.svm_smo import minimize
from torchlssvm.machines.svm_exchange import SPAN, STALE, anew, exchange, indices, slots_of
from torchlssvm.machines.svm_margin import DRIFT, Margin
from torchlssvm.machines.svm_samples import Samples, as_tensor, places

CLOSE = 1e-3  # the violation of (2) that the guess may have, where C is 1 or more
STEPS = 20  # for each sample, to come there
ROWS = 2**27  # bytes of kernel rows kept meanwhile
ROUNDS = 25  # pivoting ends after so many,
PATIENCE = 6  # or so many in which no fewer samples move than before
ASTRAY = 50  # or when that many more move than twice the fewest before,
FLIPS = (
    10  # or when more than these, and one for eight margin vectors, lie in the span of the others and are wrong there
)
MOST = 3000  # margin vectors, beyond which it is not tried
TOLERANCE = 1e-11


class Pivoting:
    """Block pivoting on the margin set itself: R follows the sets from round to round."""

    def __init__(self, samples: Samples, margin: Margin):
        self.samples, self.margin = samples, margin
        self.seen: dict[int, Any] = {}  # rows of Q on the host, of samples that have left the margin set

    def solve(
        self,
        side: Any,  # (n,) +1 R, -1 E, 0 S; this and all below on the host
        bound: Any,  # (n,) +1 or -1: where a sample of S goes if it lies in the span of the others
        fixed: Any = None,  # (n,) true for samples that stay where they are
        known: tuple[Any, Any] | None = None,  # (n,), (n,) coefficients, zero in S, and Q times them
    ) -> tuple[Any, Any, Any] | None:
        """alpha, g and the sets at the optimum, which the margin set then holds, or None if pivoting does not get there.

        With E at u and R at 0, S solves A [b; alpha_S] = [-sum_E y u; 1 - Q_SE u_E] (2), (3). A coefficient outside its box
        goes to the bound it passed; a sample with g on the wrong side goes to S; until nothing moves (primal-dual active set).
        A sample in the span of S stays at its bound. Either its g is 0 with theirs, as that of a copy, or no coefficient of
        its own can make it so (a copy with the other label): then it goes to the other bound.
        """
        s, m = self.samples, self.margin
        side = side * 1.0
        # the coefficients at their bounds, and what they make of g
        held, outer = (s.hu * 0.0, s.hu * 0.0) if known is None else known
        self.inside = side != side
        self.inside[list(m.slot)] = True
        fewest, patience = s.n + 1, PATIENCE
        for _ in range(ROUNDS):
            outer, held = self._exchange(side, bound, held, outer)
            if not 1 < len(m) <= MOST:
                return None
            x = self._inner(held, outer)
            if x is None:
                return None
            g = s.host(torch.addmv(as_tensor(outer), m.QSn, as_tensor(x))) - 1.0
            used = places(m.hused)[1:]  # without b's slot
            inside, inner = m.hat[used], x[used]
            alpha = held * 1.0
            alpha[inside] = inner
            wrong = g * side < -TOLERANCE * (1.0 + float(abs(alpha).max()) * s.scale)  # never in S
            if fixed is not None:
                wrong &= ~fixed
            new = side - side * wrong - side * (wrong & self.spanned)
            one = 0.0 * inner + 1.0  # in its precision
            new[inside] = (inner <= 0) * one - (inner >= s.hu[inside]) * one
            moved, flips = int((new != side).sum()), int((wrong & self.spanned).sum())
            if not moved:
                return self._found(x, alpha, g, side)
            if moved > 2 * fewest + ASTRAY or flips > FLIPS + len(m) // 8:
                return None
            patience = PATIENCE if moved < fewest else patience - 1
            fewest = min(fewest, moved)
            if not patience:
                return None
            side = new
            bound = side + bound * (side == 0)
        return None

    def _exchange(self, side: Any, bound: Any, held: Any, outer: Any) -> tuple[Any, Any]:
        """Bring the margin set to side == 0. What cannot enter it stays at its bound (``side`` is changed), as ``spanned``.

        Returns what the coefficients at their bounds make of g, and those coefficients.
        """
        s, m = self.samples, self.margin
        want = side == 0
        leaving, entering = places(self.inside & ~want), places(want & ~self.inside)
        out, into = leaving.tolist(), entering.tolist()
        left, rows = m.hQS[s.host(slots_of(m, out)), : s.n], self._rows(into)
        self.seen.update(zip(out, left, strict=True))
        rejected = exchange(m, out, into, rows) if out or into else []
        self.spanned = side != side
        if rejected:
            self.seen.update(zip(into, rows, strict=True))
            self.spanned[rejected] = True
            side[rejected] = bound[rejected]
        self.inside = side == 0
        new = s.hu * (side < 0)
        change = new - held
        for at, block in ((leaving, left), (entering, rows)):
            if len(at):
                outer = outer + s.host(torch.mv(as_tensor(block).T, as_tensor(change[at])))
                change[at] = 0.0
        if bool(change.any()):
            outer = outer + s.host(s.product(as_tensor(change)))
        return outer, new

    def _rows(self, positions: list[int]) -> Any:  # -> (k, n)
        """Rows of Q, those seen before and those in the cache from there."""
        s = self.samples
        new = [i for i in positions if i not in self.seen and i not in s.rows]
        found = self.seen
        if new or not positions:
            block = s.host(s.block(indices(self.margin, new)))
            if len(new) == len(positions):
                return block
            found = found | dict(zip(new, block, strict=True))
        rows = s.host(torch.empty(len(positions), s.n, dtype=torch.float64, device=s.device))
        for k, i in enumerate(positions):
            rows[k] = found[i] if i in found else s.rows.hrows[s.rows.row_of[i], : s.n]
        return rows

    def _inner(self, held: Any, outer: Any) -> Any:  # -> (top,), or None
        """[b; alpha_S] in slots, with refinement; R is made anew if it has drifted."""
        s, m = self.samples, self.margin
        for attempt in range(2):
            right = m.gather(1.0 - outer, -float((s.hy * held).sum()))
            x, residual = svm_path.sensitivities(m.Rk, m.Ak, as_tensor(-right))
            m.residual = float(abs(s.host(residual)).max()) / max(float(abs(right).max()), 1e-300)
            if m.residual <= (DRIFT if attempt else STALE):
                return s.host(x)
            if attempt or anew(m):
                return None
        return None

    def _found(self, x: Any, alpha: Any, g: Any, side: Any) -> tuple[Any, Any, Any] | None:
        s, m = self.samples, self.margin
        # 1 / R_jj is the gamma of margin vector j with respect to the others (14): none may lie in their span.
        used = places(m.hused)[1:]
        if not bool((m.hRk.diagonal() * m.hAk.diagonal() < 1.0 / SPAN)[used].all()):
            return None
        m.ha[:] = x
        m.hupper[used] = s.hu[m.hat[used]]
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
