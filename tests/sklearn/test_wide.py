"""Few samples of many features, and sparse rows: the same answers as scikit-learn's Ridge, by the way that is cheap."""

import numpy as np
import pytest
import torch
from scipy import sparse
from sklearn.linear_model import Ridge, RidgeClassifier

from tests.support.faults import Failing, replaced
from torchlssvm import NotFittedError, RemovalError
from torchlssvm.errors import InterruptedUpdateError, NumericalWarning
from torchlssvm.functional import sparse_rows
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
    "torch coo": torch.from_numpy(X).to_sparse(),
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


@pytest.mark.filterwarnings("ignore::torchlssvm.errors.NumericalWarning")  # a path may choose a tiny rho
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


def test_many_sparse_rows_are_summed():
    rows = RNG.integers(0, N, 3000)
    x, y = S[rows][:, :30], Y[rows]
    model = LSSVMClassifier(rho=1.0, multiclass="ovr").fit(x, y)
    truth = RidgeClassifier(alpha=1.0).fit(x.toarray(), y)
    np.testing.assert_allclose(model.decision_function(x), truth.decision_function(x.toarray()), atol=1e-8)
    exact = LSSVMClassifier(grid=16.0).fit(x, y).partial_unfit(x[:500], y[:500])
    assert exact.head_.digest() == LSSVMClassifier(grid=16.0).fit(x[500:].toarray(), y[500:]).head_.digest()
    with pytest.raises(TypeError, match=r"[Ss]parse"):
        MarginClassifier().fit(x, y)


@pytest.mark.parametrize("form", ["dense", "sparse", "float32"])
def test_rho_of_more_rows_than_a_block(form):
    rng = np.random.default_rng(7)
    x = (rng.normal(size=(600, 640)) * (rng.random((600, 640)) < 0.1)).astype(np.float32).astype(np.float64)
    y = np.arange(600) % 2
    x[:, 0] += y
    given = {"dense": x, "sparse": sparse.csr_matrix(x), "float32": x.astype(np.float32)}[form]
    model, primal = (
        LSSVMClassifier().fit(given, y),
        LSSVMClassifier(alphas=None, grid=None, class_weight={0: 1.0}).fit(x, y),
    )
    assert isinstance(model.head_, DualHead)
    assert not isinstance(primal.head_, DualHead)
    assert model.alpha_ == primal.alpha_
    truth = RidgeClassifier(alpha=model.alpha_).fit(x, y)
    np.testing.assert_allclose(model.decision_function(given), truth.decision_function(x), atol=1e-8)


@pytest.mark.parametrize("form", [np.asarray, sparse.csr_matrix])
def test_a_column_far_from_zero_hides_nothing(form):
    x = X.copy()
    x[:, 7] += 1e6
    for rho in (1e-2, 1.0):
        model, truth = (
            LSSVMClassifier(rho=rho).fit(form(x), Y),
            RidgeClassifier(alpha=rho).fit(X, Y),
        )  # the same problem
        np.testing.assert_allclose(model.decision_function(form(x)), truth.decision_function(X), atol=1e-7)
    assert LSSVMClassifier().fit(form(x), Y).alpha_ == LSSVMClassifier().fit(X, Y).alpha_


@pytest.mark.parametrize("rho", [1e-18, 1e-300])
def test_a_rho_below_rounding_is_said(rho):
    twice = np.repeat(X[:30], 2, 0)  # equal rows with other labels
    model = LSSVMClassifier(rho=rho).fit(twice, Y)
    with pytest.warns(NumericalWarning, match="below the rounding"):
        scores = model.decision_function(twice)
    truth = RidgeClassifier(alpha=1e-9).fit(twice, Y)
    np.testing.assert_allclose(scores, truth.decision_function(twice), atol=1e-5)
    with pytest.raises(ValueError, match="needs a larger one"):
        model.label_errors(twice, Y)


@pytest.mark.parametrize("scale", [2.0**-480, 2.0**-30, 2.0**430])
def test_units_do_not_matter(scale):
    model, scaled = LSSVMClassifier().fit(X, Y), LSSVMClassifier().fit(X * scale, Y)
    assert scaled.alpha_ == model.alpha_ * scale**2
    np.testing.assert_allclose(scaled.decision_function(X * scale), model.decision_function(X), atol=1e-12)


