"""scikit-learn's own checks, its tools around the estimators, and its answers."""

import inspect
import pickle
import warnings

import numpy as np
import pytest
import torch
from scipy.sparse import csr_matrix
from sklearn.base import clone
from sklearn.datasets import load_breast_cancer, load_diabetes, load_digits, load_iris, make_multilabel_classification
from sklearn.linear_model import Ridge, RidgeClassifier, RidgeClassifierCV, RidgeCV
from sklearn.model_selection import GridSearchCV, cross_val_score
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler
from sklearn.svm import SVC, LinearSVC
from sklearn.utils.estimator_checks import check_estimator

from tests.support.faults import Failing, replaced
from torchlssvm import FixedPoint, IncrementalSVM, KernelLSSVM, LSSVMHead, NotFittedError, OneVsOne, RemovalError
from torchlssvm.analysis.label_errors import find_label_errors
from torchlssvm.features import LayerTaps, RandomReLU
from torchlssvm.functional.calibration import expected_calibration_error
from torchlssvm.kernels import RBF
from torchlssvm.sklearn import (
    IncrementalSVC,
    KernelLSSVMClassifier,
    LSSVMClassifier,
    LSSVMRegressor,
    MarginClassifier,
    ModuleTransformer,
    RandomFeatures,
)
from torchlssvm.sklearn.linear import choose_multiclass

WEIGHTED = "leave-one-out leaves out a sample with its whole weight, of repeated rows only one"
EXPECTED = {f"check_sample_weight_equivalence_on_{kind}_data": WEIGHTED for kind in ("dense", "sparse")}
BORDER = "predict goes by decision_function; Platt and isotonic move the border to where both classes are as probable"
MOVED = EXPECTED | {"check_classifiers_train": BORDER}
NO_BIAS = {"check_class_weight_classifiers": "a line through the origin cannot give almost all samples to one class"}
ESTIMATORS = [
    (LSSVMClassifier(), EXPECTED),
    (LSSVMClassifier(rho=1.0, multiclass="ovo", class_weight="balanced", grid=None, calibration=None), {}),
    (LSSVMClassifier(alphas="path", calibration="temperature", multiclass="ovr"), EXPECTED),
    (LSSVMClassifier(calibration="isotonic"), MOVED),
    (MarginClassifier(class_weight="balanced", scale="std", normalize="l2"), EXPECTED),
    (LSSVMRegressor(), {}),
    (KernelLSSVMClassifier(), {}),
    (KernelLSSVMClassifier("linear", bias=False), NO_BIAS),
    (IncrementalSVC("poly"), EXPECTED),
    (RandomFeatures(5), {}),
]


@pytest.mark.parametrize(("estimator", "expected"), ESTIMATORS, ids=lambda v: None if isinstance(v, dict) else repr(v))
def test_check_estimator(estimator, expected) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        results = check_estimator(estimator, expected_failed_checks=expected, on_fail=None, on_skip=None)
    failed = {r["check_name"]: r["exception"] for r in results if r["status"] == "failed"}
    assert failed == {}
    assert len(results) > 40


@pytest.mark.parametrize(
    "estimator",
    [LSSVMClassifier(alphas="path"), MarginClassifier(), KernelLSSVMClassifier(C=10.0), IncrementalSVC(C=10.0)],
)
def test_the_tools_around_them(estimator) -> None:
    X, y = load_iris(return_X_y=True)
    y = np.array(["setosa", "versicolor", "virginica"])[y]
    pipe = make_pipeline(StandardScaler(), estimator)
    assert cross_val_score(pipe, X, y, cv=3).mean() > 0.8
    name = "rho" if isinstance(estimator, LSSVMClassifier | MarginClassifier) else "C"
    search = GridSearchCV(clone(estimator), {name: [0.1, 1.0]}, cv=3, n_jobs=2 if name == "rho" else None).fit(X, y)
    assert search.best_score_ > 0.7
    fitted = pipe.fit(X, y)
    for copy in (pickle.loads(pickle.dumps(fitted)), clone(fitted).fit(X, y)):
        np.testing.assert_array_equal(copy.predict(X), fitted.predict(X))


