"""Paths of a machine, and of copies of it, on a device other than the CPU, by :mod:`~torchlssvm.functional.svm_path`."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from torchlssvm.functional.svm_path import Machines, follow, unlearn
from torchlssvm.svm.kernel_rows import KernelRows
from torchlssvm.svm.margin_set import MarginSet
from torchlssvm.svm.samples import Array


def used_for(rows: KernelRows) -> bool:
    """Tell whether machines with these kernel rows move on the device."""
    gram = rows.gram
    return gram.device.type != "cpu" and 0 < gram.capacity <= 8192  # the whole kernel matrix on the device: 512 MiB


def copies(rows: KernelRows, margin: MarginSet, M: int) -> Machines:
    """Return M copies of the machine. Samples are in their places in ``rows.gram``."""
    s, gram = rows.samples, rows.gram
    held = np.flatnonzero(s.ids >= 0)
    margin.write_alpha()
    vectors = np.zeros((4, gram.capacity))
    vectors[:, rows.in_gram(held)] = s.y[held], s.u[held], s.alpha[held], s.side[held]
    slots = np.append(rows.in_gram(margin.positions()), 0)  # and a free one
    y, u, alpha, side = torch.from_numpy(vectors).to(gram.device, non_blocking=True).repeat(1, M, 1).view(4, M, -1)
    m = Machines(gram.whole(), y, u)
    m.alpha, m.side, m.b = alpha, side, torch.full_like(m.b, margin.b)
    m.at = torch.from_numpy(slots).to(gram.device, non_blocking=True).repeat(M, 1)
    m.used = torch.arange(len(slots), device=gram.device).repeat(M, 1) < len(slots) - 1
    m.invert()
    m.compute_g()
    return m


def follow_on_device(rows: KernelRows, margin: MarginSet, d: Array) -> int:  # (capacity,)
    """Move coefficients outside S at rates d while p goes from 0 to 1, as :class:`~torchlssvm.svm.path.Path` does on the host.

    Returns the number of steps, or 0 if the path cannot be followed. ``rest`` is computed from the kernel.
    """
    s = rows.samples
    held = np.flatnonzero(s.ids >= 0)
    at, rates = rows.in_gram(held), np.zeros((1, rows.gram.capacity))
    rates[0, at] = d[held]
    m = copies(rows, margin, 1)
    steps = follow(m, torch.from_numpy(rates).to(m.K.device, non_blocking=True))
    member = m.from_slots(m.used.to(m.y.dtype))
    b = torch.where(m.failed, torch.nan, m.b)
    found = torch.cat([m.alpha, m.side, member, m.Q(m.alpha * (1.0 - member)), b.expand_as(m.y)]).cpu().numpy()
    if not np.isfinite(found).all():
        return 0
    s.alpha[held], s.side[held], inside, s.rest[held], _ = found[:, at]
    old = margin.positions()
    new = held[inside > 0]
    out, into = old[~np.isin(old, new)], new[~np.isin(new, old)]
    rejected = margin.exchange(out, into, rows.rows_of(into)) if len(out) or len(into) else into
    slots = margin.slots()
    margin.a[slots], margin.a[0] = s.alpha[margin.at[slots]], found[4, 0]
    s.rounding[:] = 0.0
    if len(rejected):  # dependent to rounding
        return 0
    return steps


def margins_without(rows: KernelRows, margin: MarginSet, gone: Array) -> Array:  # (T, capacity) bool -> (T, capacity)
    """Return g of every sample by the machine without the samples of each row; NaN if the result is not certified."""
    gram, held = rows.gram, np.flatnonzero(rows.samples.ids >= 0)
    placed = np.zeros((len(gone), gram.capacity), dtype=bool)
    placed[:, rows.in_gram(held)] = gone[:, held]
    step = max(1, 2**26 // (len(margin) + 64) ** 2)  # machines that move together, with R of all of them in 512 MiB
    out = np.full(gone.shape, np.nan)
    for first in range(0, len(gone), step):
        part = torch.from_numpy(placed[first : first + step]).to(gram.device)
        m = unlearn(copies(rows, margin, len(part)), part)
        g: Tensor = torch.where(m.optimal()[:, None], m.g, torch.nan)
        out[first : first + step, held] = g.cpu().numpy()[:, rows.in_gram(held)]
    return out
