"""Few samples of many features, and sparse rows: the same answers as scikit-learn's Ridge, by the way that is cheap."""

import numpy as np
import pytest
import torch
from scipy import sparse
from sklearn.linear_model import Ridge, RidgeClassifier

from tests.support.faults import Failing, replaced
from torchlssvm import GridError, KernelLSSVM, NotFittedError, RemovalError
from torchlssvm.errors import InterruptedUpdateError, NumericalWarning
from torchlssvm.functional import sparse_rows
from torchlssvm.kernels import Linear
from torchlssvm.sklearn import LSSVMClassifier, LSSVMRegressor, MarginClassifier
from torchlssvm.sklearn.dual_head import DualHead

RNG = np.random.default_rng(0)
N, J = 60, 700
X = RNG.normal(size=(N, J)) * (RNG.random((N, J)) < 0.05)
Y = np.array(["a", "b", "c"])[np.arange(N) % 3]
X[:, 0] += 2.0 * (Y == "a")
X = X.astype(np.float32).astype(np.float64)
S = sparse.csr_matrix(X)
FORMS = {
    "dense": X,
    "csr": S,
    "csr float32": S.astype(np.float32),
    "csc": sparse.csc_matrix(X),
    "torch": torch.from_numpy(X).to_sparse_csr(),
    "torch coo": torch.from_numpy(X).to_sparse(),
}


EXACT = {"grid": None}  # floats as they come: equal to Ridge's to rounding, not to the grid


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("intercept", ["free", "none"])
def test_the_dual_is_ridge(form, intercept):
    model = LSSVMClassifier(rho=2.0, intercept=intercept, grid=None).fit(FORMS[form], Y)
    truth = RidgeClassifier(alpha=2.0, fit_intercept=intercept == "free").fit(X, Y)
    assert isinstance(model.head_, DualHead)
    assert form == "dense" or sparse.issparse(model.head_.rows)
    np.testing.assert_allclose(model.decision_function(FORMS[form]), truth.decision_function(X), atol=1e-9)
    np.testing.assert_allclose(model.coef_, truth.coef_, atol=1e-9)
    np.testing.assert_allclose(model.predict_proba(FORMS[form]).sum(1), 1)
    target = X @ RNG.normal(size=(J, 2))
    for t in (target, target[:, 0]):
        ours = LSSVMRegressor(rho=0.5, intercept=intercept, grid=None).fit(FORMS[form], t)
        theirs = Ridge(alpha=0.5, fit_intercept=intercept == "free").fit(X, t)
        np.testing.assert_allclose(ours.predict(FORMS[form]), theirs.predict(X), atol=1e-8)


def test_class_and_sample_weights_are_those_of_ridge():
    weight = np.random.default_rng(1).uniform(0.5, 2.0, N)
    by_class = {"a": 3.0, "c": 0.5}
    ours = LSSVMClassifier(2.0, class_weight=by_class).fit(S, Y, sample_weight=weight)  # fractions: no grid
    theirs = RidgeClassifier(2.0, class_weight=by_class).fit(X, Y, sample_weight=weight)
    assert isinstance(ours.head_, DualHead)
    np.testing.assert_allclose(ours.decision_function(S), theirs.decision_function(X), atol=1e-9)
    unequal = np.r_[0:20, 0:60:3]
    ours = LSSVMClassifier(2.0, class_weight="balanced", **EXACT).fit(X[unequal], Y[unequal])
    theirs = RidgeClassifier(2.0, class_weight="balanced").fit(X[unequal], Y[unequal])
    np.testing.assert_allclose(ours.decision_function(X), theirs.decision_function(X), atol=1e-9)
    copies = LSSVMClassifier(2.0).fit(X, Y, sample_weight=1 + (np.arange(N) < 9))
    copies.partial_unfit(X[:5], Y[:5])  # one of two copies
    twice = LSSVMClassifier(2.0).fit(np.r_[X, X[5:9]], np.r_[Y, Y[5:9]])
    np.testing.assert_allclose(copies.decision_function(X), twice.decision_function(X), atol=1e-9)
    with pytest.raises(RemovalError):
        copies.partial_unfit(X[:1], Y[:1], sample_weight=[2])
    with pytest.raises(ValueError, match="integers"):
        copies.partial_fit(X[:1], Y[:1], sample_weight=[0.5])