def test_answers_of_scikit_learn() -> None:
    X, y = load_breast_cancer(return_X_y=True)
    X = (X - X.mean(0)) / X.std(0)
    weight = np.random.default_rng(0).random(len(y)) + 0.5
    for ours, theirs in (
        (LSSVMClassifier(rho=2.0, grid=None), RidgeClassifier(alpha=2.0)),
        (LSSVMClassifier(rho=2.0, intercept="none", grid=None), RidgeClassifier(alpha=2.0, fit_intercept=False)),
        (LSSVMClassifier(alphas=np.logspace(-3, 3, 13), grid=None), RidgeClassifierCV(alphas=np.logspace(-3, 3, 13))),
    ):
        ours.fit(X, y), theirs.fit(X, y)
        np.testing.assert_allclose(ours.decision_function(X), theirs.decision_function(X), rtol=0, atol=1e-8)
        np.testing.assert_allclose(ours.coef_.ravel(), theirs.coef_.ravel(), rtol=0, atol=1e-8)
        np.testing.assert_allclose(ours.intercept_, theirs.intercept_, rtol=0, atol=1e-8)
    ours, theirs = LSSVMClassifier(rho=2.0, grid=None), RidgeClassifier(alpha=2.0)
    ours.fit(X, y, sample_weight=weight), theirs.fit(X, y, sample_weight=weight)
    np.testing.assert_allclose(ours.decision_function(X), theirs.decision_function(X), rtol=0, atol=1e-8)
    weights = {0: 3.0, 1: 0.5}
    ours, theirs = (
        LSSVMClassifier(rho=1.0, class_weight=weights, grid=None).fit(X, y),
        RidgeClassifier(class_weight=weights).fit(X, y),
    )
    np.testing.assert_allclose(ours.decision_function(X), theirs.decision_function(X), rtol=0, atol=1e-8)
    near = LSSVMClassifier(rho=1.0).fit(X, y).decision_function(X)  # on the default grid
    np.testing.assert_allclose(near, RidgeClassifier().fit(X, y).decision_function(X), atol=1e-4)
    X, t = load_diabetes(return_X_y=True)
    for targets in (t, np.stack([t, t**2 / 100], 1)):
        for ours, theirs in (
            (LSSVMRegressor(rho=0.1, grid=None), Ridge(alpha=0.1)),
            (LSSVMRegressor(alphas=[0.01, 0.1, 1.0], grid=None), RidgeCV(alphas=[0.01, 0.1, 1.0])),
        ):
            ours.fit(X, targets), theirs.fit(X, targets)
            np.testing.assert_allclose(ours.predict(X), theirs.predict(X), rtol=1e-8)
            np.testing.assert_allclose(ours.coef_, theirs.coef_, rtol=1e-7)
            np.testing.assert_allclose(ours.intercept_, theirs.intercept_, rtol=1e-8)


def test_class_weights_for_several_labels() -> None:
    X, Y = make_multilabel_classification(300, 20, n_classes=4, random_state=0)
    wide = np.random.default_rng(0).normal(size=(300, 700))
    for rows in (X, wide, csr_matrix(wide)):
        balanced = LSSVMClassifier(rho=2.0, grid=None, class_weight="balanced").fit(rows, Y)
        given = LSSVMClassifier(rho=2.0, grid=None, class_weight={1: 3.0, 2: 0.5}).fit(rows, Y)
        for k in range(4):
            for ours, weight in ((balanced, "balanced"), (given, {1: [1.0, 3.0, 0.5, 1.0][k]})):
                theirs = RidgeClassifier(alpha=2.0, solver="lsqr", tol=1e-12, class_weight=weight).fit(rows, Y[:, k])
                scores = theirs.decision_function(rows)
                np.testing.assert_allclose(ours.decision_function(rows)[:, k], scores, rtol=0, atol=1e-6)
        assert balanced.predict_proba(rows).shape == (300, 4)
        assert balanced.label_errors(rows, Y).order.shape == (1200, 2)
    ours = LSSVMClassifier(alphas=[0.5, 2.0], grid=64.0, class_weight="balanced").fit(X, Y)
    never = LSSVMClassifier(rho=ours.alpha_, grid=64.0, class_weight="balanced").fit(X[50:], Y[50:])
    np.testing.assert_array_equal(ours.partial_unfit(X[:50], Y[:50]).coef_, never.coef_)
    for weight in ({4: 2.0}, "balancd"):
        with pytest.raises(ValueError, match="class_weight"):
            LSSVMClassifier(class_weight=weight).fit(X, Y)


