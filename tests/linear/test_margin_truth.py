"""``MarginHead`` against dense active-set solutions and scikit-learn's LinearSVC on real data, over many orders of rho."""

import itertools
import os
import sys
import warnings
from pathlib import Path

import numpy as np
import pytest
import torch

from torchlssvm import FixedPoint, MarginHead

EPS = np.finfo(float).eps


def dense(x, signs, weight, rho, intercept, active):
    """w and b of ridge regression on the active samples by a QR decomposition, and the condition of the normal equations."""
    X = x if intercept == "none" else np.hstack([x, np.ones((len(x), 1))])
    ridge = np.full(X.shape[1], rho)
    if intercept == "free":
        ridge[-1] = 0.0
    root = np.sqrt(weight[active])
    A = np.vstack([X[active] * root[:, None], np.diag(np.sqrt(ridge))])
    Q, R = np.linalg.qr(A)
    w = np.linalg.solve(R, Q.T @ np.concatenate([signs[active] * root, np.zeros(X.shape[1])]))
    return (np.append(w, 0.0) if intercept == "none" else w), np.linalg.cond(R) ** 2


def check(x, y, rho, intercept, class_weight, svc=True):
    """Compare a head with the truth."""
    K, grid = int(y.max()) + 1, FixedPoint.auto(float(np.abs(x).max()))
    given, labels = torch.from_numpy(x), torch.from_numpy(y).long()
    head = MarginHead(x.shape[1], K, rho=rho, intercept=intercept, class_weight=class_weight, grid=grid).add(
        given, labels
    )
    active, x = head.active(given, labels).numpy(), grid.snap(given).numpy()
    counts = np.bincount(y, minlength=K)
    weight = np.ones(len(y)) if class_weight is None else (len(y) / (K * counts))[y]
    for k in range(K):
        signs = np.where(y == k, 1.0, -1.0)
        w, condition = dense(x, signs, weight, rho, intercept, active[:, k])
        found = np.append(head.w[:, k].numpy(), float(head.b[k]))
        tolerance = max(1e-9, 100 * EPS * condition)
        assert np.abs(found - w).max() <= tolerance * np.abs(w).max()
        margins = signs * (x @ found[:-1] + found[-1])
        assert not (((margins < 1) != active[:, k]) & (np.abs(margins - 1) > 1e-9)).any()
        if svc and intercept != "free":
            compare(x, signs, weight, rho, intercept == "penalized", found)


def compare(x, signs, weight, rho, penalized, found):
    """Compare the weights of one class with LinearSVC's: objective, and decision values where its gradient allows."""
    svm = pytest.importorskip("sklearn.svm")
    model = svm.LinearSVC(C=1 / (2 * rho), dual=False, tol=1e-10, fit_intercept=penalized, max_iter=5000)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model.fit(x, signs, weight)
    theirs = np.append(model.coef_[0], np.ravel(model.intercept_)[0] if penalized else 0.0)

    def objective(w):
        xi = np.maximum(0, 1 - signs * (x @ w[:-1] + w[-1]))
        return rho * (w @ w) + weight @ xi**2

    assert objective(found) <= objective(theirs) * (1 + 1e-10)
    xi = np.maximum(0, 1 - signs * (x @ theirs[:-1] + theirs[-1])) * weight * signs
    gradient = rho * theirs - np.append(x.T @ xi, xi.sum() if penalized else 0.0)
    allowed = (
        np.linalg.norm(gradient) / rho * np.sqrt((x**2).sum(1).max() + 1)
    )  # the objective is strongly convex with rho
    if allowed < 1e-6:
        assert np.abs(x @ (found - theirs)[:-1] + (found - theirs)[-1]).max() < 1e-6


def breast_cancer(raw=False):
    datasets = pytest.importorskip("sklearn.datasets")
    x, y = datasets.load_breast_cancer(return_X_y=True)
    return (x if raw else (x - x.mean(0)) / x.std(0)), y


@pytest.mark.parametrize("intercept", ["free", "penalized", "none"])
@pytest.mark.parametrize("rho", [1e-6, 1.0, 1e6])
def test_breast_cancer(rho, intercept):
    check(*breast_cancer(), rho, intercept, "balanced" if rho == 1.0 else None)


def test_copies_and_opposite_labels_among_the_samples():
    x, y = breast_cancer()
    x, y = np.vstack([x, x[:100], x[:60]]), np.concatenate([y, y[:100], 1 - y[:60]])
    for intercept in ("free", "penalized"):
        check(x, y, 1e-3, intercept, None)


ALL = list(itertools.product([1e-6, 1e-3, 1.0, 1e3, 1e6], ["free", "penalized", "none"], [None, "balanced"]))


@pytest.mark.slow
@pytest.mark.parametrize(("rho", "intercept", "class_weight"), ALL)
def test_every_mode(rho, intercept, class_weight):
    datasets = pytest.importorskip("sklearn.datasets")
    check(*breast_cancer(), rho, intercept, class_weight)
    check(*breast_cancer(raw=True), rho, intercept, class_weight, svc=False)
    check(*datasets.load_digits(return_X_y=True), rho, intercept, class_weight, svc=rho >= 1)


@pytest.mark.slow
@pytest.mark.data("covtype/covtype.data.gz")
@pytest.mark.parametrize("rho", [1e-6, 1.0, 1e6])
def test_covtype(rho):
    table = np.loadtxt(
        Path(os.environ["TORCHLSSVM_DATA"]) / "covtype" / "covtype.data.gz", delimiter=",", dtype=np.int16
    )
    table = table[np.random.default_rng(0).permutation(len(table))[:50000]]
    x, y = table[:, :54].astype(float), table[:, 54].astype(np.int64) - 1
    spread = x.std(0)
    x = (x - x.mean(0)) / np.where(spread > 0, spread, 1)
    check(x, y, rho, "penalized", None)
    check(x, y, rho, "free", "balanced", svc=False)


@pytest.mark.slow
@pytest.mark.data("cifar10/cifar10_12k.npz", "weights/mobilenet_v2_imagenet.pt")
def test_cifar_features():
    pytest.importorskip("torchvision")
    sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "recipes"))
    from pretrained_head import features

    x, y, _, _ = features()
    for intercept in ("penalized", "free"):
        check(x.double().numpy(), y.numpy(), 200.0, intercept, None)
