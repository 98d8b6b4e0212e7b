"""The compiled steps are those of ``svm_path``, and everything works without them."""

import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st

from torchlssvm import IncrementalSVM
from torchlssvm.functional import loops, svm_path
from torchlssvm.kernels import RBF, Linear

pytest.importorskip("numba")
from torchlssvm.functional import svm_kernel_loops, svm_loops

SLOTS, COLUMNS, TOP = 11, 20, 9


class Case:
    """Margin vectors in slots, one of them free, and columns of samples outside."""

    def __init__(self, seed):
        r = np.random.RandomState(seed)
        self.r = r
        x = r.randn(COLUMNS, 6)
        self.y = np.where(r.rand(COLUMNS) < 0.5, -1.0, 1.0)
        self.x, self.Q = x, np.exp(-0.3 * ((x[:, None] - x) ** 2).sum(-1)) * np.outer(self.y, self.y)
        self.at = np.zeros(TOP, dtype=np.int64)
        self.used = np.zeros(TOP)
        self.free = int(r.randint(1, TOP))
        self.inside = [k for k in range(1, TOP) if k != self.free]
        self.at[self.inside] = r.permutation(COLUMNS)[: len(self.inside)]
        self.used[[0, *self.inside]] = 1.0
        self.A, self.R, self.QS = np.zeros((SLOTS, SLOTS)), np.zeros((SLOTS, SLOTS)), np.zeros((SLOTS, COLUMNS + 3))
        S, k = self.at[self.inside], self.inside
        self.A[0, k] = self.A[k, 0] = self.y[S]
        self.A[np.ix_(k, k)] = self.Q[np.ix_(S, S)]
        self.QS[0, :COLUMNS], self.QS[k, :COLUMNS] = self.y, self.Q[S]
        used = [0, *k]
        self.R[np.ix_(used, used)] = np.linalg.inv(self.A[np.ix_(used, used)])
        self.outside = next(i for i in range(COLUMNS) if i not in S)

    def vector(self, k=TOP):
        return self.r.randn(k)


seeds = st.integers(0, 10_000)


@given(seeds)
def test_sensitivities(seed):
    case = Case(seed)
    h = case.vector() * case.used
    h[0] = 1.0
    beta, rest = np.empty(TOP), np.empty(TOP)
    off = svm_loops.sensitivities(case.R, case.A, TOP, h, beta, rest)
    R, A = (torch.from_numpy(m[:TOP, :TOP]) for m in (case.R, case.A))
    truth, residual = svm_path.sensitivities(R, A, torch.from_numpy(h))
    np.testing.assert_allclose(beta, truth.numpy(), rtol=1e-9, atol=1e-11)
    assert off < 1e-10 > float(residual.abs().max())
    assert beta[case.free] == 0
    svm_loops.times(case.R, TOP, h, -1.0, rest)
    np.testing.assert_allclose(rest, beta, rtol=1e-9, atol=1e-9)
    row = case.Q[case.outside].copy()
    inner = svm_loops.span(case.R, TOP, case.at, case.used, row, case.y[case.outside], h, rest)
    np.testing.assert_array_equal(h[1:], (row[case.at] * case.used)[1:])
    np.testing.assert_allclose(rest, -case.R[:TOP, :TOP] @ h, rtol=1e-9, atol=1e-9)
    assert inner == pytest.approx(h @ rest, rel=1e-9, abs=1e-9)


@given(seeds, st.booleans())
def test_growing_and_shrinking(seed, carry):
    """(13) then (14), against inverses made anew; the sensitivities of a drive are carried along."""
    case = Case(seed)
    i, slot = case.outside, case.free
    row = case.Q[i].copy()
    border = row[case.at] * case.used
    border[0] = case.y[i]
    v = np.empty(TOP)
    svm_loops.times(case.R, TOP, border, -1.0, v)
    gamma = row[i] + border @ v
    assume(gamma > 1e-3)
    v[slot] = 1.0
    drive = case.vector(COLUMNS)
    h = drive[case.at] * case.used
    h[0] = 0.7
    beta = -case.R[:TOP, :TOP] @ h
    rate = drive[i] + border @ beta
    before = case.R.copy(), case.A.copy(), beta.copy()
    near, positions = np.zeros((SLOTS, 5)), np.arange(5, dtype=np.int64) * 2
    given_beta = beta if carry else np.empty(0)
    svm_loops.grow(case.R, case.A, case.QS, near, TOP, slot, i, row, border, v, gamma, positions, given_beta, rate)
    np.testing.assert_allclose(case.R[:TOP, :TOP], np.linalg.inv(case.A[:TOP, :TOP]), rtol=0, atol=1e-7)
    np.testing.assert_array_equal(case.A[slot, :TOP], case.A[:TOP, slot])
    np.testing.assert_array_equal(case.QS[slot, :COLUMNS], row)
    np.testing.assert_array_equal(near[slot], row[positions])
    if carry:
        h[slot] = drive[i]
        np.testing.assert_allclose(beta, -case.R[:TOP, :TOP] @ h, rtol=0, atol=1e-7)
    svm_loops.shrink(case.R, case.A, TOP, slot, given_beta)
    np.testing.assert_allclose(case.R, before[0], rtol=0, atol=1e-7)
    np.testing.assert_array_equal(case.A, before[1])
    np.testing.assert_allclose(beta, before[2], rtol=0, atol=1e-7)


