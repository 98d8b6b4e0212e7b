"""Few samples of many features, and sparse rows: the same answers as scikit-learn's Ridge, by the way that is cheap."""

import numpy as np
import pytest
import torch
from scipy import sparse
from sklearn.linear_model import Ridge, RidgeClassifier

from torchlssvm import RemovalError
from torchlssvm.sklearn import LSSVMClassifier, LSSVMRegressor, MarginClassifier
from torchlssvm.sklearn.dual_head import DualHead

RNG = np.random.default_rng(0)
N, J = 60, 700
X = RNG.normal(size=(N, J)) * (RNG.random((N, J)) < 0.05)
Y = np.array(["a", "b", "c"])[np.arange(N) % 3]
X[:, 0] += 2.0 * (Y == "a")
S = sparse.csr_matrix(X)
FORMS = {
    "dense": X,
    "csr": S,
    "csc": sparse.csc_matrix(X),
    "torch": torch.from_numpy(X).to_sparse_csr(),
}


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("intercept", ["free", "none"])
def test_the_dual_is_ridge(form, intercept):
    model = LSSVMClassifier(rho=2.0, intercept=intercept).fit(FORMS[form], Y)
    truth = RidgeClassifier(alpha=2.0, fit_intercept=intercept == "free").fit(X, Y)
    assert isinstance(model.head_, DualHead)
    assert form == "dense" or sparse.issparse(model.head_.rows)
    np.testing.assert_allclose(model.decision_function(FORMS[form]), truth.decision_function(X), atol=1e-9)
    np.testing.assert_allclose(model.coef_, truth.coef_, atol=1e-9)
    np.testing.assert_allclose(model.predict_proba(FORMS[form]).sum(1), 1)
    target = X @ RNG.normal(size=(J, 2))
    for t in (target, target[:, 0]):
        ours = LSSVMRegressor(rho=0.5, intercept=intercept).fit(FORMS[form], t)
        theirs = Ridge(alpha=0.5, fit_intercept=intercept == "free").fit(X, t)
        np.testing.assert_allclose(ours.predict(FORMS[form]), theirs.predict(X), atol=1e-8)


def test_rho_is_the_one_of_the_sums():
    wide = LSSVMClassifier().fit(S, Y)
    primal = LSSVMClassifier(grid="auto").fit(X, Y)
    assert isinstance(wide.head_, DualHead)
    assert not isinstance(primal.head_, DualHead)
    assert wide.alpha_ == primal.alpha_
    np.testing.assert_allclose(wide.decision_function(S), primal.decision_function(X), atol=1e-3)


@pytest.mark.parametrize("form", ["dense", "csr"])
def test_rows_are_added_and_removed(form):
    x = FORMS[form]
    model = LSSVMClassifier(rho=1.0).fit(x[:50], Y[:50]).partial_fit(x[50:], Y[50:]).partial_unfit(x[:20], Y[:20])
    truth = RidgeClassifier(alpha=1.0).fit(X[20:], Y[20:])
    np.testing.assert_allclose(model.decision_function(x), truth.decision_function(X), atol=1e-9)
    with pytest.raises(RemovalError, match="not among the samples held"):
        model.partial_unfit(x[:1], Y[:1])
    with pytest.raises(RemovalError, match="not among"):
        model.partial_unfit(x[20:21], np.array(["c" if Y[20] != "c" else "a"]))
    assert model.head_.n == 40
    with pytest.raises(ValueError, match="without weights"):
        model.partial_fit(x[:1], Y[:1], sample_weight=[2.0])


def test_leave_one_out_in_the_dual():
    model = LSSVMClassifier(rho=1.5).fit(S, Y)
    scores = model.head_.leave_one_out(S, np.arange(N) % 3)
    for i in (0, 31):
        rest = np.delete(np.arange(N), i)
        alone = RidgeClassifier(alpha=1.5).fit(X[rest], Y[rest]).decision_function(X[i : i + 1])
        np.testing.assert_allclose(scores[i], alone[0], atol=1e-9)
    assert len(model.label_errors(S, Y).order) == N
    with pytest.raises(ValueError, match="samples that are held"):
        model.label_errors(S[:5], Y[:5])


@pytest.mark.parametrize(
    "options",
    [
        {"grid": "auto"},
        {"scale": "std"},
        {"class_weight": "balanced"},
        {"calibration": "temperature"},
        {"alphas": "path"},
    ],
)
def test_what_needs_sums_has_sums(options):
    model = LSSVMClassifier(**options).fit(S, Y)
    assert not isinstance(model.head_, DualHead)
    np.testing.assert_allclose(model.decision_function(S), model.decision_function(X), atol=1e-12)
    np.testing.assert_allclose(
        model.decision_function(X), LSSVMClassifier(**options).fit(X, Y).decision_function(X), atol=1e-6
    )


def test_many_sparse_rows_are_summed_in_blocks():
    rows = RNG.integers(0, N, 3000)
    x, y = S[rows][:, :30], Y[rows]
    model = LSSVMClassifier(rho=1.0, multiclass="ovr").fit(x, y)
    truth = RidgeClassifier(alpha=1.0).fit(x.toarray(), y)
    np.testing.assert_allclose(model.decision_function(x), truth.decision_function(x.toarray()), atol=1e-8)
    exact = LSSVMClassifier(grid=16.0).fit(x, y).partial_unfit(x[:500], y[:500])
    assert exact.head_.digest() == LSSVMClassifier(grid=16.0).fit(x[500:].toarray(), y[500:]).head_.digest()
    with pytest.raises(TypeError, match=r"[Ss]parse"):
        MarginClassifier().fit(x, y)
