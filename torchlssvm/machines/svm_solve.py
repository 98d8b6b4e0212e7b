"""Solving at once: block pivoting from a guess of the three sets, which two coefficients at a time have come to."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from torchlssvm.functional.svm_smo import minimize
from torchlssvm.machines.svm_samples import Samples

CLOSE = 1e-3  # the violation of (2) that the guess may have, where C is 1 or more
STEPS = 20  # for each sample, to come there
ROWS = 2**27  # bytes of kernel rows kept meanwhile
ROUNDS = 25  # pivoting ends after so many, or when it stops making progress
TOLERANCE = 1e-11


class Pivoting:
    """Rows of Q for every sample that has been in S, in a buffer that doubles; the sets come and go."""

    def __init__(self, samples: Samples, known: tuple[list[int], Tensor] | None = None):
        self.samples = samples
        self.row_of: dict[int, int] = {}
        self.rows = torch.empty(0, samples.n, dtype=torch.float64, device=samples.device)
        if known is not None:  # positions, and their rows
            self.row_of = {i: k for k, i in enumerate(known[0])}
            self.rows = known[1]

    def find(self, positions: Tensor) -> Tensor:  # (s,) -> (s,)
        """Where in ``rows`` the rows of Q of these samples are; those not seen before are computed, in one block."""
        places = positions.tolist()
        new = [i for i in places if i not in self.row_of]
        if new:
            block = self.samples.block(torch.tensor(new, device=self.samples.device))
            used = len(self.row_of)
            if used + len(new) > len(self.rows):
                rows = self.rows.new_empty(max(2 * used, used + len(new)), self.samples.n)
                rows[:used] = self.rows[:used]
                self.rows = rows
            self.rows[used : used + len(new)] = block
            self.row_of |= {i: used + k for k, i in enumerate(new)}
        return torch.tensor([self.row_of[i] for i in places], dtype=torch.int64, device=self.samples.device)

    def combine(self, at: Tensor, values: Tensor) -> Tensor:  # (s,), (s,) -> (n,)
        """The sum of these rows times these values. No row is copied."""
        used = len(self.row_of)
        return torch.mv(self.rows[:used].T, values.new_zeros(used).index_copy_(0, at, values))

    def product(self, v: Tensor) -> Tensor:  # (n,) -> (n,)
        """Q v, from rows at hand as far as they are."""
        used = v.nonzero()[:, 0]
        places = used.tolist()
        known = [k for k, i in enumerate(places) if i in self.row_of]
        out = torch.zeros_like(v)
        if known:
            out = self.combine(self.find(used[known]), v[used[known]])
            v = v.index_fill(0, used[known], 0.0)
        return out + self.samples.product(v) if len(known) < len(places) else out

    def solve(
        self,
        side: Tensor,  # (n,) +1 R, -1 E, 0 S
        known: tuple[Tensor, Tensor] | None = None,  # (n,), (n,) coefficients, zero in S, and Q times them
    ) -> tuple[Tensor, Tensor, float, Tensor] | None:
        """alpha, g, b and the sets at the optimum, or None if pivoting does not get there.

        With E at u and R at 0, S solves A [b; alpha_S] = [-sum_E y u; 1 - Q_SE u_E] (2), (3). A coefficient outside its box
        goes to the bound it passed; a sample with g on the wrong side goes to S; until nothing moves (primal-dual active set).
        """
        s = self.samples
        side = side.clone()
        # the coefficients at their bounds, and what they make of g
        held, outer = (torch.zeros_like(s.u), torch.zeros_like(s.u)) if known is None else known
        best, patience = s.n + 1, 6
        for _ in range(ROUNDS):
            inside = (side == 0).nonzero()[:, 0]
            if not len(inside) or len(inside) > 3000:
                return None
            at = self.find(inside)
            bound = torch.where(side < 0, s.u, 0.0)
            outer = outer + self.product(bound - held)
            held = bound
            k = len(inside) + 1
            A = s.u.new_zeros(k, k)
            A[0, 1:] = A[1:, 0] = s.y[inside]
            A[1:, 1:] = self.rows[at[:, None], inside]
            right = torch.cat([-(s.y @ bound)[None], 1.0 - outer[inside]])
            solution = _refined_solve(A, right)
            if solution is None:
                return None
            b, inner = float(solution[0]), solution[1:]
            alpha = bound.index_copy(0, inside, inner)
            g = outer + self.combine(at, inner) + s.y * b - 1.0
            g[inside] = 0.0
            size = TOLERANCE * (1.0 + float(alpha.abs().amax()) * s.scale)
            new = side.clone()
            new[(side > 0) & (g < -size)] = 0.0
            new[(side < 0) & (g > size)] = 0.0
            new[inside] = (inner <= 0).to(side.dtype) - (inner >= s.u[inside]).to(side.dtype)
            moved = int((new != side).sum())
            if not moved:
                return alpha, g, b, side
            patience = 6 if moved < best else patience - 1
            best = min(best, moved)
            if not patience:
                return None
            side = new
        return None


def _refined_solve(A: Tensor, right: Tensor) -> Tensor | None:
    LU, pivots, info = torch.linalg.lu_factor_ex(A)
    if int(info):
        return None
    x = torch.linalg.lu_solve(LU, pivots, right[:, None])
    x = x + torch.linalg.lu_solve(LU, pivots, right[:, None] - A @ x)
    return x[:, 0] if bool(torch.isfinite(x).all()) else None


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
