"""``MarginHead`` against exact fractions, scikit-learn's LinearSVC and heads built from scratch."""

import copy
import io
import os
import pickle
import warnings
from fractions import Fraction

import numpy as np
import pytest
import torch

from tests.support.faults import Failing, replaced
from tests.support.margin_exact import check_active_set
from torchlssvm import (
    FixedPoint,
    GridError,
    LSSVMHead,
    MarginHead,
    NotFittedError,
    RemovalError,
    VerificationError,
    attach,
)
from torchlssvm.cli import main
from torchlssvm.errors import ConvergenceError
from torchlssvm.linear import active_sets
from torchlssvm.linear.data_choices import ChoiceState
from torchlssvm.store import SampleStore

GRID = FixedPoint(64.0)


def samples(n=80, J=6, K=3, seed=0):
    generator = torch.Generator().manual_seed(seed)
    y = torch.arange(n) % K
    x = torch.randn(n, J, generator=generator, dtype=torch.float64)
    x[:, 0] += y
    return x, y


def linear_svc(x, y, rho, penalized, weight=None):
    """w (J, K) and b (K,) of scikit-learn, whose C is 1 / (2 rho)."""
    svm = pytest.importorskip("sklearn.svm")
    model = svm.LinearSVC(
        C=1 / (2 * rho), loss="squared_hinge", dual=False, tol=1e-10, fit_intercept=penalized, max_iter=20000,
    )  # fmt: skip
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model.fit(x, y, weight)
    w, b = model.coef_.T, np.broadcast_to(np.ravel(model.intercept_), (model.coef_.shape[0],))
    return (np.hstack([-w, w]), np.array([-b[0], b[0]])) if w.shape[1] == 1 else (w, b)


@pytest.mark.parametrize("normalize", [None, "sqrt"])
@pytest.mark.parametrize("penalized", [True, False])
def test_standardised_features_are_those_of_a_pipeline(penalized, normalize):
    preprocessing = pytest.importorskip("sklearn.preprocessing")
    x, y = samples(150)
    x[:, 1], x[:, 2] = 3.0, 1000 * x[:, 2] + 5000  # a constant column, and one far from the origin
    grid = FixedPoint(16384.0, bits=26)
    options = {"rho": 2.0, "intercept": "penalized" if penalized else "none", "grid": grid, "normalize": normalize}
    head = MarginHead(6, 3, scale="std", **options).add(x, y)
    ready = grid.snap(x if normalize is None else x.sign() * x.abs().sqrt()).numpy()
    z = preprocessing.StandardScaler().fit_transform(ready)
    w, b = linear_svc(z, y.numpy(), 2.0, penalized)
    assert np.abs(ready @ head.w.numpy() + head.b.numpy() - (z @ w + b)).max() < 1e-6
    assert (head(x) - torch.from_numpy(z @ w + b)).abs().max() < 1e-2  # of features that are not on the grid
    head.remove(x[:20], y[:20])
    fresh = MarginHead(6, 3, scale="std", **options).add(x[20:].flip(0), y[20:].flip(0))
    assert head.digest() == fresh.digest() != MarginHead(6, 3, **options).add(x[20:], y[20:]).digest()
    assert torch.equal(head.active(x[20:], y[20:]), fresh.active(x[20:], y[20:]))
    assert torch.equal(head.refresh().w, fresh.refresh().w)
    twin = MarginHead.from_config(head.config())
    twin.load_state_dict(head.state_dict())
    assert torch.equal(twin(x), head(x))
    assert twin.forget_class(1).digest() == head.forget_class(1).digest()
    with pytest.raises(RuntimeError, match="scale is 'std'"):
        MarginHead(6, 3, **options).load_state_dict(head.state_dict())


def test_a_class_that_does_not_use_a_sample_stays_as_it_is_to_the_bit():
    x, y = samples(200, J=60)
    head = MarginHead(60, 3, grid=GRID, rho=5.0).add(x, y)
    active = head.active(x, y)
    i = int(torch.nonzero(active.sum(1) == 1)[0, 0])
    k = int(active[i].nonzero()[0, 0])
    before_w, before_b = head.w.clone(), head.b.clone()
    head.remove(x[i : i + 1], y[i : i + 1])
    others = [c for c in range(3) if c != k]
    assert torch.equal(head.w[:, others], before_w[:, others])
    assert torch.equal(head.b[others], before_b[others])
    assert not torch.equal(head.w[:, k], before_w[:, k])


