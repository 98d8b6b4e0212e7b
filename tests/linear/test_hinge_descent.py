"""The descent that a choice of rho compares, against the minimum by scipy."""

import numpy as np
import pytest
import torch
from scipy.optimize import minimize

from torchlssvm import MarginHead
from torchlssvm.linear.hinge_descent import HingeDescent

N, J, K, RHO = 300, 40, 3, 2.0


def lowest(rows, signs, intercept):
    """The lowest objective of one class."""
    wide = rows if intercept == "none" else np.hstack([rows, np.ones((N, 1))])
    ridge = np.full(wide.shape[1], RHO)
    ridge[J:] = 0.0 if intercept == "free" else RHO

    def phi(w):
        short = np.maximum(0.0, 1.0 - signs * (wide @ w))
        return ridge @ w**2 + short @ short, 2 * ridge * w - 2 * wide.T @ (signs * short)

    return minimize(phi, np.zeros(wide.shape[1]), jac=True, options={"gtol": 1e-9}).fun


@pytest.mark.parametrize("intercept", ["free", "penalized", "none"])
@pytest.mark.parametrize("scale", [None, "std"])
def test_the_objective_falls_to_the_minimum(intercept, scale):
    generator = torch.Generator().manual_seed(0)
    y = torch.randint(0, K, (N,), generator=generator)
    x = torch.randn(N, J, generator=generator) * torch.linspace(0.2, 3.0, J) + 0.7
    x += 0.4 * torch.randn(K, J, generator=generator)[y]
    head = MarginHead(J, K, rho=RHO, intercept=intercept, scale=scale).add(x, y)
    rows, labels = head.grid.snap(x).numpy(), y.numpy()
    if scale:
        rows = (rows - rows.mean(0)) / rows.std(0)
    least = [lowest(rows, np.where(labels == k, 1.0, -1.0), intercept) for k in range(K)]
    solver = head._solver
    signs = torch.stack([solver.signs(k) for k in range(K)], 1)
    weight = solver.row_weights()[:, None].expand_as(signs)
    problem = HingeDescent(solver, solver.rows.q, solver.scale, signs, weight)
    point, excess = problem.start(), []
    for _ in range(10):
        value = point.w[: solver.scale.width(J)].square().sum(0) + (1.0 - point.margins).clamp(min=0.0).square().sum(0)
        excess.append(value.numpy() / least - 1.0)
        problem.lower(point)
    assert (excess[0] > excess[1]).all()
    assert (excess[1] > excess[2]).all()
    assert (excess[-1] > -1e-9).all()
    assert (excess[-1] < np.minimum(0.05, excess[0] / 10)).all()