@pytest.mark.parametrize(
    ("weight", "parts"), [(1.1, [0.5, 0.6]), (0.3, [0.1] * 3), (1000.1, [1000.0, 0.1]), (1.0, [0.001] * 1000)]
)
def test_a_weight_that_is_removed_in_fractions_leaves_no_row(weight, parts):
    weights = np.r_[weight, np.ones(N - 1)]
    never = LSSVMClassifier(rho=1.0, grid=None).fit(X[1:], Y[1:])
    for together in (True, False):
        model = LSSVMClassifier(rho=1.0, grid=None).fit(X, Y, sample_weight=weights)
        for some in [parts] if together else [parts[:1], parts[1:]]:
            model.partial_unfit(X[[0] * len(some)], Y[[0] * len(some)], sample_weight=some)
        assert model.head_.rows.shape == (N - 1, J)
        np.testing.assert_array_equal(model.coef_, never.coef_)
    model = LSSVMClassifier(rho=1.0, grid=None).fit(X, Y, sample_weight=weights)
    with pytest.raises(RemovalError):
        model.partial_unfit(X[:1], Y[:1], sample_weight=[weight * (1.0 + 1e-9)])
    left = model.partial_unfit(X[:1], Y[:1], sample_weight=[weight * (1.0 - 1e-9)]).head_.weights[0]
    assert left == pytest.approx(1e-9 * weight, rel=1e-3)


@pytest.mark.parametrize("options", [{}, {"class_weight": "balanced"}, {"alphas": "path", "selection": "gcv"}])
def test_rho_is_the_one_of_the_sums(options):
    wide = LSSVMClassifier(**options).fit(S, Y)
    primal = LSSVMClassifier(device="cpu", **options).fit(X, Y)  # a device is given: sums
    assert isinstance(wide.head_, DualHead)
    assert not isinstance(primal.head_, DualHead)
    assert wide.alpha_ == pytest.approx(primal.alpha_, rel=1e-9)
    np.testing.assert_allclose(wide.decision_function(S), primal.decision_function(X), atol=1e-3)


@pytest.mark.parametrize("form", ["dense", "csr"])
@pytest.mark.parametrize("grid", [None, "auto", 8.0])
def test_rows_are_added_and_removed(form, grid):
    x = FORMS[form]
    model = LSSVMClassifier(rho=1.0, grid=grid)
    model.fit(x[:50], Y[:50]).partial_fit(x[50:], Y[50:]).partial_unfit(x[:20], Y[:20])
    truth = RidgeClassifier(alpha=1.0).fit(X[20:], Y[20:])
    np.testing.assert_allclose(
        model.decision_function(x), truth.decision_function(X), atol=1e-9 if grid is None else 1e-4
    )
    if grid == 8.0:  # nothing is left of the samples that are gone
        never = LSSVMClassifier(rho=1.0, grid=grid).fit(x[20:], Y[20:])
        np.testing.assert_array_equal(model.coef_, never.coef_)
        assert model.head_.rows.dtype == np.int32
    with pytest.raises(RemovalError):
        model.partial_unfit(x[:1], Y[:1])
    with pytest.raises(RemovalError):
        model.partial_unfit(x[20:21], np.array(["c" if Y[20] != "c" else "a"]))
    assert model.head_.n == 40


@pytest.mark.parametrize("class_weight", [None, "balanced"])
def test_leave_one_out_in_the_dual(class_weight):
    rows = np.r_[0:40, 40:60:2]
    x, y = X[rows], Y[rows]
    model = LSSVMClassifier(1.5, class_weight=class_weight, calibration="temperature", **EXACT).fit(x, y)
    scores = model.label_errors(x, y).scores
    assert isinstance(model.head_, DualHead)
    for i in (0, 31):
        rest = np.delete(np.arange(len(y)), i)
        alone = RidgeClassifier(1.5, class_weight=class_weight).fit(x[rest], y[rest]).decision_function(x[i : i + 1])
        np.testing.assert_allclose(scores[i], alone[0], atol=1e-9)
    assert len(model.label_errors(x[5:9], y[5:9]).order) == 4
    with pytest.raises(ValueError, match="row 0"):
        model.label_errors(X[41:42], Y[41:42])
    rhos = np.logspace(-1, 2, 4)
    chosen = LSSVMClassifier(alphas=rhos, class_weight=class_weight, **EXACT).fit(x, y)
    errors = []
    for rho in rhos:
        scores = LSSVMClassifier(rho, class_weight=class_weight, **EXACT).fit(x, y).label_errors(x, y).scores.numpy()
        counts = {c: len(y) / (3 * (y == c).sum()) if class_weight else 1.0 for c in "abc"}
        squares = np.square(scores - (2.0 * (y[:, None] == np.array(["a", "b", "c"])) - 1)).mean(1)
        errors.append(np.average(squares, weights=[counts[c] for c in y]))
    np.testing.assert_allclose(chosen.path_.errors, errors, rtol=1e-8)