def test_several_labels_as_ridge_classifier_has_them() -> None:
    X, Y = make_multilabel_classification(300, 20, n_classes=4, random_state=0)
    wide = np.random.default_rng(0).normal(size=(300, 700))
    for rows in (X, wide, csr_matrix(wide)):
        ours, theirs = (
            LSSVMClassifier(rho=2.0, grid=None).fit(rows, Y),
            RidgeClassifier(alpha=2.0, solver="lsqr", tol=1e-12),
        )
        theirs.fit(rows, Y)
        np.testing.assert_allclose(ours.decision_function(rows), theirs.decision_function(rows), rtol=0, atol=1e-6)
        np.testing.assert_array_equal(ours.predict(rows), theirs.predict(rows))
        assert ours.score(rows, Y) == theirs.score(rows, Y)
        assert (ours.coef_.shape, ours.classes_.tolist()) == (theirs.coef_.shape, theirs.classes_.tolist())
        assert ours.predict_proba(rows).shape == (300, 4)
        assert ours.label_errors(rows, Y).order.shape == (1200, 2)
    for rows in (X, wide):
        ours = (
            LSSVMClassifier(rho=2.0, grid=8.0 if rows is wide else 64.0).fit(rows, Y).partial_unfit(rows[:50], Y[:50])
        )
        never = clone(ours).partial_fit(rows[50:], Y[50:])
        np.testing.assert_array_equal(ours.coef_, never.coef_)
        with pytest.raises(RemovalError):
            ours.partial_unfit(rows[:50], Y[:50])
        with pytest.raises(ValueError, match="multilabel"):
            ours.partial_fit(rows[:50], Y[:50, 0])
    grown = LSSVMClassifier(rho=2.0, grid=8.0).fit(wide[:100], Y[:100])
    for part in (wide[100:], wide / 2, wide / 3):
        grown.partial_fit(part, Y[-len(part) :])
    assert isinstance(grown.head_, LSSVMHead)  # more rows than features
    assert grown.head_.targets == "multilabel"
    for options in ({"multiclass": "ovo"}, {"rule": "lda"}, {"calibration": "temperature"}):
        with pytest.raises(ValueError, match=r"multilabel|temperature"):
            LSSVMClassifier(**options).fit(X, Y)
    with pytest.raises(ValueError, match="1d array"):
        MarginClassifier().fit(X, Y)
    with pytest.raises(ValueError, match="1d array"):
        LSSVMClassifier().fit(X, Y * 3 + np.arange(4))
    for rows in (X, wide):
        with pytest.raises(ValueError, match="0 and 1"):
            LSSVMClassifier().fit(rows, Y + 1)


@pytest.mark.parametrize("classes", [2, 3])
def test_weights_of_incremental_svc_are_those_of_svc(classes) -> None:
    X, y = load_iris(return_X_y=True)
    X, y = X[y < classes] / 2, y[y < classes]
    weight = np.random.default_rng(0).integers(0, 4, len(y)) / 2
    ours = IncrementalSVC(C=3.0, gamma=0.7).fit(X, y, sample_weight=weight)
    theirs = SVC(C=3.0, gamma=0.7, tol=1e-9).fit(X, y, sample_weight=weight)
    np.testing.assert_array_equal(ours.predict(X), theirs.predict(X))
    assert len(ours.ids_) == (weight > 0).sum()
    if classes == 2:
        np.testing.assert_allclose(ours.decision_function(X), theirs.decision_function(X), atol=1e-6)
    copy = IncrementalSVC(C=3.0, gamma=0.7).fit(X[:60], y[:60]) if classes == 2 else None
    machine = ours.machine_ if copy is None else copy.machine_
    machine.load_state_dict(ours.machine_.state_dict())
    np.testing.assert_allclose(
        machine(torch.as_tensor(X)).numpy(), ours.machine_(torch.as_tensor(X)).numpy(), atol=1e-12
    )


def test_one_vs_one_passes_weights_on() -> None:
    """Through relabelling into another pair, and through files; and refuses what a machine cannot take."""
    torch.manual_seed(0)
    x, y, weight = torch.randn(45, 3).double(), torch.arange(45) % 3, torch.rand(45).double() + 0.5
    make = lambda: OneVsOne(IncrementalSVM(RBF(sigma=1.5), C=2.0), 3)  # noqa: E731
    machine, never = make(), make()
    ids = machine.add(x, y, weight=weight)
    new = y.clone()
    new[:6] = (y[:6] + 1) % 3
    machine.relabel(ids[:6], new[:6])
    never.add(x, new, weight=weight)
    for one, other in zip(machine.machines, never.machines, strict=True):
        assert torch.allclose(one.decision(x), other.decision(x), atol=1e-9)
    loaded = make()
    loaded.load_state_dict(machine.state_dict())
    loaded.relabel(ids[:6], y[:6])
    again = make()
    again.add(x, y, weight=weight)
    for one, other in zip(loaded.machines, again.machines, strict=True):
        assert torch.allclose(one.decision(x), other.decision(x), atol=1e-9)
    with pytest.raises(ValueError, match="weight must be finite and > 0"):
        machine.add(x[:2], y[:2], weight=torch.tensor([1.0, 0.0]))
    with pytest.raises(ValueError, match="takes none"):
        OneVsOne(KernelLSSVM(RBF(sigma=1.0)), 3).add(x, y, weight=weight)


@pytest.mark.parametrize("classes", [2, 3])
@pytest.mark.parametrize("model", [KernelLSSVMClassifier(gamma=0.5, C=2.0), IncrementalSVC(gamma=0.5, C=2.0)])
def test_partial_fit_and_unfit_of_kernel_machines(model, classes) -> None:
    X, y = load_iris(return_X_y=True)
    X, y = X[y < classes], np.array(["a", "b", "c"])[y[y < classes]]
    order = np.random.default_rng(0).permutation(len(y))
    X, y = X[order], y[order]
    one = clone(model).partial_fit(X[:1], y[:1], classes=np.unique(y))  # one class only, for now
    one.partial_fit(X[1:40], y[1:40]).partial_fit(X[40:], y[40:])
    assert len(one.ids_) == len(y)
    whole = clone(model).fit(X, y)
    np.testing.assert_allclose(one.decision_function(X), whole.decision_function(X), atol=1e-8)
    one.partial_unfit(one.ids_[:30])
    np.testing.assert_array_equal(one.ids_, whole.ids_[30:])
    never = clone(model).fit(X[30:], y[30:])
    np.testing.assert_allclose(one.decision_function(X), never.decision_function(X), atol=1e-8)
    with pytest.raises(RemovalError):
        one.partial_unfit([0])
    with pytest.raises(ValueError, match="not among classes"):
        one.partial_fit(X, np.array(["z"] * len(y)))
    np.testing.assert_allclose(one.decision_function(X), never.decision_function(X), atol=1e-8)
    weights = "sample_weight" in inspect.signature(type(model).fit).parameters
    assert weights == isinstance(model, IncrementalSVC)


