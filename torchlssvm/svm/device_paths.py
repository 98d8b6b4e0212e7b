"""Copies of a machine that each unlearn some samples, on a device other than the CPU; all copies take each step together."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from torchlssvm.functional.svm_path import Machines, unlearn
from torchlssvm.svm.samples import Array
from torchlssvm.svm.solver import PathSolver

MAX_SAMPLES_WITH_WHOLE_KERNEL = 8192
"""Samples up to which their whole kernel matrix is kept on the device: 512 MiB."""
VALUES_OF_R_PER_BATCH = 2**26
"""Values of R of the machines that move together: 512 MiB."""


def used_for(solver: PathSolver) -> bool:
    """Tell whether the machines of this solver's samples move on the device."""
    return solver.rows.gram.device.type != "cpu" and 0 < solver.samples.n <= MAX_SAMPLES_WITH_WHOLE_KERNEL


def copies(solver: PathSolver, K: Tensor, M: int) -> Machines:  # (n, n)
    """Return M copies of the machine, samples in the order of ids."""
    s, margin, order = solver.samples, solver.margin, solver.samples.order()

    def repeated(values: Array) -> Tensor:
        return torch.from_numpy(np.ascontiguousarray(values)).to(K.device).expand(M, *values.shape).clone()

    m = Machines(K, repeated(s.y[order]), repeated(s.u[order]))
    m.alpha, m.side, m.b = repeated(s.alpha[order]), repeated(s.side[order]), repeated(np.array(margin.b))
    place = np.zeros(s.capacity, dtype=np.int64)
    place[order] = np.arange(len(order))
    at = place[margin.positions()]
    m.at, m.used = repeated(np.append(at, 0)), repeated(np.append(np.ones(len(at), dtype=bool), False))
    m.invert()
    m.compute_g()
    return m


def margins_without(solver: PathSolver, gone: Tensor) -> Tensor:  # (T, n) bool -> (T, n)
    """Return g of every sample by the machine that has unlearned the samples of each row; NaN where it is not certified."""
    rows, order = solver.rows, solver.samples.order()
    x = rows.x(order)
    K = x[:, torch.from_numpy(order).to(x.device)] if rows.kernel is None else rows.kernel.tiled(x, x).to(torch.float64)
    K = (K + K.T) * 0.5
    step = max(1, VALUES_OF_R_PER_BATCH // (len(solver.margin) + 64) ** 2)
    out = []
    for part in gone.split(step):
        m = unlearn(copies(solver, K, len(part)), part)
        out.append(torch.where(m.optimal()[:, None], m.g, torch.nan))
    return torch.cat(out)
