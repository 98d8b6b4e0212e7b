"""Margin vectors that leave and enter in one block: the slots they are in, and R by the cheapest way."""

from __future__ import annotations

import heapq

import torch
from torch import Tensor

from torchlssvm.functional import svm_block
from torchlssvm.machines.svm_margin import DEPENDENT, DRIFT, ENDLESS, Margin

LEAVE, ENTER = 2, 4
"""Products of s^2 numbers that updating R takes for each margin vector that leaves, and that enters. R anew takes s of them."""
SPAN = 10 * DEPENDENT
"""A pivot below this share of its terms: a sample in the span of the margin vectors."""


def exchange(m: Margin, out: list[int], into: list[int], rows: Tensor) -> list[int]:  # (k, n) rows of Q of ``into``
    """Positions ``out`` leave the margin set, and ``into`` enter it; R follows. Coefficients are left to the caller.

    Returns the positions, of those that entered or were there, which lie in the span of the others: they are not margin vectors.
    """
    left = len(m) - len(out)
    update = left > 0 and m.residual <= DRIFT and LEAVE * len(out) + ENTER * len(into) < left + len(into)
    if out:
        slots = _tensor(m, [m.slot[i] for i in out])
        update = update and svm_block.shrink_(m.Rk, slots)
        vacate(m, out, slots)
    if into:
        slots = _tensor(m, occupy(m, into, rows))
    if not update:
        return anew(m, into)
    if not into:
        return []
    H = m.Ak[:, slots]
    Q = H[slots]
    H[slots] = 0.0
    V, Gamma, size = svm_block.schur(m.Rk, H, Q)
    kept, L = svm_block.independent(Gamma, SPAN * size)
    if len(kept) < len(into):
        rejected = _others(into, kept)
        vacate(m, rejected, _tensor(m, [m.slot[i] for i in rejected]))
        slots, V = slots[kept], V[: m.top, kept]
    else:
        rejected = []
    if len(kept):
        svm_block.grow_(m.Rk, V, L, slots)
    return rejected


def anew(m: Margin, late: list[int]) -> list[int]:
    """R from A. Returns the positions that lie in the span of the others, of those in ``late`` first; they have left."""
    last = set(late)
    order = sorted(m.slot, key=lambda i: i in last)
    if not order:
        m.R.zero_()
        return []
    slots = _tensor(m, [m.slot[i] for i in order])
    first = int(m.Ak.diagonal()[slots[: len(order) - len(last)] if len(last) < len(order) else slots].argmin())
    order.insert(0, order.pop(first))
    slots = _tensor(m, [m.slot[i] for i in order])
    A = m.Ak[slots]
    kept, R = svm_block.inverse(A[:, slots], A[:, 0], SPAN)
    rejected = _others(order, kept)
    if rejected:
        vacate(m, rejected, _tensor(m, [m.slot[i] for i in rejected]))
    used = torch.cat([torch.zeros_like(slots[:1]), slots[kept]])
    m.R.zero_()
    m.R[used[:, None], used] = R
    m.residual = 0.0  # to be measured by the caller
    return rejected


def occupy(m: Margin, positions: list[int], rows: Tensor) -> list[int]:  # (k, n) -> slots
    """A slot for each, with its row of Q and of A; R is not touched. alpha is 0."""
    s = m.samples
    slots = []
    for i in positions:
        slot = heapq.heappop(m.free) if m.free else m.top
        if slot == m.top:
            m.position.append(i)
        m.position[slot], m.slot[i] = i, slot
        slots.append(slot)
    size = m.slots
    while size < m.top:
        size *= 2
    if size > m.slots:
        m._allocate(size)
    m._set_top()
    at, where = _tensor(m, positions), _tensor(m, slots)
    m.at[where], m.used[where], m.a[where] = at, 1.0, 0.0
    m.lower[where], m.upper[where] = 0.0, s.u[at]
    m.QS[where, : s.n] = rows
    border = rows[:, m.at[: m.top]] * m.used[: m.top]
    border[:, 0] = s.y[at]
    m.A[where, : m.top] = border
    m.A[: m.top, where] = border.T
    return slots


def vacate(m: Margin, positions: list[int], slots: Tensor) -> None:
    """Their slots are free again, their rows of Q kept in the cache; R is not touched."""
    s = m.samples
    for i in positions:
        slot = m.slot.pop(i)
        if i not in s.rows:
            s.rows.put(i, m.hQS[slot, : s.n], s.n)
        m.position[slot] = -1
        m.free.append(slot)
    m.A[slots], m.A[:, slots] = 0.0, 0.0
    m.at[slots] = 0
    m.used[slots], m.a[slots], m.rise[slots] = 0.0, 0.0, 0.0
    m.lower[slots], m.upper[slots] = -ENDLESS, ENDLESS
    while m.top > 1 and m.position[-1] < 0:
        m.position.pop()
    m.free = [slot for slot in m.free if slot < m.top]
    heapq.heapify(m.free)
    m._set_top()


def _others(positions: list[int], kept: Tensor) -> list[int]:
    if len(kept) == len(positions):
        return []
    chosen = set(kept.tolist())
    return [i for k, i in enumerate(positions) if k not in chosen]


def _tensor(m: Margin, values: list[int]) -> Tensor:
    return torch.tensor(values, dtype=torch.int64, device=m.device)
