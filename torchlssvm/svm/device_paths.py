"""Paths of a machine, and of copies of it, on a device other than the CPU, by :mod:`~torchlssvm.functional.svm_path`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from torchlssvm.functional.svm_path import Machines, follow, learn, unlearn
from torchlssvm.svm.kernel_rows import KernelRows
from torchlssvm.svm.margin_set import MarginSet
from torchlssvm.svm.samples import NO_POSITIONS, Array, Batch


def used_for(rows: KernelRows) -> bool:
    """Return True if machines with these kernel rows move on the device."""
    gram = rows.gram
    return gram.device.type != "cpu" and 0 < gram.capacity <= 8192  # the whole kernel matrix on the device: 512 MiB


class Change(NamedTuple):
    """Samples that a machine learns, with their places in ``gram`` as x, and positions (k,) of samples that it unlearns."""

    rows: KernelRows
    margin: MarginSet
    new: Batch | None = None
    leaving: Array = NO_POSITIONS


class Walk(NamedTuple):
    """A path that was followed, by sample in ``gram``: alpha, side, 1 in S, rest, b and the rates (6, capacity)."""

    steps: int
    found: Array


def machines_of(changes: Sequence[Change], M: int = 1) -> Machines:
    """Return M copies of each machine, with new samples outside S and leaving ones free of bounds. All share one ``gram``."""
    gram = changes[0].rows.gram
    vectors, b = np.zeros((4, len(changes), gram.capacity)), np.zeros(len(changes))
    slots = np.full((len(changes), 1 + max(len(change.margin) for change in changes)), -1)  # with a free one
    for k, (rows, margin, batch, leaving) in enumerate(changes):
        s = rows.samples
        held = np.flatnonzero(s.ids >= 0)
        margin.write_alpha()
        vectors[:, k, rows.in_gram(held)] = s.y[held], s.u[held], s.alpha[held], s.side[held]
        if batch is not None:
            vectors[:, k, batch.x] = batch.y, batch.u, np.zeros(len(batch.y)), np.ones(len(batch.y))
        vectors[1::2, k, rows.in_gram(leaving)] = 0.0
        inside = margin.positions()
        inside = rows.in_gram(inside[~np.isin(inside, leaving)])
        slots[k, : len(inside)], b[k] = inside, margin.b
    host = (torch.from_numpy(part) for part in (vectors, slots, b))
    numbers, at, given_b = (part.to(gram.device, non_blocking=True) for part in host)
    y, u, alpha, side = numbers.repeat(1, M, 1)
    m = Machines(gram.whole(), y, u)
    m.alpha, m.side, m.b, at = alpha, side, given_b.repeat(M), at.repeat(M, 1)
    m.at, m.used = at.clamp(min=0), at >= 0
    m.invert()
    m.compute_g()
    return m


def walk(m: Machines, rates: Tensor) -> list[Walk]:  # (M, capacity)
    """Follow the paths of all machines together."""
    steps = follow(m, rates)
    member = m.from_slots(m.used.to(m.y.dtype))
    b = torch.where(m.failed, torch.nan, m.b)[:, None].expand_as(m.y)
    found = torch.stack([m.alpha, m.side, member, m.Q(m.alpha * (1.0 - member)), b, rates], 1).cpu().numpy()
    return [Walk(steps, one) for one in found]


def walk_together(changes: Sequence[Change]) -> list[Walk]:
    """Follow the paths of changes to several machines together. A machine uses its path if it asks for the same rates."""
    m = machines_of(changes)
    new, gone = np.zeros((2, *m.y.shape), dtype=bool)
    for k, change in enumerate(changes):
        if change.new is not None:
            new[k, change.new.x] = True
        gone[k, change.rows.in_gram(change.leaving)] = True
    which = torch.from_numpy(np.stack([new, gone])).to(m.y.device, non_blocking=True)
    wrong = which[0] & (m.g < 0)
    m.side = torch.where(wrong, -1.0, m.side)
    return walk(m, torch.where(wrong, m.u, 0.0) - torch.where(which[1], m.alpha, 0.0))


def follow_on_device(rows: KernelRows, margin: MarginSet, d: Array, ahead: Walk | None = None) -> int:  # (capacity,)
    """Move coefficients outside S at rates d while p goes from 0 to 1, as :class:`~torchlssvm.svm.path.Path` does on the host.

    ahead: a path that was followed together with those of other machines. Returns the number of steps, or 0 if that fails.
    """
    s = rows.samples
    held = np.flatnonzero(s.ids >= 0)
    at, rates = rows.in_gram(held), np.zeros((1, rows.gram.capacity))
    rates[0, at] = d[held]
    if ahead is None or not np.array_equal(ahead.found[5], rates[0]):
        m = machines_of([Change(rows, margin)])
        ahead = walk(m, torch.from_numpy(rates).to(m.K.device, non_blocking=True))[0]
    found = ahead.found
    if not np.isfinite(found).all():
        return 0
    s.alpha[held], s.side[held], inside, s.rest[held] = found[:4, at]
    old = margin.positions()
    new = held[inside > 0]
    out, into = old[~np.isin(old, new)], new[~np.isin(new, old)]
    rejected = margin.exchange(out, into, rows.block(into)) if len(out) or len(into) else into
    slots = margin.slots()
    margin.a[slots], margin.a[0] = s.alpha[margin.at[slots]], found[4, 0]
    s.rounding[:] = 0.0
    if len(rejected):  # dependent to rounding
        return 0
    return ahead.steps


def margins_without(rows: KernelRows, margin: MarginSet, gone: Array) -> Array:  # (T, capacity) bool -> (T, capacity)
    """Return g of every sample by the machine without the samples of each row; NaN if the result is not certified."""
    gram, held = rows.gram, np.flatnonzero(rows.samples.ids >= 0)
    placed = np.zeros((len(gone), gram.capacity), dtype=bool)
    placed[:, rows.in_gram(held)] = gone[:, held]
    step = max(1, 2**26 // (len(margin) + 64) ** 2)  # machines that move together, with R of all of them in 512 MiB
    out = np.full(gone.shape, np.nan)
    for first in range(0, len(gone), step):
        part = torch.from_numpy(placed[first : first + step]).to(gram.device)
        m = unlearn(machines_of([Change(rows, margin)], len(part)), part)
        g: Tensor = torch.where(m.optimal()[:, None], m.g, torch.nan)
        out[first : first + step, held] = g.cpu().numpy()[:, rows.in_gram(held)]
    return out


def solutions(rows: KernelRows, u: Array) -> tuple[Array, Array]:  # (T, capacity) -> (T, capacity), (T,)
    """Return alpha and b for each row of upper bounds, found together; b is NaN if the solution is not certified."""
    held, labels = np.flatnonzero(rows.samples.ids >= 0), rows.samples.y
    at, given = rows.in_gram(held), np.zeros((2, len(u), rows.gram.capacity))
    given[0, :, at], given[1, :, at] = labels[held][:, None], u[:, held].T
    y, bounds = torch.from_numpy(given).to(rows.gram.device)
    m = learn(Machines(rows.gram.whole(), y, bounds))
    m.correct()
    b = torch.where(m.optimal(), m.b, torch.nan)
    found = torch.cat([m.alpha, b[:, None]], 1).cpu().numpy()
    alpha = np.zeros(u.shape)
    alpha[:, held] = found[:, at]
    return alpha, found[:, -1]