def test_ties_are_inactive():
    # one dimension without an intercept, and one sample that lies exactly on its margin
    x = torch.tensor([[1.0], [1.0], [-1.0], [2.0]])
    y = torch.tensor([1, 1, 0, 1])
    head = MarginHead(1, 2, rho=3.0, intercept="none", grid=FixedPoint(4.0, bits=2)).add(x, y)
    # on the first three: w = 3 / (3 + 3) = 1/2, so the last one has the margin 1 and is not needed
    assert abs(head.w[0, 1] - 0.5) < 1e-15
    assert not head.active(x[3:], y[3:]).any()


def test_a_search_without_end_leaves_the_samples(monkeypatch):
    x, y = samples()
    head = MarginHead(6, 3, rho=1.0, grid=GRID).add(x, y)
    before = head.w.clone()
    monkeypatch.setattr(active_sets, "MAX_NEWTON_ROUNDS", 0)
    head.remove(x[:1], y[:1])
    with pytest.raises(ConvergenceError):
        head.predict(x)
    digest = head.digest()
    monkeypatch.undo()
    with pytest.raises(ConvergenceError):  # known without another search
        head.predict(x)
    fresh = MarginHead(6, 3, rho=1.0, grid=GRID).add(x[1:], y[1:])
    assert digest == fresh.digest()
    assert torch.equal(head.refresh().w, fresh.w)
    assert not torch.equal(head.w, before)


def test_a_damaged_or_foreign_state_is_refused():
    x, y = samples()
    head = MarginHead(6, 3, rho=1.0, grid=GRID).add(x, y)
    state = head.state_dict()
    buffer = io.BytesIO()
    torch.save(state, buffer)
    buffer.seek(0)
    other = MarginHead(6, 3, rho=1.0, grid=GRID)
    other.load_state_dict(torch.load(buffer, weights_only=True))
    assert torch.equal(other.w, head.w)
    assert other.digest() == head.digest()
    broken = {k: v.clone() for k, v in state.items()}
    broken["samples.q"][0, 0] += 1
    with pytest.raises(VerificationError):
        other.load_state_dict(broken)
    with pytest.raises(RuntimeError):
        other.load_state_dict(LSSVMHead(6, 3, grid=GRID).add(x, y).state_dict())
    with pytest.raises(RuntimeError, match="per_class is False"):
        MarginHead(6, 3, rho=1.0, grid=GRID, per_class=True).load_state_dict(state)
    assert torch.equal(other.w, head.w)
    twin = copy.deepcopy(head)
    assert torch.equal(twin.remove(x[:1], y[:1]).refresh().w, head.remove(x[:1], y[:1]).refresh().w)


def test_classes_are_added_and_forgotten():
    x, y = samples()
    head = MarginHead(6, 2, rho=1.0, grid=GRID).add(x[y < 2], y[y < 2])
    before = head.w.clone()
    head.add_classes(1)
    assert torch.equal(head.w[:, :2], before)
    head.add(x[y == 2], y[y == 2])
    fresh = MarginHead(6, 3, rho=1.0, grid=GRID).add(x, y)
    assert head.digest() == fresh.digest()
    assert torch.equal(head.refresh().w, fresh.w)
    head.forget_class(1)
    rest = MarginHead(6, 3, rho=1.0, grid=GRID).add(x[y != 1], y[y != 1])
    assert head.digest() == rest.digest()
    assert torch.equal(head.refresh().w, rest.w)


def test_rho_is_chosen_by_default_and_again_by_refresh():
    x, y = samples(300)
    head = MarginHead(6, 3, grid=GRID).add(x[:9], y[:9])
    assert head.rho == 1.0
    assert head.choices["rho"].state is ChoiceState.OPEN  # too few samples to choose by
    head.add(x[9:], y[9:])
    assert head.rho == head.select_rho(apply=False).rho != 1.0
    assert head.choices["rho"].state is ChoiceState.CURRENT
    head.remove(x[:200], y[:200])
    assert head.choices["rho"].state is ChoiceState.STALE
    fresh = MarginHead(6, 3, grid=GRID).add(x[200:].flip(0), y[200:].flip(0))
    assert torch.equal(head.refresh().w, fresh.w)
    assert head.rho == fresh.rho
    assert all(torch.equal(a, b) for a, b in zip(head.state_dict().values(), fresh.state_dict().values(), strict=True))
    copies = MarginHead(1, 2, grid=GRID).add(torch.ones(20, 1), torch.arange(20) % 2)  # two rows, perhaps in one fold
    assert copies.predict(torch.ones(1, 1)).shape == (1,)