@pytest.mark.parametrize("kind", [KernelLSSVMClassifier, IncrementalSVC])
def test_calls_that_a_kernel_machine_refuses_change_nothing(kind) -> None:
    X, y = load_iris(return_X_y=True)
    model = kind(gamma=0.5).fit(X, y)
    before = model.predict(X)
    for ids in ([0.5], [True], y == 0, ["0"]):
        with pytest.raises(ValueError, match="integers"):
            model.partial_unfit(ids)
    for options in ({"C": -1.0}, {"gamma": "magic"}, {"class_weight": {"z": 1.0}}, {"class_weight": [1.0, 2.0]}):
        with pytest.raises(ValueError, match=next(iter(options))):
            model.set_params(**options).fit(X[:, :3], np.array(["c", "b", "a"])[y])
        model.set_params(C=1.0, gamma=0.5, class_weight=None)
    np.testing.assert_array_equal(model.predict(X), before)
    assert len(model.ids_) == 150


def test_partial_fit_and_unfit_with_sample_weights() -> None:
    X, y = load_iris(return_X_y=True)
    order = np.random.default_rng(0).permutation(len(y))
    X, y, weight = X[order], y[order], np.random.default_rng(1).uniform(0.5, 2.0, len(y))
    gone, rest = slice(0, 30), slice(30, None)
    for model, truth in ((LSSVMClassifier(1.0, multiclass="ovr"), RidgeClassifier()), (LSSVMRegressor(1.0), Ridge())):
        model.partial_fit(X, y, sample_weight=weight).partial_unfit(X[gone], y[gone], sample_weight=weight[gone])
        truth.fit(X[rest], y[rest], sample_weight=weight[rest])
        np.testing.assert_allclose(model.coef_, truth.coef_, atol=1e-8)
    svc = IncrementalSVC(gamma=0.5).partial_fit(X[:80], y[:80], sample_weight=weight[:80])
    svc.partial_fit(X[80:], y[80:], sample_weight=weight[80:]).partial_unfit(svc.ids_[gone])
    truth = SVC(gamma=0.5, tol=1e-10).fit(X[rest], y[rest], sample_weight=weight[rest])
    np.testing.assert_array_equal(svc.predict(X), truth.predict(X))


def test_gcv_warns_of_weights_whose_sum_is_not_the_number_of_samples() -> None:
    X, y = load_breast_cancer(return_X_y=True)
    wide = np.random.default_rng(0).normal(size=(len(y), 600))
    halves = np.where(np.arange(len(y)) < 9, 0.0, 0.5)
    for model, rows in (
        (LSSVMClassifier(), X),
        (LSSVMClassifier(), wide),
        (LSSVMRegressor(alphas="path", selection="gcv"), X),
    ):
        with pytest.warns(UserWarning, match="280 for 560 samples"):
            model.fit(rows, y, sample_weight=halves)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        LSSVMClassifier(rho=1.0).fit(X, y, sample_weight=halves)
        LSSVMClassifier(alphas=[1.0, 10.0]).fit(X, y, sample_weight=halves)
        LSSVMClassifier().fit(X, y, sample_weight=2.0 * halves)


@pytest.mark.parametrize("grid", [None, FixedPoint(16.0)])
def test_partial_fit_and_unfit(grid) -> None:
    X, y = load_iris(return_X_y=True)
    order = np.random.default_rng(0).permutation(len(y))
    X, y = X[order], y[order]
    model = LSSVMClassifier(grid=grid, class_weight="balanced")
    model.partial_fit(X[:50], y[:50], classes=[0, 1, 2]).partial_fit(X[50:], y[50:])
    np.testing.assert_allclose(
        model.coef_, LSSVMClassifier(grid=grid, class_weight="balanced").fit(X, y).coef_, atol=1e-10
    )
    model.partial_unfit(X[:30], y[:30])
    never = LSSVMClassifier(grid=grid, class_weight="balanced").fit(X[30:], y[30:])
    np.testing.assert_allclose(model.coef_, never.coef_, atol=1e-10)
    if grid is not None:
        assert model.head_.digest() == never.head_.digest()
    t = X @ np.array([1.0, -2.0, 0.5, 3.0])
    regressor = (
        LSSVMRegressor(grid=grid).partial_fit(X[:70], t[:70]).partial_fit(X[70:], t[70:]).partial_unfit(X[:9], t[:9])
    )
    # targets of a grid are those of its first batch: looser there
    np.testing.assert_allclose(
        regressor.predict(X), LSSVMRegressor(grid=grid).fit(X[9:], t[9:]).predict(X), atol=1e-4 if grid else 1e-9
    )


