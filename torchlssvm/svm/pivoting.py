"""Block pivoting: from a guess of the three sets to the optimum, with many samples changing sets at a time."""

from __future__ import annotations

import numpy as np

from torchlssvm.functional.modes import interrupt
from torchlssvm.functional.svm_path import EPS
from torchlssvm.svm.kernel_rows import KernelRows
from torchlssvm.svm.margin_set import MarginSet
from torchlssvm.svm.samples import Array, Samples

MAX_ROUNDS_WITHOUT_GAIN = 6
"""If this many rounds in a row do not lower the number of moving samples, pivoting cycles and is given up."""


def pivot(
    samples: Samples, rows: KernelRows, margin: MarginSet, side: Array, alpha: Array, rest: Array | None = None
) -> float | None:  # (capacity,) each
    """Solve from the sets ``side``. Returns None if pivoting does not converge; samples and margin set are then undefined.

    With E at u and R at 0, S solves A [b; alpha_S] = [-sum_E y u; 1 - Q_SE u_E] (2), (3). Then a coefficient outside its box
    moves to the bound it passed, and a sample with g on the wrong side moves to S, until no sample moves. A sample in the span
    of S stays at a bound, at first the one nearer to ``alpha``. For a copy of a margin vector, g is then 0 like theirs. For a
    copy with the other label, its own coefficient cannot make g 0, and the sample moves to the other bound. Samples with u = 0
    take no part. rest: Q times the coefficients of E, if known.

    Returns the sum of (sum_j |c_j| sqrt(K_jj))^2 over all sums of c_j Q_j: that were added to rest since it was computed from
    the kernel. The rounding errors of rest_i are about EPS sqrt(K_ii) times the root of this sum.
    """
    s = samples
    taking_part = s.u > 0
    side = np.where(taking_part, side, 1.0)
    bound = np.where(alpha > 0.5 * s.u, -1.0, 1.0)
    held = s.u * (side < 0)
    rest = rows.product(held) if rest is None else rest
    fewest, patience, roundings = s.n + 1, MAX_ROUNDS_WITHOUT_GAIN, 0.0
    for _ in range(30):  # one to ten rounds are usual
        if interrupt.arrived:
            interrupt.hand_over()
        before = held
        spanned, held, rest = _exchange(s, rows, margin, side, bound, held, rest)
        roundings += float(np.abs(held - before) @ s.root) ** 2
        if not 1 < len(margin) <= 8000:  # beyond, A and R would take a gigabyte
            return None
        m, k = margin, margin.top
        r = -m.used * (1.0 - rest[m.at])
        r[0] = float(s.y @ held)
        a = margin.solve(r)
        g = a[:k] @ m.QS[:k] + rest - np.abs(s.y)
        slots = margin.slots()
        inside, inner = m.at[slots], a[slots]
        unit = EPS * (np.abs(g + 1.0 - s.y * a[0]) + s.root * float(s.root[inside] @ np.abs(inner)) + abs(a[0]) + 1.0)
        # fewer units of rounding than the certificate allows, so that the solution passes it
        wrong = (g * side < -64.0 * unit) & taking_part
        new = np.where(wrong, np.where(spanned, -side, 0.0), side)
        new[inside] = (inner <= 0) * 1.0 - (inner >= s.u[inside]) * 1.0
        moved, flips = int((new != side).sum()), int((wrong & spanned).sum())
        if not moved:
            m.a[:] = a
            m.upper[slots] = s.u[inside]
            s.alpha[:] = held
            s.alpha[inside] = inner
            s.side[:] = np.where(taking_part, side, 0.0)
            s.rest[:], s.g[:] = rest, g
            return roundings if np.isfinite(a).all() else None
        # More moves mean that pivoting diverges; more flips of samples in the span of S, that S holds the wrong samples.
        if moved > 2 * fewest + 50 or flips > 10 + len(margin) // 8:
            return None
        patience = MAX_ROUNDS_WITHOUT_GAIN if moved < fewest else patience - 1
        fewest = min(fewest, moved)
        if not patience:
            return None
        side = new
        bound = np.where(side == 0, bound, side)
    return None


def _exchange(
    s: Samples, rows: KernelRows, margin: MarginSet, side: Array, bound: Array, held: Array, rest: Array
) -> tuple[Array, Array, Array]:
    """Change S to side == 0. Samples in its span stay at a bound. Returns these, the coefficients of E, and Q times them."""
    inside = np.zeros(s.capacity, dtype=bool)
    inside[margin.positions()] = True
    out, into = np.flatnonzero(inside & (side != 0)), np.flatnonzero(~inside & (side == 0))
    slots = margin.slots()
    slots = slots[np.isin(margin.at[slots], out)]
    leaving, left = margin.at[slots], margin.QS[slots]
    entering = rows.block(into)
    spanned = np.zeros(s.capacity, dtype=bool)
    if len(out) or len(into):
        rejected = margin.exchange(out, into, entering)
        spanned[rejected] = True
        side[rejected] = bound[rejected]
    for i, row in (*zip(leaving.tolist(), left, strict=True), *zip(into.tolist(), entering, strict=True)):
        if side[i] != 0:  # it may enter in a later round
            rows.keep_row(i, row)
    new = s.u * (side < 0)
    change = new - held
    for at, block in ((leaving, left), (into, entering)):
        if len(at):
            rest = rest + change[at] @ block
            change[at] = 0.0
    if change.any():
        rest = rest + rows.product(change)
    return spanned, new, rest
