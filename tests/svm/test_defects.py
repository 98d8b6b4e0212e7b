"""Cases in which an earlier version was wrong, slow or gave up: each judged from alpha, b and an explicit kernel."""

import time

import numpy as np
import pytest
import torch

from tests.support.faults import Failing, replaced
from tests.svm.test_hostile import FILES, NAMES, WRONG, units
from tests.svm.truth import kkt
from torchlssvm import IncrementalSVM, NumericalWarning
from torchlssvm.errors import ConvergenceError
from torchlssvm.kernels import RBF, Linear
from torchlssvm.svm import leave_one_out
from torchlssvm.svm.samples import VECTOR_NAMES
from torchlssvm.svm.solver import CLEAR_SIDE_FACTOR, MAX_REST_ROUNDING_UNITS, MAX_ROUNDING_UNITS, PathSolver

pytestmark = pytest.mark.filterwarnings("ignore::torchlssvm.NumericalWarning")


def problem(n=300, d=5, seed=0):
    rng = np.random.default_rng(seed)
    x = rng.normal(size=(n, d))
    return x, (x[:, 0] + 0.3 * rng.normal(size=n) > 0).astype(int)


def tensors(*arrays):
    return tuple(torch.from_numpy(array) for array in arrays)


def test_one_outlier_does_not_hide_violations_of_others():
    x, y = problem()
    x[7] *= 1e6
    K, sign = x @ x.T, 2.0 * y - 1
    svm = IncrementalSVM(Linear(), C=10.0).fit(*tensors(x, y))
    for C in (100.0, 0.1, 10.0):
        svm.set_C(C)
        assert units(K, sign, np.full(300, C), svm.alpha.numpy(), svm.b) < WRONG
    keep = np.arange(300) != 7
    svm.remove([7])
    found = units(K[np.ix_(keep, keep)], sign[keep], np.full(299, 10.0), svm.alpha.numpy(), svm.b)
    assert found < WRONG


@pytest.mark.parametrize("distance", [1e-9, 1e-13])
def test_near_copies_with_weights_stay_in_their_boxes_and_balanced(distance):
    rng = np.random.default_rng(0)
    x = np.repeat(rng.normal(size=(50, 3)), 3, 0) + distance * rng.normal(size=(150, 3))
    y, weight = rng.integers(0, 2, 150), rng.uniform(0.2, 3.0, 150)
    K = np.exp(-0.5 * ((x[:, None] - x[None]) ** 2).sum(-1))
    svm = IncrementalSVM(RBF(sigma=1.0), C=100.0).fit(*tensors(x, y, weight))
    for C in (100.0, 1.0, 0.01):
        svm.set_C(C)
        assert units(K, 2.0 * y - 1, C * weight, svm.alpha.numpy(), svm.b) < WRONG


def test_an_indefinite_kernel_gives_a_stationary_point_or_an_error():
    for seed in range(10):
        rng = np.random.default_rng(seed)
        K = rng.normal(size=(50, 50))
        K = (K + K.T) / 2 + 2 * np.eye(50)
        y = rng.integers(0, 2, 50)
        svm = IncrementalSVM("precomputed", C=1.0)
        try:
            ids = svm.fit(*tensors(K, y)).ids
            svm.remove(ids[:10])
        except ConvergenceError:
            pass
        at = svm.ids.numpy()
        found = units(K[np.ix_(at, at)], 2.0 * y[at] - 1, np.ones(len(at)), svm.alpha.numpy(), svm.b)
        assert found < WRONG


def test_kernel_values_that_overflow_are_an_error_and_change_nothing():
    x, y = tensors(*problem(40))
    svm = IncrementalSVM(Linear(), C=1.0).fit(x, y)
    before = {name: value.clone() for name, value in svm.state_dict().items() if name != "R"}
    for call in (lambda: svm.add(x[:1] * 1e200, y[:1]), lambda: svm.add(x * 1e200, y), lambda: svm.fit(x * 1e200, y)):
        with pytest.raises(ValueError, match="infinite"):
            call()
        after = svm.state_dict()
        assert all(torch.equal(after[name], value) for name, value in before.items())


RAW = [("covtype", 1e-4), ("german", 1.0), ("wdbc", 100.0), ("msweb", 10.0), ("msweb", 1000.0)]


@pytest.mark.parametrize(
    ("name", "C"),
    [pytest.param(*case, marks=pytest.mark.data(NAMES[case[0]]), id=f"{case[0]}-{case[1]:g}") for case in RAW],
)
def test_raw_columns_are_solved_by_a_linear_kernel(name, C, data_path):
    """Columns that are thousands wide, or zero and one: solutions exist, and were given up after up to a minute."""
    x, y = FILES[name](np.random.default_rng(0), data_path, 250)
    start = time.process_time()
    svm = IncrementalSVM(Linear(), C=C).fit(*tensors(x, y))
    assert time.process_time() - start < 10.0
    assert units(x @ x.T, 2.0 * y - 1, np.full(len(y), C), svm.alpha.numpy(), svm.b) < WRONG


