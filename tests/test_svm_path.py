"""The steps of the incremental SVM against dense linear algebra."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from torchlssvm.functional import svm_path
from torchlssvm.functional.svm_smo import minimize


def problem(seed, n=12, d=3):
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(n, d, generator=generator, dtype=torch.float64)
    y = torch.where(torch.rand(n, generator=generator) < 0.5, -1.0, 1.0).double()
    Q = torch.exp(-0.5 * torch.cdist(x, x) ** 2) * torch.outer(y, y)
    return Q, y


def jacobian(Q, y, S):
    A = torch.zeros(len(S) + 1, len(S) + 1, dtype=torch.float64)
    A[0, 1:] = A[1:, 0] = y[S]
    A[1:, 1:] = Q[S][:, S]
    return A


@given(st.integers(0, 10_000))
def test_sensitivities_solve_equation_6(seed):
    Q, y = problem(seed)
    S, c = [0, 3, 4, 7], 9
    A, h = jacobian(Q, y, S), torch.cat([y[[c]], Q[S, c]])
    beta, _ = svm_path.sensitivities(torch.linalg.inv(A), A, h)
    torch.testing.assert_close(A @ beta, -h, rtol=0, atol=1e-12)


def test_refinement_outlives_a_drifted_inverse():
    Q, y = problem(1)
    A = jacobian(Q, y, [0, 3, 4, 7])
    R = torch.linalg.inv(A) * (1 + 1e-6)
    h = torch.ones(5, dtype=torch.float64)
    beta, residual = svm_path.sensitivities(R, A, h)
    assert float(residual.abs().max()) > 1e-7
    assert float((A @ beta + h).abs().max()) < 1e-11


@given(st.integers(0, 10_000))
def test_margin_sensitivities_are_the_rates_of_g(seed):
    Q, y = problem(seed)
    S, c, t = [0, 3, 4, 7], 9, 1e-3
    A, h = jacobian(Q, y, S), torch.cat([y[[c]], Q[S, c]])
    beta, _ = svm_path.sensitivities(torch.linalg.inv(A), A, h)
    gamma = svm_path.margin_sensitivities(torch.cat([y[:, None], Q[:, S]], 1), beta, Q[c])
    step = torch.zeros(12, dtype=torch.float64)
    step[S], step[c] = t * beta[1:], t
    torch.testing.assert_close(t * gamma, Q @ step + y * t * beta[0], rtol=0, atol=1e-14)
    assert float(gamma[S].abs().max()) < 1e-11  # (12): 0 on S
    assert abs(float(y @ step)) < 1e-13  # (5)


@given(st.integers(0, 10_000))
def test_growing_and_shrinking_give_the_inverse(seed):
    Q, y = problem(seed)
    S = [0, 3, 4, 7]
    R = torch.zeros(7, 7, dtype=torch.float64)  # slots 5 and 6 are free
    R[:5, :5] = torch.linalg.inv(jacobian(Q, y, S))
    start = R.clone()
    h = torch.zeros(7, dtype=torch.float64)
    h[:5] = torch.cat([y[[9]], Q[S, 9]])
    beta = -(R @ h)
    gamma = float(Q[9, 9] + h @ beta)
    beta[5] = 1.0
    svm_path.grow_(R, beta, gamma)
    want = torch.linalg.inv(jacobian(Q, y, [*S, 9]))
    torch.testing.assert_close(R[:6, :6], want, rtol=1e-7, atol=1e-7)
    assert not R[6].any()
    assert not R[:, 6].any()
    svm_path.shrink_(R, 5)
    torch.testing.assert_close(R, start, rtol=1e-7, atol=1e-7)
    svm_path.shrink_(R, 2)
    keep = [0, 1, 3, 4]
    torch.testing.assert_close(R[keep][:, keep], torch.linalg.inv(jacobian(Q, y, [0, 4, 7])), rtol=1e-7, atol=1e-7)


@given(st.integers(0, 10_000))
def test_carried_sensitivities_are_those_of_the_new_inverse(seed):
    Q, y = problem(seed)
    S, c, i = [0, 3, 4, 7], 9, 10
    A, h = jacobian(Q, y, S), torch.cat([y[[c]], Q[S, c]])
    R = torch.linalg.inv(A)
    beta = -(R @ h)
    v = -(R @ torch.cat([y[[i]], Q[S, i]]))
    gamma = float(Q[i, i] + torch.cat([y[[i]], Q[S, i]]) @ v)
    rate = float(Q[i, c] + torch.cat([y[[i]], Q[i, S]]) @ beta)
    v, wide = torch.cat([v, torch.ones(1).double()]), torch.cat([beta, torch.zeros(1).double()])
    T = [*S, i]
    want = -torch.linalg.solve(jacobian(Q, y, T), torch.cat([y[[c]], Q[T, c]]))
    torch.testing.assert_close(svm_path.after_growth(wide, v, rate, gamma), want, rtol=1e-7, atol=1e-9)
    shrunk = svm_path.after_shrinkage(beta, R[2], 2)
    rest = [0, 4, 7]
    want = -torch.linalg.solve(jacobian(Q, y, rest), torch.cat([y[[c]], Q[rest, c]]))
    torch.testing.assert_close(shrunk[[0, 1, 3, 4]], want, rtol=1e-7, atol=1e-9)
    assert abs(float(shrunk[2])) < 1e-9


@pytest.mark.parametrize("kind", ["tensor", "array"])
def test_steps(kind):
    def make(*values):
        return torch.tensor(values).double() if kind == "tensor" else np.array(values)

    inf = float("inf")
    a, beta = make(0.3, 0.5, 1.0, 0.0), make(2.0, -0.25, 4.0, 0.0)
    t = svm_path.coefficient_steps(a, beta, make(-inf, 0, 0, -inf), make(inf, 3, 3, inf))
    assert t.tolist() == [inf, 2.0, 0.5, inf]
    t = svm_path.coefficient_steps(a, beta, make(-inf, 0, 0, -inf), make(inf, 3, 3, inf), make(0, -1.5, 0, 0))
    assert t.tolist() == [inf, 2.0, 0.5, inf]  # (3 - .5) / (-.25 + 1.5) = 2, and .5 / .25 = 2
    rate, quotient = svm_path.margin_rates(make(1.0, 2.0, inf, 0.0), make(-0.5, 4.0, -9.0, -1.0), make(1, -1, 0, 1))
    assert rate.tolist() == [-0.5, -4.0, 0.0, -1.0]
    assert quotient[:3].tolist() == [-0.5, -2.0, 0.0]
    assert float(quotient[3]) < -1e100  # no step at all


@given(st.integers(0, 10_000))
def test_distance_to_span_is_a_least_squares_residual(seed):
    """(20), (21): min |X_c + sum X_j beta_j|^2 under sum y_j beta_j = -y_c, with explicit features."""
    generator = torch.Generator().manual_seed(seed)
    phi = torch.randn(6, 9, generator=generator, dtype=torch.float64)
    y = torch.where(torch.rand(6, generator=generator) < 0.5, -1.0, 1.0).double()
    X, S, c = phi * y[:, None], [0, 1, 2, 3], 5
    gamma = svm_path.distance_to_span(phi[c] @ phi[c], phi[c] @ phi[S].T, phi[S] @ phi[S].T, y[c], y[S])
    # Put beta_0 = -y_0 (y_c + sum_others y_j beta_j): an unconstrained problem in the other coefficients.
    base = X[c] - X[0] * y[0] * y[c]
    others = torch.stack([X[j] - X[0] * y[0] * y[j] for j in S[1:]], 1)
    best = torch.linalg.lstsq(others, -base[:, None]).solution[:, 0]
    torch.testing.assert_close(gamma, (base + others @ best).square().sum(), rtol=1e-8, atol=1e-9)


def test_b_interval():
    g, y = torch.tensor([0.5, 2.0, -1.0, -0.25]).double(), torch.tensor([1.0, -1.0, 1.0, -1.0]).double()
    low, high = svm_path.b_interval(g, y, torch.tensor([1.0, 1.0, -1.0, -1.0]).double())
    assert (float(low), float(high)) == (-0.25, 1.0)


@pytest.mark.parametrize("C", [1e-3, 1.0, 1e3])
@pytest.mark.parametrize("seed", range(3))
def test_two_at_a_time_come_near_the_optimum(seed, C):
    Q, y = problem(seed, n=40)
    K, u = (Q * torch.outer(y, y)).numpy(), np.full(40, C)
    labels = y.numpy()
    for close in (1e-2, 1e-9):
        alpha, b = minimize(labels, u, K.diagonal(), lambda i: K[i], np.zeros(40), labels, close)
        assert bool(((alpha >= 0) & (alpha <= u)).all())
        assert abs(labels @ alpha) < 1e-12 * C * 40
        g = Q.numpy() @ alpha + labels * b - 1
        wrong = np.where(alpha <= 0, np.maximum(-g, 0), np.where(alpha >= u, np.maximum(g, 0), abs(g)))
        assert wrong.max() <= close
    again, _ = minimize(labels, u, K.diagonal(), lambda i: K[i], alpha, labels - K @ (labels * alpha), 1e-2)
    np.testing.assert_array_equal(again, alpha)  # what is near stays where it is
    few, _ = minimize(labels, u, K.diagonal(), lambda i: K[i], np.zeros(40), labels, 1e-9, steps=2)
    assert (few > 0).sum() <= 4


def test_kkt_violation_sees_every_kind():
    alpha, y = torch.tensor([0.0, 0.5, 1.0]).double(), torch.tensor([1.0, -1.0, 1.0]).double()
    u, zero = torch.ones(3).double(), torch.zeros(3).double()
    base = float(svm_path.kkt_violation(alpha, zero, u, y))
    assert base == 0.5  # y^T alpha
    for at, value in ((0, -3.0), (1, 3.0), (1, -3.0), (2, 3.0)):
        g = zero.clone()
        g[at] = value
        assert float(svm_path.kkt_violation(alpha, g, u, y)) == 3.0
    assert float(svm_path.kkt_violation(torch.tensor([0.0, -2.0, 1.0]).double(), zero, u, y)) == 3.0
