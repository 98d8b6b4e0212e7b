"""LPSVM and wLPSVM: the head against the printed equations of Zhu et al., transcribed letter by letter.

The paper's plane is x^T w - b, ours x^T w + b: its b is minus ours. C there is 1 / rho here. Its equation (29) has l_+ and l_-
exchanged against (17); only with (17) is the incremental result that of the batch, which is what the paper claims.
"""

import numpy as np
import pytest
import torch

from torchlssvm import FixedPoint, LSSVMHead

GRID = FixedPoint(8.0)
SETS = {"balanced": (40, 40), "one to nine": (9, 81), "tiny": (2, 3), "more features than samples": (3, 4)}


def samples(positive, negative, d=7, seed=0):
    """X (n, d) on the grid, Y (n,) in {-1, +1}, mixed."""
    generator = np.random.default_rng(seed)
    X = generator.normal(size=(positive + negative, d)) + 0.3
    Y = np.array([1.0] * positive + [-1.0] * negative)
    X[:positive, 0] += 1
    order = generator.permutation(len(Y))
    return GRID.snap(torch.from_numpy(X[order])).numpy(), Y[order]


def fitted(X, Y, C, **options):
    head = LSSVMHead(X.shape[1], 2, rho=1 / C, intercept="penalized", grid=GRID, **options)
    return head.add(torch.from_numpy(X), torch.from_numpy(Y > 0).long())


def O_of(head):
    """[w; b] of the positive class, in the paper's sign of b; both outputs of the head tell the same."""
    w, b = head.w, head.b
    torch.testing.assert_close(w[:, 0], -w[:, 1], rtol=1e-9, atol=1e-12)
    return np.append(w[:, 1].numpy(), -float(b[1]))


def assert_equal(O, expected):
    np.testing.assert_allclose(O, expected, rtol=0, atol=1e-10 * np.abs(expected).max())


# -- the paper -------------------------------------------------------------------------------------------------------------


def equation_11(X, Y, C):
    n, d = X.shape
    e, D = np.ones((n, 1)), np.diag(Y)
    left = np.block([[X.T @ X + np.eye(d) / C, -X.T @ e], [-e.T @ X, np.array([[n + 1 / C]])]])
    right = np.vstack([X.T @ D @ e, -e.T @ D @ e])
    return (np.linalg.inv(left) @ right)[:, 0]


def algorithm_1(X, Y, C):
    """Batch LPSVM: (12) and (13)."""
    n, d = X.shape
    identity, e = np.eye(d + 1), np.ones((n, 1))
    E = np.hstack([X, -e])
    D = np.diag(Y)
    M, v = identity / C + E.T @ E, E.T @ D @ e
    return (np.linalg.inv(M) @ v)[:, 0]


def equation_17(Y):
    plus, minus = (Y > 0).sum(), (Y < 0).sum()
    return minus / (plus + minus), plus / (plus + minus)


def algorithm_2(X, Y, C):
    """Batch wLPSVM: (16), (17), (18)."""
    sigma_plus, sigma_minus = equation_17(Y)
    N = np.diag(np.where(Y > 0, sigma_plus, sigma_minus))
    n, d = X.shape
    e = np.ones((n, 1))
    E, D = np.hstack([X, -e]), np.diag(Y)
    M, v = np.eye(d + 1) / C + E.T @ N @ E, E.T @ D @ N @ e
    return (np.linalg.inv(M) @ v)[:, 0]


def cores(X, Y):
    """M_+, M_-, v_+, v_-, l_+, l_- of Proposition 1."""
    out = []
    for sign in (1, -1):
        E = np.hstack([X[sign == Y], -np.ones((int((sign == Y).sum()), 1))])
        out.append((E.T @ E, E.T @ np.ones(len(E)), len(E)))
    return [pair[i] for i in range(3) for pair in out]


def equation_21(M_plus, M_minus, v_plus, v_minus, sigma_plus, sigma_minus, C):
    M = np.eye(len(M_plus)) / C + sigma_plus * M_plus + sigma_minus * M_minus
    return np.linalg.inv(M) @ (sigma_plus * v_plus - sigma_minus * v_minus)


class Algorithm3:
    """Incremental wLPSVM: (28), (30), (33), (34), with the weights of (17)."""

    def __init__(self, C):
        self.C, self.model = C, None

    def learn(self, X_a, Y_a, X_r, Y_r):
        added, retired = cores(X_a, Y_a), cores(X_r, Y_r)
        self.model = (
            added if self.model is None else [m - r + a for m, r, a in zip(self.model, retired, added, strict=True)]
        )
        l_plus, l_minus = self.model[4:]
        sigma_plus, sigma_minus = l_minus / (l_plus + l_minus), l_plus / (l_plus + l_minus)
        return equation_21(*self.model[:4], sigma_plus, sigma_minus, self.C)


# -- the head --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("C", [0.01, 1.0, 100.0])
@pytest.mark.parametrize("name", SETS)
def test_batch_lpsvm(name, C):
    X, Y = samples(*SETS[name])
    O = O_of(fitted(X, Y, C))
    assert_equal(O, equation_11(X, Y, C))
    assert_equal(O, algorithm_1(X, Y, C))


