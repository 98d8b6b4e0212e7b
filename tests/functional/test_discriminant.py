"""The discriminant from sums, against scikit-learn's and against training without each sample."""

import pytest
import torch

from torchlssvm.functional.discriminant import discriminant, leave_group_out, leave_one_out, within_class

sklearn_lda = pytest.importorskip("sklearn.discriminant_analysis", reason="scikit-learn is not installed")


def problem(n, J, K, seed=0):
    """Samples of K classes of unequal size, not centred."""
    gen = torch.Generator().manual_seed(seed)
    y = torch.cat([torch.arange(K).repeat(2), (torch.rand(n - 2 * K, generator=gen) ** 2 * K).long()])
    means = torch.randn(K, J, generator=gen, dtype=torch.float64)
    mix = torch.randn(J, J, generator=gen, dtype=torch.float64)
    return torch.randn(n, J, generator=gen, dtype=torch.float64) @ mix + 3 * means[y] + 5, y


def sums(x, y, K, balanced=False):
    """Least-squares weights by a dense solve, and the sums that the discriminant takes beside them."""
    hot = torch.nn.functional.one_hot(y, K).double()
    means = (hot.T @ x) / hot.sum(0).clamp(min=1)[:, None]
    d = (1 / hot.sum(0))[y] if balanced else torch.ones(len(y), dtype=torch.float64)
    counts, m = d @ hot, d @ x / d.sum()
    xc = x - m

    def weights(rho):
        A = (xc.T * d) @ xc + rho * torch.eye(x.shape[1], dtype=torch.float64)
        return torch.linalg.solve(A, (xc.T * d) @ (2 * hot - 1))

    S = ((x - means[y]).T * d) @ (x - means[y])
    return weights, means, m, counts, S.trace(), S


@pytest.mark.parametrize("shape", [(200, 8, 3), (300, 5, 40), (60, 30, 4), (90, 12, 2)])
@pytest.mark.parametrize("shrinkage", [1e-4, 0.1, 0.9])
@pytest.mark.parametrize("balanced", [False, True])
def test_discriminant_equals_scikit_learn(shape, shrinkage, balanced):
    n, J, K = shape
    x, y = problem(n, J, K)
    weights, means, m, counts, trace, S = sums(x, y, K, balanced)
    rho = float(shrinkage / (1 - shrinkage) * S.diagonal().sum() / J)
    w, b = discriminant(weights(rho), means - m, m, counts, trace, rho)
    priors = [1 / K] * K if balanced else None
    theirs = sklearn_lda.LinearDiscriminantAnalysis(solver="lsqr", shrinkage=shrinkage, priors=priors)
    theirs.fit(x.numpy(), y.numpy())
    ours = torch.softmax(x @ w + b, 1)
    torch.testing.assert_close(ours, torch.from_numpy(theirs.predict_proba(x.numpy())), rtol=1e-7, atol=1e-8)


def test_a_class_without_samples_is_never_predicted():
    x, y = problem(100, 6, 3)
    weights, means, m, counts, trace, _ = sums(x, y + (y > 0).long(), 4)
    w, b = discriminant(weights(2.0), means - m, m, counts, trace, 2.0)
    scores = x @ w + b
    assert (scores[:, 1] < -1e29).all()
    assert scores[:, [0, 2, 3]].isfinite().all()


def without(x, y, K, keep, rho, weight=None):
    """The discriminant of the samples kept, repeated by weight."""
    rows = torch.arange(len(x))[keep] if weight is None else torch.arange(len(x))[keep].repeat_interleave(weight[keep])
    weights, means, m, counts, trace, _ = sums(x[rows], y[rows], K)
    return discriminant(weights(rho), means - m, m, counts, trace, rho)


@pytest.mark.parametrize("shape", [(40, 6, 3), (50, 70, 5)])
def test_leave_one_out_equals_training_without_each_sample(shape):
    n, J, K = shape
    x, y = problem(n, J, K, seed=3)
    weight = 1 + torch.arange(n) % 3
    rows = torch.arange(n).repeat_interleave(weight)
    _, means, _, counts, _, S = sums(x[rows], y[rows], K)
    ours = torch.softmax(leave_one_out(within_class(S, means, counts, 4.0), x, y, weight.double())[0], 1)
    for i in range(0, n, 7):
        w, b = without(x, y, K, torch.arange(n) != i, 4.0, weight)
        torch.testing.assert_close(ours[i], torch.softmax(x[i] @ w + b, 0), rtol=1e-7, atol=1e-9)


def test_leave_group_out_equals_training_without_the_group():
    n, J, K = 60, 8, 4
    x, y = problem(n, J, K, seed=3)
    y[y == 3] = 2
    y[:2] = 3  # a class that goes with its group
    _, means, _, counts, _, S = sums(x, y, K)
    system = within_class(S, means, counts, 4.0)
    for group in (torch.arange(1), torch.arange(5, 20), torch.arange(7)):
        scores = leave_group_out(system, x[group], y[group], torch.ones(len(group)).double())[0]
        keep = ~torch.isin(torch.arange(n), group)
        w, b = without(x, y, K, keep, 4.0)
        left = y[keep].unique()
        expected = torch.softmax((x[group] @ w + b)[:, left], 1)
        torch.testing.assert_close(torch.softmax(scores[:, left], 1), expected, rtol=1e-7, atol=1e-9)
        assert scores.isfinite().all()


def test_leave_one_out_of_the_only_sample_of_a_class():
    x, y = problem(40, 6, 3)
    x, y = torch.cat([x, x[:1] + 1]), torch.cat([y, torch.tensor([3])])
    _, means, _, counts, _, S = sums(x, y, 4)
    scores = leave_one_out(within_class(S, means, counts, 1.0), x, y, torch.ones(len(x)).double())[0]
    assert scores.isfinite().all()
    assert scores[-1, 3] < scores[-1, :3].min()