def test_every_door_has_the_same_default(tmp_path):
    from torchlssvm.sklearn import MarginClassifier

    model = torch.nn.Sequential(torch.nn.Linear(5, 4), torch.nn.Linear(4, 7))
    assert attach(model, 3, head="margin").head._choices.rho_rule == "kfold"
    assert MarginClassifier().fit(*samples(60)).head_._choices.rho_rule == "kfold"
    assert main(["init", str(tmp_path / "s"), "--in-features", "4", "--classes", "3", "--head", "margin"]) == 0
    with SampleStore(tmp_path / "s") as store:
        assert store.head._choices.rho_rule == "kfold"


def test_merge_takes_over_samples():
    x, y = samples()
    head = (
        MarginHead(6, 3, rho=1.0, grid=GRID)
        .add(x[:50], y[:50])
        .merge(MarginHead(6, 3, rho=1.0, grid=GRID).add(x[50:], y[50:]))
    )
    assert head.digest() == MarginHead(6, 3, rho=1.0, grid=GRID).add(x, y).digest()


def test_what_it_refuses():
    x, _ = samples()
    with pytest.raises(ValueError, match="grid"):
        MarginHead(6, 3, rho=1.0, grid=None)
    with pytest.raises(ValueError, match="num_classes"):
        MarginHead(6, 1, rho=1.0)
    with pytest.raises(ValueError, match="labels"):
        MarginHead(6, 3, rho=1.0).add(x, torch.randn(80, 3))
    with pytest.raises(NotFittedError):
        MarginHead(6, 3, rho=1.0).predict(x)


def test_rows_in_a_mapped_file(tmp_path):
    x, y = samples(200)
    head = MarginHead(6, 3, rho=1.0, grid=GRID, rows_folder=tmp_path).add(x[:90], y[:90]).add(x[90:], y[90:])
    fresh = MarginHead(6, 3, rho=1.0, grid=GRID).add(x[20:], y[20:])
    assert torch.equal(head.remove(x[:20], y[:20]).w, head.refresh().w)
    assert head.digest() == fresh.digest()
    assert torch.equal(head.w, fresh.w)
    assert not list(tmp_path.iterdir())  # the file has no name
    assert torch.equal(pickle.loads(pickle.dumps(head)).remove(x[20:21], y[20:21]).w, head.remove(x[20:21], y[20:21]).w)
    with pytest.raises(FileNotFoundError):
        MarginHead(6, 3, rho=1.0, grid=GRID, rows_folder=tmp_path / "nowhere").add(x, y)


def test_copies_and_files_do_not_tell_of_rows_that_left():
    x, y = samples(70)
    head = MarginHead(6, 3, rho=1.0, grid=GRID).add(x, y).remove(x[:9], y[:9])
    fresh = MarginHead(6, 3, rho=1.0, grid=GRID).add(x[9:].flip(0), y[9:].flip(0))
    mine, theirs = (copy.deepcopy(h.refresh()).samples for h in (head, fresh))
    assert [c.shape for c in mine._columns()] == [c.shape for c in theirs._columns()]
    for name in ("q", "labels", "copies", "norms"):
        assert torch.equal(getattr(mine, name), getattr(theirs, name))
    mine, theirs = head.state_dict(), fresh.state_dict()
    assert list(mine) == list(theirs)
    assert all(torch.equal(mine[name], theirs[name]) for name in mine)
    assert not any(bool(column[head.samples.n :].any()) for column in head.samples._columns())


@pytest.mark.parametrize("at", [1, 2, 3])
def test_an_interrupted_search_begins_again(at, monkeypatch):
    x, y = samples()
    head = MarginHead(6, 3, rho=1.0, grid=GRID).add(x, y)
    _ = head.w
    head.add(x + 0.5, y)
    # rows that are new are placed in one class after the other
    with replaced(active_sets.hinge, "scores", Failing(KeyboardInterrupt(), at)), pytest.raises(KeyboardInterrupt):
        head.predict(x)
    fresh = MarginHead(6, 3, rho=1.0, grid=GRID).add(x, y).add(x + 0.5, y)
    assert torch.equal(head.active(x, y), fresh.active(x, y))
    assert torch.equal(head.w, fresh.w)