def test_probabilities_follow_the_rows_that_are_left():
    model = LSSVMClassifier(rho=1.0, grid=8.0).fit(X, Y)
    before = model.predict_proba(X)
    never = LSSVMClassifier(rho=1.0, grid=8.0).fit(X[20:], Y[20:])
    after = model.partial_unfit(X[:20], Y[:20]).predict_proba(X)
    np.testing.assert_array_equal(after, never.predict_proba(X))
    assert not np.allclose(before, after)


@pytest.mark.parametrize("rho", [1e-6, 1e-10, 1e-13])
@pytest.mark.filterwarnings("error")
def test_a_small_rho_is_solved_to_rounding(rho):
    """With full rank, interpolation is the limit; a machine on the kernel is an independent way there."""
    rng = np.random.default_rng(3)
    x, y = rng.normal(size=(80, 900)), np.arange(80) % 2
    kernel = KernelLSSVM(Linear(), C=1.0 / rho)
    kernel.add(torch.from_numpy(x[:70]), torch.from_numpy(y[:70]))
    truth = kernel.decision(torch.from_numpy(x)).numpy()
    model = LSSVMClassifier(rho=rho, grid=None).fit(x[:70], y[:70])
    np.testing.assert_allclose(model.decision_function(x), truth, atol=1e-9)
    np.testing.assert_allclose(model.head_.left_out_scores()[:, 1], kernel.leave_one_out()[:, 1], atol=1e-7)


@pytest.mark.parametrize("options", [{"scale": "std"}, {"normalize": "l2"}, {"intercept": "penalized"}])
def test_what_needs_sums_has_sums(options):
    model = LSSVMClassifier(1.0, **options).fit(S, Y)
    assert not isinstance(model.head_, DualHead)
    np.testing.assert_allclose(model.decision_function(S), model.decision_function(X), atol=1e-12)


def test_many_sparse_rows_are_summed():
    rows = RNG.integers(0, N, 3000)
    x, y = S[rows][:, :30], Y[rows]
    model = LSSVMClassifier(rho=1.0, multiclass="ovr", grid=None).fit(x, y)
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
    model, primal = LSSVMClassifier(grid=None).fit(given, y), LSSVMClassifier(grid=None, device="cpu").fit(x, y)
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
            LSSVMClassifier(rho, grid=None).fit(form(x), Y),
            RidgeClassifier(rho).fit(X, Y),
        )  # the same problem
        np.testing.assert_allclose(model.decision_function(form(x)), truth.decision_function(X), atol=1e-7)
    assert LSSVMClassifier(grid=None).fit(form(x), Y).alpha_ == LSSVMClassifier(grid=None).fit(X, Y).alpha_


@pytest.mark.parametrize("rho", [1e-18, 1e-300])
def test_a_rho_below_rounding_is_said(rho):
    twice = np.repeat(X[:30], 2, 0)  # equal rows with other labels
    with pytest.warns(NumericalWarning, match="below the rounding"):
        model = LSSVMClassifier(rho=rho, grid=None).fit(twice, Y)
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
    model, truth = LSSVMClassifier(rho=1.0, grid=None).fit(mine, labels), RidgeClassifier(alpha=1.0).fit(X, Y)
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
        model = LSSVMClassifier(rho=1.0, grid=16.0).partial_fit(form[:100], y[:100])
        assert isinstance(model.head_, DualHead)
        model.partial_fit(form[100:], y[100:])
        assert model.head_.digest() == LSSVMClassifier(rho=1.0, grid=16.0).fit(x, y).head_.digest()
        with pytest.raises(RemovalError):  # rows that came before the sums are known
            model.partial_unfit(x[:5], y[:5]).partial_unfit(x[:1], y[:1])
    targets = LSSVMRegressor(rho=1.0, grid=None).fit(x[:50], x[:50, :2]).partial_fit(x[50:], x[50:, :2])
    np.testing.assert_allclose(targets.predict(x), Ridge(alpha=1.0).fit(x, x[:, :2]).predict(x), atol=1e-8)


def test_no_sample_left_is_an_error_and_not_a_number():
    model = LSSVMClassifier().fit(X, Y).partial_unfit(X, Y)
    with pytest.raises(NotFittedError, match="no samples are held"):
        model.predict(X)
    model.partial_fit(X, Y)
    assert np.isfinite(model.decision_function(X)).all()
    with pytest.raises(ValueError, match="leaves the range of float64"):
        model.partial_fit(X * 1e200, Y)
    with pytest.raises(GridError):
        model.partial_fit(X * 1e6, Y)
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