def test_the_rows_kept_are_copies():
    mine, labels = X.copy(), Y.copy()
    model, truth = LSSVMClassifier(rho=1.0).fit(mine, labels), RidgeClassifier(alpha=1.0).fit(X, Y)
    mine *= 0.0
    labels[:] = "a"
    np.testing.assert_allclose(model.decision_function(X), truth.decision_function(X), atol=1e-9)


def test_rows_are_recognised_in_either_form():
    zeros = S.copy()
    zeros.data[3] = 0.0  # kept as an entry
    for first, second in ((S, X), (X, S), (zeros, zeros.toarray()), (np.where(X == 0, -0.0, X), S)):
        model = LSSVMClassifier(rho=1.0).fit(first, Y).partial_unfit(second[:10], Y[:10])
        assert model.head_.n == 50
        assert len(model.label_errors(second[10:], Y[10:]).order) == 50


def test_more_samples_than_features_become_sums():
    rng = np.random.default_rng(5)
    x = rng.normal(size=(1500, 600))
    y = np.arange(1500) % 2
    x[:, 0] += y
    for form in (x, sparse.csr_matrix(x)):
        model = LSSVMClassifier(rho=1.0).fit(form[:100], y[:100])
        assert isinstance(model.head_, DualHead)
        model.partial_fit(form[100:], y[100:])
        assert not isinstance(model.head_, DualHead)
        truth = RidgeClassifier(alpha=1.0).fit(x, y)
        np.testing.assert_allclose(model.decision_function(x), truth.decision_function(x), atol=1e-8)
    targets = LSSVMRegressor(rho=1.0).fit(x[:50], x[:50, :2]).partial_fit(x[50:], x[50:, :2])
    np.testing.assert_allclose(targets.predict(x), Ridge(alpha=1.0).fit(x, x[:, :2]).predict(x), atol=1e-8)


def test_no_sample_left_is_an_error_and_not_a_number():
    model = LSSVMClassifier().fit(X, Y).partial_unfit(X, Y)
    with pytest.raises(NotFittedError, match="no samples are held"):
        model.predict(X)
    model.partial_fit(X, Y)
    assert np.isfinite(model.decision_function(X)).all()
    with pytest.raises(ValueError, match="leaves the range of float64"):
        model.partial_fit(X * 1e200, Y)
    assert model.head_.n == N


def test_other_classes_on_a_later_call_are_refused():
    x = X[:, :5]
    model = LSSVMClassifier().partial_fit(x, Y, classes=["a", "b", "c"])
    model.partial_fit(x, Y, classes=["c", "b", "a"])
    with pytest.raises(ValueError, match="not the same as on the first call"):
        model.partial_fit(x, Y, classes=["a", "b", "c", "d"])
    with pytest.raises(ValueError, match="not among classes"):
        model.partial_fit(x[:1], ["d"])
    assert model.head_.n == 2 * N


def test_a_first_call_that_is_refused_decides_nothing():
    x = X[:, :5]
    for fail in (
        lambda m: m.partial_fit(x, Y, ["a", "b", "c"], sample_weight=-np.ones(N)),
        lambda m: m.fit(x, ["a"] * N),
    ):
        model = LSSVMClassifier()
        with pytest.raises(ValueError, match=r"."):
            fail(model)
        assert not hasattr(model, "head_")
        assert not hasattr(model, "classes_")
    fitted = LSSVMClassifier(rho=1.0).fit(x, Y)
    scores = fitted.decision_function(x)
    with pytest.raises(ValueError, match="one class"):
        fitted.fit(X[:, :7], ["a"] * N)
    np.testing.assert_array_equal(fitted.decision_function(x), scores)


def test_an_interrupt_leaves_none_of_many_sparse_rows():
    many = sparse.random_array((4000, 400), density=0.01, rng=np.random.default_rng(0), format="csr")
    labels = np.arange(4000) % 2
    model = LSSVMClassifier(grid=8.0).partial_fit(many[:2000], labels[:2000])
    before = model.head_.digest()

    with replaced(sparse_rows, "add_products_", Failing(KeyboardInterrupt())), pytest.raises(KeyboardInterrupt):
        model.partial_fit(many[2000:], labels[2000:])
    with pytest.raises(InterruptedUpdateError, match="neither that before nor that after"):  # never a part of them
        model.predict(many)
    again = LSSVMClassifier(grid=8.0).partial_fit(many[:2000], labels[:2000])
    assert again.head_.digest() == before
