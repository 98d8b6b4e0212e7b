"""Leave-one-out, span rule and k-fold against brute-force retraining."""

import warnings

import numpy as np
import pytest
import torch
from sklearn.datasets import load_digits

from tests.svm.test_machine import blobs
from tests.svm.truth import exact, rbf
from torchlssvm import IncrementalSVM
from torchlssvm.kernels import RBF, Linear, Polynomial
from torchlssvm.svm import leave_one_out


def brute_force(x, y, gamma, C):
    """g_c of each sample by the dense solution without it."""
    x, sign = x.numpy(), 2.0 * y.numpy() - 1
    K = rbf(x, x, gamma)
    out = []
    for c in range(len(x)):
        keep = np.arange(len(x)) != c
        alpha, b = exact(K[np.ix_(keep, keep)], sign[keep], np.full(len(x) - 1, C))
        out.append(sign[c] * (K[c, keep] @ (alpha * sign[keep]) + b) - 1)
    return torch.tensor(out, dtype=torch.float64)


@pytest.mark.parametrize("C", [0.5, 10.0])
def test_leave_one_out_is_retraining_without_each(C, monkeypatch):
    x, y = blobs(60, d=4)
    svm = IncrementalSVM(RBF(sigma=1.0), C=C).fit(x, y)
    before = svm.alpha
    want = brute_force(x, y, 0.5, C)
    for batched in (True, False):
        if not batched:
            monkeypatch.setattr(
                leave_one_out.Tableau, "margins", lambda _, samples: np.full(len(samples), np.nan)
            )  # all are left to the solver
        found = svm.leave_one_out()
        torch.testing.assert_close(found.margin, want, rtol=0, atol=1e-9)
        assert torch.equal(found.error, want < -1)
        assert found.rate == float((want < -1).double().mean()) > 0
        early = svm.leave_one_out(early_exit=True)
        assert torch.equal(early.error, found.error)
        right = ~found.error
        torch.testing.assert_close(early.margin[right], want[right], rtol=0, atol=1e-9)
        assert bool((early.margin[~right] >= found.margin[~right] - 1e-9).all())
    torch.testing.assert_close(svm.alpha, before, rtol=0, atol=1e-12)
    assert svm.kkt_violation() < 1e-12


def test_leave_one_out_on_digits():
    x, y = load_digits(return_X_y=True)
    x, y = torch.from_numpy(x[:400] / 16), torch.from_numpy(y[:400] % 2)
    svm = IncrementalSVM(RBF(gamma=0.1), C=10.0).fit(x, y)
    found = svm.leave_one_out()
    some = torch.cat([svm.margin[::15], svm.error[:5], svm.reserve[:3]])
    for c in some.tolist():
        keep = torch.arange(400) != c
        rest = IncrementalSVM(RBF(gamma=0.1), C=10.0).fit(x[keep], y[keep])
        g = (2.0 * float(y[c]) - 1) * float(rest.decision(x[c : c + 1])) - 1
        assert float(found.margin[c]) == pytest.approx(g, abs=1e-9)


@pytest.mark.parametrize("kind", ["duplicates", "linear", "tiny C", "grid"])
def test_leave_one_out_where_paths_are_degenerate(kind):
    x, y = blobs(30)
    kernel, C = RBF(sigma=1.0), 2.0
    if kind == "duplicates":
        x, y = x[:10].repeat(3, 1), y
    elif kind == "linear":
        kernel = Linear()
    elif kind == "tiny C":
        C, y = 1e-3, torch.arange(30) % 2
    else:
        side = torch.arange(5.0, dtype=torch.float64)
        x, y = torch.cartesian_prod(side, side), torch.arange(25) % 2
    svm = IncrementalSVM(kernel, C=C).fit(x, y)
    found = svm.leave_one_out()
    for c in range(len(x)):
        keep = torch.arange(len(x)) != c
        rest = IncrementalSVM(kernel, C=C).fit(x[keep], y[keep])
        sign = 2.0 * float(y[c]) - 1
        low, high = rest.b_interval  # where b is free, the path may end anywhere in its interval
        f = float(rest.decision(x[c : c + 1])) - rest.b
        ends = sorted(sign * (f + b) - 1 for b in (low, high))
        assert ends[0] - 1e-8 <= float(found.margin[c]) <= ends[1] + 1e-8
    assert svm.kkt_violation() < 1e-10


