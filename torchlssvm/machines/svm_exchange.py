"""Margin vectors that leave and enter in one block: the slots they are in, and R by the cheapest way."""

from __future__ import annotations

import heapq
from collections.abc import Iterable
from typing import Any

import numpy as np
import torch
from torch import Tensor

from torchlssvm.functional import svm_block
from torchlssvm.machines.svm_margin import DEPENDENT, Margin
from torchlssvm.machines.svm_slots import ENDLESS, room

LEAVE, ENTER = 1, 2
"""What updating R takes for each margin vector that leaves, and that enters, where R anew takes s, their number then."""
STALE = 1e-10
"""A residual of R above this is no ground to build on: R is made anew."""
SPAN = 10 * DEPENDENT
"""A pivot below this share of its terms: a sample in the span of the margin vectors."""


def exchange(m: Margin, out: list[int], into: list[int], rows: Any) -> list[int]:  # (k, n) on the host
    """Positions ``out`` leave the margin set; ``into``, with these rows of Q, enter it; R follows. Their alpha is not set.

    Returns the positions that lie in the span of the others, of ``into`` if possible: they are no margin vectors.
    """
    left = len(m) - len(out)
    update = left > 0 and m.residual <= STALE and LEAVE * len(out) + ENTER * len(into) < left + len(into)
    if out:
        slots = slots_of(m, out)
        update = update and svm_block.shrink_(m.Rk, slots)
        if not update:
            m.Rk.zero_()
        vacate(m, out, m.host(slots))
    if into:
        occupy(m, into, rows)
    if not update:
        return anew(m, into)
    if not into:
        return []
    slots = slots_of(m, into)
    H = m.Ak.index_select(1, slots)
    Q = H.index_select(0, slots)
    H.index_fill_(0, slots, 0.0)
    V, Gamma, size = svm_block.schur(m.Rk, H, Q)
    kept, L = svm_block.independent(Gamma, SPAN * size)
    rejected = []
    if len(kept) < len(into):
        rejected = _others(into, kept)
        slots = slots[kept]
        vacate(m, rejected, m.host(slots_of(m, rejected)))
        V = V[: m.top, kept]
    if len(kept):
        svm_block.grow_(m.Rk, V, L, slots)
    return rejected


def anew(m: Margin, late: Iterable[int] = ()) -> list[int]:
    """R from A. Returns the positions that lie in the span of the others, of those in ``late`` if possible; they have left."""
    m.Rk.zero_()
    order = [i for i in m.position[1:] if i >= 0]
    if not order:
        return []
    kept, R = _inverse(m, order)
    rejected = []
    if len(kept) < len(order):  # a matter of their order
        last = set(late)
        order.sort(key=lambda i: i in last)
        kept, R = _inverse(m, order)
        rejected = _others(order, kept)
        used = slots_of(m, [order[k] for k in kept.tolist()])
        vacate(m, rejected, m.host(slots_of(m, rejected)))
    else:
        used = slots_of(m, order)
    if len(order) + 1 == m.top and not rejected:
        m.Rk.copy_(R)
    else:
        used = torch.cat([torch.zeros_like(used[:1]), used])
        used = m.host(used)
        m.hRk[used[:, None], used] = m.host(R)
    return rejected


def _inverse(m: Margin, order: list[int]) -> tuple[Tensor, Tensor]:  # -> (r,), (r + 1, r + 1)
    """Which of these, in this order, are independent, and R for them, in this order. They begin with a small Q_ii."""
    slots = slots_of(m, order)
    if len(order) + 1 == m.top and bool((slots[1:] > slots[:-1]).all()):
        Q, y = m.Ak[1:, 1:], m.Ak[1:, 0]
    else:
        A = m.Ak.index_select(0, slots)
        Q, y = A.index_select(1, slots), A[:, 0]
    diagonal = Q.diagonal()
    first = int(diagonal.argmin())
    if float(diagonal[0]) <= 2.0 * float(diagonal[first]):
        return svm_block.inverse(Q, y, SPAN)
    turn = torch.arange(len(order), device=m.device)  # 0 and ``first`` change places, and change back
    turn[0], turn[first] = first, 0
    kept, R = svm_block.inverse(Q[turn][:, turn], y[turn], SPAN)
    kept, back = turn[kept].sort()
    back = torch.cat([torch.zeros_like(back[:1]), back + 1])
    return kept, R[back][:, back]


def occupy(m: Margin, positions: list[int], rows: Any) -> None:  # (k, n) on the host
    """A slot for each, with its row of Q and of A; R is not touched. alpha is 0."""
    s = m.samples
    slots, spare = [], 0 if len(m) else len(positions) // 4  # what is begun now will grow
    for i in positions:
        slot = heapq.heappop(m.free) if m.free else m.top
        if slot == m.top:
            m.position.append(i)
        m.position[slot], m.slot[i] = i, slot
        slots.append(slot)
    if m.top + spare > m.slots:
        m._allocate(room(m.top + spare))
    m._set_top()
    at, where = m.host(indices(m, positions)), m.host(indices(m, slots))
    m.hat[where], m.hused[where], m.ha[where] = at, 1.0, 0.0
    m.hlower[where], m.hupper[where] = 0.0, s.hu[at]
    m.hQS[where, : s.n] = rows
    border = rows[:, m.hat] * m.hused
    border[:, 0] = s.hy[at]
    m.hAk[where] = border
    m.hAk[:, where] = border.T


def vacate(m: Margin, positions: list[int], slots: Any) -> None:  # slots on the host
    """Their slots are free again; R is not touched."""
    for i in positions:
        slot = m.slot.pop(i)
        m.position[slot] = -1
        m.free.append(slot)
    m.hAk[slots], m.hAk[:, slots] = 0.0, 0.0
    m.hat[slots] = 0
    m.hused[slots], m.ha[slots], m.hrise[slots] = 0.0, 0.0, 0.0
    m.hlower[slots], m.hupper[slots] = -ENDLESS, ENDLESS
    heapq.heapify(m.free)
    m.trim()


def slots_of(m: Margin, positions: list[int]) -> Tensor:  # -> (k,)
    """The slots of margin vectors."""
    return indices(m, [m.slot[i] for i in positions])


def _others(positions: list[int], kept: Tensor) -> list[int]:
    chosen = set(kept.tolist())
    return [i for k, i in enumerate(positions) if k not in chosen]


def indices(m: Margin, values: list[int]) -> Tensor:  # -> (k,)
    """Positions or slots as a tensor."""
    return torch.from_numpy(np.array(values, dtype=np.int64)).to(
        m.device
    )  # a list is read several times faster by NumPy
