"""The memory that machines state beforehand is that of their arrays, to a factor of two or three."""

from __future__ import annotations

import tracemalloc

import numpy as np
import pytest
import torch

from torchlssvm import IncrementalSVM, KernelLSSVM, LagrangianSVM, OneVsOne, OneVsRest
from torchlssvm.kernels import RBF, Linear


def data(n, J=4):
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(n, J, generator=generator, dtype=torch.float64)
    return x, (x[:, 0] + 0.3 * torch.randn(n, generator=generator) > 0).long()


@pytest.mark.parametrize(("kernel", "n"), [(RBF(sigma=1.0), 1500), (Linear(), 1500), (RBF(sigma=0.2), 1200)])
def test_a_fit_needs_what_was_planned(kernel, n):
    x, y = data(n)
    svm = IncrementalSVM(kernel, C=10.0)
    tracemalloc.start()  # arrays of NumPy; those of torch, in single precision, are few
    try:
        svm.fit(x, y, progress=False)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    planned = svm.planned_bytes(n, x.shape[1], margin=len(svm.margin))
    assert planned / 2 <= peak <= 2 * planned


@pytest.mark.parametrize("make", [KernelLSSVM, LagrangianSVM])
@pytest.mark.parametrize("n", [300, 1000])
def test_an_inverse_needs_what_was_planned(make, n):
    x, y = data(n)
    svm = make(RBF(sigma=1.0), C=10.0)
    svm.add(x, y)
    svm.compute_inverse()
    solver = svm._solver
    held = sum(t.untyped_storage().nbytes() for t in (solver.U, solver.h, solver.slots.x, solver.slots.columns))
    planned = svm.planned_bytes(n, x.shape[1])
    assert held <= planned <= 3 * held


@pytest.mark.parametrize(("form", "machines"), [(OneVsRest, 4), (OneVsOne, 6)])
def test_several_machines_are_planned_together(form, machines):
    empty = IncrementalSVM(RBF(sigma=1.0))
    many = form(empty, 4)
    one = empty.planned_bytes(1000 if form is OneVsRest else 500, 8)
    assert many.planned_bytes(1000, 8) == 8 * 1000 * 8 + machines * one
    assert np.diff([many.planned_bytes(n, 8) for n in (100, 1000, 10_000)]).min() > 0
