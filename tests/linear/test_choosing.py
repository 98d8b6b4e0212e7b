"""The choice of rho: against scikit-learn, the dense formula of GCV, and retraining for each value and each left-out part."""

import copy

import numpy as np
import pytest
import torch
from sklearn.datasets import load_breast_cancer, load_digits, load_wine
from sklearn.linear_model import RidgeClassifierCV
from torch import Tensor

from tests.conftest import solve_dense
from tests.support.dense import code
from torchlssvm import FixedPoint, LSSVMHead, NotFittedError
from torchlssvm.analysis.cross_validation import fold_of
from torchlssvm.functional import spectrum
from torchlssvm.functional.spectrum import project
from torchlssvm.linear.data_choices import ChoiceState
from torchlssvm.linear.diagnostics import whitened_problems
from torchlssvm.linear.diagnostics.whitened_problems import problems
from torchlssvm.statistics import Statistics

GRID = FixedPoint(16.0)
RHOS = np.logspace(-3, 4, 15)
SETS = {"digits": load_digits, "breast cancer": load_breast_cancer, "wine": load_wine}


def standardised(name: str) -> tuple[Tensor, Tensor]:
    X, y = SETS[name](return_X_y=True)
    return GRID.snap(torch.as_tensor((X - X.mean(0)) / np.maximum(X.std(0), 1e-9)).clamp(-16, 16)), torch.as_tensor(y)


@pytest.mark.parametrize("name", SETS)
def test_leave_one_out_is_that_of_ridge_classifier_cv(name) -> None:
    x, y = standardised(name)
    head = LSSVMHead(x.shape[1], int(y.max()) + 1, grid=GRID, rho=1.0).add(x, y)
    path = head.select_rho(RHOS, "loo", x, y, apply=False)
    theirs = RidgeClassifierCV(alphas=RHOS, store_cv_results=True).fit(x.numpy(), y.numpy())
    errors = theirs.cv_results_.reshape(-1, len(RHOS)).mean(0)
    np.testing.assert_allclose(path.errors.numpy(), errors, rtol=1e-8)
    assert path.rho == pytest.approx(theirs.alpha_, rel=1e-12)
    assert head.select_rho(RHOS, "loo", x, y).rho == head.rho == path.rho
    assert float(path) == path.rho


def head_at(head: LSSVMHead, rho: float) -> LSSVMHead:
    head.rho = float(rho)
    return head


@pytest.mark.parametrize("weight", [None, "balanced"])
@pytest.mark.parametrize("name", SETS)
def test_gcv_is_the_dense_formula(name, weight) -> None:
    x, y = standardised(name)
    K, n = int(y.max()) + 1, len(x)
    head = LSSVMHead(x.shape[1], K, grid=GRID, class_weight=weight, rho=1.0).add(x, y)
    path = head.select_rho(RHOS, apply=False)
    d = torch.ones(n).double() if weight is None else (n / (K * torch.bincount(y).double()))[y]
    mean, Y = d @ x / d.sum(), code(y, K)
    X, goal = (x - mean) * d.sqrt()[:, None], (Y - d @ Y / d.sum()) * d.sqrt()[:, None]
    for rho, error, dof in zip(RHOS[::3], path.errors[::3], path.dof[::3], strict=True):
        H = X @ torch.linalg.solve(X.T @ X + rho * torch.eye(X.shape[1]).double(), X.T)
        trace = H.trace() + 1
        truth = (goal - H @ goal).square().mean() / (1 - trace / n) ** 2
        assert abs(error / truth - 1) < 1e-8
        assert abs(dof / trace - 1) < 1e-8


@pytest.mark.parametrize("options", [{}, {"scale": "std"}, {"class_weight": "balanced"}, {"intercept": "penalized"}])
@pytest.mark.parametrize(("n", "decompositions"), [(400, 0), (60, 1), (152, 1)])
def test_many_features_need_no_decomposition_of_all(n, decompositions, options, monkeypatch) -> None:
    """A band matrix, or the span of few samples, gives the errors of all eigenvalues; so close to n = J nothing else does."""
    torch.manual_seed(0)
    x, y = torch.randn(n, 150) * torch.logspace(0, -2, 150), torch.arange(n) % 3
    x[:, 140:] = 0.25  # columns that are constant
    x[:, 0] += y
    head = LSSVMHead(150, 3, grid=GRID, rho=1.0, **options).add(x, y)
    rhos = head.select_rho(apply=False).rhos[18:]
    truth, left_out = head.select_rho(rhos, apply=False), head.select_rho(rhos, "loo", x, y, apply=False)
    monkeypatch.setattr(spectrum, "LARGE_FEATURES", 64)
    monkeypatch.setattr(whitened_problems, "LARGE_FEATURES", 64)
    made, eigh = [], torch.linalg.eigh
    monkeypatch.setattr(torch.linalg, "eigh", lambda G: made.append(len(G)) or eigh(G))
    path = head.select_rho(rhos, apply=False)
    assert len(made) == decompositions
    assert all(size < 100 for size in made) or n == 152
    torch.testing.assert_close(path.errors, truth.errors, rtol=1e-8, atol=0.0)
    torch.testing.assert_close(path.dof, truth.dof, rtol=1e-6, atol=0.0)
    assert path.rho == truth.rho
    torch.testing.assert_close(
        head.select_rho(rhos, "loo", x, y, apply=False).errors, left_out.errors, rtol=1e-6, atol=0.0
    )