@pytest.mark.parametrize("model", [LSSVMClassifier(), MarginClassifier(rho=1.0, scale="std")], ids=repr)
def test_probabilities_are_calibrated_by_default(model) -> None:
    X, y = load_digits(return_X_y=True)
    p = torch.from_numpy(model.fit(X[:900], y[:900]).predict_proba(X[900:]))
    assert expected_calibration_error(p, torch.from_numpy(y[900:])) < 0.06
    assert p.argmax(1).tolist() == model.predict(X[900:]).tolist()
    assert not hasattr(type(model)(calibration=None).fit(X, y), "predict_proba")


def test_probabilities_and_bad_input() -> None:
    X, y = load_iris(return_X_y=True)
    model = LSSVMClassifier().fit(X, y)
    np.testing.assert_allclose(model.predict_proba(X).sum(1), 1)
    with pytest.raises(NotFittedError, match=r"calibrate\(X, y\)"):
        model.partial_unfit(X[:5], y[:5]).predict_proba(X)
    never = LSSVMClassifier().fit(X[5:], y[5:])
    again = model.calibrate(X[5:], y[5:]).predict_proba(X)
    np.testing.assert_allclose(again, never.predict_proba(X), atol=1e-6)
    for bad, what in (
        (LSSVMClassifier(alphas="best"), "alphas must be"),
        (LSSVMClassifier(rho=-1.0), r"rho \(or 'gcv'\) must be"),
        (LSSVMClassifier(rho="best"), r"rho \(or 'gcv'\) must be"),
        (KernelLSSVMClassifier("magic"), "kernel must be one of"),
        (IncrementalSVC(gamma="magic"), "gamma must be"),
    ):
        with pytest.raises(ValueError, match=what):
            bad.fit(X, y)
    with pytest.raises(ValueError, match="only one class"):
        LSSVMClassifier().fit(X[:50], y[:50])
    with pytest.raises(ValueError, match="not among classes"):
        LSSVMClassifier().partial_fit(X, y).partial_fit(X, y + 5)
    custom = KernelLSSVMClassifier(lambda a, b: a @ b.T).fit(X, y)
    assert custom.predict(X).shape == y.shape
    assert KernelLSSVMClassifier(RBF(sigma=1.0)).fit(X, y).score(X, y) > 0.9
    assert torch.is_tensor(model.head_.w)