def test_a_sample_that_cannot_be_left_out_does_not_spoil_the_others(monkeypatch):
    x, y = tensors(*problem(80))
    svm = IncrementalSVM(RBF(sigma=1.0), C=2.0).fit(x, y)
    whole = svm.leave_one_out()
    monkeypatch.setattr(
        leave_one_out.Tableau, "margins", lambda _, samples: np.full(len(samples), np.nan)
    )  # all are left to the solver
    fails_once = Failing(ConvergenceError("no end"), at=3)
    with (
        replaced(leave_one_out.PathSolver, "solve_change", fails_once),
        pytest.warns(NumericalWarning, match="1 sample"),
    ):
        found = svm.leave_one_out()
    lost = found.margin.isnan()
    assert int(lost.sum()) == 1
    torch.testing.assert_close(found.margin[~lost], whole.margin[~lost], rtol=0, atol=1e-12)
    assert found.rate == float(whole.error[~lost].double().mean())


def test_the_span_rule_with_an_empty_margin_set_has_no_nan():
    x, _ = tensors(*problem(30))
    svm = IncrementalSVM(RBF(sigma=1.0), C=1e-3).fit(x, torch.arange(30) % 2)
    assert not len(svm.margin)
    found = svm.leave_one_out("span")
    assert not bool(found.margin.isnan().any())
    assert bool((found.margin[svm.alpha > 0] == -torch.inf).all())


def test_relabelling_a_forgotten_sample_is_an_error_that_loses_nothing():
    x, y = tensors(*problem(200))
    svm = IncrementalSVM(RBF(sigma=1.0), C=2.0, reserve_limit=0.3)
    ids = svm.add(x, y)
    gone = sorted(set(ids.tolist()) - set(svm.ids.tolist()))
    with pytest.raises(ValueError, match="forgotten"):
        svm.relabel(gone[:2], torch.tensor([0, 1]))
    svm.remove(gone[:2])  # still known


def test_nothing_of_a_removed_sample_stays_in_memory():
    x, y = tensors(*problem(120))
    svm = IncrementalSVM(RBF(sigma=1.0), C=2.0).fit(x, y)
    i = int(svm.margin[0])
    solver = svm._solver
    at = solver.samples.where[i]
    svm.remove([i])
    assert not solver.rows.gram.x[at].any()
    assert not solver.rows.gram._shifted[at].any()
    assert not solver.samples.vectors[:, at].any()
    assert not solver.margin.QS[:, at].any()
    assert solver.rows.gram.cache.row_of[at] == -1
    assert not solver.rows.gram.cache.rows[:, at].any()


def test_a_few_wide_rows_leave_the_others_as_they_were():
    """Samples far away are computed from differences, and only those: the block of all others is one product, to the bit."""
    x, y = problem(200)
    plain = IncrementalSVM(RBF(sigma=1.0), C=1.0).fit(*tensors(x, y))
    far = IncrementalSVM(RBF(sigma=1.0), C=1.0).fit(*tensors(x, y))
    far.add(*tensors(x[:3] + 1e3, y[:3]))
    at = np.arange(200)
    rows = far._solver.rows
    np.testing.assert_array_equal(rows.block(at, at), plain._solver.rows.block(at, at))
    z = np.concatenate([x, x[:3] + 1e3])
    K = np.exp(-0.5 * ((z[:, None] - z[None]) ** 2).sum(-1))
    sign = 2.0 * np.concatenate([y, y[:3]]) - 1
    np.testing.assert_allclose(rows.block(np.arange(203), np.arange(203)) * sign * sign[:, None], K, rtol=1e-13)


def test_rows_kept_from_before_know_samples_that_came_while_there_was_one_class():
    x, y = problem(60)
    first = np.concatenate([np.flatnonzero(y == 0)[:20], np.flatnonzero(y == 1)[:4]])
    svm = IncrementalSVM(Linear(), C=1.0).fit(*tensors(x[first], y[first]))
    svm.remove(svm.ids[20:])
    late = np.flatnonzero(y == 0)[20:24]
    svm.add(*tensors(x[late], y[late]))
    back = np.flatnonzero(y == 1)[:8]
    for i in back:
        svm.add(*tensors(x[i : i + 1], y[i : i + 1]))
    held = np.concatenate([first[:20], late, back])
    found = units(x[held] @ x[held].T, 2.0 * y[held] - 1, np.ones(len(held)), svm.alpha.numpy(), svm.b)
    assert found < WRONG
    gram = svm._solver.rows.gram
    kept = np.flatnonzero(gram.cache.row_of >= 0)
    np.testing.assert_allclose(gram.cache.rows[gram.cache.row_of[kept]], gram.block(kept), rtol=1e-12)