@pytest.mark.parametrize("n", [2, 20, 63, 64, 65, 66, 80])
def test_gcv_with_as_few_samples_as_features(n) -> None:
    """rss and n - dof both go to zero with rho; computed as differences nothing would be left of them."""
    torch.manual_seed(0)
    y = torch.arange(n) % 2
    x = GRID.snap(torch.randn(n, 64).double() + y[:, None])
    head = LSSVMHead(64, 2, grid=GRID, rho=1.0).add(x, y)
    rhos = np.logspace(-6, 4, 11)
    path = head.select_rho(rhos, apply=False)
    Y = code(y, 2)
    U, sigma, _ = torch.linalg.svd(x - x.mean(0), full_matrices=False)
    s, goal = sigma.square(), Y - Y.mean(0)
    s, U = s[s > 1e-9], U[:, s > 1e-9]
    rest = goal - U @ (U.T @ goal)
    rest = torch.zeros_like(rest) if n <= 65 else rest
    for rho, error in zip(rhos, path.errors, strict=True):
        shrunk = rho / (s + rho)
        rss = (rest.square().sum(0) + (shrunk[:, None] * (U.T @ goal)).square().sum(0)).mean()
        truth = rss / n / ((n - 1 - len(s) + shrunk.sum()) / n) ** 2
        assert abs(error / truth - 1) < 1e-8
    assert head.select_rho().errors.isfinite().all()


@pytest.mark.parametrize("intercept", ["free", "penalized", "none"])
@pytest.mark.parametrize("weight", [None, "balanced", "complement"])
@pytest.mark.parametrize("multiclass", ["ovr", "ovo"])
def test_every_value_is_what_a_head_with_that_rho_says(intercept, weight, multiclass) -> None:
    """Balanced weights: exact means derived again without the sample; leave_one_out is tested against retraining."""
    torch.manual_seed(0)
    y = torch.cat([torch.arange(30) % 3, torch.zeros(10, dtype=torch.int64)])
    x = GRID.snap(torch.randn(40, 4).double() + torch.nn.functional.one_hot(y, 4))
    head = LSSVMHead(4, 3, grid=GRID, intercept=intercept, class_weight=weight, multiclass=multiclass, rho=1.0).add(
        x, y
    )
    rhos = [0.01, 1.0, 30.0]
    wrong = head.select_rho(rhos, "loo", x, y, score="accuracy", apply=False).errors
    squared = head.select_rho(rhos, "loo", x, y, apply=False).errors if multiclass == "ovr" else None
    counts = torch.bincount(y).double()
    d = {None: torch.ones(3).double(), "balanced": 40 / (3 * counts), "complement": 1 - counts / 40}[weight][y]
    for i, rho in enumerate(rhos):
        scores = head_at(head, rho).leave_one_out(x, y)
        judged = d if multiclass == "ovr" else torch.ones(40).double()
        assert torch.isclose(wrong[i], judged @ (scores.argmax(1) != y).double() / judged.sum())
        if squared is not None:
            error = (code(y, 3) - scores).square().mean(1)
            assert torch.isclose(squared[i], d @ error / d.sum(), rtol=1e-9)