def test_margin_classifier_is_linear_svc_and_unlearns_exactly() -> None:
    X, y = load_iris(return_X_y=True)
    names = np.array(["setosa", "versicolor", "virginica"])[y]
    ours = MarginClassifier(0.25, intercept="penalized", grid=FixedPoint(16.0, 26)).fit(X, names)
    theirs = LinearSVC(C=2.0, dual=False, tol=1e-12, max_iter=100_000).fit(X, names)
    np.testing.assert_allclose(ours.coef_, theirs.coef_, rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(ours.decision_function(X), theirs.decision_function(X), rtol=1e-5, atol=1e-5)
    np.testing.assert_array_equal(ours.predict(X), theirs.predict(X))
    parts = MarginClassifier(0.25, grid=FixedPoint(16.0)).partial_fit(X[:80], names[:80], classes=np.unique(names))
    parts.partial_fit(X[80:], names[80:], sample_weight=np.full(70, 2)).partial_unfit(X[100:], names[100:])
    weight = np.where(np.arange(100) < 80, 1, 2)
    weight = np.r_[weight, np.ones(50)]
    fresh = MarginClassifier(0.25, grid=FixedPoint(16.0)).fit(X, names, sample_weight=weight)
    assert parts.head_.digest() == fresh.head_.digest()
    np.testing.assert_allclose(parts.coef_, fresh.coef_, rtol=1e-9, atol=1e-12)
    with pytest.raises(RemovalError, match="not held"):
        parts.partial_unfit(X[:1] + 0.5, names[:1])
    with pytest.raises(ValueError, match="integer"):
        parts.partial_fit(X[:1], names[:1], sample_weight=[0.5])
    chosen = MarginClassifier(alphas=[0.01, 1.0, 100.0], selection="loo").fit(X, names)
    assert chosen.alpha_ == chosen.head_.rho == chosen.path_.rho
    with pytest.raises(ValueError, match="gcv"):
        MarginClassifier(alphas="path", selection="gcv").fit(X, names)


@pytest.mark.parametrize("estimator", [LSSVMClassifier(rho=1.0), MarginClassifier(1.0), LSSVMRegressor(rho=1.0)])
def test_rows_that_were_not_transformed_are_refused_with_the_remedy(estimator) -> None:
    X, y = load_iris(return_X_y=True)
    pipe = make_pipeline(StandardScaler(), estimator).fit(X, y)
    digest = pipe[-1].head_.digest()
    with pytest.raises(RemovalError, match=r"pipe\[:-1\]\.transform"):
        pipe[-1].partial_unfit(X[:3], y[:3])
    assert pipe[-1].head_.digest() == digest
    pipe[-1].partial_unfit(pipe[:-1].transform(X[:3]), y[:3])
    assert pipe[-1].head_.n == 147


def test_an_unknown_label_is_refused_in_plain_python() -> None:
    X, y = load_iris(return_X_y=True)
    names = np.array(["setosa", "versicolor", "virginica"])[y]
    for model in (LSSVMClassifier(rho=1.0), MarginClassifier(1.0)):
        model.fit(X, names)
        digest = model.head_.digest()
        with pytest.raises(RemovalError, match="'rose'") as removal:
            model.partial_unfit(X[:2], ["setosa", "rose"])
        with pytest.raises(ValueError, match=r"'rose'.*partial_fit") as addition:
            model.partial_fit(X[:2], ["setosa", "rose"])
        assert not isinstance(addition.value, RemovalError)
        assert "partial_fit" not in str(removal.value)
        for text in (str(removal.value), str(addition.value)):
            assert not any(word in text for word in ("np.", "array(", "dtype"))
        assert model.head_.digest() == digest


def test_rho_is_chosen_by_default_and_again_after_each_change() -> None:
    X, y = load_breast_cancer(return_X_y=True)
    model = LSSVMClassifier().fit(X[:300], y[:300])
    first = model.alpha_
    model.partial_fit(X[300:] * 10, y[300:])
    assert model.alpha_ == LSSVMClassifier().fit(np.r_[X[:300], X[300:] * 10], y).alpha_
    model.partial_unfit(X[300:] * 10, y[300:])
    assert model.alpha_ == first
    assert LSSVMClassifier(rho=3.0).fit(X, y).alpha_ == 3.0
    t = X @ np.linspace(-1, 1, 30)
    assert LSSVMRegressor().fit(X, t).score(X, t) > 0.99


def test_partial_fit_with_alphas_chooses_or_says_that_it_does_not() -> None:
    X, y = load_iris(return_X_y=True)
    with pytest.warns(UserWarning, match="does not choose among alphas by leave-one-out"):
        LSSVMClassifier(alphas="path").partial_fit(X, y)
    model = LSSVMClassifier(alphas="path", selection="gcv").partial_fit(X, y)
    assert model.alpha_ == LSSVMClassifier(alphas="path", selection="gcv").fit(X, y).alpha_
    with pytest.raises(ValueError, match="alphas must be"):
        LSSVMClassifier(alphas="best").partial_fit(X, y)


def test_leave_one_out_and_label_errors() -> None:
    X, y = load_iris(return_X_y=True)
    scores = LSSVMClassifier(rho=2.0, multiclass="ovr", grid=None).fit(X, y).label_errors(X, y).scores
    for i in (0, 77, 149):
        rest = np.delete(np.arange(150), i)
        alone = RidgeClassifier(alpha=2.0).fit(X[rest], y[rest]).decision_function(X[i : i + 1])
        np.testing.assert_allclose(scores[i], alone[0], atol=1e-9)
    wrong = y.copy()
    wrong[[5, 60, 120]] = (wrong[[5, 60, 120]] + 1) % 3
    names = np.array(["a", "b", "c"])
    model = LSSVMClassifier().fit(X, names[wrong])
    found = model.label_errors(X, names[wrong])
    assert {5, 60, 120} <= set(found.order[:8].tolist())
    assert (5, "b", "a") in found.names()
    model = LSSVMClassifier(multiclass="ovr").fit(X, names[wrong])
    change = model.influence(X, names[wrong], X, names[y])
    assert {5, 60, 120} <= set(np.argsort(change)[:12].tolist())  # the loss falls without a wrong label


@pytest.mark.parametrize(
    ("model", "features"),
    [
        (LSSVMClassifier(0.5, grid=None), 4),
        (LSSVMClassifier(0.5, grid=None), 600),
        (MarginClassifier(0.5, grid=FixedPoint(16.0)), 4),
    ],
)
def test_diagnostics_leave_out_a_sample_with_its_weight(model, features) -> None:
    rng = np.random.default_rng(0)
    y = np.arange(40) % 2
    X, weight = rng.integers(-128, 128, (40, features)) / 64 + y[:, None], rng.integers(1, 6, 40)  # X is on the grid
    weight = weight if isinstance(model, MarginClassifier) else weight / 4
    model.fit(X, y, sample_weight=weight)
    scores = model.label_errors(X, y, sample_weight=weight).scores[:, 1].numpy()
    for i in (0, 17):
        rest = np.delete(np.arange(40), i)
        alone = clone(model).fit(X[rest], y[rest], sample_weight=weight[rest])
        np.testing.assert_allclose(scores[i], alone.decision_function(X[i : i + 1])[0], atol=1e-8)
        if isinstance(model.head_, LSSVMHead):
            loss = [np.square(m.decision_function(X) - (2.0 * y - 1.0)).mean() for m in (alone, model)]
            change = model.influence(X, y, X, y, sample_weight=weight)[i]
            np.testing.assert_allclose(change, loss[0] - loss[1], atol=1e-8)


def test_pairs_are_the_default_where_they_are_cheap() -> None:
    X, y = load_iris(return_X_y=True)
    assert LSSVMClassifier().fit(X, y).multiclass_ == "ovo"
    assert LSSVMClassifier().fit(X[:100], y[:100]).multiclass_ == "ovr"
    assert LSSVMClassifier(multiclass="ovr").fit(X, y).multiclass_ == "ovr"
    assert cross_val_score(LSSVMClassifier(), X, y).mean() > 0.96
    assert choose_multiclass(11, 4) == choose_multiclass(10, 513) == choose_multiclass(2, 4) == "ovr"


def test_fit_solves_and_the_same_rows_leave_once() -> None:
    X, y = load_breast_cancer(return_X_y=True)
    names = np.array(["malignant", "benign"])[y]
    model = LSSVMClassifier().fit(X, names)
    with replaced(LSSVMHead, "_solve", Failing(AssertionError("solved at the first prediction"))):
        model.predict(X)
    model.partial_unfit(X[:5], names[:5])
    before = model.head_.digest()
    with pytest.raises(RemovalError, match=names[0]):
        model.partial_unfit(X[:5], names[:5])
    with pytest.raises(RemovalError, match="held with label malignant"):
        model.partial_unfit(X[y == 0][-1:], ["benign"])
    assert model.head_.digest() == before
    assert LSSVMClassifier().fit(X, y, sample_weight=np.full(len(y), 1.5)).head_.grid is None


@pytest.mark.parametrize("estimator", [LSSVMClassifier, MarginClassifier, KernelLSSVMClassifier, IncrementalSVC])
def test_an_unknown_label_in_class_weight_is_an_error(estimator) -> None:
    X, y = load_iris(return_X_y=True)
    with pytest.raises(ValueError, match="'setsoa'"):
        estimator(class_weight={"setsoa": 2.0}).fit(X, np.array(["setosa", "versicolor", "virginica"])[y])
    with pytest.raises(ValueError, match="class_weight"):
        estimator(class_weight="balancd").fit(X, y)


@pytest.mark.parametrize("classes", [2, 3])
@pytest.mark.parametrize("kind", [KernelLSSVMClassifier, IncrementalSVC])
def test_class_weights_probabilities_and_label_errors_of_kernel_machines(kind, classes) -> None:
    X, y = load_iris(return_X_y=True)
    kept = np.flatnonzero((y < classes) & ~((y == 1) & (np.arange(150) % 2 == 0)))  # half of one class
    kept = np.random.default_rng(0).permutation(kept)
    X, y = X[kept][:, 1:3], y[kept]
    names = np.array(["a", "b", "c"])[y]
    counts = np.bincount(y)
    model = kind(gamma=0.5, C=2.0, class_weight="balanced").fit(X, names)
    weights = len(y) / (classes * counts)
    for given in (dict(zip("abc", weights.tolist(), strict=False)), weights.tolist(), weights):
        by_hand = kind(gamma=0.5, C=2.0, class_weight=given).fit(X[5:], names[5:]).partial_fit(X[:5], names[:5])
        np.testing.assert_allclose(model.decision_function(X), by_hand.decision_function(X), atol=1e-6)
    if kind is IncrementalSVC:
        theirs = SVC(C=2.0, gamma=0.5, class_weight="balanced", tol=1e-10).fit(X, names)
        np.testing.assert_array_equal(model.predict(X), theirs.predict(X))
    proba = model.predict_proba(X)
    np.testing.assert_allclose(proba.sum(1), 1)
    np.testing.assert_array_equal(model.classes_[proba.argmax(1)], model.predict(X))
    never = kind(gamma=0.5, C=2.0, class_weight="balanced").fit(X[20:], names[20:])
    model.partial_unfit(model.ids_[:20])  # weights and probabilities forget too
    np.testing.assert_allclose(model.decision_function(X), never.decision_function(X), atol=1e-6)
    np.testing.assert_allclose(model.predict_proba(X), never.predict_proba(X), atol=1e-5)
    wrong = names.copy()
    wrong[3] = "b" if names[3] != "b" else "a"
    found = kind(gamma=0.5, C=2.0).fit(X, wrong).label_errors()
    assert 3 in found.order[:8].tolist()
    assert (3, wrong[3], names[3]) in found.names()


def test_label_errors_of_incremental_svc_with_cyclic_labels() -> None:
    y = np.arange(100) % 5
    X = np.random.default_rng(0).normal(size=(100, 5)) + 4.0 * np.eye(5)[y]
    given = np.r_[(y[:6] + 1) % 5, y[6:]]
    model = IncrementalSVC().fit(X, given)
    assert set(model.label_errors().order[:6].tolist()) == set(range(6))
    assert model.predict_proba(X)[np.arange(100), y].mean() > 0.7


def test_many_classes_on_few_features_are_warned_of_and_a_lift_helps() -> None:
    rng = np.random.default_rng(0)
    y = np.arange(3000) % 30
    X = rng.normal(size=(30, 12))[y] + 0.4 * rng.normal(size=(3000, 12))
    with pytest.warns(UserWarning, match="rule='auto'.*RandomFeatures"):
        plain = LSSVMClassifier(rule="least_squares").fit(X[:1500], y[:1500])
    with pytest.warns(UserWarning, match="discriminant.*RandomFeatures") as told:
        auto = LSSVMClassifier().fit(X[:1500], y[:1500])
    assert "rule=" not in str(told[0].message)  # it is in use already
    lifted = make_pipeline(RandomFeatures(600), LSSVMClassifier(rule="least_squares")).fit(X[:1500], y[:1500])
    for better in (auto, lifted):
        assert better.score(X[1500:], y[1500:]) > plain.score(X[1500:], y[1500:]) + 0.02
    assert (plain.rule_, auto.rule_, auto.head_.choices["rule"].method) == ("least_squares", "lda", "loo")
    influences = [model.influence(X[:9], y[:9], X[1500:1600], y[1500:1600]) for model in (plain, auto)]
    np.testing.assert_array_equal(*influences)  # of least squares, for both
    given = y[:1500].copy()
    given[:60] = (given[:60] + 7) % 30
    with pytest.warns(UserWarning, match="RandomFeatures"):
        found = LSSVMClassifier().fit(X[:1500], given).label_errors(X[:1500], given)
    unlifted = find_label_errors(LSSVMHead(12, 30, rho="gcv").add(X[:1500], given), X[:1500], given)
    assert (found.order[:60] < 60).sum() > (unlifted.order[:60] < 60).sum()
    weight = np.where(given < 15, 0.75, 1.25)
    with pytest.warns(UserWarning, match="RandomFeatures"):
        weighted = LSSVMClassifier(calibration=None).fit(X[:1500], given, sample_weight=weight)
    scores = weighted.label_errors(X[:1500], given, sample_weight=weight).scores
    random = RandomReLU(12, 2000)(torch.from_numpy(X[:1500]))
    head = LSSVMHead(2000, 30, rho="gcv", grid=None).add(random, given, weight)
    np.testing.assert_allclose(scores, head.leave_one_out(random, given, weight), atol=1e-9)


def test_maps_and_taps_are_transformers() -> None:
    X, y = load_iris(return_X_y=True)
    for kind, module in (("fourier", None), ("nystroem", None), ("relu", RandomReLU(4, 40, seed=3))):
        pipe = make_pipeline(RandomFeatures(40, kind, seed=3), LSSVMClassifier()).fit(X, y)
        assert pipe.score(X, y) > 0.9
        assert clone(pipe).set_params(randomfeatures__seed=4).fit(X, y).score(X, y) > 0.9
        if module is not None:
            np.testing.assert_array_equal(pipe[0].transform(X), module(torch.from_numpy(X)).numpy())
    network = torch.nn.Sequential(
        torch.nn.Conv2d(1, 4, 3), torch.nn.ReLU(), torch.nn.AdaptiveAvgPool2d(2), torch.nn.Flatten()
    )
    taps = LayerTaps(network, layers=["0", "1"], example=torch.zeros(1, 1, 8, 8))
    images = np.random.default_rng(0).normal(size=(30, 1, 8, 8)).astype(np.float32)
    features = ModuleTransformer(taps, batch_size=7).fit_transform(images)
    np.testing.assert_allclose(features, taps(torch.from_numpy(images)).numpy(), atol=1e-6)
    pipe = make_pipeline(ModuleTransformer(taps), LSSVMClassifier()).fit(images, np.arange(30) % 2)
    assert pipe.predict(images).shape == (30,)


@pytest.mark.parametrize(
    ("kind", "gamma", "equal"), [("relu", "auto", True), ("fourier", "auto", True), ("fourier", "scale", False)]
)
def test_a_random_map_learns_nothing_unless_gamma_is_taken_from_the_data(kind, gamma, equal):
    X, y = (part[:300] for part in load_digits(return_X_y=True))
    first, never = (RandomFeatures(60, kind, gamma=gamma).fit(rows) for rows in (X, X[20:]))
    clf = LSSVMClassifier(rho=1.0, grid=2.0 if kind == "fourier" else 64.0).fit(first.transform(X), y)
    clf.partial_unfit(first.transform(X[:20]), y[:20])
    other = LSSVMClassifier(rho=1.0, grid=clf.grid).fit(never.transform(X[20:]), y[20:])
    assert (clf.head_.digest() == other.head_.digest()) == equal