def test_gamma_is_the_squared_distance_of_equation_21():
    x, y = blobs(60, d=4)
    svm = IncrementalSVM(RBF(sigma=1.0), C=1.0).fit(x, y)
    gamma = svm.distance_to_span()
    K = torch.from_numpy(rbf(x.numpy(), x.numpy(), 0.5))
    sign = 2.0 * y.double() - 1
    for c in range(60):
        S = torch.tensor([i for i in svm.margin.tolist() if i != c])
        # min over w of |y_c phi_c + sum_S w y phi|^2 with y_c + sum_S w y = 0
        A = torch.zeros(len(S) + 1, len(S) + 1, dtype=torch.float64)
        A[0, 1:] = A[1:, 0] = sign[S]
        A[1:, 1:] = K[S][:, S] * torch.outer(sign[S], sign[S])
        h = torch.cat([sign[c : c + 1], K[c, S] * sign[c] * sign[S]])
        want = K[c, c] - h @ torch.linalg.solve(A, h)
        assert float(gamma[c]) == pytest.approx(float(want), abs=1e-9)
    assert bool((gamma > 0).all())


def test_span_rule_is_exact_until_the_sets_change():
    x, y = blobs(60, d=4)
    svm = IncrementalSVM(RBF(sigma=1.0), C=1.0).fit(x, y)
    found, span, linear = (svm.leave_one_out(method) for method in ("exact", "span", "linear"))
    assert torch.equal(span.margin, linear.margin)
    # The first segment: take a little of alpha_c away, exactly, and extrapolate.
    c = int(svm.error[0])
    share = 1e-4
    alpha = float(svm.alpha[c])
    weight = torch.ones(60, dtype=torch.float64)
    weight[c] = 1 - share
    less = IncrementalSVM(RBF(sigma=1.0), C=1.0)
    less.add(x, y, weight)
    slope = float(less.g[c] - svm.g[c]) / (share * alpha)
    assert float(linear.margin[c]) == pytest.approx(float(svm.g[c]) + slope * alpha, abs=1e-6)
    # It never errs on the pessimistic side only by chance: it agrees for the reserve, and mostly elsewhere.
    R = svm.reserve
    torch.testing.assert_close(span.margin[R], found.margin[R], rtol=0, atol=1e-12)
    assert float((span.error == found.error).double().mean()) > 0.9


@pytest.mark.parametrize("folds", [3, "given"])
def test_k_fold_is_retraining_without_each_fold(folds):
    x, y = blobs(60, d=4)
    svm = IncrementalSVM(RBF(sigma=1.0), C=2.0)
    svm.add(x[:20], y[:20])
    gone = svm.add(x[:5] + 3, y[:5])
    svm.add(x[20:], y[20:])
    svm.remove(gone)
    before = svm.alpha
    fold = torch.arange(60) % 3 if folds == 3 else torch.randint(4, (60,), generator=torch.Generator().manual_seed(0))
    values, rate = svm.k_fold(3 if folds == 3 else fold)
    want = torch.zeros(60, dtype=torch.float64)
    for k in fold.unique():
        rest = IncrementalSVM(RBF(sigma=1.0), C=2.0).fit(x[fold != k], y[fold != k])
        want[fold == k] = rest.decision(x[fold == k])
    torch.testing.assert_close(values, want, rtol=0, atol=1e-9)
    assert rate == pytest.approx(float(((want > 0).long() != y).double().mean()))
    assert torch.equal(svm.alpha, before)


def test_k_fold_of_precomputed_values():
    x, y = blobs(40, d=3)
    K = torch.from_numpy(rbf(x.numpy(), x.numpy(), 0.5))
    plain = IncrementalSVM(RBF(sigma=1.0), C=2.0).fit(x, y)
    given = IncrementalSVM("precomputed", C=2.0).fit(K, y)
    torch.testing.assert_close(given.k_fold(4)[0], plain.k_fold(4)[0], rtol=0, atol=1e-9)
    torch.testing.assert_close(given.leave_one_out().margin, plain.leave_one_out().margin, rtol=0, atol=1e-9)


@pytest.mark.filterwarnings("ignore::torchlssvm.NumericalWarning")
def test_leave_one_out_of_kernel_values_beyond_single_precision(monkeypatch):
    rng = np.random.default_rng(0)
    x = rng.normal(size=(400, 4))
    y = (x[:, 0] + 0.4 * rng.normal(size=400) > 0).astype(int)
    x[[3, 50]] *= 1e8  # K up to 1e90
    svm = IncrementalSVM(Polynomial(6, gamma=0.25), C=0.1).fit(torch.from_numpy(x), torch.from_numpy(y))
    with warnings.catch_warnings():
        warnings.simplefilter("error", RuntimeWarning)
        found = svm.leave_one_out().margin
    monkeypatch.setattr(leave_one_out.Tableau, "margins", lambda _, samples: np.full(len(samples), np.nan))
    one_by_one = svm.leave_one_out().margin
    torch.testing.assert_close(found, one_by_one, rtol=1e-6, atol=1e-6)