@pytest.mark.parametrize("C", [0.01, 1.0, 100.0])
@pytest.mark.parametrize("name", SETS)
def test_batch_wlpsvm(name, C):
    X, Y = samples(*SETS[name])
    O = O_of(fitted(X, Y, C, class_weight="complement"))
    assert_equal(O, algorithm_2(X, Y, C))
    M_plus, M_minus, v_plus, v_minus, *_ = cores(X, Y)
    assert_equal(O, equation_21(M_plus, M_minus, v_plus, v_minus, *equation_17(Y), C))


@pytest.mark.parametrize("seed", range(3))
def test_incremental_wlpsvm_with_weights_of_the_moment(seed):
    """The ratio of the classes drifts, as in figure 1; every step equals (28) and the batch on what is left."""
    C, window = 2.0, 3
    steps = [
        samples(p, n, seed=seed * 10 + i)
        for i, (p, n) in enumerate([(20, 20), (4, 40), (30, 6), (1, 50), (25, 25), (2, 9)])
    ]
    none = (np.zeros((0, 7)), np.zeros(0))
    paper, head = Algorithm3(C), LSSVMHead(7, 2, rho=1 / C, intercept="penalized", class_weight="complement", grid=GRID)
    for i, (X_a, Y_a) in enumerate(steps):
        X_r, Y_r = steps[i - window] if i >= window else none
        expected = paper.learn(X_a, Y_a, X_r, Y_r)
        tensors = [(torch.from_numpy(x), torch.from_numpy(y > 0).long()) for x, y in ((X_a, Y_a), (X_r, Y_r))]
        O = O_of(head.update(add=tensors[0], remove=tensors[1]))
        assert_equal(O, expected)
        held = steps[max(0, i - window + 1) : i + 1]
        assert_equal(O, algorithm_2(np.vstack([x for x, _ in held]), np.concatenate([y for _, y in held]), C))


def test_weights_as_equation_29_prints_them_are_not_the_batch():
    X, Y = samples(9, 81)
    M_plus, M_minus, v_plus, v_minus, l_plus, l_minus = cores(X, Y)
    printed = equation_21(
        M_plus, M_minus, v_plus, v_minus, l_plus / (l_plus + l_minus), l_minus / (l_plus + l_minus), 1.0
    )
    batch = algorithm_2(X, Y, 1.0)
    assert np.abs(printed - batch).max() > 0.1 * np.abs(batch).max()
    assert_equal(O_of(fitted(X, Y, 1.0, class_weight="complement")), batch)


@pytest.mark.parametrize("option", ["complement", "balanced", "given"])
def test_more_than_two_classes_share_one_matrix(option):
    """A = rho I + sum_k sigma_k M_k, weights by the true class, each class against the others on the right."""
    generator = np.random.default_rng(3)
    counts, d, rho = [50, 8, 21, 1], 5, 0.3
    y = np.repeat(np.arange(4), counts)
    X = GRID.snap(torch.from_numpy(generator.normal(size=(80, d)) + y[:, None] / 4)).numpy()
    given = torch.tensor([0.5, 3.0, 1.0, 7.0])
    n = len(y)
    sigma = {
        "complement": [(n - c) / n for c in counts],
        "balanced": [n / (4 * c) for c in counts],
        "given": given.tolist(),
    }[option]
    A, right = rho * np.eye(d + 1), np.zeros((d + 1, 4))
    for k in range(4):
        E = np.hstack([X[y == k], np.ones((counts[k], 1))])
        A += sigma[k] * E.T @ E
        right += sigma[k] * np.outer(E.T @ np.ones(counts[k]), [1.0 if j == k else -1.0 for j in range(4)])
    O = np.linalg.solve(A, right)
    head = LSSVMHead(
        d, 4, rho=rho, intercept="penalized", grid=GRID, class_weight=given if option == "given" else option
    )
    head.add(torch.from_numpy(X), torch.from_numpy(y))
    assert_equal(head.w.numpy(), O[:-1])
    assert_equal(head.b.numpy(), O[-1])
    P = rho * np.linalg.inv(A)
    np.testing.assert_allclose(head.P.numpy(), P, atol=1e-12)


def test_weights_change_at_any_time_without_data():
    X, Y = samples(9, 81)
    x, y = torch.from_numpy(X), torch.from_numpy(Y > 0).long()
    head = LSSVMHead(7, 2, intercept="penalized", grid=GRID, per_class=True, rho=1.0).add(x, y)
    digest = head.digest()
    for weight in ("complement", torch.tensor([0.1, 5.0]), "balanced", None, [3.0, 1.0]):
        head.class_weight = weight
        fresh = LSSVMHead(7, 2, intercept="penalized", grid=GRID, per_class=True, class_weight=weight, rho=1.0).add(
            x, y
        )
        assert torch.equal(head.w, fresh.w)
        assert torch.equal(head.b, fresh.b)
        head.remove(x[:5], y[:5])
        assert torch.allclose(head.w, fresh.remove(x[:5], y[:5]).w, rtol=1e-10, atol=1e-13)
        head.add(x[:5], y[:5])
    assert head.digest() == digest


def test_one_class_alone_and_then_two():
    X, Y = samples(5, 5)
    x, y = torch.from_numpy(X), torch.from_numpy(Y > 0).long()
    head = LSSVMHead(7, 2, intercept="penalized", class_weight="complement", grid=GRID, rho=1.0).add(
        x[y == 0], y[y == 0]
    )
    assert bool((head.predict(x[y == 0]) == 0).all())  # (17) would weigh it by zero: nothing is rare then
    head.add(x[y == 1], y[y == 1])
    assert_equal(O_of(head), algorithm_2(X, Y, 1.0))