def test_a_change_that_fails_leaves_the_head_as_it_was(tmp_path, monkeypatch):
    x, y = samples()
    head = MarginHead(6, 3, rho=1.0, grid=GRID, rows_folder=tmp_path).add(x[:20], y[:20])
    digest, w = head.digest(), head.w

    def full(*_):
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(os, "posix_fallocate", full)
        with pytest.raises(OSError, match="No space"):
            head.add(x[20:], y[20:])
    for weight in (2.0**40, 2.0**60):
        with pytest.raises((GridError, ValueError)):
            head.add(x[:1] + 30, y[:1], [weight])
    with pytest.raises(RemovalError):
        head.update(add=(x[20:], y[20:]), remove=(x[20:], y[20:]))  # what is removed was held before
    assert head.digest() == digest
    assert torch.equal(head.w, w)
    assert head.add(x[20:], y[20:]).digest() == MarginHead(6, 3, rho=1.0, grid=GRID).add(x, y).digest()


def test_a_refused_removal_decides_no_grid() -> None:
    head, other = (
        MarginHead(2, 2, rho=1.0),
        MarginHead(2, 2, rho=1.0, grid=16.0).add(torch.ones(1, 2), torch.tensor([0])),
    )
    with pytest.raises(RemovalError):
        head -= other
    assert head.grid is None


def test_a_system_beyond_float64_is_a_named_error() -> None:
    weight = torch.tensor([1e-300, 1.0, 1e300], dtype=torch.float64)
    head = MarginHead(3, 3, rho=1.0, grid=16.0, class_weight=weight).add(torch.randn(30, 3), torch.arange(30) % 3)
    with pytest.raises(ConvergenceError, match="class weights of a usual size"):
        head.weight.sum()
    head.class_weight = None
    assert head.weight.isfinite().all()


@pytest.mark.parametrize("intercept", ["free", "penalized", "none"])
@pytest.mark.parametrize(
    ("rho", "size", "weight"),
    [
        (1e-6, 1e6, None),
        (1.0, 3e7, None),
        (1e-12, 1.0, None),
        (5e-4, 1e4, [1000.0, 0.001, 1.0]),
        (1e-12, 1e6, "balanced"),
    ],
)
def test_weights_where_sums_lose_the_ridge_are_those_in_fractions(rho, size, weight, intercept):
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(14, 4, generator=generator, dtype=torch.float64) * size
    x[:, 3] = x[:, 2] + x[:, 1]  # on the grid: a column that follows from two others, but for rounding
    x[7:] = x[:7] + torch.randint(-1, 2, (7, 4), generator=generator) * size / 2**18  # and near copies
    y, grid = torch.arange(14) % 3, FixedPoint(16.0 * size)
    weight = torch.tensor(weight, dtype=torch.float64) if isinstance(weight, list) else weight
    options = {"rho": rho, "intercept": intercept, "class_weight": weight, "grid": grid}
    head = MarginHead(4, 3, **options).add(x, y).add(x[:3] * 2, y[:3])
    head.predict(x)
    head.remove(x[:3] * 2, y[:3])
    active = head.active(x, y)
    fresh = MarginHead(4, 3, **options).add(x.flip(0), y.flip(0))
    assert torch.equal(active, fresh.active(x, y))
    assert head.refresh().drift() == 0.0
    assert torch.equal(head.w, fresh.w)
    assert torch.equal(head.b, fresh.b)
    by_class = head._solver.class_weights()
    weights = [1.0] * 14 if by_class is None else by_class[y].tolist()
    rows = grid.snap(x).tolist()
    for k in range(3):
        signs = [1 if label == k else -1 for label in y.tolist()]
        w, b, _ = check_active_set(rows, signs, weights, rho, intercept, active[:, k].tolist())
        exact = torch.tensor([float(v) for v in w], dtype=torch.float64)
        assert (head.w[:, k] - exact).abs().max() <= 1e-9 * exact.abs().max()
        scores = [float(sum(Fraction(a) * v for a, v in zip(row, w, strict=True)) + b) for row in rows]
        terms = float((grid.snap(x).abs() @ exact.abs()).max()) + abs(float(b))  # what a score is the difference of
        assert (head(grid.snap(x))[:, k] - torch.tensor(scores, dtype=torch.float64)).abs().max() < 1e-14 * terms


@pytest.mark.parametrize(("rho", "labels"), [(68.0, [2, 0, 2, 0, 1]), (1e-12, [1, 1, 0, 0, 0])])
def test_a_long_sample_that_lies_on_its_margin_but_for_rounding(rho, labels):
    # zeros of both signs, and a sample so long that its margin is 1 to 19 or to 31 digits: without it w would be 0
    q, grid = [[0, 0]] * 4 + [[54, 253]], FixedPoint(2.0**32, bits=8)
    x, y = torch.tensor(q, dtype=torch.float64) * grid.resolution, torch.tensor(labels)
    head = MarginHead(2, 3, rho=rho, grid=grid).add(x, y)
    active = head.active(x, y)
    for k in range(3):
        signs = [1 if label == k else -1 for label in labels]
        if len(set(signs)) == 2:
            check_active_set(x.tolist(), signs, [1] * 5, rho, "free", active[:, k].tolist())