def test_kkt_violation_has_the_rounding_bound_beside_it():
    x, y = tensors(*problem(100))
    found = IncrementalSVM(Linear(), C=10.0).fit(x, y).kkt_violation()
    assert isinstance(found, float)
    assert 0.0 <= found < 100 * found.bound < 1e-9


def test_roundings_of_thousands_of_events_do_not_show():
    x, y = problem(160)
    y[::7] = 1 - y[::7]
    K, sign = np.exp(-0.1 * ((x[:, None] - x[None]) ** 2).sum(-1)), 2.0 * y - 1
    svm = IncrementalSVM(RBF(gamma=0.1), C=1.0).fit(*tensors(x, y))
    held = np.arange(160)
    for k in range(400):
        i = int(held[k])
        svm.remove([int(svm.ids[0])])  # the sample that has been held longest
        svm.add(*tensors(x[i : i + 1], y[i : i + 1]))
        held = np.append(held, i)
        now = held[k + 1 :]
        assert (
            units(K[np.ix_(now, now)], sign[now], np.ones(160), svm.alpha.numpy(), svm.b)
            < MAX_ROUNDING_UNITS + 4 * MAX_REST_ROUNDING_UNITS
        )
    assert svm.events > 2000


def test_roundings_are_removed_where_they_could_change_a_side():
    """Of three samples the same roundings matter at the margin, not to one well inside; in the end to that one too."""
    solver = PathSolver(None, torch.device("cpu"), 0)
    s, g = solver.samples, np.array([0.0, 1e-15, 0.5])
    s._set(np.zeros((len(VECTOR_NAMES), 3)))
    s.y[:], s.u[:], s.rest[:], s.root[:], s.g[:], s.side[1:] = 1.0, 1.0, 1.0, 1.0, g, 1.0
    limit = (MAX_REST_ROUNDING_UNITS * (2.0 + g)) ** 2  # b = 0
    for share, expected in (
        (0.9, []),
        (1.3, [0, 1]),
        (0.9 * CLEAR_SIDE_FACTOR**2, [0, 1]),
        (1.1 * CLEAR_SIDE_FACTOR**2, [0, 1, 2]),
        (np.inf, [0, 1, 2]),
    ):
        s.rounding[:] = share * limit
        assert solver.rounded_positions().tolist() == expected


@pytest.mark.parametrize("seed", range(6))
def test_the_path_of_C_on_data_full_of_ties(seed):
    """0/1 features: events tie; and between breakpoints the solution is linear, over four decades."""
    rng = np.random.default_rng(seed)
    x, y = rng.integers(0, 2, size=(60, 5)).astype(float), rng.integers(0, 2, 60)
    svm = IncrementalSVM(Linear(), C=(0.01, 0.02)).fit(*tensors(x, y))
    path = svm.regularization_path((100.0, 200.0))
    torch.testing.assert_close(path.C_per_class[:, 0] * 2.0, path.C, rtol=1e-9, atol=0)
    sign = 2.0 * y - 1
    for k in rng.integers(0, len(path.C) - 1, 10):
        share = rng.uniform(0.1, 0.9)
        C, alpha, b = (((1 - share) * v[k] + share * v[k + 1]).numpy() for v in (path.C_per_class, path.alpha, path.b))
        u = np.where(y > 0, C[1], C[0])
        alpha = np.where(alpha > u * (1 - 1e-9), u, np.where(alpha < 1e-9 * u, 0.0, alpha))
        assert kkt(x @ x.T, sign, u, alpha, b) < 1e-7


def test_the_values_that_b_can_have_are_in_order():
    for seed in range(60):
        rng = np.random.default_rng(seed)
        x, y = rng.integers(-2, 3, size=(6, 1)).astype(float), rng.integers(0, 2, 6)
        low, high = IncrementalSVM(Linear(), C=10.0 ** rng.integers(-2, 9)).fit(*tensors(x, y)).b_interval
        assert low <= high


def test_a_fit_does_not_depend_on_the_unit_of_the_data():
    x, y = problem(300)
    methods = []
    for unit in (1.0, 1e-9):
        svm = IncrementalSVM(Linear(), C=1.0 / unit**2).fit(*tensors(x * unit, y))
        methods.append((svm._solver.last_method, len(svm.error)))
    assert methods[0] == methods[1]