@pytest.mark.parametrize("intercept", ["free", "penalized", "none"])
@pytest.mark.parametrize("weight", [None, "balanced", "complement"])
def test_k_fold_from_fold_sums_is_retraining(intercept, weight) -> None:
    torch.manual_seed(0)
    n, ids = 60, [f"s{i}" for i in range(60)]
    y = torch.arange(n) % 3 * (torch.arange(n) % 2)
    x = GRID.snap(torch.randn(n, 4).double() + 3 + torch.nn.functional.one_hot(y, 4))
    head = LSSVMHead(4, 3, grid=GRID, intercept=intercept, class_weight=weight, folds=4, rho=1.0).add(x, y, ids=ids)
    head.add(x[:5] + 1, y[:5], ids=[f"gone{i}" for i in range(5)]).remove(
        x[:5] + 1, y[:5], ids=[f"gone{i}" for i in range(5)]
    )
    path = head.select_rho([0.1, 10.0], "kfold", apply=False)
    wrong = head.select_rho([0.1, 10.0], "kfold", x, y, ids=ids, score="accuracy", apply=False).errors
    chosen = copy.deepcopy(head).select_rho([0.1, 10.0], "kfold", x, y, ids=ids, score="accuracy")
    assert torch.equal(chosen.errors, wrong)
    fold, counts = torch.tensor(fold_of(ids, 4)), torch.bincount(y).double()
    d = {None: torch.ones(3).double(), "balanced": n / (3 * counts), "complement": 1 - counts / n}[weight][y]
    for i, rho in enumerate([0.1, 10.0]):
        total, misses = 0.0, 0
        for f in range(4):
            out = fold == f
            w, b = solve_dense(x[~out], y[~out], 3, rho=rho, intercept=intercept, class_weight=weight)
            scores = x[out] @ w + b
            total += float(d[out] @ (code(y[out], 3) - scores).square().mean(1))
            misses += int((scores.argmax(1) != y[out]).sum())
        assert float(path.errors[i]) == pytest.approx(total / float(d.sum()), rel=1e-9)
        assert float(wrong[i]) == pytest.approx(misses / n)


def test_folds_survive_merging_and_removal() -> None:
    torch.manual_seed(0)
    x, y, ids = torch.randn(50, 3), torch.arange(50) % 2, [f"s{i}" for i in range(50)]
    whole = LSSVMHead(3, 2, grid=GRID, folds=5, rho=1.0).add(x, y, ids=ids)
    other = LSSVMHead(3, 2, grid=GRID, folds=5, rho=1.0).add(x[30:], y[30:], ids=ids[30:])
    merged = LSSVMHead(3, 2, grid=GRID, folds=5, rho=1.0).add(x[:30], y[:30], ids=ids[:30]).merge(other)
    assert torch.equal(
        merged.select_rho([0.1, 1.0], "kfold", apply=False).errors,
        whole.select_rho([0.1, 1.0], "kfold", apply=False).errors,
    )
    fold = torch.tensor(fold_of(ids, 5))
    some = whole.statistics.of_folds([0, 3])
    mine = (fold == 0) | (fold == 3)
    assert some == Statistics(3, 2, grid=GRID).add(x[mine], y[mine])
    assert Statistics(3, 2, folds=3).of_folds([1]).empty


def test_k_fold_of_pairs_and_of_targets() -> None:
    torch.manual_seed(0)
    x, y, ids = torch.randn(60, 4).double(), torch.arange(60) % 3, list(range(60))
    x = GRID.snap(x + torch.nn.functional.one_hot(y, 4))
    head = LSSVMHead(4, 3, grid=GRID, multiclass="ovo", folds=3, rho=1.0).add(x, y, ids=ids)
    fold = torch.tensor(fold_of(ids, 3))
    wrong = head.select_rho([1.0], "kfold", x, y, ids=torch.arange(60), score="accuracy", apply=False).errors
    misses = 0
    for f in range(3):
        out = fold == f
        other = LSSVMHead(4, 3, grid=GRID, multiclass="ovo", rho=1.0).add(x[~out], y[~out])
        misses += int((other.predict(x[out]) != y[out]).sum())
    assert float(wrong[0]) == pytest.approx(misses / 60)
    assert torch.isfinite(head.select_rho([1.0], "kfold", apply=False).errors).all()
    t = torch.randn(60, 2).double() + 5
    head = LSSVMHead(4, 2, grid=None, folds=3, rho=1.0).add(x, t, ids=ids)
    total = 0.0
    for f in range(3):
        out = fold == f
        w, b = solve_dense(x[~out], t[~out], 2)
        total += float((t[out] - x[out] @ w - b).square().mean(1).sum())
    assert float(head.select_rho([1.0], "kfold", apply=False).errors[0]) == pytest.approx(total / 60, rel=1e-9)


def test_float_targets_and_a_default_list() -> None:
    torch.manual_seed(0)
    x, t = torch.randn(50, 5).double(), torch.randn(50, 2).double()
    full = LSSVMHead(5, 2, grid=None, rho=1.0).add(x, t)
    path = full.select_rho()
    assert len(path.rhos) == 100
    assert path.rhos.min() < full.rho <= path.rhos.max()
    shifted = LSSVMHead(5, 2, target_grid=FixedPoint(2.0**21, bits=26)).add(
        x, t + 2.0**20
    )  # far from zero: no cancellation
    plain = LSSVMHead(5, 2, target_grid=FixedPoint(2.0**21, bits=26)).add(x, t)
    assert torch.allclose(
        shifted.select_rho([1.0], apply=False).errors, plain.select_rho([1.0], apply=False).errors, rtol=1e-5
    )


