"""Where other implementations loop, add jitter or answer wrongly: optimality to 1e-10, in every way of getting there."""

import random

import numpy as np
import pytest
import torch

from tests.svm.truth import kkt, rbf
from torchlssvm import IncrementalSVM
from torchlssvm.errors import ConvergenceError
from torchlssvm.kernels import RBF, Linear, Polynomial
from torchlssvm.svm import solver

METHODS = ["auto", "path", "joint", "pivot"]


def check(svm, limit=1e-10):
    """The KKT conditions, from the Gram matrix and the public values alone."""
    if not svm.n:
        return
    held = svm._solver
    order = held.samples.order()
    x, u = held.rows.x(order), held.samples.u[order]
    K = rbf(x.numpy(), x.numpy(), svm.kernel.gamma) if isinstance(svm.kernel, RBF) else svm.kernel(x, x).numpy()
    y = 2.0 * svm.y.numpy() - 1
    assert kkt(K, y, u, svm.alpha.numpy(), svm.b) <= limit
    assert svm.kkt_violation() <= limit


def stream(svm, x, y, seed=0, method="auto"):
    """In one at a time, out in another order, with a look at every step; then in again at once."""
    ids = []
    for i in range(len(x)):
        ids += svm.add(x[i : i + 1], y[i : i + 1]).tolist()
        check(svm)
    whole = svm(x)
    random.Random(seed).shuffle(ids)
    for i in ids:
        svm.remove([i])
        check(svm)
    assert svm.n == 0
    ids = svm.add(x, y, method=method)
    check(svm)
    torch.testing.assert_close(svm(x), whole, rtol=0, atol=1e-7)
    svm.remove(ids[: len(ids) // 2], method=method)
    check(svm)


def points(n=40, d=2, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(n, d, generator=generator, dtype=torch.float64), torch.randint(2, (n,), generator=generator)


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("kernel", [RBF(sigma=1.0), Linear()], ids=["rbf", "linear"])
@pytest.mark.parametrize("labels", ["equal", "opposite", "random"])
def test_duplicate_points(labels, kernel, method):
    x, y = points(8)
    x = x.repeat(4, 1)
    y = {"equal": y.repeat(4), "opposite": torch.cat([y, 1 - y, y, 1 - y]), "random": torch.randint(2, (32,))}[labels]
    stream(IncrementalSVM(kernel, C=3.0), x, y, method=method)


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("d", [1, 2, 5])
def test_linear_kernel_with_more_samples_than_features(d, method):
    x, y = points(40, d)
    stream(IncrementalSVM(Linear(), C=2.0), x, y, method=method)


def test_the_exchange_moves_along_the_null_vector():
    """In one dimension three margin vectors are always dependent: f must not notice who is one."""
    x = torch.tensor([[-1.0], [-1.0], [1.0], [1.0], [1.0]], dtype=torch.float64)
    y = torch.tensor([0, 0, 1, 1, 1])
    svm = IncrementalSVM(Linear(), C=0.2)
    stream(svm, x, y)
    svm.fit(x, y)
    # class 0 is at its bounds, 2 x 0.2, class 1 shares 0.4: f(x) = 0.8 x + b, and f(1) = 1
    torch.testing.assert_close(
        svm.decision(x[[0, 2]]), torch.tensor([-0.6, 1.0], dtype=torch.float64), rtol=0, atol=1e-12
    )


@pytest.mark.parametrize("method", METHODS)
def test_empty_margin_set_with_every_point_at_a_bound(method):
    x, y = points(30, 3)
    y = torch.arange(30) % 2
    svm = IncrementalSVM(RBF(sigma=1.0), C=1e-3)
    svm.add(x, y, method=method)
    check(svm)
    low, high = svm.b_interval
    assert low < svm.b < high
    assert len(svm.margin) == 0
    assert len(svm.error) == 30
    for b in (low, high):
        f = svm.decision(x) - svm.b + b
        assert float(((2.0 * y - 1) * f - 1).max()) <= 1e-12
    new = svm.add(x[:1] + 0.1, y[:1])  # unbalanced: a reserve vector or b must give way
    check(svm)
    svm.remove(new)
    check(svm)
    assert svm.b_interval == pytest.approx((low, high), abs=1e-12)
    svm.set_C(1.0)
    check(svm)
    low, high = svm.b_interval
    assert low == high == svm.b


@pytest.mark.parametrize("kernel", [RBF(sigma=1.0), Linear(), Polynomial(2)], ids=["rbf", "linear", "polynomial"])
@pytest.mark.parametrize("labels", ["checkerboard", "halves", "random"])
def test_tied_grid(labels, kernel):
    side = torch.arange(5.0, dtype=torch.float64)
    x = torch.cartesian_prod(side, side) - 2
    y = {
        "checkerboard": (x.sum(1) % 2).long(),
        "halves": (x[:, 0] > 0).long(),
        "random": torch.randint(2, (25,), generator=torch.Generator().manual_seed(1)),
    }[labels]
    stream(IncrementalSVM(kernel, C=1.0), x, y)


@pytest.mark.parametrize("order", ["class 0 first", "class 1 first"])
def test_one_class_only_and_a_sorted_stream(order):
    x, y = points(40)
    y = (x[:, 0] > 0).long()
    sort = y.argsort(descending=order == "class 1 first")
    x, y = x[sort], y[sort]
    svm = IncrementalSVM(RBF(sigma=1.0), C=5.0)
    first = int(y[0])
    for i in range(40):
        svm.add(x[i : i + 1], y[i : i + 1])
        check(svm)
        if bool((y[: i + 1] == first).all()):
            assert svm.b == 2 * first - 1  # alpha = 0, and f = b puts the class on its margin
            assert not svm.alpha.any()
            assert svm.predict(x).tolist() == [first] * 40
    at_once = IncrementalSVM(RBF(sigma=1.0), C=5.0).fit(x, y)
    torch.testing.assert_close(svm(x), at_once(x), rtol=0, atol=1e-9)
    one = IncrementalSVM(RBF(sigma=1.0), C=5.0).fit(x[y == first].repeat(3, 1), y[y == first].repeat(3))
    check(one)
    assert one.b == 2 * first - 1


@pytest.mark.parametrize("method", METHODS)
def test_a_whole_class_deleted_and_learned_again(method):
    x, y = points(40)
    svm = IncrementalSVM(RBF(sigma=1.0), C=5.0)
    ids = svm.add(x, y)
    before = svm(x)
    svm.remove(ids[y == 1], method=method)
    check(svm)
    assert svm.b == -1.0
    svm.add(x[y == 1], y[y == 1], method=method)
    check(svm)
    torch.testing.assert_close(svm(x), before, rtol=0, atol=1e-9)


@pytest.mark.parametrize("C", [1e-8, 1e-3, 1e5])
def test_tiny_and_huge_C(C):
    x, y = points(40, 4)
    if C > 1:
        y = (x[:, 0] > 0).long()  # separable: the coefficients stay finite
    stream(IncrementalSVM(RBF(sigma=1.0), C=C), x, y)


@pytest.mark.parametrize("scale", [(1e4, 1e-4), (1e-6, 1e-6), (1e3, 1.0)])
def test_badly_scaled_features(scale):
    x, y = points(40)
    y = (x[:, 0] + 0.3 * x[:, 1] > 0).long()
    x = x * torch.tensor(scale, dtype=torch.float64)
    stream(IncrementalSVM(RBF(sigma=1.0), C=5.0), x, y)
    # g is a sum of terms as large as C |x|^2: C goes with the features' scale, as it must for any SVM
    stream(IncrementalSVM(Linear(), C=5.0 / float((x**2).sum(1).mean())), x, y)


@pytest.mark.parametrize("labels", [[0, 1], [0, 0, 1], [1, 0, 1, 0, 1]])
def test_points_that_are_all_the_same(labels):
    x, y = torch.zeros(len(labels), 3, dtype=torch.float64), torch.tensor(labels)
    for kernel in (RBF(sigma=1.0), Linear()):
        stream(IncrementalSVM(kernel, C=1.0), x, y)


def churn(svm, x, y, operations, seed, every):
    """Random operations of every kind and size."""
    rng = random.Random(seed)
    for k in range(operations):
        ids = svm.ids.tolist()
        some = rng.sample(range(len(x)), rng.choice([1, 1, 1, 3, 10]))
        gone = rng.sample(ids, min(len(ids), rng.choice([1, 1, 1, 3, 10])))
        what = rng.random()
        if what < 0.4 or len(ids) < 5:
            svm.add(x[some], y[some])
        elif what < 0.8 or len(ids) > 120:
            svm.remove(gone)
        elif what < 0.9:
            svm.update(add=(x[some], y[some]), remove=gone)
        else:
            svm.relabel(gone, [rng.randint(0, 1) for _ in gone])
        if k % every == 0:
            check(svm)
    check(svm)


@pytest.mark.parametrize("kernel", [RBF(sigma=1.0), Linear()], ids=["rbf", "linear"])
def test_hundreds_of_random_operations(kernel):
    x, y = points(60, 3)
    churn(IncrementalSVM(kernel, C=2.0), x, y, 400, 0, 20)


def test_conditioning_is_survived():
    """A wide kernel in one dimension: the Gram matrix is singular to working precision from the eighth point on."""
    x = torch.linspace(-1, 1, 40, dtype=torch.float64)[:, None]
    y = torch.from_numpy((np.sin(9 * x[:, 0].numpy()) > 0).astype(int))
    stream(IncrementalSVM(RBF(sigma=3.0), C=100.0), x, y)


@pytest.mark.parametrize("C", [1e-6, 1e-3, 0.01])
def test_tiny_C_with_nearly_every_coefficient_at_its_bound(C):
    """The first guess of a fit must know that the coefficients are small: few of them are inside their boxes."""
    generator = torch.Generator().manual_seed(3)
    x = torch.randn(100, 2, generator=generator, dtype=torch.float64)
    y = (x[:, 0] * x[:, 1] + 0.5 * torch.randn(100, generator=generator, dtype=torch.float64) > 0).long()
    svm = IncrementalSVM(RBF(sigma=1.0), C=C).fit(x, y)
    assert svm.kkt_violation() < 1e-12
    assert len(svm.error) >= 80
    assert svm.events < 1000


@pytest.mark.filterwarnings("ignore::torchlssvm.NumericalWarning")
@pytest.mark.parametrize("d", [2, 4])
@pytest.mark.parametrize("C", [0.1, 10.0])
def test_a_kernel_beyond_double_precision_is_an_error_or_solved(d, C):
    """Points far from the origin under a polynomial kernel: K is 1e12, and what tells points apart is lost in rounding."""
    rng = np.random.RandomState(0)
    x, y = torch.from_numpy(rng.normal(loc=100, size=(16, d))), torch.from_numpy(rng.randint(0, 2, 16))
    svm = IncrementalSVM(Polynomial(degree=3, gamma=1.0 / d, coef0=1.0), C=C)
    try:
        svm.fit(x, y)
    except ConvergenceError:
        assert svm.n == 0
        return
    found = svm.kkt_violation()
    assert found < 1000 * found.bound


@pytest.mark.filterwarnings("ignore::torchlssvm.NumericalWarning")
def test_an_update_that_cannot_be_certified_changes_nothing(monkeypatch):
    """Also where the margin vectors held are themselves dependent to rounding, so that their inverse cannot be made again."""
    rng = np.random.RandomState(0)
    x, y = torch.from_numpy(rng.normal(loc=100, size=(30, 2))), torch.from_numpy(rng.randint(0, 2, 30))
    svm = IncrementalSVM(Polynomial(degree=3, gamma=0.5, coef0=1.0), C=0.1).fit(x[:20], y[:20])
    state = {name: value.clone() for name, value in svm.state_dict().items() if name != "R"}
    calls = {
        "add": lambda: svm.add(x[20:], y[20:]),
        "add one": lambda: [svm.add(x[i : i + 1], y[i : i + 1]) for i in range(20, 30)],
        "remove": lambda: svm.remove(svm.ids[svm.alpha > 0]),
        "relabel": lambda: svm.relabel(svm.ids[:5], 1 - svm.y[:5]),
        "set_C": lambda: svm.set_C(5.0),
        "set_kernel": lambda: svm.set_kernel(Polynomial(degree=2)),
        "fit": lambda: svm.fit(x, 1 - y),
    }
    nothing = solver.OptimalityCheck(np.arange(3), False, 1.0)
    monkeypatch.setattr(solver.PathSolver, "check_optimality", lambda self: nothing)
    for name, call in calls.items():
        with pytest.raises(ConvergenceError, match="certificate"):
            call()
        after = svm.state_dict()
        assert all(torch.equal(after[key], value) for key, value in state.items()), name
    monkeypatch.undo()
    for call in calls.values():
        call()
        found = svm.kkt_violation()
        assert found < 1000 * found.bound


@pytest.mark.parametrize("C", [10.0, 50.0])
def test_single_updates_keep_twelve_digits(C):
    """After every one of a hundred, not only after some: the condition number stays below 1e4."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(200, 3, generator=generator, dtype=torch.float64)
    y = (x[:, 0] + 0.2 * torch.randn(200, generator=generator) > 0).long()
    x[:, 0] *= 3.0
    svm = IncrementalSVM(RBF(sigma=2.0), C=C).fit(x[:150], y[:150])
    for i in range(150, 200):
        svm.add(x[i : i + 1], y[i : i + 1])
        assert svm.kkt_violation() < 1e-12
        svm.remove([i - 150])
        assert svm.kkt_violation() < 1e-12


def test_a_checkpoint_with_dependent_margin_vectors():
    """Two copies that share a coefficient are a solution, too: it is taken, and one of them leaves the margin set."""
    x, y = points(30)
    first = IncrementalSVM(RBF(sigma=1.0), C=3.0).fit(x, y)
    alpha = first.alpha
    i = int(((alpha > 0.5) & (alpha < 2.5)).nonzero()[0])
    svm = IncrementalSVM(RBF(sigma=1.0), C=3.0).fit(torch.cat([x, x[i : i + 1]]), torch.cat([y, y[i : i + 1]]))
    state = {name: value.clone() for name, value in svm.state_dict().items()}
    ids = state["ids"].tolist()
    both = [ids.index(i), ids.index(30)]
    state["alpha"][both] = state["alpha"][both].sum() / 2
    state["side"][both] = 0.0
    other = IncrementalSVM(RBF(sigma=1.0), C=3.0)
    other.load_state_dict(state)
    check(other)
    torch.testing.assert_close(other(x), svm(x), rtol=0, atol=1e-9)
    check(other.remove([30]))
    torch.testing.assert_close(other(x), first(x), rtol=0, atol=1e-9)