@pytest.mark.parametrize("made", [MarginHead, LSSVMHead])
def test_a_rho_beyond_float64_is_a_named_error(made):
    x, y = samples()
    head = made(6, 3, rho=1e300, grid=GRID).add(x, y)
    with pytest.raises(ConvergenceError, match=r"Use a rho of at most 3\.7e\+291"):
        head(x)
    head.rho = 1e285
    assert torch.allclose(head.b, torch.full((3,), -1 / 3, dtype=torch.float64), atol=0.1)
    assert head(x).isfinite().all()


@pytest.mark.parametrize("made", [MarginHead, LSSVMHead])
def test_heads_made_or_copied_in_inference_mode_can_be_changed_outside(made):
    x, y = samples()
    written = pickle.dumps(made(6, 3, rho=1.0, grid=GRID).add(x, y))
    fresh = made(6, 3, rho=1.0, grid=GRID).add(x[4:], y[4:])
    for read in (True, False):
        with torch.inference_mode():
            first = made(6, 3, rho=1.0, grid=GRID, class_weight=None).add(x.clone(), y.clone())
            if read:
                first(x)
            second, third = copy.deepcopy(first), pickle.loads(written)
            fourth = made(6, 3, rho=1.0, grid=GRID)
            fourth.load_state_dict(first.state_dict())
        for head in (first, second, third, fourth):
            head.remove(x[:2], y[:2])
            head(x)
            head.remove(x[2:4], y[2:4]).add(x[:1], y[:1]).remove(x[:1], y[:1]).rho = 1.0
            assert head.digest() == fresh.digest()
            assert torch.equal(head.refresh().w, fresh.w)
            assert not any(v.is_inference() for v in (*head.state_dict().values(), *head.buffers()))


def test_weights_do_not_depend_on_the_order_at_the_limit_of_refinement():
    """At this rho the bound on the margins' errors is where weights begin to be refined: the order must not decide."""
    generator = torch.Generator().manual_seed(2)
    x = torch.randn(60, 10, generator=generator, dtype=torch.float64)
    y = torch.randint(0, 2, (60,), generator=generator)
    heads = []
    for _ in range(20):
        p = torch.randperm(60, generator=generator)
        heads.append(MarginHead(10, 2, rho=1.7030933000669464e-06, grid=FixedPoint(limit=8.0)).add(x[p], y[p]))
    assert all(torch.equal(head.w, heads[0].w) for head in heads[:5])
    assert all(torch.equal(head.refresh().w, heads[0].w) for head in heads)


def test_weights_of_twenty_orders_of_magnitude_are_found_in_any_order():
    generator = torch.Generator().manual_seed(1)
    x = (torch.randint(0, 2, (60, 10), generator=generator) * 2 - 1).double() * 1e-3
    y = torch.randint(0, 10, (60,), generator=generator)
    weight = torch.tensor([1, 2, 1000])[torch.randint(0, 3, (60,), generator=generator)]
    class_weight = torch.tensor([1e6, 1e7, 1.0, 1e11, 1e-5, 0.01, 1e5, 100.0, 1e-12, 1e-10], dtype=torch.float64)
    found = []
    for p in (torch.arange(60), torch.randperm(60, generator=generator)):
        head = MarginHead(10, 10, rho=1e-4, class_weight=class_weight, grid=FixedPoint(limit=0.00101, bits=10))
        found.append(head.add(x[p], y[p], weight=weight[p]).active(x, y))
    assert torch.equal(*found)


def test_leave_one_out_goes_on_after_an_interruption():
    x, y = torch.randn(40, 3, generator=torch.Generator().manual_seed(0)), torch.arange(40) % 3
    head = MarginHead(3, 3, rho=1.0).add(x, y)
    expected, again = head.leave_one_out(x, y), copy.deepcopy(head)  # a copy has no matrices: they are made anew

    def interrupted(*args, **options):
        raise KeyboardInterrupt

    with replaced(active_sets, "solve_active", lambda solve: interrupted), pytest.raises(KeyboardInterrupt):
        again.leave_one_out(x, y)
    assert torch.allclose(again.leave_one_out(x, y), expected, atol=1e-12)