def test_of_equal_accuracies_the_largest_rho() -> None:
    x, y = torch.tensor([[-3.0], [-2.0], [2.0], [3.0]]), torch.tensor([0, 0, 1, 1])
    head = LSSVMHead(1, 2, rho=1.0).add(x, y)
    assert head.select_rho([0.1, 1.0, 5.0], "loo", x, y, score="accuracy").rho == 5.0


def test_choices_are_remembered(tmp_path) -> None:
    x, y = torch.randn(30, 3), torch.arange(30) % 2
    head = LSSVMHead(3, 2, grid=GRID, rho=1.0).add(x, y)
    assert head.choices == {}
    head.select_rho([1.0, 2.0])
    choice = head.choices["rho"]
    assert (choice.state, choice.method, choice.candidates) == (ChoiceState.CURRENT, "gcv", 2)
    assert head.refresh().choices["rho"].state is ChoiceState.CURRENT
    other = LSSVMHead(3, 2, grid=GRID, rho=1.0)
    other.load_state_dict(head.state_dict())
    assert other.choices == head.choices
    head.remove(x[:1], y[:1])
    assert head.choices["rho"].state is ChoiceState.STALE
    head.rho = 3.0
    assert head.choices == {}


def test_bad_input() -> None:
    x, y = torch.randn(30, 3), torch.arange(30) % 2
    head = LSSVMHead(3, 2, grid=GRID, rho=1.0).add(x, y)
    with pytest.raises(NotFittedError):
        LSSVMHead(3, 2, rho=1.0).select_rho([1.0])
    folds, one = LSSVMHead(3, 2, folds=3, rho=1.0).add(x, y, ids=range(30)), LSSVMHead(3, 2, rho=1.0).add(x[:1], y[:1])
    for judge, arguments, what in [
        (head, {"rhos": []}, "rhos is empty"),
        (head, {"rhos": [1.0, -1.0]}, "finite and > 0"),
        (head, {"rhos": [float("nan")]}, "finite and > 0"),
        (head, {"method": "best"}, "method must be one of"),
        (head, {"method": "loo"}, 'method="loo" needs'),
        (head, {"method": "loo", "x": x[:5], "y": y[:5]}, "all samples that the head holds"),
        (head, {"method": "kfold"}, "folds"),
        (head, {"score": "accuracy"}, "accuracy"),
        (head, {"score": "beauty"}, "score must be one of"),
        (folds, {"method": "kfold", "x": x, "y": y, "score": "accuracy"}, "needs ids"),
        (one, {"method": "loo", "x": x[:1], "y": y[:1]}, "leaves nothing"),
        (one, {}, "too few"),
    ]:
        with pytest.raises(ValueError, match=what):
            judge.select_rho(**({"rhos": [1.0]} | arguments))
    assert head.rho == 1.0


@pytest.mark.filterwarnings(
    "ignore::torchlssvm.errors.NumericalWarning"
)  # a bound: doubled features reach it at rho = 1e-6
@pytest.mark.parametrize("targets", [False, True])
def test_many_values_of_many_features(targets) -> None:
    """Fewer singular vectors than values, and the null space (constant features) left out: still every value's own answer."""
    torch.manual_seed(0)
    x = torch.randn(300, 160).double() * torch.logspace(0, -3, 160).double()
    x[:, ::8], x[:, 1::8] = 0.75, x[:, 2::8]
    x, y = GRID.snap(x), torch.randn(300, 3).double() if targets else torch.arange(300) % 3
    head = LSSVMHead(160, 3, grid=GRID, target_grid=FixedPoint(8.0), rho=1.0).add(x, y)
    rhos = torch.logspace(-6, 3, 40).double()
    found = project(problems(head._view())[0].spectrum(None), rhos)
    assert found.null > 10  # the 20 constant features, but for rounding that differs between LAPACK builds
    assert found.left.shape[1] < 40
    errors = head.select_rho(rhos, "loo", x, y, apply=False).errors
    goal = FixedPoint(8.0).snap(y) if targets else code(y, 3)
    for i in range(0, 40, 3):
        truth = (goal - head_at(head, float(rhos[i])).leave_one_out(x, y)).square().mean()
        assert abs(errors[i] / truth - 1) < 1e-8