@given(seeds, st.booleans(), st.sampled_from([1.0, 0.01]))
def test_a_step(seed, rising, most):
    """The first event, found by looking at each, and everything moved by as much."""
    case = Case(seed)
    beta, force = case.vector() * case.used, case.vector(COLUMNS)
    sign = case.r.choice([-1.0, 0.0, 1.0], COLUMNS)
    slack = np.where(sign == 0, np.inf, case.r.rand(COLUMNS) + 0.01)
    a = (0.1 + 0.8 * case.r.rand(TOP)) * case.used
    lower, upper = np.where(case.used > 0, 0.0, -np.inf), np.where(case.used > 0, 1.0, np.inf)
    lower[0], upper[0] = -np.inf, np.inf
    rise = case.vector() * (upper < np.inf) if rising else np.empty(0)
    gamma = np.empty(COLUMNS)
    old = a.copy(), slack.copy()
    args = (case.QS, TOP, COLUMNS, beta, force, slack, sign, a, lower, upper, rise, most, 1e-15, 1.0, gamma)
    code, index, t = svm_loops.advance(*args)
    np.testing.assert_allclose(gamma, force + case.QS[:TOP, :COLUMNS].T @ beta, rtol=0, atol=1e-12)
    steps = {("end", -1): most}
    for c in range(COLUMNS):
        if gamma[c] * sign[c] < 0:
            steps["margin", c] = old[1][c] / -(gamma[c] * sign[c])
    speed = rise if rising else np.zeros(TOP)
    for k in case.inside:
        if beta[k] > speed[k]:
            steps["error", k] = (1.0 - old[0][k]) / (beta[k] - speed[k])
        if beta[k] < 0:
            steps["reserve", k] = old[0][k] / -beta[k]
    first = min(steps, key=steps.get)
    assert ("end", "margin", "error", "reserve")[code] == first[0]
    assert index == first[1]
    assert t == pytest.approx(steps[first], rel=1e-12)
    np.testing.assert_allclose(a, old[0] + t * beta, rtol=0, atol=1e-13)
    np.testing.assert_allclose(slack, old[1] + t * gamma * sign, rtol=0, atol=1e-13)


def test_a_tie_or_a_rate_of_rounding_is_left_to_others():
    case = Case(0)
    args = {"beta": np.zeros(TOP), "force": np.ones(COLUMNS), "slack": np.ones(COLUMNS), "sign": np.ones(COLUMNS)}
    bounds = np.full(TOP, -np.inf), np.full(TOP, np.inf), np.empty(0)
    for where, value in (("slack", 1e-14), ("force", -1e-17)):
        given = {name: values.copy() for name, values in args.items()}
        given["force"][4] = -1.0
        given[where][4] = value
        before = given["slack"].copy()
        code, _, t = svm_loops.advance(
            case.QS, TOP, COLUMNS, *given.values(), np.zeros(TOP), *bounds, 1.0, 1e-15, 1.0, np.empty(COLUMNS)
        )
        assert (code, t) == (svm_loops.CAREFUL, 0.0)
        np.testing.assert_array_equal(given["slack"], before)


