"""The same answers as scikit-learn's ridge models, to 1e-8, and what the grid costs."""

import numpy as np
import pytest
import torch

from torchlssvm import CompactLSSVMHead, LSSVMHead

datasets = pytest.importorskip("sklearn.datasets")
linear_model = pytest.importorskip("sklearn.linear_model")

SETS = {"breast cancer": datasets.load_breast_cancer, "digits": datasets.load_digits, "wine": datasets.load_wine}


def load(name, standardised=True):
    x, y = SETS[name](return_X_y=True)
    if standardised:
        spread = x.std(0)
        x = (x - x.mean(0)) / np.where(spread > 0, spread, 1.0)
    return torch.from_numpy(x.astype(np.float64)), torch.from_numpy(y.astype(np.int64))


def close(ours, theirs):
    theirs = np.asarray(theirs)
    np.testing.assert_allclose(np.asarray(ours), theirs, rtol=0, atol=1e-8 * max(1.0, np.abs(theirs).max()))


def agree(head, model, x):
    """Scores and classes; two classes are one decision function there."""
    scores, decision = head(x).numpy(), model.decision_function(x.numpy())
    close(scores[:, 1] if decision.ndim == 1 else scores, decision)
    assert (head.predict(x).numpy() == model.predict(x.numpy())).all()


@pytest.mark.parametrize("standardised", [True, False], ids=["standardised", "raw"])
@pytest.mark.parametrize("name", SETS)
@pytest.mark.parametrize("form", ["statistics", "compact"])
def test_ridge_classifier(name, standardised, form):
    x, y = load(name, standardised)
    K = int(y.max()) + 1
    grid = LSSVMHead(x.shape[1], K, rho=1.0).add(x, y).grid
    snapped = grid.snap(x)
    head = (
        LSSVMHead(x.shape[1], K, rho=2.0, grid=grid)
        if form == "statistics"
        else CompactLSSVMHead(x.shape[1], K, rho=2.0)
    )
    x = snapped
    head.add(x, y)
    model, keep = linear_model.RidgeClassifier(alpha=2.0, solver="cholesky"), np.arange(len(x)) % 3 > 0
    agree(head, model.fit(snapped.numpy(), y.numpy()), snapped)
    head.remove(x[::3], y[::3])
    agree(head, model.fit(snapped[keep].numpy(), y[keep].numpy()), snapped)


@pytest.mark.parametrize("intercept", [True, False])
@pytest.mark.parametrize("name", SETS)
def test_ridge_regression(name, intercept):
    x, _ = load(name)
    target, x = x[:, :2].clone(), x[:, 2:]
    head = LSSVMHead(x.shape[1], 2, rho=0.7, intercept="free" if intercept else "none").add(x, target)
    stats = head.statistics
    snapped, goal = stats.grid.snap(x).numpy(), stats.target_grid.snap(target).numpy()
    model = linear_model.Ridge(alpha=0.7, fit_intercept=intercept, solver="cholesky").fit(snapped, goal)
    close(head.w.T, model.coef_)
    close(head.b, model.intercept_ if intercept else np.zeros(2))
    close(head(torch.from_numpy(snapped)), model.predict(snapped))


@pytest.mark.parametrize("standardised", [True, False], ids=["standardised", "raw"])
@pytest.mark.parametrize("name", SETS)
def test_what_the_grid_costs(name, standardised):
    """20 bits against the same features ungridded: how far scores move, and how many training predictions."""
    x, y = load(name, standardised)
    K = int(y.max()) + 1
    gridded = LSSVMHead(x.shape[1], K, rho=1.0).add(x, y)
    plain = LSSVMHead(x.shape[1], K, grid=None, rho=1.0).add(x, y)
    moved = float((gridded(x) - plain(x)).abs().max())
    changed = int((gridded.predict(x) != plain.predict(x)).sum())
    print(
        f"{name}, {'standardised' if standardised else 'raw'}: scores moved by {moved:.1e} at most, {changed} predictions of {len(x)}"
    )
    assert moved < (1e-4 if standardised else 2e-2)
    assert changed <= (0 if standardised else 1)


@pytest.mark.parametrize("intercept", [True, False])
@pytest.mark.parametrize("weighted", [False, True], ids=["", "real weights"])
@pytest.mark.parametrize("name", SETS)
@pytest.mark.parametrize("form", ["statistics", "compact"])
def test_ridge_regression_as_given(name, intercept, weighted, form):
    """Without a grid scikit-learn sees the very same features; also after a third is removed."""
    x, _ = load(name)
    target, x = x[:, :2].clone(), x[:, 2:]
    weight = 0.1 + torch.rand(len(x), generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    kind, options = (LSSVMHead, {"grid": None}) if form == "statistics" else (CompactLSSVMHead, {})
    head = kind(x.shape[1], 2, rho=0.7, intercept="free" if intercept else "none", **options)
    head.add(x, target, weight=weight if weighted else None)
    model = linear_model.Ridge(alpha=0.7, fit_intercept=intercept, solver="cholesky")
    for keep in (np.ones(len(x), dtype=bool), np.arange(len(x)) % 3 > 0):
        if not keep.all():
            head.remove(x[::3], target[::3], weight=weight[::3] if weighted else None)
        model.fit(x[keep].numpy(), target[keep].numpy(), sample_weight=weight[keep].numpy() if weighted else None)
        close(head.w.T, model.coef_)
        close(head.b, model.intercept_ if intercept else np.zeros(2))
        close(head(x), model.predict(x.numpy()))