@given(seeds)
def test_what_is_left_of_the_conditions(seed):
    case = Case(seed)
    sign = np.ones(COLUMNS)
    sign[case.at[case.inside]] = 0.0
    alpha = np.where(case.r.rand(COLUMNS) < 0.4, 1.0, 0.0)
    a = case.vector() * case.used
    alpha[case.at[case.inside]] = a[case.inside]
    out = np.empty(TOP)
    largest = svm_loops.residual(case.QS, case.A, TOP, a, case.used, alpha, sign, out)
    g = case.Q @ alpha + case.y * a[0] - 1.0
    truth = g[case.at] * case.used
    truth[0] = case.y @ alpha
    np.testing.assert_allclose(out, truth, rtol=0, atol=1e-12)
    assert largest == abs(out).max()
    lower, upper = np.where(case.used > 0, -5.0, -np.inf), np.where(case.used > 0, 5.0, np.inf)
    lower[0], upper[0], delta, before = -np.inf, np.inf, np.empty(TOP), (a.copy(), alpha.copy())
    state = (a, lower, upper, case.used, case.at, alpha, sign)
    for much, near in ((0.0, 1.0), (1e3, -1.0)):  # too much is left; no box is wide enough
        assert not svm_loops.newton(case.QS, case.A, case.R, TOP, *state, much, 1.0, near, delta)
        assert np.array_equal(a, before[0])
        assert np.array_equal(alpha, before[1])
    assert svm_loops.newton(case.QS, case.A, case.R, TOP, *state, 1e3, 1.0, 1e9, delta)
    np.testing.assert_allclose(delta, -case.R[:TOP, :TOP] @ truth, rtol=1e-9, atol=1e-9)
    np.testing.assert_array_equal(a[1:], np.clip(before[0] + delta, -5.0, 5.0)[1:])
    np.testing.assert_array_equal(alpha[case.at[case.inside]], a[case.inside])
    a[:], alpha[:] = before
    moved = case.vector() * case.used
    slack = np.empty(COLUMNS)
    svm_loops.slacks(case.QS, TOP, moved, g, sign, slack)
    after = g + case.QS[:TOP, :COLUMNS].T @ moved
    np.testing.assert_allclose(slack, np.where(sign == 0, np.inf, sign * after), rtol=0, atol=1e-12)
    at = np.arange(0, COLUMNS, 3)
    near = [np.empty(len(at)) for _ in range(3)]
    svm_loops.look(at, slack, sign, truth_force := case.vector(COLUMNS), *near, g)
    for values, whole in zip(near, (slack, sign, truth_force), strict=True):
        np.testing.assert_array_equal(values, whole[at])
    np.testing.assert_allclose(g, np.where(sign == 0, 0.0, after), rtol=0, atol=1e-12)


@given(seeds)
def test_kernel_rows(seed):
    case = Case(seed)
    lift = np.concatenate([case.x, (case.x**2).sum(1, keepdims=True), np.ones((COLUMNS, 1))], 1)
    i, at = case.outside, np.array([3, 1, 4, 1], dtype=np.int64)
    for chosen in (at, np.empty(0, dtype=np.int64)):
        out = np.empty(len(chosen) or COLUMNS)
        svm_kernel_loops.gaussian(lift, i, 0.3, case.y, chosen, out)
        np.testing.assert_allclose(out, case.Q[i][chosen] if len(chosen) else case.Q[i], rtol=1e-12)
    sign, alpha = np.ones(COLUMNS), np.zeros(COLUMNS)
    sign[[0, 5]], alpha[[0, 5]] = -1.0, 0.5
    a = case.vector() * case.used
    rows, held = np.zeros((3, COLUMNS)), np.array([7, 2, 0], dtype=np.int64)
    case.QS[:, i] = np.nan
    g = svm_kernel_loops.newcomer(lift, i, 0.3, case.y, sign, alpha, case.at, case.used, a, case.QS, held, rows, 2)
    inner = case.Q[i][case.at] * case.used
    inner[0] = case.y[i]
    assert g == pytest.approx(inner @ a + case.Q[i] @ alpha - 1.0, abs=1e-12)
    if g >= 0:
        np.testing.assert_allclose(case.QS[:TOP, i], inner, rtol=0, atol=1e-14)
        np.testing.assert_allclose(rows[:, i], [case.Q[7, i], case.Q[2, i], 0.0], rtol=0, atol=1e-14)
    else:
        assert np.isnan(case.QS[:, i]).all()
        assert not rows.any()


@pytest.mark.parametrize("kernel", [RBF(sigma=1.5), Linear()], ids=["rbf", "linear"])
def test_the_answer_is_the_same_without(kernel, monkeypatch):
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(500, 4, generator=generator, dtype=torch.float64)
    y = (x[:, 0] + 0.3 * torch.randn(500, generator=generator) > 0).long()
    answers = []
    for name in ("svm_loops", "no module of this name"):
        real = loops.load
        for module in ("svm_slots", "svm_samples", "svm_near", "svm_run"):
            load = (lambda _: None) if name != "svm_loops" else real
            monkeypatch.setattr(f"torchlssvm.machines.{module}.load", load)
        svm = IncrementalSVM(kernel, C=3.0).fit(x[:450], y[:450])
        for i in range(450, 500):
            svm.add(x[i : i + 1], y[i : i + 1])
            svm.remove([i - 450])
        svm.set_C(4.0, method="path").remove(svm.ids[::7])
        assert svm.kkt_violation() < 1e-12
        answers.append(svm(x))
    torch.testing.assert_close(*answers, rtol=0, atol=1e-9)


def test_where_numba_is_not_installed():
    """The tests of the machine itself, in a process that cannot import it."""
    files = [
        "tests/test_incremental_svm.py",
        "tests/test_incremental_svm_near.py",
        "tests/test_incremental_svm_stateful.py",
    ]
    code = (
        "import sys; sys.modules['numba'] = None\n"
        "from torchlssvm.functional.loops import load\n"
        "assert load('svm_loops') is None\n"
        f"import pytest; sys.exit(pytest.main(['-q', '-n', '0', '-p', 'no:cacheprovider', *{files}]))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=Path(__file__).parents[1], capture_output=True, text=True, timeout=600
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-2000:]
    assert " passed" in done.stdout
